"""What is applied from outside changes the cost, not the result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cramming.parallel.apply import MemoryConfig, apply


def loss_and_gradients(model: Any, batch: Any) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(3)
    loss, _ = model(batch.ids_T, batch.positions_T, batch.packing, batch.target_positions_M, batch.target_ids_M)
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_gives_the_same_gradients(
    make_model: Callable[..., Any], tiny_source: Any, every: int, dropout: float
) -> None:
    batch = tiny_source.batch(0, 4)
    loss, plain = loss_and_gradients(make_model(num_layers=3, dropout=dropout), batch)
    again, checkpointed = loss_and_gradients(
        apply(make_model(num_layers=3, dropout=dropout), MemoryConfig(every, "off")), batch
    )
    assert again == loss
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed))


def test_checkpointing_computes_blocks_again_and_keeps_less(make_model: Callable[..., Any], tiny_source: Any) -> None:
    batch, kept = tiny_source.batch(0, 4), {}
    for every in (0, 2, 1):
        model = apply(make_model(num_layers=4), MemoryConfig(every, "off"))
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(batch.ids_T, batch.positions_T, batch.packing, batch.target_positions_M, batch.target_ids_M)
        kept[every] = sum(sizes)
    assert kept[1] < kept[2] < kept[0]


def test_names_of_weights_stay(make_model: Callable[..., Any]) -> None:
    assert list(apply(make_model(), MemoryConfig(1, "off")).state_dict()) == list(make_model().state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("config", [MemoryConfig(0, "blocks"), MemoryConfig(1, "model")])
def test_compiled_equals_eager(make_model: Callable[..., Any], tiny_source: Any, config: MemoryConfig) -> None:
    batch = tiny_source.batch(0, 4)
    loss, plain = loss_and_gradients(make_model(), batch)
    model = apply(make_model(), config)
    assert list(model.state_dict()) == list(make_model().state_dict())
    again, compiled = loss_and_gradients(model, batch)
    assert again == pytest.approx(loss, rel=1e-5)
    for a, b in zip(plain, compiled):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="checkpoint_every=-1"):
        MemoryConfig(-1, "off")
