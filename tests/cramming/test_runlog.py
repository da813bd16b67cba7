"""The run log: a chain of typed events that no crash tears and no change leaves whole."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cramming.config import UserError
from cramming.runlog import (
    RUN_LOG,
    Checkpoint,
    Event,
    EventLog,
    Heartbeat,
    Resume,
    Start,
    Steps,
    Validation,
    head_of,
    read_log,
    training_of,
)


def start(**more: Any) -> Start:
    """The start of a process."""
    facts = {"name": "a", "elapsed": 1.0, "wall": 100.0, "suite_version": "1", "rules_version": "7"}
    budget = {"unit": "steps", "limit": 10, "clock": "wall", "division": "open"}
    return Start(**facts, **budget, **more)


def steps(step: int) -> Steps:
    """Step number `step`."""
    return Steps(
        step=step,
        progress=step / 10,
        seconds=float(step),
        tokens=8 * step,
        loss=5.0,
        lr=1e-3,
        each_progress=[(step - 1) / 10],
        each_loss=[5.0],
        each_accuracy=[0.1],
    )


def validation(step: int) -> Validation:
    """A validation after so many steps."""
    return Validation(step=step, progress=0.1, seconds=1.0, tokens=8, targets=4, loss=4.0)


def timed(kind: type[Event], elapsed: float, **more: Any) -> Event:
    """A timed event."""
    return kind(elapsed=elapsed, wall=100.0 + elapsed, **more)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write(*events)` appends events to a log and returns its path."""

    def call(*events: Event) -> Path:
        log = EventLog(tmp_path / RUN_LOG)
        for event in events:
            log.append(event)
        log.close()
        return tmp_path / RUN_LOG

    return call


def test_events_are_read_as_they_were_written(write: Callable[..., Path]) -> None:
    events = [start(recipe={"a": None, "b": [1, {"c": None}]}), steps(1), validation(1)]
    events.append(steps(2).model_copy(update={"each_loss": [None], "loss": None}))
    path = write(*events)
    entries = read_log(path)
    assert [entry.event for entry in entries] == events
    assert [entry.line for entry in entries] == [1, 2, 3, 4]
    assert head_of(path) == entries[0].sha256
    for line in path.read_text().splitlines():  # for jq and pandas
        assert next(iter(json.loads(line))) == "event"


@pytest.mark.parametrize("left", [1, 20, -1])
def test_a_torn_last_line_is_dropped_and_the_log_continues(
    write: Callable[..., Path], left: int
) -> None:
    path = write(start(recipe={}), steps(1))
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole[: -len(last)] + last[:left])
    assert [entry.event for entry in read_log(path)] == [start(recipe={})]
    assert [entry.event for entry in read_log(write(steps(1)))] == [start(recipe={}), steps(1)]
    assert path.read_bytes() == whole


def test_any_change_of_a_line_is_named(write: Callable[..., Path]) -> None:
    """Bytes flipped, lines removed, doubled or exchanged: each is a break of the chain or an event that is none."""
    path = write(start(recipe={"x": 1}), *(steps(n) for n in range(1, 6)), validation(5))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    rng = random.Random(0)
    for _ in range(300):
        changed = list(lines)
        kind = rng.choice(("flip", "remove", "double", "swap"))
        at = rng.randrange(len(lines) - 1)  # what is behind the last line, no line can tell
        if kind == "flip":
            place = rng.randrange(len(lines[at]) - 1)
            flipped = bytes([lines[at][place] ^ (1 << rng.randrange(8))])
            changed[at] = lines[at][:place] + flipped + lines[at][place + 1 :]
        elif kind == "remove":
            del changed[at]
        elif kind == "double":
            changed.insert(at, lines[at])
        else:
            changed[at], changed[at + 1] = changed[at + 1], changed[at]
        path.write_bytes(b"".join(changed))
        with pytest.raises(UserError) as caught:
            training_of(read_log(path))
        message = str(caught.value)
        assert RUN_LOG in message and "\n" not in message


@pytest.mark.parametrize(
    "events",
    [
        [steps(1)],
        [start()],
        [start(recipe={}), start(recipe={})],
        [start(recipe={}), timed(Heartbeat, 0.5)],
        [start(recipe={}), timed(Resume, 2.0, sha256="ab" * 32)],
        [start(recipe={}), timed(Heartbeat, 2.0, last_step_seconds=9.0)],
    ],
)
def test_what_no_run_writes_is_refused(events: list[Event], write: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=RUN_LOG):
        training_of(read_log(write(*events)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_no_event(value: float) -> None:
    with pytest.raises(ValidationError):
        timed(Heartbeat, value)


def test_a_resume_supersedes_what_came_after_its_checkpoint(write: Callable[..., Path]) -> None:
    first, second = "aa" * 32, "bb" * 32
    path = write(
        start(recipe={}),
        steps(1),
        timed(Checkpoint, 2.0, sha256=first, step=1),
        steps(2),
        validation(2),
        timed(Checkpoint, 3.0, sha256=second, step=2),
        steps(3),
        start(),
        timed(Resume, 4.0, sha256=first, steps=1),
        steps(2),
    )
    training = training_of(read_log(path))
    assert [event.step for event in training.steps] == [1, 2]
    assert training.validations == []
    assert [saved.sha256 for saved in training.saved] == [first]
    assert [saved.sha256 for saved in training.all_saved] == [second, first]
    assert training.spent_seconds == 3.0 + 4.0  # what was thrown away stays spent
    with pytest.raises(UserError, match="does not have"):
        training_of(read_log(write(start(), timed(Resume, 5.0, sha256=second))))


def test_steps_that_no_heartbeat_counted_are_trained(write: Callable[..., Path]) -> None:
    """A process killed within its first seconds: a resume must say from where it continues."""
    path = write(start(recipe={}), steps(1))
    assert training_of(read_log(path)).has_trained
    first = "aa" * 32
    path = write(start(), timed(Resume, 1.0, steps=0), timed(Checkpoint, 2.0, sha256=first, step=1))
    training = training_of(read_log(path))
    assert training.has_trained and training.steps == []


def test_a_limit_on_a_files_size_is_named_and_leaves_nothing_behind(
    write: Callable[..., Path],
) -> None:
    """The kernel writes up to the limit and says why it stopped only when it is asked for the rest."""
    path = write(start(recipe={}))
    before = path.read_bytes()
    code = f"""
import resource
from pathlib import Path
from cramming.runlog import EventLog, Heartbeat
log = EventLog(Path({str(path)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 40}, resource.RLIM_INFINITY))
try:
    log.append(Heartbeat(elapsed=2.0, wall=100.0))
except OSError as error:
    print(error.strerror, error.filename, sep=", ")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"File too large, {path}\n"
    assert path.read_bytes() == before
