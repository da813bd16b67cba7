"""All fine-tuning runs of one model from one initialisation: each done once, kept, summarised and shown.

A finished run is stored (`eval.finetune.store`) under a key of everything that its numbers depend on. An interrupted
scoring therefore goes on at the first run that is missing, and a run whose conditions have changed is done again. Of
the trained model, which competes, the first result stands, whatever machine it was made on: another of the same
settings and seed would be one more to choose from (R20).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cramming.config import require, settings_hash
from cramming.data.task_files import TASKS, Task
from cramming.device import describe
from cramming.environment import environment
from cramming.precision import resolve
from cramming.progress import Progress, say
from eval.finetune import history
from eval.finetune.config import SELECTION, EvalConfig, Hyperparameters, Init
from eval.finetune.encode import EncodedTask, encode_tasks
from eval.finetune.loop import FINETUNING_VERSION, Predictions, TaskRun
from eval.finetune.models import ModelSource
from eval.finetune.store import RunStore, is_subset, summarise, with_seconds, write_json
from eval.finetune.workers import choose_workers, run_all
from eval.tasks.datasets import TaskData
from eval.tasks.locate import FoundSuite


def score_model(
    folder: Path,
    run: Path,
    source: ModelSource,
    init: Init,
    suite: FoundSuite,
    data: Sequence[TaskData],
    settings: EvalConfig,
    device: torch.device,
    encoded: dict[str, EncodedTask],
) -> dict[str, Any]:
    """All tasks and seeds from one initialisation, kept in `folder`; returns the section for the record of `run`.

    glue.json holds what is the same in every repetition; the record's section adds the machine, the seconds,
    `conditions` by task, without which numbers are not compared, and how many lines of the run's history came before.
    What is fine-tuned for GLUE or the embedded tasks is written into that history.
    """
    machine = environment(
        asdict(describe(device))
    )  # now: while this runs, somebody may edit the code
    hyper, competes = settings.hyperparameters, init == "pretrained" and not settings.sweep
    precision = resolve(settings.precision, device)
    numerics = {"precision": precision, "threads_per_run": settings.threads}
    sha256 = source.sha256 if init == "pretrained" else None
    made_with = {"hyperparameters": asdict(hyper), "selection": SELECTION, **numerics}
    by = {"model_sha256": sha256, "git": machine["git"]}
    past = history.Scoring(run, suite.name, init, made_with, FINETUNING_VERSION[init], by)
    # A sweep compares its points: each on one machine.
    store = (
        RunStore(folder, past, anywhere=competes) if suite.section == "glue" else RunStore(folder)
    )
    protocol = {**numerics, "selection": "last"}

    def stored(d: TaskData) -> int:
        asked = conditions(d, source, init, protocol, machine)
        return sum(
            store.load(d, seed, key_of(asked, hyper, seed)) is not None for seed in settings.seeds
        )

    # A task begun with its test sets keeps them, even if predict_test is now false: nothing is fine-tuned twice.
    data = [max(d, d.whole, key=stored) if d.unasked else d for d in data]
    by_name = {d.task.name: d for d in data}
    same = {d.task.name: conditions(d, source, init, protocol, machine) for d in data}
    keys = {
        (name, seed): key_of(same[name], hyper, seed)
        for name, seed in itertools.product(same, settings.seeds)
    }
    results: dict[tuple[str, int], dict[str, Any]] = {}
    for (name, seed), key in keys.items():
        result = store.load(by_name[name], seed, key)
        if result is not None:  # of an earlier, interrupted call
            results[name, seed] = result
            show_result(
                TASKS[name],
                init,
                seed,
                result,
                "stored" if result["key"] == key else "stored, made elsewhere",
            )
    todo = [(name, seed) for name, seed in keys if (name, seed) not in results]
    encode_tasks([by_name[name] for name, _ in todo], source, hyper.max_length, encoded)
    require(
        hyper.pooling != "pairs"
        or all(
            (encoded[name].train.types_T == 1).any()
            for name, _ in todo
            if len(TASKS[name].text) > 1
        ),
        f"{source.folder}: its tokenizer does not tell a second text from a first (by token types), which"
        " eval.hyperparameters.pooling=pairs compares; take mean or cls",
    )
    if todo and competes:  # a sweep is a choice by what it is, and its record says so
        warn_of_choices(
            past, [pair for pair in todo if not is_subset(suite.name, by_name[pair[0]])]
        )
    runs = [
        TaskRun(
            name, seed, init, encoded[name], source, hyper, precision, str(device), settings.threads
        )
        for name, seed in todo
    ]
    for done, found in fine_tune(runs, settings, device):
        result = store.save(by_name[done.task], done.seed, keys[done.task, done.seed], found)
        results[done.task, done.seed] = result
        show_result(TASKS[done.task], init, done.seed, result, f"{found.seconds:.0f} s")
    model = {
        "init": init,
        "model": source.label,
        "model_sha256": sha256,
        "model_files": source.files,
        **numerics,
    }
    summary = summarise(
        model, suite.name, data, results, settings.seeds, asdict(hyper), suite.absent
    )
    seconds = {f"{name}-seed{seed}": results[name, seed]["seconds"] for name, seed in keys}
    write_json(folder / "glue.json", summary)
    write_json(folder / "timing.json", {"environment": machine, "seconds": seconds})
    more: dict[str, Any] = {"environment": machine, "history_entries": past.entries()}
    more["conditions"] = {
        name: made_on(found, [results[name, seed]["key"] for seed in settings.seeds])
        for name, found in same.items()
    }
    if suite.corpus_sha256:
        more["tasks_corpus_sha256"] = suite.corpus_sha256
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
    runs: Sequence[TaskRun], settings: EvalConfig, device: torch.device
) -> Iterator[tuple[TaskRun, Predictions]]:
    """Each of `runs`, which are of one model, as it is done."""
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
    protocol: Mapping[str, Any],
    machine: Mapping[str, Any],
) -> str:
    """A hash of what a task's numbers depend on beside hyperparameters and seed; behind a hyphen that of what they are
    made on: versions of libraries and the device."""
    stock = not source.own or "tokenizer.json" not in source.settings
    versions = [
        machine[name] for name in ("torch", "tokenizers", *(("transformers",) if stock else ()))
    ]
    device = [machine["device"][key] for key in ("kind", "name")]
    asked = (data.sha256, init, source.sha256, source.settings, protocol, FINETUNING_VERSION[init])
    types = (
        () if source.own else ("token types",)
    )  # which other models had not, where the tokenizer hides them
    return f"{settings_hash(*asked, *types)}-{settings_hash(versions, device)}"


def key_of(conditions: str, hyper: Hyperparameters, seed: int) -> str:
    """The key of one run: the conditions with hyperparameters and seed."""
    asked, _, place = conditions.partition("-")
    return f"{settings_hash(asked, asdict(hyper), seed)}-{place}"


def made_on(conditions: str, keys: Sequence[str]) -> str:
    """The conditions with what the runs with these keys were made on."""
    places = sorted({key.partition("-")[2] for key in keys})
    return f"{conditions.partition('-')[0]}-{'-'.join(places)}"


def show_result(task: Task, init: Init, seed: int, result: Mapping[str, Any], remark: str) -> None:
    """One line per finished run and entry."""
    for source in task.scored:
        if found := result["entries"].get(source.entry):
            values = ", ".join(
                f"{name} {'-' if value is None else f'{100 * value:.1f}'}"
                for name, value in found["metrics"].items()
            )
            remarks = "; ".join([remark, *found["problems"], *found["notes"]])
            say(f"{source.title:<8} {init} seed {seed}: {values} ({remarks})")
