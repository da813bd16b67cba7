"""The gate catches a planted fault of every family of tricks, and lets the sound trick through at the same size.

A fault is planted in the code that a run of the trick goes through. One file, since a test sees to it that no trick of
the table is without a fault.
"""

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cramming.bench.tricks import COARSE, SAME, TRICKS, Trick
from cramming.bench.worker import Candidate
from cramming.engine import Engine
from cramming.model import attention, attention_kernels, heads, layers, residual
from cramming.parallel import apply
from cramming.parallel.offload import BlockActivations, CopyStream, HostCopies

Plant = Callable[[pytest.MonkeyPatch], None]


def _no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that forgets who asks: every token gets its own value."""
    broken = attention.KERNELS["sdpa"]._replace(
        attend=lambda q, k, v, layout, dropout: layout.at_queries(v)
    )
    monkeypatch.setitem(attention.KERNELS, "sdpa", broken)


def _values_gradient_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written-out attention whose backward pass has a sign wrong: values are led away from where they should go."""

    def broken(ctx: Any, d_out: Tensor) -> Any:
        d_q, d_k, d_v, none = backward(ctx, d_out)
        return d_q, d_k, -d_v, none

    backward = attention_kernels._Products.backward
    monkeypatch.setattr(attention_kernels._Products, "backward", staticmethod(broken))


def _wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's queries belong to the neighbours of the targets."""
    whole = attention.restrict
    monkeypatch.setattr(
        attention, "restrict", lambda layout, m, n: whole(layout, (m + 1).clamp(max=n - 1), n)
    )


def _lost_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointed blocks whose parameters get no gradient."""

    def broken(function: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            out = function(*args)
        return args[0] + (out - args[0]).detach()

    monkeypatch.setattr(apply, "checkpoint", broken)


def _coarse_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number format with three bits of mantissa."""
    gelu = layers.ACTIVATIONS["gelu"]
    monkeypatch.setitem(
        layers.ACTIVATIONS,
        "gelu",
        lambda x: gelu(x) + (x.detach() * 1.5).round() - x.detach() * 1.5,
    )


def _forgotten_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulation that keeps the first micro-batch's gradient only."""
    accumulate = Engine.accumulate
    monkeypatch.setattr(
        Engine, "accumulate", lambda self, batches, *rest: accumulate(self, batches[:1], *rest)
    )


def _one_micro_batch_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulation that reports the loss of all micro-batches and drops the last one's gradient."""
    forward, calls = Engine._forward, itertools.count(1)

    def broken(self: Any, batch: Any, model: Any = None) -> Any:
        loss, correct = forward(self, batch, model)
        return (loss.detach() + 0 * loss if next(calls) % 4 == 0 else loss), correct

    monkeypatch.setattr(Engine, "_forward", broken)


def _around_adamw(
    before: Callable[[Any], None], after: Callable[[Any], None] = lambda optimizer: None
) -> Plant:
    """Something done to AdamW before and after each step."""
    step = torch.optim.AdamW.step

    def broken(self: Any, *args: Any) -> None:
        before(self)
        step(self, *args)
        after(self)

    return lambda monkeypatch: monkeypatch.setattr(torch.optim.AdamW, "step", broken)


def _state_lost(optimizer: Any) -> None:
    """At every step."""
    optimizer.state.clear()


def _second_step_for_the_first(optimizer: Any) -> None:
    """In Adam's correction of its bias."""
    for state in optimizer.state.values():
        if state["step"] == 1:
            state["step"].add_(1)


def _weights_in_bf16(optimizer: Any) -> None:
    """So that small updates are lost."""
    for weight in itertools.chain.from_iterable(
        group["params"] for group in optimizer.param_groups
    ):
        weight.data.copy_(weight.data.bfloat16())


def _learning_rate_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """By 2 percent."""
    rate = Candidate.learning_rate
    monkeypatch.setattr(Candidate, "learning_rate", lambda self, step: 1.02 * rate(self, step))


def _clipped_by_the_scaled_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 gradients that are clipped by the norm of the scaled ones, up to 65536 times too large."""
    scale = torch.amp.GradScaler.scale

    def only_losses(scaler: Any, x: Tensor) -> Any:
        return scale(scaler, x) if x.requires_grad else x

    monkeypatch.setattr(torch.amp.GradScaler, "scale", only_losses)


def _stale_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloaded activations that come back as they were a step before."""
    restore, before = BlockActivations.restore, dict[int, Tensor]()

    def broken(self: BlockActivations) -> None:
        if self.is_restored:
            return
        restore(self)
        for place, saved in enumerate(self.saved.values()):
            assert saved.device is not None
            fresh, saved.device = saved.device, before.get(place, saved.device)
            before[place] = fresh

    monkeypatch.setattr(BlockActivations, "restore", broken)


def _late_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not wait for the gradients of its weights and adds those that came a step before."""
    to_host, under_way = CopyStream.to_host, deque[list[Tensor]]()

    def broken(self: CopyStream, tensors: Any) -> list[Tensor]:
        under_way.append(to_host(self, tensors))
        blocks = 3
        if len(under_way) > blocks:
            return under_way.popleft()
        return [torch.zeros_like(t) for t in under_way[-1]]

    monkeypatch.setattr(CopyStream, "to_host", broken)


def _one_weight_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: one parameter's update by the host's optimizer is not copied back."""
    after_step = HostCopies.after_step

    def broken(self: HostCopies, *args: Any) -> None:
        weight = list(self.by_weight)[1]
        before = weight.detach().clone()
        after_step(self, *args)
        weight.data.copy_(before)

    monkeypatch.setattr(HostCopies, "after_step", broken)


