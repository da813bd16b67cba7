"""How the offloads work inside: what is away from home when, and what comes back.

That they change nothing in training is in tests/cramming/test_memory_tricks.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cramming.engine import Engine
from cramming.hooks import StepResult
from cramming.parallel import offload

Train = Callable[..., list[StepResult]]
CPU = torch.device("cpu")
OFFLOADS = {"offload_weights": True, "offload_activations": True, "offload_optimizer": True}


def test_no_copy_of_a_weight_outlives_its_blocks_turn(
    make_engine: Callable[..., Engine], tiny_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two blocks' weights are away from home at a time, in both passes; in between none."""
    away, peak = set[int](), [0]
    original = offload.HostWeights.prefetch, offload.DeviceWeights.free

    def prefetch(self: offload.HostWeights) -> None:
        original[0](self)
        away.add(id(self))
        peak[0] = max(peak[0], len(away))

    def free(self: offload.DeviceWeights) -> None:
        original[1](self)
        away.discard(id(self.weights))

    monkeypatch.setattr(offload.HostWeights, "prefetch", prefetch)
    monkeypatch.setattr(offload.DeviceWeights, "free", free)
    engine = make_engine(offload_weights=True)
    loss, _ = engine._forward(tiny_source.batch(0, 4))
    assert away == set()
    loss.backward()
    assert (away, peak[0]) == (set(), 2)


def test_activations_leave_the_device_and_come_back_two_blocks_at_a_time(
    make_engine: Callable[..., Engine], tiny_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[offload.BlockActivations] = []
    original = offload.BlockActivations.__init__

    def note(self: offload.BlockActivations, *arguments: Any) -> None:
        original(self, *arguments)
        passes.append(self)

    monkeypatch.setattr(offload.BlockActivations, "__init__", note)
    asked: list[tuple[int, bool]] = []
    back, present = (
        offload.BlockActivations._unpack_moved,
        offload.BlockActivations._unpack_resident,
    )

    def note_back(self: offload.BlockActivations, *arguments: Any) -> Tensor:
        asked.append((passes.index(self), self.is_restored))
        return back(self, *arguments)

    def note_present(self: offload.BlockActivations, tensor: Tensor) -> Tensor:
        asked.append((passes.index(self), True))
        return present(self, tensor)

    monkeypatch.setattr(offload.BlockActivations, "_unpack_moved", note_back)
    monkeypatch.setattr(offload.BlockActivations, "_unpack_resident", note_present)
    engine = make_engine(offload_activations=True)
    loss, _ = engine._forward(tiny_source.batch(0, 4))
    assert [len(p.saved) > 0 for p in passes] == [
        True,
        True,
        False,
        False,
    ]  # the last two are asked for first: no copy
    assert all(
        saved.host is not None and saved.device is None
        for p in passes
        for saved in p.saved.values()
    )
    loss.backward()
    assert {index for index, _ in asked} == {0, 1, 2, 3}
    assert all(
        on_its_way for _, on_its_way in asked
    )  # each block's were called for by the one after it
    assert not [
        saved
        for p in passes
        for saved in p.saved.values()
        if saved.device is not None or saved.uses
    ]


def test_a_forward_pass_without_backward_leaves_nothing_stale(
    make_engine: Callable[..., Engine],
    tiny_source: Any,
    monkeypatch: pytest.MonkeyPatch,
    train: Train,
) -> None:
    """Memory may run out in the middle: fetched copies must not be used after the weights have changed."""
    ours, plain = make_engine(**OFFLOADS, checkpoint_every=2), make_engine()
    second = ours.model.encoder.blocks[1]  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        patch.setattr(second, "forward", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ours._forward(tiny_source.batch(0, 4))
    with torch.no_grad():
        for engine in (ours, plain):
            for p in engine.model.parameters():
                p.mul_(1.5)
            engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    assert train(ours, tiny_source, range(2)) == train(plain, tiny_source, range(2))


def test_views_come_back_as_they_were() -> None:
    """Same strides and one memory, moved once."""
    moved = offload.Activations(offload.CopyStream(CPU), 3)
    seen: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        matrix = hidden.exp().view(-1, 3, 512)
        q, k, _ = matrix.unbind(1)
        packed = [moved.pack(x) for x in (q, k.t(), matrix)]
        seen.extend([q, k.t(), matrix])
        assert moved.current
        moved.current.release()
        back.extend(offload.unpack(p) for p in packed)
        return hidden

    back: list[Tensor] = []
    moved.wrap(forward, 0, [])(torch.randn(4, 1536, requires_grad=True))
    assert all(torch.equal(b, s) for b, s in zip(back, seen, strict=True))
    assert [b.stride() for b in back] == [s.stride() for s in seen]
    assert len({b.untyped_storage().data_ptr() for b in back}) == 1
