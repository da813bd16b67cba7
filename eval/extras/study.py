"""`cramming study vocab|data|architectures|schedules|batch|masking|pipelines`: which variant is best in one budget.

The cramming paper's figures of architectures, schedules, batch sizes, masking and vocabularies, and its table of data
sets (Geiping and Goldstein 2022, section 4), at any size and budget. Each variant and seed is a run of its own,
`<name>-<variant>-<seed>`, made by the verbs prepare, pretrain and glue in processes of their own. The same command
again continues an interrupted study; a run of its names that was made with other settings ends it before any training
(eval/extras/earlier_runs.py). `study.md` has the table, `study.svg` the runs' losses. Validation losses compare
runs over one tokenizer and one text only: where they differ (`vocab`, `data`), scores compare variants. `pipelines` is
no study of runs but of update rules (cramming/experimental/pipeline_study.py).
"""

import math
import re
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from cramming.children import run_process
from cramming.config import UserError, config_folder, folder_name, require
from cramming.data.manifest import MANIFEST, corpus_folder
from cramming.data.task_files import ENTRIES
from cramming.files import write_atomically
from cramming.invocation import Invocation, whole_numbers
from cramming.overrides import compose
from cramming.progress import say, show_table
from cramming.record import WITHOUT_MODEL, is_run
from cramming.verbs import OPTIONS
from eval import plots
from eval.extras.earlier_runs import refuse_other
from eval.report.table import columns_of, trained_row
from eval.rules.load import Run, load_run

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
class Study:
    """A study: `variants` has the overrides of each; runs are named `<name>-<variant>-<seed>`.

    `invocation`: with the recipe that all runs share. `fine_tunes`: runs are scored as well.
    """

    what: str
    variants: Mapping[str, Sequence[str]]
    seeds: Sequence[int]
    invocation: Invocation
    fine_tunes: bool

    def runs_of(self, variant: str) -> list[Invocation]:
        """Return the call of each seed's run; UserError names the variant whose overrides are wrong."""
        shared = self.invocation
        overrides = (*shared.overrides, *self.changes_of(variant))
        runs = []
        for seed in self.seeds:
            name = f"{shared.name}-{variant}-{seed}"
            runs.append(replace(shared, name=name, overrides=(*overrides, f"seed={seed}")))
        return runs

    def composed(self, variant: str, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the recipe of a variant; a UserError names it."""
        try:
            return compose(overrides)
        except UserError as error:
            raise UserError(f"study {self.what}, variant {variant}: {error}") from None

    def changes_of(self, variant: str) -> list[str]:
        """Return the variant's overrides; multiples are of what it has without them, its own values included."""
        changes = self.variants[variant]
        multiples = [word for word in changes if MULTIPLE.fullmatch(word)]
        plain = [word for word in changes if word not in multiples]
        if not multiples:
            return plain
        recipe = self.composed(variant, [*self.invocation.overrides, *plain])
        for word in multiples:
            product = multiplied(word, recipe)
            if product is not None:
                plain.append(product)
        return plain


def variants_of(what: str, vocab_sizes: str) -> dict[str, list[str]]:
    """Return the variants of a study: of conf/study, of a YAML file of the user's, or vocabularies of these sizes."""
    if what == "vocab":
        sizes = whole_numbers("--vocab-sizes", vocab_sizes)
        return {f"vocab{size}": [f"tokenizer.vocab_size={size}"] for size in sizes}
    known = sorted(file.stem for file in (config_folder() / "study").glob("*.yaml"))
    file = Path(what) if Path(what).suffix else config_folder() / "study" / f"{what}.yaml"
    names = ", ".join(sorted([*known, "vocab", "pipelines"]))
    require(
        file.is_file(), f"study {what}: no such study. Choose one of {names}, or give a YAML file."
    )
    table = yaml.safe_load(file.read_text(encoding="utf-8"))
    require(
        isinstance(table, dict)
        and table
        and all(isinstance(each, list) for each in table.values()),
        f"{file}: not a table of variants. Write `name: [overrides]` lines.",
    )
    variants = {str(name): list(map(str, changes)) for name, changes in table.items()}
    for name, changes in variants.items():
        folder_name(name, f"study {what}, variant", "runs")
        seeds = [word for word in changes if word.lstrip("+").startswith("seed=")]
        require(
            not seeds, f"study {what}, variant {name}: {' '.join(seeds)} is an option, --seeds."
        )
    return variants


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


def main(
    recipe: dict[str, Any],
    invocation: Invocation,
    *,
    what: str,
    seeds: str,
    vocab_sizes: str,
    stages: int,
    glue: bool | None,
    out: Path | None,
) -> None:
    """Run the verb `study`: checks of all verbs first, then run after run; the table is written after each."""
    for word in invocation.overrides:
        require(
            not word.lstrip("+").startswith("seed="),
            f"{word}: each run has a seed of its own. Give --seeds {word.partition('=')[2]}.",
        )
    numbers = whole_numbers("--seeds", seeds)
    title = Path(what).stem
    out = out or invocation.runs / f"{invocation.name}-{title}-study"
    if what == "pipelines":
        from cramming.parallel.mesh import load_experiment

        if not (corpus_folder(recipe, invocation.corpora) / MANIFEST).is_file():
            _verb("prepare", invocation)
        pipeline_study = load_experiment("pipeline_study")  # trains in this process, with torch
        pipeline_study.main(recipe, invocation, stages, numbers, out, draw_losses)
        return
    fine_tunes = what in ("vocab", "data") if glue is None else glue  # losses of several texts
    study = Study(title, variants_of(what, vocab_sizes), numbers, invocation, fine_tunes)
    calls = {variant: study.runs_of(variant) for variant in study.variants}
    check(study, calls)
    made: dict[str, list[Run]] = {}
    for place in range(len(numbers)):  # all variants of a seed first: an early stop compares them
        for variant, runs in calls.items():
            _run(runs[place], fine_tunes)
            made.setdefault(variant, []).append(load_run(runs[place].run_folder))
            rows = write(out, title, made)
    show_table(f"study {title}", HEADER, rows)
    say(f"{out / 'study.md'}: {len(study.variants)} variants with {len(numbers)} seeds")


def check(study: Study, calls: Mapping[str, Sequence[Invocation]]) -> None:
    """Raise UserError for what a verb would refuse in any run of a study, before the first one trains."""
    for variant, runs in calls.items():
        composed = study.composed(variant, runs[0].overrides)
        folders = {seed: run.run_folder for seed, run in zip(study.seeds, runs, strict=True)}
        corpus = corpus_folder(composed, study.invocation.corpora)
        refuse_other(folders, composed, corpus, study.fine_tunes)
    for runs in calls.values():
        lacking: dict[str, Invocation] = {}
        for run in runs:
            lacking |= dict.fromkeys(_missing(run.run_folder, study.fine_tunes), run)
        for verb in sorted(lacking):
            _verb(verb, lacking[verb], "--check")


def draw_losses(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """Return an SVG of the losses under their names, or None where there are none."""
    curves = [plots.Curve(name, curve_rows) for name, curve_rows in rows.items()]
    figure = plots.training(curves, "training loss")
    return plots.svg(figure, "study") if figure else None


def _missing(folder: Path, glue: bool) -> list[str]:
    """Return the verbs that a run still needs. One without a model has no score, and needs none.

    Whether all is scored only `glue` itself knows: it keeps what it has and does the rest.
    """
    status = load_run(folder).record.training.status
    if status in WITHOUT_MODEL:
        return []
    training = [] if status == "finished" else ["prepare", "pretrain"]
    return [*training, "glue"] if glue else training


def _run(call: Invocation, glue: bool) -> None:
    """Do what is still missing of one run. One that leaves no model has no score, and the study goes on."""
    folder = call.run_folder
    for verb in _missing(folder, glue):
        if verb not in _missing(folder, glue):
            return
        _verb(verb, replace(call, resume=is_run(folder)), may_end_without_model=True)


def _verb(verb: str, call: Invocation, *flags: str, may_end_without_model: bool = False) -> None:
    """Run a verb as a process; raise UserError if it fails, except for a permitted end without a model."""
    words = [verb, *flags, *call.arguments(*OPTIONS[verb])]
    say(f"cramming {shlex.join(words)}")
    code = run_process([sys.executable, "-m", "cramming", *words])
    if code == 0:
        return
    if may_end_without_model and load_run(call.run_folder).record.training.status in WITHOUT_MODEL:
        return
    raise UserError(
        f"study: `cramming {verb}` ended with code {code}. The same command continues the study."
    )


def row_of(variant: str, runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Return a line of the table, and the titles of the entries that all runs of a variant have.

    The score of the variant is the mean over these entries. A subset of the tasks (`eval.tasks`) is enough to compare
    variants. Means are over the runs that have a model.
    """
    ended = _with_model(runs)
    scores = [_scores(run) for run in ended if run.record.trained is not None]
    common = _common_entries(scores)
    means = []
    if common:
        means = [statistics.fmean(each[entry] for entry in common) for each in scores]
    losses = [run.record.training.validation.loss for run in ended]
    tokens = [run.record.training.tokens for run in ended]
    sizes = [run.record.corpus.vocab_size for run in runs]
    stds = [statistics.stdev(means)] if len(means) > 1 else []
    cells = [
        _cell(_numbers(sizes)[:1], 0),
        _cell(means, 1),
        _cell(stds, 2),
        _cell(_numbers(losses), 3),
    ]
    statuses = [str(run.record.training.status) for run in runs]
    failures = Counter(status for status in statuses if status in WITHOUT_MODEL)
    why = ", ".join(f"{count} {status}" for status, count in sorted(failures.items()))
    seeds = f"{len(runs)} ({why})" if why else str(len(runs))
    titles = [ENTRIES[entry][1].title for entry in common]
    return [variant, seeds, *cells, _cell(_numbers(tokens), 0)], titles


def _common_entries(scores: Sequence[Mapping[str, float]]) -> list[str]:
    if not scores:
        return []
    return [entry for entry in scores[0] if all(entry in each for each in scores)]


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _with_model(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.record.training.status not in WITHOUT_MODEL]


def _scores(run: Run) -> dict[str, float]:
    """Return the available scores, in percent, of the entries of the suite's averages."""
    row = trained_row(run)
    scores = {entry: row.score(entry) for entry in columns_of(row.suite)} if row else {}
    return {entry: value for entry, value in scores.items() if value is not None}


def _cell(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):,.{digits}f}" if values else "–"


def write(out: Path, what: str, runs: dict[str, list[Run]]) -> list[list[str]]:
    """Write `study.md`, a table of the runs by variant, and `study.svg`, their losses; return the table's rows."""
    rows, entries = zip(*(row_of(variant, of_variant) for variant, of_variant in runs.items()))
    every = list(chain.from_iterable(runs.values()))
    texts = {_validated_on(run) for run in _with_model(every)}
    compare = len(texts) == 1 and None not in texts
    lines = [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER), *rows)]
    scored = "; or ".join(sorted({", ".join(titles) for titles in entries if titles})) or "nothing"
    losses = "are all on one text" if compare else "of different rows are not comparable"
    notes = [f"Scores are means in percent of: {scored}. Validation losses {losses}."]
    curves = []
    for variant, of_variant in runs.items():
        curves += [plots.Curve(variant, run.metrics) for run in of_variant]
    drawing = plots.training(curves, "training loss")
    if drawing:
        write_atomically(out / "study.svg", plots.svg(drawing, "study"))
        notes += [
            "",
            "![losses](study.svg)",
            "",
            "Lines are training losses by the objective of the run, one for each seed. Circles are validation losses.",
        ]
    write_atomically(out / "study.md", "\n".join([f"# Study: {what}", "", *lines, "", *notes, ""]))
    return list(rows)


def _validated_on(run: Run) -> tuple[str | None, ...] | None:
    """Return a key that comparable validation losses share: text, tokenizer and targets; None if unknown."""
    corpus = run.record.corpus
    text = corpus.validation.manifest_sha256 if corpus.validation.folder else corpus.manifest_sha256
    if not text:
        return None
    return text, corpus.tokenizer.sha256, str(run.record.training.validation.targets)
