"""`cramming study vocab|data|architectures|schedules|batch|masking|pipelines`: which variant is best in one budget.

The cramming paper's figures of architectures, schedules, batch sizes, masking and vocabularies, and its table of data
sets (Geiping and Goldstein 2022, section 4), at any size and budget. Each variant and seed is a separate run,
`<name>-<variant>-<seed>`, made by the verbs prepare, pretrain and glue in separate processes. The same command resumes
an interrupted study (eval/extras/earlier_runs.py). `study.md` has the table, `study.svg` the losses. If the variants
have different tokenizers or texts (`vocab`, `data`), validation losses do not compare them, and scores do. `pipelines`
studies update rules in place of runs (cramming/experimental/pipeline_study.py).
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
from eval.extras.earlier_runs import require_same_settings
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
    """Variants of a recipe, each with its overrides, and the seeds of their runs.

    `invocation` has the name of the study and the overrides that all runs share. `fine_tunes` is true if runs are also
    fine-tuned and scored.
    """

    what: str
    variants: Mapping[str, Sequence[str]]
    seeds: Sequence[int]
    invocation: Invocation
    fine_tunes: bool

    def runs_of(self, variant: str) -> list[Invocation]:
        """Return the invocation of each seed's run; raise UserError with the variant's name for wrong overrides."""
        shared = self.invocation
        overrides = (*shared.overrides, *self.changes_of(variant))
        runs = []
        for seed in self.seeds:
            name = f"{shared.name}-{variant}-{seed}"
            runs.append(replace(shared, name=name, overrides=(*overrides, f"seed={seed}")))
        return runs

    def composed(self, variant: str, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the recipe of a variant; raise UserError with its name for wrong overrides."""
        try:
            return compose(overrides)
        except UserError as error:
            raise UserError(f"study {self.what}, variant {variant}: {error}") from None

    def changes_of(self, variant: str) -> list[str]:
        """Return the variant's overrides, with values in place of multiples such as `optim.lr*=0.5`.

        A multiple is of the value that the variant has by all of its other overrides.
        """
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
    """Return the variants of the study `what`: `vocab`, a table of conf/study, or a YAML file of the user."""
    if what == "vocab":
        sizes = whole_numbers("--vocab-sizes", vocab_sizes)
        return {f"vocab{size}": [f"tokenizer.vocab_size={size}"] for size in sizes}
    known = sorted(file.stem for file in (config_folder() / "study").glob("*.yaml"))
    file = Path(what) if Path(what).suffix else config_folder() / "study" / f"{what}.yaml"
    names = ", ".join(sorted([*known, "vocab", "pipelines"]))
    require(
        file.is_file(), f"study {what}: no such study. Choose one of {names}, or give a YAML file."
    )
    table = _read_table(file)
    variants = {str(name): list(map(str, changes)) for name, changes in table.items()}
    for name, changes in variants.items():
        folder_name(name, f"study {what}, variant", "runs")
        seeds = [word for word in changes if word.lstrip("+").startswith("seed=")]
        require(
            not seeds, f"study {what}, variant {name}: {' '.join(seeds)} is an option, --seeds."
        )
    return variants


def _read_table(file: Path) -> Mapping[Any, list[Any]]:
    problem = f"{file}: not a table of variants. Write `name: [overrides]` lines."
    try:
        table = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(problem) from None
    require(isinstance(table, dict) and table, problem)
    require(all(isinstance(changes, list) for changes in table.values()), problem)
    return table


