"""How the report words a number, a run and a score: the same in every table."""

from collections.abc import Callable, Mapping
from typing import Any

from cramming.data.task_files import ENTRIES, GLUE
from cramming.record_schema import Record
from eval.rules.load import Run

DASH = "–"
SUBSET = "†"
NOT_OFFICIAL = (
    f"{SUBSET} not the official number of examples; not comparable with full-task numbers"
)
TITLES = {"avg9": "avg-9", "avg8": "avg-8", "embedded": "average"}
SUITE_TITLES = {"glue": "GLUE", "embedded": "Embedded tasks"}


def or_dash(value: float | None, words: Callable[[float], str]) -> str:
    """The number in words, or a dash."""
    return DASH if value is None else words(value)


def score_words(value: float | None, subset: bool | None = False) -> str:
    """`83.9`, with the subset's mark, or a dash."""
    return or_dash(value, lambda score: f"{score:.1f}{SUBSET if subset else ''}")


def spread_words(spread: float | None) -> str:
    """`±0.4`; empty where there is none."""
    return "" if spread is None else f"±{spread:.1f}"


def counted(count: float, noun: str, plural: str = "") -> str:
    """`1 epoch`, `5 epochs`."""
    return f"{count:g} {noun if count == 1 else plural or noun + 's'}"


def compact(value: float) -> str:
    """For tables and plots, three significant digits: 12345678 -> 12.3M."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.4g}"


def pairs(values: Any) -> str:
    """`rate 0.25, mask_share 0.8`; a section inside a section in brackets."""
    if isinstance(values, list):
        return " and ".join(map(str, values))
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(
        f"{k} ({pairs(v)})" if isinstance(v, Mapping) else f"{k} {pairs(v)}"
        for k, v in values.items()
    )


def title_of(name: object) -> str:
    """The title of an average, an entry or a task, `SST-2`; another name as it is."""
    if name in ENTRIES:
        return ENTRIES[str(name)][1].title
    return GLUE[str(name)].title if name in GLUE else TITLES.get(str(name), str(name))


def model_words(record: Record) -> str:
    """Such as `12.3M parameters`; empty where it is not on record."""
    parameters = record.training.parameters
    return "" if parameters is None else f"{compact(parameters)} parameters"


def budget_words(record: Record) -> str:
    """Such as `0.5 h on 1 AMD EPYC`; empty where there was no pretraining."""
    limit, unit = record.training.budget.limit, record.training.budget.unit
    if limit is None:
        return ""
    device = record.environment.device.name or record.environment.device.kind
    amount = amount_words(unit, limit)
    return f"{amount} on {device}" if device else amount


def amount_words(unit: str | None, limit: float) -> str:
    """Such as `24 h`, `3 min`, `13 exaFLOPs`."""
    if unit == "hours":
        return f"{limit:.3g} h" if limit >= 0.5 else f"{limit * 60:.3g} min"
    return f"{compact(limit)} {'exaFLOPs' if unit == 'exaflops' else unit}"


def not_comparable(record: Record) -> str:
    """What keeps a validation loss from comparing with the others of its column."""
    other = record.corpus.validation.manifest_sha256
    return f"on {other[:8]}" if other else ""


def breaks(run: Run) -> str:
    """Return words such as `breaks R4, P7`: the broken rules of both divisions."""
    numbers = [finding.rule for finding in run.verdict.broken_of("both")]
    return f"breaks {', '.join(numbers)}" if numbers else ""


def anchor(run: Run) -> str:
    """The run's place in the page and the stem of its plots: different for different folders."""
    return "run-" + "".join(
        c if c.isalnum() or c in "-_" else f".{ord(c):x}" for c in run.folder.name
    )
