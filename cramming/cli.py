"""`cramming <verb> [overrides]`: one table of verbs, each a Hydra application on the one root configuration.

The verb's module is imported only when the verb runs, so `cramming`, `--help` and a typing mistake answer at once. A
user's mistake ends as one line on stderr and exit code 2, whether this code, Hydra or OmegaConf found it; anything else
that escapes is a defect of ours and keeps its traceback.
"""

import importlib
import io
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from cramming.children import end_with_parent, run_or_exit
from cramming.config import RootConfig, UserError, build, config_folder, expand_home, printable
from cramming.files import explain_os_error
from cramming.overrides import (
    CHECK,
    Words,
    compose,
    given_overrides,
    literal,
    one_line,
    parse,
    points_of,
)

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


class Verb(NamedTuple):
    """Where a verb's `main(config)` lives, and what it does."""

    module: str
    summary: str
    positional: str | None = None  # the setting that a word after the verb stands for
    lent: tuple[
        str, ...
    ] = ()  # what `main` gets besides: functions of packages that its own may not import
    several: bool = False  # torchrun may start it


VERBS = {
    "run": Verb("cramming.cli:run_all", "prepare, pretrain, glue and report, one after the other"),
    "prepare": Verb("data_prep.prepare:main", "turn text into a corpus of token shards"),
    "verify": Verb(
        "eval.verify:main",
        "check a run by the rules and its files, or a corpus folder by its SHA-256",
        "data.corpus",
        lent=("data_prep.again:embedded_tasks", "data_prep.again:overlap"),
    ),
    "inspect": Verb(
        "cramming.data.inspect:main", "what a corpus holds: counts, lengths, texts", "data.corpus"
    ),
    "plan": Verb(
        "cramming.plan.main:main",
        "predict memory and speed on a device; propose the fastest setting that fits",
    ),
    "pretrain": Verb(
        "cramming.launch:main",
        "train a masked language model inside a budget",
        lent=("eval.rules.table:foreseen",),
        several=True,
    ),
    "glue": Verb("eval.glue:main", "fine-tune and score on GLUE (or the embedded tasks)"),
    "duel": Verb(
        "eval.duel.main:main",
        "which of two recipes is better under one budget, by pairs of runs; duel ladder",
        "duel.what",
    ),
    "bench": Verb(
        "cramming.bench.main:main",
        "measure every trick's speed and memory, and judge what it learns",
    ),
    "study": Verb(
        "eval.extras.study:main",
        "runs of equal budget: vocab | data | architectures | schedules | batch | masking",
        "study.what",
    ),
    "project": Verb(
        "eval.extras.project:main",
        "predict the full budget from runs of one recipe with growing budgets",
        "runs",
    ),
    "replay": Verb(
        "cramming.replay:main",
        "train stretches of a run once more and compare: is its log what training gives?",
        "replay.run",
    ),
    "submit": Verb(
        "eval.submit:main", "judge a run and make the archive of it that others check", "submit.run"
    ),
    "report": Verb("eval.report.main:main", "leaderboard, plots and the check of the rules"),
    "export": Verb(
        "eval.export:main", "the finished model as a folder for transformers, with a model card"
    ),
}
UNREAD = "nobody reads the output any more; ended at that, what is written so far is whole; run again for the rest"
PEER_GONE = (  # as gloo and NCCL have it
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
)
SYSTEMS = {"Linux": "Linux", "Darwin": "macOS"}  # locks, signals and renames are POSIX's
PIPELINE = ("prepare", "pretrain", "glue", "report")


class Terminated(KeyboardInterrupt):
    """SIGTERM: what is under way is undone as with Ctrl-C. `pretrain` has a better answer once it trains."""


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def _send_again(ignored: "UnraisableHookArgs") -> None:
    """An interrupt that came inside a destructor or a callback from C ends nothing there: it is sent once more."""
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        number = _ending(ignored.exc_value)[1] - 128
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(ignored)


def usage() -> str:
    """The text of `cramming` alone."""
    lines = ["usage: cramming <verb> [setting=value ...]", "", "verbs:"]
    lines += [f"  {name:<10}{verb.summary}" for name, verb in VERBS.items()]
    lines += [
        "",
        f"{config_folder() / 'config.yaml'} and the groups beside it explain every setting.",
        "`cramming <verb> --help` lists the groups, `--cfg job` prints the settings in force,",
        "`--check` (run, prepare, pretrain, glue, report) only says whether settings and named files are in order,",
        "`--multirun` runs one job per combination of values, once all of them are in order, for example",
        "    cramming pretrain --multirun 'name=lr-${optim.lr}' optim.lr=1e-3,2e-3",
        'Shell completion: eval "$(cramming completion bash)"',
    ]
    return "\n".join(lines)


