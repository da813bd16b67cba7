"""The journal: what a crash leaves is read, what was changed is found."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from cramming.journal import (
    Journal,
    Saved,
    checkpoints_of,
    ended_after,
    processes_of,
    read_journal,
    spent_seconds,
)


def event(process: int, elapsed: float, kind: str = "heartbeat", **more: Any) -> dict[str, Any]:
    return {"event": kind, "process": process, "elapsed": elapsed, "steps": int(elapsed), **more}


def write(path: Path, *events: dict[str, Any]) -> Path:
    journal = Journal(path)
    for one in events:
        journal.write(one)
    journal.close()
    return path


TWO = (
    event(0, 1.0, "start"),
    event(0, 5.0, "checkpoint", sha256="ab"),
    event(0, 7.5),
    event(1, 2.0, "start"),
    event(1, 4.0, "end", reason="stopped"),
    event(2, 0.5, "start"),
)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return write(tmp_path / "budget.jsonl", *TWO)


def test_spent_is_the_sum_of_each_processes_last_entry(journal: Path) -> None:
    events = read_journal(journal)
    assert [p["spent_seconds"] for p in processes_of(events)] == [7.5, 4.0, 0.5]
    assert [p["ended"] for p in processes_of(events)] == ["killed", "stopped", "killed"]
    assert spent_seconds(events) == 12.0
    assert checkpoints_of(events) == [Saved(5, "ab")]
    assert ended_after(events) is None


def test_lines_that_nothing_links_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "budget.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in TWO))
    with pytest.raises(UserError, match=r"budget\.jsonl:1: its lines are not linked"):
        read_journal(path)


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_torn_last_line_is_dropped_and_cut_away(journal: Path, cut: int) -> None:
    before = read_journal(journal)
    with journal.open("a") as file:
        file.write(json.dumps(event(2, 9.0))[:cut])
    assert read_journal(journal) == before
    write(journal, event(2, 3.0))
    assert [e["elapsed"] for e in read_journal(journal)] == [*(e["elapsed"] for e in before), 3.0]


def test_a_whole_line_without_its_newline_is_torn_too(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-1])
    assert len(read_journal(journal)) == len(TWO) - 1
    write(journal, event(2, 1.0, "start"))
    assert len(read_journal(journal)) == len(TWO)


@pytest.mark.parametrize("row", range(len(TWO) - 1))
def test_a_line_that_was_changed_or_taken_out_is_found(journal: Path, row: int) -> None:
    """Anywhere but at the end; the end is for the checkpoints and the log to witness."""
    content = journal.read_text().splitlines(keepends=True)
    shorter = json.loads(content[row])
    shorter["elapsed"] -= 0.25
    for edited in ([], [json.dumps(shorter) + "\n"], [content[row]] * 2):
        journal.write_text("".join(content[:row] + edited + content[row + 1 :]))
        with pytest.raises(UserError, match=rf"budget\.jsonl:({row + 1}|{row + 2}): ") as caught:
            read_journal(journal)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{}",
        "null",
        "7",
        '{"process": 0}',
        "\0\0\0",
        '{"event": "x", "process": 0, "elapsed": -5}',
        '{"event": "x", "process": 0, "elapsed": NaN}',
        '{"process": 0, "elapsed": 1}',
        '{"event": "x", "process": "0", "elapsed": 1}',
        '{"event": "x", "process": 0, "elapsed": Infinity}',
        '{"event": "end", "process": 0, "elapsed": 1}',
        '{"event": "x", "process": 0, "elapsed": 1, "steps": 1, "slowest_update_seconds": "1"}',
    ],
)
def test_damage_ends_the_run(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "budget.jsonl", TWO[0])
    if damage.startswith("{"):
        write(path, json.loads(damage))
    else:
        path.write_text(path.read_text() + damage + "\n")
    write(path, event(0, 2.0))
    with pytest.raises(UserError, match=r"budget\.jsonl:2: damaged") as caught:
        read_journal(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "second",
    [
        event(0, 0.5),  # time goes back
        event(1, 2.0),  # a process that never started
        event(2, 2.0, "start"),  # one process is left out
        event(0, 2.0, "start"),  # the same one again
        event(0, 2.0, "checkpoint"),  # of no file
    ],
)
def test_what_no_run_writes_is_damage(tmp_path: Path, second: dict[str, Any]) -> None:
    path = write(tmp_path / "budget.jsonl", TWO[0], second)
    with pytest.raises(UserError, match=r"budget\.jsonl:2: damaged"):
        read_journal(path)


def test_a_step_that_ended_later_than_its_own_line_is_damage(tmp_path: Path) -> None:
    """Seconds made smaller by hand. Those of earlier processes count."""
    resumed = (event(1, 1.0, "start"), event(1, 2.0, "resume", sha256="ab", last_step_seconds=9.0))
    path = write(tmp_path / "budget.jsonl", TWO[0], event(0, 9.0, last_step_seconds=9.0), *resumed)
    assert len(read_journal(path)) == 4
    write(path, event(1, 3.0, last_step_seconds=15.0))
    with pytest.raises(UserError, match=r"budget\.jsonl:5: damaged"):
        read_journal(path)


def test_nothing_follows_the_end_of_a_process(tmp_path: Path) -> None:
    path = write(
        tmp_path / "budget.jsonl", TWO[0], event(0, 2.0, "end", reason="finished"), event(0, 3.0)
    )
    with pytest.raises(UserError, match=r"budget\.jsonl:3: damaged"):
        read_journal(path)


def test_a_write_that_fails_leaves_nothing_behind(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line in the middle would be damage, and cost the run."""
    before, writer = journal.read_bytes(), Journal(journal)

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", no_space)
        writer.write(event(2, 1.0))
    assert journal.read_bytes() == before
    writer.write(event(2, 2.0))
    writer.close()
    assert read_journal(journal)[-1]["elapsed"] == 2.0


def test_each_line_names_the_one_before_it(journal: Path) -> None:
    content = journal.read_bytes().splitlines()
    links = [json.loads(line)["previous"] for line in content]
    assert links == ["", *(hashlib.sha256(line).hexdigest() for line in content[:-1])]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda text: text.replace(b"\n", b"\r\n"),
            r"budget\.jsonl:1: .* CRLF.*tr -d '\\r' < budget\.jsonl",
        ),
        (
            lambda text: text + b"\n",
            r"budget\.jsonl:7: .*an empty line, which no run writes; remove it",
        ),
    ],
)
def test_what_a_copy_did_to_it_is_named_with_its_cure(
    journal: Path, change: Callable[[bytes], bytes], says: str
) -> None:
    """It accuses nobody."""
    journal.write_bytes(change(journal.read_bytes()))
    with pytest.raises(UserError, match=says):
        read_journal(journal)


def test_a_limit_on_a_files_size_is_named_and_leaves_nothing_behind(journal: Path) -> None:
    """The kernel writes up to the limit and says why it stopped only when it is asked for the rest."""
    before = journal.read_bytes()
    code = f"""
import resource
from cramming.journal import Journal
from pathlib import Path
writer = Journal(Path({str(journal)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 40}, resource.RLIM_INFINITY))
try:
    writer.write({event(2, 1.0)!r})
except OSError as error:
    print(error.strerror, error.filename, sep=", ")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"File too large, {journal}\n" and journal.read_bytes() == before
