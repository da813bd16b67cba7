"""Fine-tuning runs of one model from one initialisation: each is done once, logged and shown.

A result is logged (`eval.finetune.store`) under a key of everything that its numbers depend on. An interrupted
scoring therefore continues with the first run that is missing, and a run whose conditions have changed is repeated.
For the trained model, which competes, the first result counts, whatever machine it was made on: another of the same
settings and seed would be a second one to choose from (R17).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cramming.config import require, settings_hash
from cramming.data.suites import SUITES
from cramming.data.task_files import TASKS, Task
from cramming.device import describe
from cramming.environment import environment
from cramming.precision import resolve
from cramming.progress import Progress, say
from cramming.runlog import Finetuned, LabelledSet, Scoring
from cramming.scores import run_name
from eval.finetune.config import SELECTION, EvalConfig, Hyperparameters, Init
from eval.finetune.encode import EncodedTask, encode_tasks
from eval.finetune.history import warn_of_choices
from eval.finetune.loop import FINETUNING_VERSION, Predictions, TaskRun
from eval.finetune.models import ModelSource
from eval.finetune.store import ScoreLog, now
from eval.finetune.workers import choose_workers, run_all
from eval.tasks.datasets import TaskData
from eval.tasks.locate import TaskSuite

Protocol = Mapping[str, Any]  # number format, threads and selection


@dataclass(frozen=True)
class ScoringJob:
    """Inputs that all scorings of one call share.

    `sets` are the labelled sets of `data`, by name. `encoded` holds tasks as token ids, by name, encoded on demand.
    """

    log: ScoreLog
    source: ModelSource
    suite: TaskSuite
    data: Sequence[TaskData]
    sets: dict[str, LabelledSet]
    settings: EvalConfig
    device: torch.device
    encoded: dict[str, EncodedTask] = field(default_factory=dict)

    @property
    def absent(self) -> dict[str, str]:
        """Reasons why tasks and labelled sets of the suite are not scored, by name."""
        absent = dict(self.suite.absent)
        for data in self.data:
            absent |= data.absent
        return absent


def score_model(job: ScoringJob, init: Init) -> dict[str, Any]:
    """Fine-tune and score all tasks and seeds that have no stored result; return the section of this scoring.

    A scoring that is already in the record writes nothing.
    """
    settings, log = job.settings, job.log
    # read now, because the code may be edited while this runs
    machine = environment(asdict(describe(job.device)))
    precision = resolve(settings.precision, job.device)
    numerics = {"precision": precision, "threads_per_run": settings.threads}
    # The points of a sweep are compared, so they must be of one machine.
    competes = init == "pretrained" and not settings.sweep and SUITES[job.suite.name].ranked
    search = _StoredResults(job, init, {**numerics, "selection": "last"}, machine, competes)
    data = [search.choose_test_sets(task_data) for task_data in job.data]
    by_name = {task_data.task.name: task_data for task_data in data}
    stored = {name: search.load(task_data) for name, task_data in by_name.items()}
    scoring = search.describe(data, stored, numerics)
    todo = []
    for name in by_name:
        todo += [(name, seed) for seed in settings.seeds if seed not in stored[name]]
    _show_stored(stored, init, search)
    encode_tasks(
        [by_name[name] for name, _ in todo],
        job.source,
        settings.hyperparameters.max_length,
        job.encoded,
    )
    for name, _ in todo:
        refuse_pair_without_types(
            job.source, by_name[name].task, job.encoded[name], settings.hyperparameters
        )
    if todo or not log.scores.is_current(scoring):
        if todo and competes:  # the record of a sweep states the choice anyway
            warn_of_choices(log.scores.history, scoring, todo)
        log.begin(scoring)
    runs = [
        TaskRun(
            by_name[name].task,
            seed,
            init,
            job.encoded[name],
            job.source,
            settings.hyperparameters,
            precision,
            str(job.device),
            settings.threads,
        )
        for name, seed in todo
    ]
    for run, predictions in fine_tune(runs, settings, job.device):
        key = scoring.keys[run_name(run.task.name, run.seed)]
        result = log.save(by_name[run.task.name], run.seed, key, predictions)
        show_result(run.task, init, result, f"{predictions.seconds:.0f} s")
    return log.scores.section_of(scoring)


@dataclass(frozen=True)
class _StoredResults:
    """Lookup of the stored results of one initialisation; with `anywhere` on any machine."""

    job: ScoringJob
    init: Init
    protocol: Protocol
    machine: Mapping[str, Any]
    anywhere: bool

    def key(self, data: TaskData, seed: int) -> str:
        """Return the key of a result of this machine."""
        return key_of(self.conditions(data), self.job.settings.hyperparameters, seed)

    def conditions(self, data: TaskData) -> str:
        """Return the hash of what a task's numbers depend on."""
        return conditions(data, self.job.source, self.init, self.protocol, self.machine)

    def load(self, data: TaskData) -> dict[int, Finetuned]:
        """Return the stored results of a task by seed."""
        results = {}
        for seed in self.job.settings.seeds:
            key = self.key(data, seed)
            result = self.job.log.load(data, seed, key, anywhere=self.anywhere)
            if result is not None:
                results[seed] = result
        return results

    def choose_test_sets(self, data: TaskData) -> TaskData:
        """Return a task with its test sets if it was begun with them, even if this call does not ask for them."""
        if not data.unasked:
            return data
        count = len(self.load(data.whole))
        return data.whole if count and count >= len(self.load(data)) else data

    def describe(
        self,
        data: Sequence[TaskData],
        stored: Mapping[str, Mapping[int, Finetuned]],
        numerics: Mapping[str, Any],
    ) -> Scoring:
        """Return the scoring; its keys are those of stored results, and of this machine for the others."""
        job = self.job
        keys: dict[str, str] = {}
        same: dict[str, str] = {}
        for task_data in data:
            name = task_data.task.name
            of_task = {seed: self.key(task_data, seed) for seed in job.settings.seeds}
            of_task |= {seed: result.key for seed, result in stored[name].items()}
            keys |= {run_name(name, seed): key for seed, key in of_task.items()}
            same[name] = made_on(self.conditions(task_data), list(of_task.values()))
        return Scoring(
            time=now(),
            section=job.suite.section,
            suite=job.suite.name,
            init=self.init,
            version=FINETUNING_VERSION[self.init],
            model=job.source.label,
            model_sha256=job.source.sha256 if self.init == "pretrained" else None,
            model_files=job.source.files,
            checkpoint=job.source.checkpoint,
            selection=SELECTION,
            seeds=list(job.settings.seeds),
            hyperparameters=job.settings.hyperparameters.model_dump(),
            sweep=list(job.settings.init) if job.settings.sweep else None,
            entries=job.sets,
            absent=job.absent,
            conditions=same,
            keys=keys,
            tasks_corpus_sha256=job.suite.corpus_sha256,
            environment=dict(self.machine),
            **numerics,
        )


