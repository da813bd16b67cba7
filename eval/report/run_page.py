"""Report of one run: scores first, then its division, and facts and rules behind folded parts."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from cramming.data.suites import AVERAGES
from cramming.data.task_files import ENTRIES
from cramming.record import RECORD
from cramming.record_schema import Record, TaskScore
from cramming.runlog import RUN_LOG
from eval.report.blocks import Block, Details, Links, Notes, Table, Text
from eval.report.facts import FACTS, known_facts
from eval.report.format import (
    DASH,
    FORMS,
    SUBSET,
    Score,
    describe_run,
    join_words,
    or_dash,
    pairs,
    title_of,
    titles_of,
)
from eval.report.table import BASELINES, SCORED_MEAN, Row, along_the_way, score_columns
from eval.rules.load import Run
from eval.rules.table import RULES, Kind

# Titles of initialisations, in the order in which one is chosen as what the page is about.
TITLES = {"pretrained": "Pretrained"} | {
    name: words.capitalize() for name, words in BASELINES.items()
}
DIVISIONS = {
    "closed": "Closed division",
    "open": "Open division",
    "unfinished": "Not finished, not ranked",
    "invalid": "Invalid, not ranked",
}
CONSEQUENCES: dict[Kind, str] = {
    "finished": "is not finished",
    "both": "is invalid",
    "closed": "is in the open division",
    "remark": "is remarked on",
}
POINTS = 200  # of a curve
AXES = ("step", "tokens", "seconds")


def status_of(run: Run, rows: Sequence[Row]) -> str:
    """Return the division of a run and how far it has come, such as `open, interrupted`."""
    status = run.record.training.status
    division = run.verdict.division if rows else "not scored"
    return join_words(division, "" if status == "finished" else status)


def run_blocks(run: Run, rows: Sequence[Row], remarks: Sequence[str] = ()) -> list[Block]:
    """Return a run's report; `rows`: its own, `remarks`: on files beside it."""
    blocks = [*_score_blocks(run, rows), *_division_blocks(run)] if rows else [_unscored(run)]
    notes = [*_other_scores(run.record), *remarks]
    if notes:
        blocks.append(Notes(notes))
    facts = list(known_facts(run.record).items())
    blocks.append(
        Details("Model, budget, corpus and machine", [Table(("Fact", "Value"), facts, 2)])
    )
    blocks.append(_rules_details(run))
    return blocks


def _unscored(run: Run) -> Block:
    home = run.folder.parent
    where = "" if home.name == "runs" else f" --runs {home}"
    return Text(f"Not scored yet: `cramming glue --name {run.folder.name}{where}` does it.")


def _score_blocks(run: Run, rows: Sequence[Row]) -> Iterator[Block]:
    """Yield the headline, the table of scores and the notes on them."""
    order = list(TITLES)
    first, *others = sorted(rows, key=lambda row: order.index(row.init))
    yield Text(join_words(first.gain, describe_run(run.record), separator=". ") + ".")
    yield scores_table(first, [row for row in others if row.suite == first.suite])
    if along_the_way(first):
        yield Text(
            "Scores along the way, of checkpoints that the run kept, and of the final model:"
        )
        yield _along_table(first)
    yield Details("How the scores are made", [Notes(list(_score_notes(first)))])


def scores_table(first: Row, beside: Sequence[Row]) -> Table:
    """Return the scores of a row, averages first, and those of the rows that it stands beside."""
    titles = ["Task", TITLES[first.init]]
    for row in beside:
        titles += [TITLES[row.init], "Difference"]
    lines = []
    for name in (*AVERAGES[first.suite], SCORED_MEAN):
        if first.cell(name).value is not None:
            title = f"mean of {titles_of(first.scored)}" if name == SCORED_MEAN else title_of(name)
            lines.append([title, *_compare(name, first, beside), "", "", ""])
    for name, task in sorted(first.section.tasks.items(), key=lambda item: _place(item[0])):
        title = title_of(name) if name in ENTRIES else task.title
        lines.append([title, *_compare(name, first, beside), *_task_cells(task)])
    return Table([*titles, "Metric", "Other metrics", "Examples"], lines)


def _along_table(row: Row) -> Table:
    """Return the scores of a run's checkpoints and of its final model, with what was spent until then."""
    facts = {name: FACTS[name] for name in ("steps", "spent_seconds", "tokens", "energy_kwh")}
    names = [name for name in score_columns(row.suite) if row.cell(name).value is not None]
    lines = []
    for each in (*along_the_way(row), row):
        spent = [or_dash(each.spent[name], FORMS[fact.form]) for name, fact in facts.items()]
        lines.append([each.place, *spent, *(str(each.cell(name)) for name in names)])
    titles = [fact.title for fact in facts.values()]
    return Table(["Budget", *titles, *map(title_of, names)], lines)


def _place(name: str) -> int:
    return list(ENTRIES).index(name) if name in ENTRIES else len(ENTRIES)


def _compare(column: str, first: Row, beside: Sequence[Row]) -> Iterator[str]:
    """Yield a score, and of each row beside it the score and the difference."""
    mine = first.cell(column)
    yield str(mine)
    for row in beside:
        theirs = row.cell(column)
        yield str(theirs)
        is_known = mine.value is not None and theirs.value is not None
        yield f"{mine.value - theirs.value:+.1f}" if is_known else DASH  # type: ignore[operator]


