"""The leaderboard as CSV: every row with four decimals, missing numbers empty, the published rows behind them."""

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from cramming.data.task_files import ENTRIES
from cramming.record_schema import Record
from eval.report.ranking import Row
from eval.report.references import REFERENCES, Reference
from eval.tasks.suites import AVERAGES

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a cell begins with that spreadsheets run, not show
NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
AVERAGE_NAMES = [average for suite in AVERAGES.values() for average in suite]
COLUMNS = [
    "kind", "run", "folder", "init", "suite", "division", "broken_rules", "split", "selection", "seeds",
    *AVERAGE_NAMES, *(f"{name}_std" for name in AVERAGE_NAMES), "subset", *ENTRIES, *(f"{e}_std" for e in ENTRIES),
    "parameters", "budget_unit", "budget_limit", "spent_seconds", "tokens", "energy_kwh", "validation_loss",
    "all_mask_loss", "bits_per_byte", "device", "corpus_sha256", "validation_corpus_sha256", "commit", "created",
    "source",
]  # fmt: skip


def comma_separated(rows: Sequence[Row]) -> str:
    """The text of leaderboard.csv."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for line in [*map(_values, rows), *map(_published, REFERENCES)]:
        writer.writerow({name: _cell(value) for name, value in line.items() if value is not None})
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    """Four decimals; a text that a spreadsheet would run as a formula is put behind an apostrophe, a number is not."""
    if isinstance(value, bool | int | float):
        return round(value, 4) if isinstance(value, float) else value
    text = str(value)
    return f"'{text}" if text.lstrip(" \n")[:1] in FORMULA and not NUMBER.fullmatch(text) else text


def _values(row: Row) -> dict[str, Any]:
    return {
        "kind": "run",
        "run": row.run.label,
        "folder": row.run.folder.name,
        "init": row.init,
        "suite": row.suite,
        "division": row.verdict.division,
        "broken_rules": " ".join(f.rule for f in row.verdict.broken),
        "split": row.section.split,
        "selection": row.section.selection,
        "seeds": " ".join(map(str, row.section.seeds)),
        "subset": row.subset,
        **row.averages,
        **{f"{name}_std": row.spread(name) for name in row.averages},
        **{e: task.score for e, task in row.section.tasks.items() if e in ENTRIES},
        **{f"{e}_std": task.spread for e, task in row.section.tasks.items() if e in ENTRIES},
        **_of_training(row.run.record),
    }


def _of_training(record: Record) -> dict[str, Any]:
    training, corpus = record.training, record.corpus
    return {
        "parameters": training.parameters,
        "budget_unit": training.budget.unit,
        "budget_limit": training.budget.limit,
        "spent_seconds": training.budget.spent_seconds,
        "tokens": training.tokens,
        "energy_kwh": training.energy_kwh,
        "validation_loss": training.validation.loss,
        "all_mask_loss": training.validation.all_mask_loss,
        "bits_per_byte": training.validation.bits_per_byte,
        "device": record.environment.device.name,
        "corpus_sha256": corpus.manifest_sha256,
        "validation_corpus_sha256": corpus.validation.manifest_sha256,
        "commit": record.environment.git.commit,
        "created": record.created,
    }


def _published(row: Reference) -> dict[str, Any]:
    averages = {"avg9": row.avg9, "avg8": row.avg8, "source": row.source}
    return {"kind": "published", "run": row.title, "suite": "glue", **averages, **row.scores}
