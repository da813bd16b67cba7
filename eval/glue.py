"""The verb `cramming glue`: fine-tune a model on every task and seed, and add the scores to the run's record.

The model is `<runs>/<name>/final`, with `--checkpoint <share>` a kept checkpoint of that run, or any Hugging Face
encoder by `--model <folder or hub name>`. The tasks are GLUE's, from local official files (`eval.data_dir`) or the hub
(`eval=hub`), or those of the embedded corpus (`eval=embedded`). An interrupted scoring is resumed at the first (task,
seed) that has no result.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cramming import __version__
from cramming.budget import RULES_VERSION
from cramming.config import UserError, build, require, shown
from cramming.data.corpus import TASKS as TASK_FOLDER
from cramming.data.manifest import corpus_folder
from cramming.data.suites import SUITES
from cramming.device import describe, select
from cramming.environment import environment
from cramming.invocation import Invocation
from cramming.model.config import ModelConfig
from cramming.progress import Progress, say
from cramming.record import load_record, run_lock, write_record
from cramming.runlog import ExternalModel, LabelledSet
from eval.extras.minimal_pairs import Pairs, open_masked_lm, read_pairs, score_pairs
from eval.finetune.baselines import METHODS, score_baseline
from eval.finetune.config import EvalConfig
from eval.finetune.models import ModelSource, position_limit
from eval.finetune.run_models import find_model, nearest_checkpoint, open_checkpoint
from eval.finetune.scoring import ScoringJob, score_model
from eval.finetune.store import ScoreLog, describe_sets, now
from eval.tasks.datasets import TaskData, in_one_order
from eval.tasks.locate import TaskSuite, find_suite, find_tasks, tasks_in_folder


def main(
    recipe: dict[str, Any],
    invocation: Invocation,
    model: str | None = None,
    checkpoint: float | None = None,
) -> None:
    """Score a run (or `model`) according to section `eval`; raise UserError for missing or wrong inputs.

    `checkpoint`: share of the run's budget, to score a kept checkpoint instead of the final model.
    """
    settings = build(EvalConfig, recipe["eval"], "eval")
    if checkpoint is not None:
        settings = settings_of_checkpoint(settings, model)
    with ExitStack() as stack:
        source = find_model(invocation, model)
        if checkpoint is not None:
            source = stack.enter_context(open_checkpoint(invocation.run_folder, checkpoint))
        score_source(recipe, invocation, settings, source, model)


def settings_of_checkpoint(settings: EvalConfig, model: str | None) -> EvalConfig:
    """Return the settings that score the pretrained weights of a checkpoint alone; raise UserError for others."""
    require(model is None, f"--model={model}: --checkpoint is of a run. Leave one of them out.")
    refused = {
        "sweep": settings.sweep,
        "minimal_pairs": settings.minimal_pairs,
        "hyperparameters.freeze": settings.hyperparameters.freeze,
    }
    for name, value in refused.items():
        require(
            not value, f"eval.{name}={shown(value)}: not for a --checkpoint. Leave one of them out."
        )
    return settings.replace(init=("pretrained",), baselines=False)


def score_source(
    recipe: dict[str, Any],
    invocation: Invocation,
    settings: EvalConfig,
    source: ModelSource,
    model: str | None,
) -> None:
    """Score a model, and add the scores to the log of its run; `model` is its name if it was not pretrained here."""
    device = select(invocation.device)
    folder = invocation.run_folder
    refuse_length(settings, source.label, source.max_length)
    corpus = corpus_folder(recipe, invocation.corpora)
    suite = find_suite(settings.source, settings.data_dir, settings.tasks, corpus)
    data = read_tasks(suite, settings)
    pairs = read_pairs(settings.minimal_pairs) if settings.minimal_pairs else []
    with run_lock(folder), closing(ScoreLog(folder)) as log:
        if model:
            start_log(log, recipe, invocation.name, model, device)
        warn_of_other_corpus(folder, suite)
        sets: dict[str, LabelledSet] = {}
        for task_data in data:
            sets |= describe_sets(suite.name, task_data)
        job = ScoringJob(log, source, suite, data, sets, settings, device)
        try:
            if pairs:  # first, because it fails for models without a head
                score_minimal_pairs(job, pairs)
            for init in settings.init:
                with update_record(job):
                    show_averages(score_model(job, init))
            if settings.sweep:
                show_sweep(job)
            if settings.baselines:
                # last, because baselines replace those of another suite only after a model's scores
                for baseline in METHODS:
                    with update_record(job):
                        show_averages(score_baseline(job, baseline))
        finally:
            write_record(folder)


def read_tasks(suite: TaskSuite, settings: EvalConfig) -> list[TaskData]:
    """Return the tasks of a suite; test sets are set aside unless they are to be predicted."""
    tasks = []
    with Progress("read", total=len(suite.tasks), unit="tasks") as bar:  # the largest take seconds
        for task in suite.tasks:
            bar.note(task.title)
            data = in_one_order(suite.read(task))
            if not settings.predict_test:
                data = replace(data, blind=(), unasked=data.blind)
            tasks.append(data)
            bar.advance()
    return tasks


def start_log(
    log: ScoreLog, recipe: dict[str, Any], name: str, model: str, device: torch.device
) -> None:
    """Start the log of a model that was not pretrained here; raise UserError if the name belongs to another model."""
    first = log.first
    if first is None:
        machine = environment(asdict(describe(device)))
        log.append(
            ExternalModel(
                name=name,
                model=model,
                time=now(),
                suite_version=__version__,
                rules_version=RULES_VERSION,
                division=recipe["division"],
                recipe=recipe,
                environment=machine,
            )
        )
        return
    if not isinstance(first, ExternalModel):
        raise UserError(
            f"--name={name}: {log.folder} is a pretraining run. Give another name for --model."
        )
    require(
        Path(first.model).resolve() == Path(model).resolve(),
        f"--model={model}: {log.folder} has the scores of the model {first.model}. Give another --name.",
    )


def warn_of_other_corpus(folder: Path, suite: TaskSuite) -> None:
    """Warn if the embedded tasks are not those of the corpus that the run was trained on."""
    trained_on = load_record(folder).get("corpus", {}).get("manifest_sha256")
    if suite.corpus_sha256 and trained_on not in (None, suite.corpus_sha256):
        say(
            "warning: these tasks are of another corpus than the run was trained on: the open division (R19)"
        )


def score_minimal_pairs(job: ScoringJob, pairs: Sequence[Pairs]) -> None:
    """Log the accuracies on minimal pairs, unless the log has them already."""
    known = job.log.scores.minimal_pairs
    length = job.settings.hyperparameters.max_length
    scores = score_pairs(job.source, pairs, job.device, length, known)
    if scores is not known:
        job.log.append(scores)
    by_word = f", {scores.word_accuracy:.1f} by word"
    say(f"minimal pairs: {scores.accuracy:.1f}{by_word} over {len(pairs)} paradigms")


@contextmanager
def update_record(job: ScoringJob) -> Iterator[None]:
    """Write the record after a scoring, and name the dropped sections of another suite."""
    scores = job.log.scores
    before = list(scores.sections)
    yield
    dropped = [".".join(place) for place in before if place not in scores.sections]
    if dropped:
        say(
            f"the record holds one suite, now {job.suite.name}: dropped from it {', '.join(dropped)} of another"
        )
    write_record(job.log.folder)


def show_averages(section: Mapping[str, Any]) -> None:
    """Print the averages, or the entries that they lack."""
    for name, average in section["averages"].items():
        value, missing = average["value"], ", ".join(average["missing"])
        shown = f"not computed, missing {missing}" if value is None else f"{value:.2f}"
        say(f"{name} {section['init']}: {shown}")


def show_sweep(job: ScoringJob) -> None:
    """Print the number of compared points of a sweep, and the best one."""
    init = job.settings.init[0]
    section = job.log.scores.sections.get((job.suite.section, init), {})
    sweep = section.get("sweep")
    if sweep is None:
        say("sweep: no point has all its scores yet, nothing is chosen")
        return
    points = sweep["points"]
    varied = points[0]["hyperparameters"]
    best = {name: section["hyperparameters"][name] for name in varied}
    compared = f"{len(points)} points, best {best}" if varied else "1 point"
    say(f"sweep: {compared}: {sweep['mean']:.2f}")


def check(
    recipe: dict[str, Any],
    invocation: Invocation,
    model: str | None = None,
    checkpoint: float | None = None,
) -> list[str]:
    """Return the tasks and their sources; raise UserError for problems that are visible before training.

    The model is the existing one, or else the one that training will leave. Files of real tasks are read to the last
    line.
    """
    settings = build(EvalConfig, recipe["eval"], "eval")
    select(invocation.device)
    if checkpoint is not None:
        settings = settings_of_checkpoint(settings, model)
    if model or (invocation.run_folder / "final").is_dir():
        source = find_model(invocation, model)
        if checkpoint is not None:
            nearest_checkpoint(invocation.run_folder, checkpoint)
        refuse_length(settings, source.label, source.max_length)
        if settings.minimal_pairs:
            open_masked_lm(source, torch.device("cpu"))
    else:
        limit = position_limit(build(ModelConfig, recipe["model"], "model"))
        refuse_length(settings, f"{invocation.name}'s model", limit)
        has_head = recipe["objective"]["name"] != "rtd"
        require(
            has_head or not settings.minimal_pairs,
            f"eval.minimal_pairs={settings.minimal_pairs}: needs a masked language model, which objective=rtd does"
            " not leave. Set it to null.",
        )
    if settings.minimal_pairs:
        read_pairs(settings.minimal_pairs)
    times = f"{len(settings.seeds)} seed(s) from {' and '.join(settings.init)} weights"
    if settings.source == "embedded":
        named = find_tasks(settings.tasks or ())
        folder = corpus_folder(recipe, invocation.corpora) / TASK_FOLDER
        if folder.is_dir():
            named, _ = tasks_in_folder(folder, settings.tasks)
        titles = ", ".join(task.title for task in named) or "all"
        return [f"tasks: {titles} of the embedded corpus, in {folder}; {times}"]
    suite = find_suite(settings.source, settings.data_dir, settings.tasks, Path())
    for task in suite.tasks:
        suite.read(task)
    titles = ", ".join(task.title for task in suite.tasks)
    place = settings.data_dir or "the hub"
    return [f"tasks: {titles} of {SUITES[suite.name].title}, in {place}; {times}"]


def refuse_length(settings: EvalConfig, label: str, limit: int | None) -> None:
    """Raise UserError if sequences would be longer than the model has positions for."""
    length = settings.hyperparameters.max_length
    require(
        limit is None or length <= limit,
        f"eval.hyperparameters.max_length={length}: {label} has {limit} positions. Set it to {limit} or less.",
    )
