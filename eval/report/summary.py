"""One run's page: what was trained on what within which budget, how it scored, and what the rules say about it."""

from collections.abc import Mapping, Sequence
from typing import Any

from cramming.data.task_files import ENTRIES
from eval.report.leaderboard import (
    SUBSET,
    TITLES,
    anchor,
    budget_words,
    gain_words,
    model_words,
    score_cell,
    spread_words,
)
from eval.report.render import DASH, Block, Cell, Figure, Group, Heading, Paragraph, Section, Table
from eval.report.standings import BASELINES, CONSTANT, FLOOR, Entrant, Score, best_baseline, score_of
from eval.rules.facts import facts
from eval.rules.fields import wrong_fields
from eval.rules.reading import Record, Run, at, entries, number
from eval.rules.table import RULES, Verdict
from eval.tasks.suites import AVERAGES

NOT_OFFICIAL = f"{SUBSET} not the official number of examples; not comparable with full-task numbers"


def blocks(
    run: Run, verdict: Verdict, rows: Sequence[Entrant], figures: Sequence[Figure], more: Sequence[str], level: int
) -> list[Block]:
    """The run's section: `rows` are its own entrants, `more` are lines about files beside it, `level` its heading's."""
    record = run.record
    status = at(record, "pretrain.status")
    said = [verdict.division if rows else "not scored", str(status) if status not in (None, "finished") else ""]
    summary = ", ".join(filter(None, (model_words(record), budget_words(record))))
    parts: list[Block] = [Heading(run.label, level, anchor(run), ", ".join(filter(None, said)))]
    parts += [Paragraph(summary[0].upper() + summary[1:] + ".")] if summary else []
    if rows:
        parts += [_scores(rows), *_division(record, verdict)]
    else:
        runs = run.folder.parent
        elsewhere = "" if runs.name == "runs" else f" runs={runs}"
        parts.append(Paragraph(f"Not scored yet: `cramming glue name={run.folder.name}{elsewhere}` does it."))
    if wrong := wrong_fields(record):
        parts.append(Paragraph(f"The record is incomplete: {'; '.join(wrong)}."))
    parts += beyond_glue(record)
    parts += [Paragraph(line) for line in more]
    parts += figures
    parts.append(Section("Model, budget, corpus, machine", [facts(record)]))
    parts.append(Section(_rules_title(verdict), [_findings(verdict)]))
    return parts


def beyond_glue(record: Record) -> list[Block]:
    """SuperGLUE's tasks and minimal pairs, where they were scored: for information, judged by no rule."""
    parts: list[Block] = []
    found = at(record, "superglue")
    for init, section in found.items() if isinstance(found, dict) else ():
        parts.append(Paragraph(f"SuperGLUE, {init}: {_superglue(section)}."))
    if (accuracy := number(record, "minimal_pairs.accuracy")) is not None:
        paradigms, definition = at(record, "minimal_pairs.paradigms"), at(record, "minimal_pairs.definition")
        count = len(paradigms) if isinstance(paradigms, Mapping) else 0
        parts.append(Paragraph(f"Minimal pairs: {accuracy:.1f} over {count} paradigms ({definition})."))
    return parts


def _superglue(section: Any) -> str:
    """The scores and their mean; then why a score is missing, and what the mark on one means."""
    tasks, absent = at(section, "tasks"), at(section, "absent")
    scored = tasks.items() if isinstance(tasks, dict) else ()
    scores = {str(at(task, "title") or name): score_of(task) for name, task in scored}
    cells = {title: score_cell(score) for title, score in scores.items()}
    said = ", ".join(f"{title} {cell.text} {cell.small}".rstrip() for title, cell in cells.items())
    mean, marked = number(section, "averages.superglue5.value"), any(score.subset for score in scores.values())
    average = "not printed" if mean is None else f"{mean:.1f}{SUBSET if marked else ''}"
    reasons = [f"{title}: {score.problem}" for title, score in scores.items() if score.problem]
    reasons += [f"{name}: {why}" for name, why in absent.items()] if isinstance(absent, dict) else []
    notes = [said, f"average {average} ({at(section, 'averages.superglue5.definition')})", *reasons]
    return "; ".join([*notes, NOT_OFFICIAL] if marked else notes)


