"""What the journal and its neighbours prove against a record."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cramming.config import file_sha256
from cramming.journal import Journal, first_line_sha256, read_lines
from eval.rules.journal import (
    config_limit,
    foreign_checkpoints,
    trained_after_the_end,
    uncharged_seconds,
)
from eval.rules.load import load_run
from eval.rules.table import RULES
from eval.rules.training_agrees import out_of_order, standing

SAVED = {"sha256": "ab" * 32}
NONE_ELSE = "{hours: null, tokens: null, exaflops: null"
ODD_FILES = (
    "seed: 0",
    "[",
    "[" * 1000,
    "- budget",
    "budget: 12",
    "budget: !!python/name:os.system",
    "\0",
    "",
    None,
)


def event(kind: str, process: int, elapsed: float, steps: int, **more: Any) -> dict[str, Any]:
    return {"event": kind, "process": process, "elapsed": elapsed, "steps": steps, **more}


BEGUN = (event("start", 0, 1.0, 0), event("checkpoint", 0, 5.0, 6, **SAVED))
AGAIN = event("start", 1, 1.0, 0)
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
def test_what_no_run_leaves_is_told(more: tuple[Any, ...], found: list[str]) -> None:
    events: Any = [*BEGUN, *more]
    assert [*trained_after_the_end(events), *foreign_checkpoints(events)] == found


@pytest.fixture
def run(tmp_path: Path, make_record: Any, write_run: Any) -> Path:
    found: Path = write_run(tmp_path / "first", make_record())
    return found


def evidence(run: Path) -> tuple[bool, str]:
    """Of R5."""
    finding = next(rule for rule in RULES if rule.number == "R5")(load_run(run).record)
    return finding.ok, finding.evidence


def change_record(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads((run / "record.json").read_text())
    change(record)
    (run / "record.json").write_text(json.dumps(record))


def change_journal(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """With links and hashes in order, so that only what it says is changed."""
    path = run / "budget.jsonl"
    lines = list(read_lines(path))
    path.unlink()
    journal = Journal(path)
    for line in lines:
        change(line)
        journal.write(line)
    journal.close()
    hashes = {"journal_sha256": file_sha256(path)}
    change_record(run, lambda r: r["pretrain"]["budget"].update(hashes))
    change_record(run, lambda r: r["pretrain"].update(journal_start=first_line_sha256(path)))


def of_second_start(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda line: (
        line.update(changes) if (line["event"], line["process"]) == ("start", 1) else None
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda r: r["pretrain"]["budget"].update(journal_sha256="0" * 64),
            "SHA-256 of budget.jsonl is not the recor",
        ),
        (
            lambda r: r["pretrain"].update(journal_start="0" * 64),
            "is not the journal that the run began with",
        ),
        (lambda r: r["pretrain"].update(steps=99), "100 steps in budget.jsonl, 99 in the record"),
        (
            lambda r: r["pretrain"]["budget"].update(spent_seconds=50.0),
            "has the last step at 59.50 s of 61.00 s",
        ),
        (lambda r: r["pretrain"]["budget"].update(spent_seconds=None), "no seconds to compare"),
        (
            lambda r: r["pretrain"]["budget"]["processes"].pop(),
            "processes in budget.jsonl are not the record's",
        ),
        (lambda r: r["pretrain"]["budget"].update(limit=1.0), "had a limit of 0.016"),
        (lambda r: r["pretrain"]["budget"].update(clock="cpu"), "the record has 0.016"),
        (
            lambda r: r["pretrain"]["budget"].update(unit="tokens"),
            "10000 tokens spent in budget.jsonl",
        ),
        (
            lambda r: r["corpus"].update(manifest_sha256="0" * 64),
            "process 0 read another corpus than the record's",
        ),
        (
            lambda r: r["corpus"].update(manifest_sha256=None),
            "process 0 read another corpus than the record's",
        ),
    ],
)
def test_a_record_that_the_journal_contradicts(
    run: Path, change: Callable[[Any], Any], said: str
) -> None:
    assert evidence(run) == (True, "2 process(es), 61.0 s in the journal")
    change_record(run, change)
    ok, told = evidence(run)
    assert not ok and said in told


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (of_second_start(limit=24.0), "process 1 had a limit of 24.0 hours, the record has 0.016"),
        (of_second_start(limit=None, unit=None), "process 1 had a limit of None None"),
        (of_second_start(clock="cpu"), "hours by the CPU clock, the record has"),
        (of_second_start(corpus=None), "process 1 read another corpus"),
        (of_second_start(corpus="0" * 64), "process 1 read another corpus"),
    ],
)
def test_a_process_with_another_corpus_or_limit(
    run: Path, change: Callable[[Any], Any], said: str
) -> None:
    change_journal(run, change)
    ok, told = evidence(run)
    assert not ok and said in told


def test_what_lies_beside_the_journal_is_compared_with_it(run: Path) -> None:
    whole = (run / "metrics.jsonl").read_text()
    for rows, said in (
        (
            whole.replace('"seconds": 59.5', f'"seconds": {61.0 + 5.1}'),
            "metrics.jsonl has a step at 66.10 s",
        ),
        ("", "metrics.jsonl is not beside the record, or has no training step"),
    ):
        (run / "metrics.jsonl").write_text(rows)
        assert not evidence(run)[0] and said in evidence(run)[1]
    last = {"step": 100, "progress": 1.0, "seconds": 99.0, "tokens": 10_000, "validation_loss": 5.5}
    (run / "metrics.jsonl").write_text(f"{whole}{json.dumps(last)}\n")  # it comes after the end
    assert evidence(run)[0]
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["budget"]["hours"] = 24.0
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert "config.yaml has 24.0 hours" in evidence(run)[1]
    (run / "config.yaml").unlink()
    assert "config.yaml is not beside the record" in evidence(run)[1]
    (run / "budget.jsonl").write_text("")
    assert evidence(run) == (False, f"{run / 'budget.jsonl'}: no event")


def test_what_the_wall_clock_has_more_is_evidence() -> None:
    """Nothing more: a machine may sleep, between two processes too, and its clock may be put back."""
    walls = (
        (0, 1, 1000.0),
        (0, 11, 1110.0),
        (1, 2, 5000.0),
        (1, 8, 5006.0),
        (2, 1, 9000.0),
        (2, 7, 8000.0),
    )
    events: Any = [
        event("heartbeat", process, elapsed, 0, wall=wall) for process, elapsed, wall in walls
    ]
    assert uncharged_seconds(events) == 100.0


def test_what_the_journal_says_that_breaks_no_rule(run: Path) -> None:
    for slept, said in ((59.0, False), (7200.0, True)):
        change_journal(
            run, lambda line, s=slept: line.update(wall=line["wall"] + s * (line["event"] == "end"))
        )
        ok, told = evidence(run)
        assert ok and ("by the wall clock" in told) == said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"budget: {NONE_ELSE}, steps: 12}}", (12.0, "steps")),
        (f"budget: {NONE_ELSE.replace('hours: null', 'hours: 1')}, steps: 12}}", None),
        (f"budget: {NONE_ELSE}, steps: many}}", None),
        (f"budget: {NONE_ELSE}, steps: [12]}}", None),
        (f"budget: {NONE_ELSE}, steps: 1{'0' * 400}}}", None),
        *((text, None) for text in ODD_FILES),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_limit_is_that_of_config_yaml(tmp_path: Path, text: str | None, found: Any) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    assert config_limit(tmp_path / "config.yaml") == found


def test_a_newline_that_was_taken_from_the_end_is_told(run: Path) -> None:
    """What a crash cut short is no line at all."""
    path = run / "budget.jsonl"
    whole = path.read_bytes()
    for content, said in ((whole + b'{"event": "hea', False), (whole[:-1], True)):
        path.write_bytes(content)
        assert ("the last line of budget.jsonl has no newline" in evidence(run)[1]) == said


def test_each_row_is_compared_with_every_line_of_the_journal() -> None:
    draw = random.Random(0)
    for _ in range(300):
        steps = sorted(draw.sample(range(1, 30), draw.randint(0, 8)))
        rows = [{"step": step, "seconds": step + draw.choice([0, 0, 0, 3, -3])} for step in steps]
        events = [
            {"steps": step, "last_step_seconds": float(step + draw.choice([0, 0, 2, -2]))}
            for step in draw.choices(range(30), k=draw.randint(0, 8))
        ]
        wrong = [
            row["step"]
            for row in rows
            if any(
                (
                    event["steps"] > row["step"] + 1
                    and event["last_step_seconds"] < row["seconds"] - 1e-3
                )
                or (
                    event["steps"] < row["step"] - 1
                    and event["last_step_seconds"] > row["seconds"] + 1e-3
                )
                for event in events
            )
        ]
        assert [int(line.split()[1]) for line in out_of_order(rows, events)] == wrong


@pytest.mark.parametrize(
    ("events", "kept"),
    [
        (
            "start 0, beat 5, saved 6, beat 9, start 0, beat 0, resume 6, beat 8",
            "beat 5 saved 6 start 0 beat 0 resume 6 beat 8",
        ),
        (
            "start 0, saved 6, beat 9, start 0, start 0, resume 6, beat 8",
            "saved 6 start 0 start 0 resume 6 beat 8",
        ),
        ("start 0, saved 6, start 0, beat 0, beat 2, beat 4", "beat 2 beat 4"),
        ("start 0, beat 3, resume 2, beat 4", "resume 2 beat 4"),
    ],
    ids=["beat while loading", "killed before it resumed", "begun anew", "within a process"],
)
def test_work_stands_up_to_the_checkpoint_that_was_gone_on_from(events: str, kept: str) -> None:
    made = [
        {"event": kind, "steps": int(steps)}
        for kind, steps in (one.split() for one in events.split(", "))
    ]
    assert " ".join(f"{one['event']} {one['steps']}" for one in standing(made)) == kept
