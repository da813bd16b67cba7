"""The command line: the verbs with their options, and how a call ends.

typer reads the options, and Hydra composes the recipe behind them (cramming/overrides.py). A user's mistake ends as
one line on stderr and exit code 2, whoever found it. Anything else that escapes is a defect of ours and keeps its
traceback.
"""

import dataclasses
import importlib
import io
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer.exceptions import TyperException

from cramming.children import end_with_parent
from cramming.config import UserError, config_folder, expand_home, printable
from cramming.files import explain_os_error
from cramming.invocation import Call, DeviceKind, Invocation
from cramming.overrides import name_of, offer, search_path, setting

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

UNREAD = "nobody reads the output any more; ended at that, what is written so far is whole; run again for the rest"
PEER_GONE = (  # as gloo and NCCL have it
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
)
SYSTEMS = {"Linux": "Linux", "Darwin": "macOS"}  # locks, signals and renames are POSIX's
INTERRUPTED = 128 + signal.SIGINT
EVERYDAY, OTHERS = "Everyday verbs", "Other verbs"

app = typer.Typer(
    name="cramming",
    help="How good a BERT-style language model can one GPU train from scratch in one day?\n\n"
    "A recipe is given by Hydra overrides behind the options (experiment=best optim.lr=2e-3).",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _option(*names: str, text: str, **limits: Any) -> Any:
    return typer.Option(*names, help=text, **limits)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SETTING=VALUE",
        help="The recipe, as Hydra overrides of conf/.",
        autocompletion=offer,
    ),
]
ConfigDir = Annotated[
    Path | None,
    _option("--config-dir", text="Folder of YAML files of your own, beside those of conf/."),
]
ShowConfig = Annotated[bool, _option("--show-config", text="Print the composed recipe.")]
Check = Annotated[bool, _option("--check", text="Say what would run, and whether all is in order.")]
Sweep = Annotated[
    bool, _option("--sweep", text="Run each combination of several values (optim.lr=1e-3,2e-3).")
]
Name = Annotated[str, _option("--name", text="The run's name: its folder is <runs>/<name>.")]
Runs = Annotated[Path, _option("--runs", text="Folder of run folders.")]
Corpora = Annotated[Path, _option("--corpora", text="Folder of corpora.")]
Device = Annotated[DeviceKind, _option("--device", text="Device to compute on.")]
Resume = Annotated[
    bool, _option("--resume", text="Resume the run of this name, with its own recipe.")
]
Trackers = Annotated[
    list[str] | None,
    _option("--tracker", text="Copy losses to tensorboard or wandb, too. May be given twice."),
]
Nonce = Annotated[
    str | None,
    _option("--nonce", text="A referee's text that enters the seed: the run began after it."),
]
Model = Annotated[
    str | None, _option("--model", text="Hugging Face encoder, a folder or a name of the hub.")
]
CheckpointShare = Annotated[
    float | None,
    _option(
        "--checkpoint",
        text="Score the run's kept checkpoint at this share of its budget.",
        min=0,
        max=1,
    ),
]
Models = Annotated[
    list[str],
    _option("--model", text="Run folder, Hugging Face encoder or hub name. Several are compared."),
]
Json = Annotated[bool, _option("--json", text="Print one JSON object for programs.")]
Duels = Annotated[Path, _option("--duels", text="Folder of duels.jsonl and the duels' runs.")]
RunPath = Annotated[Path, typer.Argument(metavar="PATH", help="Folder of a run.")]
Out = Annotated[Path | None, _option("--out", text="Where the result is written.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, _option("--version", text="Print the version.", is_eager=True)
    ] = False,
) -> None:
    if version:
        print(importlib.import_module("cramming").__version__)
        raise typer.Exit