def _scales_of_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments in few bits of which each block comes back with the scale of the block before."""
    from torchao.optim import subclass_8bit

    right = subclass_8bit.dequant_with_qmap
    monkeypatch.setattr(
        subclass_8bit,
        "dequant_with_qmap",
        lambda codes, qmap, scale: right(codes, qmap, scale.roll(1)),
    )


def _fused_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes ReLU's kernel for GELU's. GELU's own tanh form is too close to show in sixty steps."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:  # of the blocks; the head and its loss are a graph too
            if node.target is torch.nn.functional.gelu:
                node.target, node.kwargs = torch.nn.functional.relu, {}
        graph.recompile()
        return graph.forward

    torch._dynamo.reset()  # after eight compilations of one function torch leaves it as it is
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


def _norms_lose_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in 16 bits whose backward pass hands on what comes, as if they did nothing."""

    def broken(ctx: Any, d_out: Tensor) -> Any:
        normalize, eps, _, *d_weights = backward(ctx, d_out)
        return normalize, eps, d_out, *d_weights

    backward = residual._Normed.backward
    monkeypatch.setattr(residual._Normed, "backward", staticmethod(broken))


def _half_a_chunk_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of a chunk's rows counts in the loss and not in the gradients."""

    def broken(
        self: Any,
        first: int,
        h: Tensor,
        probabilities: Tensor,
        index: Tensor,
        here: Tensor,
        slope: Tensor | None,
    ) -> None:
        taught = (torch.arange(len(h)) < len(h) // 2)[:, None]
        add(self, first, h, probabilities.mul_(taught), index, here & taught, slope)

    add = heads._Gradients.add
    monkeypatch.setattr(heads._Gradients, "add", broken)


class Fault(NamedTuple):
    """In a trick, and in what it `stands_for`. `size` is a fixture, `package` what the trick needs."""

    plant: Plant
    trick: Trick
    stands_for: tuple[str, ...] = ()
    size: str = "small"
    package: str | None = None


def the(name: str) -> Trick:
    (trick,) = (trick for trick in TRICKS if trick.name == name)
    return trick


PLAIN, FEW_BITS = Trick("reference", {}, SAME, ""), Trick("reference in few bits", {}, COARSE, "")
FAULTS: dict[str, Fault] = {
    "attention": Fault(_no_attention, PLAIN, ("attention varlen", "attention flex")),
    "attention products": Fault(_values_gradient_turned, the("attention products")),
    "last layer": Fault(_wrong_tokens, the("last layer at targets")),
    "compiler": Fault(
        _fused_wrongly,
        the("compile blocks"),
        (
            "compile model",
            "activation budget 0.5",
            "coordinate descent",
            "max-autotune",
            "CUDA graphs",
        ),
    ),
    "number format": Fault(_coarse_products, FEW_BITS, ("tf32", "bf16", "fp8", "fp8 rowwise")),
    "residual stream": Fault(_norms_lose_gradient, the("bf16 residual stream")),
    "loss in chunks": Fault(_half_a_chunk_teaches_nothing, the("large loss chunks")),
    "master weights": Fault(_around_adamw(lambda optimizer: None, _weights_in_bf16), PLAIN),
    "accumulation": Fault(_forgotten_micro_batches, the("accumulation x4")),
    "one micro-batch": Fault(_one_micro_batch_less, the("accumulation x4")),
    "checkpointing": Fault(
        _lost_gradient, the("checkpoint all"), ("checkpoint every 2nd", "selective checkpoint")
    ),
    "activation offload": Fault(_stale_activations, the("activation offload")),
    "weight offload": Fault(_late_gradients, the("weight offload")),
    "optimizer offload": Fault(_one_weight_stays, the("optimizer offload")),
    "optimizer": Fault(_around_adamw(_state_lost), PLAIN),
    "optimizer in few bits": Fault(_around_adamw(_state_lost), FEW_BITS),
    "moments in 8 bits": Fault(
        _scales_of_other_blocks, the("8-bit AdamW"), ("4-bit AdamW",), "wide", "torchao"
    ),
    "bias correction": Fault(_around_adamw(_second_step_for_the_first), PLAIN),
    "loss scaling": Fault(_clipped_by_the_scaled_norm, the("fp16"), size="halved"),
    "learning rate": Fault(_learning_rate_too_high, PLAIN),
}


@pytest.mark.parametrize("family", FAULTS)
def test_a_planted_fault_of_each_family_is_caught(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    fault = FAULTS[family]
    if fault.package is not None and find_spec(fault.package) is None:
        pytest.skip(f"{fault.package} is an extra")
    gate = request.getfixturevalue(fault.size)
    assert gate.sound(fault.trick).passed
    fault.plant(monkeypatch)
    verdict = gate.verdict(fault.trick)
    assert (
        not verdict.passed and verdict.distance is not None
    )  # null: it did not run, or ended in nan


def test_no_trick_is_without_a_fault() -> None:
    """But for those that are judged by what they learn, and one that only keeps memory."""
    covered = {name for fault in FAULTS.values() for name in (fault.trick.name, *fault.stands_for)}
    assert {trick.name for trick in TRICKS if trick.rounding is not None} - covered == {"keep heap"}


def test_steps_that_fp16_skips_until_its_scale_fits_are_no_fault(
    halved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    halved.sound(the("fp16"))
    skipped, step = list[bool](), Engine.step

    def counting(self: Engine, *args: Any) -> Any:
        stats = step(self, *args)
        skipped.append(stats.skipped)
        return stats

    monkeypatch.setattr(Engine, "step", counting)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**24))
    assert halved.verdict(the("fp16")).passed
    assert sum(skipped) >= 2 and len(skipped) - sum(skipped) == halved.steps
