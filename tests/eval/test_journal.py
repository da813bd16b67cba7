"""What the journal and its neighbours prove against a record."""

import random
from pathlib import Path
from typing import Any

import pytest

from cramming.journal import Journal
from eval.rules.journal import last_logged_seconds, summarise_journal
from eval.rules.training_agrees import out_of_order

LIMIT = {"unit": "steps", "limit": 12.0}
SAVED = {"sha256": "ab" * 32}
NONE_ELSE = "{hours: null, tokens: null, exaflops: null"
ODD_FILES = ("seed: 0", "[", "[" * 1000, "- budget", "budget: 12", "budget: !!python/name:os.system", "\0", "", None)


def event(kind: str, process: int, elapsed: float, steps: int, **more: Any) -> dict[str, Any]:
    return {"event": kind, "process": process, "elapsed": elapsed, "steps": steps, **more}


def problems(folder: Path, *events: dict[str, Any]) -> list[str]:
    journal = Journal(folder / "budget.jsonl")
    for one in events:
        journal.write(one)
    journal.close()
    found = summarise_journal(journal.path)
    assert "problem" not in found
    return list(found["problems"])


BEGUN = (event("start", 0, 1.0, 0, **LIMIT), event("checkpoint", 0, 5.0, 6, **SAVED))


AGAIN = event("start", 1, 1.0, 0, **LIMIT)
ENDED = event("end", 0, 9.0, 12, reason="finished")
FOREIGN = "process 1 went on from a checkpoint of step {} that is not in it"


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ((AGAIN, event("resume", 1, 2.0, 6, **SAVED)), []),
        ((AGAIN, event("resume", 1, 2.0, 6, sha256="cd" * 32)), [FOREIGN.format(6)]),
        ((AGAIN, event("resume", 1, 2.0, 80, **SAVED)), [FOREIGN.format(80)]),
        # A process that only completed the record, as earlier versions did it, is in order.
        ((ENDED, AGAIN, event("end", 1, 3.0, 12, reason="finished")), []),
        (
            (ENDED, AGAIN, event("end", 1, 3.0, 13, reason="finished")),
            ["process 1 trained after the run had ended at step 12"],
        ),
    ],
)
def test_what_no_run_leaves_is_told(tmp_path: Path, more: tuple[dict[str, Any], ...], found: list[str]) -> None:
    assert problems(tmp_path, *BEGUN, *more) == found


def test_what_the_wall_clock_has_more_is_evidence(tmp_path: Path) -> None:
    """Nothing more: a machine may sleep, between two processes too, and its clock may be put back."""
    walls = ((0, 1, 1000.0), (0, 11, 1110.0), (1, 2, 5000.0), (1, 8, 5006.0), (2, 1, 9000.0), (2, 7, 8000.0))
    last, events = -1, []
    for process, elapsed, wall in walls:
        kind = {"event": "start", **LIMIT} if process != last else {"event": "heartbeat"}
        events.append({"process": process, "elapsed": elapsed, "steps": 0, "wall": wall, **kind})
        last = process
    assert not problems(tmp_path, *events)
    assert summarise_journal(tmp_path / "budget.jsonl")["uncharged_seconds"] == 100.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"budget: {NONE_ELSE}, steps: 12}}", ["steps", 12.0]),
        (f"budget: {NONE_ELSE.replace('hours: null', 'hours: 1')}, steps: 12}}", None),
        (f"budget: {NONE_ELSE}, steps: many}}", None),
        (f"budget: {NONE_ELSE}, steps: [12]}}", None),
        (f"budget: {NONE_ELSE}, steps: 1{'0' * 400}}}", None),
        *((text, None) for text in ODD_FILES),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_limit_is_that_of_config_yaml(tmp_path: Path, text: str | None, found: list[Any] | None) -> None:
    problems(tmp_path, *BEGUN)
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    summary = summarise_journal(tmp_path / "budget.jsonl")
    assert (summary["config_budget"], summary["budgets"]) == (found, [["steps", 12.0]])


def test_a_newline_that_was_taken_from_the_end_is_told(tmp_path: Path) -> None:
    """What a crash cut short is no line at all."""
    journal = tmp_path / "budget.jsonl"
    problems(tmp_path, *BEGUN)
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"event": "hea')
    assert not summarise_journal(journal)["problems"]
    journal.write_bytes(whole[:-1])
    assert "the last line of budget.jsonl has no newline" in summarise_journal(journal)["problems"][0]


def test_only_training_steps_have_seconds_on_the_clock() -> None:
    """The last validation comes after the end."""
    rows = [{"step": 1, "loss": 5.0, "seconds": 3.0}, {"step": 1, "validation_loss": 5.0, "seconds": 9.0}]
    assert last_logged_seconds(rows) == 3.0
    assert last_logged_seconds(rows[1:]) is None


def test_each_row_is_compared_with_every_line_of_the_journal() -> None:
    draw = random.Random(0)
    for _ in range(300):
        steps = sorted(draw.sample(range(1, 30), draw.randint(0, 8)))
        rows = [{"step": step, "seconds": step + draw.choice([0, 0, 0, 3, -3])} for step in steps]
        events = [{"steps": step, "last_step_seconds": float(step + draw.choice([0, 0, 2, -2]))}
                  for step in draw.choices(range(30), k=draw.randint(0, 8))]  # fmt: skip
        wrong = [
            row["step"]
            for row in rows
            if any(
                (event["steps"] > row["step"] + 1 and event["last_step_seconds"] < row["seconds"] - 1e-3)
                or (event["steps"] < row["step"] - 1 and event["last_step_seconds"] > row["seconds"] + 1e-3)
                for event in events
            )
        ]
        assert [int(line.split()[1]) for line in out_of_order(rows, events)] == wrong
