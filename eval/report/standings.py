"""Standings: the scored rows of all runs, judged and in order; the numbers that tables, plots and CSV are made of.

One row (`Entrant`) per run and initialisation, and for what needs no encoder. Only a trained model of the closed
division, with every task of the suite on its full official data, competes for a rank: what the open division allows, a
downloaded model for one, has no limit. A number that is missing stays None all the way.
"""

import csv
import io
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scipy.special import stdtr

from cramming.data.task_files import ENTRIES
from eval.report.plots import Bar
from eval.report.references import NINE, REFERENCES, Reference
from eval.rules.reading import WITHOUT_ENCODER, Run, at, entries, mean_of, number, sections, without_encoder
from eval.rules.table import Verdict, judge
from eval.tasks.suites import AVERAGES

FLOOR, CONSTANT = WITHOUT_ENCODER.values()
# Rows without pretraining: initialisation -> in words.
BASELINES = {
    "random": "random initialisation",
    "designed": "the run's start untrained",
    FLOOR: FLOOR,
    CONSTANT: CONSTANT,
}
NOISE = 0.05  # a difference whose p-value is not below this is noise


@dataclass(frozen=True)
class Score:
    """One entry's score in percent: median and standard deviation over seeds, or the problem that prevented it."""

    value: float | None = None
    spread: float | None = None
    subset: bool = False
    problem: str = ""


@dataclass(frozen=True, eq=False)
class Entrant:
    """One row: a run's model, or the same architecture untrained (`init`, eval/finetune/models.py), on one suite."""

    run: Run
    init: str
    suite: str
    verdict: Verdict
    scores: Mapping[str, Score]
    averages: Mapping[str, float | None]
    section: Mapping[str, Any]
    again: bool = False  # a row with the same weights stands before it

    @property
    def baseline(self) -> bool:
        """Whether the row is one without pretraining, for others to stand beside."""
        return self.init != "pretrained"

    def of_seeds(self, average: str) -> list[float]:
        """An average for each seed alone, of that seed's main metrics in percent; empty where a value is missing."""
        tasks = [at(self.section, f"tasks.{entry}") for entry in AVERAGES[self.suite][average].entries]
        found = [entries(at(task, f"metrics.{at(task, 'main_metric')}.per_seed")) for task in tasks]
        values = [[number(value) for value in of_task] for of_task in found]
        same = len({len(of_task) for of_task in values}) == 1
        columns = [[v for v in column if v is not None] for column in zip(*values)] if same else []
        complete = columns and all(len(column) == len(tasks) for column in columns)
        return [100 * math.fsum(column) / len(column) for column in columns] if complete else []

    def spread(self, average: str) -> float | None:
        """Standard deviation of an average over seeds; None below two seeds."""
        values = self.of_seeds(average)
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def main(self) -> float | None:
        """The average that the suite is ranked by."""
        return self.averages[next(iter(AVERAGES[self.suite]))]

    @property
    def subset(self) -> bool:
        """Whether any entry of the averages was trained or scored on a part of its official data."""
        return any(self.scores[e].subset for a in AVERAGES[self.suite].values() for e in a.entries if e in self.scores)

    @property
    def ranked(self) -> bool:
        """Whether the row competes: a trained model of the closed division, all tasks, all data, each model once."""
        whole = self.main is not None and not self.subset
        return whole and not self.baseline and not self.again and self.verdict.division == "closed"

    @property
    def same_weights(self) -> list[str]:
        """The other runs of the report that scored the weights of this row."""
        others = [] if self.baseline else entries(at(self.run.record, "elsewhere"))
        return [str(at(other, "run")) for other in others]


def entrants(runs: Sequence[Run]) -> list[Entrant]:
    """All rows of all readable runs, best first, missing averages last."""
    rows = [entrant for run in runs if not run.problem for entrant in _entrants_of(run)]
    ordered = sorted(rows, key=lambda e: (e.main is None, -(e.main or 0.0), e.baseline, e.run.label))
    found, seen = [], set()
    for row in ordered:
        model = (row.suite, str(row.section.get("model_sha256")))
        found.append(replace(row, again=row.ranked and model in seen))
        seen |= {model} if row.ranked else set()
    return found


