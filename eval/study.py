"""`cramming study vocab|data`: which vocabulary, or which preparation of the text, gives the best model in one budget.

This is the cramming paper's figure 3 (vocabulary sizes) and its table of data sets (Geiping and Goldstein 2022, section
4.4), at whatever budget the user sets. Each variant and seed is a run of its own, `<name>-<variant>-<seed>`, made by
the verbs prepare, pretrain and glue, each in a process of its own, so that every clock sees one training alone. An
interrupted study goes on where it was when the same command is given again. Table and plot are written after every run.

Validation losses compare runs over one tokenizer and one text only: another vocabulary makes another task of it, and
another preparation another validation text. The scores are what variants are compared by.
"""

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cramming.config import UserError, build, folder_name, overwrite_atomically, write_atomically
from cramming.progress import say
from eval import plots
from eval.reading import Run, at, load_run, number, sections
from eval.standings import entrants

STUDIES = ("vocab", "data")


@dataclass(frozen=True)
class StudyConfig:
    """Section `study`. `data` maps a variant's name to the settings that it is run with."""

    what: str = "vocab"
    vocab_sizes: list[int] = field(default_factory=list)
    data: dict[str, list[str]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    glue: bool = True
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.what not in STUDIES:
            raise ValueError(f"what={self.what}: choose one of {', '.join(STUDIES)}")
        if not self.seeds or not self.variants:
            raise ValueError(f"nothing to run: seeds={self.seeds}, variants={sorted(self.variants)}")
        for name in self.variants:
            folder_name(name, f"study.{self.what}", "runs")

    @property
    def variants(self) -> dict[str, list[str]]:
        """Each variant's name and settings."""
        if self.what == "data":
            return self.data
        return {f"vocab{size}": [f"tokenizer.vocab_size={size}"] for size in self.vocab_sizes}


class Result(NamedTuple):
    """One variant over its finished seeds; None where nobody has measured."""

    variant: str
    seeds: int
    score: float | None
    spread: float | None
    validation_loss: float | None
    tokens: float | None


def main(settings: dict[str, Any]) -> None:
    """The verb `study`."""
    config = build(StudyConfig, settings["study"], "study")
    runs = Path(settings["runs"]).expanduser()
    out = config.out or runs / f"{settings['name']}-{config.what}-study"
    shared = [o for o in _given_overrides() if not o.lstrip("+").startswith(("study.", "name=", "seed=", "resume="))]
    folders: dict[str, list[Path]] = {name: [] for name in config.variants}
    for seed in config.seeds:  # all variants of one seed first: an early stop still compares like with like
        for variant, changes in config.variants.items():
            name = f"{settings['name']}-{variant}-{seed}"
            _run(runs / name, [*shared, *changes, f"name={name}", f"seed={seed}"], config.glue)
            folders[variant].append(runs / name)
            write(out, config.what, [result(v, list(map(load_run, found))) for v, found in folders.items() if found])
    say(f"{out / 'study.md'}: {len(config.variants)} variants with {len(config.seeds)} seeds")


def _given_overrides() -> Sequence[str]:
    """What the user wrote behind the verb, for the verbs of the single runs."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def _run(folder: Path, overrides: list[str], glue: bool) -> None:
    """Do what is still missing of one run. One that diverges has no score, and the study goes on."""
    if _status(folder) not in ("finished", "diverged"):
        _verb("prepare", overrides)
        resume = ["resume=true"] if (folder / "record.json").exists() else []
        _verb("pretrain", [*overrides, *resume], lambda: _status(folder) == "diverged")
    if glue and _status(folder) == "finished" and not sections(load_run(folder).record):
        _verb("glue", overrides)


def _status(folder: Path) -> Any:
    return at(load_run(folder).record, "pretrain.status")


def _verb(verb: str, overrides: list[str], excused: Callable[[], bool] = lambda: False) -> None:
    """Run a verb as a process; UserError when it fails, unless `excused`."""
    say(f"cramming {verb} {' '.join(overrides)}")
    code = subprocess.run([sys.executable, "-m", "cramming", verb, *overrides], check=False).returncode
    if code and not excused():
        raise UserError(f"study: `cramming {verb}` ended with code {code}; the same command goes on from there")


def result(variant: str, runs: Sequence[Run]) -> Result:
    """Mean and standard deviation over a variant's runs."""
    scores = [row.main for row in entrants(runs) if row.init == "pretrained" and row.main is not None]
    losses = [loss for run in runs if (loss := number(run.record, "pretrain.validation.loss")) is not None]
    tokens = [count for run in runs if (count := number(run.record, "pretrain.tokens")) is not None]
    return Result(
        variant,
        len(runs),
        statistics.fmean(scores) if scores else None,
        statistics.stdev(scores) if len(scores) > 1 else None,
        statistics.fmean(losses) if losses else None,
        statistics.fmean(tokens) if tokens else None,
    )


def write(out: Path, what: str, results: Sequence[Result]) -> None:
    """`study.md`, and `study.png` when there are scores."""
    rows = [
        [r.variant, str(r.seeds), *map(_cell, (r.score, r.spread, r.validation_loss), (1, 2, 3)), _cell(r.tokens, 0)]
        for r in results
    ]
    header = ["variant", "seeds", "score", "std over seeds", "validation loss (own text)", "tokens seen"]
    lines = [f"# Study: {what}", "", *(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)), ""]
    lines += ["Scores are the suite's average in percent. Validation losses of different rows are not comparable.", ""]
    write_atomically(out / "study.md", "\n".join(lines))
    bars = [plots.Bar(r.variant, r.score, r.spread, "pretrained") for r in results if r.score is not None]
    if figure := plots.scores(bars, "average score (%)"):
        data = plots.png(figure)

        def save(path: Path) -> None:
            path.write_bytes(data)

        overwrite_atomically(out / "study.png", save)


def _cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
