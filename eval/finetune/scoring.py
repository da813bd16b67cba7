"""The runs of one model, every task and seed from one initialisation: each done once, kept, and shown.

A finished run is a piece on disk (`eval.finetune.results`) under a key of everything that its numbers depend on. A
scoring that was interrupted therefore goes on at the first run that is missing, and a run whose conditions have changed
is done again. Of the trained model, which competes, the first result stands, wherever it was made: another of the same
settings and seed would be one more to choose from (R20).
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cramming.config import settings_hash
from cramming.data.task_files import TASKS, Task
from cramming.device import describe
from cramming.environment import environment
from cramming.precision import Mode, resolve
from cramming.progress import Progress, say
from eval.finetune import history
from eval.finetune.encode import EncodedTask, encode_task, load_encoder
from eval.finetune.jobs import Job, choose_workers, run_jobs
from eval.finetune.loop import FINETUNING_VERSION, Hyperparameters, Predictions, Selection
from eval.finetune.models import Init, ModelSource, refuse_changed
from eval.finetune.results import SELECTIONS, Pieces, is_subset, summarise, write_json
from eval.tasks.datasets import TaskData
from eval.tasks.locate import FoundSuite, SourceName


@dataclass(frozen=True)
class EvalConfig:
    """The `eval` section.

    `data_dir` is the folder with the official GLUE folders; `tasks` null means all that are there; `predict_test` also
    predicts the unlabelled test sets and AX; `selection: best` scores each run's best epoch instead of its last, which
    the closed division does not allow; `floor` scores a bag of words and a constant class too; `sweep` keeps this
    result as one point of a grid and records the best so far, which the closed division does not allow either;
    `minimal_pairs` is a folder of BLiMP's files; `workers` null means what cores and memory allow; `threads` is per
    run, and part of the result, unlike `workers`.
    """

    source: SourceName
    data_dir: Path | None
    tasks: tuple[str, ...] | None
    init: tuple[Init, ...]
    seeds: tuple[int, ...]
    predict_test: bool
    selection: Selection
    floor: bool
    sweep: bool
    minimal_pairs: Path | None
    workers: int | None
    threads: int
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    hyperparameters: Hyperparameters

    def __post_init__(self) -> None:
        for name in ("init", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name}={list(values)} must name at least one, and each once")
        if not all(0 <= seed < 2**63 for seed in self.seeds):
            raise ValueError(f"seeds={list(self.seeds)} must be between 0 and 2^63")
        if self.tasks is not None and not self.tasks:
            raise ValueError("tasks=[] names none; null means all that are there")
        if self.threads < 1 or (self.workers is not None and self.workers < 1):
            raise ValueError("threads and workers must be at least 1")
        if self.threads > (cores := os.cpu_count() or 1):
            raise ValueError(f"threads={self.threads}: this machine has {cores} cores")
        if self.source == "embedded" and self.data_dir is not None:
            raise ValueError("data_dir is for real GLUE data; add eval=glue_sane")


def score_model(
    folder: Path,
    run: Path,
    source: ModelSource,
    init: Init,
    suite: FoundSuite,
    data: Sequence[TaskData],
    settings: EvalConfig,
    device: torch.device,
    cache: dict[str, EncodedTask],
) -> dict[str, Any]:
    """All tasks and seeds from one initialisation, kept in `folder`; returns the section for the record of `run`.

    glue.json holds what is the same in every repetition; the record's section adds the machine, the seconds,
    `conditions` by task, without which numbers are not compared, and how many lines of the run's history came before.
    What is fine-tuned for GLUE or the embedded tasks is written into that history.
    """
    machine = environment(asdict(describe(device)))  # now: while this runs, somebody may edit the code
    precision = resolve(settings.precision, device)
    numerics = {"precision": precision, "threads_per_run": settings.threads}
    hyper = settings.hyperparameters
    sha256 = source.sha256 if init == "pretrained" else None
    made_with = {"hyperparameters": asdict(hyper), "selection": SELECTIONS[settings.selection], **numerics}
    past = history.Scoring(run, suite.name, init, made_with, FINETUNING_VERSION[init])
    by_name = {d.task.name: d for d in data}

    def note(task: Task, seed: int, piece: Mapping[str, Any]) -> None:
        scores = {entry: found["metrics"][task.main_metric] for entry, found in piece["entries"].items()}
        part = {"subset": is_subset(suite.name, by_name[task.name]), "scores": scores, "model_sha256": sha256}
        kept = {name: piece[name] for name in ("predictions_sha256", "key")}
        past.add(task.name, seed, {**part, **kept, "git": machine["git"]})

    competes = init == "pretrained" and not settings.sweep  # a sweep compares its points
    store = Pieces(folder, note, past.has, anywhere=competes) if suite.section == "glue" else Pieces(folder)
    protocol = {**numerics, "selection": settings.selection}
    same = {d.task.name: conditions(d, source, init, protocol, machine) for d in data}
    keys = {(name, seed): key_of(same[name], hyper, seed) for name, seed in itertools.product(same, settings.seeds)}
    pieces = stored_pieces(store, by_name, keys, init)
    todo = [run for run in keys if run not in pieces]
    encode_tasks([by_name[name] for name, _ in todo], source, hyper.max_length, cache)
    whole = [(name, seed) for name, seed in todo if not is_subset(suite.name, by_name[name])]
    if todo and init == "pretrained":
        warn_of_choices(past, whole if competes else [])
    for done, found in fine_tune(todo, cache, source, init, settings, precision, device):
        pieces[done] = store.save(by_name[done[0]], done[1], keys[done], found)
        show_piece(TASKS[done[0]], init, done[1], pieces[done], f"{found.seconds:.0f} s")
    model = {"init": init, "model": source.label, "model_sha256": sha256, "model_files": source.files, **numerics}
    summary = summarise(
        model, suite.name, data, pieces, settings.seeds, asdict(hyper), suite.absent, settings.selection
    )
    seconds = {f"{name}-seed{seed}": pieces[name, seed]["seconds"] for name, seed in keys}
    write_json(folder / "glue.json", summary)
    write_json(folder / "timing.json", {"environment": machine, "seconds": seconds})
    made = {
        name: made_on(found, [pieces[name, seed]["key"] for seed in settings.seeds]) for name, found in same.items()
    }
    corpus = {"tasks_corpus_sha256": suite.corpus_sha256} if suite.corpus_sha256 else {}
    more = {"conditions": made, "history_entries": past.entries(), **corpus, "environment": machine}
    return {**with_seconds(summary, seconds), **more}


def warn_of_choices(past: history.Scoring, whole: Sequence[tuple[str, int]]) -> None:
    """Say what R20 will find once the next run is fine-tuned; `whole` are those that will be, on all of their data."""
    if other := past.other_set():
        say(
            f"warning: this run was fine-tuned with {other}; a second set of settings keeps it out of the closed"
            " division for good (R20): to go on with the first, stop now and set eval.precision, eval.threads or"
            " eval.hyperparameters as they were"
        )
    before = past.done()
    if again := [f"{name} seed {seed}" for name, seed in whole if (name, seed) in before]:
        say(
            f"warning: {', '.join(again[:4])} was fine-tuned before, on other data or with its result gone; another"
            " outcome keeps this run out of the closed division (R20)"
        )


def fine_tune(
    runs: list[tuple[str, int]],
    data: Mapping[str, EncodedTask],
    source: ModelSource,
    init: Init,
    settings: EvalConfig,
    precision: Mode,
    device: torch.device,
) -> Iterator[tuple[tuple[str, int], Predictions]]:
    """Each of `runs` (task, seed) as it is done."""
    workers = choose_workers(
        settings.workers, settings.threads, len(runs), len(settings.seeds), device, source.weight_bytes
    )
    if workers > 1:  # the longest first, so that no process is alone with a long one at the end
        runs = sorted(runs, key=lambda run: -len(data[run[0]].train))
    numerics = (precision, str(device), settings.threads)
    jobs = (
        Job(name, seed, init, data[name], source, settings.hyperparameters, *numerics, settings.selection)
        for name, seed in runs
    )
    examples = settings.hyperparameters.epochs * sum(len(data[name].train) for name, _ in runs)
    with Progress(f"fine-tune ({init})", examples, "examples") as bar:
        for job, found in run_jobs(jobs, workers, bar.advance):
            yield (job.task, job.seed), found


def stored_pieces(
    store: Pieces, data: Mapping[str, TaskData], keys: dict[tuple[str, int], str], init: Init
) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs that an earlier, interrupted call has finished under the same settings."""
    pieces = {}
    for (name, seed), key in keys.items():
        piece = store.load(data[name], seed, key)
        if piece is not None:
            pieces[name, seed] = piece
            show_piece(TASKS[name], init, seed, piece, "stored" if piece["key"] == key else "stored, made elsewhere")
    return pieces


