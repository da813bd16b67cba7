"""Words for numbers, runs and scores, the same in every table and on every page."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cramming.data.task_files import ENTRIES, GLUE
from cramming.progress import budget_text, duration
from cramming.record_schema import Record
from eval.rules.load import Run

DASH = "–"
SUBSET = "†"  # of a score on another number of examples than the official one
PARTIAL = "‡"  # of a mean over some of the tasks
TITLES = {
    "avg9": "avg-9",
    "avg8": "avg-8",
    "embedded": "average",
    "place": "#",
    "model": "Model",
    "scored_mean": f"task mean{PARTIAL}",
    "gain": "over baseline",
    "hours": "Hours",
    "hardware": "Hardware",
    "division": "Division",
}


class Score(NamedTuple):
    """Score in percent, its standard deviation, and the mark of one that compares with no full score."""

    value: float | None = None
    spread: float | None = None
    mark: str = ""

    def __str__(self) -> str:
        """Return `83.9† ±0.4`, or a dash."""
        if self.value is None:
            return DASH
        spread = "" if self.spread is None else f" ±{self.spread:.1f}"
        return f"{self.value:.1f}{self.mark}{spread}"


def or_dash(value: float | None, words: Callable[[float], str]) -> str:
    """Return the number in words, or a dash."""
    return DASH if value is None else words(value)


def counted(count: float, noun: str, plural: str = "") -> str:
    """Return `1 epoch` or `5 epochs`."""
    return f"{count:g} {noun if count == 1 else plural or noun + 's'}"


def compact(value: float) -> str:
    """Return a number with three significant digits: 12345678 gives 12.3M."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.4g}"


# Forms of a fact, by name; the page has the same ones (templates/table.js).
FORMS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "date": lambda time: time[:10],
    "compact": compact,
    "nats": "{:.3f}".format,
    "score": "{:.1f}".format,
    "percent": "{:.1%}".format,
    "duration": duration,
    "bytes": lambda value: f"{value / 1e9:.2f} GB",
}


def pairs(values: Any) -> str:
    """Return `rate 0.25, mask_share 0.8`; a section inside a section stands in brackets."""
    if isinstance(values, list):
        return " and ".join(map(str, values))
    if not isinstance(values, Mapping):
        return str(values)
    parts = []
    for key, value in values.items():
        words = pairs(value)
        parts.append(f"{key} ({words})" if isinstance(value, Mapping) else f"{key} {words}")
    return ", ".join(parts)


def title_of(name: str) -> str:
    """Return the title of a column, an average, an entry or a task; another name as it is."""
    if name in ENTRIES:
        return ENTRIES[name][1].title
    return GLUE[name].title if name in GLUE else TITLES.get(name, name)


def titles_of(names: Iterable[str]) -> str:
    """Return the titles of entries in one line."""
    return ", ".join(map(title_of, names))


def join_words(*parts: object, separator: str = ", ") -> str:
    """Return the parts that are not empty, in one line."""
    return separator.join(str(part) for part in parts if part)


def describe_run(record: Record) -> str:
    """Return `12.3M parameters, 24 hours on RTX A6000`, or as much of it as the record has."""
    parameters = record.training.parameters
    model = parameters and f"{compact(parameters)} parameters"
    return join_words(model, describe_budget(record))


def describe_budget(record: Record) -> str | None:
    """Return `24 hours on RTX A6000`; None for a model without pretraining."""
    limit, unit = record.training.budget.limit, record.training.budget.unit
    if limit is None or unit is None:
        return None
    device = record.environment.device
    return join_words(budget_text(unit, limit), device.name or device.kind, separator=" on ")


def hub_name(folder: Path) -> str | None:
    """Return the name on the hub of a checkpoint that lies in the hub's cache, None for other folders."""
    for part in folder.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return None


def short_name(folder: Path) -> str:
    """Return a checkpoint's name on the hub, or the last two parts of its path."""
    return hub_name(folder) or "/".join(folder.parts[-2:])


def run_id(run: Run) -> str:
    """Return the name of a run in the page's address, different for different folders."""
    safe = ""
    for character in run.folder.name:
        is_safe = character.isalnum() or character in "-_"
        safe += character if is_safe else f".{ord(character):x}"
    return safe
