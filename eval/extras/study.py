"""`cramming study vocab|data|architectures|schedules|batch|masking|pipelines`: which variant is best in one budget.

The cramming paper's figures of architectures, schedules, batch sizes, masking and vocabularies, and its table of data
sets (Geiping and Goldstein 2022, section 4), at any size and budget. Each variant and seed is a run of its own,
`<name>-<variant>-<seed>`, made by the verbs prepare, pretrain and glue in processes of their own. The same command
again continues an interrupted study; a run of its names that was made with other settings ends it before any training
(eval/extras/earlier_runs.py). `study.md` has the table, `study.svg` the runs' losses. Validation losses compare
runs over one tokenizer and one text only: where they differ (`vocab`, `data`), scores compare variants. `pipelines` is
no study of runs, but of update rules, and has a module of its own (eval/extras/pipelines.py).
"""

import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cramming.children import run_process
from cramming.config import Count, UserError, build, expand_home, folder_name, require
from cramming.data.manifest import MANIFEST, corpus_folder
from cramming.data.task_files import ENTRIES
from cramming.files import write_atomically
from cramming.overrides import CHECK, compose, given_overrides
from cramming.progress import say
from cramming.record import WITHOUT_MODEL, is_run
from eval import plots
from eval.extras.earlier_runs import refuse_other
from eval.report.table import columns_of, trained_row
from eval.rules.load import Run, load_run

OWN = ("study.", "name=", "seed=", "resume=")  # of the study, not of its runs
MULTIPLE = re.compile(r"([\w.]+)\*=(.*)")
HEADER = (
    "variant",
    "seeds",
    "vocabulary",
    "score",
    "std over seeds",
    "validation loss",
    "tokens seen",
)


@dataclass(frozen=True)
class StudyConfig:
    """Section `study`. `variants` has a table for each study: name of a variant -> overrides that it is run with."""

    what: str = "vocab"
    variants: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    vocab_sizes: list[int] = field(default_factory=list)
    stages: Count = 4
    seeds: list[int] = field(default_factory=lambda: [0])
    glue: bool | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        known = sorted({*self.variants, "vocab", "pipelines"})
        require(self.what in known, f"what={self.what!r}: choose one of {', '.join(known)}")
        require(self.seeds, "seeds=[]: nothing to run; name at least one")
        for name, values in {"seeds": self.seeds, "vocab_sizes": self.vocab_sizes}.items():
            require(len(values) == len(set(values)), f"{name}={values}: name each once")

    @property
    def fine_tunes(self) -> bool:
        """Whether runs are fine-tuned as well: unless it is set, where their losses are not on one text."""
        return self.what in ("vocab", "data") if self.glue is None else self.glue

    def overrides_of(self, shared: Sequence[str]) -> dict[str, list[str]]:
        """Each variant's name and overrides, for runs that all have those of `shared`; UserError for none."""
        found = {
            name: self._without_multiples(name, changes, shared)
            for name, changes in self._table.items()
        }
        require(found, f"study: nothing to run: {self.what} has no variants")
        for name, changes in found.items():
            folder_name(name, f"study.variants.{self.what}", "runs")
            forbidden = [one for one in changes if one.lstrip("+").startswith((*OWN, "runs="))]
            require(
                not forbidden,
                f"study.variants.{self.what}.{name}: {' '.join(forbidden)} is for the whole study, not for a variant",
            )
        return found

    @property
    def _table(self) -> dict[str, list[str]]:
        if self.what == "vocab":
            return {f"vocab{size}": [f"tokenizer.vocab_size={size}"] for size in self.vocab_sizes}
        return self.variants[self.what]

    def composed(self, variant: str, overrides: Sequence[str]) -> dict[str, Any]:
        """All settings of a variant; a UserError names it."""
        try:
            return compose(overrides)
        except UserError as error:
            raise UserError(f"study.variants.{self.what}.{variant}: {error}") from None

    def _without_multiples(
        self, variant: str, changes: Sequence[str], shared: Sequence[str]
    ) -> list[str]:
        """Multiples are of what the variant has without them, its own values included."""
        multiples = [one for one in changes if MULTIPLE.fullmatch(one)]
        plain = [one for one in changes if one not in multiples]
        settings = self.composed(variant, [*shared, *plain]) if multiples else {}
        return plain + [product for one in multiples if (product := multiplied(one, settings))]