def conditions(
    data: TaskData, source: ModelSource, init: Init, protocol: Mapping[str, Any], machine: Mapping[str, Any]
) -> str:
    """A hash of what a task's numbers depend on beside hyperparameters and seed; behind a hyphen that of what they are
    made on: versions of libraries and the device."""
    stock = not source.own or "tokenizer.json" not in source.settings
    versions = [machine[name] for name in ("torch", "tokenizers", *(("transformers",) if stock else ()))]
    device = [machine["device"][key] for key in ("kind", "name")]
    asked = (data.sha256, init, source.sha256, source.settings, protocol, FINETUNING_VERSION[init])
    return f"{settings_hash(*asked)}-{settings_hash(versions, device)}"


def key_of(conditions: str, hyper: Hyperparameters, seed: int) -> str:
    """The key of one run: the conditions with hyperparameters and seed."""
    asked, _, place = conditions.partition("-")
    return f"{settings_hash(asked, asdict(hyper), seed)}-{place}"


def made_on(conditions: str, keys: Sequence[str]) -> str:
    """The conditions with what the runs with these keys were made on."""
    places = sorted({key.partition("-")[2] for key in keys})
    return f"{conditions.partition('-')[0]}-{'-'.join(places)}"


def encode_tasks(
    tasks: Sequence[TaskData], source: ModelSource, max_length: int, cache: dict[str, EncodedTask]
) -> None:
    """Put the tasks into `cache` as the model's tokenizer sees them, by name, where they are not in it yet."""
    data = [found for name, found in {d.task.name: d for d in tasks}.items() if name not in cache]
    if not data:
        return
    encode = load_encoder(source.folder, source.own, max_length, source.vocab_size)
    examples = sum(len(split) for d in data for split in (d.train, *d.scored, *d.blind))
    with Progress("encode", examples, "examples") as bar:
        for task_data in data:
            bar.note(task_data.task.name)
            cache[task_data.task.name] = encode_task(task_data, encode, bar.advance)
    refuse_changed(source.folder, source.settings)


def with_seconds(summary: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """The summary with the fine-tuning seconds per entry (those of its task) and in all."""
    tasks = {
        name: {**entry, "seconds": sum(seconds[f"{entry['task']}-seed{seed}"] for seed in summary["seeds"])}
        for name, entry in summary["tasks"].items()
    }
    return {**summary, "tasks": tasks, "seconds": sum(seconds.values())}


def show_piece(task: Task, init: Init, seed: int, piece: dict[str, Any], remark: str) -> None:
    """One line per finished run."""
    for entry, found in piece["entries"].items():
        title = next(s.title for s in task.scored if s.entry == entry)
        values = ", ".join(
            f"{name} {'-' if value is None else f'{100 * value:.1f}'}" for name, value in found["metrics"].items()
        )
        remarks = "; ".join([remark, *found["problems"], *found["notes"]])
        say(f"{title:<8} {init} seed {seed}: {values} ({remarks})")


def show_averages(section: dict[str, Any]) -> None:
    """The averages, or what they lack."""
    for name, average in section["averages"].items():
        if average["value"] is not None:
            say(f"{name} {section['init']}: {average['value']:.2f}")
        else:
            say(f"{name} {section['init']}: not computed, missing {', '.join(average['missing'])}")