@app.command(rich_help_panel=EVERYDAY)
def run(
    context: typer.Context,
    overrides: Overrides = None,
    name: Name = Invocation.name,
    runs: Runs = Invocation.runs,
    corpora: Corpora = Invocation.corpora,
    device: Device = Invocation.device,
    resume: Resume = False,
    trackers: Trackers = None,
    nonce: Nonce = None,
    check: Check = False,
    sweep: Sweep = False,
    show_config: ShowConfig = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Prepare, pretrain, glue and report, one after the other."""
    return _call(context)


@app.command(rich_help_panel=EVERYDAY)
def prepare(
    context: typer.Context,
    overrides: Overrides = None,
    corpora: Corpora = Invocation.corpora,
    check: Check = False,
    sweep: Sweep = False,
    show_config: ShowConfig = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Turn text into a corpus of token shards."""
    return _call(context)


@app.command(rich_help_panel=EVERYDAY)
def pretrain(
    context: typer.Context,
    overrides: Overrides = None,
    name: Name = Invocation.name,
    runs: Runs = Invocation.runs,
    corpora: Corpora = Invocation.corpora,
    device: Device = Invocation.device,
    resume: Resume = False,
    trackers: Trackers = None,
    nonce: Nonce = None,
    check: Check = False,
    sweep: Sweep = False,
    show_config: ShowConfig = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Train a masked language model inside a budget."""
    return _call(context)


@app.command(rich_help_panel=EVERYDAY)
def glue(
    context: typer.Context,
    overrides: Overrides = None,
    name: Name = Invocation.name,
    model: Model = None,
    checkpoint: CheckpointShare = None,
    runs: Runs = Invocation.runs,
    corpora: Corpora = Invocation.corpora,
    device: Device = Invocation.device,
    check: Check = False,
    sweep: Sweep = False,
    show_config: ShowConfig = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Fine-tune and score a model on GLUE, or on the embedded tasks."""
    return _call(context)


@app.command(rich_help_panel=EVERYDAY)
def report(
    context: typer.Context,
    runs: Runs = Invocation.runs,
    out: Out = None,
    each_run: Annotated[
        bool, typer.Option(help="Also write a page into each run's folder.")
    ] = True,
    duels: Duels = Path("duels"),
    repository: Annotated[
        str | None, _option("--repository", text="Web address of the code, for links to commits.")
    ] = None,
) -> Call:
    """Write the leaderboard, plots and the check of the rules over all runs."""
    return _call(context)


@app.command(rich_help_panel=EVERYDAY)
def verify(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="Folder or archive of a run, or folder of a corpus."),
    ],
    tasks: Annotated[
        Path | None, _option("--tasks", text="GLUE folder: scores are computed again.")
    ] = None,
    corpus: Annotated[
        Path | None, _option("--corpus", text="The run's corpus, where it lies elsewhere now.")
    ] = None,
    weights: Annotated[
        Path | None, _option("--weights", text="Final weights, where they are not in the run.")
    ] = None,
    refinetune: Annotated[
        bool, _option("--refinetune", text="Fine-tune a task and seed again, drawn at random.")
    ] = False,
    overlap_seconds: Annotated[
        float, _option("--overlap-seconds", text="Limit of the search in the corpus.", min=0)
    ] = 60.0,
    json: Json = False,
) -> Call:
    """Check a run by the rules and its files, or a corpus by its hashes."""
    return _call(context)


