"""Gradient compression: messages that DDP sends of each bucket in place of its sum (`parallel.compression`).

Each is a communication hook: (group, bucket) -> a future of the bucket with the sum over the group, exact or nearly.
Bytes that a process sends per step, of P parameters on N processes, with rings:

    none      8 P (N - 1) / N    an all-reduce in fp32
    bf16      4 P (N - 1) / N    the same in 16 bits; the sum is rounded as well
    fp16      4 P (N - 1) / N    the same, three bits finer above 6e-5 and coarser below 7e-6; overflow skips the step
    powersgd  8 (N - 1) / N of r (n + m) numbers for a matrix [n, m], and of all others (Vogels et al. 2019)
    topk      8 density P (N - 1): index and value of the largest entries, gathered; what is not sent is added to the
              next step's gradient (error feedback: Stich et al. 2018, Lin et al. 2018)
    qsgd      (1 + 4 / BLOCK) P (N - 1): 8 bits a number, rounded at random to the right mean (Alistarh et al. 2017)

The last two are gathered, not reduced, so they grow with N: top-k sends less than DDP below density 1 / N, QSGD below
N = 8. What a hook keeps (errors of feedback, PowerSGD's count of steps) is a process's own: a resume begins with none
of it, and the errors are dropped when a step is skipped, as they hold what was not finite. Blocks and the choice of
entries follow DDP's buckets, which are others in the first step of a process. So the last three do not resume bit for
bit.
"""

import math
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from cramming.parallel.data_parallel import GradientSum
from cramming.parallel.mesh import CompressionConfig, PowerSgdConfig, TopKConfig

BLOCK = 512  # numbers with one scale in `qsgd`
LEVELS = 127  # of int8 on each side of zero
START_POWER_SGD = 10  # steps that are reduced whole: early gradients change fast, and torch builds its buckets anew


def build_hook(config: CompressionConfig, group: dist.ProcessGroup) -> GradientSum:
    """Build the hook that the configuration names, for the processes of `group`."""
    if isinstance(config, PowerSgdConfig):
        return PowerSgd(group, config.rank)
    if isinstance(config, TopKConfig):
        return TopK(group, config.density)
    if config.name == "qsgd":
        return Qsgd(group)
    return In16Bits(group, config.name)


class In16Bits(GradientSum):
    """Gradients that are rounded to 16 bits and summed in as many."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        super().__init__(group)
        self.rounded = {
            "bf16": default_hooks.bf16_compress_hook,
            "fp16": default_hooks.fp16_compress_hook,
        }[name]

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin to sum the rounded bucket."""
        return _sum_of_mean(self.rounded(self.group, bucket), self.group)


class PowerSgd(GradientSum):
    """Two thin matrices for each matrix; their product's error is added to the next step's gradient."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        super().__init__(group)
        self.hook = powerSGD_hook.powerSGD_hook
        self.state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=START_POWER_SGD
        )

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin to sum the bucket, nearly."""
        total = _sum_of_mean(self.hook(self.state, bucket), self.group)
        # gloo's threads would start its second and third sums beside the next bucket's first, in another order on each
        # process.
        if bucket.buffer().device.type == "cpu":
            total.wait()
        return total

    def forget(self) -> None:
        """Drop the errors and matrices of a skipped step."""
        for tensors in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            tensors.clear()


def _sum_of_mean(mean: Future[Tensor], group: dist.ProcessGroup) -> Future[Tensor]:
    """Return the sum: torch's hooks divide by the number of processes."""
    return mean.then(lambda done: done.value().mul_(group.size()))


class Gathered(GradientSum, ABC):
    """Messages of each process to all others, which add up what the messages mean."""

    @abstractmethod
    def encode(self, bucket: dist.GradBucket, gradient: Tensor) -> Tensor:
        """Return the message of this process for the `gradient` of a bucket."""

    @abstractmethod
    def decode_into(self, total: Tensor, message: Tensor) -> None:
        """Add what one process's message means."""

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin to gather the messages for the bucket and to add them up."""
        total = bucket.buffer()
        message = self.encode(bucket, total)
        messages = message.new_empty(self.group.size() * len(message))
        work = dist.all_gather_into_tensor(messages, message, group=self.group, async_op=True)

        def add_up(_: Future[object]) -> Tensor:
            total.zero_()
            for each in messages.split(len(message)):
                self.decode_into(total, each)
            return total

        return work.get_future().then(add_up)


class TopK(Gathered):
    """Entries with the largest magnitudes, `density` of all; the others wait in `errors`, by bucket."""

    def __init__(self, group: dist.ProcessGroup, density: float) -> None:
        super().__init__(group)
        self.density = density
        self.errors: dict[int, tuple[tuple[int, ...], Tensor]] = {}

    def forget(self) -> None:
        """Drop the errors of a skipped step."""
        self.errors.clear()

    def encode(self, bucket: dist.GradBucket, gradient: Tensor) -> Tensor:
        """Return the places and values of the largest entries."""
        order = tuple(map(id, bucket.parameters()))  # DDP orders its buckets anew after step 1
        known, error = self.errors.get(bucket.index(), ((), gradient))
        wanted = gradient + error if known == order else gradient.clone()
        places = wanted.abs().topk(math.ceil(self.density * len(wanted)), sorted=False).indices
        values = wanted[places]
        wanted[places] = 0
        self.errors[bucket.index()] = order, wanted
        return torch.cat([places.int(), values.float().view(torch.int32)])

    def decode_into(self, total: Tensor, message: Tensor) -> None:
        """Add the entries at their places."""
        places, values = message.chunk(2)
        total.index_add_(0, places, values.view(torch.float32).to(total.dtype))


class Qsgd(Gathered):
    """Numbers in int8, each block scaled to its largest; the mean over the random rounding is the number itself."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.seed = group.rank()
        self.generator: torch.Generator | None = None  # dropout's numbers are the run's

    def begin_step(self, seed: int) -> None:
        """Seed the random rounding."""
        self.seed = seed
        self.generator = None

    def encode(self, bucket: dist.GradBucket, gradient: Tensor) -> Tensor:
        """Return the rounded numbers, and the scale of each block."""
        if self.generator is None:
            self.generator = torch.Generator(gradient.device).manual_seed(self.seed)
        padded = torch.nn.functional.pad(gradient.float(), (0, -len(gradient) % BLOCK))
        blocks_NB = padded.view(-1, BLOCK)
        scales_N = blocks_NB.abs().amax(1).clamp(min=1e-30) / LEVELS
        exact_NB = blocks_NB / scales_N[:, None]
        random_NB = torch.rand(exact_NB.shape, generator=self.generator, device=exact_NB.device)
        rounded_NB = (exact_NB + random_NB).floor().clamp(-LEVELS, LEVELS).to(torch.int8)
        return torch.cat([rounded_NB.view(-1), scales_N.view(torch.int8)])

    def decode_into(self, total: Tensor, message: Tensor) -> None:
        """Add the rounded numbers times their scales."""
        blocks = -(-len(total) // BLOCK)
        numbers, scales = message[: blocks * BLOCK], message[blocks * BLOCK :].view(torch.float32)
        total += (numbers.view(-1, BLOCK) * scales[:, None]).view(-1)[: len(total)].to(total.dtype)
