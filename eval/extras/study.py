"""`cramming study vocab|data`: which vocabulary, or which preparation of the text, gives the best model in one budget.

This is the cramming paper's figure 3 (vocabulary sizes) and its table of data sets (Geiping and Goldstein 2022, section
4.4), at any budget. Each variant and seed is a run of its own, `<name>-<variant>-<seed>`, made by the verbs prepare,
pretrain and glue in processes of their own. The same command again continues an interrupted study. Validation losses
compare runs over one tokenizer and one text only (`train.validation_corpus`); otherwise scores compare variants.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cramming.children import run_process
from cramming.config import UserError, build, expand_home, folder_name, require
from cramming.data.corpus import MANIFEST, Corpus, corpus_folder
from cramming.data.task_files import ENTRIES
from cramming.files import overwrite_atomically, write_atomically
from cramming.overrides import CHECK
from cramming.progress import say
from cramming.record_schema import Scores
from eval.report import plots
from eval.report.ranking import columns_of
from eval.rules.load import Run, load_run
from eval.tasks.suites import AVERAGES

DIGITS = (0, 1, 2, 3, 0)  # of the table's numbers


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


class Result(NamedTuple):
    """One variant over its finished seeds; None where nobody has measured. The score is the mean of `entries`.

    `vocabulary` is the number of entries that the tokenizer really has, `validated` how the validation loss came about
    where all runs were given a corpus for it: its folder, its manifest, and the settings that make the task.
    """

    variant: str
    seeds: int
    vocabulary: float | None
    entries: tuple[str, ...]
    score: float | None
    spread: float | None
    validation_loss: float | None
    validated: tuple[str, ...] | None
    tokens: float | None


def main(settings: dict[str, Any]) -> None:
    """The verb `study`."""
    config = build(StudyConfig, settings["study"], "study")
    runs = expand_home(settings["runs"], "runs")
    out = config.out or runs / f"{settings['name']}-{config.what}-study"
    shared = [o for o in _given_overrides() if not o.lstrip("+").startswith(("study.", "name=", "seed=", "resume="))]
    planned = {variant: [runs / f"{settings['name']}-{variant}-{seed}" for seed in config.seeds]
               for variant in config.variants}  # fmt: skip
    _check(config, settings, shared, planned)
    folders: dict[str, list[Path]] = {name: [] for name in config.variants}
    for turn, seed in enumerate(config.seeds):  # all variants of one seed first: an early stop compares like with like
        for variant, changes in config.variants.items():
            folder = planned[variant][turn]
            _run(folder, [*shared, *changes, f"name={folder.name}", f"seed={seed}"], config.glue)
            folders[variant].append(folder)
            write(out, config.what, [result(v, list(map(load_run, found))) for v, found in folders.items() if found])
    say(f"{out / 'study.md'}: {len(config.variants)} variants with {len(config.seeds)} seeds")


def _given_overrides() -> Sequence[str]:
    """What the user wrote behind the verb, for the verbs of the single runs."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def _check(
    config: StudyConfig, settings: Mapping[str, Any], shared: list[str], planned: Mapping[str, list[Path]]
) -> None:
    """UserError for a mistake in any verb of any variant, and for variants that would be the same: now, not later."""
    missing = {v: {verb for folder in found for verb in _missing(folder, config.glue)} for v, found in planned.items()}
    for variant, changes in config.variants.items():
        for verb in sorted(missing[variant]):
            _verb(verb, [*shared, *changes, CHECK])
    if config.what == "vocab":
        for variant, changes in config.variants.items():
            if "prepare" in missing[variant]:
                _verb("prepare", [*shared, *changes])
        refuse_equal_vocabularies(settings, config.vocab_sizes)


def refuse_equal_vocabularies(settings: Mapping[str, Any], sizes: Sequence[int]) -> None:
    """UserError where the prepared corpora of two sizes have one and the same tokenizer: the text offers no more."""
    seen: dict[str, int] = {}
    for size in sizes:
        folder = corpus_folder({**settings, "tokenizer": {**settings["tokenizer"], "vocab_size": size}})
        if not (folder / MANIFEST).is_file():  # of a finished run, since deleted
            continue
        info = Corpus.open(folder).manifest.tokenizer
        if info.sha256 in seen:
            raise UserError(
                f"study.vocab_sizes={list(sizes)}: {seen[info.sha256]} and {size} give the same tokenizer, of"
                f" {info.vocab_size} entries, which is all that the text supports; take smaller sizes or more text"
            )
        seen[info.sha256] = size


