"""The model card: README.md of an exported folder, as the Hugging Face hub reads it.

A YAML header for the hub's search, then what a stranger needs before using the weights: how to load them, what they
score, what was spent, on which text, by which recipe, what the rules say, and what the model is not for. All of it
comes from the run's record; a model that came without one says so. Paths of the machine are left out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from cramming import __version__
from cramming.data.task_files import ENTRIES
from cramming.progress import compact
from cramming.record import RULES_VERSION
from cramming.record_schema import Record, read_record
from eval.report import run_page
from eval.report.ranking import rows_of
from eval.report.render import Block, Cell, Group, Heading, Paragraph, Table, markdown
from eval.report.wording import budget_words
from eval.rules.load import Run
from eval.rules.table import judge

RECIPE = ("model", "objective", "optim", "schedule", "start", "precision", "attention", "train", "memory", "runtime")
MOST_SOURCES = 20
STOCK_NOTE = "transformers has this architecture: nothing but torch and transformers is needed."
CODE_NOTE = (
    "transformers lacks this architecture: the Python files in this folder compute it, and need nothing but\n"
    "torch and transformers. Read it before you allow it to run with `trust_remote_code=True`."
)


@dataclass(frozen=True)
class Exported:
    """What the card says of the folder itself; `family` is the model type in its config.json."""

    name: str
    family: str
    remote_code: bool
    parameters: int
    max_length: int
    token_types: int
    weights_sha256: str
    license: str | None
    language: str | None


def write_card(model: Exported, run: Run | None) -> str:
    """The text of README.md."""
    record = run.record if run else read_record({})
    template = Template((Path(__file__).parent / "model_card.md").read_text(encoding="utf-8"))
    text = template.substitute(
        header=_header(model, record),
        opening=markdown(_opening(model, run)),
        code_note=CODE_NOTE if model.remote_code else STOCK_NOTE,
        name=model.name,
        trust=", trust_remote_code=True" if model.remote_code else "",
        record=markdown([*_results(run), *_corpus(record), *_recipe(record)]) if run else "",
        limits=markdown(_limits(model, record)),
    )
    for path, name in _paths(record).items():
        text = text.replace(path, name)
    return text


def _header(model: Exported, record: Record) -> str:
    from huggingface_hub import ModelCardData

    named = [source.dataset or "" for source in record.corpus.sources]
    hub = [name for name in named if re.fullmatch(r"[\w.-]+/[\w.-]+", name)]
    tags = ["cramming", "masked-lm", "pretrained-from-scratch", *(["custom_code"] if model.remote_code else [])]
    data = ModelCardData(
        language=model.language,
        license=model.license,
        library_name="transformers",
        pipeline_tag="fill-mask",
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


def _opening(model: Exported, run: Run | None) -> list[Block]:
    how, version = "", __version__
    if run:
        how = f" within {budget}" if (budget := budget_words(run.record)) else ""
        version = run.record.suite_version or __version__
    words = f"A masked language model of {compact(model.parameters)} parameters (architecture: {model.family})"
    blocks: list[Block] = [Heading(model.name, 1), Paragraph(f"{words}, pretrained{how} with cramming {version}.")]
    if not run:
        blocks.append(Paragraph("No record of its training lies beside it: budget, corpus and scores are not known."))
    return blocks


def _results(run: Run) -> list[Block]:
    """The run's own page under a heading of the card's, led by the verdict."""
    verdict = judge(run.record)
    _, *page = run_page.blocks(run, verdict, rows_of([run]), [], [], 2)
    broken = f" Broken: {', '.join(finding.rule for finding in verdict.broken)}." if verdict.broken else ""
    divisions = {"closed": "the closed division", "open": "the open division", "invalid": "no division, it is invalid"}
    words = f"By the rules, version {RULES_VERSION}, this run belongs to {divisions[verdict.division]}.{broken}"
    return [Heading("Scores, budget and rules"), Paragraph(words), *page]


def _corpus(record: Record) -> list[Block]:
    """Fingerprint and licence of the text, source by source, and what was removed from it."""
    corpus = record.corpus
    lines = {
        "SHA-256 of its manifest": corpus.manifest_sha256,
        "SHA-256 of the tokenizer": corpus.tokenizer.sha256,
        "Documents removed": _pairs(corpus.removed) or "none",
    }
    rows = [[s.name or "not given", s.license or "not given", s.sha256 or ""] for s in corpus.sources]
    blocks: list[Block] = [
        Heading("Corpus"),
        _table(["", ""], [[name, value] for name, value in lines.items() if value]),
        _table(["Source", "Licence", "SHA-256"], rows[:MOST_SOURCES]),
    ]
    more = len(rows) - MOST_SOURCES
    return [*blocks, Paragraph(f"And {more} more sources.")] if more > 0 else blocks


def _recipe(record: Record) -> list[Block]:
    rows = [[name, _pairs(settings)] for name in RECIPE if (settings := record.config.get(name))]
    training, commit = record.training, record.environment.git.commit
    chosen = {
        "precision": training.precision,
        "attention": training.attention_kernels or None,
        "peak learning rate": training.peak_learning_rate,
    }
    rows.append(["in force", _pairs({name: value for name, value in chosen.items() if value is not None})])
    source = f"cramming {record.suite_version}" + (f", commit {commit}" if commit else "")
    return [Heading("Recipe"), _table(["Section", "Settings"], rows), Paragraph(f"Made with {source}.")]


def _limits(model: Exported, record: Record) -> list[Block]:
    tokens, train = record.training.tokens, record.config.get("train")
    length = train.get("sequence_length") if isinstance(train, Mapping) else None
    trained_on = f"; trained on {length}" if length else ""
    lines = {
        f"Sequences of at most {model.max_length} tokens{trained_on}.": True,
        f"Trained on {compact(tokens or 0)} tokens, what the budget allowed: a result of a benchmark, not a product. It"
        " repeats what its corpus says, false or harmful as that may be.": bool(tokens),
        "Nothing is known of the text it was trained on, nor of what it repeats.": not tokens,
        "Scores are those of development sets.": bool(record.glue),
        "The corpus is generated from a grammar: outside of it, the model knows no language.": any(
            source.kind == "embedded" for source in record.corpus.sources
        ),
        "Only the first token type was trained; the others are as at the start.": model.token_types > 1,
        "Attention weights cannot be asked for: attention is one fused operation.": model.remote_code,
        "No licence for the weights is given here; those of the text are named under Corpus.": model.license is None,
    }
    head: list[Block] = [Heading("Limits"), *(Paragraph(f"- {line}") for line, applies in lines.items() if applies)]
    return [*head, Heading("File"), Paragraph(f"model.safetensors, SHA-256 {model.weights_sha256}")]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(columns, [Group([[Cell(text) for text in row] for row in rows])], left=len(columns))


def _pairs(values: Any) -> str:
    """`rate 0.25, mask_share 0.8`; a section inside a section in brackets."""
    if isinstance(values, list):
        return " and ".join(map(str, values))
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(f"{k} ({_pairs(v)})" if isinstance(v, Mapping) else f"{k} {_pairs(v)}" for k, v in values.items())


def _paths(record: Record) -> dict[str, str]:
    """Paths on the machine that trained, and what the card calls them; the longest first."""
    sources = [
        source.folder or (None if source.kind == "hub" or source.dataset else source.name)
        for source in record.corpus.sources
    ]
    found = {path: Path(path).name for path in [*sources, record.corpus.folder] if path and "/" in path}
    scored = [section.model for section in record.glue.values()]
    found |= {path: "/".join(Path(path).parts[-2:]) for path in scored if path and Path(path).is_absolute()}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
