"""Run folders made without training: `write_run` appends the events that a run of the closed division has to a log.

The default run made 100 steps of 100 tokens in a minute, in two processes of which the first was killed, and is scored
on every task with three seeds. Everything else in the folder is what these events name by hash.
"""

import functools
import hashlib
import io
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cramming.budget import RULES_VERSION
from cramming.config import build, choose, settings_hash
from cramming.data.suites import SUITES, SuiteName
from cramming.data.task_files import ENTRIES, OFFICIAL_SHA256, Task
from cramming.model.config import ModelConfig, count_parameters, flops_per_token
from cramming.overrides import compose
from cramming.runlog import (
    RUN_EVENTS,
    RUN_LOG,
    Checkpoint,
    End,
    EndReason,
    Event,
    EventLog,
    Exported,
    ExternalModel,
    Finetuned,
    Heartbeat,
    LabelledSet,
    Measured,
    MinimalPairs,
    Resume,
    Scoring,
    SetScores,
    Setup,
    Start,
    Steps,
    Validation,
    read_log,
)
from cramming.schedule import SCHEDULES, learning_rate_factor

Init = Literal["pretrained", "random", "floor", "constant"]
Values = float | Mapping[str, Sequence[float | None]]  # of all entries about, or of each by seed

HYPERPARAMETERS = {"epochs": 5, "batch_size": 16, "learning_rate": 4e-5, "schedule": "cosine"}
SEEDS = (0, 1, 2)
CREATED = "2030-01-01T00:00:00+00:00"
BEGAN = datetime.fromisoformat(CREATED).timestamp()
OVERRIDES = (
    "model=tiny",
    "model.vocab_size=8192",
    "precision=fp32",
    "train.batch_size=4",
    "train.micro_batch=4",
    "train.sequence_length=25",
    "train.log_every=1",
    "schedule=linear",
)
TOKENIZER_SHA256 = "ef" * 32
CORPUS_SHA256 = "cd" * 32
ENVIRONMENT: dict[str, Any] = {
    "python": "3.12.1",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "platform": "Linux",
    "cpu_count": 2,
    "device": {"kind": "cpu", "name": "Test CPU", "memory_bytes": 2**34, "peak_tflops": None},
    "git": {
        "commit": "0123456789abcdef0123",
        "dirty": False,
        "changed": [],
        "diff_sha256": None,
    },
    "compile_cache": "own",
}


def write_run(
    folder: Path,
    *,
    name: str | None = None,
    overrides: Sequence[str] = (),
    recipe: Mapping[str, Any] | None = None,
    seed: int = 0,
    learning_rate: float = 3e-3,
    steps: int = 100,
    unit: Literal["hours", "exaflops", "tokens", "steps"] = "hours",
    limit: float | None = None,
    ended: EndReason | None = "finished",
    loss: float = 7.5,
    scores: Mapping[Init, Values] | None = None,
    seeds: Sequence[int] = SEEDS,
    suite: SuiteName = "glue",
    weights: str | None = None,
    predictions: Callable[[Task, int], bytes] | None = None,
    division: Literal["closed", "open"] = "closed",
    began: float = BEGAN,
    change: Mapping[str, Any] | None = None,
) -> Path:
    """Write the log of a run, and the predictions and final weights that it names; returns the folder.

    `name`: the run's, by default the folder's. Another `learning_rate` makes another recipe; `recipe`: all
    settings, in place of these. `limit`: by
    default what the steps take. `ended`: None for a run that was killed. `loss`: of the final validation. `scores`: by
    initialisation, of a finished run; by default the pretrained and the random model. `weights`: content of the final
    weights, by default the folder's name. `began`: seconds since 1970. `change`: by the name of an event the values to
    merge into every such event, such as `{"setup": {"training": {"seed": 3}}}`; an earlier log is replaced.
    """
    settings = _recipe((*OVERRIDES, *overrides))
    settings |= {"seed": seed, "division": division}
    settings["optim"] = {**settings["optim"], "lr": learning_rate}
    if recipe is not None:
        settings = {**recipe, "budget": dict(recipe["budget"])}
    own_name = folder.name if name is None else name
    content = weights or folder.name
    plan = TrainingPlan(settings, steps, unit, limit, ended, loss, content, began, own_name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_LOG).unlink(missing_ok=True)
    _append(folder, plan.events(), change)
    if plan.exported is not None:
        final = folder / "final"
        final.mkdir(exist_ok=True)
        (final / "model.safetensors").write_text(plan.weights)
        by_init = {"pretrained": 0.7, "random": 0.5} if scores is None else scores
        for init, values in by_init.items():
            score_run(
                folder,
                init,  # type: ignore[arg-type]
                values,
                seeds=seeds,
                suite=suite,
                predictions=predictions,
                began=began,
                change=change,
            )
    return folder


