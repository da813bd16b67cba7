"""A bar shows what its work says, from before the first unit on."""

import io

import pytest
from rich.console import Console

from cramming import progress


@pytest.mark.parametrize("width", [80, 140])
def test_a_bar_shows_its_note_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    window = Console(
        file=io.StringIO(), force_terminal=True, width=width, soft_wrap=True, color_system=None
    )
    monkeypatch.setattr(progress, "_console", window)
    note = "step 12000, loss 5.43, 125.3k tokens/s, lr 0.00097"
    with progress.Progress("pretrain", total=100.0, unit="%") as bar:
        bar.note(note)
        bar.update(45)
    last = window.file.getvalue().splitlines()[-2]  # type: ignore[attr-defined]
    assert note in last and " 45% " in last and " eta -:--:-- " in last


def test_a_bar_pulses_until_something_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress, "_console", window)
    with progress.Progress("fine-tune", total=7, unit="examples") as bar:
        assert bar._bar
        (task,) = bar._bar.tasks
        bar.advance(0)
        assert task.total is None  # the form that pulses
        bar.advance(3)
        assert (task.completed, task.total) == (3, 7)


def test_without_a_terminal_the_lines_say_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.0)
    with progress.Progress("fine-tune", total=7, unit="examples") as bar:
        bar.note("lr 0.1")
        bar.advance(0)
    assert capsys.readouterr().out.startswith(
        "fine-tune: 0 examples of 7 examples (0%), 0 s, lr 0.1\n"
    )


def test_the_remaining_time_goes_by_what_was_done_since_the_bar_began(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a resumed run an earlier process has spent most of the budget."""
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.0)
    now = iter([0.0, 10.0, 10.0, 10.0, 10.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    bar = progress.Progress("pretrain", total=100.0, unit="%", before=80.0)
    bar.update(85.0)
    assert capsys.readouterr().out.startswith("pretrain: 85%, eta 30 s, 10 s")


def test_a_day_is_not_counted_in_seconds() -> None:
    assert [progress.duration(seconds) for seconds in (45.3, 750, 79302)] == [
        "45 s",
        "12.5 min",
        "22.0 h",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_said_is_one_line_that_steers_no_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """Text may come from a stranger; letters that are joined by an invisible sign stay so."""
    window = Console(
        file=io.StringIO(), force_terminal=terminal, width=40, soft_wrap=True, highlight=False
    )
    monkeypatch.setattr(progress, "_console", window)
    progress.say(
        "a\x1b[2J\nb: in order\r\u202e\ud800 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    )
    said = window.file.getvalue()  # type: ignore[attr-defined]
    assert (
        said
        == "a\ufffd[2J b: in order \ufffd\ufffd \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645\n"
    )
