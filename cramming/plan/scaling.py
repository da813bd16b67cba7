"""Many devices: tokens per second and memory of each, predicted from one device's step and a model of communication.

A message of b bytes takes a latency and b over a bandwidth (Hockney 1994); collectives are those of Thakur et al. 2005
("Optimization of collective communication operations in MPICH"): all-gather and reduce-scatter move (n - 1) / n of the
bytes in ceil(log2 n) rounds, an all-reduce is one of each. Over several nodes they run inside each node first, so that
every device sends only its share between nodes. The arithmetic is the roofline's of one device (roofline.py); what is
computed by the many in equal shares keeps the time of its smallest kernels.

Gradients travel during the last backward pass, two thirds of a micro-batch; whatever that cannot hide is waited for.
Weights and gradients are fp32 and activations have the precision of the run. Left out: stragglers, failures, reading of
data, and what a network with several users takes away.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cramming.parallel.mesh import (
    CompressionConfig,
    ParallelConfig,
    PipelineConfig,
    ReplicaConfig,
    ShardConfig,
)
from cramming.plan.memory import Simulation, micro_batch_sizes
from cramming.plan.roofline import Rates
from cramming.plan.search import GIB, Target, accepts
from cramming.progress import format_count
from cramming.recipe import Config, Hardware

WEIGHT_BYTES = 4  # of a parameter, and of its gradient
BACKWARD_SHARE = 2 / 3  # of a micro-batch's time
BUCKET_BYTES = (
    25 * 2**20
)  # DistributedDataParallel's: the last one is full when nothing is left to hide it
MODEL_SHARES = (2, 4, 8)  # devices that may share one replica, by tensor or by stages


class Link(NamedTuple):
    """Bytes per second in each direction, and seconds before the first of them."""

    bandwidth: float
    latency: float

    def seconds(self, num_bytes: float) -> float:
        """Of one message."""
        return self.latency + num_bytes / self.bandwidth


class Network(NamedTuple):
    """Nodes of so many devices: how a device reaches others in its node, and its share of the way to other nodes."""

    node: int
    inside: Link
    between: Link
    basis: str

    def scatter_seconds(self, num_bytes: float, devices: int, stride: int = 1) -> float:
        """A reduce-scatter or an all-gather over `devices` that are `stride` places apart."""
        inside = max(1, min(devices, self.node // stride))
        across = math.ceil(devices / inside)
        return _half(self.inside, num_bytes, inside) + _half(
            self.between, num_bytes / inside, across
        )

    def reduce_seconds(self, num_bytes: float, devices: int, stride: int = 1) -> float:
        """An all-reduce."""
        return 2 * self.scatter_seconds(num_bytes, devices, stride)


def rounds_of(devices: int) -> int:
    """Of messages, one after the other, until each device has heard from all."""
    return math.ceil(math.log2(devices))


def _half(link: Link, num_bytes: float, devices: int) -> float:
    return rounds_of(devices) * link.latency + (devices - 1) / devices * num_bytes / link.bandwidth


# Rates of data sheets times 0.8; latencies assumed. A rented node of eight H100, and a box of consumer cards.
NETWORKS = {
    "nvlink": Network(
        8,
        Link(0.8 * 450e9, 5e-6),
        Link(0.8 * 50e9, 10e-6),
        "NVLink 4 (450 GB/s) in nodes of 8, InfiniBand NDR (50 GB/s a device) between them",
    ),
    "pcie": Network(
        8,
        Link(0.8 * 32e9 / 2, 10e-6),
        Link(0.8 * 12.5e9 / 8, 30e-6),
        "PCIe 4.0 through the host (32 GB/s, twice over) in nodes of 8, one 100 Gbit Ethernet a node between them",
    ),
}


@dataclass(frozen=True)
class Split:
    """How devices share the work: `dp` replicas of `tp` x `pp` devices; the replicas' state by `strategy`."""

    strategy: str
    dp: int
    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        """In all."""
        return self.dp * self.tp * self.pp

    @property
    def overrides(self) -> str:
        """The settings that ask for it."""
        sizes = [
            f"parallel.{name}={size}"
            for name, size in (("tp", self.tp), ("pp", self.pp))
            if size > 1
        ]
        return " ".join([f"parallel={'pp' if self.pp > 1 else self.strategy}", *sizes])

    def as_run(self, config: Config, place: Hardware, rows: int) -> tuple[Config, Hardware]:
        """What `pretrain` is given with these settings and micro-batches of `rows` sequences."""
        mesh: dict[str, Any] = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "backend": "auto"}
        parallel: ParallelConfig
        if self.pp > 1:
            parallel = PipelineConfig(name="pp", schedule="1f1b", **mesh)
        elif self.strategy != "ddp":
            parallel = ShardConfig(name=self.strategy, shards=None, **mesh)
        else:
            uncompressed = CompressionConfig(name="none")
            parallel = ReplicaConfig(name="ddp", compression=uncompressed, **mesh)
        train = config.train.replace(micro_batch=rows)
        return config.replace(parallel=parallel, train=train), replace(
            place, processes=self.devices
        )