def score_run(
    folder: Path,
    init: Init = "pretrained",
    values: Values = 0.7,
    *,
    seeds: Sequence[int] = SEEDS,
    suite: SuiteName = "glue",
    files: Mapping[str, str] | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    predictions: Callable[[Task, int], bytes] | None = None,
    fine_tunings: int | None = None,
    began: float = BEGAN,
    change: Mapping[str, Any] | None = None,
) -> None:
    """Append a scoring to a run's log.

    `values`: main metrics by entry and seed, or about what all of them are. `files`: SHA-256 of the scored model, by
    default that of `final/`. `hyperparameters`: those that differ. `predictions`: content of a file of them.
    `fine_tunings`: how many there were before the scoring was interrupted.
    """
    files = dict(files or _exported_files(folder))
    chosen = {**HYPERPARAMETERS, **(hyperparameters or {})}
    time = datetime.fromtimestamp(began + 600, UTC).isoformat(timespec="seconds")
    events = list(_scoring(init, values, seeds, suite, files, chosen, predictions, time))
    contents = {content for _, content in events if content is not None}
    (folder / "predictions").mkdir(exist_ok=True)
    for content in contents:
        (folder / "predictions" / f"{_sha256(content)}.npz").write_bytes(content)
    until = None if fine_tunings is None else fine_tunings + 1
    _append(folder, [event for event, _ in events][:until], change)


def score_checkpoint(folder: Path, **options: Any) -> str:
    """Append a scoring of the checkpoint after two fifths of the steps; returns the SHA-256 of its file."""
    sha256 = _sha256(f"checkpoint of {folder.name}".encode())
    files = {"model.safetensors": "ab" * 32}
    score_run(
        folder, values=0.6, files=files, change={"scoring": {"checkpoint": sha256}}, **options
    )
    return sha256


def add_measures(folder: Path) -> None:
    """Append what `cramming measure` and minimal pairs add to a run's log."""
    measured = Measured(
        time=CREATED,
        model_sha256="ab" * 32,
        pseudo_perplexity=12.5,
        tokens_per_second=54321.0,
        batch_tokens=4096,
        memory_bytes=2**30,
        precision="fp32",
        environment=ENVIRONMENT,
    )
    pairs = MinimalPairs(
        model="m", key="k", definition="d", accuracy=71.5, word_accuracy=68.25, paradigms={}
    )
    _append(folder, [measured, pairs], None)


def write_external(
    folder: Path, model: str = "models/bert", scores: Mapping[Init, Values] | None = None
) -> Path:
    """Write the log of a model that was not pretrained here; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = _recipe(OVERRIDES)
    event = ExternalModel(
        name=folder.name,
        model=model,
        time=CREATED,
        suite_version="0.1.0",
        rules_version=RULES_VERSION,
        division="open",
        recipe=recipe,
        environment=ENVIRONMENT,
    )
    _append(folder, [event], None)
    for init, values in ({"pretrained": 0.8} if scores is None else scores).items():
        score_run(folder, init, values, change={"scoring": {"model": model}})  # type: ignore[arg-type]
    return folder


def _exported_files(folder: Path) -> dict[str, str]:
    events = [entry.event for entry in read_log(folder / RUN_LOG)]
    exported = [event for event in events if isinstance(event, Exported)]
    return exported[-1].files if exported else {"model.safetensors": "ab" * 32}


def _append(folder: Path, events: Sequence[Event], change: Mapping[str, Any] | None) -> None:
    with closing(EventLog(folder / RUN_LOG, durable=False)) as log:
        for event in events:
            values = (change or {}).get(event.event)
            if values is not None:
                event = RUN_EVENTS.validate_python(_merged(event.model_dump(), values))
            log.append(event, sync_now=False)


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `old` with the values of `new`; sections are merged, and those that are not there stay away."""
    merged = dict(old)
    for key, value in new.items():
        is_section = isinstance(value, Mapping)
        if is_section and isinstance(merged.get(key), Mapping):
            merged[key] = _merged(merged[key], value)
        elif not (is_section and key in merged and merged[key] is None):
            merged[key] = value
    return merged


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    return compose(overrides)


