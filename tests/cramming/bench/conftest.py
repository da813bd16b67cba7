"""The gate at a size that takes a second or two per curve, in this process; the curves of references are shared."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cramming.bench import tricks
from cramming.bench.gate import Curves
from cramming.bench.tricks import Trick
from cramming.bench.verdicts import Verdict
from cramming.bench.worker import Candidate, Worker
from cramming.optim.build import LOW_BIT

STEPS = 60
SMALL = {
    "model.hidden_size": 32,
    "model.num_layers": 3,
    "model.num_heads": 2,
    "model.intermediate_size": 64,
    "train.batch_size": 16,
    "train.micro_batch": 16,
    "train.sequence_length": 32,
    "optim.lr": 4e-3,  # at 1e-2 rounding alone carries far with some versions of torch
}
WIDE = {
    "model.hidden_size": 64,
    "model.num_layers": 1,
}  # smaller matrices' moments stay fp32 in torchao
FEW = {  # since products in fp16 are slow on a CPU
    "model.num_layers": 1,
    "train.batch_size": 8,
    "train.micro_batch": 8,
    "optim.clip": 4.0,
}


class SmallGate(Curves):
    """The curves of `bench`, but for the worker's process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings, STEPS, 64, "cpu", Worker)
        self._sound: dict[str, Verdict] = {}

    def losses(self, specs: Sequence[dict[str, Any]]) -> list[list[float]]:
        # torchao compiles its update, which takes a minute.
        eager = specs[0]["settings"]["optim"]["name"] in LOW_BIT
        with torch.compiler.set_stance("force_eager" if eager else "default"):
            return [Candidate(spec, torch.device("cpu")).run(0, self.steps)[1] for spec in specs]

    def sound(self, trick: Trick) -> Verdict:
        """The verdict on a trick, and with it what it is judged by: measured once, and before a fault is planted."""
        if trick.name not in self._sound:
            self._sound[trick.name] = self.verdict(trick)
        return self._sound[trick.name]


def small_gate(compose: Callable[..., dict[str, Any]], changes: tricks.Settings) -> SmallGate:
    return SmallGate(tricks.changed(compose(), {**SMALL, **changes}))


@pytest.fixture(scope="session")
def small(compose: Callable[..., dict[str, Any]]) -> SmallGate:
    """Three layers, of which activation offload moves one."""
    return small_gate(compose, {})


@pytest.fixture(scope="session")
def halved(compose: Callable[..., dict[str, Any]]) -> SmallGate:
    """Half the rows, one layer, and gradients that are never so large that they are clipped."""
    return small_gate(compose, FEW)


@pytest.fixture(scope="session")
def wide(compose: Callable[..., dict[str, Any]]) -> SmallGate:
    """One layer, twice as wide."""
    return small_gate(compose, WIDE)
