"""`cramming study vocab|data`: which vocabulary, or which preparation of the text, gives the best model in one budget.

This is the cramming paper's figure 3 (vocabulary sizes) and its table of data sets (Geiping and Goldstein 2022, section
4.4), at any budget. Each variant and seed is a run of its own, `<name>-<variant>-<seed>`, made by the verbs prepare,
pretrain and glue in processes of their own. The same command again continues an interrupted study. Validation losses
compare runs over one tokenizer and one text only (`train.validation_corpus`); otherwise scores compare variants.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cramming.children import run_process
from cramming.config import UserError, build, expand_home, folder_name, require
from cramming.data.task_files import ENTRIES
from cramming.files import write_atomically
from cramming.overrides import CHECK
from cramming.progress import say
from eval.report.ranking import columns_of
from eval.rules.load import Run, load_run
from eval.tasks.suites import AVERAGES

HEADER = ("variant", "seeds", "vocabulary", "score", "std over seeds", "validation loss", "tokens seen")


@dataclass(frozen=True)
class StudyConfig:
    """Section `study`. `data` maps a variant's name to the settings that it is run with."""

    what: Literal["vocab", "data"] = "vocab"
    vocab_sizes: list[int] = field(default_factory=list)
    data: dict[str, list[str]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    glue: bool = True
    out: Path | None = None

    def __post_init__(self) -> None:
        nothing = f"nothing to run: seeds={self.seeds}, variants={sorted(self.variants)}"
        require(self.seeds and self.variants, nothing)
        for name in self.variants:
            folder_name(name, self.what, "runs")

    @property
    def variants(self) -> dict[str, list[str]]:
        """Each variant's name and settings."""
        if self.what == "data":
            return self.data
        return {f"vocab{size}": [f"tokenizer.vocab_size={size}"] for size in self.vocab_sizes}


def main(settings: dict[str, Any]) -> None:
    """The verb `study`: checks of all verbs first, then run after run; the table is written after each."""
    config = build(StudyConfig, settings["study"], "study")
    runs = expand_home(settings["runs"], "runs")
    out = config.out or runs / f"{settings['name']}-{config.what}-study"
    shared = [o for o in _given_overrides() if not o.lstrip("+").startswith(("study.", "name=", "seed=", "resume="))]
    folders = {v: [runs / f"{settings['name']}-{v}-{seed}" for seed in config.seeds] for v in config.variants}
    for variant, changes in config.variants.items():
        for verb in sorted({verb for folder in folders[variant] for verb in _missing(folder, config.glue)}):
            _verb(verb, [*shared, *changes, CHECK])
    made: dict[str, list[Path]] = {variant: [] for variant in config.variants}
    for done, seed in enumerate(config.seeds):  # all variants of one seed first: an early stop compares like with like
        for variant, changes in config.variants.items():
            _run(folders[variant][done], [*shared, *changes], seed, config.glue)
            made[variant].append(folders[variant][done])
            write(out, config.what, {v: list(map(load_run, found)) for v, found in made.items() if found})
    say(f"{out / 'study.md'}: {len(config.variants)} variants with {len(config.seeds)} seeds")


def _given_overrides() -> Sequence[str]:
    """What the user wrote behind the verb, for the verbs of the single runs."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def _missing(folder: Path, glue: bool) -> list[str]:
    """The verbs that a run still needs. One that diverged has no score, and needs none.

    Whether all is scored only `glue` itself knows: it keeps what it has and does the rest.
    """
    status = load_run(folder).record.training.status
    verbs = [] if status in ("finished", "diverged") else ["prepare", "pretrain"]
    return [*verbs, "glue"] if glue and status != "diverged" else verbs


def _run(folder: Path, overrides: list[str], seed: int, glue: bool) -> None:
    """Do what is still missing of one run. One that diverges has no score, and the study goes on."""
    for verb in _missing(folder, glue):
        if verb not in _missing(folder, glue):  # it has diverged
            return
        resume = ["resume=true"] if verb == "pretrain" and (folder / "record.json").exists() else []
        _verb(verb, [*overrides, f"name={folder.name}", f"seed={seed}", *resume], folder)


def _verb(verb: str, overrides: list[str], folder: Path | None = None) -> None:
    """Run a verb as a process; UserError when it fails, unless the run in `folder` has diverged."""
    say(f"cramming {verb} {' '.join(overrides)}")
    code = run_process([sys.executable, "-m", "cramming", verb, *overrides])
    if code and not (folder and load_run(folder).record.training.status == "diverged"):
        raise UserError(f"study: `cramming {verb}` ended with code {code}; the same command goes on from there")


def row_of(variant: str, runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """A line of the table, and the titles of the entries that all of a variant's runs have: its score is their mean. A
    subset of the tasks (`eval.tasks`) is enough to compare variants."""
    scores = [_scores(run) for run in runs if run.record.trained is not None]
    common = [entry for entry in scores[0] if all(entry in found for found in scores)] if scores else []
    means = [statistics.fmean(found[entry] for entry in common) for found in scores] if common else []
    losses = [loss for run in runs if (loss := run.record.training.validation.loss) is not None]
    tokens = [count for run in runs if (count := run.record.training.tokens) is not None]
    sizes = [size for run in runs if (size := run.record.corpus.vocab_size) is not None]
    std = statistics.stdev(means) if len(means) > 1 else None
    cells = [_cell(sizes[:1], 0), _cell(means, 1), _cell([std] if std is not None else [], 2), _cell(losses, 3)]
    return [variant, str(len(runs)), *cells, _cell(tokens, 0)], [ENTRIES[entry][1].title for entry in common]


def _scores(run: Run) -> dict[str, float]:
    """The scores in percent of the entries that the suite's averages are made of, without missing ones."""
    section = run.record.trained
    if section is None or section.suite not in AVERAGES:
        return {}
    tasks = section.tasks
    scores = {entry: tasks[entry].score for entry in columns_of(section.suite) if entry in tasks}
    return {entry: value for entry, value in scores.items() if value is not None}


def _cell(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):,.{digits}f}" if values else "–"


def write(out: Path, what: str, runs: dict[str, list[Run]]) -> None:
    """`study.md` of the runs by variant."""
    rows, entries = zip(*(row_of(variant, found) for variant, found in runs.items()))
    texts = {_validated_on(run) for found in runs.values() for run in found}
    compare = len(texts) == 1 and None not in texts
    lines = [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER), *rows)]
    scored = "; or ".join(sorted({", ".join(titles) for titles in entries if titles})) or "nothing"
    losses = "are all on one text" if compare else "of different rows are not comparable"
    notes = f"Scores are means in percent of: {scored}. Validation losses {losses}."
    write_atomically(out / "study.md", "\n".join([f"# Study: {what}", "", *lines, "", notes, ""]))


def _validated_on(run: Run) -> tuple[str | None, ...] | None:
    """What validation losses must have in common to compare; None where the run was validated on its own text."""
    corpus = run.record.corpus
    if corpus.validation.folder is None:
        return None
    return corpus.validation.manifest_sha256, corpus.tokenizer.sha256, str(run.record.training.validation.targets)
