"""A table of forged logs whose chain is whole again: what the rules flag, what other proof shows, what nothing does.

docs/explanation/verification.md has the counts by class. No goal is set on them; the table keeps them honest.
"""

import collections
import hashlib
import io
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cramming.config import settings_hash
from cramming.data.task_files import GLUE
from eval.rules.load import load_run
from eval.rules.table import RULES
from eval.tasks.metrics import score
from eval.tasks.readers import read_file
from eval.verify import Inputs, verify_run
from tests.eval.rules.forge import Event, of_kind, read_events, write_events

DOCS = Path(__file__).parents[3] / "docs" / "explanation" / "verification.md"
Change = Callable[[list[Event]], object]
# What shows a forgery: a rule; else a verifier with the labels, the corpus, the weights, or a fine-tuning done again
# (`verify`; weights include checkpoints at hand); a replay of the steps; nothing at all.
PROOFS = ("rules", "labels", "corpus", "weights", "refinetune", "replay", "nothing")


class Forgery(NamedTuple):
    """One forged log: its class, what shows it, and the change of the events."""

    group: str
    name: str
    shown_by: str
    change: Change


def every(kind: str, key: str, new: Callable[[Any], Any]) -> Change:
    """Change a field of all events of one kind."""

    def change(events: list[Event]) -> None:
        for event in of_kind(events, kind):
            if key in event:
                event[key] = new(event[key])

    return change


def change_event(kind: str, place: int, **values: Any) -> Change:
    """Set fields of one event of a kind."""
    return lambda events: of_kind(events, kind)[place].update(values)


def counters(key: str, new: Callable[[Any], Any], kinds: Sequence[str] | None = None) -> Change:
    """Change a counter in all events that have it."""

    def change(events: list[Event]) -> None:
        for event in events:
            if key in event and (kinds is None or event["event"] in kinds):
                event[key] = new(event[key])

    return change


def within(path: str, value: Any, kind: str = "start") -> Change:
    """Set a value inside the first event of a kind, by dotted path."""

    def change(events: list[Event]) -> None:
        node = of_kind(events, kind)[0]
        *sections, name = path.split(".")
        for section in sections:
            node = node[section]
        node[name] = value

    return change


def both(*changes: Change) -> Change:
    """Make several changes."""

    def change(events: list[Event]) -> None:
        for each in changes:
            each(events)

    return change


def without(kind: str, places: slice = slice(None)) -> Change:
    """Remove events of a kind."""

    def change(events: list[Event]) -> None:
        for event in of_kind(events, kind)[places]:
            events.remove(event)

    return change


def last_step(change: Callable[[Event], object]) -> Change:
    return lambda events: change(of_kind(events, "steps")[-1])


def add_steps(events: list[Event]) -> None:
    """Ten more steps than the budget has."""
    row = {**of_kind(events, "steps")[-1]}
    row.update(step=70, tokens=row["tokens"] + 2560)
    events.insert(events.index(of_kind(events, "steps")[-1]) + 1, row)
    end = of_kind(events, "end")[0]
    end.update(steps=70, sequences=560, tokens=17920, flops=end["flops"] * 7 / 6)
    of_kind(events, "validation")[-1].update(step=70, tokens=17920)


def lower_losses(events: list[Event], by: float) -> None:
    for row in of_kind(events, "steps"):
        row["each_loss"] = [loss - by for loss in row["each_loss"]]
        row["loss"] = sum(row["each_loss"]) / len(row["each_loss"])


def lower_rows(events: list[Event], by: float, rows: slice) -> None:
    lower_losses(of_kind(events, "steps")[rows], by)


def raise_accuracy(events: list[Event]) -> None:
    for row in of_kind(events, "steps"):
        row["each_accuracy"] = [1.0] * len(row["each_accuracy"])
        row["accuracy"] = 1.0


def scale_time(events: list[Event], factor: float, wall: bool) -> None:
    began = events[0]["wall"]
    for event in events:
        for key in ("elapsed", "seconds", "last_step_seconds", "data_wait_seconds"):
            if key in event and event["event"] != "finetuned":
                event[key] *= factor
        if wall and "wall" in event:
            event["wall"] = began + (event["wall"] - began) * factor


