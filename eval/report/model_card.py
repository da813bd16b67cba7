"""The model card: README.md of an exported folder, as the Hugging Face hub reads it.

A YAML header for the hub's search, then what a stranger needs before using the weights: how to load them, what they
score, what was spent, on which text, by which recipe, what the rules say, and what the model is not for. All of it
comes from the run's record; a model that came without one says so. Paths of the machine are left out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cramming import __version__
from cramming.data.task_files import ENTRIES
from cramming.record import RULES_VERSION
from eval.report import summary
from eval.report.leaderboard import budget_words, compact
from eval.report.render import Block, Cell, Group, Heading, Paragraph, Table, markdown
from eval.report.standings import entrants
from eval.rules.reading import Record, Run, at, entries, number, sections
from eval.rules.table import Verdict, judge

RECIPE = ("model", "objective", "optim", "schedule", "start", "precision", "attention", "train", "memory", "runtime")


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
    record: Record = run.record if run else {}
    verdict = judge(record) if run else None
    parts = [f"---\n{_header(model, record)}\n---\n", markdown(_opening(model, record)), _loading(model)]
    if run and verdict:
        parts.append(markdown(_results(run, verdict)))
        parts.append(markdown([*_corpus(record), *_recipe(record)]))
    parts.append(markdown(_limits(model, record)))
    text = "\n".join(parts)
    for path, name in _paths(run).items():
        text = text.replace(path, name)
    return text


def _header(model: Exported, record: Record) -> str:
    from huggingface_hub import ModelCardData

    named = [str(at(source, "dataset")) for source in entries(at(record, "corpus.sources"))]
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

    section = at(record, "glue.pretrained") or {}
    found = []
    for name, task in (at(section, "tasks") or {}).items() if at(section, "suite") == "glue" else ():
        score = number(task, "score")
        if name not in ENTRIES or score is None or at(task, "subset"):
            continue
        source = ENTRIES[name][1]
        found.append(
            EvalResult(
                task_type="text-classification",
                dataset_type="nyu-mll/glue",
                dataset_name=f"GLUE {source.title}",
                dataset_config=source.hub_config,
                dataset_split=source.hub_split,
                metric_type=str(at(task, "main_metric")),
                metric_value=round(score, 2),
            )
        )
    return found


def _opening(model: Exported, record: Record) -> list[Block]:
    how = f" within {budget}" if (budget := budget_words(record)) else ""
    words = f"A masked language model of {compact(model.parameters)} parameters (architecture: {model.family})"
    words += f", pretrained{how} with cramming {at(record, 'suite_version') or __version__}."
    blocks: list[Block] = [Heading(model.name, 1), Paragraph(words)]
    if not record:
        blocks.append(Paragraph("No record of its training lies beside it: budget, corpus and scores are not known."))
    return blocks


def _loading(model: Exported) -> str:
    folder = f'folder = "{model.name}"  # this folder, or its name on the hub'
    code, before = (", trust_remote_code=True", _OWN_CODE) if model.remote_code else ("", _STOCK)
    return f"""## How to load it

{before}

```python
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline

{folder}
fill = pipeline("fill-mask", model=folder{code})
classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3{code})
encoder = AutoModel.from_pretrained(folder{code})
tokenizer = AutoTokenizer.from_pretrained(folder{code})
```