def multiplied(override: str, settings: Mapping[str, Any]) -> str | None:
    """`train.batch_size*=0.5` with half of the batch that is set, rounded where that is a whole number.

    So a table of variants is right for any size. None for a setting of a section that is null; UserError where nothing
    can be multiplied.
    """
    name, _, times = override.partition("*=")
    value: Any = settings
    for key in name.split("."):
        if value is None:
            return None
        value = value.get(key, "nothing") if isinstance(value, Mapping) else "nothing"
    require(
        isinstance(value, int | float),
        f"study: {override}: {name}={value} is no number to multiply",
    )
    try:
        factor = float(times)
    except ValueError:
        factor = math.nan
    require(math.isfinite(factor), f"study: {override}: {times} is no number to multiply with")
    product = value * factor
    return f"{name}={round(product) if isinstance(value, int) else product}"


def main(settings: dict[str, Any]) -> None:
    """The verb `study`: checks of all verbs first, then run after run; the table is written after each."""
    config = build(StudyConfig, settings["study"], "study")
    runs = expand_home(settings["runs"], "runs")
    out = config.out or runs / f"{settings['name']}-{config.what}-study"
    shared = shared_overrides(given_overrides())
    if config.what == "pipelines":
        from eval.extras import pipelines  # it trains in this process, so it needs torch

        if not (corpus_folder(settings) / MANIFEST).is_file():
            _verb("prepare", shared)
        pipelines.main(settings, config.stages, config.seeds, out)
        return
    variants = config.overrides_of(shared)
    folders = {
        v: [runs / f"{settings['name']}-{v}-{seed}" for seed in config.seeds] for v in variants
    }
    for variant, changes in variants.items():
        composed = config.composed(variant, [*shared, *changes])
        refuse_other(dict(zip(config.seeds, folders[variant])), composed, config.fine_tunes)
    for variant, changes in variants.items():
        lacking = {
            verb: folder.name
            for folder in folders[variant]
            for verb in _missing(folder, config.fine_tunes)
        }
        for verb, name in sorted(lacking.items()):
            _verb(verb, [*shared, *changes, f"name={name}", CHECK])
    made: dict[str, list[Run]] = {variant: [] for variant in variants}
    for done, seed in enumerate(
        config.seeds
    ):  # all variants of one seed first: an early stop compares like with like
        for variant, changes in variants.items():
            _run(folders[variant][done], [*shared, *changes], seed, config.fine_tunes)
            made[variant].append(load_run(folders[variant][done]))
            write(out, config.what, {variant: found for variant, found in made.items() if found})
    say(f"{out / 'study.md'}: {len(variants)} variants with {len(config.seeds)} seeds")


def shared_overrides(given: Sequence[str]) -> list[str]:
    """Those of the single runs; UserError for what the study decides by itself."""
    for word in given:
        name, _, value = word.lstrip("+").partition("=")
        require(
            name != "seed",
            f"study: {word}: each run has a seed of study.seeds; give study.seeds=[{value}]",
        )
        require(
            name != "resume", f"study: {word}: the same command goes on by itself; leave it out"
        )
    return [word for word in given if not word.lstrip("+").startswith(OWN)]


def _missing(folder: Path, glue: bool) -> list[str]:
    """The verbs that a run still needs. One without a model has no score, and needs none.

    Whether all is scored only `glue` itself knows: it keeps what it has and does the rest.
    """
    status = load_run(folder).record.training.status
    if status in WITHOUT_MODEL:
        return []
    return ([] if status == "finished" else ["prepare", "pretrain"]) + ["glue"] * glue


def _run(folder: Path, overrides: list[str], seed: int, glue: bool) -> None:
    """Do what is still missing of one run. One that leaves no model has no score, and the study goes on."""
    for verb in _missing(folder, glue):
        if verb not in _missing(folder, glue):
            return
        resume = ["resume=true"] if verb == "pretrain" and is_run(folder) else []
        _verb(verb, [*overrides, f"name={folder.name}", f"seed={seed}", *resume], folder)