def _division(record: Record, verdict: Verdict) -> list[Block]:
    """The division in a sentence, and what keeps the run out of the closed one."""
    asked = at(record, "division_requested")
    name = {"closed": "Closed division", "open": "Open division", "invalid": "Invalid record, not ranked"}
    sentence = name[verdict.division]
    if asked == "open" and verdict.division == "open":
        sentence += ", as the run claims"
    elif asked == "closed" and verdict.division != "closed":
        sentence += "; the run claims the closed division"
    if not verdict.broken:
        return [Paragraph(f"{sentence}. Every rule holds.")]
    sentences = {rule.number: rule.sentence for rule in RULES}
    rows = [[Cell(f.rule, "", "main"), Cell(sentences[f.rule]), Cell(f.evidence)] for f in verdict.broken]
    return [Paragraph(f"{sentence}."), Table(["Broken rule", "Sentence", "What is wrong"], [Group(rows)], left=3)]


def _rules_title(verdict: Verdict) -> str:
    held = len(verdict.findings) - len(verdict.broken)
    return f"Rules: {held} of {len(verdict.findings)} hold"


def _findings(verdict: Verdict) -> Table:
    rows = []
    for rule, finding in zip(RULES, verdict.findings):
        tone = "good" if finding.ok else "bad" if rule.division == "both" else "warn"
        state = Cell("holds" if finding.ok else "broken", "", tone)
        rows.append([Cell(rule.number), Cell(rule.division), Cell(rule.sentence), state, Cell(finding.evidence)])
    return Table(["Rule", "Division", "Sentence", "Finding", "Evidence"], [Group(rows)], left=5)


# Initialisations as columns. The first that was scored is the one that the others of its suite stand beside.
COLUMNS = {
    "pretrained": "Pretrained", "random": "Random init", "designed": "Designed start", FLOOR: "Bag of words",
    CONSTANT: "Constant class",
}  # fmt: skip


def _scores(rows: Sequence[Entrant]) -> Table:
    """Per entry: metric, examples, the trained model, and beside it what it is measured against."""
    trained = next((r for init in COLUMNS for r in rows if r.init == init), rows[0])
    others = [r for r in rows if r.suite == trained.suite and r is not trained]
    beside = [r for init in BASELINES for r in others if r.init == init]
    names = [*ENTRIES, *(n for n in trained.scores if n not in ENTRIES)]
    body = [_score_row(name, trained, beside) for name in names if name in trained.scores]
    totals = [_average_row(name, trained, beside) for name in trained.averages]
    mine = COLUMNS.get(trained.init, trained.init)
    columns = ["Task", "Metric", "Other metrics", "Examples", f"{mine}, mean", f"{mine}, median"]
    columns += [column for row in beside for column in (f"{COLUMNS[row.init]}, median", "Difference")]
    groups = [Group(body), Group(totals, "Averages")]
    notes = [f"{TITLES[name]}: {AVERAGES[trained.suite][name].definition}." for name in trained.averages]
    notes += [
        f"{split} split, median ± standard deviation over seeds {seeds}; {selection} scored; times 100. Mean: over the "
        "same seeds, with Student's 95 % confidence interval where there are several. Other metrics: medians. ± of an "
        "average: standard deviation of the average of each seed alone, which is noise of fine-tuning alone."
        for split, seeds, selection in [_protocol(trained)]
    ]
    notes += [
        f"{ENTRIES[n][1].title if n in ENTRIES else n}: {s.problem}." for n, s in trained.scores.items() if s.problem
    ]
    if trained.subset:
        notes.append(f"{NOT_OFFICIAL}.")
    if not trained.baseline and (best := best_baseline(trained, rows)):
        notes.append(f"{gain_words(trained, best)}.")
    settings = at(trained.section, "hyperparameters")
    if isinstance(settings, dict):
        notes.append("Fine-tuning: " + ", ".join(f"{k} {v}" for k, v in settings.items()) + ".")
    return Table(columns, groups, notes, left=3, kind="tasks")


