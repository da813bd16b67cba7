"""From records to ranked tables: what the leaderboard says, before anybody thinks of Markdown or HTML.

One row per run and model. Rows of the closed division on the full official data are ranked by the suite's first
average; what is within noise shares a place. Those of the open division, then rows on marked subsets or with an average
that cannot be printed, then invalid records, then the rows without pretraining stand in groups of their own and have no
rank. Published rows of the same protocol hang beneath the GLUE table. A number that is missing stays a dash, and the
reason stands below the table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cramming.data.task_files import ENTRIES, GLUE
from cramming.progress import compact
from eval.report.references import OTHER_PROTOCOLS, PROTOCOL, REFERENCES
from eval.report.render import DASH, Block, Cell, Group, Paragraph, Table
from eval.report.standings import (
    BASELINES,
    CONSTANT,
    FLOOR,
    NOISE,
    Entrant,
    Score,
    best_baseline,
    columns_of,
    distinct,
    ranks,
)
from eval.rules.choices import swept
from eval.rules.reading import Record, Run, at, entries, number
from eval.rules.table import MIN_SEEDS
from eval.tasks.suites import AVERAGES

SUBSET = "†"
TITLES = {"avg9": "avg-9", "avg8": "avg-8", "embedded": "average"}
SUITE_TITLES = {"glue": "GLUE", "embedded": "Embedded tasks"}


def table(rows: Sequence[Entrant], suite: str) -> Table:
    """The suite's leaderboard."""
    of_suite = [row for row in rows if row.suite == suite]
    baselines = distinct([r for r in of_suite if r.baseline and r.verdict.division != "invalid"])
    mine = [r for r in of_suite if not r.baseline or r.verdict.division == "invalid"]
    full = [r for r in mine if r.verdict.division != "invalid" and r.main is not None and not r.subset]
    again = [r for r in full if r.again]
    closed = [r for r in full if r.verdict.division == "closed" and not r.again]
    others = [r for r in full if r.verdict.division != "closed"]
    invalid = [r for r in mine if r.verdict.division == "invalid"]
    partial = [r for r in mine if r not in full and r not in invalid]
    best = {
        c: max((r.scores[c].value or 0.0 for r in closed if c in r.scores), default=None) for c in columns_of(suite)
    }
    title = "Closed division" if again or others or partial or baselines else ""
    groups = [
        Group([_row(r, str(place), best) for r, place in zip(closed, ranks(closed))], title),
        Group([_row(r, "", {}) for r in again], "Not ranked: the weights of a row above"),
        Group([_row(r, "", {}) for r in others], "Open division, not ranked"),
        Group(
            [_row(r, "", {}) for r in partial], f"Not ranked: parts of the official data ({SUBSET}), or tasks missing"
        ),
        Group(
            [_row(r, "", {}) for r in invalid],
            "Not ranked: invalid records (a rule for both divisions is broken)",
            "faint",
        ),
        Group([_baseline_row(r, same) for r, same in baselines.items()], "Baselines: without pretraining, not ranked"),
    ]
    if suite == "glue":
        groups.append(Group(list(_references()), f"Published results, same protocol ({PROTOCOL})", "faint"))
    columns = ["#", "Model", "Division", *number_columns(suite)]
    return Table(columns, [g for g in groups if g.rows], [*_notes(of_suite, suite)], left=3, kind="scores")


def _row(row: Entrant, rank: str, best: Mapping[str, float | None]) -> list[Cell]:
    model = Cell(row.run.label, _detail(row), "main", anchor(row.run))
    return [Cell(rank), model, division_cell(row), *number_cells(row, best if row.ranked else {})]


def _baseline_row(row: Entrant, same: Sequence[Entrant]) -> list[Cell]:
    """A row without pretraining under its own name; the runs that it was scored for stand beside it."""
    runs = ", ".join(dict.fromkeys(r.run.label for r in same))
    detail = ", ".join((f"of {runs}", *([] if row.init in (FLOOR, CONSTANT) else [seeds_words(row)])))
    return [Cell(""), Cell(BASELINES.get(row.init, row.init), detail, "main"), division_cell(row), *number_cells(row)]