@dataclass(frozen=True)
class Prediction:
    """Of one split: sequences of a micro-batch, seconds of a step by what they are spent on, and bytes per device."""

    split: Split
    micro_batch: int
    compute_seconds: float
    bubble_seconds: float  # in which a stage waits for others
    exposed_seconds: float  # of communication, behind no arithmetic
    tokens_per_second: float
    peak_bytes: float
    fits: bool

    @property
    def step_seconds(self) -> float:
        """Of a whole step."""
        return self.compute_seconds + self.bubble_seconds + self.exposed_seconds


def splits(config: Config, place: Hardware, devices: int, network: Network) -> list[Split]:
    """Those that `pretrain` accepts: replicas alone, and replicas on several devices each."""
    every = [Split(strategy, devices) for strategy in ("ddp", "zero1", "zero2", "zero3")]
    for share in (share for share in MODEL_SHARES if devices % share == 0):
        every += [Split("ddp", devices // share, tp=share)] * (share <= network.node)
        every += [Split("ddp", devices // share, pp=share)]
    return [split for split in every if accepts(*split.as_run(config, place, rows=1))]


class Scaling:
    """One configuration on one kind of device and network; a step's cost is simulated once for each micro-batch."""

    def __init__(self, config: Config, target: Target, network: Network) -> None:
        self.config, self.target, self.network = config, target, network
        self.simulation = Simulation(config, target.place, target.memory_bytes)
        self.act_bytes = 4 if target.place.mode == "fp32" else 2
        self._cost = functools.cache(self.simulation.step)

    def predict(self, split: Split) -> Prediction:
        """With the fastest micro-batch that fits; with the smallest if none does."""
        sizes = micro_batch_sizes(self.config.train.batch_size // split.dp)
        accepted = [
            rows for rows in sizes if accepts(*split.as_run(self.config, self.target.place, rows))
        ]
        each = [self._with(split, rows) for rows in accepted]
        return max((p for p in each if p.fits), key=lambda p: p.tokens_per_second, default=each[0])

    def _with(self, split: Split, rows: int) -> Prediction:
        train, network = self.config.train, self.network
        micro_batches = train.batch_size // split.dp // rows
        cost = self._cost(rows, min(2, micro_batches))
        pass_seconds = self._shared(split.tp).seconds(cost.micro_batch) / split.pp
        sharded = split.tp * split.pp * (1 if split.strategy == "ddp" else split.dp)
        compute = micro_batches * pass_seconds + self._shared(sharded).seconds(cost.update)
        bubble = (split.pp - 1) * pass_seconds
        weights = WEIGHT_BYTES * self.config.parameters.total / (split.tp * split.pp)
        exposed = gradient_seconds(
            split, weights, micro_batches, pass_seconds, self.config.model.num_layers, network
        )
        exposed += self._activation_seconds(split, rows, micro_batches)
        peak = device_bytes(split, cost.peak, micro_batches, self.config.model.num_layers)
        step_tokens = train.batch_size * train.sequence_length
        rate = step_tokens / (compute + bubble + exposed)
        return Prediction(
            split, rows, compute, bubble, exposed, rate, peak, peak <= self.target.usable_bytes
        )

    def _shared(self, devices: int) -> Rates:
        """Of several devices that compute an operation together: each still takes the time of its smallest kernel."""
        rates = self.target.rates
        return replace(rates, flops=rates.flops * devices, bandwidth=rates.bandwidth * devices)

    def _activation_seconds(self, split: Split, rows: int, micro_batches: int) -> float:
        """Of what layers send: with tensor parallelism four all-reduces each (Shoeybi et al. 2019, figure 4), waited
        for; between stages only those of the pipeline's filling and draining, the others travel behind arithmetic."""
        config = self.config
        num_bytes = rows * config.train.sequence_length * config.model.hidden_size * self.act_bytes
        reductions = 4 * config.model.num_layers / split.pp * micro_batches
        tensor = reductions * self.network.reduce_seconds(num_bytes, split.tp)
        reach = split.devices > self.network.node
        hop = (self.network.between if reach else self.network.inside).seconds(num_bytes)
        return tensor + 2 * (split.pp - 1) * hop


def gradient_seconds(
    split: Split,
    weights: float,
    micro_batches: int,
    pass_seconds: float,
    num_layers: int,
    network: Network,
) -> float:
    """Of exchanging gradients and sharded state between replicas, what no backward or forward pass hides.

    `weights`: bytes of one replica's share. ZeRO (Rajbhandari et al. 2020, section 7): one all-reduce or two halves,
    with sharded gradients one half in every micro-batch, with sharded weights all three.
    """
    half = network.scatter_seconds(weights, split.dp, stride=split.tp)
    backward, forward = BACKWARD_SHARE * pass_seconds, (1 - BACKWARD_SHARE) * pass_seconds
    last_bucket = min(1.0, BUCKET_BYTES / weights)
    if split.strategy == "ddp":
        return max(2 * half - backward, 2 * half * last_bucket)
    once, again = max(half - backward, half / num_layers), max(half - forward, half / num_layers)
    if split.strategy == "zero1":  # gathered weights arrive during the next forward pass
        return once + again
    if split.strategy == "zero2":
        return micro_batches * once + again
    passes = max(half - forward, half / num_layers) + max(2 * half - backward, half / num_layers)
    return micro_batches * passes


def device_bytes(
    split: Split, peak: Mapping[str, int], micro_batches: int, num_layers: int
) -> float:
    """Of a device's memory, from the peak of a step on one by category.

    Tensor parallelism leaves 10 of 34 parts of a layer's activations on every device (Korthikanti et al. 2022, equation
    2, without the scores of attention); a stage of 1F1B holds the activations of as many micro-batches as there are
    stages.
    """
    dp, share = split.dp, split.tp * split.pp
    weights, gradients, state = (
        peak[name] / share for name in ("weights", "gradients", "optimizer")
    )
    if split.strategy != "ddp":
        state /= dp
    if split.strategy in ("zero2", "zero3"):
        gradients /= dp
    if split.strategy in ("zero1", "zero2"):
        weights += weights / dp  # its own share stays beside what was gathered
    if split.strategy == "zero3":
        weights = (
            weights / dp + 2 * weights / num_layers
        )  # the block that is computed, and the next one
    in_flight = min(split.pp, micro_batches) / split.pp
    activations = peak["activations"] * in_flight * (10 + 24 / split.tp) / 34
    return weights + gradients + state + activations + peak["head"] / split.tp + peak["workspace"]


def predictions(
    config: Config, target: Target, network: Network, counts: Sequence[int]
) -> list[Prediction]:
    """For each number of devices, every way to split the work that `pretrain` accepts."""
    scaling = Scaling(config, target, network)
    return [
        scaling.predict(split)
        for devices in counts
        for split in splits(config, target.place, devices, network)
    ]


SCALING_HEADERS = (
    "devices",
    "split",
    "micro-batch",
    "tokens/s",
    "of ideal",
    "step ms",
    "bubble ms",
    "exposed ms",
    "GiB each",
    "",
)


def scaling_rows(found: Sequence[Prediction], one_device: float) -> list[list[str]]:
    """Of the table; ideal is as many times `one_device`, the tokens/s of a single one."""
    best: dict[int, Prediction] = {}
    for p in found:
        if p.fits and p.tokens_per_second > getattr(
            best.get(p.split.devices), "tokens_per_second", 0.0
        ):
            best[p.split.devices] = p
    return [
        [
            str(p.split.devices),
            p.split.overrides,
            str(p.micro_batch),
            format_count(p.tokens_per_second, ""),
            f"{p.tokens_per_second / (p.split.devices * one_device):.0%}",
            *(
                f"{1e3 * seconds:.3g}"
                for seconds in (p.step_seconds, p.bubble_seconds, p.exposed_seconds)
            ),
            f"{p.peak_bytes / GIB:.2f}",
            ("fastest that fits" if best[p.split.devices] is p else "")
            if p.fits
            else "does not fit",
        ]
        for p in found
    ]