def _protocol(row: Entrant) -> tuple[str, str, str]:
    seeds = ", ".join(map(str, entries(row.section.get("seeds"))))
    return str(row.section.get("split")), seeds, str(row.section.get("selection"))


def _score_row(name: str, trained: Entrant, others: Sequence[Entrant]) -> list[Cell]:
    task = at(trained.section, "tasks") or {}
    mine, beside = trained.scores[name], []
    for theirs in (row.scores.get(name, Score()) for row in others):
        beside += [score_cell(theirs), Cell(_difference(mine.value, theirs.value))]
    title = ENTRIES[name][1].title if name in ENTRIES else str(at(task.get(name), "title") or name)
    metric = str(at(task.get(name), "main_metric") or "").replace("_", " ")
    return [
        Cell(title, "", "main"),
        Cell(metric),
        Cell(_other_metrics(task.get(name)) or DASH),
        Cell(_examples(task.get(name))),
        _mean_cell(task.get(name)),
        score_cell(mine),
        *beside,
    ]


def _other_metrics(task: Any) -> str:
    metrics, main = at(task, "metrics"), at(task, "main_metric")
    others = [(k, number(v, "median")) for k, v in metrics.items() if k != main] if isinstance(metrics, dict) else []
    return ", ".join(f"{k.replace('_', ' ')} {100 * v:.1f}" for k, v in others if v is not None)


def _mean_cell(task: Any) -> Cell:
    """`83.7`, with `83.1 to 84.3` beside it; a dash where it is not on record."""
    metric = at(task, f"metrics.{at(task, 'main_metric')}")
    mean, ends = number(metric, "mean"), [number(end) for end in entries(at(metric, "mean_ci95"))]
    if mean is None:
        return Cell(DASH)
    known = [end for end in ends if end is not None]
    return Cell(f"{100 * mean:.1f}", f"{100 * known[0]:.1f} to {100 * known[1]:.1f}" if len(known) == 2 else "")


def _examples(task: Any) -> str:
    def count(kind: str) -> str:
        have, official = number(task, f"{kind}_examples"), number(task, f"official_{kind}_examples")
        if have is None:
            return DASH
        return f"{have:,.0f}" if official in (None, have) else f"{have:,.0f} of {official:,.0f}"

    return f"{count('train')} / {count('eval')}"


def _difference(mine: float | None, theirs: float | None) -> str:
    return DASH if mine is None or theirs is None else f"{mine - theirs:+.1f}"


def _average_row(name: str, trained: Entrant, others: Sequence[Entrant]) -> list[Cell]:
    def cell(row: Entrant) -> Cell:
        value, spread = row.averages[name], spread_words(row.spread(name))
        if value is None:
            return Cell(DASH, "", "main")
        return Cell(f"{value:.1f}{SUBSET if trained.subset else ''}", spread, "main")

    mine, beside = trained.averages[name], []
    for row in others:
        beside += [cell(row), Cell(_difference(mine, row.averages[name]))]
    missing = entries(at(trained.section, f"averages.{name}.missing"))
    names = [ENTRIES[n][1].title if n in ENTRIES else n for n in map(str, missing)]
    why = f"not printed, missing: {', '.join(names)}" if mine is None else ""
    return [
        Cell(TITLES.get(name, name), "", "main"),
        Cell("mean"),
        Cell(why),
        Cell(""),
        Cell(""),
        cell(trained),
        *beside,
    ]
