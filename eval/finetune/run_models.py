"""Models of a run to score: its final model, and with `--checkpoint` those that `checkpoint.keep_at` kept.

The share of the budget that a checkpoint stands for is that of the log's row of its last step.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from cramming import checkpoint
from cramming.config import file_sha256, require
from cramming.invocation import Invocation
from cramming.model.export import save_weights
from cramming.model.heads import MaskedLM
from cramming.model.load import load_exported
from cramming.progress import say
from cramming.record import WITHOUT_MODEL, is_run, load_record, read_run
from cramming.runlog import RUN_LOG, Saved, training_of
from eval.finetune.models import ModelSource, altered, open_model

MAX_DISTANCE = 0.1  # between the share that was asked for and that of the checkpoint


def find_model(invocation: Invocation, model: str | None) -> ModelSource:
    """Return the model to score; raise UserError if a run has none, or not the one that it trained."""
    if model:
        return open_model(model)
    folder, name = invocation.run_folder, invocation.name
    final = folder / "final"
    pretrain = load_record(folder).get("pretrain", {}) if is_run(folder) else {}
    status = pretrain.get("status")
    hint = f"Run `cramming pretrain --name {name}` or give --model <folder>."
    if status in WITHOUT_MODEL:
        hint = f"The run is {status}. Train under another name, or give --model <folder>."
    require(final.is_dir(), f"{final}: no trained model. {hint}")
    require(
        status == "finished",
        f"{final}: {folder / RUN_LOG} has no finished pretraining. Finish it with `cramming pretrain"
        f" --resume`, or score the folder under another name with --model {final}.",
    )
    source = open_model(final)
    wrong = altered(pretrain["final_files"], source.files)
    require(
        not wrong,
        f"{final}/{wrong}. Restore the file, or score the folder under another name with --model {final}.",
    )
    return source


@contextmanager
def open_checkpoint(folder: Path, share: float) -> Iterator[ModelSource]:
    """Yield the kept checkpoint of a finished run that is nearest to a share of its budget, as a model.

    Raises UserError if no kept checkpoint is near.
    """
    saved = nearest_checkpoint(folder, share)
    with written_model(folder, saved) as model:
        source = open_model(model)
        path = checkpoint.path_of(folder / "checkpoints", saved)
        yield replace(source, label=str(path), checkpoint=saved.sha256)


def nearest_checkpoint(folder: Path, share: float) -> Saved:
    """Return the kept checkpoint of a run that is nearest to a share of its budget; raise UserError if none is near."""
    training = training_of(read_run(folder))
    progress = {0: 0.0} | {row.step: row.progress for row in training.steps}
    shares = {}
    for saved in training.saved:
        if saved in training.retained and saved.steps in progress and is_there(folder, saved):
            shares[saved] = progress[saved.steps]
    listed = ", ".join(f"{value:.3f}" for value in sorted(shares.values()))
    require(
        shares,
        f"--checkpoint={share}: {folder} has no kept checkpoint. checkpoint.keep_at=[{share}] keeps it in a new run.",
    )
    nearest = min(shares, key=lambda saved: abs(shares[saved] - share))
    require(
        abs(shares[nearest] - share) <= MAX_DISTANCE,
        f"--checkpoint={share}: {folder} has checkpoints at {listed} of its budget. Give one of these.",
    )
    say(f"{folder}: checkpoint after {nearest.steps} steps, at {shares[nearest]:.1%} of the budget")
    return nearest


def is_there(folder: Path, saved: Saved) -> bool:
    """Return whether the files of a checkpoint and of the final model exist."""
    path = checkpoint.path_of(folder / "checkpoints", saved)
    return path.is_file() and (folder / "final").is_dir()


@contextmanager
def written_model(folder: Path, saved: Saved) -> Iterator[Path]:
    """Yield a temporary model folder of a checkpoint, with the tokenizer and the configuration of the final model.

    With `train.average` the weights are the mean at that time, as the final ones are. Raises UserError if the file is
    not as it was saved.
    """
    final = folder / "final"
    path = checkpoint.path_of(folder / "checkpoints", saved)
    require(
        file_sha256(path) == saved.sha256,
        f"{path}: not as the run saved it (by its SHA-256). Restore the file.",
    )
    state = checkpoint.read(path)
    weights = state["model"]
    average = state.get("average", {})
    if average.get("count"):
        parameters = {tensor.data_ptr(): tensor for tensor in weights.values()}  # each once
        for tensor, mean in zip(parameters.values(), average["means"], strict=True):
            tensor.copy_(mean)
    model = load_exported(final)
    prefix = "" if isinstance(model, MaskedLM) else "encoder."
    model.load_state_dict({name: weights[prefix + name] for name in model.state_dict()})
    with TemporaryDirectory(prefix="cramming-") as temporary:
        model_folder = Path(temporary) / path.stem
        shutil.copytree(final, model_folder)
        save_weights(model, model_folder)
        yield model_folder
