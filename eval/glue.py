"""`cramming glue`: fine-tune a model on every task and seed, and put the scores into the run's record.

The model is `runs/<name>/final`, or any Hugging Face encoder by `model_path=<folder or hub name>`. The tasks are
GLUE's, from local official files (`eval.data_dir`) or the hub (`eval=hub`), or those of the embedded corpus
(`eval=embedded`). A run that was interrupted goes on at the first (task, seed) that was not finished.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from cramming.config import UserError, build, expand_home, settings_hash
from cramming.device import describe, select
from cramming.environment import environment
from cramming.model.config import ModelConfig
from cramming.precision import Mode, resolve
from cramming.progress import Progress, say
from cramming.record import (
    create_run_folder,
    drop_record_sections,
    load_record,
    run_folder,
    run_lock,
    write_record_section,
)
from eval import sweep
from eval.datasets import TaskData
from eval.encode import EncodedTask, encode_task, load_encoder
from eval.finetune import FINETUNING_VERSION, Hyperparameters, Selection
from eval.floor import score_floor
from eval.jobs import Job, choose_workers, run_jobs
from eval.minimal_pairs import read_pairs, score_pairs
from eval.models import Init, ModelSource, open_model, position_limit
from eval.reading import at, floor, sections
from eval.results import Pieces, summarise, write_json
from eval.suites import SourceName, Suite, find_suite
from eval.superglue import ALL_TASKS
from eval.tasks import Task, find_tasks


@dataclass(frozen=True)
class EvalConfig:
    """The `eval` section.

    `data_dir` is the folder with the official GLUE folders; `tasks` null means all that are there; `predict_test` also
    predicts the unlabelled test sets and AX; `selection: best` scores each run's best epoch instead of its last, which
    the closed division does not allow; `floor` scores a bag of words too; `sweep` keeps this result as one point of a
    grid and records the best so far, which the closed division does not allow either; `minimal_pairs` is a folder of
    BLiMP's files; `workers` null means what cores and memory allow; `threads` is per run, and part of the result,
    unlike `workers`.
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


def main(config: dict[str, Any]) -> None:
    """Score the run `name` (or `model_path`) as section `eval` says; UserError for whatever is missing or wrong."""
    settings = build(EvalConfig, config["eval"], "eval")
    device = select(config["device"])
    folder = run_folder(config)
    source = find_model(config, folder)
    refuse_length(settings.hyperparameters.max_length, source.label, source.max_length)
    refuse_design(settings.init, source.label, source.designed)
    suite = find_suite(settings.source, settings.data_dir, settings.tasks, config)
    data = [suite.read(task) for task in suite.tasks]
    if not settings.predict_test:
        data = [replace(task_data, blind=()) for task_data in data]
    with run_lock(folder):
        if config["model_path"]:
            start_record(folder, config, device)
        kind = suite.section
        # Written with the first model's scores: until then those of another suite stay in the record.
        beside = without_encoder(folder / kind / "floor", suite, data) if settings.floor else {}
        if settings.minimal_pairs:
            length = settings.hyperparameters.max_length
            pairs = score_pairs(source, settings.minimal_pairs, device, length)
            write_record_section(folder, minimal_pairs=pairs)
            say(f"minimal pairs: {pairs['accuracy']:.1f} over {len(pairs['paradigms'])} paradigms")
        encoded: dict[str, EncodedTask] = {}  # tokenized once for all initialisations
        for init in settings.init:
            place = folder / kind / init
            point = sweep.point_folder(place, settings.hyperparameters) if settings.sweep else place
            section = score_model(point, source, init, suite, data, settings, device, encoded)
            show_averages(section)
            if settings.sweep:
                write_json(point / "section.json", section)
            else:
                write_scores(folder, suite, beside | {kind: beside.get(kind, {}) | {init: section}})
        if settings.sweep:
            chosen = sweep.choose(folder / kind, settings.init)
            write_scores(folder, suite, beside | {kind: beside.get(kind, {}) | chosen})