@app.command(rich_help_panel=EVERYDAY)
def adapt(
    context: typer.Context,
    source: Annotated[
        str, _option("--from", text="The checkpoint: a model folder, or a name on the hub.")
    ],
    overrides: Overrides = None,
    general_text: Annotated[
        Path | None,
        _option("--general-text", text="Text file on which the model should not get worse."),
    ] = None,
    keep: Annotated[
        float | None,
        _option("--keep", text="Share of it in the training text.", min=0.001, max=0.999),
    ] = None,
    add_words: Annotated[
        int | None,
        _option("--add-words", text="Words of the text that get an entry of their own.", min=1),
    ] = None,
    tasks: Annotated[
        Path | None,
        _option("--tasks", text="File of own tasks, scored before and after (see `score`)."),
    ] = None,
    name: Name = Invocation.name,
    runs: Runs = Invocation.runs,
    corpora: Corpora = Invocation.corpora,
    device: Device = Invocation.device,
    resume: Resume = False,
    trackers: Trackers = None,
    check: Check = False,
    show_config: ShowConfig = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Train a published checkpoint further on your text, and say what it brought."""
    call = _call(context)
    options = dict(call.options)
    words = ("experiment=adapt", setting("start.path", options.pop("source")))
    invocation = dataclasses.replace(
        call.invocation, overrides=(*words, *call.invocation.overrides)
    )
    return dataclasses.replace(call, invocation=invocation, options=options)


@app.command(rich_help_panel=OTHERS)
def settings(
    context: typer.Context,
    section: Annotated[
        str | None, typer.Argument(metavar="SECTION", help="Only these, such as optim.")
    ] = None,
) -> Call:
    """Print the reference of a recipe's settings: values, defaults and meanings."""
    return _call(context)


@app.command(rich_help_panel=OTHERS)
def inspect(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of a corpus.")],
    split: Annotated[
        Literal["train", "validation"], _option("--split", text="Whose documents are shown.")
    ] = "train",
    documents: Annotated[
        int, _option("--documents", text="How many are shown, by their beginnings.", min=0)
    ] = 3,
    document: Annotated[
        int | None,
        _option("--document", text="Show the document of this number, all of it.", min=0),
    ] = None,
) -> Call:
    """Show what a corpus holds: counts, lengths, texts."""
    return _call(context)


@app.command(rich_help_panel=OTHERS)
def diagnose(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="Folder or archive of a run, or folder of a corpus."),
    ],
    corpus: Annotated[
        Path | None, _option("--corpus", text="The run's corpus, where it lies elsewhere now.")
    ] = None,
    json: Json = False,
) -> Call:
    """Name why a model does not learn: evidence, and the override that would change it."""
    return _call(context)


@app.command(rich_help_panel=OTHERS)
def measure(
    context: typer.Context,
    path: RunPath,
    corpus: Annotated[
        Path | None, _option("--corpus", text="The run's corpus, where it lies elsewhere now.")
    ] = None,
    device: Device = Invocation.device,
) -> Call:
    """Measure a final model: pseudo-perplexity of held-out text, speed and memory at inference."""
    return _call(context)


