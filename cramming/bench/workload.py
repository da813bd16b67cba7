"""What a candidate of a comparison trains: synthetic text, shapes and learning rate; and our own candidate.

A specification is a table that can be JSON:

    {"name": "bf16", "settings": {...}, "vocab_size": 512, "device": "cpu", "micro_batches": null}

Optional: `memory_gb` limits the device's memory, `perturbed` (relative size, seed) moves the starting weights, and
`repeat_skipped` repeats a step that changed no weight, as fp16 skips some until its loss scale fits.
"""

import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cramming import device as devices
from cramming.checks import Config
from cramming.data.batches import Batch, BatchSource, made_ahead
from cramming.data.corpus import TokenStream
from cramming.data.masking import Masker, ObjectiveConfig
from cramming.device import prepare_heap
from cramming.engine import build_engine
from cramming.model.config import flops_per_token
from cramming.parallel.mesh import Mesh
from cramming.plan.micro_batch import find_micro_batch

Spec = Mapping[str, Any]
WARMUP_STEPS = 20  # of the learning rate
SPECIAL = ("pad", "unk", "cls", "sep", "mask")
TOPICS = 4


class Workload:
    """What all candidates share: tokens, shapes, learning rate, and how a step is timed.

    A step's seconds run from the end of the step before to its own synchronised end, so masking is on everyone's clock.
    """

    precision: str
    micro_batches = 1

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.device = device
        config = Config.of(spec["settings"])
        model, train = replace(config.model, vocab_size=spec["vocab_size"]), replace(config.train, batch_ramp=None)
        self.config = config = replace(config, model=model, train=train)
        self.train, self.objective, self.optim = config.train, config.objective, config.optim
        length, last_layer = self.train.sequence_length, config.attention.last_layer
        self.flops_per_token = flops_per_token(config.model, length, config.targets_per_row / length, last_layer)
        self.source = topic_batches(
            self.objective, spec["vocab_size"], length, self.train.packing, self.train.batch_size
        )

    def step(self, batches: Sequence[Batch], step: int) -> float:
        """Train on the micro-batches of one step; the loss."""
        raise NotImplementedError

    def run(self, first: int, count: int) -> tuple[list[float], list[float]]:
        """Seconds and loss of each step."""
        seconds, losses, before = [], [], time.perf_counter()
        for step, batches in enumerate(self.batches(first, count), first):
            losses.append(self.step(batches, step))
            devices.synchronize(self.device)
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
        return seconds, losses

    def batches(self, first: int, count: int) -> Iterator[list[Batch]]:
        """The micro-batches of `count` steps. A GPU's are made ahead and pinned, as in a run."""
        rows = self.train.batch_size // self.micro_batches
        indices = range(count * self.micro_batches)

        def make(index: int) -> Batch:
            return self.source.batch(first * self.train.batch_size + index * rows, rows)

        if self.device.type == "cpu":  # the cores have enough to do
            made = (make(index) for index in indices)
        else:
            made = made_ahead(make, self.device, self.config.runtime.prefetch)
        with closing(made):
            for _ in range(count):
                yield list(itertools.islice(made, self.micro_batches))

    def learning_rate(self, step: int) -> float:
        """Constant after a warm-up."""
        return self.optim.peak_learning_rate(self.train.batch_size) * min(1.0, (step + 1) / WARMUP_STEPS)


class Candidate(Workload):
    """Our engine, trained as `cramming pretrain` trains it."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        super().__init__(spec, device)
        prepare_heap(self.config.runtime, device)
        devices.seed_everything(0)
        self.engine = build_engine(self.config, Mesh(self.config.parallel, device), device)
        self.precision = self.engine.precision.mode
        self.micro_batches = spec.get("micro_batches") or self.train.batch_size // self._rows_that_fit()
        self.repeat_skipped = spec.get("repeat_skipped", False)
        if perturbed := spec.get("perturbed"):
            perturb(self.engine.parameters, *perturbed)

    def _rows_that_fit(self) -> int:
        """`train.micro_batch`, or what `auto` means here."""
        if self.train.micro_batch != "auto":
            return self.train.micro_batch
        return find_micro_batch(self.engine, self.source.batch, self.config, self.train.batch_size)[0]

    def step(self, batches: Sequence[Batch], step: int) -> float:
        while True:
            stats = self.engine.step(batches, self.learning_rate(step))
            if not (stats.skipped and self.repeat_skipped):
                return stats.loss


@torch.no_grad()
def perturb(weights: Iterable[Tensor], size: float, seed: int) -> None:
    """Move every weight up or down, at random, by the relative `size`; zeros stay."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        weight.mul_((1 + size * signs).to(weight))


@functools.lru_cache(maxsize=2)  # seconds for a GPU's batches, and one process may serve many candidates
def topic_stream(vocab_size: int, num_tokens: int, document_length: int, seed: int) -> TokenStream:
    """Synthetic text, the same everywhere, from which a model can learn all along: ids below `vocab_size`.

    A document has one of a few topics, each with its own frequent words; of its tokens half are drawn from the topic
    and half follow from the token before. Frequencies are learned in tens of steps, the topics soon after, which needs
    attention, and the successors last.
    """
    rng = np.random.default_rng(seed)
    first, words = len(SPECIAL), vocab_size - len(SPECIAL)
    documents = -(-num_tokens // document_length)
    order_KW = np.stack([rng.permutation(words) for _ in range(TOPICS)])  # each topic's words by frequency
    successor_W = rng.permutation(words)
    topic_D = rng.integers(0, TOPICS, documents)
    share_W = np.arange(1, words + 1) ** -1.5
    rank_DL = rng.choice(words, (documents, document_length), p=share_W / share_W.sum())
    ids_DL = order_KW[topic_D[:, None], rank_DL]
    follows_DL = rng.random((documents, document_length)) < 0.5
    for place in range(1, document_length):
        ids_DL[:, place] = np.where(follows_DL[:, place], successor_W[ids_DL[:, place - 1]], ids_DL[:, place])
    ids_DL += first
    ids_DL[:, 0] = SPECIAL.index("cls")
    return TokenStream.of_array(ids_DL.reshape(-1), np.arange(0, ids_DL.size, document_length))


def topic_batches(
    objective: ObjectiveConfig,
    vocab_size: int,
    sequence_length: int,
    packing: Literal["rows", "documents"],
    rows: int,
    seed: int = 0,
) -> BatchSource:
    """Batches of that text; about 200 of `rows` sequences before it repeats itself."""
    num_tokens = max(200 * rows, 1000) * sequence_length
    stream = topic_stream(vocab_size, min(num_tokens, 2**24), max(8, sequence_length * 3 // 4), seed)
    masker = Masker(objective, vocab_size, SPECIAL.index("mask"), tuple(range(len(SPECIAL))), seed)
    return BatchSource(stream, masker, sequence_length, packing, seed)