def shift_walls(events: list[Event], seconds: float) -> None:
    for event in events:
        if "wall" in event:
            event["wall"] += seconds


def swap_seconds(events: list[Event]) -> None:
    first, second = of_kind(events, "steps")[2:4]
    first["seconds"], second["seconds"] = second["seconds"], first["seconds"]


def double_tokens(events: list[Event], *, with_recipe: bool, with_flops: bool) -> None:
    for event in events:
        for key in ("tokens", "sequences"):
            if key in event and event["event"] != "scoring":
                event[key] *= 2
        if with_flops and "flops" in event:
            event["flops"] *= 2
    if with_recipe:
        events[0]["recipe"]["train"]["batch_size"] *= 2


def smaller_batch_rate(events: list[Event]) -> None:
    """Learning rates as if the peak were half of it, everywhere."""
    events[0]["recipe"]["optim"]["lr"] /= 2
    of_kind(events, "setup")[0]["training"]["peak_learning_rate"] /= 2
    for row in of_kind(events, "steps"):
        row["lr"] /= 2


def whole_answers(events: list[Event]) -> None:
    """One more example right, as a share."""
    for event in of_kind(events, "finetuned"):
        for entry in event["entries"].values():
            if set(entry["metrics"]) == {"accuracy"}:
                entry["metrics"]["accuracy"] += 1 / 400


def repeat_seed(events: list[Event], *, keep_loss: bool) -> None:
    """The result of seed 0 stands for seed 1 too."""
    first, second = of_kind(events, "finetuned")[:2]
    second.update(entries=first["entries"], predictions=first["predictions"])
    if keep_loss:
        second["train_loss"] = first["train_loss"]


def drop_seed(events: list[Event], seed: int) -> None:
    scoring = of_kind(events, "scoring")[0]
    scoring["seeds"].remove(seed)
    scoring["keys"] = {
        name: key for name, key in scoring["keys"].items() if not name.endswith(f"seed{seed}")
    }
    for event in of_kind(events, "finetuned"):
        if event["seed"] == seed:
            events.remove(event)


def choose_seeds(events: list[Event]) -> None:
    """Seeds 0, 1, 2 were 4, 7, 9 and are called 0, 1, 2: other keys, the same results."""
    scoring = of_kind(events, "scoring")[0]
    renamed = {0: 2, 1: 0, 2: 1}
    for event in of_kind(events, "finetuned"):
        event["seed"] = renamed[event["seed"]]
        event["key"] = scoring["keys"][f"{event['task']}-seed{event['seed']}"]


def other_hyperparameters(events: list[Event], *, with_keys: bool) -> None:
    scoring = of_kind(events, "scoring")[0]
    scoring["hyperparameters"]["learning_rate"] *= 2
    if not with_keys:
        return
    for name in scoring["keys"]:
        task, _, seed = name.rpartition("-seed")
        asked, _, place = scoring["conditions"][task].partition("-")
        key = settings_hash(asked, scoring["hyperparameters"], int(seed))
        scoring["keys"][name] = f"{key}-{place}"
    for event in of_kind(events, "finetuned"):
        event["key"] = scoring["keys"][f"{event['task']}-seed{event['seed']}"]


def other_weights(events: list[Event], *, scored: bool) -> None:
    of_kind(events, "exported")[0]["files"]["model.safetensors"] = "ab" * 32
    if scored:
        scoring = of_kind(events, "scoring")[0]
        scoring["model_sha256"] = "ab" * 32
        scoring["model_files"]["model.safetensors"] = "ab" * 32


def formula(events: list[Event], noise: float) -> None:
    """Every loss by a formula, none lower than it may be."""
    draw = random.Random(0)
    for row in of_kind(events, "steps"):
        first = row["step"] - len(row["each_loss"]) + 1
        row["each_loss"] = [
            3.0 + 2.7 * math.exp(-(first + index) / 60) + noise * draw.gauss(0, 1)
            for index in range(len(row["each_loss"]))
        ]
        row["loss"] = sum(row["each_loss"]) / len(row["each_loss"])


