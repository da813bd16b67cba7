"""`dropped.jsonl`: a line for each document, or part of one, that a stage dropped.

They are ordered by stage, then as in the text, so that the bytes are the same for any division into tasks. Memory: 24
bytes for each duplicate.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cramming.files import overwrite_atomically
from data_prep.parts import PLACE, TASK_STAGES
from data_prep.selection import DroppedRows, Rows, Selection
from data_prep.task_grid import DROPPED


def write_dropped(folder: Path, selection: Selection) -> None:
    """Write the file, atomically."""
    overwrite_atomically(folder / DROPPED, partial(_write, selection))


def _write(selection: Selection, path: Path) -> None:
    # Names of files may be no UTF-8: what replaces their bytes is an escape of JSON.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
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
    partners = iter(()) if dropped.partner_K is None else _places(dropped.partner_K, rows)
    for number in np.unique(part_K).tolist():
        of_part = dropped.rows_K[part_K == number] - rows.first_P[number]
        for example in rows.parts[number].examples(of_part.tolist()):
            yield example.node(dropped.stage, dropped.reason, next(partners, None))


def _places(rows_K: np.ndarray, rows: Rows) -> Iterator[str]:
    """Yield what documents are called; each part is read once."""
    part_K, place_K = rows.part_of(rows_K), np.empty(len(rows_K), PLACE)
    for number in np.unique(part_K).tolist():
        of_part_K = part_K == number
        places = rows.parts[number].array("places")
        place_K[of_part_K] = places[rows_K[of_part_K] - rows.first_P[number]]
    for number, place in zip(part_K.tolist(), place_K):
        yield rows.parts[number].placed(place).place()
