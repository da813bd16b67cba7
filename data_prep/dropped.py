"""`dropped.jsonl`: a line for each document, or part of one, that a stage dropped.

They are ordered by stage, then as in the text, so that the bytes are the same for any division into tasks. Memory: one
line, and the places of the documents of some parts.
"""

import json
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from cramming.files import overwrite_atomically
from data_prep.parts import TASK_STAGES
from data_prep.selection import DroppedRows, Rows, Selection
from data_prep.task_grid import DROPPED

CACHED_PARTS = 16


def write_dropped(folder: Path, selection: Selection) -> None:
    """Write the file, atomically."""
    overwrite_atomically(folder / DROPPED, partial(_write, selection))


def _write(selection: Selection, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for node in _nodes(selection):
            file.write(json.dumps(node, ensure_ascii=False) + "\n")


def _nodes(selection: Selection) -> Iterator[dict[str, Any]]:
    for stage in TASK_STAGES:
        for part in selection.rows.parts:
            for reason, example in part.dropped(stage):
                yield example.node(stage, reason)
    for dropped in selection.dropped:
        yield from _selected(dropped, selection.rows)


def _selected(dropped: DroppedRows, rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield what one of the stages dropped that compare documents."""
    part_K = rows.part_of(dropped.rows_K)
    partners: Iterator[str | None] = iter(_places(dropped.partner_K, rows))
    for number in np.unique(part_K).tolist():
        of_part = dropped.rows_K[part_K == number] - rows.first_P[number]
        for example in rows.parts[number].examples(of_part.tolist()):
            yield example.node(dropped.stage, dropped.reason, next(partners, None))


def _places(rows_K: np.ndarray | None, rows: Rows) -> Iterator[str]:
    """Yield what documents are called; nothing without any."""
    places = lru_cache(CACHED_PARTS)(lambda number: rows.parts[number].array("places"))
    if rows_K is None:
        return
    for row, number in zip(rows_K.tolist(), rows.part_of(rows_K).tolist()):
        place = places(number)[row - rows.first_P[number]]
        yield rows.parts[number].placed(place).place()
