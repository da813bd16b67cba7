"""The stats counts the same in any order; verdicts survive what an interruption may do to them."""

import random
from pathlib import Path

import numpy as np

from data_prep.resume_state import PASSED, Decisions
from data_prep.stage_stats import EXAMPLES, EXCERPT_CHARACTERS, Stage


def test_examples_and_counts_do_not_depend_on_the_order_of_counting() -> None:
    dropped = [(f"file:{i}", "word " * (i % 90 + 1)) for i in range(200)]
    lines = []
    for seed in range(3):
        stage = Stage("filters", seed=7)
        for name, text in random.Random(seed).sample(dropped, len(dropped)):
            stage.take(len(text))
            stage.drop("too_short" if len(text) < 100 else "other", len(text), name, text)
        lines.append(stage.line())
    assert lines[0] == lines[1] == lines[2]
    assert sum(bin_.documents for bin_ in lines[0].dropped.values()) == 200
    assert all(len(bin_.examples) == EXAMPLES for bin_ in lines[0].dropped.values())


def test_an_excerpt_is_one_short_printable_line() -> None:
    stage = Stage("source", seed=0)
    stage.drop("not_utf8", 9, "a:0", "\udcff\x00\x1b[31m | line\nnext " + 500 * "x")
    (example,) = stage.line().dropped["not_utf8"].examples
    assert example.isprintable() and len(example) < EXCERPT_CHARACTERS + 10
    example.encode()


def test_a_verdict_holds_for_its_stage_and_those_before(tmp_path: Path) -> None:
    decisions = Decisions(tmp_path / "decisions", [])
    assert decisions.get(0, "filters") is None
    decisions.set(0, "filters", PASSED)
    assert decisions.get(0, "filters") == PASSED and decisions.get(0, "decontamination") is None
    decisions.set(0, "decontamination", PASSED)
    decisions.set(0, "tokens", "too_many")
    assert [decisions.get(0, stage) for stage in ("filters", "decontamination", "tokens")] == [
        PASSED,
        PASSED,
        "too_many",
    ]
    decisions.set(200_000, "filters", "too_short")
    assert decisions.get(200_000, "filters") == "too_short" and decisions.get(199_999, "filters") is None
    assert decisions.get(10**9, "filters") is None


def test_verdicts_beyond_the_last_safe_point_are_forgotten(tmp_path: Path) -> None:
    decisions = Decisions(tmp_path / "decisions", [])
    decisions.set(0, "filters", "too_short")
    safe = [list(reason) for reason in decisions.reasons]
    decisions.set(1, "filters", "no_letters")
    decisions.set(2, "filters", "too_short")
    decisions.save()
    again = Decisions(tmp_path / "decisions", safe)
    assert [again.get(number, "filters") for number in range(3)] == ["too_short", None, "too_short"]
    again.set(1, "filters", "markup")
    assert again.get(1, "filters") == "markup" and decisions.get(1, "filters") == "no_letters"
    assert np.fromfile(tmp_path / "decisions", np.uint16)[3] == 0