def ranks(rows: Sequence[Entrant]) -> list[int]:
    """The place of each ranked row, best first. A row whose difference to the first of the place above is within noise
    shares that place.
    """
    places: list[int] = []
    for index, row in enumerate(rows):
        first = rows[places[-1] - 1] if places else row
        places.append(places[-1] if places and within_noise(first, row) else index + 1)
    return places


def within_noise(one: Entrant, other: Entrant) -> bool:
    """Whether Welch's t-test on the averages of the single seeds finds no difference (p >= NOISE)."""
    name = next(iter(AVERAGES[one.suite]))
    samples = [row.of_seeds(name) for row in (one, other)]
    if any(len(values) < 2 for values in samples):
        return one.main == other.main
    gap = abs(statistics.fmean(samples[0]) - statistics.fmean(samples[1]))
    squares = [statistics.variance(values) / len(values) for values in samples]
    total = sum(squares)
    if total == 0:
        return gap == 0
    freedom = total**2 / sum(s**2 / (len(values) - 1) for s, values in zip(squares, samples))
    return 2 * float(stdtr(freedom, -gap / math.sqrt(total))) >= NOISE


def distinct(rows: Sequence[Entrant]) -> dict[Entrant, list[Entrant]]:
    """Rows of which none says what another does: of those of one initialisation whose scores agree the one with the
    most of them, and all that it stands for. Runs that were scored on the same tasks have the same bag of words.
    """
    found: dict[Entrant, list[Entrant]] = {}
    for row in sorted(rows, key=lambda r: -len(_known(r))):
        of_kind = (r for r in found if (r.init, r.suite) == (row.init, row.suite))
        same = next((r for r in of_kind if _known(row).items() <= _known(r).items()), row)
        found.setdefault(same, []).append(row)
    return {row: found[row] for row in rows if row in found}


def _known(row: Entrant) -> dict[str, tuple[float, float | None]]:
    return {name: (score.value, score.spread) for name, score in row.scores.items() if score.value is not None}


def _entrants_of(run: Run) -> Iterator[Entrant]:
    verdict = judge(run.record)
    for init, section in {**sections(run.record), **without_encoder(run.record)}.items():
        suite = str(section.get("suite"))
        if suite in AVERAGES:
            tasks = section.get("tasks")
            scores = {str(k): score_of(v) for k, v in tasks.items()} if isinstance(tasks, Mapping) else {}
            averages = {name: number(section, f"averages.{name}.value") for name in AVERAGES[suite]}
            yield Entrant(run, init, suite, verdict, scores, averages, section)


def score_of(task: Any) -> Score:
    """A task entry of the record as a Score; total over any content."""
    value = number(task, "score")
    spread = number(task, f"metrics.{at(task, 'main_metric')}.std")
    problem = str(at(task, "problem") or ("" if value is not None else "no score on record"))
    return Score(value, None if spread is None else 100 * spread, at(task, "subset") is True, problem)


def columns_of(suite: str) -> list[str]:
    """The entries that the suite's averages are made of, in the order in which papers print them."""
    used = {entry for average in AVERAGES[suite].values() for entry in average.entries}
    return [entry for entry in NINE if entry in used]


def gain_over(row: Entrant, other: Entrant) -> tuple[float | None, int]:
    """Mean difference of the scores over the averages' entries that both have, and how many those are."""
    common = [
        c for c in columns_of(row.suite) if c in row.scores and c in other.scores
        and row.scores[c].value is not None and other.scores[c].value is not None
    ]  # fmt: skip
    mine = mean_of(common, {c: row.scores[c].value for c in common})
    theirs = mean_of(common, {c: other.scores[c].value for c in common})
    return (None if mine is None or theirs is None else mine - theirs), len(common)


def best_baseline(row: Entrant, rows: Sequence[Entrant]) -> tuple[Entrant, float, int] | None:
    """Of the same run's rows without pretraining the one that `row` is the least above, by how much, and over how many
    entries; None where there is none. One with fewer entries than others, as the constant class without a correlation,
    stands back.
    """
    others = [r for r in rows if r.run is row.run and r.suite == row.suite and r.baseline]
    gains = [(other, *gain_over(row, other)) for other in others]
    known = [(other, gain, count) for other, gain, count in gains if gain is not None]
    return min(known, key=lambda found: (-found[2], found[1]), default=None)