@app.command(rich_help_panel=OTHERS)
def plan(
    context: typer.Context,
    overrides: Overrides = None,
    device: Annotated[
        str,
        _option("--device", text='auto, cpu, cuda, or a card by name: "RTX 3060", 2080ti, A100.'),
    ] = "auto",
    memory_gb: Annotated[
        float | None, _option("--memory-gb", text="Memory of the device in GiB.", min=0.1)
    ] = None,
    price_per_hour: Annotated[
        float | None, _option("--price-per-hour", text="Price of the device.", min=0)
    ] = None,
    out: Out = None,
    show_config: ShowConfig = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Predict memory and speed on a device; propose the fastest setting that fits."""
    return _call(context)


@app.command(rich_help_panel=OTHERS)
def duel(
    context: typer.Context,
    base: Annotated[str, _option("--base", text="Overrides of this side, in one word.")],
    candidate: Annotated[str, _option("--candidate", text="Overrides of the other side.")],
    overrides: Overrides = None,
    pairs: Annotated[int, _option("--pairs", text="At most so many.", min=2, max=50)] = 8,
    first_look: Annotated[
        int, _option("--first-look", text="No verdict before so many pairs.", min=2)
    ] = 3,
    error: Annotated[
        float, _option("--error", text="Probability of a wrong verdict.", min=0.001, max=0.5)
    ] = 0.05,
    delta: Annotated[
        float, _option("--delta", text="A difference below is none (nats, or points).", min=0)
    ] = 0.01,
    glue: Annotated[bool, _option("--glue", text="Also fine-tune and score each run.")] = False,
    keep: Annotated[bool, _option("--keep", text="Keep the runs' weights.")] = False,
    duels: Duels = Path("duels"),
    corpora: Corpora = Invocation.corpora,
    device: Device = Invocation.device,
    json: Json = False,
    show_config: ShowConfig = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Find out which of two recipes is better under one budget, by pairs of runs."""
    return _call(context)


@app.command(rich_help_panel=OTHERS)
def ladder(context: typer.Context, duels: Duels = Path("duels"), json: Json = False) -> Call:
    """Show all duels of a folder, lost ones too."""
    return _call(context)


@app.command(rich_help_panel=OTHERS)
def study(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="architectures, batch, data, masking, schedules, vocab, pipelines, or a file of conf/study.",
        ),
    ],
    overrides: Overrides = None,
    name: Name = Invocation.name,
    runs: Runs = Invocation.runs,
    corpora: Corpora = Invocation.corpora,
    device: Device = Invocation.device,
    seeds: Annotated[str, _option("--seeds", text="Seeds of each variant: 0,1,2.")] = "0",
    vocab_sizes: Annotated[
        str, _option("--vocab-sizes", text="Vocabularies of the study vocab.")
    ] = "256,512,1024,2048",
    stages: Annotated[int, _option("--stages", text="Stages of the study pipelines.", min=1)] = 3,
    glue: Annotated[
        bool | None,
        typer.Option(help="Also fine-tune; by default where losses are of several texts."),
    ] = None,
    out: Out = None,
    show_config: ShowConfig = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Compare variants, one run of equal budget for each and seed."""
    return _call(context)


@app.command(rich_help_panel=OTHERS)
def project(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="RUNS", help="Folder of run folders.")],
    names: Annotated[
        str | None, _option("--names", text="Of the runs of one recipe: a,b,c.")
    ] = None,
    hours: Annotated[
        float, _option("--hours", text="The full budget, at the longest run's speed.", min=0.001)
    ] = 24.0,
    exaflops: Annotated[
        float | None, _option("--exaflops", text="The same in model compute.", min=0)
    ] = None,
    out: Out = None,
    json: Json = False,
) -> Call:
    """Predict the full budget from runs of one recipe with growing budgets."""
    return _call(context)


@app.command(rich_help_panel=OTHERS)
def replay(
    context: typer.Context,
    path: RunPath,
    overrides: Overrides = None,
    intervals: Annotated[
        str, _option("--intervals", text="How many are drawn at random, or all.")
    ] = "1",
    seed: Annotated[
        int | None, _option("--seed", text="Of the draw; by default another each time.", min=0)
    ] = None,
    corpora: Corpora = Invocation.corpora,
    device: Device = Invocation.device,
    json: Json = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Train intervals of a run a second time and compare the results with its log."""
    return _call(context)


@app.command(rich_help_panel=OTHERS)
def submit(
    context: typer.Context,
    path: RunPath,
    out: Out = None,
    weights_url: Annotated[
        str | None, _option("--weights-url", text="Where the final weights are published.")
    ] = None,
) -> Call:
    """Check a run by the rules and write the archive of it that others verify."""
    return _call(context)