def shift_validation(events: list[Event]) -> None:
    """A validation more, at a step at which none is due."""
    validation = {
        **of_kind(events, "validation")[0],
        "step": 20,
        "progress": 20 / 60,
        "tokens": 5120,
    }
    events.insert(events.index(of_kind(events, "steps")[3]), validation)


def longer_row(events: list[Event]) -> None:
    row = of_kind(events, "steps")[3]
    row["each_loss"].append(row["each_loss"][-1])


FORGERIES = (
    # Time
    Forgery("time", "half the seconds of the budget", "rules", lambda e: scale_time(e, 0.5, False)),
    Forgery("time", "half of all seconds", "nothing", lambda e: scale_time(e, 0.5, True)),
    Forgery(
        "time",
        "a step later than the signs of life",
        "rules",
        last_step(lambda row: row.update(seconds=row["seconds"] + 9)),
    ),
    Forgery("time", "two steps with their seconds swapped", "rules", swap_seconds),
    Forgery(
        "time",
        "the last step earlier in the end",
        "rules",
        every("end", "last_step_seconds", lambda s: s - 2),
    ),
    Forgery("time", "no heartbeats", "rules", without("heartbeat")),
    Forgery("time", "half of the heartbeats", "nothing", without("heartbeat", slice(0, None, 2))),
    Forgery("time", "a wall clock that runs backwards", "rules", change_event("end", 0, wall=1.0)),
    Forgery("time", "a run of last month", "nothing", lambda e: shift_walls(e, -30 * 86400)),
    Forgery("time", "a run of after its scores", "rules", lambda e: shift_walls(e, 86400)),
    Forgery("time", "time of the CPU", "rules", within("clock", "cpu")),
    Forgery("time", "no wait for data", "nothing", counters("data_wait_seconds", lambda s: 0.0)),
    # Steps
    Forgery(
        "steps", "twice the tokens in the rows", "rules", every("steps", "tokens", lambda n: 2 * n)
    ),
    Forgery(
        "steps",
        "twice the tokens everywhere",
        "rules",
        lambda e: double_tokens(e, with_recipe=False, with_flops=False),
    ),
    Forgery(
        "steps",
        "twice the batch",
        "rules",
        lambda e: double_tokens(e, with_recipe=True, with_flops=False),
    ),
    Forgery(
        "steps",
        "twice the batch and compute",
        "replay",
        lambda e: double_tokens(e, with_recipe=True, with_flops=True),
    ),
    Forgery("steps", "ten steps more than the budget", "rules", add_steps),
    Forgery("steps", "a row left out", "rules", without("steps", slice(2, 3))),
    Forgery(
        "steps",
        "a row twice",
        "rules",
        lambda e: e.insert(e.index(of_kind(e, "steps")[3]), {**of_kind(e, "steps")[3]}),
    ),
    Forgery(
        "steps",
        "a checkpoint of another step",
        "rules",
        change_event("checkpoint", 2, step=26, steps=26),
    ),
    Forgery(
        "steps", "another number of sequences", "rules", every("end", "sequences", lambda n: n + 8)
    ),
    Forgery("steps", "no skipped step", "nothing", counters("skipped_steps", lambda n: n + 1)),
    Forgery("steps", "twice the compute", "rules", counters("flops", lambda n: 2 * n)),
    Forgery("steps", "steps that fall", "rules", change_event("heartbeat", -1, steps=3)),
    Forgery("steps", "the last row left out", "rules", without("steps", slice(-1, None))),
    # Schedule
    Forgery(
        "schedule",
        "another rate of one row",
        "rules",
        last_step(lambda row: row.update(lr=2 * row["lr"])),
    ),
    Forgery("schedule", "a constant rate", "rules", every("steps", "lr", lambda rate: 0.003)),
    Forgery("schedule", "another peak in the recipe", "rules", within("recipe.optim.lr", 0.1)),
    Forgery("schedule", "another peak everywhere", "replay", smaller_batch_rate),
    Forgery(
        "schedule", "another schedule in the recipe", "rules", within("recipe.schedule.warmup", 0.5)
    ),
    Forgery(
        "schedule",
        "another weight decay in the recipe",
        "replay",
        within("recipe.optim.weight_decay", 0.3),
    ),
    Forgery(
        "schedule",
        "another progress of one row",
        "rules",
        last_step(lambda row: row.update(progress=0.9)),
    ),
    Forgery(
        "schedule",
        "steps that began elsewhere",
        "rules",
        last_step(lambda row: row.update(each_progress=[0.5] * 10)),
    ),
    Forgery("schedule", "another masking rate", "rules", within("recipe.objective.rate", 0.4)),
    Forgery(
        "schedule", "other random tokens", "replay", within("recipe.objective.random_share", 0.0)
    ),
    # Throughput and machine
    Forgery(
        "machine",
        "a thousandth of the time",
        "nothing",
        lambda e: (scale_time(e, 1e-3, True), without("heartbeat")(e)),
    ),
    Forgery("machine", "faster than the device", "rules", lambda e: scale_time(e, 1e-8, True)),
    Forgery(
        "machine",
        "more memory than the device has",
        "rules",
        change_event("exported", 0, peak_memory_bytes=2**50),
    ),
    Forgery(
        "machine", "less memory", "nothing", change_event("exported", 0, peak_memory_bytes=2**20)
    ),
    Forgery(
        "machine",
        "a card with another peak",
        "rules",
        within(
            "environment.device",
            {
                "kind": "cuda",
                "name": "NVIDIA H100 80GB HBM3",
                "memory_bytes": 2**36,
                "peak_tflops": 10.0,
            },
            "setup",
        ),
    ),
    Forgery(
        "machine",
        "another processor",
        "nothing",
        within("environment.device.name", "Another CPU", "setup"),
    ),
    Forgery("machine", "two devices as one", "nothing", within("devices", 1, "setup")),
    Forgery("machine", "invented energy", "nothing", every("end", "joules", lambda j: 1.0)),
    Forgery(
        "machine", "another commit", "nothing", within("environment.git.commit", "f" * 40, "setup")
    ),
    Forgery(
        "machine",
        "uncommitted changes left out",
        "nothing",
        within("environment.git.changed", [], "setup"),
    ),
    Forgery(
        "machine",
        "a check that was forced, called passed",
        "nothing",
        within("training.gate", {"all tricks": "passed"}, "setup"),
    ),
    Forgery("machine", "an older version of the rules", "rules", within("rules_version", "6")),
    Forgery("machine", "another version of the suite", "nothing", within("suite_version", "9.9")),
    # Losses
    Forgery(
        "losses",
        "a row that is not the mean of its steps",
        "rules",
        last_step(lambda row: row.update(loss=1.0)),
    ),
    Forgery(
        "losses", "losses lower by one nat", "replay", lambda e: lower_rows(e, 1.0, slice(4, None))
    ),
    Forgery("losses", "losses below zero", "rules", lambda e: lower_losses(e, 6.0)),
    Forgery("losses", "losses that fall at once", "rules", lambda e: lower_losses(e, 4.9)),
    Forgery("losses", "losses by a smooth formula", "replay", lambda e: formula(e, 0.0)),
    Forgery("losses", "losses by a formula with noise", "replay", lambda e: formula(e, 0.05)),
    Forgery("losses", "an accuracy of one with that loss", "replay", raise_accuracy),
    Forgery(
        "losses",
        "a loss below what its accuracy allows",
        "rules",
        last_step(lambda row: row.update(each_loss=[0.3] * 10, loss=0.3)),
    ),
    Forgery(
        "losses", "another last validation", "weights", change_event("validation", -1, loss=3.1)
    ),
    Forgery(
        "losses",
        "another last validation, all masked",
        "weights",
        change_event("validation", -1, all_mask_loss=3.2),
    ),
    Forgery("losses", "an earlier validation", "replay", change_event("validation", 0, loss=3.5)),
    Forgery(
        "losses",
        "an accuracy that is no share",
        "rules",
        change_event("validation", -1, accuracy=0.6001),
    ),
    Forgery("losses", "a validation too many", "rules", shift_validation),
    Forgery("losses", "a validation left out", "replay", without("validation", slice(0, 1))),
    Forgery(
        "losses", "other targets", "rules", change_event("validation", 0, targets=80, accuracy=0.05)
    ),
    Forgery(
        "losses",
        "more held-out text than the recipe has",
        "rules",
        change_event("validation", -1, held_out_tokens=9999),
    ),
    Forgery(
        "losses", "another gradient norm", "replay", every("steps", "grad_norm", lambda n: n / 2)
    ),
    Forgery("losses", "more losses than steps in a row", "rules", longer_row),
    # Seeds
    Forgery("seeds", "another seed in the recipe", "rules", within("recipe.seed", 7)),
    Forgery(
        "seeds",
        "another seed everywhere",
        "replay",
        both(within("recipe.seed", 7), within("training.seed", 7, "setup")),
    ),
    Forgery("seeds", "a bad seed left out", "rules", lambda e: drop_seed(e, 0)),
    Forgery("seeds", "seeds called by other numbers", "refinetune", choose_seeds),
    Forgery("seeds", "one seed for two", "rules", lambda e: repeat_seed(e, keep_loss=True)),
    Forgery(
        "seeds",
        "one seed for two, with another loss",
        "refinetune",
        lambda e: repeat_seed(e, keep_loss=False),
    ),
    # Scores
    Forgery(
        "scores",
        "an accuracy that is no share",
        "rules",
        lambda e: of_kind(e, "finetuned")[3]["entries"]["sst2"]["metrics"].update(accuracy=0.4961),
    ),
    Forgery("scores", "one more right answer of each task", "labels", whole_answers),
    Forgery(
        "scores",
        "a score beyond its range",
        "rules",
        lambda e: of_kind(e, "finetuned")[6]["entries"]["mrpc"]["metrics"].update(f1=1.2),
    ),
    Forgery(
        "scores",
        "another main metric",
        "rules",
        lambda e: of_kind(e, "scoring")[0]["entries"]["mrpc"].update(main_metric="accuracy"),
    ),
    Forgery("scores", "another epoch", "rules", every("finetuned", "epoch", lambda n: n + 1)),
    Forgery(
        "scores", "another selection", "rules", change_event("scoring", 0, selection="best epoch")
    ),
    Forgery(
        "scores",
        "other hyperparameters",
        "rules",
        lambda e: other_hyperparameters(e, with_keys=False),
    ),
    Forgery(
        "scores",
        "other hyperparameters and keys",
        "refinetune",
        lambda e: other_hyperparameters(e, with_keys=True),
    ),
    Forgery(
        "scores",
        "scores of before the run",
        "rules",
        every("finetuned", "time", lambda t: "2001-01-01T00:00:00+00:00"),
    ),
    Forgery(
        "scores",
        "scores that took less time",
        "nothing",
        every("finetuned", "seconds", lambda s: s / 9),
    ),
    Forgery(
        "scores",
        "examples that were seen in training",
        "rules",
        lambda e: of_kind(e, "scoring")[0]["entries"]["rte"].update(seen_in_training=100),
    ),
    Forgery(
        "scores", "a scoring that lacks a result", "rules", without("finetuned", slice(-1, None))
    ),
    # Weights
    Forgery("weights", "other weights exported", "rules", lambda e: other_weights(e, scored=False)),
    Forgery(
        "weights",
        "other weights exported and scored",
        "weights",
        lambda e: other_weights(e, scored=True),
    ),
    Forgery(
        "weights",
        "another number of parameters",
        "rules",
        within("training.parameters", 9, "setup"),
    ),
    Forgery(
        "weights", "a pretrained start", "rules", within("training.start", "pretrained", "setup")
    ),
    Forgery(
        "weights", "another checkpoint", "weights", change_event("checkpoint", 1, sha256="ab" * 32)
    ),
    Forgery(
        "weights",
        "other weights predicted",
        "rules",
        change_event("scoring", 0, model_sha256="cd" * 32),
    ),
    # Data
    Forgery(
        "data", "another corpus", "rules", within("corpus.manifest_sha256", "ab" * 32, "setup")
    ),
    Forgery(
        "data", "another size of the corpus", "corpus", within("corpus.tokens", 10**9, "setup")
    ),
    Forgery(
        "data",
        "another license",
        "corpus",
        within(
            "corpus.sources", [{"name": "Embedded", "kind": "embedded", "license": "none"}], "setup"
        ),
    ),
    Forgery("data", "another vocabulary", "rules", within("corpus.vocab_size", 999, "setup")),
    Forgery(
        "data", "another tokenizer", "rules", within("corpus.tokenizer.sha256", "ab" * 32, "setup")
    ),
    Forgery(
        "data", "more removed documents", "corpus", within("corpus.removed", {"short": 5}, "setup")
    ),
    Forgery("data", "another epoch count", "nothing", within("windows", 7, "setup")),
)