def number_columns(suite: str) -> list[str]:
    """The titles of the suite's averages and entries, in the order of `number_cells`."""
    return [*(TITLES[name] for name in AVERAGES[suite]), *(ENTRIES[entry][1].title for entry in columns_of(suite))]


def number_cells(row: Entrant, best: Mapping[str, float | None] | None = None) -> list[Cell]:
    """The row's averages, then its entries; a score equal to its column's in `best` is set off."""
    mark = SUBSET if row.subset else ""
    cells = [
        Cell(DASH, "", "main") if value is None else Cell(f"{value:.1f}{mark}", spread_words(row.spread(name)), "main")
        for name, value in row.averages.items()
    ]
    for entry in columns_of(row.suite):
        score = row.scores.get(entry, Score())
        leads = score.value is not None and score.value == (best or {}).get(entry)
        cells.append(score_cell(score, "best" if leads else ""))
    return cells


def score_cell(score: Score, tone: str = "") -> Cell:
    """`83.9 ±0.4`, with the subset's mark; a dash where there is no score."""
    if score.value is None:
        return Cell(DASH, "", "warn" if score.problem and score.problem != "no score on record" else "")
    return Cell(f"{score.value:.1f}{SUBSET if score.subset else ''}", spread_words(score.spread), tone)


def spread_words(spread: float | None) -> str:
    """`±0.4`; empty where there is none."""
    return "" if spread is None else f"±{spread:.1f}"


def seeds_words(row: Entrant) -> str:
    """`3 seeds`."""
    return counted(len(entries(row.section.get("seeds"))), "seed")


def counted(count: float, noun: str, plural: str = "") -> str:
    """`1 epoch`, `5 epochs`."""
    return f"{count:g} {noun if count == 1 else plural or noun + 's'}"


def division_cell(row: Entrant) -> Cell:
    """The row's division with the rules it breaks; untrained weights or a bag of words compete in none."""
    if row.baseline:
        return Cell("baseline", "", "")
    return Cell(row.verdict.division, ", ".join(f.rule for f in row.verdict.broken), row.verdict.division)


def _detail(row: Entrant) -> str:
    parts = [BASELINES.get(row.init, row.init), seeds_words(row), swept(row.section)]
    if not row.baseline:
        parts += [model_words(row.run.record), budget_words(row.run.record)]
        parts += [f"same weights as {', '.join(row.same_weights)}"] if row.same_weights else []
    return ", ".join(p for p in parts if p)


def pretraining_table(runs: Sequence[Run]) -> Table:
    """What each run spent and reached before fine-tuning."""
    columns = [
        "Model",
        "Status",
        "Parameters",
        "Budget",
        "Spent",
        "Steps",
        "Tokens",
        "Tokens/s",
        "FLOP use",
        "Loss",
        "Validation",
        "All [MASK]",
        "Bits/byte",
    ]
    rows = []
    for run in runs:
        share, seconds = (
            number(run.record, "pretrain.model_flops_utilization"),
            number(run.record, "pretrain.budget.spent_seconds"),
        )
        paths = ("steps", "tokens", "tokens_per_second")
        counts = [Cell(_or_dash(number(run.record, f"pretrain.{path}"), compact)) for path in paths]
        losses = [number(run.record, f"pretrain.{path}") for path in LOSSES]
        texts = ["", _validated(run.record), "", ""]
        rows.append(
            [
                Cell(run.label, "", "main", anchor(run)),
                Cell(str(at(run.record, "pretrain.status") or "unknown")),
                Cell(_or_dash(number(run.record, "pretrain.parameters"), compact)),
                Cell(budget_words(run.record) or DASH),
                Cell(_or_dash(seconds, duration)),
                *counts,
                Cell(_or_dash(share, lambda v: f"{100 * v:.0f}%")),
                *(Cell(_or_dash(loss, lambda v: f"{v:.3f}"), text) for loss, text in zip(losses, texts)),
            ]
        )
    return Table(columns, [Group(rows)], left=2)


