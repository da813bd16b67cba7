"""What is applied from outside changes the cost, not the result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from cramming.config import UserError, build
from cramming.device import RuntimeConfig
from cramming.model.config import ModelConfig
from cramming.model.replaced_tokens import ReplacedTokens
from cramming.parallel.apply import MemoryConfig, apply, move_weights
from cramming.parallel.mesh import Mesh, ParallelConfig
from cramming.precision import Precision, PrecisionConfig

CPU = torch.device("cpu")
EAGER, COMPILED = (
    RuntimeConfig(compile="off", keep_heap=False, prefetch=1),
    RuntimeConfig(compile="model", keep_heap=False, prefetch=1),
)


def memory(
    every: int = 0, kind: Any = "full", budget: float | None = None, offload: bool = False
) -> MemoryConfig:
    return MemoryConfig(
        checkpoint_every=every,
        checkpoint=kind,
        activation_budget=budget,
        offload_activations=offload,
        offload_weights=False,
        offload_optimizer=False,
    )


def applied(model: Any, config: MemoryConfig, how: RuntimeConfig) -> Any:
    parallel = ParallelConfig(name="ddp", dp=None, tp=1, pp=1, backend="auto")
    apply(
        model,
        config,
        how,
        parallel,
        Mesh.solo(CPU),
        Precision(PrecisionConfig(mode="fp32", tf32=False), CPU),
    )
    return model


def loss_and_gradients(model: Any, batch: Any) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(3)
    loss, _ = model(
        batch.ids_T, batch.positions_T, batch.packing, batch.target_positions_M, batch.target_ids_M
    )
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


def test_checkpointing_computes_blocks_again_and_keeps_less(
    make_model: Callable[..., Any], tiny_source: Any
) -> None:
    batch, saved_bytes = tiny_source.batch(0, 4), {}
    for every in (0, 2, 1):
        model = applied(make_model(num_layers=4), memory(every), EAGER)
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(
                batch.ids_T,
                batch.positions_T,
                batch.packing,
                batch.target_positions_M,
                batch.target_ids_M,
            )
        saved_bytes[every] = sum(sizes)
    assert saved_bytes[1] < saved_bytes[2] < saved_bytes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "how"),
    [
        (memory(), RuntimeConfig(compile="blocks", keep_heap=False, prefetch=1)),
        (memory(1), COMPILED),
        (memory(budget=0.3), COMPILED),
    ],
)
def test_compiled_equals_eager(
    make_model: Callable[..., Any], tiny_source: Any, config: MemoryConfig, how: RuntimeConfig
) -> None:
    batch = tiny_source.batch(0, 4)
    loss, plain = loss_and_gradients(make_model(), batch)
    model = applied(make_model(), config, how)
    assert list(model.state_dict()) == list(make_model().state_dict())
    repeated, compiled = loss_and_gradients(model, batch)
    assert repeated == pytest.approx(loss, rel=1e-5)
    for a, b in zip(plain, compiled):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["blocks", "model"])
def test_another_shape_is_compiled_for_itself(
    make_model: Callable[..., Any],
    tiny_source: Any,
    monkeypatch: pytest.MonkeyPatch,
    how: Any,
) -> None:
    """Validation and later phases of an objective have other numbers of targets; no graph takes any number of them."""
    graphs = list[Any]()

    def noting(graph: Any, inputs: Any) -> Any:
        assert not any(isinstance(value, torch.SymInt) for value in inputs)
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("cramming.parallel.apply.compile_arguments", lambda _: {"backend": noting})
    torch.compiler.reset()
    model, batch = make_model(), tiny_source.batch(0, 4)
    compiled = applied(
        make_model(), memory(), RuntimeConfig(compile=how, keep_heap=False, prefetch=1)
    )
    for dropped in (0, 1, 2, 0):
        per_row = len(batch.target_ids_M) // 4 - dropped
        positions_M, ids_M = (
            numbers.view(4, -1)[:, :per_row].flatten()
            for numbers in (batch.target_positions_M, batch.target_ids_M)
        )
        arguments = (batch.ids_T, batch.positions_T, batch.packing, positions_M, ids_M)
        torch.testing.assert_close(compiled(*arguments), model(*arguments))
    changing = 3 if how == "blocks" else 1  # last block, head and loss
    first = 4 if how == "blocks" else 1  # and the other blocks
    assert len(graphs) == first + 2 * changing


def test_with_compiled_blocks_no_product_is_left_uncompiled(
    make_model: Callable[..., Any], tiny_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary's are a quarter of them, and what surrounds them moves four times the bytes uncompiled."""
    linear = F.linear

    def only_compiled(*arguments: Any) -> torch.Tensor:
        assert torch.compiler.is_compiling()
        return linear(*arguments)

    batch = tiny_source.batch(0, 4)
    expected, gradients = loss_and_gradients(make_model(), batch)
    monkeypatch.setattr(F, "linear", only_compiled)
    monkeypatch.setattr("cramming.parallel.apply.compile_arguments", lambda _: {"backend": "eager"})
    torch.compiler.reset()
    model = applied(
        make_model(), memory(), RuntimeConfig(compile="blocks", keep_heap=False, prefetch=1)
    )
    loss, actual = loss_and_gradients(model, batch)
    assert loss == pytest.approx(expected)
    torch.testing.assert_close(actual, gradients)


