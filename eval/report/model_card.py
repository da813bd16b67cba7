"""Model card (templates/model_card.j2): README.md of an exported folder, as the Hugging Face hub reads it.

The first screen says what a stranger needs: how to load the model, what it scores, what was spent, what it is not for.
Scores by task, corpus, recipe and rules are folded. Everything comes from the run's record, without paths of a machine.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cramming import __version__
from cramming.data.task_files import ENTRIES
from cramming.record_schema import Record, read_record
from eval.report.blocks import Block, Details, Table, escape, to_markdown
from eval.report.facts import known_facts
from eval.report.format import (
    DASH,
    compact,
    describe_budget,
    hub_name,
    join_words,
    pairs,
    short_name,
    title_of,
)
from eval.report.page import template
from eval.report.run_page import DIVISIONS, run_blocks
from eval.report.table import main_average, rows_of
from eval.rules.closed_division import FROM_SCRATCH
from eval.rules.load import Run

RECIPE = (
    "model",
    "objective",
    "optim",
    "schedule",
    "start",
    "precision",
    "attention",
    "train",
    "memory",
    "runtime",
)
HEADLINES = ("Track", "Tokens", "Energy (kWh)", "Sources", "Licences")
MAX_SOURCES = 20
LONGER = {  # position encoding -> what becomes of longer sequences; lengths trained and of the position table
    "learned": "The table of positions ends at {1}.",
    "scaled_sinusoidal": "Load with a higher `max_position_embeddings` for longer ones, which were not measured.",
    "rope": "Rotary positions compute longer ones too, which were not measured.",
    "none": "Without positions it computes longer ones too, which were not measured.",
}
CARD_TAG = "cramming"  # in the header of every card; by it an earlier export is known


@dataclass(frozen=True)
class Exported:
    """Exported folder. `family`: the model type in its config.json, None for this suite's own architecture.

    `has_head`: whether it has a head for masked language modelling. `max_length`: the length that was trained, or of
    the position table (`table_length`) where that is not known. `pooling`: that of the scores, None without scores.
    `clients`: name, version and result of each client that loaded the folder. `distilled`: titles and texts about the
    teacher, of a model that was made with `--as`.
    """

    name: str
    family: str | None
    parameters: int
    has_head: bool
    max_length: int
    table_length: int
    positions: str
    pooling: str | None
    clients: Sequence[tuple[str, str, str]]
    distilled: Sequence[tuple[str, str]]
    token_types: int
    weights_sha256: str
    license: str | None
    language: str | None


def write_card(model: Exported, run: Run | None) -> str:
    """Return the text of README.md."""
    record = run.record if run else read_record({})
    text = template("model_card.j2").render(
        model=model,
        parameters=compact(model.parameters),
        record=record,
        header=_header(model, record).strip(),
        origin=_origin(record),
        budget=escape(describe_budget(record) or ""),
        version=record.suite_version or __version__,
        headlines=to_markdown([_headlines(run)]) if run else "",
        details=to_markdown(_details(run)) if run else "",
        tested_on=datetime.now(UTC).date().isoformat(),
        longer=LONGER[model.positions].format(model.max_length, model.table_length),
        distilled=to_markdown([Table(("", ""), model.distilled, 2)]),
        clients=to_markdown([Table(("Client", "Version", "Result"), model.clients, 3)]),
    )
    for path, name in _paths(record).items():
        text = text.replace(path, name)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _source(record: Record) -> Path | None:
    """Return the folder of the model that gave a run its first weights or its teacher, None for one from scratch."""
    start, objective = (record.config.get(name) or {} for name in ("start", "objective"))
    path = start.get("path") or objective.get("teacher")
    return Path(path) if path else None


def _origin(record: Record) -> str:
    """Return how the weights came about."""
    source = _source(record)
    if source is None:
        return "pretrained from scratch" if record.training.start else "exported"
    verb = "distilled" if record.training.objective == "distill" else "trained further"
    return f"{verb} from {escape(short_name(source))}"


def _headlines(run: Run) -> Table:
    """Return score, gain, budget, data and division."""
    rows = []
    for row in rows_of([run]):
        if not row.is_baseline:
            name = main_average(row.suite)
            rows += [(title_of(name), str(row.cell(name))), ("Gain", str(row.gain or DASH))]
    facts = known_facts(run.record)
    rows += [(title, facts[title]) for title in HEADLINES if title in facts]
    broken = [finding.rule for finding in run.verdict.broken]
    rows.append(("Rules", join_words(DIVISIONS[run.verdict.division], *broken)))
    return Table(("", ""), rows, 2)


def _details(run: Run) -> list[Block]:
    """Return the run's report, the sources of its corpus, and its recipe, each folded."""
    record = run.record
    sources = []
    for source in record.corpus.sources[:MAX_SOURCES]:
        sources.append((source.name or "", source.license or "not given", source.sha256 or ""))
    sources.append(("Documents removed", pairs(record.corpus.removed) or "none", ""))
    recipe = [(name, pairs(record.config[name])) for name in RECIPE if record.config.get(name)]
    return [
        Details("Scores and rules", run_blocks(run, rows_of([run]))),
        Details("Corpus", [Table(("Source", "Licence", "SHA-256"), sources, 3)]),
        Details("Recipe", [Table(("Section", "Settings"), recipe, 2)]),
    ]


def _header(model: Exported, record: Record) -> str:
    from huggingface_hub import ModelCardData

    source = _source(record)
    named = [each.dataset or "" for each in record.corpus.sources]
    hub = [name for name in named if re.fullmatch(r"[\w.-]+/[\w.-]+", name)]
    tags = [CARD_TAG]
    if record.training.start in FROM_SCRATCH and not source:
        tags.append("pretrained-from-scratch")
    if model.has_head:
        tags.append("masked-lm")
    if not model.family:
        tags.append("custom_code")
    data = ModelCardData(
        language=model.language,
        license=model.license,
        library_name="transformers",
        pipeline_tag="fill-mask" if model.has_head else "feature-extraction",
        tags=tags,
        datasets=list(dict.fromkeys(hub)) or None,
        model_name=model.name,
        base_model=hub_name(source) if source else None,
        eval_results=_results(record) or None,
    )
    return str(data.to_yaml())


def _results(record: Record) -> list[Any]:
    """Return the scores on whole GLUE tasks, in the hub's form."""
    from huggingface_hub import EvalResult

    section = record.trained
    results = []
    tasks = section.tasks if section and section.suite == "glue" else {}
    for name, task in tasks.items():
        if name not in ENTRIES or task.score is None or task.subset:
            continue
        source = ENTRIES[name][1]
        results.append(
            EvalResult(
                task_type="text-classification",
                dataset_type="nyu-mll/glue",
                dataset_name=f"GLUE {source.title}",
                dataset_config=source.hub_config,
                dataset_split=source.hub_split,
                metric_type=task.main_metric,
                metric_value=round(task.score, 2),
            )
        )
    return results


def _paths(record: Record) -> dict[str, str]:
    """Return the absolute paths of the machine that trained, and their last two parts; the longest first."""
    first = _source(record)
    paths = [record.corpus.folder, first and str(first)]
    paths += [section.model for section in record.glue.values()]
    for source in record.corpus.sources:
        paths += [source.name, source.folder]
    absolute = {path for path in paths if path and Path(path).is_absolute()}
    ordered = sorted(absolute, key=len, reverse=True)
    return {path: "/".join(Path(path).parts[-2:]) for path in ordered}
