"""The stats counts the same in any order; verdicts survive what an interruption may do to them."""

import random
from pathlib import Path

import numpy as np

from data_prep.resume_state import Decisions
from data_prep.stage_stats import EXAMPLES, EXCERPT_CHARACTERS, Stage


def test_examples_and_counts_do_not_depend_on_the_order_of_counting() -> None:
    dropped = [(f"file:{i}", "word " * (i % 90 + 1)) for i in range(200)]
    lines = []
    for seed in range(3):
        stage = Stage("filters", seed=7)
        for name, text in random.Random(seed).sample(dropped, len(dropped)):
            stage.take(len(text))
            reason = "too_short" if len(text) < 100 else "other"
            stage.drop(reason, len(text))
            stage.example(reason, name, text)
        lines.append(stage.line())
    assert lines[0] == lines[1] == lines[2]
    assert sum(bin_.documents for bin_ in lines[0].dropped.values()) == 200
    assert all(len(bin_.examples) == EXAMPLES for bin_ in lines[0].dropped.values())


def test_an_excerpt_is_one_short_printable_line() -> None:
    stage = Stage("source", seed=0)
    stage.drop("not_utf8", 9)
    stage.example("not_utf8", "a:0", "\udcff\x00\x1b[31m | line\nnext " + 500 * "x")
    (example,) = stage.line().dropped["not_utf8"].examples
    assert example.isprintable() and len(example) < EXCERPT_CHARACTERS + 10
    example.encode()


STAGES = ("filters", "decontamination", "tokens")


def known(decisions: Decisions, number: int) -> list[str | None]:
    """What each stage has decided on this document: a reason to drop it, "" where it passed, None if nothing."""
    at = np.array([number])
    return [
        None if decisions.undecided(at, s)[0] else decisions.dropped(at, s).get(0, "")
        for s in STAGES
    ]


def test_a_verdict_holds_for_its_stage_and_those_before(tmp_path: Path) -> None:
    decisions = Decisions(tmp_path / "decisions", [])
    assert known(decisions, 0) == [None] * 3
    decisions.set(np.array([0]), "filters", {})
    assert known(decisions, 0) == ["", None, None]
    decisions.set(np.array([0, 200_000]), "decontamination", {})
    decisions.set(np.array([0]), "tokens", {0: "too_many"})
    decisions.set(np.array([0, 1]), "filters", {})  # what is decided stays
    assert known(decisions, 0) == ["", "", "too_many"] and known(decisions, 1) == ["", None, None]
    decisions.set(np.array([199_998, 200_000]), "filters", {1: "too_short"})
    assert known(decisions, 200_000)[0] == "too_short" and known(decisions, 199_999)[0] is None
    assert known(decisions, 500_000) == [None] * 3


def test_verdicts_beyond_the_last_safe_point_are_forgotten(tmp_path: Path) -> None:
    decisions = Decisions(tmp_path / "decisions", [])
    decisions.set(np.array([0]), "filters", {0: "too_short"})
    safe = [list(reason) for reason in decisions.reasons]
    decisions.set(np.array([1, 2]), "filters", {0: "no_letters", 1: "too_short"})
    decisions.save()
    again = Decisions(tmp_path / "decisions", safe)
    assert [known(again, number)[0] for number in range(3)] == ["too_short", None, "too_short"]
    again.set(np.array([1]), "filters", {0: "markup"})
    assert known(again, 1)[0] == "markup" and known(decisions, 1)[0] == "no_letters"


def test_saving_writes_what_was_decided_since_and_nothing_else(tmp_path: Path) -> None:
    """What is on the disk is overwritten before: of that a second save changes the new part alone."""
    path = tmp_path / "decisions"
    decisions = Decisions(path, [])
    decisions.set(np.arange(1000), "tokens", {3: "too_many"})
    decisions.save()
    path.write_bytes(b"\xff" * 2000)
    decisions.set(np.arange(1000), "tokens", {3: "too_many"})  # known already
    decisions.set(np.arange(990, 1100), "tokens", {50: "too_many"})
    decisions.save()
    assert path.read_bytes()[:2000] == b"\xff" * 2000 and path.stat().st_size == 2200
    again = Decisions(path, decisions.reasons)
    assert (
        known(again, 1040)[2] == "too_many" and known(again, 3) == [None] * 3
    )  # forgotten: of no known reason
    again.save()
    assert not any(path.read_bytes()[:2000]) and path.stat().st_size == 2200
