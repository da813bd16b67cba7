"""The verb `duel`: a sequential comparison of two recipes under one budget.

Both runs of a pair have one seed, data order and validation; after each pair a sequential test (sequential_test.py)
decides whether more are needed. The measure is the pinned validation loss, or bits per byte if the tokenizers differ,
or the mean score over the tasks of `eval` if an objective has no such loss. Results are in `duels.jsonl`
(duel_log.py); `cramming ladder` shows them.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cramming.budget import limits_of
from cramming.children import run_or_exit
from cramming.config import UserError, require, settings_hash
from cramming.data.manifest import MANIFEST, Manifest, corpus_folder
from cramming.environment import git_state
from cramming.files import lock
from cramming.invocation import DeviceKind, Invocation
from cramming.objectives import OBJECTIVES
from cramming.overrides import compose, name_of, with_implied
from cramming.progress import say, show_table, use_stderr
from cramming.record_schema import finite
from cramming.verbs import OPTIONS, check
from eval.duel import ladder, sides
from eval.duel.duel_log import (
    Configuration,
    Decision,
    Duel,
    DuelLog,
    Measure,
    PairResult,
    PairStart,
    SideTerms,
    Terms,
)
from eval.duel.sequential_test import RULE
from eval.duel.sides import Side
from eval.recipe import Recipe, compared, recipe

# Settings that cost time of the budget, and must be equal for both sides.
TIMED_SETTINGS = (
    ("train", "validations"),
    ("train", "validation_tokens"),
    ("train", "log_every"),
    ("checkpoint", "every_minutes"),
    ("checkpoint", "every_steps"),
)
# Settings that decide the number of tokens in a step.
STEP_SIZE_SETTINGS = (("train", "batch_size"), ("train", "sequence_length"))


@dataclass(frozen=True)
class DuelConfig:
    """Options of a duel. `base` and `candidate` are overrides of one side each, as on a command line."""

    base: str
    candidate: str
    pairs: int
    first_look: int
    error: float
    delta: float
    glue: bool
    keep: bool
    duels: Path
    json: bool

    def __post_init__(self) -> None:
        require(
            self.first_look <= self.pairs,
            f"--first-look={self.first_look}: above --pairs={self.pairs}. Lower it.",
        )
        require(
            self.duels.is_dir() or not self.duels.exists(),
            f"--duels={self.duels}: is a file. Give a folder.",
        )


class Opponent(NamedTuple):
    """Overrides of one side, and the settings composed from them."""

    overrides: list[str]
    settings: dict[str, Any]


Opponents = Sequence[Opponent]  # base and candidate, in this order


def main(recipe: dict[str, Any], invocation: Invocation, **options: Any) -> None:
    """Run the verb `duel`; `options` are those of `DuelConfig`."""
    config = DuelConfig(**options)
    if config.json:
        use_stderr()
    log = DuelLog(config.duels)
    opponents = read_opponents(config, invocation.overrides)
    cores, device = cores_and_device(invocation.device)
    opponents = with_comparable_budgets(opponents, cores)
    check_sides(opponents, config, invocation)
    scores_decide = needs_scores(opponents, config.glue)
    prepare(opponents, invocation, config.json)
    settings = [side.settings for side in opponents]
    folders = [corpus_folder(side, invocation.corpora) for side in settings]
    measure: Measure = "score" if scores_decide else measure_of(settings, folders)
    seed = int(recipe["seed"])
    rule = {name: getattr(config, name) for name in RULE}
    rule |= {"measure": measure, "seed": seed}
    hashes = [settings_hash(compared(side)) for side in settings]
    corpora = [Manifest.load(folder / MANIFEST).sha256() for folder in folders]
    scored = [side["eval"] for side in settings] if config.glue else None
    duel_id = settings_hash(hashes, corpora, rule, scored, device)
    known = log.duels().get(duel_id)
    is_decided = known is not None and known.decision is not None
    # A decided duel is only printed, which needs no lock and works while another duel is fought.
    guard = nullcontext() if is_decided else lock(config.duels, "fighting a duel", "wait for it")
    with guard:
        if duel_id not in log.duels():
            check_seeds(log, settings, corpora, device, range(seed, seed + config.pairs))
            begin(log, duel_id, opponents, hashes, {**rule, "corpora": corpora}, device)
        fight(log, duel_id, cores, opponents, config, invocation, seed)


def read_opponents(config: DuelConfig, overrides: Sequence[str]) -> Opponents:
    """Return the settings of both sides: the shared overrides, and then those of the side."""
    shared = [word for word in overrides if name_of(word) != "seed"]
    opponents = [
        _opponent("base", shared, config.base),
        _opponent("candidate", shared, config.candidate),
    ]
    require(
        compared(opponents[0].settings) != compared(opponents[1].settings),
        f"--candidate='{config.candidate}': the base has the same settings. Give what differs.",
    )
    return opponents


def _opponent(name: str, shared: Sequence[str], text: str) -> Opponent:
    try:
        words = shlex.split(text)
    except ValueError as error:  # quotes that do not close
        raise UserError(f"--{name}={text}: {error}") from None
    try:
        # A limit in one unit replaces a shared limit in another: budget.steps also drops budget.hours.
        limits = [word for word in with_implied(words) if word.startswith("budget.")]
        typed = {name_of(word) for word in (*words, *limits)}
        forbidden = [word for word in words if name_of(word) == "seed"]
        require(
            not forbidden,
            f"{' '.join(forbidden)} is for the whole duel. Write it outside --{name}.",
        )
        overrides = [word for word in shared if name_of(word) not in typed] + words
        return Opponent(overrides, compose(overrides))
    except UserError as error:
        raise UserError(f"--{name}: {error}") from None


def cores_and_device(device: DeviceKind) -> tuple[list[int], str]:
    """Return one core for each side, and the device's name; no cores if the sides train one after the other."""
    from cramming.device import describe, select

    described = describe(select(device))
    cores: list[int] = []
    if hasattr(os, "sched_getaffinity"):  # otherwise processes cannot be pinned
        cores = sorted(os.sched_getaffinity(0))
    if described.kind != "cpu" or len(cores) < 2:
        return [], described.name
    return cores[:2], described.name


