"""`cramming score --model A --model B tasks.yaml`: comparison of encoders on user-defined tasks.

Every model is fine-tuned on every task with the hyperparameters and seeds of section `eval`, and so are random weights
of its architecture; baselines have no encoder. Predictions are stored in `<out>/predictions` by a key of everything
that they depend on, so an interrupted call resumes, and an added model needs only its fine-tunings.
"""

import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cramming.config import UserError, build, require, settings_hash, shown, suggestion
from cramming.data.suites import SUITE_OF
from cramming.data.task_files import Task
from cramming.device import describe, select
from cramming.environment import environment
from cramming.files import lock, overwrite_atomically
from cramming.invocation import Invocation
from cramming.precision import resolve
from cramming.progress import Progress, say
from eval.finetune.config import EvalConfig, Init
from eval.finetune.encode import (
    EncodedTask,
    encode_task,
    encode_words,
    load_encoder,
    load_word_encoder,
)
from eval.finetune.loop import TaskRun
from eval.finetune.models import ModelSource, open_model, refuse_changed
from eval.finetune.run_models import open_checkpoint
from eval.finetune.scoring import conditions, fine_tune, refuse_pair_without_types
from eval.own_tasks.baselines import BASELINES
from eval.own_tasks.compare import compare
from eval.own_tasks.page import Result, show, write
from eval.own_tasks.readers import OwnTaskData, glue_task, read_own_task
from eval.own_tasks.task_file import OwnTask, read_task_file
from eval.tasks.datasets import TaskData, seen_in_training
from eval.tasks.locate import find_suite

# settings of section `eval` for GLUE's test sets and run logs, and the only value that they have here
GLUE_SETTINGS = {"minimal_pairs": None, "sweep": False, "predict_test": False}
# those that say where the files of GLUE's tasks are, and their values without such a task
GLUE_PLACES = {"source": "local", "data_dir": None}
Sets = dict[str, np.ndarray]  # predictions by labelled set


@dataclass(frozen=True)
class Scoring:
    """Inputs that all fine-tunings of a call share."""

    tasks: list[OwnTaskData]
    settings: EvalConfig
    device: torch.device
    folder: Path
    machine: dict[str, Any]

    @property
    def protocol(self) -> dict[str, Any]:
        """Number format and threads of a fine-tuning."""
        precision = resolve(self.settings.precision, self.device)
        return {"precision": precision, "threads_per_run": self.settings.threads}


def main(
    recipe: dict[str, Any],
    invocation: Invocation,
    tasks_file: Path,
    model: list[str],
    out: Path | None,
    checkpoint: float | None = None,
) -> None:
    """Score models on the tasks of a file, print the table and write `scores.json` and `scores.md`.

    `checkpoint`: share of the budget of runs, whose kept checkpoints are scored instead of the final models.
    """
    settings = build(EvalConfig, recipe["eval"], "eval")
    _refuse_settings(settings)
    device = select(invocation.device)
    folder = out or Path("scores") / tasks_file.stem
    require(not folder.is_file(), f"--out={folder}: is a file. Give a folder.")
    tasks = read_tasks(tasks_file, settings)
    machine = environment(asdict(describe(device)))
    with ExitStack() as stack:
        models = open_models(model, settings.hyperparameters.max_length, checkpoint, stack)
        stack.enter_context(lock(folder, "scoring into this folder"))
        scoring = Scoring(tasks, settings, device, folder, machine)
        results = _score_all(scoring, models)
        show(results)
        write(folder, results, _describe(scoring, tasks_file, models))


def check(
    recipe: Mapping[str, Any], invocation: Invocation, tasks_file: Path, model: list[str]
) -> list[str]:
    """Return a line with the tasks; UserError for what `main` would refuse of settings, data or models."""
    settings = build(EvalConfig, recipe["eval"], "eval")
    _refuse_settings(settings)
    select(invocation.device)
    tasks = read_tasks(tasks_file, settings)
    open_models(model, settings.hyperparameters.max_length, None, ExitStack())
    return [f"tasks: {', '.join(data.name for data in tasks)} of {tasks_file}"]


def _refuse_settings(settings: EvalConfig) -> None:
    for name, default in GLUE_SETTINGS.items():
        value = getattr(settings, name)
        require(
            value == default,
            f"eval.{name}={shown(value)}: not for own tasks."
            f" Set eval.{name}={shown(default)}, or use `cramming glue`.",
        )
    require(
        "pretrained" in settings.init,
        f"eval.init=[{', '.join(settings.init)}]: the pretrained weights are missing. Add pretrained.",
    )


