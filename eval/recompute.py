"""Proofs from the final weights: the last validation is recomputed, and one fine-tuning is repeated.

Both need the inputs of these numbers: the corpus, and the files of the tasks. They detect an invented log: losses
that no weights have, and predictions that no fine-tuning gives.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cramming.config import UserError, build, file_sha256
from cramming.data.batches import ALL_MASK, BERT_MASKING, Batch
from cramming.data.run_data import RunData, fit_to_corpus
from cramming.data.suites import SUITES
from cramming.device import describe, select
from cramming.model.load import load_masked_lm
from cramming.precision import Precision, PrecisionConfig
from cramming.recipe import Config
from cramming.record_schema import Record, Scores
from cramming.scores import run_name
from eval.finetune.baselines import METHODS
from eval.finetune.config import Hyperparameters
from eval.finetune.encode import EncodedTask, encode_tasks
from eval.finetune.loop import FINETUNING_VERSION, TaskRun, finetune
from eval.finetune.models import open_model
from eval.rescore import predictions_file
from eval.rules.evidence import predicted
from eval.tasks.datasets import TaskData, examples_sha256, in_one_order
from eval.tasks.locate import read_task
from eval.tasks.metrics import score

# Largest relative difference of a loss that other hardware, kernels or compilation explain
TOLERANCE = 1e-3
TOLERANCE_FP8 = 1e-2  # for a run with matrix products in 8 bits
ROWS = 16  # sequences per micro-batch if the run's number is not known
# Standard deviations by which a fine-tuning on other hardware may lie outside the range of the seeds' scores
DEVIATIONS = 3.0
LEAST_DEVIATION = 0.01  # smallest deviation that is assumed, in the unit of the metric


@dataclass(frozen=True)
class Outcome:
    """Result of one proof: what was compared, or why nothing was (`words`), and the difference if there is one."""

    words: str
    problem: str | None = None


def other_files(weights: Path, record: Record) -> list[str]:
    """Return a message for each file of a model folder that differs from the exported ones."""
    written = record.training.final_files or {}
    problems: list[str] = []
    for name, sha256 in sorted(written.items()):
        file = weights / name
        if not file.is_file():
            problems.append(f"{weights.name}/{name}: missing")
        elif file_sha256(file) != sha256:
            problems.append(f"{weights.name}/{name}: not as training exported it (by SHA-256)")
    present = sorted(file.name for file in weights.iterdir() if file.is_file())
    problems += [f"{weights.name}/{name}: not exported" for name in present if name not in written]
    return problems


def recompute_validation(weights: Path, record: Record, corpus: Path) -> Outcome:
    """Compute the last validation from the weights and the held-out text, and compare it with the log.

    Raises UserError for unusable settings.
    """
    recorded = record.training.validation
    if recorded.loss is None:
        return Outcome("validation not computed again: the model has no head for masked tokens")
    config, data = _config_and_data(record, corpus)
    device = select("auto")
    precision = _precision(record, config, device)
    model = load_masked_lm(weights).to(device).eval()
    precision.convert(model.encoder)
    micro_batch = record.training.micro_batch or config.train.micro_batch
    rows = micro_batch if isinstance(micro_batch, int) else ROWS
    recorded_losses = {BERT_MASKING: recorded.loss, ALL_MASK: recorded.all_mask_loss}
    tolerance = TOLERANCE_FP8 if record.training.precision == "fp8" else TOLERANCE
    compared: list[str] = []
    problems: list[str] = []
    for masking, logged in recorded_losses.items():
        batches = data.held_out.batches(masking, rows)
        targets = sum(batch.num_targets for batch in batches)
        loss = _summed_loss(model, batches, precision, device) / targets
        comparison = f"{loss:.6g} computed again, {logged} in the log"
        compared.append(comparison)
        if targets != recorded.targets:
            problems.append(f"{targets} targets, in the log {recorded.targets}")
        elif logged is None or not is_near(loss, logged, tolerance * logged):
            problems.append(comparison)
    words = f"validation losses {' and '.join(compared)}"
    return Outcome(words, f"validation loss {problems[0]}" if problems else None)


def is_near(value: float, recorded: float, tolerance: float) -> bool:
    """Return whether a recomputed value is within `tolerance` of the recorded one; a value that is NaN is not."""
    return abs(value - recorded) <= tolerance


@torch.inference_mode()
def _summed_loss(
    model: torch.nn.Module, batches: Sequence[Batch], precision: Precision, device: torch.device
) -> float:
    total = 0.0
    for batch in batches:
        with precision.autocast():
            loss_sum, *_ = model(*batch.to(device).inputs)
        total += float(loss_sum)
    return total


def _config_and_data(record: Record, corpus: Path) -> tuple[Config, RunData]:
    """Return the run's configuration, fitted to this copy of its corpus, and the data; UserError for another corpus."""
    config = Config.of(record.config)
    data = RunData.open(corpus, config, verify=False)
    if data.corpus.manifest_sha256 != record.corpus.manifest_sha256:
        raise UserError(f"--corpus={corpus}: not the corpus of this run. Give that one.")
    return config.replace(model=fit_to_corpus(config.model, data.corpus)), data


def _precision(record: Record, config: Config, device: torch.device) -> Precision:
    """Return the run's number format, or fp32 if this device is of another kind."""
    same_kind = record.environment.device.kind == device.type
    if same_kind:
        return Precision(config.precision.replace(mode=record.training.precision), device)
    precision = config.precision
    fp32 = PrecisionConfig(mode="fp32", tf32=precision.tf32, residual=precision.residual)
    return Precision(fp32, device)


