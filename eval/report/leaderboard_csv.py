"""The leaderboard as CSV: every row, numbers with seven digits, missing ones empty; the published rows behind them."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cramming.data.task_files import ENTRIES
from eval.recipe import recipe_of
from eval.report.entries import RankedEntry
from eval.report.ranking import Row
from eval.report.references import REFERENCES
from eval.report.tracks import track_of
from cramming.data.suites import AVERAGES

FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
)  # what a cell begins with that spreadsheets run, not show
NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
AVERAGE_NAMES = [average for suite in AVERAGES.values() for average in suite]

# Each column and where a row has it.
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "kind": lambda row: "run",
    "run": lambda row: row.run.label,
    "folder": lambda row: row.run.folder.name,
    "init": lambda row: row.init,
    "suite": lambda row: row.suite,
    "division": lambda row: row.verdict.division,
    "broken_rules": lambda row: " ".join(f.rule for f in row.verdict.broken),
    "split": lambda row: row.section.split,
    "selection": lambda row: row.section.selection,
    "seeds": lambda row: " ".join(map(str, row.section.seeds)),
    **{name: partial(lambda n, row: row.averages.get(n), name) for name in AVERAGE_NAMES},
    **{
        f"{n}_std": partial(lambda n, row: row.spread(n) if n in row.averages else None, n)
        for n in AVERAGE_NAMES
    },
    "subset": lambda row: row.subset,
    **{name: partial(lambda n, row: row.score(n), name) for name in ENTRIES},
    **{
        f"{n}_std": partial(lambda n, row: (task := row.section.tasks.get(n)) and task.spread, n)
        for n in ENTRIES
    },
    "parameters": lambda row: row.run.record.training.parameters,
    "budget_unit": lambda row: row.run.record.training.budget.unit,
    "budget_limit": lambda row: row.run.record.training.budget.limit,
    "spent_seconds": lambda row: row.run.record.training.budget.spent_seconds,
    "tokens": lambda row: row.run.record.training.tokens,
    "energy_kwh": lambda row: row.run.record.training.energy_kwh,
    "validation_loss": lambda row: row.run.record.training.validation.loss,
    "all_mask_loss": lambda row: row.run.record.training.validation.all_mask_loss,
    "bits_per_byte": lambda row: row.run.record.training.validation.bits_per_byte,
    "device": lambda row: row.run.record.environment.device.name,
    "corpus_sha256": lambda row: row.run.record.corpus.manifest_sha256,
    "validation_corpus_sha256": lambda row: row.run.record.corpus.validation.manifest_sha256,
    "exaflops": lambda row: row.run.record.training.exaflops,
    "tokens_per_second": lambda row: row.run.record.training.tokens_per_second,
    "pretraining_seed": lambda row: row.run.record.training.seed,
    "recipe": lambda row: (found := recipe_of(row.run.record)) and found.settings,
    "commit": lambda row: row.run.record.environment.git.commit,
    "created": lambda row: row.run.record.created,
}

# The same of the entry that a ranked row belongs to; `p_above` and `duel_above` are about the entry above it.
PLACE_COLUMNS: dict[str, Callable[[RankedEntry], Any]] = {
    "entry": lambda one: one.entry.label,
    "track": lambda one: (track := track_of(one.entry.first.run.record)) and track.title,
    "table": lambda one: "closed" if one.entry.first.ranked else "any objective",
    "first_place": lambda one: one.first,
    "last_place": lambda one: one.last,
    "pretraining_seeds": lambda one: len(one.entry.rows),
    "mean": lambda one: one.entry.main,
    "mean_std": lambda one: one.entry.spread,
    "mean_low": lambda one: one.entry.bounds and one.entry.bounds[0],
    "mean_high": lambda one: one.entry.bounds and one.entry.bounds[1],
    "p_above": lambda one: one.p,
    "duel_above": lambda one: one.duel or None,
    "seeds_to_decide": lambda one: one.needed,
    "remarks": lambda one: "; ".join(one.entry.remarks) or None,
}


def comma_separated(rows: Sequence[Row], ranked_entries: Sequence[RankedEntry]) -> str:
    """The text of leaderboard.csv."""
    buffer = io.StringIO()
    writer = csv.DictWriter(
        buffer, [*COLUMNS, *PLACE_COLUMNS, "source"], restval="", lineterminator="\n"
    )
    writer.writeheader()
    lines: list[dict[str, Any]] = [
        {name: value(row) for name, value in COLUMNS.items()} for row in rows
    ]
    for line, row in zip(lines, rows):
        ranked = next((one for one in ranked_entries if row in one.entry.rows), None)
        line |= {name: value(ranked) for name, value in PLACE_COLUMNS.items()} if ranked else {}
    for one in REFERENCES:
        averages = {"avg9": one.avg9, "avg8": one.avg8, "source": one.source}
        lines.append(
            {"kind": "published", "run": one.title, "suite": "glue", **averages, **one.scores}
        )
    for line in lines:
        writer.writerow({name: _cell(value) for name, value in line.items() if value is not None})
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    """Seven digits, as small as a number is; a text that a spreadsheet would run as a formula is put behind an
    apostrophe, a number is not."""
    if isinstance(value, bool | int | float):
        return float(f"{value:.7g}") if isinstance(value, float) else value
    text = str(value)
    return f"'{text}" if text.lstrip(" \n")[:1] in FORMULA and not NUMBER.fullmatch(text) else text
