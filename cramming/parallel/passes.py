"""Passes side by side: on a CPU each share of a micro-batch is computed by cores of its own.

One pass over all cores makes them wait for one another at the end of every operation, and some operations use one core
only. Passes that have nothing to do with each other wait once, at the end, where their gradients are summed. Until then
each pass has a set of gradients of its own, beside those of the micro-batches before.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cramming.data.batches import Batch
from cramming.model.config import ModelConfig
from cramming.parallel.apply import MemoryConfig
from cramming.precision import Mode
from cramming.runtime import RuntimeConfig

MAX_PASSES = 2  # each has gradients of its own; more were not measured
MIN_TOKENS = 512  # of a pass: fewer make narrow matrix products


class Passed(NamedTuple):
    """Of one pass: summed loss, hits, and the gradients of the parameters (None where one had no part)."""

    loss_sum: Tensor
    correct: Tensor
    gradients: tuple[Tensor | None, ...]


def can_share(
    runtime: RuntimeConfig, memory: MemoryConfig, model: ModelConfig, mode: Mode, device: torch.device
) -> bool:
    """Whether steps can be computed so, and are to be.

    Not where something is shared by all passes of a model: the generator behind dropout, autocast's copies, the queues
    of offloading, compiled code, a gradient that is used as soon as it is made.
    """
    alone = memory.update_in_backward or memory.offload_activations or memory.offload_weights
    plain = mode == "fp32" and runtime.compile == "off" and not (model.dropout or model.attention_dropout)
    return runtime.side_by_side and device.type == "cpu" and plain and not alone


def number_of_passes(rows: int, row_length: int, threads: int) -> int:
    """How many passes share `rows` sequences of `row_length` tokens on so many threads: all get the same of both."""
    fits = [n for n in range(1, MAX_PASSES + 1) if rows % n == 0 and threads % n == 0]
    return max(n for n in fits if n == 1 or rows * row_length >= n * MIN_TOKENS)


class SideBySide:
    """`accumulate` computes a micro-batch in passes side by side."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._threads = ThreadPoolExecutor(MAX_PASSES, thread_name_prefix="pass")

    def number(self, rows: int, row_length: int) -> int:
        """How many passes share so many sequences here."""
        return number_of_passes(rows, row_length, torch.get_num_threads())

    def accumulate(
        self, batch: Batch, forward: Callable[[Batch], tuple[Tensor, Tensor]], targets: float
    ) -> tuple[Tensor, Tensor]:
        """Add the gradients of the micro-batch's summed loss over `targets`; that sum and the hits.

        Gradients are summed in the order of the shares, so the result does not depend on which pass is done first.
        """
        number = self.number(batch.rows, batch.row_length)
        one = partial(self._one, forward, targets, torch.get_num_threads() // number)
        under_way = [self._threads.submit(one, share) for share in batch.split(number)]
        wait(under_way)  # all of them, before one that failed ends the step: nothing computes on behind it
        passed = [share.result() for share in under_way]
        for parameter, *gradients in zip(self.parameters, *(p.gradients for p in passed)):
            found = [g for g in (parameter.grad, *gradients) if g is not None]
            for gradient in found[1:]:
                found[0].add_(gradient)
            parameter.grad = found[0] if found else None
        return torch.stack([p.loss_sum for p in passed]).sum(), torch.stack([p.correct for p in passed]).sum()

    def _one(
        self, forward: Callable[[Batch], tuple[Tensor, Tensor]], targets: float, threads: int, batch: Batch
    ) -> Passed:
        torch.set_num_threads(threads)  # of operations that the calling thread begins
        loss_sum, correct = forward(batch)
        gradients = torch.autograd.grad(loss_sum / targets, self.parameters, allow_unused=True)
        return Passed(loss_sum.detach(), correct, gradients)