def repeat_fine_tuning(
    folder: Path, weights: Path, record: Record, tasks: Path, draw: random.Random
) -> Outcome:
    """Fine-tune one drawn task and seed from the weights, and compare its predictions with the stored ones.

    On a CPU of the same name with the same version of torch they must be equal, because the number of threads is set to
    that of the run. Elsewhere, or without stored predictions, the score may lie outside the range of the seeds' scores
    by `DEVIATIONS` standard deviations.
    """
    section = record.trained
    if section is None:
        return Outcome("nothing fine-tuned again: no scores of the trained model")
    names = {task.task for task in section.tasks.values()}
    runs = itertools.product(names, set(section.seeds))
    name, seed = draw.choice(sorted(runs))
    lines = [line for line in record.history if (line.task, line.seed) == (name, seed)]
    if {line.version for line in lines} != {FINETUNING_VERSION["pretrained"]}:
        return Outcome(f"{name} seed {seed} not fine-tuned again: made by another version")
    data = _task_data(tasks, section, name)
    if isinstance(data, str):
        return Outcome(f"{name} seed {seed} not fine-tuned again: {data}")
    device = select("auto")
    predictions = _finetune(weights, section, data, seed, device)
    file = predictions_file(folder, section.predictions[run_name(name, seed)])
    compares_predictions = _is_same_machine(section, device) and file.is_file()
    problems: list[str] = []
    for split in data.scored:
        entry = split.source.entry
        if compares_predictions:
            problems += differing_predictions(
                entry, predicted(file, f"dev.{entry}"), predictions[entry]
            )
            continue
        assert split.labels is not None
        values = score(data.task.metrics, predictions[entry], split.labels).values
        problems += _outside(section, entry, values[data.task.main_metric])
    how = "prediction by prediction" if compares_predictions else "within the seeds' spread"
    words = f"{name} seed {seed} fine-tuned again, compared {how}"
    if problems:
        return Outcome(words, f"{name} seed {seed} fine-tuned again: {'; '.join(problems)}")
    return Outcome(words)


def _task_data(tasks: Path, section: Scores, name: str) -> TaskData | str:
    """Return the task's data, or a message if the files differ from those that the run was scored on."""
    suites = {str(suite): known for suite, known in SUITES.items()}
    task = suites[section.suite].tasks[name]
    data = replace(in_one_order(read_task(tasks, task)), blind=())
    for split in data.scored:
        stored = section.tasks.get(split.source.entry)
        if stored is None or stored.data_sha256 != examples_sha256(data.train, split):
            return f"the files in {tasks} are not those that were scored (by SHA-256)"
    return data


def _finetune(
    weights: Path, section: Scores, data: TaskData, seed: int, device: torch.device
) -> dict[str, np.ndarray]:
    hyper = build(Hyperparameters, section.hyperparameters, "hyperparameters")
    source = open_model(weights)
    encoded: dict[str, EncodedTask] = {}
    encode_tasks([data], source, hyper.max_length, encoded)
    mode: Any = section.precision
    threads = section.threads_per_run or 1
    name = data.task.name
    run = TaskRun(
        data.task, seed, "pretrained", encoded[name], source, hyper, mode, str(device), threads
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return finetune(run).scored
    finally:
        torch.set_num_threads(before)


def recompute_baselines(record: Record, tasks: Path, draw: random.Random) -> Outcome:
    """Compute the baselines without an encoder for one drawn task, and compare their scores with the log."""
    if not record.baselines:
        return Outcome("no baseline scored")
    first = next(iter(record.baselines.values()))
    name = draw.choice(sorted({task.task for task in first.tasks.values()}))
    problems: list[str] = []
    for key, (_, predict) in METHODS.items():
        section = record.baselines.get(key)
        if section is None:
            continue
        data = _task_data(tasks, section, name)
        if isinstance(data, str):
            return Outcome(f"baselines of {name} not computed again: {data}")
        for split, predictions in zip(data.scored, predict(data), strict=True):
            assert split.labels is not None
            values = score(data.task.metrics, predictions, split.labels).values
            value = values[data.task.main_metric]
            stored = section.tasks[split.source.entry].main.per_seed[0]
            # Other versions of scikit-learn may converge to another point.
            if stored is not None and not is_near(value, stored, LEAST_DEVIATION):
                problems.append(
                    f"{section.init} {split.source.entry}: {value:.4g}, not {stored:.4g}"
                )
    words = f"baselines of {name} computed again"
    return Outcome(words, "; ".join(problems) or None)


def _is_same_machine(section: Scores, device: torch.device) -> bool:
    """Return whether predictions must be equal. On a GPU they need not be, because sums have no fixed order."""
    made_on = section.environment
    if made_on is None or device.type != "cpu":
        return False
    here = asdict(describe(device))
    same_device = (made_on.device.kind, made_on.device.name) == (here["kind"], here["name"])
    return same_device and made_on.torch == torch.__version__


def differing_predictions(entry: str, stored: np.ndarray, predictions: np.ndarray) -> list[str]:
    """Return a message if stored predictions [N] are not bitwise those of the repeated fine-tuning."""
    if np.array_equal(stored, predictions, equal_nan=True):
        return []
    if stored.shape != predictions.shape:
        return [f"{len(stored)} predictions of {entry}, not {len(predictions)}"]
    differ = int((stored != predictions).sum())
    return [f"{differ} of {len(stored)} predictions of {entry} differ"]


def _outside(section: Scores, entry: str, value: float) -> list[str]:
    """Return a message if a score lies too far outside the range of the seeds' scores."""
    metric = section.tasks[entry].main
    known = [each for each in metric.per_seed if each is not None]
    if not known:
        return []
    slack = DEVIATIONS * max(metric.std or 0.0, LEAST_DEVIATION)
    if min(known) - slack <= value <= max(known) + slack:
        return []
    return [f"{entry} scores {value:.4g}, the seeds {min(known):.4g} to {max(known):.4g}"]