def write_scores(folder: Path, suite: Suite, scores: dict[str, Any]) -> None:
    """Put `scores` into the record. A record holds GLUE or the embedded tasks: what it has of the other goes."""
    record = load_record(folder) if (folder / "record.json").exists() else {}
    known = {f"glue.{init}": section for init, section in sections(record).items()} | {"floor": floor(record) or {}}
    stale = [name for name, section in known.items() if section.get("suite") not in (None, suite.name)]
    if suite.section == "glue" and stale:
        say(f"the record holds one suite, now {suite.name}: dropped from it {', '.join(stale)} of another")
        drop_record_sections(folder, stale)
    write_record_section(folder, **scores)


def without_encoder(place: Path, suite: Suite, data: Sequence[TaskData]) -> dict[str, Any]:
    """The bag of words' part of the record."""
    floor, seconds = score_floor(Pieces(place), suite.name, data, suite.absent)
    show_averages(floor)
    floor = with_seconds(floor, {f"{name}-seed0": spent for name, spent in seconds.items()})
    return {"floor": floor} if suite.section == "glue" else {suite.section: {"floor": floor}}


def check(config: dict[str, Any]) -> None:
    """UserError for what can be known to be wrong before there is a model; real tasks are read, to the last line."""
    settings = build(EvalConfig, config["eval"], "eval")
    select(config["device"])
    model, label = build(ModelConfig, config["model"], "model"), f"{config['name']}'s model"
    refuse_length(settings.hyperparameters.max_length, label, position_limit(model))
    refuse_design(settings.init, label, model.attention_init != "random")
    if settings.minimal_pairs:
        read_pairs(settings.minimal_pairs)
    if settings.source == "embedded":  # they come with the corpus
        find_tasks(list(settings.tasks or ()))
        return
    suite = find_suite(settings.source, settings.data_dir, settings.tasks, config)
    for task in suite.tasks:
        suite.read(task)


def find_model(config: dict[str, Any], folder: Path) -> ModelSource:
    """The model to score."""
    if config["model_path"]:
        return open_model(config["model_path"])
    final = folder / "final"
    if not final.is_dir():
        raise UserError(
            f"{final}: no trained model; run `cramming pretrain name={config['name']}` or give model_path=<folder>"
        )
    source = open_model(final)
    trained = at(load_record(folder), "pretrain.final_sha256") if (folder / "record.json").exists() else None
    if trained not in (None, source.sha256):
        raise UserError(
            f"{final}: its weights are not those that pretraining wrote (by their SHA-256); restore them, or score the"
            f" folder under another name with model_path={final}"
        )
    return source


def refuse_length(max_length: int, label: str, limit: int | None) -> None:
    """UserError where sequences would be longer than the model has positions for."""
    if limit is not None and max_length > limit:
        raise UserError(
            f"eval.hyperparameters.max_length={max_length}: {label} has {limit} positions; set it to {limit} or less"
        )


def refuse_design(inits: Sequence[Init], label: str, designed: bool) -> None:
    """UserError where the row of a designed start is asked for and there is no design."""
    if "designed" in inits and not designed:
        raise UserError(
            f"eval.init={list(inits)}: {label} starts from plain random weights (model.attention_init=random), so"
            " designed is random here; take it out"
        )


def start_record(folder: Path, config: dict[str, Any], device: torch.device) -> None:
    """A record for a model that this suite did not pretrain; UserError where the name belongs to another model."""
    if (folder / "record.json").exists():
        record = load_record(folder)
        if "pretrain" in record:
            raise UserError(f"name={config['name']}: {folder} is a pretraining run; give another name for model_path")
        before, now = at(record, "config.model_path"), config["model_path"]
        if before and Path(before).expanduser().resolve() != expand_home(now, "model_path").resolve():
            raise UserError(
                f"model_path={now}: name={config['name']} has the scores of model_path={before}; give another name"
            )
        return
    create_run_folder(folder, config, environment(asdict(describe(device))), resume=False)


