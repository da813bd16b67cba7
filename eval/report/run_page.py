"""One run's page: what was trained on what within which budget, how it scored, and what the rules say about it."""

from collections.abc import Callable, Sequence
from typing import Any

from cramming.data.task_files import ENTRIES
from cramming.progress import compact
from cramming.record_schema import Budget, Metric, Record, Scores, TaskScore
from eval.report.leaderboard import gain_words
from eval.report.ranking import BAG_OF_WORDS, BASELINES, CONSTANT, Row, best_baseline
from eval.report.render import DASH, Block, Cell, Figure, Group, Heading, Paragraph, Section, Table
from eval.report.wording import (
    SUBSET,
    TITLES,
    anchor,
    budget_words,
    duration,
    model_words,
    score_cell,
    score_words,
    spread_words,
    title_of,
)
from eval.rules.evidence import names_of
from eval.rules.load import Run
from eval.rules.table import RULES, Verdict
from eval.tasks.suites import AVERAGES

NOT_OFFICIAL = f"{SUBSET} not the official number of examples; not comparable with full-task numbers"
# Initialisations as columns. The first that was scored is the one that the others of its suite stand beside.
COLUMNS = {
    "pretrained": "Pretrained", "random": "Random init", BAG_OF_WORDS: "Bag of words", CONSTANT: "Constant class"
}  # fmt: skip


def blocks(
    run: Run, verdict: Verdict, rows: Sequence[Row], figures: Sequence[Figure], more: Sequence[str], level: int
) -> list[Block]:
    """The run's section: `rows` are its own, `more` are lines about files beside it, `level` its heading's."""
    record = run.record
    status = record.training.status
    badge = [verdict.division if rows else "not scored", status if status and status != "finished" else ""]
    opening = ", ".join(filter(None, (model_words(record), budget_words(record))))
    found: list[Block] = [Heading(run.label, level, anchor(run), ", ".join(filter(None, badge)))]
    found += [Paragraph(opening[0].upper() + opening[1:] + ".")] if opening else []
    if rows:
        found += [_scores(rows), *_division(record, verdict)]
    else:
        runs = "" if run.folder.parent.name == "runs" else f" runs={run.folder.parent}"
        found.append(Paragraph(f"Not scored yet: `cramming glue name={run.folder.name}{runs}` does it."))
    if record.problems:
        found.append(Paragraph(f"The record is incomplete: {'; '.join(record.problems)}."))
    found += beyond_glue(record)
    found += [Paragraph(line) for line in more]
    found += figures
    found.append(Section("Model, budget, corpus, machine", [summary(record)]))
    held = len(verdict.findings) - len(verdict.broken)
    found.append(Section(f"Rules: {held} of {len(verdict.findings)} hold", [_findings(verdict)]))
    return found


def beyond_glue(record: Record) -> list[Block]:
    """SuperGLUE's tasks and minimal pairs, where they were scored: for information, judged by no rule."""
    found: list[Block] = [
        Paragraph(f"SuperGLUE, {init}: {_superglue(section)}.") for init, section in record.superglue.items()
    ]
    pairs = record.minimal_pairs
    if pairs.accuracy is not None:
        over = f"{len(pairs.paradigms)} paradigms ({pairs.definition})"
        found.append(Paragraph(f"Minimal pairs: {pairs.accuracy:.1f} over {over}."))
    return found


def _superglue(section: Scores) -> str:
    """The scores and their mean; then why a score is missing, and what the mark on one means."""
    tasks = {task.title or name: task for name, task in section.tasks.items()}
    cells = {title: score_cell(task) for title, task in tasks.items()}
    average, marked = section.averages.get("superglue5"), any(task.subset for task in tasks.values())
    mean = None if average is None else average.value
    value = "not printed" if mean is None else f"{mean:.1f}{SUBSET if marked else ''}"
    return "; ".join(
        [
            ", ".join(f"{title} {cell.text} {cell.small}".rstrip() for title, cell in cells.items()),
            f"average {value} ({average and average.definition})",
            *(f"{title}: {task.remark}" for title, task in tasks.items() if task.remark),
            *(f"{name}: {why}" for name, why in section.absent.items()),
            *([NOT_OFFICIAL] if marked else []),
        ]
    )


