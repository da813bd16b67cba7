"""Standings: the scored rows of all runs, judged and in order; the numbers that tables, plots and CSV are made of.

One row (`Entrant`) per run and initialisation. Only a trained model of the closed division, with every task of the
suite on its full official data, competes for a rank: what the open division allows, a downloaded model for one, has no
limit. A number that is missing stays None all the way.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.plots import Bar
from eval.reading import Run, at, entries, floor, mean_of, number, sections
from eval.references import NINE, REFERENCES, Reference
from eval.rules import Verdict, judge
from eval.tasks import AVERAGES, ENTRIES

UNTRAINED = {"random": "random initialisation", "designed": "the run's start untrained"}  # initialisation -> in words
FLOOR = "bag of words"  # the initialisation that a row without any encoder is said to have


@dataclass(frozen=True)
class Score:
    """One entry's score in percent: median and standard deviation over seeds, or the problem that prevented it."""

    value: float | None = None
    spread: float | None = None
    subset: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Entrant:
    """One row: a run's model, or the same architecture untrained (`init`, see eval/models.py), on one suite."""

    run: Run
    init: str
    suite: str
    verdict: Verdict
    scores: Mapping[str, Score]
    averages: Mapping[str, float | None]
    section: Mapping[str, Any]

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
        """Whether the row competes: a trained model of the closed division, all tasks, all data."""
        return (
            self.init == "pretrained"
            and self.main is not None
            and not self.subset
            and self.verdict.division == "closed"
        )


def entrants(runs: Sequence[Run]) -> list[Entrant]:
    """All rows of all readable runs, best first, missing averages last."""
    rows = [entrant for run in runs if not run.problem for entrant in _entrants_of(run)]
    return sorted(rows, key=lambda e: (e.main is None, -(e.main or 0.0), e.init != "pretrained", e.run.label))


def _entrants_of(run: Run) -> Iterator[Entrant]:
    verdict = judge(run.record)
    found, lowest = sections(run.record), floor(run.record)
    for init, section in {**found, **({FLOOR: lowest} if lowest else {})}.items():
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


def bars(rows: Sequence[Entrant], suite: str) -> list[Bar]:
    """The score plot's bars: every printed average of valid full-data rows, with published ones for GLUE."""
    found = []
    for row in rows:
        if row.suite == suite and row.main is not None and row.verdict.division != "invalid" and not row.subset:
            suffix = "" if row.init == "pretrained" else f", {row.init}"
            kind = "pretrained" if row.init == "pretrained" else "untrained"
            found.append(Bar(row.run.label + suffix, row.main, None, kind))
    if suite == "glue" and found:
        found += [Bar(r.title, r.avg9, r.spread, "published") for r in REFERENCES]
    return found


_FACTS = {
    "parameters": "pretrain.parameters",
    "budget_unit": "pretrain.budget.unit",
    "budget_limit": "pretrain.budget.limit",
    "spent_seconds": "pretrain.budget.spent_seconds",
    "tokens": "pretrain.tokens",
    "validation_loss": "pretrain.validation.loss",
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
    fields += [*names, "subset", *ENTRIES, *(f"{e}_std" for e in ENTRIES), *_FACTS, "source"]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fields, restval="", lineterminator="\n")
    writer.writeheader()
    for line in [*map(_values, rows), *map(_published, REFERENCES)]:
        writer.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items() if v is not None})
    return buffer.getvalue()


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
        **{e: row.scores[e].value for e in ENTRIES if e in row.scores},
        **{f"{e}_std": row.scores[e].spread for e in ENTRIES if e in row.scores},
        **{name: at(row.run.record, path) for name, path in _FACTS.items()},
    }


def _published(row: Reference) -> dict[str, Any]:
    averages = {"avg9": row.avg9, "avg8": row.avg8, "source": row.source}
    return {"kind": "published", "run": row.title, "suite": "glue", **averages, **row.scores}