def _verb(verb: str, overrides: list[str], folder: Path | None = None) -> None:
    """Run a verb as a process; UserError when it fails, unless the run in `folder` has ended without a model."""
    say(f"cramming {verb} {' '.join(overrides)}")
    code = run_process([sys.executable, "-m", "cramming", verb, *overrides])
    if code and not (folder and load_run(folder).record.training.status in WITHOUT_MODEL):
        raise UserError(
            f"study: `cramming {verb}` ended with code {code}; the same command goes on from there"
        )


def row_of(variant: str, runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """A line of the table, and the titles of the entries that all of a variant's runs have: its score is their mean. A
    subset of the tasks (`eval.tasks`) is enough to compare variants. Means are over the runs that left a model."""
    ended = _with_model(runs)
    scores = [_scores(run) for run in ended if run.record.trained is not None]
    common = (
        [entry for entry in scores[0] if all(entry in found for found in scores)] if scores else []
    )
    means = (
        [statistics.fmean(found[entry] for entry in common) for found in scores] if common else []
    )
    losses = [loss for run in ended if (loss := run.record.training.validation.loss) is not None]
    tokens = [count for run in ended if (count := run.record.training.tokens) is not None]
    sizes = [size for run in runs if (size := run.record.corpus.vocab_size) is not None]
    std = statistics.stdev(means) if len(means) > 1 else None
    cells = [
        _cell(sizes[:1], 0),
        _cell(means, 1),
        _cell([std] if std is not None else [], 2),
        _cell(losses, 3),
    ]
    lost = Counter(
        status for run in runs if (status := run.record.training.status) in WITHOUT_MODEL
    )
    why = ", ".join(f"{count} {status}" for status, count in sorted(lost.items()))
    seeds = f"{len(runs)} ({why})" if why else str(len(runs))
    return [variant, seeds, *cells, _cell(tokens, 0)], [ENTRIES[entry][1].title for entry in common]


def _with_model(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.record.training.status not in WITHOUT_MODEL]


def _scores(run: Run) -> dict[str, float]:
    """The scores in percent of the entries that the suite's averages are made of, without missing ones."""
    row = trained_row(run)
    scores = {entry: row.score(entry) for entry in columns_of(row.suite)} if row else {}
    return {entry: value for entry, value in scores.items() if value is not None}


def _cell(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):,.{digits}f}" if values else "–"


def write(out: Path, what: str, runs: dict[str, list[Run]]) -> None:
    """`study.md`, a table of the runs by variant, and `study.svg`, their losses and learning rates."""
    rows, entries = zip(*(row_of(variant, found) for variant, found in runs.items()))
    every = [run for found in runs.values() for run in found]
    texts = {_validated_on(run) for run in _with_model(every)}
    compare = len(texts) == 1 and None not in texts
    lines = [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER), *rows)]
    scored = "; or ".join(sorted({", ".join(titles) for titles in entries if titles})) or "nothing"
    losses = "are all on one text" if compare else "of different rows are not comparable"
    notes = [f"Scores are means in percent of: {scored}. Validation losses {losses}."]
    curves = [plots.Curve(variant, run.metrics) for variant, found in runs.items() for run in found]
    if drawing := plots.training(curves, "training loss"):
        write_atomically(out / "study.svg", plots.svg(drawing, "study"))
        notes += [
            "",
            "![losses](study.svg)",
            "",
            "Lines are training losses, one for each seed, each of its own objective; circles are validation.",
        ]
    write_atomically(out / "study.md", "\n".join([f"# Study: {what}", "", *lines, "", *notes, ""]))


def _validated_on(run: Run) -> tuple[str | None, ...] | None:
    """What validation losses must have in common to compare; None where it is not known."""
    corpus = run.record.corpus
    text = corpus.validation.manifest_sha256 if corpus.validation.folder else corpus.manifest_sha256
    return (
        (text, corpus.tokenizer.sha256, str(run.record.training.validation.targets))
        if text
        else None
    )