def _division(record: Record, verdict: Verdict) -> list[Block]:
    """The division in a sentence, and what keeps the run out of the closed one."""
    claimed = record.division_requested
    name = {"closed": "Closed division", "open": "Open division", "invalid": "Invalid record, not ranked"}
    sentence = name[verdict.division]
    if claimed == "open" and verdict.division == "open":
        sentence += ", as the run claims"
    elif claimed == "closed" and verdict.division != "closed":
        sentence += "; the run claims the closed division"
    if not verdict.broken:
        return [Paragraph(f"{sentence}. Every rule holds.")]
    sentences = {rule.number: rule.sentence for rule in RULES}
    rows = [[Cell(f.rule, "", "main"), Cell(sentences[f.rule]), Cell(f.evidence)] for f in verdict.broken]
    return [Paragraph(f"{sentence}."), Table(["Broken rule", "Sentence", "What is wrong"], [Group(rows)], left=3)]


def _findings(verdict: Verdict) -> Table:
    rows = []
    for rule, finding in zip(RULES, verdict.findings):
        tone = "good" if finding.ok else "bad" if rule.division == "both" else "warn"
        state = Cell("holds" if finding.ok else "broken", "", tone)
        rows.append([Cell(rule.number), Cell(rule.division), Cell(rule.sentence), state, Cell(finding.evidence)])
    return Table(["Rule", "Division", "Sentence", "Finding", "Evidence"], [Group(rows)], left=5)


def _scores(rows: Sequence[Row]) -> Table:
    """Per entry: metric, examples, the trained model, and beside it what it is measured against."""
    first = next((r for init in COLUMNS for r in rows if r.init == init), rows[0])
    others = [r for r in rows if r.suite == first.suite and r is not first]
    beside = [r for init in BASELINES for r in others if r.init == init]
    tasks = first.section.tasks
    names = [*(n for n in ENTRIES if n in tasks), *(n for n in tasks if n not in ENTRIES)]
    body = [_score_row(name, first, beside) for name in names]
    averages = [_average_row(name, first, beside) for name in first.averages]
    mine = COLUMNS.get(first.init, first.init)
    columns = ["Task", "Metric", "Other metrics", "Examples", f"{mine}, mean", f"{mine}, median"]
    columns += [column for row in beside for column in (f"{COLUMNS[row.init]}, median", "Difference")]
    return Table(columns, [Group(body), Group(averages, "Averages")], _notes(first, rows), left=3, kind="tasks")


def _notes(first: Row, rows: Sequence[Row]) -> list[str]:
    section = first.section
    notes = [f"{TITLES[name]}: {AVERAGES[first.suite][name].definition}." for name in first.averages]
    notes.append(
        f"{section.split} split, median ± standard deviation over seeds {', '.join(map(str, section.seeds))};"
        f" {section.selection} scored; times 100. Mean: over the same seeds, with Student's 95 % confidence interval"
        " where there are several. Other metrics: medians. ± of an average: standard deviation of the average of each"
        " seed alone, which is noise of fine-tuning alone."
    )
    notes += [f"{title_of(name)}: {task.remark}." for name, task in section.tasks.items() if task.remark]
    notes += [f"{NOT_OFFICIAL}."] if first.subset else []
    if not first.baseline and (best := best_baseline(first, rows)):
        notes.append(f"{gain_words(*best)}.")
    if section.hyperparameters is not None:
        notes.append("Fine-tuning: " + ", ".join(f"{k} {v}" for k, v in section.hyperparameters.items()) + ".")
    return notes


def _score_row(name: str, first: Row, others: Sequence[Row]) -> list[Cell]:
    task, beside = first.section.tasks[name], []
    for row in others:
        beside += [score_cell(row.section.tasks.get(name)), Cell(_difference(task.score, row.score(name)))]
    metrics = {key.replace("_", " "): value for key, value in task.metrics.items() if key != task.main_metric}
    medians = [f"{key} {100 * value.median:.1f}" for key, value in metrics.items() if value.median is not None]
    return [
        Cell(title_of(name) if name in ENTRIES else task.title or name, "", "main"),
        Cell((task.main_metric or "").replace("_", " ")),
        Cell(", ".join(medians) or DASH),
        Cell(_examples(task)),
        _mean_cell(task.main),
        score_cell(task),
        *beside,
    ]


def _mean_cell(metric: Metric) -> Cell:
    """`83.7`, with `83.1 to 84.3` beside it; a dash where it is not on record."""
    if metric.mean is None:
        return Cell(DASH)
    ends = [f"{100 * end:.1f}" for end in metric.mean_ci95 if end is not None]
    return Cell(f"{100 * metric.mean:.1f}", " to ".join(ends) if len(ends) == 2 else "")


def _examples(task: TaskScore) -> str:
    def count(have: float | None, official: float | None) -> str:
        if have is None:
            return DASH
        return f"{have:,.0f}" if official in (None, have) else f"{have:,.0f} of {official:,.0f}"

    train = count(task.train_examples, task.official_train_examples)
    return f"{train} / {count(task.eval_examples, task.official_eval_examples)}"