def read_tasks(path: Path, settings: EvalConfig) -> list[OwnTaskData]:
    """Return the tasks of a file, or those of `eval.tasks`; raise UserError for an error in the file or the data."""
    tasks = read_task_file(path)
    has_glue = any(isinstance(task, Task) for task in tasks.values())
    for name, default in GLUE_PLACES.items():
        value = getattr(settings, name)
        require(
            has_glue or value == default,
            f"eval.{name}={shown(value)}: {path} has no task of GLUE. Set eval.{name}={shown(default)}.",
        )
    wanted = settings.tasks
    for name in wanted or ():
        require(name in tasks, f"eval.tasks={name}: not in {path}. {suggestion(name, tasks)}")
    names = [name for name in tasks if wanted is None or name in wanted]
    data = []
    with Progress("read", len(names), "tasks") as bar:
        for name in names:
            bar.note(name)
            data.append(_read(path, name, tasks[name], settings))
            bar.advance()
    return data


def _read(path: Path, name: str, task: OwnTask | Task, settings: EvalConfig) -> OwnTaskData:
    if isinstance(task, Task):
        return _read_glue(path, task, settings)
    try:
        return read_own_task(name, task)
    except UserError as error:
        problem = str(error)
        raise UserError(
            f"{path}: {problem}" if problem.startswith(f"{name}.") else problem
        ) from None


def _read_glue(path: Path, task: Task, settings: EvalConfig) -> OwnTaskData:
    """Return a task of GLUE from where `cramming glue` reads it."""
    source = settings.source
    require(
        SUITE_OF[source] == "glue",
        f"eval.source={source}: {path} has tasks of GLUE. Set local or hub.",
    )
    require(
        settings.data_dir or source == "hub",
        f"eval.data_dir=null: {path} has tasks of GLUE. Give the folder with CoLA/, SST-2/, ...,"
        " or set eval.source=hub.",
    )
    suite = find_suite(source, settings.data_dir, [task.name], corpus=Path())
    return glue_task(suite.read(task))


def open_models(
    names: Sequence[str], max_length: int, checkpoint: float | None, stack: ExitStack
) -> dict[str, ModelSource]:
    """Return the models by the user's name for them; raise UserError if a model cannot be scored.

    Models of checkpoints exist until `stack` is closed.
    """
    require(len(names) == len(set(names)), "--model: the same model twice. Give each once.")
    models = {}
    for name in names:
        final = Path(name) / "final"  # of a run folder
        if checkpoint is None:
            source = open_model(final if final.is_dir() else name)
        else:
            require(
                final.is_dir(),
                f"--checkpoint={checkpoint}: {name} is no folder of a finished run. Leave one of them out.",
            )
            source = stack.enter_context(open_checkpoint(Path(name), checkpoint))
        limit = source.max_length
        require(
            limit is None or max_length <= limit,
            f"eval.hyperparameters.max_length={max_length}: {name} has {limit} positions."
            f" Set it to {limit} or less.",
        )
        models[name] = source
    return models


def _score_all(scoring: Scoring, models: Mapping[str, ModelSource]) -> list[Result]:
    """Return the comparisons on every labelled set."""
    predictions: dict[str, dict[str, list[Sets]]] = {data.name: {} for data in scoring.tasks}
    for name, source in models.items():
        encoded = dict[str, EncodedTask]()
        for init in scoring.settings.init:
            competitor = name if init == "pretrained" else f"{name} ({init} init)"
            for task, per_seed in _fine_tune(scoring, source, init, encoded).items():
                predictions[task][competitor] = per_seed
    for data in scoring.tasks if scoring.settings.baselines else ():
        for baseline, predict in BASELINES.items():
            say(f"{data.name}: {baseline}")
            parts = [_by_set(part, predict(part)) for part in data.parts]
            predictions[data.name][baseline] = [_join(data, parts)]
    reference = next(iter(models))
    results = []
    for data in scoring.tasks:
        train = data.parts[0].train
        for name in data.sets:
            splits = data.splits(name)
            set_predictions: dict[str, list[np.ndarray]] = {}
            for competitor, per_seed in predictions[data.name].items():
                set_predictions[competitor] = [sets[name] for sets in per_seed]
            results.append(
                Result(
                    data.name,
                    name,
                    data.task.kind,
                    data.metric,
                    train_examples=len(train),
                    official_train_examples=train.source.examples,
                    examples=sum(len(split) for split in splits),
                    official_examples=sum(split.source.examples for split in splits),
                    seen_in_training=_count_seen(data, name),
                    reference=reference,
                    comparisons=compare(data, name, set_predictions, reference),
                )
            )
    return results


def _by_set(part: TaskData, predictions: Sequence[np.ndarray]) -> Sets:
    return {
        split.source.entry: values for split, values in zip(part.scored, predictions, strict=True)
    }


