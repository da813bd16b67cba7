"""Output of long work: a bar with rate and ETA on a terminal, plain lines in a log file."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from cramming.config import printable

LOG_EVERY_SECONDS = 10.0
WIDE = 100  # terminal width in columns from which on the bar shows all of its parts
_console = Console(highlight=False, soft_wrap=True)


def use_stderr() -> None:
    """Send all messages to stderr from now on, because a program reads stdout."""
    global _console
    _console = Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """Print one plain line (above a running bar, if there is one), with control characters escaped."""
    if _console.is_terminal:
        _console.print(printable(message), markup=False)
        return
    try:
        print(printable(message), flush=True, file=_console.file)
    except OSError as error:
        error.filename = (
            "standard output"  # otherwise the error would seem to be about another file
        )
        raise


def show_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as plain text in aligned columns."""
    widths = [max(map(len, column)) for column in zip(headers, *rows)]
    say(title)
    for row in (headers, *rows):
        say("  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip())


def format_count(value: float, unit: str) -> str:
    """Return a count with one decimal: `12.3 MB` for unit B, `45%` for unit %, else `12.3k steps`."""
    if unit == "%":
        return f"{value:.0f}%"
    for factor, prefix in ((1e12, "T"), (1e9, "G" if unit == "B" else "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            number = f"{value / factor:.1f}{'' if unit == 'B' else prefix}"
            return f"{number} {prefix}B" if unit == "B" else f"{number} {unit}".strip()
    return f"{value:.0f} {unit}".strip()


def budget_text(unit: str, limit: float) -> str:
    """Return a limit in words: `2 minutes`, `24 hours`, `1,000 steps`, `13 exaflops`."""
    if unit == "hours" and limit < 2:
        unit, limit = "minutes", 60 * limit
    amount = f"{limit:,.0f}" if unit in ("tokens", "steps") else f"{limit:.4g}"
    noun = unit.removesuffix("s") if amount == "1" else unit
    return f"{amount} {noun}"


def duration(seconds: float) -> str:
    """Return `45 s`, `12.5 min` or `23.9 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        done = format_count(task.completed, unit)
        rate = f", {format_count(task.speed, unit)}/s" if task.speed and unit != "%" else ""
        return Text(f"{done}{rate}")


class Progress:
    """Progress bar: `with Progress("tokenize", total=size, unit="B") as bar: bar.advance(n); bar.note("3 files")`.

    With `total=None` no ETA is shown. Until the first progress the bar pulses. Without a terminal a line is printed
    at most every 10 seconds. Work done `before` is shown, but not part of the rate from which the ETA follows.
    """

    def __init__(
        self, title: str, total: float | None, unit: str = "", before: float = 0.0
    ) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = self._before = before
        self._note = ""
        self._started = self._last_line = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> "Progress":
        if _console.is_terminal:
            wide = _console.width >= WIDE  # on a narrow one a note would push the ETA out
            columns = [
                TextColumn("{task.description}"),
                BarColumn(bar_width=30 if wide else 3),
                _RateColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            ]
            if wide:
                columns.insert(3, TimeElapsedColumn())
            self._bar = RichProgress(*columns, console=_console, refresh_per_second=4)
            self._bar.start()
            self._task = self._bar.add_task(
                self.title, total=None, completed=int(self._before), unit=self.unit, note=""
            )
        return self

    def advance(self, amount: float = 1.0) -> None:
        """Count `amount` more units as done."""
        self.update(self.done + amount)

    def update(self, done: float) -> None:
        """Set the number of units done."""
        self.done = done
        if self._bar:
            self._bar.update(self._task, completed=done, total=self.total if done else None)
        elif time.monotonic() - self._last_line >= LOG_EVERY_SECONDS:
            self._print_line()

    def note(self, text: str) -> None:
        """Show a short text behind the bar (loss, current file)."""
        self._note = text
        if self._bar:
            self._bar.update(self._task, note=text)

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        elapsed = self._last_line - self._started
        parts = [f"{self.title}: {format_count(self.done, self.unit)}"]
        if self.total and self.unit != "%":
            parts[0] += (
                f" of {format_count(self.total, self.unit)} ({100 * self.done / self.total:.0f}%)"
            )
        if self.total and self.done > self._before:
            seconds_per_unit = elapsed / (self.done - self._before)
            parts.append(f"eta {duration(seconds_per_unit * (self.total - self.done))}")
        say(", ".join(filter(None, [*parts, duration(elapsed), self._note])))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar:
            self._bar.stop()
        elif kind is None and self.done:
            self._print_line()