def with_comparable_budgets(opponents: Opponents, cores: Sequence[int]) -> Opponents:
    """Return the opponents, with the CPU clock if both train at once; raise UserError if budgets do not compare."""
    if cores:
        opponents = [_with_cpu_clock(side) for side in opponents]
    settings = [side.settings for side in opponents]
    names = list(TIMED_SETTINGS)
    if settings[0]["budget"]["steps"] is not None:  # equal steps are equal work only at one size
        names += STEP_SIZE_SETTINGS
    for section, name in names:
        base_value, candidate_value = (side[section][name] for side in settings)
        require(
            base_value == candidate_value,
            f"{section}.{name}: {base_value} and {candidate_value} differ. Set one value for both sides.",
        )
    base, candidate = (limits_of(side["budget"]) for side in settings)
    have_one_unit = base.keys() == candidate.keys()
    require(
        have_one_unit and all(candidate[unit] <= limit for unit, limit in base.items()),
        f"duel: the base has budget.{_limits_text(base)} and the candidate budget.{_limits_text(candidate)}. Give the"
        " candidate at most the budget of the base, in the same unit.",
    )
    return opponents


def _with_cpu_clock(side: Opponent) -> Opponent:
    settings = side.settings | {"budget": {**side.settings["budget"], "clock": "cpu"}}
    return Opponent([*side.overrides, "budget.clock=cpu"], settings)


def _limits_text(limits: Mapping[Any, float]) -> str:
    return " ".join(f"{unit}={value:.4g}" for unit, value in limits.items())


def check_sides(opponents: Opponents, config: DuelConfig, invocation: Invocation) -> None:
    """Raise UserError for settings of a side that a verb would refuse for a new run."""
    verbs = ("pretrain", "glue") if config.glue else ("pretrain",)
    for name, side in zip(("base", "candidate"), opponents):
        try:
            for verb in verbs:
                check(verb, side.settings, replace(invocation, name=name, runs=config.duels))
        except UserError as error:
            raise UserError(f"--{name}: {error}") from None


def needs_scores(opponents: Opponents, glue: bool) -> bool:
    """Return whether a side's objective has no pinned loss, so that scores decide; raise UserError if they cannot."""
    names = [side.settings["objective"]["name"] for side in opponents]
    without_loss = [name for name in names if not OBJECTIVES[name].has_masked_lm]
    if not without_loss:
        return False
    require(
        glue,
        f"duel: objective={without_loss[0]} has no masked-LM loss to compare, so scores decide. Add --glue.",
    )
    first, second = (side.settings["eval"] for side in opponents)
    require(
        first == second,
        "duel: scores decide, but the sides are fine-tuned with different settings. Set eval for both.",
    )
    return True


def prepare(opponents: Opponents, invocation: Invocation, quietly: bool) -> None:
    """Prepare the corpora that do not exist; with `quietly`, the messages go to stderr."""
    for overrides, side in opponents:
        if not (corpus_folder(side, invocation.corpora) / MANIFEST).exists():
            words = replace(invocation, overrides=tuple(overrides)).arguments(*OPTIONS["prepare"])
            run_or_exit(["prepare", *words], stdout=sys.stderr.fileno() if quietly else None)