def _difference(mine: float | None, theirs: float | None) -> str:
    return DASH if mine is None or theirs is None else f"{mine - theirs:+.1f}"


def _average_row(name: str, first: Row, others: Sequence[Row]) -> list[Cell]:
    def cell(row: Row) -> Cell:
        if (value := row.averages[name]) is None:
            return Cell(DASH, "", "main")
        return Cell(f"{score_words(value)}{SUBSET if first.subset else ''}", spread_words(row.spread(name)), "main")

    mine, beside = first.averages[name], []
    for row in others:
        beside += [cell(row), Cell(_difference(mine, row.averages[name]))]
    missing = first.section.averages[name].missing if name in first.section.averages else []
    why = f"not printed, missing: {', '.join(title_of(str(n)) for n in missing)}" if mine is None else ""
    return [Cell(TITLES.get(name, name), "", "main"), Cell("mean"), Cell(why), Cell(""), Cell(""), cell(first), *beside]


def summary(record: Record) -> Table:
    """Model, budget, corpus, machine and code: a line for each of which something is on record."""
    training, corpus, environment = record.training, record.corpus, record.environment
    loss = training.validation
    licences = dict.fromkeys(source.license or "no licence given" for source in corpus.sources)
    versions = {
        "cramming": record.suite_version,
        "Python": environment.python,
        "torch": environment.torch,
        "transformers": environment.transformers,
        "rules": record.rules_version,
    }
    lines: dict[str, list[str | None]] = {
        "Scored model": [record.trained.model if record.trained else None],
        "Budget": _budget(training.budget),
        "Parameters": [
            _said("{}", training.parameters),
            _said("{} without embeddings", training.parameters_without_embeddings),
        ],
        "Training": [
            _said("{} steps", training.steps),
            _said("{} tokens", training.tokens),
            _said("{} sequences", training.sequences),
            _said("{} exaFLOPs", training.exaflops),
            _said("{} passes over the corpus", training.corpus_epochs),
            _said("{} steps skipped", training.skipped_steps),
            _said("seed {}", training.seed, "{}".format),
        ],
        "Speed": [
            _said("{} tokens/s", training.tokens_per_second),
            _said("{} of the peak FLOP/s", training.model_flops_utilization, "{:.1%}".format),
            _said("{} waiting for data", training.data_wait_share, "{:.1%}".format),
            _said("{} GB peak memory", training.peak_memory_bytes, lambda value: f"{value / 1e9:.2f}"),
        ],
        "Energy of the GPU": [_said("{} kWh", training.energy_kwh), training.energy_source],
        "Loss": [
            _said("{} training", training.train_loss),
            _said("{} validation", loss.loss),
            _said("{} of masked tokens right", loss.accuracy, "{:.1%}".format),
            _said("{} validation with all targets behind [MASK]", loss.all_mask_loss),
            _said("{} bits per byte", loss.bits_per_byte),
        ],
        "Corpus": [
            _said("{} tokens", corpus.tokens),
            _said("{} documents", corpus.documents),
            corpus.tokenizer.kind,
            _said("vocabulary {}", corpus.vocab_size),
            _said("manifest {:.12}", corpus.manifest_sha256, str),
            _said("validated on manifest {:.12}", corpus.validation.manifest_sha256, str),
        ],
        "Machine": [environment.device.name, _said("{} CPU cores", environment.cpu_count), environment.platform],
        "Versions": [f"{name} {version}" for name, version in versions.items() if version],
        "Code": [_said("commit {:.12}", environment.git.commit, str)],
        "Weights": [_said("SHA-256 {:.12}", training.final_sha256, str)],
        "Created": [record.created],
        "Sources": [f"{names_of(corpus.sources)} ({', '.join(licences)})" if corpus.sources else None],
    }
    texts = {title: ", ".join(filter(None, found)) for title, found in lines.items()}
    rows = [[Cell(title, "", "main"), Cell(text)] for title, text in texts.items() if text]
    return Table(["", ""], [Group(rows)], left=2)


def _said(form: str, value: Any, words: Callable[[Any], str] = compact) -> str | None:
    return None if value is None else form.format(words(value))


def _budget(budget: Budget) -> list[str | None]:
    known = None not in (budget.spent, budget.limit)
    return [
        f"{budget.spent:.6g} of {budget.limit:.6g} {budget.unit}" if known else None,
        _said(f"{{}} in {len(budget.processes)} process(es)", budget.spent_seconds, duration),
        _said("overrun {} s", budget.overrun_seconds, "{:g}".format),
    ]
