"""Each rule has a run that passes it, and a run that breaks it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.rules.load import load_run
from eval.rules.page import rules_list
from eval.rules.table import FORESEEABLE, KINDS, RULES, foreseen
from tests.eval.rules.forge import Event, forge, of_kind, read_events, write_events
from tests.eval.rules.test_forgeries import (
    change_event,
    drop_seed,
    every,
    other_weights,
    within,
    without,
)

Change = Callable[[list[Event]], object]


def entry(name: str, **facts: Any) -> Change:
    """Change facts of a labelled set."""
    return lambda events: of_kind(events, "scoring")[0]["entries"][name].update(facts)


def over_budget(events: list[Event]) -> None:
    for event in events:
        if event["event"] == "end":
            event["steps"] += 1


# Rule -> a change of the honest run's log after which it does not hold. The rules P are in test_forgeries.py.
BREAKING: dict[str, Change] = {
    "R1": within("rules_version", "6"),
    "R2": lambda events: (without("exported")(events), without("end")(events)),
    "R3": without("finetuned", slice(-1, None)),
    "R4": over_budget,
    "R5": entry("mrpc", main_metric="accuracy"),
    "R7": within("devices", 2, "setup"),
    "R8": within("clock", "cpu"),
    "R9": within("training.objective", "rtd", "setup"),
    "R10": within("training.start", "pretrained", "setup"),
    "R11": lambda events: other_weights(events, scored=False),
    "R12": within("corpus.sources", [{"name": "x", "kind": "embedded"}], "setup"),
    "R13": within(
        "corpus.sources", [{"name": "GLUE/SST-2", "kind": "file", "license": "x"}], "setup"
    ),
    "R14": within("corpus.tokenizer.sha256", "ab" * 32, "setup"),
    "R15": lambda events: events.extend(second_init(events)),
    "R16": within("hyperparameters.epochs", 9, "scoring"),
    "R17": change_event("scoring", 0, selection="best epoch"),
    "R18": lambda events: drop_seed(events, 0),
    "R19": entry("rte", seen_in_training=300),
    "R20": within("environment.git.dirty", True, "setup"),
    "R21": within("training.gate", {"fp8": "forced"}, "setup"),
    "R22": lambda events: (
        within("environment.compile_cache", "given", "setup")(events),
        change_event("exported", 0, compiled=True)(events),
    ),
    "R23": every("finetuned", "predictions", lambda sha256: "ab" * 32),
}


def second_init(events: list[Event]) -> list[Event]:
    """A scoring of random weights with other hyperparameters, complete."""
    scoring = {**of_kind(events, "scoring")[0], "init": "random"}
    scoring["hyperparameters"] = {**scoring["hyperparameters"], "epochs": 2}
    results = [{**event, "epoch": 2} for event in of_kind(events, "finetuned")]
    return [scoring, *results]


@pytest.fixture
def copied(honest_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest_run, tmp_path / "honest"))


def broken(run: Path) -> set[str]:
    loaded = load_run(run)
    assert not loaded.problem
    return {finding.rule for finding in loaded.verdict.findings if not finding.ok}


def test_an_honest_run_passes_every_rule(honest_run: Path) -> None:
    assert broken(honest_run) == set()


@pytest.mark.parametrize("number", BREAKING)
def test_a_run_breaks_the_rule(number: str, copied: Path) -> None:
    forge(copied, BREAKING[number])
    assert number in broken(copied)


def test_a_run_breaks_the_rule_on_subsets(copied: Path) -> None:
    """GLUE's numbers of examples, on a run that says that the embedded tasks are GLUE's."""
    forge(copied, change_event("scoring", 0, suite="glue"))
    assert "R6" in broken(copied)


def test_a_run_breaks_the_rule_on_weights(copied: Path) -> None:
    shutil.rmtree(copied / "final")
    assert broken(copied) == {"R24"}


def test_every_rule_on_the_record_is_broken_here() -> None:
    numbers = {rule.number for rule in RULES if rule.number.startswith("R")}
    assert numbers == {*BREAKING, "R6", "R24"}


@pytest.mark.parametrize(
    ("kind", "division"),
    [("finished", "unfinished"), ("both", "invalid"), ("closed", "open")],
)
def test_the_division_follows_from_the_kinds_of_broken_rules(
    kind: str, division: str, copied: Path
) -> None:
    original = read_events(copied)
    for number, change in BREAKING.items():
        if KINDS[number] != kind:
            continue
        write_events(copied, original)
        forge(copied, change)
        verdict = load_run(copied).verdict
        kinds = {KINDS[finding.rule] for finding in verdict.broken}
        if "both" in kinds:
            assert verdict.division == "invalid"
        elif "finished" in kinds:
            assert verdict.division == "unfinished"
        else:
            assert verdict.division == division


def test_a_claim_of_the_open_division_holds(copied: Path) -> None:
    forge(copied, within("division", "open"))
    assert load_run(copied).verdict.division == "open" and not broken(copied)


def test_the_list_of_rules_has_each_once() -> None:
    """The site shows it (tests/test_site.py)."""
    lines = rules_list().splitlines()
    for rule in RULES:
        assert lines.count(f"- **{rule.number}** {rule.sentence}") == 1


def test_rules_that_a_run_breaks_before_its_first_step_are_foreseen(honest_run: Path) -> None:
    from cramming.record import load_record

    record = load_record(honest_run)
    assert foreseen(record) == []
    record["pretrain"]["objective"] = "rtd"
    (line,) = foreseen(record)
    assert line.startswith("R9") and "R9" in FORESEEABLE
    record["pretrain"]["objective"] = "distill"  # a teacher is no part of the run's own corpus
    assert [line.partition(":")[0] for line in foreseen(record)] == ["R9", "R10"]
