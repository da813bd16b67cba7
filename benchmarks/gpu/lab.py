"""Context that all rows share: sizes, the device, the record, and the configuration of a training step."""

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from processes import LAST_SECONDS
from record import Record

from cramming import device as devices
from cramming.overrides import compose

LEAST_LIMIT = 40.0  # seconds that a row may take, whatever its estimate
SPARE_SECONDS = (
    3.0  # between the last row's estimated end and the time at which run.py ends processes
)
ANSWER_SECONDS = 10.0
TOLD = 150  # characters of a line

Result = dict[str, Any]
Spec = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """Sizes of everything; the defaults are those of a GPU.

    `shape`: overrides that make any model small. `micro`, `batch`: tokens of a micro-batch and of a step. `capped`:
    sequences of a step in 11 GiB. `square`: side of the products of the ceilings. `load`, `timed`, `burst`: seconds
    before and of a measurement, and of a ceiling. `budget`: overrides of the run that is killed behind its first
    checkpoint; it is one of steps, of which most are left to the second process whatever the starts take. `tests`:
    pytest's choice of the tests, dealt out to `shards`, beside which steps are compiled for `untimed` seconds at most.
    `factor`: what an estimated time is multiplied by.
    """

    shape: tuple[str, ...] = ()
    lengths: tuple[int, int] = (128, 512)
    micro: int = 65536
    batch: int = 262144
    capped: int = 4096
    vocabulary: int = 32768
    mode: str = "bf16"
    compiled: str = "model"
    square: int = 8192
    load: float = 3.0
    timed: float = 9.0
    burst: float = 0.2
    budget: tuple[str, ...] = ("budget.steps=60", "checkpoint.every_steps=10")
    tests: str = "not flex and not descent and not autotune"
    shards: int = 4
    untimed: float = 65.0
    factor: float = 1.0


SMALL = ("hidden_size=32", "num_layers=3", "num_heads=2", "intermediate_size=48")
TINY = Scale(
    shape=tuple(f"model.{text}" for text in SMALL),
    lengths=(16, 32),
    micro=256,
    batch=512,
    capped=16,
    vocabulary=512,
    mode="fp32",
    compiled="off",
    square=256,
    load=0.02,
    timed=0.1,
    burst=0.01,
    budget=("budget.steps=150", "checkpoint.every_steps=20"),
    tests="repeated or subset",
    shards=1,
    untimed=25.0,
    factor=0.06,
)
SCALES = {"full": Scale(), "tiny": TINY}


@dataclass(frozen=True)
class Row:
    """A measurement: its name, estimated seconds, value beside the others, and how it is told in a line.

    A row may take `patience` times its estimate, at least `least` seconds. One that `is_timed` has the device alone.
    """

    name: str
    seconds: float
    value: float
    measure: Callable[["Lab"], Result]
    tell: Callable[[Result], str]
    patience: float = 1.8
    least: float = LEAST_LIMIT
    is_timed: bool = True

    def limit(self, estimate: float) -> float:
        """Return the seconds that the row may take; `estimate` is the one corrected by what was measured so far."""
        return max(self.least, self.patience * estimate)


@dataclass
class Lab:
    """Device, files and sizes of a measurement. Times are those of `time.monotonic`; `row` is under way."""

    scale: Scale
    device: torch.device
    record: Record
    bundle: Path | None
    began: float
    deadline: float
    commit: str | None = None
    row: str = ""
    candidates: dict[str, Any] = field(default_factory=dict)  # by row, for a later row
    shared: dict[str, Any] = field(default_factory=dict)  # objects that rows hand on

    @property
    def work(self) -> Path:
        """Folder that stays on the machine."""
        return self.record.work

    @property
    def go(self) -> Path:
        """File for which processes that warm up wait before they use the device."""
        return self.work / "go"

    @property
    def memory_gb(self) -> float:
        """Memory of the GPU; 0 on a CPU."""
        return (
            devices.describe(self.device).memory_bytes / 1e9 if self.device.type == "cuda" else 0.0
        )

    @property
    def uuid(self) -> str:
        """UUID of the GPU as nvidia-smi writes it; empty on a CPU."""
        if self.device.type == "cpu":
            return ""
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def left(self) -> float:
        """Return the seconds until all must have ended."""
        return self.deadline - LAST_SECONDS - SPARE_SECONDS - time.monotonic()

    def note(self, **partial: Any) -> None:
        """Write down a phase of the row that is under way."""
        self.record.add(row=self.row, partial=partial)

    def overrides(self, model: str, length: int, packing: str = "rows") -> list[str]:
        """Return the settings of a training step of this model, or of an experiment."""
        scale = self.scale
        is_recipe = model == "best"
        source = ["experiment=best", "train.batch_ramp=null"] if is_recipe else [f"model={model}"]
        return [
            *source,
            *scale.shape,
            f"model.vocab_size={scale.vocabulary}",
            "optim=adamw",
            f"precision={scale.mode}",
            f"runtime.compile='{scale.compiled}'",
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
    ) -> Spec:
        """Return a candidate: ours or a `peer`. `rows`: sequences of a micro-batch (0: as many as the scale says)."""
        rows = rows or self.scale.micro // length
        sizes = [f"train.batch_size={rows * micro_batches}", f"train.micro_batch={rows}"]
        spec = {
            "settings": settings(*self.overrides(model, length, packing), *sizes, *more),
            "vocab_size": self.scale.vocabulary,
            "device": self.device.type,
            "name": peer or "ours",
        }
        if peer:
            spec |= {"peer": peer, "compile": self.scale.compiled != "off"}
        return spec


@functools.cache
def settings(*overrides: str) -> dict[str, Any]:
    """Return the root configuration with these overrides; it must not be changed."""
    return compose(overrides)


def answers(device: torch.device, seconds: float = ANSWER_SECONDS) -> bool:
    """Return whether the device still computes for this process: after an illegal access it does not."""
    sums: list[float] = []

    def compute() -> None:
        sums.append(torch.ones(2, device=device).sum().item())

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    thread.join(seconds)  # a device that hangs never answers
    return sums == [2.0]
