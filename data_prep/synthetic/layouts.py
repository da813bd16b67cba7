"""GLUE's own file layouts, one row function per task: a test file has an index and no label, CoLA has no header."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from data_prep.synthetic.tasks import TASKS, Example

_PARSES = ("sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse")
_MNLI = ("index", "promptID", "pairID", "genre", *_PARSES, "sentence1", "sentence2")
_STSB = ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2")


class Layout(NamedTuple):
    """Columns and cells of the labelled files; of the test file, columns and which of the labelled cells stay."""

    columns: tuple[str, ...]
    row: Callable[[int, Example], tuple[str, ...]]
    test_columns: tuple[str, ...]
    test_row: Callable[[int, Example], tuple[str, ...]]


def _second(example: Example) -> str:
    assert example.second is not None
    return example.second


def _pair(index: int, e: Example) -> tuple[str, ...]:
    return (str(index), e.first, _second(e))


def _mnli(index: int, e: Example) -> tuple[str, ...]:
    return (str(index), str(index), f"{index}e", e.genre, "", "", "", "", e.first, _second(e))


def _stsb(index: int, e: Example) -> tuple[str, ...]:
    return (str(index), e.genre, "embedded", "2026", str(index), "none", "none", e.first, _second(e))


def _single(index: int, e: Example) -> tuple[str, ...]:
    return (str(index), e.first)


def _with_label(row: Callable[[int, Example], tuple[str, ...]], labels: int = 1) -> Callable[..., tuple[str, ...]]:
    return lambda index, e: (*row(index, e), *[e.label] * labels)


LAYOUTS: dict[str, Layout] = {
    "cola": Layout(
        (), lambda i, e: ("world", e.label, "" if e.label == "1" else "*", e.first), ("index", "sentence"), _single
    ),
    "sst2": Layout(("sentence", "label"), lambda i, e: (e.first, e.label), ("index", "sentence"), _single),
    "mrpc": Layout(
        ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        lambda i, e: (e.label, f"{2 * i}", f"{2 * i + 1}", e.first, _second(e)),
        ("index", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        lambda i, e: (str(i), f"{2 * i}", f"{2 * i + 1}", e.first, _second(e)),
    ),
    "qqp": Layout(
        ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
        lambda i, e: (str(i), f"{2 * i}", f"{2 * i + 1}", e.first, _second(e), e.label),
        ("id", "question1", "question2"),
        _pair,
    ),
    "stsb": Layout((*_STSB, "score"), _with_label(_stsb), _STSB, _stsb),
    "mnli": Layout((*_MNLI, "label1", "gold_label"), _with_label(_mnli, 2), _MNLI, _mnli),
    "qnli": Layout(
        ("index", "question", "sentence", "label"), _with_label(_pair), ("index", "question", "sentence"), _pair
    ),
    "rte": Layout(
        ("index", "sentence1", "sentence2", "label"), _with_label(_pair), ("index", "sentence1", "sentence2"), _pair
    ),
}
_MNLI_DEV = (*_MNLI, *(f"label{i}" for i in range(1, 6)), "gold_label")


def write_task(folder: Path, task: str, splits: dict[str, list[Example]]) -> None:
    """Write every split of `task` as `<folder>/<official folder>/<split>.tsv`."""
    place = folder / TASKS[task].folder
    place.mkdir(parents=True, exist_ok=True)
    layout = LAYOUTS[task]
    for split, found in splits.items():
        columns, row = layout.columns, layout.row
        if split.startswith("test"):
            columns, row = layout.test_columns, layout.test_row
        elif task == "mnli" and split.startswith("dev"):  # the five annotators' labels
            columns, row = _MNLI_DEV, _with_label(_mnli, 6)
        lines = ["\t".join(columns)] if columns else []
        lines += ["\t".join(row(index, example)) for index, example in enumerate(found)]
        (place / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
