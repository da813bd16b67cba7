"""The model card (templates/model_card.j2): README.md of an exported folder, as the Hugging Face hub reads it.

A YAML header for the hub's search, then what a stranger needs before using the weights: how to load them, what they
score, what was spent, on which text, by which recipe, what the rules say, and what the model is not for. All of it
comes from the run's record; a model that came without one says so. Paths of the machine are left out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cramming import __version__
from cramming.data.task_files import ENTRIES
from cramming.record_schema import Record, read_record
from eval.report.ranking import rows_of
from eval.report.render import markdown
from eval.report.run_page import RunPage
from eval.report.wording import budget_words
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
MOST_SOURCES = 20
CARD_TAG = "pretrained-from-scratch"


@dataclass(frozen=True)
class Exported:
    """What the card says of the folder itself; `family`: the model type in its config.json, None for this suite's own;
    `has_head`: for masked language modelling."""

    name: str
    family: str | None
    parameters: int
    has_head: bool
    max_length: int
    token_types: int
    weights_sha256: str
    license: str | None
    language: str | None


def write_card(model: Exported, run: Run | None) -> str:
    """The text of README.md."""
    record = run.record if run else read_record({})
    train = record.config.get("train")
    text = markdown(
        "model_card.j2",
        model=model,
        record=record,
        header=_header(model, record).strip(),
        budget=budget_words(record),
        version=record.suite_version or __version__,
        one=RunPage(run, rows_of([run])) if run else None,
        recipe=_recipe(record),
        MOST_SOURCES=MOST_SOURCES,
        trained_length=train.get("sequence_length") if isinstance(train, Mapping) else None,
    )
    for path, name in _paths(record).items():
        text = text.replace(path, name)
    return text


def _header(model: Exported, record: Record) -> str:
    from huggingface_hub import ModelCardData

    named = [source.dataset or "" for source in record.corpus.sources]
    hub = [name for name in named if re.fullmatch(r"[\w.-]+/[\w.-]+", name)]
    tags = ["cramming", *(["masked-lm"] if model.has_head else []), CARD_TAG]
    tags += [] if model.family else ["custom_code"]
    data = ModelCardData(
        language=model.language,
        license=model.license,
        library_name="transformers",
        pipeline_tag="fill-mask" if model.has_head else "feature-extraction",
        tags=tags,
        datasets=list(dict.fromkeys(hub)) or None,
        model_name=model.name,
        eval_results=_index(record) or None,
    )
    return str(data.to_yaml())


def _index(record: Record) -> list[Any]:
    """The scores on whole GLUE tasks, in the hub's form."""
    from huggingface_hub import EvalResult

    section = record.trained
    tasks = section.tasks if section and section.suite == "glue" else {}
    return [
        EvalResult(
            task_type="text-classification",
            dataset_type="nyu-mll/glue",
            dataset_name=f"GLUE {ENTRIES[name][1].title}",
            dataset_config=ENTRIES[name][1].hub_config,
            dataset_split=ENTRIES[name][1].hub_split,
            metric_type=str(task.main_metric),
            metric_value=round(task.score, 2),
        )
        for name, task in tasks.items()
        if name in ENTRIES and task.score is not None and not task.subset
    ]


def _recipe(record: Record) -> dict[str, Any]:
    """The settings, section by section, and what they came to."""
    training = record.training
    chosen = {
        "precision": training.precision,
        "residual stream": training.residual,
        "attention": training.attention_kernels or None,
        "peak learning rate": training.peak_learning_rate,
    }
    in_force = {name: value for name, value in chosen.items() if value is not None}
    return {name: record.config.get(name) for name in RECIPE} | {"in force": in_force}


def _paths(record: Record) -> dict[str, str]:
    """Paths on the machine that trained, and what the card calls them; the longest first."""
    sources = [
        source.folder or (None if source.kind == "hub" or source.dataset else source.name)
        for source in record.corpus.sources
    ]
    found = {
        path: Path(path).name for path in [*sources, record.corpus.folder] if path and "/" in path
    }
    scored = [section.model for section in record.glue.values()]
    found |= {
        path: "/".join(Path(path).parts[-2:])
        for path in scored
        if path and Path(path).is_absolute()
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