def multiplied(override: str, settings: Mapping[str, Any]) -> str | None:
    """Return an override such as `train.batch_size*=0.5` with the product of the set value and the factor.

    The product of a whole number is rounded. Returns None if a section on the way to the setting is null (it has no
    value then), and raises UserError if value or factor is not a number.
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
    """Run the verb `study`: check all runs, then make one after the other; the table is written after each run."""
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
    fine_tunes = what in (
        "vocab",
        "data",
    )  # their losses do not compare, because tokens or texts differ
    if glue is not None:
        fine_tunes = glue
    study = Study(title, variants_of(what, vocab_sizes), numbers, invocation, fine_tunes)
    calls = {variant: study.runs_of(variant) for variant in study.variants}
    check(study, calls)
    made: dict[str, list[Run]] = {}
    for index in range(len(numbers)):  # seed by seed, so that an interrupted study can be compared
        for variant, runs in calls.items():
            _run(runs[index], fine_tunes)
            made.setdefault(variant, []).append(load_run(runs[index].run_folder))
            rows = write(out, title, made)
    show_table(f"study {title}", HEADER, rows)
    say(f"{out / 'study.md'}: {len(study.variants)} variants with {len(numbers)} seeds")


def check(study: Study, calls: Mapping[str, Sequence[Invocation]]) -> None:
    """Raise UserError if an existing run has other settings, or if a verb would refuse any run of the study."""
    for variant, runs in calls.items():
        composed = study.composed(variant, runs[0].overrides)
        folders = {seed: run.run_folder for seed, run in zip(study.seeds, runs, strict=True)}
        corpus = corpus_folder(composed, study.invocation.corpora)
        require_same_settings(folders, composed, corpus, study.fine_tunes)
    for runs in calls.values():
        run_by_verb: dict[
            str, Invocation
        ] = {}  # one run that needs it: seeds do not decide a check
        for run in runs:
            run_by_verb |= dict.fromkeys(_missing(run.run_folder, study.fine_tunes), run)
        for verb in sorted(run_by_verb):
            _verb(verb, run_by_verb[verb], "--check")


def draw_losses(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """Return an SVG of the losses in metrics rows, by the name of their curve, or None if there are none."""
    curves = [plots.Curve(name, curve_rows) for name, curve_rows in rows.items()]
    figure = plots.training(curves, "training loss")
    return plots.svg(figure, "study") if figure else None


def _missing(folder: Path, glue: bool) -> list[str]:
    """Return the verbs that a run still needs; a run that ended without a model needs none.

    `glue` is always among them, because only the verb itself knows whether scores are missing.
    """
    status = load_run(folder).record.training.status
    if status in WITHOUT_MODEL:
        return []
    training = [] if status == "finished" else ["prepare", "pretrain"]
    return [*training, "glue"] if glue else training


def _run(call: Invocation, glue: bool) -> None:
    """Run the verbs that one run still needs; none after `pretrain` if that ends without a model."""
    folder = call.run_folder
    for verb in _missing(folder, glue):
        if verb not in _missing(folder, glue):  # training has ended without a model
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
    """Return a line of the table, and the titles of the scored entries that all runs of a variant have.

    The score of the variant is the mean over these entries, so that it also compares variants that are scored on a part
    of the tasks (`eval.tasks`). Means are over the runs that have a model.
    """
    with_model = _with_model(runs)
    scores = [_scores(run) for run in with_model if run.record.trained is not None]
    common = _common_entries(scores)
    means: list[float] = []
    if common:
        for by_entry in scores:
            means.append(statistics.fmean(by_entry[entry] for entry in common))
    losses = [run.record.training.validation.loss for run in with_model]
    tokens = [run.record.training.tokens for run in with_model]
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
    common = list(scores[0])
    for by_entry in scores:
        common = [entry for entry in common if entry in by_entry]
    return common


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
    validation_sets = {_validation_set(run) for run in _with_model(every)}
    losses_compare = len(validation_sets) == 1 and None not in validation_sets
    lines = [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER), *rows)]
    scored_sets = {", ".join(titles) for titles in entries if titles}
    scored = "; or ".join(sorted(scored_sets)) or "nothing"
    losses = "are all on one text" if losses_compare else "of different rows are not comparable"
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


def _validation_set(run: Run) -> tuple[str | None, ...] | None:
    """Return text, tokenizer and number of targets of a run's validation; None if the text is not known."""
    corpus = run.record.corpus
    text = corpus.validation.manifest_sha256 if corpus.validation.folder else corpus.manifest_sha256
    if not text:
        return None
    return text, corpus.tokenizer.sha256, str(run.record.training.validation.targets)