def main() -> None:
    """The console script: dispatch to a verb; exit code 0, 2 for a user's mistake, 130 for Ctrl-C, 143 for SIGTERM."""
    if (system := platform.system()) not in SYSTEMS:
        _fail(
            f"{system}: runs on {' and '.join(SYSTEMS.values())} only; on Windows take WSL2, which is Linux"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):  # it may be closed
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: any text can be shown
    verb, *rest = sys.argv[1:] or ["help"]
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if verb in ("-h", "--help", "help"):
        print(usage())
    elif verb == "--version":
        print(importlib.import_module("cramming").__version__)
    elif verb == "completion":
        with ending_in_one_line():
            print(
                importlib.import_module("cramming.completion").script(
                    rest[0] if rest else "bash", VERBS
                )
            )
    elif verb not in VERBS:
        _fail(f"unknown verb {verb!r}; the verbs are: {', '.join(VERBS)}")
    elif by_torchrun and not VERBS[verb].several:
        _fail(f"torchrun: {verb} is one process; start it as `cramming {verb} ...`")
    else:
        signal.signal(signal.SIGTERM, _terminate)
        if (
            by_torchrun and sys.platform == "linux"
        ):  # else a killed torchrun leaves its processes training
            end_with_parent(os.getppid())()
        sys.unraisablehook = _send_again
        with ending_in_one_line():
            run_verb(verb, rest)


@contextmanager
def ending_in_one_line(reader_has_gone: str = "") -> Iterator[None]:
    """A user's mistake, an interrupt or a full disk inside ends the process with one line; our own defects go on.

    `reader_has_gone`: what is said where nobody reads the output any more, as in `cramming ... | head`.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        _fail(*_ending(interrupt))
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
        behind: BaseException | None = error
        while behind is not None and not isinstance(behind, KeyboardInterrupt):
            behind = behind.__cause__ or behind.__context__
        if behind is None:
            raise
        # It came while a library was imported, which made an error of its own of it. What is half imported may
        # crash when the interpreter takes itself down.
        message, code = _ending(behind)
        print(f"cramming: {message}", file=sys.stderr, flush=True)
        os._exit(code)


def _ending(interrupt: KeyboardInterrupt) -> tuple[str, int]:
    """What is said at the end, and the exit code."""
    return (
        ("terminated", 128 + signal.SIGTERM)
        if isinstance(interrupt, Terminated)
        else ("interrupted", 130)
    )


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"cramming: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


def run_verb(verb: str, arguments: Sequence[str]) -> None:
    """Let Hydra compose the configuration and call the verb's `main(config)`; raises UserError."""
    words = parse(verb, with_positional(verb, arguments))
    if words.check and verb not in ("run", *PIPELINE):
        raise UserError(f"{CHECK}: is for the verbs run, {', '.join(PIPELINE)}")
    if "-sc" in words.flags and (line := os.environ.get("COMP_LINE")):
        importlib.import_module("cramming.completion").offer(verb, line)
    os.environ["HYDRA_FULL_ERROR"] = (
        "1"  # Hydra then raises instead of printing its own many lines and exiting
    )
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    composed = False

    def job(config: DictConfig) -> None:
        nonlocal composed
        composed = True
        with ending_in_one_line(UNREAD):
            try:
                settings = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
            except OmegaConfBaseException as error:
                _fail(one_line(error))
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                _call_verb(verb, settings, words)
            elif ended := without_model(verb, settings):
                from cramming.progress import say

                say(
                    f"name={settings['name']}: its run ended without a model ({ended}), so it is left out"
                )
            else:  # each job in a process of its own: its budget clock counts from the start of its process
                run_or_exit([verb, *given_overrides(), *[CHECK] * words.check])

    sys.argv = [f"cramming {verb}", *words.overrides, *words.flags]
    try:
        if words.multirun and verb in ("run", *PIPELINE):
            check_points(verb, points_of(words.overrides))
        hydra.main(config_path=str(config_folder()), config_name="config", version_base="1.3")(
            job
        )()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(one_line(error)) from None
    except (TypeError, ValueError) as error:
        if composed or isinstance(error, UserError | UnicodeError):
            raise
        raise UserError(  # Hydra falls over train=[1] and data.paths.x=3
            f"{' '.join(words.overrides)}: one of these has a form that its place cannot have ({one_line(error)}); a"
            " group takes the name of a choice, a list is set as a whole"
        ) from None


def check_points(verb: str, points: Sequence[list[str]]) -> None:
    """UserError for a mistake in any point of a multirun, before a day goes into those that come before it."""
    from cramming.record import refuse_finished_run, run_folder

    folders, trains = set[Path](), verb in ("run", "pretrain")
    for point in points:
        settings = compose(point)
        try:
            ended = without_model(verb, settings)
            if trains or not ended:
                check(verb, settings)
            if trains and not ended:
                refuse_finished_run(settings)
        except UserError as error:
            varied = [word for word in point if any(word not in other for other in points)]
            raise UserError(f"{' '.join(varied) or 'every point'}: {error}") from None
        if trains and run_folder(settings) in folders:
            raise UserError(
                f"name={settings['name']}: more than one point of the multirun has it; let it follow what varies, for"
                " example 'name=lr-${optim.lr}'"
            )
        folders.add(run_folder(settings))