def broken(run: Path) -> set[str]:
    """Return the rules that a run breaks, or a mark where its log is refused."""
    loaded = load_run(run)
    if loaded.problem:
        return {"refused"}
    return {finding.rule for finding in loaded.verdict.findings if not finding.ok}


@pytest.fixture(scope="module")
def workplace(honest_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the honest run whose log is written anew for each forgery."""
    return Path(shutil.copytree(honest_run, tmp_path_factory.mktemp("forged") / "honest"))


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.name)
def test_what_shows_a_forgery(
    forgery: Forgery, honest_run: Path, workplace: Path, inputs: Inputs
) -> None:
    events = read_events(honest_run)
    forgery.change(events)
    write_events(workplace, events)
    flagged = bool(broken(workplace) - broken(honest_run))
    assert flagged == (forgery.shown_by == "rules"), broken(workplace)
    if forgery.shown_by in ("labels", "corpus", "weights"):
        assert verify_run(workplace, inputs).problems
    elif not flagged and forgery.shown_by != "refinetune":
        assert not verify_run(workplace, inputs).problems


def test_the_rules_page_has_the_numbers() -> None:
    """The table in docs/explanation/verification.md counts the forgeries by class and by what shows them."""
    counts = collections.Counter((forgery.group, forgery.shown_by) for forgery in FORGERIES)
    groups = dict.fromkeys(forgery.group for forgery in FORGERIES)
    rows = [[group, *(str(counts[group, proof]) for proof in PROOFS)] for group in groups]
    totals = [str(sum(counts[group, proof] for group in groups)) for proof in PROOFS]
    rows.append(["all", *totals])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    page = DOCS.read_text(encoding="utf-8")
    assert "\n".join(lines) in page, "\n" + "\n".join(lines)
    assert f"in {len(FORGERIES)} ways" in page and len(FORGERIES) >= 60


def test_predictions_from_the_labels_need_a_fine_tuning_done_again(
    honest_run: Path, workplace: Path, inputs: Inputs
) -> None:
    """The labels agree with them, so no rule and no comparison with the labels shows them."""
    events = read_events(honest_run)
    tasks = next(honest_run.parents[1].glob("corpora/*/tasks"))
    for event in of_kind(events, "finetuned"):
        task = GLUE[event["task"]]
        arrays = {}
        for source in task.scored:
            labels = read_file(tasks / source.path, task, source, labelled=True).labels
            assert labels is not None
            arrays[f"dev.{source.entry}"] = labels.astype(float)
            values = score(task.metrics, arrays[f"dev.{source.entry}"], labels).values
            event["entries"][source.entry]["metrics"] = values
        content = io.BytesIO()
        np.savez(content, **arrays)
        event["predictions"] = hashlib.sha256(content.getvalue()).hexdigest()
        (workplace / "predictions" / f"{event['predictions']}.npz").write_bytes(content.getvalue())
    write_events(workplace, events)
    assert verify_run(workplace, inputs).in_order
    result = verify_run(workplace, replace(inputs, refinetune=True, draw=random.Random(0)))
    assert any("fine-tuned again" in problem for problem in result.problems), result.checked


def test_every_rule_has_a_run_that_breaks_it(honest_run: Path, workplace: Path) -> None:
    """Rules without a forgery here are broken in test_rules.py."""
    seen: set[str] = set()
    for forgery in FORGERIES:
        events = read_events(honest_run)
        forgery.change(events)
        write_events(workplace, events)
        seen |= broken(workplace)
    numbers = {rule.number for rule in RULES if rule.number.startswith("P")}
    assert numbers - {"P17"} <= seen, numbers - seen