def _join(data: OwnTaskData, parts: Sequence[Sets]) -> Sets:
    """Return the predictions of all parts of a task as those of its labelled sets."""
    joined: Sets = {}
    for name in data.sets:
        joined[name] = np.concatenate([part[name] for part in parts])
    return joined


def _count_seen(data: OwnTaskData, name: str) -> int:
    """Return the number of examples of a labelled set that the model scored on them was trained on."""
    count = 0
    for part in data.parts:
        for split in part.scored:
            if split.source.entry == name:
                count += seen_in_training(part.train, split)
    return count


# Fine-tuning ----------------------------------------------------------------------------------------------------------


def _fine_tune(
    scoring: Scoring, source: ModelSource, init: Init, encoded: dict[str, EncodedTask]
) -> dict[str, list[Sets]]:
    """Fine-tune a model on tasks and seeds without stored predictions; return each seed's predictions by task."""
    settings = scoring.settings
    files: dict[tuple[str, int], Path] = {}
    parts: dict[str, TaskData] = {}
    for data in scoring.tasks:
        for part in data.parts:
            parts[part.task.name] = part
            for seed in settings.seeds:
                key = _key(scoring, part, source, init, seed)
                files[part.task.name, seed] = scoring.folder / "predictions" / f"{key}.npz"
    todo = [(name, seed) for (name, seed), file in files.items() if not file.is_file()]
    say(f"{source.label} ({init}): {len(todo)} fine-tunings, {len(files) - len(todo)} stored")
    names = dict.fromkeys(name for name, _ in todo)
    _encode([parts[name] for name in names], source, settings, encoded)
    runs = [
        TaskRun(
            parts[name].task,
            seed,
            init,
            encoded[name],
            source,
            settings.hyperparameters,
            scoring.protocol["precision"],
            str(scoring.device),
            settings.threads,
        )
        for name, seed in todo
    ]
    for run, predictions in fine_tune(runs, settings, scoring.device):
        _save(files[run.task.name, run.seed], predictions.scored)
        say(f"{run.task.name} seed {run.seed}: {predictions.seconds:.0f} s")
    by_task: dict[str, list[Sets]] = {data.name: [] for data in scoring.tasks}
    for data in scoring.tasks:
        for seed in settings.seeds:
            of_parts = [_load(files[part.task.name, seed]) for part in data.parts]
            by_task[data.name].append(_join(data, of_parts))
    return by_task


def _key(scoring: Scoring, part: TaskData, source: ModelSource, init: Init, seed: int) -> str:
    """Return a hash of everything that the predictions of one fine-tuning depend on."""
    data_key = conditions(part, source, init, scoring.protocol, scoring.machine)
    task = part.task
    task_settings = (task.kind, task.labels, task.balanced)
    return settings_hash(
        data_key, task_settings, scoring.settings.hyperparameters.model_dump(), seed
    )


def _save(file: Path, predictions: Sets) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **predictions)  # type: ignore[arg-type]
    overwrite_atomically(file, lambda temporary: temporary.write_bytes(buffer.getvalue()))


def _load(file: Path) -> Sets:
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def _encode(
    tasks: Sequence[TaskData],
    source: ModelSource,
    settings: EvalConfig,
    encoded: dict[str, EncodedTask],
) -> None:
    """Put the tasks into `encoded`, by name, encoded by the model's tokenizer."""
    missing = [data for data in tasks if data.task.name not in encoded]
    if not missing:
        return
    arguments = (
        source.folder,
        source.is_native,
        settings.hyperparameters.max_length,
        source.vocab_size,
    )
    examples = sum(map(len, chain.from_iterable(data.splits for data in missing)))
    with Progress("encode", examples, "examples") as bar:
        for data in missing:
            bar.note(data.task.name)
            if data.task.kind == "tokens":
                encoded_task = encode_words(data, load_word_encoder(*arguments), bar.advance)
            else:
                encoded_task = encode_task(data, load_encoder(*arguments), bar.advance)
            refuse_pair_without_types(source, data.task, encoded_task, settings.hyperparameters)
            encoded[data.task.name] = encoded_task
    refuse_changed(source.folder, source.settings)


def _describe(
    scoring: Scoring, tasks_file: Path, models: Mapping[str, ModelSource]
) -> dict[str, Any]:
    """Return the models, settings and environment of the scores."""
    settings = scoring.settings
    return {
        "tasks_file": str(tasks_file),
        "models": {
            name: {"model": source.label, "sha256": source.sha256}
            for name, source in models.items()
        },
        "seeds": list(settings.seeds),
        "hyperparameters": settings.hyperparameters.model_dump(),
        **scoring.protocol,
        "environment": scoring.machine,
    }