# Nats per target, and bits per byte: of the last steps, of the one validation of all runs, and of its other form.
LOSSES = ("train_loss", "validation.loss", "validation.all_mask_loss", "validation.bits_per_byte")


def _validated(record: Record) -> str:
    """What keeps a validation loss from comparing with the others of its column."""
    other = at(record, "corpus.validation.manifest_sha256")
    losses = [number(record, f"pretrain.validation.{name}") for name in ("loss", "all_mask_loss")]
    own = losses[0] is not None and losses[1] is None  # rules before version 5
    return ", ".join(filter(None, (f"on {str(other)[:8]}" if other else "", "own masking" if own else "")))


def _or_dash(value: float | None, words: Callable[[float], str]) -> str:
    return DASH if value is None else words(value)


def duration(seconds: float) -> str:
    """`45 s`, `12.5 min` or `23.9 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def model_words(record: Mapping[str, Any]) -> str:
    """Such as `12.3M parameters`; empty where it is not on record."""
    parameters = number(record, "pretrain.parameters")
    return "" if parameters is None else f"{compact(parameters)} parameters"


def budget_words(record: Mapping[str, Any]) -> str:
    """Such as `0.5 h on 1 AMD EPYC`; empty where there was no pretraining."""
    limit, unit = number(record, "pretrain.budget.limit"), at(record, "pretrain.budget.unit")
    if limit is None:
        return ""
    device = at(record, "environment.device.name") or at(record, "environment.device.kind")
    if unit == "hours":
        amount = f"{limit:.3g} h" if limit >= 0.5 else f"{limit * 60:.3g} min"
    else:
        amount = f"{compact(limit)} {unit}"
    return f"{amount} on {device}" if device else amount


def anchor(run: Run) -> str:
    """The run's place in the page and the stem of its plots: different for different folders."""
    return "run-" + "".join(c if c.isalnum() or c in "-_" else f".{ord(c):x}" for c in run.folder.name)


def _references() -> Iterator[list[Cell]]:
    for row in REFERENCES:
        spread = "" if row.spread is None else f"±{row.spread:.1f}"
        detail = "; ".join(part for part in (row.source, row.note) if part)
        eight = DASH if row.avg8 is None else f"{row.avg8:.1f}"
        tasks = [Cell(f"{row.scores[c]:.1f}" if c in row.scores else DASH) for c in columns_of("glue")]
        yield [
            Cell(""),
            Cell(row.title, detail),
            Cell("published"),
            Cell(f"{row.avg9:.1f}", spread),
            Cell(eight),
            *tasks,
        ]


def _notes(rows: Sequence[Entrant], suite: str) -> Iterator[str]:
    for name, average in AVERAGES[suite].items():
        yield f"{TITLES[name]}: {average.definition}."
    tuned = [row for row in rows if row.init not in (FLOOR, CONSTANT)]
    protocols = sorted({_protocol(row) for row in tuned})
    for protocol in protocols:
        names = dict.fromkeys(row.run.label for row in tuned if _protocol(row) == protocol)
        who = "" if len(protocols) == 1 else f" ({', '.join(names)})"
        yield f"Every score: {protocol}{who}. ± is the standard deviation over seeds."
    if any(row.spread(name) is not None for row in tuned for name in row.averages):
        yield (
            "± of an average: standard deviation over seeds of each seed's own average over all tasks. It is the noise"
            " of fine-tuning alone: a row is one pretraining run, and how much another would differ is not known."
        )
    if sum(row.ranked for row in rows) > 1:
        yield (
            "A row shares the place above it where Welch's t-test on the seeds' averages finds no difference to that"
            f" place's first row (p >= {NOISE:g})."
        )
    if any(row.init == FLOOR for row in rows):
        yield f"{FLOOR}: a linear model on tf-idf of words and pairs of words; what no encoder is needed for."
    if any(row.init == CONSTANT for row in rows):
        yield f"{CONSTANT}: the training set's most frequent class, or its mean label, whatever the text."
    if any(score.subset for row in rows for score in row.scores.values()):
        yield f"{SUBSET} trained or scored on a part of the official data; not comparable with full-task numbers."
    for row in rows:
        gaps = _gaps(row)
        if gaps:
            yield f"{row.run.label}, {row.init}: {gaps}."
    yield from _gains(rows)
    if suite == "glue":
        yield "Published avg-8 is computed here from the published task scores; second-hand numbers are marked so."