def _task_cells(task: TaskScore) -> Iterator[str]:
    """Yield main metric, medians of the other metrics, and numbers of examples."""
    yield task.main_metric.replace("_", " ")
    others = {name: each.median for name, each in task.metrics.items() if name != task.main_metric}
    medians = [f"{name} {100 * value:.1f}" for name, value in others.items() if value is not None]
    yield ", ".join(medians)
    train = _count(task.train_examples, task.official_train_examples)
    yield f"{train} / {_count(task.eval_examples, task.official_eval_examples)}"


def _count(examples: int | None, official: int | None) -> str:
    if examples is None:
        return DASH
    return f"{examples:,}" if official in (None, examples) else f"{examples:,} of {official:,}"


def _score_notes(row: Row) -> Iterator[str]:
    """Yield what the numbers mean, and what is wrong with them."""
    section = row.section
    for name, average in AVERAGES[row.suite].items():
        yield f"{title_of(name)}: {average.definition}."
    seeds = ", ".join(map(str, section.seeds))
    yield (
        f"{section.split} split, median ± standard deviation over seeds {seeds}, {section.selection} scored."
        " ± of an average: that of each seed's own average."
    )
    problems = {name: task.remark for name, task in section.tasks.items() if task.remark}
    for name, problem in (problems | section.absent).items():
        yield f"{title_of(name)}: {problem}."
    if row.subset:
        yield f"{SUBSET} not the official number of examples; not comparable with full-task numbers."
    yield f"Fine-tuning: {pairs(section.hyperparameters)}."


def _division_blocks(run: Run) -> Iterator[Block]:
    """Yield the division, and the rules that are broken."""
    verdict = run.verdict
    claim = "the run claims the open division" if run.record.claims_open else ""
    broken = [f"{finding.rule}: {finding.evidence}" for finding in verdict.broken]
    holds = "" if broken else "every rule holds"
    yield Text(join_words(DIVISIONS[verdict.division], claim, holds) + ".")
    if broken:
        yield Notes(broken)


def _other_scores(record: Record) -> Iterator[str]:
    """Yield scores that are no part of the table, and what is not finished."""
    if record.unfinished:
        yield f"Scoring not finished: {'; '.join(record.unfinished)}."
    for init, section in record.superglue.items():
        scores = []
        for task in section.tasks.values():
            score = Score(task.score, task.spread, SUBSET if task.subset else "")
            scores.append(f"{task.title} {score}")
        scores += [f"{each.definition}: {Score(each.value)}" for each in section.averages.values()]
        yield f"SuperGLUE, {init}: {join_words(*scores, *section.absent.values(), separator='; ')}."
    minimal = record.minimal_pairs
    if minimal.accuracy is not None:
        by_word = or_dash(minimal.word_accuracy, "{:.1f}".format)
        yield f"Minimal pairs: {minimal.accuracy:.1f}, by word {by_word} ({minimal.definition})."


def _rules_details(run: Run) -> Details:
    """Return the table of all rules with what was found."""
    findings = run.verdict.findings
    rows = []
    for rule, finding in zip(RULES, findings):
        result = "holds" if finding.ok else "broken"
        rows.append((rule.number, result, finding.evidence, rule.sentence, CONSEQUENCES[rule.kind]))
    columns = ("Rule", "Finding", "Evidence", "Sentence", "A run that breaks it")
    holding = sum(finding.ok for finding in findings)
    return Details(f"Rules: {holding} of {len(findings)} hold", [Table(columns, rows, 5)])


def links_of(run: Run, place: Path, repository: str | None) -> Links:
    """Return the links of a page in the folder `place` to a run's report, its files and its commit."""
    files = {
        "report": run.folder / "report" / "report.html",
        "record": run.folder / RECORD,
        "run log": run.folder / RUN_LOG,
        "archive": run.folder,
    }
    targets = {}
    for title, path in files.items():
        if path.is_file() and path.parent != place:
            targets[title] = quote(Path(os.path.relpath(path, place)).as_posix())
    commit = run.record.environment.git.commit
    if repository and commit:
        targets[f"commit {commit[:12]}"] = f"{repository}/commit/{commit}"
    return Links(targets)


def curve_of(run: Run) -> dict[str, Any]:
    """Return the columns of a run's curves: training in at most POINTS means, and validations.

    `flops`: exaFLOPs per token, on average over the run.
    """
    training = run.record.training
    steps = [row for row in run.metrics if "loss" in row]
    validations = [row for row in run.metrics if "validation_loss" in row]
    flops, tokens = training.exaflops, training.tokens
    return {
        "train": _columns(steps, (*AXES, "loss", "lr", "grad_norm"), POINTS),
        "validation": _columns(validations, (*AXES, "validation_loss"), POINTS),
        "flops": flops / tokens if flops and tokens else None,
    }


def _columns(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], max_rows: int
) -> dict[str, list[float | None]]:
    """Return columns of at most `max_rows` means over consecutive rows; NaN and infinity become None."""
    if not rows:
        return {name: [] for name in names}
    values = np.array([list(map(row.get, names)) for row in rows], dtype=float)
    starts = np.arange(0, len(values), -(-len(values) // max_rows))
    counts = np.diff([*starts, len(values)])
    means = np.add.reduceat(values, starts) / counts[:, None]
    columns = {}
    for name, column in zip(names, means.T.tolist()):
        columns[name] = list(map(_rounded, column))
    return columns


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None
