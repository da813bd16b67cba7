"""What all rows share: the sizes, the device, and how a training step is configured."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cramming.overrides import compose

MODELS = ("bert-base", "crammed-bert", "modern")


@dataclass(frozen=True)
class Scale:
    """Sizes. `shape`: overrides that make any of the models small; `micro`, `batch`: tokens of a micro-batch and step.

    `seconds` is what a row's estimated time, which is that on an H200, is multiplied by. `capped`: sequences a step in
    11 GiB. `gate`: settings of the gate's loss curves. `budget` is that of the run that is killed, after
    `kill_after` seconds; `examples`, `epochs` are of fine-tuning. `contest`: size and budget of
    stage 4's two recipes, `scoring` how they are fine-tuned.
    """

    shape: tuple[str, ...]
    lengths: tuple[int, int]
    micro: int
    batch: int
    capped: int
    vocabulary: int
    mode: str
    compiled: str
    steps: int
    rounds: int
    trick_batch: int
    gate: tuple[str, ...]
    budget: tuple[str, ...]
    kill_after: float
    epochs: int
    examples: int | None
    contest: tuple[str, ...]
    scoring: tuple[str, ...]
    seconds: float


SMALL = (
    "model.hidden_size=32",
    "model.num_layers=3",
    "model.num_heads=2",
    "model.intermediate_size=48",
)
TINY_GATE = (
    "bench.gate_steps=60",
    "bench.gate_vocab_size=64",
    "bench.gate.train.batch_size=16",
    "optim.lr=0.01",
    "bench.gate.train.micro_batch=16",
    "bench.gate.train.sequence_length=32",
    "bench.gate.optim.lr=0.01",
    "bench.gate.model.hidden_size=32",
)
SCALES = {
    "full": Scale(
        shape=(),
        lengths=(128, 512),
        micro=65536,
        batch=262144,
        capped=4096,
        vocabulary=32768,
        mode="bf16",
        compiled="model",
        steps=4,
        rounds=3,
        trick_batch=128,
        gate=(),
        epochs=2,
        kill_after=75,
        budget=("budget.hours=0.05", "checkpoint.every_minutes=0.4"),
        examples=None,
        seconds=1.0,
        contest=(
            "scale=110M",
            "budget.minutes=8",
            "train.batch_size=2048",
            "train.batch_ramp={start: 0.25, until: 0.6}",
            "train.validations=16",
            "train.validation_tokens=131072",
        ),
        scoring=("eval.tasks=[rte,mrpc,cola]", "eval.seeds=[0,1,2]"),
    ),
    "tiny": Scale(
        shape=SMALL,
        lengths=(16, 32),
        micro=256,
        batch=512,
        capped=16,
        vocabulary=512,
        mode="fp32",
        compiled="off",
        steps=2,
        rounds=1,
        trick_batch=4,
        gate=TINY_GATE,
        epochs=1,
        kill_after=0,
        budget=("budget.steps=60", "checkpoint.every_steps=10"),
        examples=64,
        seconds=0.1,
        contest=(
            "scale=10M",
            *SMALL,
            "model.max_length=128",
            "budget.steps=20",
            "train.batch_size=16",
            "train.micro_batch=8",
            "train.batch_ramp=null",
            "train.validations=2",
            "train.validation_tokens=1024",
        ),
        scoring=("eval.tasks=[rte]", "eval.seeds=[0]", "eval.hyperparameters.epochs=1"),
    ),
}


def answers(device: torch.device) -> bool:
    """Whether the device still computes for this process: after an illegal access it does not."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except RuntimeError:
        return False


@functools.cache
def settings(*overrides: str) -> dict[str, Any]:
    """The root configuration with these overrides; not to be changed."""
    return compose(overrides)


@dataclass(frozen=True)
class Lab:
    """Where and at which size it is measured. `deadline` is a time of `time.time`.

    `out` is the folder that comes back; `work` stays on the machine.
    """

    scale: Scale
    device: torch.device
    out: Path
    work: Path
    bundle: Path | None
    deadline: float
    shared: dict[str, Any] = field(default_factory=dict)  # what rows of one process hand on

    def left(self) -> float:
        """Seconds until all must have ended."""
        return self.deadline - time.time()

    def left_by(self, row: str, *names: str) -> Path:
        """What another row has left in `--work`."""
        found = self.work.joinpath(*names)
        assert found.exists(), (
            f"{found} is not there: the row '{row}' makes it. Keep --work between the calls; where it is lost, name"
            f" another --out, so that the row is measured again"
        )
        return found

    def overrides(self, model: str, length: int, packing: str = "rows") -> list[str]:
        """A training step of this model."""
        scale = self.scale
        return [
            f"model={model}",
            *scale.shape,
            f"model.vocab_size={scale.vocabulary}",
            "optim=adamw",
            f"precision={scale.mode}",
            f"runtime.compile={scale.compiled}",
            f"train.sequence_length={length}",
            f"train.packing={packing}",
        ]

    def spec(
        self,
        model: str,
        length: int,
        *more: str,
        packing: str = "rows",
        peer: str | None = None,
        rows: int = 0,
        micro_batches: int = 1,
    ) -> dict[str, Any]:
        """A candidate of a comparison: ours, or a `peer`; `rows` sequences a micro-batch (0: the scale's tokens)."""
        rows = rows or self.scale.micro // length
        sizes = [f"train.batch_size={rows * micro_batches}", f"train.micro_batch={rows}"]
        found = settings(*self.overrides(model, length, packing), *sizes, *more)
        spec = {
            "settings": found,
            "vocab_size": self.scale.vocabulary,
            "device": self.device.type,
            "name": peer or "ours",
        }
        return spec | ({"peer": peer, "compile": self.scale.compiled != "off"} if peer else {})


@dataclass(frozen=True)
class Row:
    """One line of the result: a name, what it takes on an H200 in seconds, by estimate, and how it is measured."""

    name: str
    seconds: float
    measure: Callable[[], Mapping[str, Any]]