TRICKS = (
    memory(2),
    memory(1, "selective"),
    memory(offload=True),
    MemoryConfig(
        checkpoint_every=2,
        checkpoint="full",
        activation_budget=None,
        offload_activations=True,
        offload_weights=True,
        offload_optimizer=False,
    ),
)


@pytest.mark.parametrize(
    "config", TRICKS, ids=["checkpoint", "selective", "activations", "both offloads, checkpoint"]
)
def test_a_generator_is_treated_as_the_encoder(
    small_model: ModelConfig, tiny_source: Any, config: MemoryConfig
) -> None:
    """Its blocks are wrapped too, and no bit of loss and gradients changes."""
    batch, results = tiny_source.batch(0, 4), []
    uniform = torch.rand(len(batch.target_ids_M))
    for settings in (memory(), config):
        torch.manual_seed(0)
        model = applied(
            move_weights(ReplacedTokens(small_model, 0.5, 50.0), settings, torch.device("cpu")),
            settings,
            EAGER,
        )
        torch.manual_seed(3)
        loss, _ = model(*batch.inputs, uniform)
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(model.encoders) == 2
    assert all("forward" in vars(block) for encoder in model.encoders for block in encoder.blocks)


@pytest.mark.slow
def test_the_blocks_of_a_generator_are_compiled(small_model: ModelConfig, tiny_source: Any) -> None:
    batch = tiny_source.batch(0, 4)
    arguments = (*batch.inputs, torch.rand(len(batch.target_ids_M)))
    model = ReplacedTokens(small_model, 0.5, 50.0).eval()
    loss, hits = model(*arguments)
    applied(model, memory(), RuntimeConfig(compile="blocks", keep_heap=False, prefetch=1))
    assert all(block._compiled_call_impl for encoder in model.encoders for block in encoder.blocks)
    torch.testing.assert_close(model(*arguments), (loss, hits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"checkpoint_every": -1}, "memory.checkpoint_every=-1: "),
        ({"activation_budget": 2.0}, "memory.activation_budget=2: "),
        ({"loss_chunk": 0}, "memory.loss_chunk=0: "),
        ({"checkpoint": "selective"}, "does nothing with"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    compose: Callable[..., dict[str, Any]], wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        build(MemoryConfig, compose()["memory"] | wrong, "memory")


def test_selective_checkpointing_runs_no_matrix_product_again(
    make_model: Callable[..., Any], tiny_source: Any
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    flops = {}
    for kind in ("full", "selective", "none"):
        model = applied(
            make_model(),
            memory(0 if kind == "none" else 1, "full" if kind == "none" else kind),
            EAGER,
        )
        with FlopCounterMode(display=False) as counter:
            loss_and_gradients(model, tiny_source.batch(0, 4))
        flops[kind] = counter.get_total_flops()
    assert flops["selective"] == flops["none"] < flops["full"]