def bars(rows: Sequence[Entrant], suite: str) -> list[Bar]:
    """The score plot's bars: every printed average of valid full-data rows, with published ones for GLUE."""
    found = []
    shown = [row for row in rows if row.suite == suite and row.verdict.division != "invalid" and not row.subset]
    for row in distinct(shown):
        if row.main is not None:
            label = row.init if row.init in (FLOOR, CONSTANT) else f"{row.run.label}, {row.init}"
            kind = "untrained" if row.baseline else "pretrained"
            name = label if row.baseline else row.run.label
            found.append(Bar(name, row.main, row.spread(next(iter(AVERAGES[suite]))), kind))
    if suite == "glue" and found:
        found += [Bar(r.title, r.avg9, r.spread, "published") for r in REFERENCES]
    return found


FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a cell begins with that spreadsheets run, not show
NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_FACTS = {
    "parameters": "pretrain.parameters",
    "budget_unit": "pretrain.budget.unit",
    "budget_limit": "pretrain.budget.limit",
    "spent_seconds": "pretrain.budget.spent_seconds",
    "tokens": "pretrain.tokens",
    "energy_kwh": "pretrain.energy_kwh",
    "validation_loss": "pretrain.validation.loss",
    "all_mask_loss": "pretrain.validation.all_mask_loss",
    "bits_per_byte": "pretrain.validation.bits_per_byte",
    "device": "environment.device.name",
    "corpus_sha256": "corpus.manifest_sha256",
    "validation_corpus_sha256": "corpus.validation.manifest_sha256",
    "commit": "environment.git.commit",
    "created": "created",
}


def comma_separated(rows: Sequence[Entrant]) -> str:
    """Every row as CSV with four decimals, missing numbers empty; the published rows follow."""
    names = [average for suite in AVERAGES.values() for average in suite]
    fields = ["kind", "run", "folder", "init", "suite", "division", "broken_rules", "split", "selection", "seeds"]
    fields += [
        *names,
        *(f"{name}_std" for name in names),
        "subset",
        *ENTRIES,
        *(f"{e}_std" for e in ENTRIES),
        *_FACTS,
        "source",
    ]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fields, restval="", lineterminator="\n")
    writer.writeheader()
    for line in [*map(_values, rows), *map(_published, REFERENCES)]:
        writer.writerow({k: _csv_value(v) for k, v in line.items() if v is not None})
    return buffer.getvalue()


def _csv_value(value: Any) -> Any:
    """Four decimals; a text that a spreadsheet would run as a formula is put behind an apostrophe, a number is not."""
    if isinstance(value, bool | int | float):
        return round(value, 4) if isinstance(value, float) else value
    text = str(value)
    return f"'{text}" if text.lstrip(" \n")[:1] in FORMULA and not NUMBER.fullmatch(text) else text


def _values(row: Entrant) -> dict[str, Any]:
    return {
        "kind": "run",
        "run": row.run.label,
        "folder": row.run.folder.name,
        "init": row.init,
        "suite": row.suite,
        "division": row.verdict.division,
        "broken_rules": " ".join(f.rule for f in row.verdict.broken),
        "split": row.section.get("split"),
        "selection": row.section.get("selection"),
        "seeds": " ".join(map(str, entries(row.section.get("seeds")))),
        "subset": row.subset,
        **row.averages,
        **{f"{name}_std": row.spread(name) for name in row.averages},
        **{e: row.scores[e].value for e in ENTRIES if e in row.scores},
        **{f"{e}_std": row.scores[e].spread for e in ENTRIES if e in row.scores},
        **{name: at(row.run.record, path) for name, path in _FACTS.items()},
    }


def _published(row: Reference) -> dict[str, Any]:
    averages = {"avg9": row.avg9, "avg8": row.avg8, "source": row.source}
    return {"kind": "published", "run": row.title, "suite": "glue", **averages, **row.scores}