def _protocol(row: Entrant) -> str:
    count = len(entries(row.section.get("seeds")))
    epochs = number(row.section, "hyperparameters.epochs")
    length = "" if epochs is None else f", {counted(epochs, 'epoch')}"
    few = f" (fewer than the {MIN_SEEDS} of the closed division)" if count < MIN_SEEDS else ""
    split, selection = row.section.get("split"), row.section.get("selection")
    of_seeds = "one seed" if count == 1 else f"median of {count} seeds"
    chosen = f", {sets} by the mean over all tasks" if (sets := swept(row.section)) else ""
    return f"{split} split, {of_seeds}{few}, {selection} scored{length}{chosen}"


def _gaps(row: Entrant) -> str:
    absent = [ENTRIES[c][1].title for c in columns_of(row.suite) if row.scores.get(c, Score()).value is None]
    dashed = [TITLES[name] for name, value in row.averages.items() if value is None]
    if not dashed:
        return ""
    reasons = [(name, score.problem) for name, score in row.scores.items() if score.problem and score.value is None]
    absent_tasks = at(row.section, "absent")
    reasons += [(str(k), str(v)) for k, v in absent_tasks.items()] if isinstance(absent_tasks, Mapping) else []
    why = "; ".join(f"{_title(name)}: {reason}" for name, reason in reasons if _counts(name, row.suite))
    where = f"there is no score for {', '.join(absent) or 'some entry'}"
    return f"{' and '.join(dashed)} not printed, because {where}" + (f" ({why})" if why else "")


def _title(name: str) -> str:
    return ENTRIES[name][1].title if name in ENTRIES else GLUE[name].title if name in GLUE else name


def _counts(name: str, suite: str) -> bool:
    """Whether an entry, or any entry of a task, is part of the suite's averages."""
    inside = [s.entry for s in GLUE[name].scored] if name in GLUE else [name]
    return any(entry in columns_of(suite) for entry in inside)


def _gains(rows: Sequence[Entrant]) -> Iterator[str]:
    for row in rows:
        if not row.baseline and (best := best_baseline(row, rows)):
            yield f"{row.run.label}: {gain_words(row, best)}."


def gain_words(row: Entrant, best: tuple[Entrant, float, int]) -> str:
    """Such as `+0.4 points above the best row without pretraining (bag of words)`, and over how many entries."""
    other, gain, count = best
    name = BASELINES.get(other.init, other.init)
    over = f"on average over the {counted(count, 'entry', 'entries')} that both rows have"
    return f"{gain:+.1f} points above the best row without pretraining ({name}), {over}"


def other_protocols() -> list[Block]:
    """The table of published rows that must not be compared with ours."""
    rows = [
        [
            Cell(r.title, "; ".join(p for p in (r.source, r.note) if p)),
            Cell(r.parameters),
            Cell(r.cost),
            Cell(f"{r.avg8:.1f}"),
        ]
        + [Cell(f"{r.scores[e]:.1f}" if e in r.scores else DASH) for e in columns_of("glue") if e != "mnli_mismatched"]
        for r in OTHER_PROTOCOLS
    ]
    names = [ENTRIES[e][1].title.replace("-m", "") for e in columns_of("glue") if e != "mnli_mismatched"]
    return [
        Paragraph(
            "Tuned per task, trained on MNLI in between, or averaged otherwise: for orientation, never for ranking."
        ),
        Table(["Model", "Parameters", "Pretraining", "average of 8", *names], [Group(rows)], left=3),
    ]