def _missing(folder: Path, glue: bool) -> list[str]:
    """The verbs that a run still needs. One that diverged has no score, and needs none.

    Whether all is scored only `glue` itself knows: it keeps what it has and does the rest.
    """
    status = _status(folder)
    verbs = [] if status in ("finished", "diverged") else ["prepare", "pretrain"]
    return [*verbs, "glue"] if glue and status != "diverged" else verbs


def _run(folder: Path, overrides: list[str], glue: bool) -> None:
    """Do what is still missing of one run. One that diverges has no score, and the study goes on."""
    for verb in _missing(folder, glue):
        if verb in _missing(folder, glue):  # still: it may have diverged
            resume = ["resume=true"] if verb == "pretrain" and (folder / "record.json").exists() else []
            _verb(verb, [*overrides, *resume], lambda: _status(folder) == "diverged")


def _status(folder: Path) -> Any:
    return load_run(folder).record.training.status


def _verb(verb: str, overrides: list[str], excused: Callable[[], bool] = lambda: False) -> None:
    """Run a verb as a process; UserError when it fails, unless `excused`."""
    say(f"cramming {verb} {' '.join(overrides)}")
    code = run_process([sys.executable, "-m", "cramming", verb, *overrides])
    if code and not excused():
        raise UserError(f"study: `cramming {verb}` ended with code {code}; the same command goes on from there")


def result(variant: str, runs: Sequence[Run]) -> Result:
    """Mean and standard deviation over a variant's runs. The score is the mean of the entries that all runs have: a
    subset of the tasks (`eval.tasks`) is enough to compare variants."""
    found = [run.record.trained for run in runs]
    values = [_scores(section) for section in found if section is not None]
    common = tuple(entry for entry in values[0] if all(entry in scores for scores in values)) if values else ()
    means = [statistics.fmean(scores[entry] for entry in common) for scores in values] if common else []
    losses = [loss for run in runs if (loss := run.record.training.validation.loss) is not None]
    tokens = [count for run in runs if (count := run.record.training.tokens) is not None]
    return Result(
        variant,
        len(runs),
        next((n for run in runs if (n := run.record.corpus.vocab_size) is not None), None),
        common,
        statistics.fmean(means) if means else None,
        statistics.stdev(means) if len(means) > 1 else None,
        statistics.fmean(losses) if losses else None,
        _common([_validated(run) for run in runs]),
        statistics.fmean(tokens) if tokens else None,
    )


def _scores(section: Scores) -> dict[str, float]:
    """The scores in percent of the entries that the suite's averages are made of, without missing ones."""
    if section.suite not in AVERAGES:
        return {}
    tasks = section.tasks
    scores = {entry: tasks[entry].score for entry in columns_of(section.suite) if entry in tasks}
    return {entry: value for entry, value in scores.items() if value is not None}


def write(out: Path, what: str, results: Sequence[Result]) -> None:
    """`study.md`, and `study.png` when there are scores."""
    rows = [
        [r.variant, str(r.seeds), *map(_cell, (r.vocabulary, r.score, r.spread, r.validation_loss, r.tokens), DIGITS)]
        for r in results
    ]
    common = _common([r.validated for r in results])
    text = common[0] if common else None
    loss = "validation loss" if text else "validation loss (own text)"
    header = ["variant", "seeds", "vocabulary", "score", "std over seeds", loss, "tokens seen"]
    lines = [f"# Study: {what}", "", *(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)), ""]
    entries = {", ".join(ENTRIES[entry][1].title for entry in r.entries) for r in results if r.entries}
    scored = "; or ".join(sorted(entries)) or "nothing"
    compared = f"are all on the text of {text}" if text else "of different rows are not comparable"
    lines += [f"Scores are means in percent of: {scored}. Validation losses {compared}.", ""]
    write_atomically(out / "study.md", "\n".join(lines))
    bars = [plots.Bar(r.variant, r.score, r.spread, "pretrained") for r in results if r.score is not None]
    if figure := plots.scores(bars, "average score (%)"):
        data = plots.png(figure)

        def save(path: Path) -> None:
            path.write_bytes(data)

        overwrite_atomically(out / "study.png", save)


def _validated(run: Run) -> tuple[str, ...] | None:
    """What validation losses must have in common to compare; None where the run was validated on its own text."""
    record, train = run.record, run.record.config.get("train")
    if (folder := record.corpus.validation.folder) is None:
        return None
    packed = [train.get("packing"), train.get("sequence_length")] if isinstance(train, Mapping) else []
    same = (record.corpus.validation.manifest_sha256, record.corpus.tokenizer.sha256, *packed)
    return (folder, *map(str, same), str(record.training.validation.targets))


def _common(values: Sequence[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """What they all are."""
    return values[0] if len(set(values)) == 1 else None


def _cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