def measure_of(
    settings: Sequence[Mapping[str, Any]], corpora: Sequence[Path]
) -> Literal["loss", "bits_per_byte"]:
    """Return the measure that decides: the pinned loss with one tokenizer, else bits per byte.

    Raises UserError if the validation texts differ.
    """
    first, second = (
        Manifest.load(_validation_folder(side, corpus) / MANIFEST)
        for side, corpus in zip(settings, corpora, strict=True)
    )
    same_tokenizer = first.tokenizer.sha256 == second.tokenizer.sha256
    require(
        first.tokenizer.lowercase == second.tokenizer.lowercase,
        "duel: one side's tokenizer keeps upper case and the other's does not, so they predict different text. Set"
        " tokenizer.lowercase for both.",
    )
    texts = [_text_of(manifest, same_tokenizer) for manifest in (first, second)]
    require(
        texts[0] == texts[1],
        "duel: the sides are validated on different text. Set one train.validation_corpus for both, which needs one"
        " tokenizer.",
    )
    return "loss" if same_tokenizer else "bits_per_byte"


def _validation_folder(side: Mapping[str, Any], corpus: Path) -> Path:
    other = side["train"]["validation_corpus"]
    return Path(other).expanduser() if other else corpus


def _text_of(manifest: Manifest, same_tokenizer: bool) -> Any:
    """Return a key that is equal for equal held-out texts.

    With one tokenizer these are the hashes of its shards. With two the shards differ, and the key is what decides the
    text: source files, settings of section `data`, and documents per shard.
    """
    if same_tokenizer:
        return [shard.sha256 for shard in manifest.splits["validation"]]
    files = []
    for source in manifest.sources:
        files.append({key: value for key, value in source.items() if key != "mtime_ns"})
    documents = [shard.documents for shard in manifest.splits["validation"]]
    return files, manifest.settings.get("data"), documents


def check_seeds(
    log: DuelLog,
    settings: Sequence[Mapping[str, Any]],
    corpora: Sequence[str],
    device: str,
    seeds: Sequence[int],
) -> None:
    """Raise UserError if the same two recipes were compared before with one of these seeds.

    The results of these seeds are known, so the test's options could be chosen to get a wanted verdict from them.
    The ladder's bound on wrong verdicts, the sum of the duels' errors, would then not hold.
    """
    configurations = log.configurations()
    now = list(map(_recipe, settings, corpora))
    for duel in log.duels().values():
        terms = duel.terms
        used_seeds = range(terms.seed, terms.seed + len(duel.pairs))
        earlier_settings = [configurations[side.hash] for side in (terms.base, terms.candidate)]
        before = list(map(_recipe, earlier_settings, terms.corpora))
        is_same = set(before) == set(now) and terms.device == device
        if not is_same or not set(used_seeds) & set(seeds):
            continue
        words = f"seed {used_seeds.start}"
        if len(used_seeds) > 1:
            words = f"seeds {used_seeds.start} to {used_seeds.stop - 1}"
        how = "with base and candidate exchanged"
        if before == now:
            how = "under another rule or fine-tuning"
        raise UserError(
            f"duel: the same sides met in duel {duel.id} with {words}, {how}."
            f" Set seed={used_seeds.stop}, or repeat the settings of that duel to see its result."
        )


def _recipe(settings: Mapping[str, Any], corpus: str) -> tuple[Recipe, str]:
    return recipe(settings, corpus), str(limits_of(settings["budget"]))


def begin(
    log: DuelLog,
    duel_id: str,
    opponents: Opponents,
    hashes: Sequence[str],
    rule: Mapping[str, Any],
    device: str,
) -> None:
    """Append the events of a new duel.

    `rule` has the settings of the test, the measure, the first seed and the SHA-256 of both corpora.
    """
    for sha256, side in zip(hashes, opponents, strict=True):
        if sha256 not in log.configurations():
            log.append(Configuration(hash=sha256, settings=compared(side.settings)))
    sides = [
        SideTerms(hash=sha256, overrides=list(side.overrides))
        for sha256, side in zip(hashes, opponents, strict=True)
    ]
    budgets = [side.settings["budget"] for side in opponents]
    terms = Terms(
        id=duel_id,
        base=sides[0],
        candidate=sides[1],
        **rule,
        device=device,
        clock=budgets[0]["clock"],
        budgets=(dict(limits_of(budgets[0])), dict(limits_of(budgets[1]))),
        code=code(),
    )
    log.append(terms)


def code() -> dict[str, Any]:
    """Return the commit that the sides run, and the hash of uncommitted changes."""
    state = git_state()
    return {key: state[key] for key in ("commit", "dirty", "diff_sha256")}