def _show_stored(
    stored: Mapping[str, Mapping[int, Finetuned]], init: Init, search: _StoredResults
) -> None:
    """Print the stored results, and which of them another machine made."""
    by_name = {data.task.name: data for data in search.job.data}
    for name, results in stored.items():
        here = search.conditions(by_name[name]).partition("-")[2]
        for result in results.values():
            is_here = result.key.partition("-")[2] == here
            show_result(
                TASKS[name], init, result, "stored" if is_here else "stored, made elsewhere"
            )


def refuse_pair_without_types(
    source: ModelSource, task: Task, encoded: EncodedTask, hyper: Hyperparameters
) -> None:
    """Raise UserError if two texts are to be compared that the tokenizer does not distinguish."""
    if hyper.pooling == "pairs" and len(task.text) > 1:
        require(
            (encoded.train.types_T == 1).any(),
            f"{source.folder}: its tokenizer has no token types for a second text, which"
            " eval.hyperparameters.pooling=pairs needs. Set mean or cls.",
        )


def fine_tune(
    runs: Sequence[TaskRun], settings: EvalConfig, device: torch.device
) -> Iterator[tuple[TaskRun, Predictions]]:
    """Yield each of `runs`, which are of one model, when it is done."""
    if not runs:
        return
    size = runs[0].source.weight_bytes
    workers = choose_workers(
        settings.workers, settings.threads, len(runs), len(settings.seeds), device, size
    )
    if workers > 1:  # the longest first, so that no process is alone with a long one at the end
        runs = sorted(runs, key=lambda run: -len(run.data.train))
    examples = settings.hyperparameters.epochs * sum(len(run.data.train) for run in runs)
    with Progress(f"fine-tune ({runs[0].init})", examples, "examples") as bar:
        yield from run_all(runs, workers, bar.advance)


def conditions(
    data: TaskData,
    source: ModelSource,
    init: Init,
    protocol: Protocol,
    machine: Mapping[str, Any],
) -> str:
    """Return a hash of everything that a task's numbers depend on, apart from hyperparameters and seed.

    Behind a hyphen follows the hash of the machine: versions of libraries and the device.
    """
    stock = not source.is_native or "tokenizer.json" not in source.settings
    packages = ["torch", "tokenizers"]
    if stock:
        packages.append("transformers")
    versions = [machine[name] for name in packages]
    device = [machine["device"][key] for key in ("kind", "name")]
    parts: list[Any] = [data.sha256, init, source.sha256, source.settings, protocol]
    parts.append(FINETUNING_VERSION[init])
    if not source.is_native:  # earlier versions had no token types if the tokenizer hides them
        parts.append("token types")
    return f"{settings_hash(*parts)}-{settings_hash(versions, device)}"


def key_of(conditions: str, hyper: Hyperparameters, seed: int) -> str:
    """Return the key of one run: the conditions with hyperparameters and seed."""
    task_hash, _, machine_hash = conditions.partition("-")
    return f"{settings_hash(task_hash, hyper.model_dump(), seed)}-{machine_hash}"


def made_on(conditions: str, keys: Sequence[str]) -> str:
    """Return the conditions with the machines on which the runs with these keys were made."""
    machine_hashes = sorted({key.partition("-")[2] for key in keys})
    return f"{conditions.partition('-')[0]}-{'-'.join(machine_hashes)}"


def show_result(task: Task, init: str, result: Finetuned, remark: str) -> None:
    """Print one line per labelled set of a finished run."""
    for source in task.scored:
        scores = result.entries.get(source.entry)
        if scores is None:
            continue
        values = []
        for name, value in scores.metrics.items():
            shown = "-" if value is None else f"{100 * value:.1f}"
            values.append(f"{name} {shown}")
        remarks = "; ".join([remark, *scores.problems, *scores.notes])
        say(f"{source.title:<8} {init} seed {result.seed}: {', '.join(values)} ({remarks})")