Heads for masked language modelling, sequence and token classification and question answering load the same way; all but
the first start untrained.
"""


_STOCK = "transformers has this architecture: nothing but torch and transformers is needed."
_OWN_CODE = (
    "transformers lacks this architecture: `modeling_cramming.py` in this folder computes it, and needs nothing but\n"
    "torch and transformers. Read it before you allow it to run with `trust_remote_code=True`."
)


def _results(run: Run, verdict: Verdict) -> list[Block]:
    """The run's own page under a heading of the card's, led by the verdict."""
    rows = [row for row in entrants([run]) if row.run is run]
    _, *page = summary.blocks(run, verdict, rows, [], [], 2)
    broken = f" Broken: {', '.join(finding.rule for finding in verdict.broken)}." if verdict.broken else ""
    divisions = {"closed": "the closed division", "open": "the open division", "invalid": "no division, it is invalid"}
    words = f"By the rules, version {RULES_VERSION}, this run belongs to {divisions[verdict.division]}.{broken}"
    return [Heading("Scores, budget and rules"), Paragraph(words), *page]


def _corpus(record: Record) -> list[Block]:
    """Fingerprint and licence of the text, source by source, and what was removed from it."""
    blocks: list[Block] = [Heading("Corpus")]
    facts = {
        "SHA-256 of its manifest": at(record, "corpus.manifest_sha256"),
        "Tokens": compact(number(record, "corpus.tokens") or 0.0),
        "Documents": compact(number(record, "corpus.documents") or 0.0),
        "Tokenizer": at(record, "corpus.tokenizer.kind"),
        "SHA-256 of the tokenizer": at(record, "corpus.tokenizer.sha256"),
        "Documents removed": _pairs(at(record, "corpus.removed") or {}) or "none",
    }
    blocks.append(_table(["", ""], [[name, str(value)] for name, value in facts.items() if value]))
    sources = entries(at(record, "corpus.sources"))
    rows = [[str(at(s, "name")), str(at(s, "license") or "not given"), str(at(s, "sha256") or "")] for s in sources]
    most = 20
    blocks.append(_table(["Source", "Licence", "SHA-256"], rows[:most]))
    return [*blocks, Paragraph(f"And {len(rows) - most} more sources.")] if len(rows) > most else blocks


def _recipe(record: Record) -> list[Block]:
    rows = [[name, _pairs(at(record, f"config.{name}") or {})] for name in RECIPE if at(record, f"config.{name}")]
    chosen = {
        "vocab_size": at(record, "corpus.vocab_size"),
        "precision": at(record, "pretrain.precision"),
        "attention": at(record, "pretrain.attention_kernels"),
        "peak learning rate": at(record, "pretrain.peak_learning_rate"),
        "seed": at(record, "pretrain.seed"),
    }
    rows.append(["in force", _pairs({name: value for name, value in chosen.items() if value is not None})])
    commit = at(record, "environment.git.commit")
    source = f"cramming {at(record, 'suite_version')}" + (f", commit {commit}" if commit else "")
    return [Heading("Recipe"), _table(["Section", "Settings"], rows), Paragraph(f"Made with {source}.")]


def _limits(model: Exported, record: Record) -> list[Block]:
    tokens, kinds = number(record, "pretrain.tokens"), [at(s, "kind") for s in entries(at(record, "corpus.sources"))]
    lines = [
        f"Sequences of at most {model.max_length} tokens"
        + (f"; trained on {length:.0f}." if (length := number(record, "config.train.sequence_length")) else "."),
        f"Trained on {compact(tokens)} tokens, what the budget allowed: a result of a benchmark, not a product. It"
        " repeats what its corpus says, false or harmful as that may be."
        if tokens
        else "Nothing is known of the text it was trained on, nor of what it repeats.",
    ]
    if at(record, "glue"):
        lines.append("Scores are those of development sets.")
    if "embedded" in kinds:
        lines.append("The corpus is generated from a grammar: outside of it, the model knows no language.")
    if model.token_types > 1 and at(record, "config.objective.segments") is not True:
        lines.append("Only the first token type was trained; the others are as at the start.")
    if model.remote_code:
        lines.append("Attention weights cannot be asked for: attention is one fused operation.")
    if model.license is None:
        lines.append("No licence for the weights is given here; those of the text are named under Corpus.")
    head: list[Block] = [Heading("Limits"), *(Paragraph(f"- {line}") for line in lines)]
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


def _paths(run: Run | None) -> dict[str, str]:
    """Paths on the machine that trained, and what the card calls them; the longest first."""
    record: Record = run.record if run else {}
    sources = [
        at(s, "folder") or (None if at(s, "kind") == "hub" or at(s, "dataset") else at(s, "name"))
        for s in entries(at(record, "corpus.sources"))
    ]
    scored = [section.get("model") for section in sections(record).values()]
    found = {path: Path(path).name for path in [*sources, at(record, "corpus.folder")] if path and "/" in str(path)}
    found |= {path: "/".join(Path(path).parts[-2:]) for path in scored if path and Path(path).is_absolute()}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