@app.command(rich_help_panel=OTHERS)
def export(
    context: typer.Context,
    overrides: Overrides = None,
    name: Name = Invocation.name,
    model: Model = None,
    family: Annotated[
        str | None,
        _option("--as", text="Distil into this model of transformers first: bert, modernbert."),
    ] = None,
    runs: Runs = Invocation.runs,
    out: Out = None,
    license: Annotated[
        str | None, _option("--license", text="Of the weights, such as apache-2.0.")
    ] = None,
    language: Annotated[
        str | None, _option("--language", text="Of the corpus, such as en.")
    ] = None,
    test: Annotated[
        bool, _option("--test", text="Load the folder in every installed client.")
    ] = False,
    python: Annotated[
        str | None,
        _option("--python", text="Python of the environment whose clients --test loads."),
    ] = None,
    device: Device = Invocation.device,
    resume: Resume = False,
    check: Check = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Write the finished model as a folder for transformers, with a model card."""
    call = _call(context)
    options = {**call.options, "invocation": call.invocation, "check": call.check}
    return dataclasses.replace(call, has_recipe=False, options=options)


@app.command(rich_help_panel=OTHERS)
def score(
    context: typer.Context,
    tasks_file: Annotated[
        Path, typer.Argument(metavar="TASKS", help="YAML file of your tasks and GLUE's.")
    ],
    model: Models,
    checkpoint: CheckpointShare = None,
    overrides: Overrides = None,
    device: Device = Invocation.device,
    out: Out = None,
    show_config: ShowConfig = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Compare encoders on labelled data of your own, with baselines and p-values."""
    call = _call(context)
    words = call.invocation.overrides
    if {name_of(word) for word in words} & {"eval", "experiment"}:
        return call
    invocation = dataclasses.replace(call.invocation, overrides=("eval=own_tasks", *words))
    return dataclasses.replace(call, invocation=invocation)


@app.command(rich_help_panel=OTHERS)
def bench(
    context: typer.Context,
    overrides: Overrides = None,
    only: Annotated[
        str | None, _option("--only", text="Names of rows, separated by semicolons.")
    ] = None,
    rounds: Annotated[int, _option("--rounds", text="Turns of each pair.", min=1)] = 3,
    steps: Annotated[int, _option("--steps", text="Steps per turn.", min=1)] = 4,
    vocab_size: Annotated[int, _option("--vocab-size", text="Of what is timed.", min=10)] = 32768,
    gate_steps: Annotated[
        int, _option("--gate-steps", text="Steps of the loss curves that are compared.", min=1)
    ] = 200,
    gate_vocab_size: Annotated[
        int, _option("--gate-vocab-size", text="Of the loss curves.", min=10)
    ] = 512,
    gate: Annotated[
        str, _option("--gate", text="Overrides of the loss curves.")
    ] = "model.hidden_size=64 model.num_layers=3 model.num_heads=2 model.intermediate_size=128"
    " train.batch_size=16 train.micro_batch=16 train.sequence_length=64 optim.lr=3.0e-3",
    out: Annotated[Path, _option("--out", text="File of the tables.")] = Path("bench/tricks.md"),
    raw: Annotated[Path, _option("--raw", text="Folder of the raw numbers.")] = Path("bench"),
    device: Device = Invocation.device,
    show_config: ShowConfig = False,
    config_dir: ConfigDir = None,
) -> Call:
    """Measure every trick's speed and memory, and judge what it learns."""
    return _call(context)


def _call(context: typer.Context) -> Call:
    """Return the call with the options of a verb; UserError for an option that was typed as a setting."""
    verb = str(context.info_name)
    values = dict(context.params)
    flags = {str(each.name): each.opts[0] for each in context.command.params}
    for name, value in values.items():
        if isinstance(value, Path):  # which a shell leaves as it is in --out=~/x
            values[name] = expand_home(value, flags[name])
    words = tuple(values.pop("overrides", None) or ())
    has_recipe = any(parameter.name == "overrides" for parameter in context.command.params)
    if not has_recipe:
        return Call(verb, Invocation(), values, has_recipe=False)
    _refuse_options_as_settings(context, flags, words)
    config_dir = values.pop("config_dir")
    if config_dir is not None:
        words = (search_path(config_dir), *words)
    actions = {name: values.pop(name, False) for name in ("check", "sweep", "show_config")}
    fields = {each.name for each in dataclasses.fields(Invocation)} & values.keys()
    if verb == "plan":
        fields.remove("device")
    shared = {name: values.pop(name) for name in fields}
    if "trackers" in shared:
        shared["trackers"] = tuple(shared["trackers"] or ())
    return Call(verb, Invocation(overrides=words, **shared), values, **actions)


def _refuse_options_as_settings(
    context: typer.Context, flags: Mapping[str, str], words: tuple[str, ...]
) -> None:
    """Raise UserError for `name=a`, which is typed `--name a`."""
    for word in words:
        name = name_of(word).removeprefix(f"{context.info_name}.")
        flag = flags.get(name, "")
        # such as `model`, which `run` hands on to `glue`
        is_group = (config_folder() / name).is_dir()
        if flag.startswith("--") and "=" in word and not is_group:
            value = word.partition("=")[2]
            meant = flag if value.lower() == "true" else f"{flag} {value}"
            raise UserError(f"{word}: an option, not a setting. Did you mean {meant}?")


class Terminated(KeyboardInterrupt):
    """SIGTERM: work is undone as with Ctrl-C. `pretrain` has a better answer once it trains."""


def main() -> None:
    """Run the console script: exit code 0, 2 for a user's mistake, 130 for Ctrl-C, 143 for SIGTERM."""
    system = platform.system()
    if system not in SYSTEMS:
        _fail(
            f"{system}: runs on {' and '.join(SYSTEMS.values())} only. On Windows take WSL2, which is Linux."
        )
    if isinstance(sys.stdout, io.TextIOWrapper):  # it may be closed
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: any text can be shown
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    with ending_in_one_line():
        call = parse(sys.argv[1:])
    if call is None:
        return
    if by_torchrun and call.verb != "pretrain":
        _fail(f"torchrun: {call.verb} is one process. Start it as `cramming {call.verb} ...`.")
    signal.signal(signal.SIGTERM, _terminate)
    if by_torchrun and sys.platform == "linux":
        # A killed torchrun would otherwise leave its processes training.
        end_with_parent(os.getppid())()
    sys.unraisablehook = _send_again
    with ending_in_one_line(UNREAD):
        importlib.import_module("cramming.verbs").run(call)


def parse(words: list[str]) -> Call | None:
    """Return the call that was typed, None where help or the like was printed; UserError for mistakes."""
    try:
        call = app(words or ["--help"], prog_name="cramming", standalone_mode=False)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "cramming"
        problem = error.format_message().rstrip(".")
        raise UserError(f"{problem}. `{path} --help` shows what there is.") from None
    if call == INTERRUPTED:  # typer makes an exit code of a Ctrl-C
        raise KeyboardInterrupt
    return call if isinstance(call, Call) else None


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def _send_again(ignored: "UnraisableHookArgs") -> None:
    """Send an interrupt again that came inside a destructor or a callback from C, where it ends nothing."""
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        number = _ending(ignored.exc_value)[1] - 128
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(ignored)


@contextmanager
def ending_in_one_line(reader_has_gone: str = "") -> Iterator[None]:
    """End the process with one line at a user's mistake, an interrupt or a full disk; our own defects go on.

    `reader_has_gone`: what is said where nobody reads the output any more, as in `cramming ... | head`.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        _fail(*_ending(interrupt))
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if reader_has_gone:
            _fail(reader_has_gone, 128 + signal.SIGPIPE)
        sys.exit(128 + signal.SIGPIPE)
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        _fail(str(explain_os_error(error, "a file in use")))
    except Exception as error:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in PEER_GONE):
            _fail("another process of this run has ended, see what it said; this one ends with it")
        _end_at_hidden_interrupt(error)
        raise


def _end_at_hidden_interrupt(error: BaseException) -> None:
    """End the process where an interrupt is the cause of an error.

    It came while a library was imported, which made an error of its own of it. What is half imported may crash when
    the interpreter takes itself down.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        message, code = _ending(cause)
        print(f"cramming: {message}", file=sys.stderr, flush=True)
        os._exit(code)


def _ending(interrupt: KeyboardInterrupt) -> tuple[str, int]:
    """Return what is said at the end, and the exit code."""
    if isinstance(interrupt, Terminated):
        return "terminated", 128 + signal.SIGTERM
    return "interrupted", INTERRUPTED


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"cramming: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)