def score_model(
    folder: Path,
    source: ModelSource,
    init: Init,
    suite: Suite,
    data: Sequence[TaskData],
    settings: EvalConfig,
    device: torch.device,
    cache: dict[str, EncodedTask],
) -> dict[str, Any]:
    """All tasks and seeds from one initialisation; returns the record's section.

    glue.json holds what is the same in every repetition; the record's section adds the machine and the seconds.
    """
    machine = environment(asdict(describe(device)))  # now: while this runs, somebody may edit the code
    precision = resolve(settings.precision, device)
    numerics = {"precision": precision, "threads_per_run": settings.threads}
    protocol = {**numerics, "selection": settings.selection}
    store, hyper = Pieces(folder), settings.hyperparameters
    store.clear_leftovers()
    keys = {
        (d.task.name, seed): piece_key(d, seed, init, source, hyper, protocol, device)
        for d, seed in itertools.product(data, settings.seeds)
    }
    pieces = stored_pieces(store, keys, init)
    todo = [run for run in keys if run not in pieces]
    by_name = {d.task.name: d for d in data}
    workers = choose_workers(
        settings.workers, settings.threads, len(todo), len(settings.seeds), device, source.weight_bytes
    )
    if workers > 1:  # the longest first, so that no process is alone with a long one at the end
        todo.sort(key=lambda run: -len(by_name[run[0]].train))
    jobs = make_jobs(todo, by_name, source, init, settings, precision, device, cache)
    with Progress(f"fine-tune ({init})", hyper.epochs * sum(len(by_name[n].train) for n, _ in todo), "examples") as bar:
        for job, found in run_jobs(jobs, workers, bar.advance):
            run = (job.task, job.seed)
            pieces[run] = store.save(by_name[job.task], job.seed, keys[run], found)
            show_piece(ALL_TASKS[job.task], init, job.seed, pieces[run], f"{found.seconds:.0f} s")
    sha256 = source.sha256 if init == "pretrained" else None
    model = {"init": init, "model": source.label, "model_sha256": sha256, **numerics}
    summary = summarise(
        model, suite.name, data, pieces, settings.seeds, asdict(hyper), suite.absent, settings.selection
    )
    write_json(folder / "glue.json", summary)
    seconds = {f"{name}-seed{seed}": pieces[name, seed]["seconds"] for name, seed in keys}
    write_json(folder / "timing.json", {"environment": machine, "seconds": seconds})
    return {**with_seconds(summary, seconds), "environment": machine}


def stored_pieces(store: Pieces, keys: dict[tuple[str, int], str], init: Init) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs that an earlier, interrupted call has finished under the same settings."""
    pieces = {}
    for (name, seed), key in keys.items():
        piece = store.load(ALL_TASKS[name], seed, key)
        if piece is not None:
            pieces[name, seed] = piece
            show_piece(ALL_TASKS[name], init, seed, piece, "stored")
    return pieces


def piece_key(
    data: TaskData,
    seed: int,
    init: Init,
    source: ModelSource,
    hyper: Hyperparameters,
    protocol: dict[str, Any],
    device: torch.device,
) -> str:
    """A hash of everything that the numbers of one run depend on."""
    files = [file for file in sorted(source.folder.glob("*token*")) if file.suffix == ".json"]
    tokenizers = [file.read_text(encoding="utf-8", errors="surrogateescape") for file in files]
    config = (source.folder / "config.json").read_text(encoding="utf-8")
    machine = [FINETUNING_VERSION[init], torch.__version__, device.type, describe(device).name]
    return settings_hash(data.sha256, seed, init, source.sha256, config, tokenizers, asdict(hyper), protocol, machine)


def make_jobs(
    runs: Sequence[tuple[str, int]],
    data: dict[str, TaskData],
    source: ModelSource,
    init: Init,
    settings: EvalConfig,
    precision: Mode,
    device: torch.device,
    cache: dict[str, EncodedTask],
) -> Iterator[Job]:
    """The jobs of `runs` in order; a task is tokenized when its first job is asked for and not yet in `cache`."""
    hyper = settings.hyperparameters
    for name, group in itertools.groupby(runs, key=lambda run: run[0]):
        encoded = cache.get(name) or encode_task(
            data[name], load_encoder(source.folder, source.own, hyper.max_length, source.vocab_size)
        )
        cache[name] = encoded
        for _, seed in group:
            numerics = (precision, str(device), settings.threads)
            yield Job(name, seed, init, encoded, source, hyper, *numerics, settings.selection)


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
