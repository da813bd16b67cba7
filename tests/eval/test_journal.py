"""What the journal and its neighbours prove against a record."""

from pathlib import Path
from typing import Any

import pytest

from cramming.journal import Journal
from eval.rules.journal import last_logged_seconds, summarise_journal

LIMIT = {"unit": "steps", "limit": 12.0}
SAVED = {"sha256": "ab" * 32}


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


def test_a_resume_from_an_entry_is_in_order(tmp_path: Path) -> None:
    assert not problems(tmp_path, *BEGUN, event("start", 1, 1.0, 0, **LIMIT), event("resume", 1, 2.0, 6, **SAVED))


@pytest.mark.parametrize(("steps", "sha256"), [(6, "cd" * 32), (80, "ab" * 32)])
def test_a_resume_from_anything_else_is_told(tmp_path: Path, steps: int, sha256: str) -> None:
    (problem,) = problems(
        tmp_path, *BEGUN, event("start", 1, 1.0, 0, **LIMIT), event("resume", 1, 2.0, steps, sha256=sha256)
    )
    assert problem == f"process 1 went on from a checkpoint of step {steps} that is not in it"


@pytest.mark.parametrize(("steps", "found"), [(12, []), (13, ["process 1 trained after the run had ended at step 12"])])
def test_training_after_the_end_is_told(tmp_path: Path, steps: int, found: list[str]) -> None:
    """A process that only completed the record, as earlier versions did it, is in order."""
    ended = event("end", 0, 9.0, 12, reason="finished")
    again = (event("start", 1, 1.0, 0, **LIMIT), event("end", 1, 3.0, steps, reason="finished"))
    assert problems(tmp_path, *BEGUN, ended, *again) == found


def test_what_the_wall_clock_has_more_is_evidence(tmp_path: Path) -> None:
    """Nothing more: a machine may sleep, between two processes too, and its clock may be put back."""
    walls = [
        (0, 1.0, 1000.0),
        (0, 11.0, 1110.0),
        (1, 2.0, 5000.0),
        (1, 8.0, 5006.0),
        (2, 1.0, 9000.0),
        (2, 7.0, 8000.0),
    ]
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
        ("budget: {hours: null, steps: 12, tokens: null, exaflops: null}", ["steps", 12.0]),
        ("budget: {hours: 1, steps: 12, tokens: null, exaflops: null}", None),
        ("budget: {steps: many, hours: null, tokens: null, exaflops: null}", None),
        ("seed: 0", None),
        ("[", None),
        ("[" * 1000, None),
        ("- budget", None),
        ("budget: 12", None),
        ("budget: {steps: [12], hours: null, tokens: null, exaflops: null}", None),
        (f"budget: {{steps: 1{'0' * 400}, hours: null, tokens: null, exaflops: null}}", None),
        ("budget: !!python/name:os.system", None),
        ("\0", None),
        ("", None),
        (None, None),
    ],
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