def fight(
    log: DuelLog,
    duel_id: str,
    cores: Sequence[int],
    opponents: Opponents,
    config: DuelConfig,
    invocation: Invocation,
    seed: int,
) -> None:
    """Run pairs until the test has a verdict, and print it; an existing verdict is printed at once."""
    duel = log.duels()[duel_id]
    for count in range(1, len(duel.pairs) + 1):
        say_pair(duel, count)
    while not decide(
        log, duel
    ):  # first for the logged pairs: a kill may have prevented their verdict
        require(
            duel.terms.code == code(),
            f"duel {duel_id}: began with commit {duel.terms.code['commit']}, but the code differs now. Check that"
            " commit out to continue, or begin another duel with seed=<another>.",
        )
        log.append(PairStart(id=duel_id, seed=seed + len(duel.pairs)))
        fight_pair(log, duel_id, cores, opponents, config, invocation, seed + len(duel.pairs))
        duel = log.duels()[duel_id]
        say_pair(duel, len(duel.pairs))
    duel = log.duels()[duel_id]
    say(ladder.sentence(duel))
    if not config.json:
        show_table(f"duel {duel_id}", ladder.HEADERS, [ladder.row(duel)])
        return
    pairs = [pair.model_dump(mode="json") for pair in duel.pairs]
    print(json.dumps({**ladder.summary(duel), "pairs": pairs}), flush=True)


def decide(log: DuelLog, duel: Duel) -> bool:
    """Return whether the duel has a verdict; append one to the log if its pairs decide it."""
    if duel.decision is not None:
        return True
    failed = failure(duel)
    if failed is not None:
        side, why = failed
        verdict: Literal["loss", "void"] = "loss" if side == "candidate" else "void"
        log.append(Decision(id=duel.id, verdict=verdict, why=why))
        return True
    look = duel.test.look(duel.differences())
    if look.over:
        log.append(Decision(id=duel.id, **finite(asdict(look))))
    return look.over


def fight_pair(
    log: DuelLog,
    duel_id: str,
    cores: Sequence[int],
    opponents: Opponents,
    config: DuelConfig,
    invocation: Invocation,
    seed: int,
) -> None:
    """Train both sides with this seed, score them if configured, and log the result."""
    base, candidate = (
        Side(
            replace(
                invocation,
                name=f"{side}-{seed}",
                runs=config.duels / duel_id,
                overrides=(*opponent.overrides, f"seed={seed}"),
            )
        )
        for side, opponent in zip(("base", "candidate"), opponents, strict=True)
    )
    turned = (
        seed % 2 == 1
    )  # each side then has the other core, or the sides train in the other order
    order = [candidate, base] if turned else [base, candidate]
    sides.train(order, cores, f"duel {duel_id}, seed {seed}")
    if config.glue:
        order = [
            side.with_overrides("eval.init=[pretrained]", "eval.baselines=false") for side in order
        ]
        sides.score(order, cores, f"duel {duel_id}, seed {seed}: fine-tuning")
    result = PairResult(
        id=duel_id,
        seed=seed,
        turned=turned,
        code=code(),
        base=base.result(),
        candidate=candidate.result(),
    )
    if not config.keep:  # before the event is logged: no later call opens the runs of a logged pair
        base.drop_weights()
        candidate.drop_weights()
    log.append(result)


def failure(duel: Duel) -> tuple[Literal["base", "candidate"], str] | None:
    """Return the side that has no result and the reason as a sentence, or None; the base if both have none.

    A run has no result if it diverged, had no time for a step (`exhausted`), or lacks the score of a task.
    """
    sides: tuple[Literal["base", "candidate"], ...] = ("base", "candidate")
    for name in sides:
        for pair in duel.pairs:
            side = pair.base if name == "base" else pair.candidate
            if side.value(duel.terms.measure) is None:
                is_finished = side.status == "finished"
                problem = "has a task without a score" if is_finished else f"is {side.status}"
                return name, f"the {name} {problem} with seed {pair.seed}"
    return None


def say_pair(duel: Duel, count: int) -> None:
    """Print one line: the results of pair `count`, and the state of the test after it."""
    terms = duel.terms
    so_far = replace(duel, pairs=duel.pairs[:count])
    pair = duel.pairs[count - 1]
    results = {"base": pair.base, "candidate": pair.candidate}
    values = {name: side.value(terms.measure) for name, side in results.items()}
    shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if value is not None)
    failed = failure(so_far)
    if failed is not None:
        _, state = failed
    else:
        state = ladder.numbers(duel.test.look(so_far.differences()), duel.test.first_look)
    unit = ladder.MEASURES[terms.measure][1]
    say(f"pair {count} of {terms.pairs} (seed {pair.seed}): {shown} {unit}; {state}")