def _recipe(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of these overrides, of which only the sections may be shared between runs."""
    recipe = dict(_composed(overrides))
    recipe["budget"] = dict(recipe["budget"])
    return recipe


@dataclass
class TrainingPlan:
    """Training of a recipe: the first two fifths of the steps in a process that is killed, the rest in a second one."""

    recipe: dict[str, Any]
    steps: int
    unit: str
    limit: float | None
    ended: EndReason | None
    loss: float
    weights: str
    began: float
    name: str

    def __post_init__(self) -> None:
        train = self.recipe["train"]
        length = train["sequence_length"]
        targets = round(self.recipe["objective"]["rate"] * length)
        section = self.recipe["model"]
        model = build(
            ModelConfig, {**section, "vocab_size": section["vocab_size"] or 8192}, "model"
        )
        attention = self.recipe["attention"]["last_layer"]
        self.parameters = count_parameters(model)
        self.tokens_per_step = train["batch_size"] * length
        self.flops = self.tokens_per_step * flops_per_token(
            model, length, targets / length, attention
        )
        self.scale = max(self.steps, 1) / 100  # minutes
        self.killed_after = self.steps * 2 // 5
        amounts = {
            "hours": self.scale / 60,
            "exaflops": self.steps * self.flops / 1e18,
            "tokens": float(self.steps * self.tokens_per_step),
            "steps": float(self.steps),
        }
        self.limit = amounts[self.unit] if self.limit is None else self.limit
        names = ("hours", "exaflops", "tokens", "steps")
        limits = {name: self.limit if name == self.unit else None for name in names}
        self.recipe["budget"] |= {**limits, "minutes": None}
        self.exported: Exported | None = None
        if self.ended == "finished" and self.steps:
            files = {
                "config.json": "12" * 32,
                "model.safetensors": _sha256(self.weights.encode()),
                "tokenizer.json": TOKENIZER_SHA256,
            }
            self.exported = Exported(
                files=files, compiled=True, compile_seconds=1.0, peak_memory_bytes=2**30
            )

    def seconds(self, step: int) -> float:
        """Return when a step had ended, on the budget's clock: the second process begins after a third of it."""
        if step == 0:
            return 0.0
        if step <= self.killed_after:
            return self.scale * (2 + 16.5 * step / self.killed_after)
        rest = (step - self.killed_after) / (self.steps - self.killed_after)
        return self.scale * (23 + 36.5 * rest)

    def progress(self, step: int, seconds: float) -> float:
        """Return the share of the budget that is spent after a step."""
        assert self.limit is not None
        amounts = {
            "hours": seconds / 3600,
            "exaflops": step * self.flops / 1e18,
            "tokens": step * self.tokens_per_step,
            "steps": step,
        }
        return min(1.0, amounts[self.unit] / self.limit)

    def events(self) -> list[Event]:
        """Return the events of both processes in order, and those of the end."""
        sha256 = _sha256(f"checkpoint of {self.weights}".encode())
        rows = list(self._rows())
        first_end = 20 * self.scale
        first: list[tuple[float, Event]] = [
            (1 * self.scale, self._start(0, 1 * self.scale)),
            (1 * self.scale, self._setup(first=True)),
            *self._heartbeats(0, 2 * self.scale, first_end),
        ]
        if self.killed_after:
            saved = Checkpoint(
                **self._times(0, 19 * self.scale), step=self.killed_after, sha256=sha256
            )
            first.append((19 * self.scale, saved))
        first += [row for row in rows if row[0] < first_end]
        resumed = Resume(
            **self._times(1, 3 * self.scale),
            **self._counters(self.killed_after),
            sha256=sha256 if self.killed_after else None,
        )
        second: list[tuple[float, Event]] = [
            (22 * self.scale, self._start(1, 2 * self.scale)),
            (22 * self.scale, self._setup(first=False)),
            (23 * self.scale, resumed),
            *self._heartbeats(1, 4 * self.scale, 40 * self.scale),
            *(row for row in rows if row[0] > first_end),
        ]
        events = [event for _, event in sorted(first, key=lambda pair: pair[0])]
        events += [event for _, event in sorted(second, key=lambda pair: pair[0])]
        if self.ended is not None:
            events.append(
                End(
                    **self._times(1, 41 * self.scale),
                    **self._counters(self.steps),
                    reason=self.ended,
                )
            )
        if self.exported is not None:
            events += [self._final_validation(), self.exported]
        return events

    def _times(self, process: int, elapsed: float) -> dict[str, float]:
        return {"elapsed": elapsed, "wall": self.began + 30 * self.scale * process + elapsed}

    def _counters(self, steps: int) -> dict[str, Any]:
        seconds = self.seconds(steps)
        return {
            "steps": steps,
            "sequences": self.recipe["train"]["batch_size"] * steps,
            "tokens": self.tokens_per_step * steps,
            "flops": self.flops * steps,
            "skipped_steps": 0,
            "recompilations": 0,
            "data_wait_seconds": 0.01 * seconds,
            "last_step_seconds": seconds,
        }

    def _start(self, process: int, elapsed: float) -> Start:
        return Start(
            **self._times(process, elapsed),
            name=self.name,
            suite_version="0.1.0",
            rules_version=RULES_VERSION,
            unit=self.unit,
            limit=self.limit,
            clock=self.recipe["budget"]["clock"],
            division=self.recipe["division"],
            recipe=None if process else self.recipe,
        )

    def _setup(self, first: bool) -> Setup:
        objective = self.recipe["objective"]["name"]
        training = {
            "start": self.recipe["start"]["name"],
            "objective": objective,
            "parameters": self.parameters.total,
            "parameters_without_embeddings": self.parameters.without_embeddings,
            "precision": "fp32",
            "attention_kernels": [],
            "peak_learning_rate": self.recipe["optim"]["lr"],
            "seed": self.recipe["seed"],
            "gate": {},
            "compiled": True,
        }
        length = self.recipe["train"]["sequence_length"]
        return Setup(
            environment=ENVIRONMENT,
            manifest_sha256=CORPUS_SHA256,
            corpus=_corpus() if first else None,
            devices=1,
            windows=1_000_000 // length - 1,
            tokens_per_byte=0.226,
            training=training,
        )

    def _heartbeats(
        self, process: int, begin: float, end: float
    ) -> Iterator[tuple[float, Heartbeat]]:
        """Yield a heartbeat every two seconds and at the end, each with its time on the clock of both processes."""
        earlier = 20 * self.scale * process
        ended = [self.seconds(step) for step in range(1, self.steps + 1)]
        elapsed = begin
        while elapsed <= end:
            steps = sum(seconds <= earlier + elapsed for seconds in ended)
            event = Heartbeat(**self._times(process, elapsed), **self._counters(steps))
            yield earlier + elapsed, event
            elapsed = end if elapsed < end < elapsed + 2.0 else elapsed + 2.0

    def _rows(self) -> Iterator[tuple[float, Steps | Validation]]:
        """Yield rows of steps and validations with their time."""
        noise = random.Random(self.recipe["seed"])
        schedule = choose(SCHEDULES, self.recipe["schedule"], "schedule")
        peak = self.recipe["optim"]["lr"]
        validations = self.recipe["train"]["validations"]
        fall = 9.0 - self.loss
        point = 0
        begun = self.progress(0, 0.0)
        for step in range(1, self.steps + 1):
            seconds = self.seconds(step)
            if step == self.killed_after + 1:
                begun = max(begun, self.progress(step - 1, 23 * self.scale))
            progress = self.progress(step, seconds)
            mean = self.loss - 0.1 + fall * math.exp(-4 * step / self.steps)
            loss = mean + noise.gauss(0.0, 0.15)
            yield (
                seconds,
                Steps(
                    step=step,
                    progress=progress,
                    seconds=seconds,
                    tokens=self.tokens_per_step * step,
                    loss=loss,
                    accuracy=0.05,
                    grad_norm=1.0,
                    lr=peak * learning_rate_factor(schedule, begun),
                    each_progress=[begun],
                    each_loss=[loss],
                    each_accuracy=[0.05],
                ),
            )
            begun = progress
            if int(progress * validations) > point and step < self.steps:
                point = int(progress * validations)
                yield seconds, self._validation(step, progress, seconds, mean)

    def _validation(
        self, step: int, progress: float, seconds: float, loss: float, **more: Any
    ) -> Validation:
        if self.recipe["objective"]["name"] == "rtd":
            losses = {"replaced_token_loss": loss / 20, "replaced_token_accuracy": 0.9}
        else:
            losses = {"loss": loss, "accuracy": 0.06}
        return Validation(
            step=step,
            progress=progress,
            seconds=seconds,
            tokens=self.tokens_per_step * step,
            targets=1000,
            **losses,
            **more,
        )

    def _final_validation(self) -> Validation:
        more: dict[str, Any] = {"held_out_tokens": 7000}
        if self.recipe["objective"]["name"] != "rtd":
            more |= {"all_mask_loss": self.loss + 0.25, "all_mask_accuracy": 0.05}
        seconds = self.seconds(self.steps) + self.scale
        return self._validation(self.steps, 1.0, seconds, self.loss, **more)


def _corpus() -> dict[str, Any]:
    tasks = [task for task, _ in ENTRIES.values()]
    return {
        "folder": "corpora/x",
        "manifest_sha256": CORPUS_SHA256,
        "tokens": 1_000_000,
        "validation_tokens": 10_000,
        "documents": 5000,
        "vocab_size": 8192,
        "sources": [{"name": "wikipedia", "license": "CC BY-SA"}],
        "tokenizer": {"kind": "wordpiece", "lowercase": True, "sha256": TOKENIZER_SHA256},
        "settings": {},
        "removed": {"empty": 3},
        "decontamination": {
            "ngram": 13,
            "removed": dict.fromkeys([task.title for task in tasks], 0),
            "development": {
                f"{source.folder}/{source.file}": {
                    "texts": len(task.text) * source.examples,
                    "sha256": "34" * 32,
                }
                for task, source in ENTRIES.values()
            },
        },
    }


@functools.cache
def _predictions(task: str, seed: int) -> bytes:
    """Return a file without test sets; what it says of the dev sets is not what the scores say."""
    buffer = io.BytesIO()
    np.savez(buffer, **{f"dev.{task}": np.array([len(task), seed])})  # type: ignore[arg-type]
    return buffer.getvalue()


def _scoring(
    init: Init,
    values: Values,
    seeds: Sequence[int],
    suite: SuiteName,
    files: dict[str, str],
    hyperparameters: dict[str, Any],
    predictions: Callable[[Task, int], bytes] | None,
    time: str,
) -> Iterator[tuple[Event, bytes | None]]:
    """Yield the events of a scoring, each with the content of the file that it names."""
    is_model = init in ("pretrained", "random")
    tasks = SUITES[suite].tasks
    sets = _labelled_sets(suite)
    settings = hyperparameters if is_model else {"method": init}
    made_of = settings_hash(suite, init, settings)[:12]
    keys = {f"{name}-seed{seed}": f"{made_of}-here" for name in tasks for seed in seeds}
    model = {
        "model_sha256": files["model.safetensors"] if init == "pretrained" else None,
        "model_files": files,
        "precision": "fp32",
        "threads_per_run": 1,
        "environment": ENVIRONMENT,
    }
    yield (
        Scoring(
            time=time,
            section="superglue" if suite == "superglue" else "glue",
            suite=suite,
            init=init,
            version=8,
            model="runs/first/final" if is_model else init,
            selection="last epoch" if is_model else "none",
            seeds=list(seeds),
            hyperparameters=settings,
            entries=sets,
            absent={},
            keys=keys,
            tasks_corpus_sha256=CORPUS_SHA256 if suite == "embedded" else None,
            **(model if is_model else {}),
        ),
        None,
    )
    for task in tasks.values():
        for seed in seeds:
            content = predictions(task, seed) if predictions else _predictions(task.name, seed)
            scores = {
                source.entry: _set_scores(
                    source.entry, sets[source.entry], values, list(sets), list(seeds), seed
                )
                for source in task.scored
            }
            event = Finetuned(
                time=time,
                task=task.name,
                seed=seed,
                key=keys[f"{task.name}-seed{seed}"],
                predictions=_sha256(content),
                entries=scores,
                train_loss=0.3 + 0.01 * seed if is_model else None,
                epoch=hyperparameters["epochs"] if is_model else 0,
                seconds=12.5,
            )
            yield event, content


def _labelled_sets(suite: SuiteName) -> dict[str, LabelledSet]:
    is_official = SUITES[suite].official
    sets = {}
    for task in SUITES[suite].tasks.values():
        for source in task.scored:
            official = OFFICIAL_SHA256.get(source.entry) if is_official else None
            sets[source.entry] = LabelledSet(
                title=source.title,
                task=task.name,
                metrics=list(task.metrics),
                main_metric=task.main_metric,
                train_examples=task.train.examples,
                official_train_examples=task.train.examples if is_official else None,
                eval_examples=source.examples,
                official_eval_examples=source.examples if is_official else None,
                subset=False,
                skipped_rows=0,
                data_sha256=official or "cd" * 32,
                texts_sha256="34" * 32,
                seen_in_training=0,
            )
    return sets


def _set_scores(
    entry: str,
    labelled: LabelledSet,
    values: Values,
    entries: Sequence[str],
    seeds: Sequence[int],
    seed: int,
) -> SetScores:
    """Return the metrics of one seed; accuracies are whole numbers of right answers."""
    place = seeds.index(seed)
    if isinstance(values, Mapping):
        value = values[entry][place] if entry in values else None
    else:
        value = values + 0.01 * entries.index(entry) + 0.002 * place
    metrics: dict[str, float | None] = {}
    for metric in labelled.metrics:
        examples = labelled.eval_examples
        is_share = metric == "accuracy" and value is not None
        metrics[metric] = round(value * examples) / examples if is_share else value
    return SetScores(metrics=metrics, problems=[] if value is not None else ["not finite"])