def without_model(verb: str, settings: Mapping[str, Any]) -> str:
    """How a point of a multirun has ended that left no model, where the others are to go on; empty for all else, and
    where the run was another one, with other settings."""
    from cramming.record import WITHOUT_MODEL, is_run, load_record, run_folder

    scores_it = verb == "glue" and not settings["model_path"]
    if not scores_it and not (verb in ("run", "pretrain") and settings["resume"]):
        return ""
    folder = run_folder(settings)
    record = load_record(folder) if is_run(folder) else {}
    status = record.get("pretrain", {}).get("status")
    if status not in WITHOUT_MODEL:
        return ""
    changes = _load("cramming.resume:changed_settings")
    is_another = not scores_it and any(changes(record["config"], settings))
    return "" if is_another else str(status)


def with_positional(verb: str, arguments: Sequence[str]) -> list[str]:
    """`study vocab` is short for `study study.what=vocab`: the word right after the verb, where the verb has one. What
    exists is a path, whatever its name; as in a shell, `-x` is written `./-x`.
    """
    setting, rest = VERBS[verb].positional, list(arguments)
    word = rest[0] if rest else "-"
    if (
        setting is not None
        and not word.startswith(("-", "~"))
        and ("=" not in word or os.path.lexists(word))
    ):
        rest[0] = f"{setting}={word and literal(word)}"
    return rest


def _call_verb(verb: str, settings: dict[str, Any], words: Words) -> None:
    _check_root(settings)
    if words.check:
        check(verb, settings)
    elif verb == "run":
        run_all(settings, words.overrides)
    else:
        _load(VERBS[verb].module)(settings, *map(_load, VERBS[verb].lent))


def _load(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), function))


def _check_root(settings: dict[str, Any]) -> None:
    plain = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    for key in plain.keys() - RootConfig.__dataclass_fields__.keys():
        raise UserError(
            f"{key}={plain[key]}: is no setting; type those of a section as {key}.<name>=..., see --cfg job"
        )
    build(RootConfig, plain, "")


def check(verb: str, settings: dict[str, Any]) -> None:
    """UserError for what a verb, or each verb of `run`, would refuse in its turn; nothing is written."""
    _check_root(settings)
    verbs = _pipeline(settings) if verb == "run" else [verb]
    for name in verbs:
        importlib.import_module(VERBS[name].module.split(":")[0]).check(settings)
        if name != "report":
            _check_place(name, settings)
    if verb == "pretrain" and settings["data"]["corpus"]:
        _note_unchecked_corpus(settings)


def _check_place(verb: str, settings: dict[str, Any]) -> None:
    """UserError where the verb's folder cannot be made, or nothing in it."""
    from cramming.data.manifest import MANIFEST, corpus_folder
    from cramming.record import run_folder

    folder = (corpus_folder if verb == "prepare" else run_folder)(settings).absolute()
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    is_done = (
        verb == "prepare" and (folder / MANIFEST).is_file()
    )  # it may lie where nothing can be written
    if not is_done and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise UserError(
            f"{folder}: nothing can be made in {there}; get the right to, or give another place"
        )


def _note_unchecked_corpus(settings: dict[str, Any]) -> None:
    from cramming.data.manifest import MANIFEST, corpus_folder

    folder = corpus_folder(settings)
    if not (folder / MANIFEST).is_file():
        print(
            f"data.corpus={folder}: no finished corpus yet, so what it holds was not checked",
            file=sys.stderr,
        )


def _pipeline(settings: dict[str, Any]) -> list[str]:
    """The verbs of `run`: without `prepare` where a corpus is given."""
    from cramming.data.manifest import MANIFEST

    given = settings["data"]["corpus"]
    there = given and (expand_home(given, "data.corpus") / MANIFEST).exists()
    return [verb for verb in PIPELINE if not (there and verb == "prepare")]


def run_all(settings: dict[str, Any], overrides: Sequence[str]) -> None:
    """The verb `run`: the pipeline, each verb a process of its own, so that the budget clock sees only the training.

    First a process that checks them all: a mistake in what `glue` reads must not show after a day of training.
    """
    from cramming.record import refuse_finished_run

    refuse_finished_run(settings)
    if settings["model_path"]:
        raise UserError(
            f"model_path={settings['model_path']}: `run` scores the model that it trains; use `glue`"
        )
    run_or_exit(["run", *overrides, CHECK])
    for verb in _pipeline(settings):
        run_or_exit([verb, *overrides])
