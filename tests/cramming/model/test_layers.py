"""What eager execution computes in fewer passes is the definition, forward and backward."""

import importlib.util
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from cramming.model import layers
from cramming.model.convolution import Convolution
from cramming.model.layers import (
    Dropout,
    RMSNorm,
    ScaledSinusoid,
    apply_rope,
    materialized,
    residual_sum,
    rope_tables,
)


def test_eager_rotation_and_its_gradient_are_the_definitions() -> None:
    torch.manual_seed(0)
    rope = rope_tables(torch.tensor([0, 1, 2, 0, 1, 7]), 8, 100.0)
    cos, sin = (table.double() for table in rope)
    actual, expected = (
        torch.randn(6, 3, 2, 8, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    actual.requires_grad_()
    expected = expected.double().requires_grad_()
    weight = torch.randn(6, 2, 8)
    queries, plain = (
        actual[:, 1],
        expected[:, 1],
    )  # a part of the projection, as the encoder takes it
    rotated, defined = apply_rope(queries, rope), plain * cos + plain.roll(4, -1) * sin
    torch.testing.assert_close(rotated.double(), defined)
    (rotated * weight).sum().backward()
    (defined * weight.double()).sum().backward()
    assert actual.grad is not None and expected.grad is not None
    torch.testing.assert_close(actual.grad.double(), expected.grad)
    assert torch.equal(queries, actual[:, 1])  # what came in is as it was


class Tables(nn.Module):
    """Rotary tables as a layer."""

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions_T, 8, 100.0)


def sinusoid() -> ScaledSinusoid:
    module = ScaledSinusoid(16, 8)
    nn.init.ones_(module.scale)
    return module


@pytest.mark.parametrize("module", [Tables(), sinusoid()], ids=["rotary", "added"])
def test_compiled_positions_are_the_eager_ones_without_their_formula(module: nn.Module) -> None:
    """Inlined, cosine and sine would be computed in each kernel that uses them."""
    calls = list[str]()

    def noting(graph: Any, _: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    positions = torch.tensor([0, 1, 2, 0, 1, 7])
    compiled = torch.compile(module, backend=noting, fullgraph=True)
    torch.testing.assert_close(compiled(positions), module(positions), rtol=0, atol=0)
    assert not {"cos", "sin"} & {*calls} and calls


@pytest.mark.parametrize("module", [Tables(), sinusoid()], ids=["rotary", "added"])
def test_exported_positions_are_torchs_own_operations(module: nn.Module) -> None:
    """Other programs, such as ONNX, have no operation of ours."""
    positions = torch.arange(6)
    program = torch.export.export(module, (positions,), strict=False)
    assert "cramming" not in str(program.graph)
    torch.testing.assert_close(program.module()(positions), module(positions))


def test_a_second_copy_of_the_module_compiles_beside_the_first() -> None:
    """transformers imports its own from an exported folder."""
    origin = layers.__spec__.origin
    spec = importlib.util.spec_from_file_location("cramming.model.layers_again", origin)
    assert spec and spec.loader
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for module in (layers, copy):
        tables = torch.compile(module.rope_tables, backend="aot_eager", fullgraph=True)
        expected = module.rope_tables(torch.arange(5), 8, 100.0)
        torch.testing.assert_close(tables(torch.arange(5), 8, 100.0), expected, rtol=0, atol=0)


@pytest.mark.parametrize("branch", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32, torch.float64])
def test_a_compiled_sum_of_the_stream_is_the_eager_one(
    stream: torch.dtype, branch: torch.dtype
) -> None:
    """To the bit and in the same type, though added in fp32."""
    x, y = torch.randn(32, 8).to(stream), torch.randn(32, 8).to(branch)
    torch._dynamo.reset()  # the cases together are more than dynamo compiles of one function
    compiled = torch.compile(residual_sum, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y), x + y, rtol=0, atol=0)


def test_compiled_code_keeps_each_materialized_sum_for_the_backward_pass() -> None:
    """It would keep the terms of some, and add them again wherever the sum is read."""
    results = list[Tensor]()

    def forward_of(graph: Any, _: Any) -> Any:
        def run(*inputs: Tensor) -> Any:
            results.extend(graph(*inputs))
            return tuple(results)

        return make_boxed_func(run)

    def backward_of(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    def sums_of(stream: Tensor, weights: Tensor) -> list[Tensor]:
        sums = [stream]
        for weight in weights:
            stream = sums[-1]
            sums.append(materialized(stream + nn.functional.layer_norm(stream, (8,)) @ weight))
        return sums

    def last(stream: Tensor, weights: Tensor) -> Tensor:
        return sums_of(stream, weights)[-1].square().sum()

    torch.manual_seed(0)
    x, weights = torch.randn(4, 8), torch.randn(3, 8, 8, requires_grad=True)
    backend = aot_autograd(
        fw_compiler=forward_of,
        bw_compiler=backward_of,
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled = torch.compile(last, backend=backend, fullgraph=True)
    actual = torch.autograd.grad(compiled(x, weights), weights)
    torch.testing.assert_close(actual, torch.autograd.grad(last(x, weights), weights))
    for expected in sums_of(x, weights)[1:]:
        assert any(
            saved.shape == expected.shape and torch.allclose(saved, expected) for saved in results
        )


def test_a_norm_of_16_bits_is_that_of_the_same_numbers_in_fp32(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """To the bit what torch computes where the types differ, which it warns of, and rounds at the end."""
    torch.manual_seed(0)
    norms, grad = (
        (RMSNorm(64, eps=1e-6), torch.nn.RMSNorm(64, eps=1e-6)),
        torch.randn(33, 64).bfloat16(),
    )
    values, outputs = torch.randn(33, 64).bfloat16(), []
    weight = torch.rand(64)
    for norm, warnings in zip(norms, (0, 1), strict=True):
        x = values.clone().requires_grad_()
        norm.weight.data.copy_(weight)
        torch.set_warn_always(True)  # once only, else
        normed = norm(x)
        torch.set_warn_always(False)
        assert sum("Mismatch dtype" in str(warning.message) for warning in recwarn) == warnings
        normed.to(x.dtype).backward(grad)
        outputs.append([normed.detach().to(x.dtype), x.grad, norm.weight.grad])
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_rotation_is_rounded_once_each_way(dtype: torch.dtype) -> None:
    """Forward and backward pass are the fp32 ones, rounded at the end; rarely a sum may be rounded both ways.

    Separate operations round each product of the backward pass: a fifth of the gradient then differs.
    """
    torch.manual_seed(0)
    rope, weight = rope_tables(torch.arange(64), 32, 100.0), torch.randn(64, 2, 32).to(dtype)
    low = torch.randn(64, 2, 32).to(dtype).requires_grad_()
    full = low.detach().float().requires_grad_()
    rotated, expected = apply_rope(low, rope), apply_rope(full, rope)
    rotated.backward(weight)
    expected.backward(weight.float())
    assert (
        low.grad is not None and full.grad is not None and rotated.dtype == low.grad.dtype == dtype
    )
    for actual, true in ((rotated, expected), (low.grad, full.grad)):
        assert (actual != true.to(dtype)).float().mean() < 0.002


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[1], [2], [5, 1, 7, 3], [16, 16]])
def test_eager_convolution_and_its_gradients_are_those_that_are_compiled(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], causal: bool
) -> None:
    """No sequence sees another, also where one is shorter than the radius."""
    torch.manual_seed(0)
    convolution = Convolution(3, 8).double()
    torch.nn.init.normal_(convolution.taps)
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    x, weight = (torch.randn(len(positions_T), 8, dtype=torch.double) for _ in range(2))
    x.requires_grad_()
    results = []
    for compiled in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiled=compiled: compiled)
        out = convolution(x, positions_T, causal)
        results.append(
            (out.detach(), *torch.autograd.grad((out * weight).sum(), (x, convolution.taps)))
        )
    for eager, definition in zip(*results, strict=True):
        torch.testing.assert_close(eager, definition)


def test_convolution_keeps_nothing_but_its_input() -> None:
    """Autograd would save two products for each tap, each of the stream's size."""
    convolution, x = Convolution(2, 8), torch.randn(64, 8, requires_grad=True)
    torch.nn.init.normal_(convolution.taps)
    saved_sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved_sizes.append(tensor.numel()), lambda nothing: nothing
    ):
        convolution(x, torch.arange(64), False)
    assert sorted(saved_sizes) == sorted([x.numel(), convolution.taps.numel(), 64])


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_of_a_cpu_drops_each_number_by_itself_and_keeps_the_mean(rate: float) -> None:
    torch.manual_seed(0)
    dropout, count = Dropout(rate), 400_003  # not a multiple of four
    x = torch.ones(count, requires_grad=True)
    out = dropout(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, out.detach())
    dropped = (out == 0).double()
    spread = (rate * (1 - rate)) ** 0.5
    assert abs(dropped.mean() - rate) < 5 * spread / count**0.5
    assert abs(out.mean() - 1) < 0.01
    for lag in (1, 2, 3, 4):  # four share a drawn number
        both = (dropped[lag:] * dropped[:-lag]).mean() - dropped.mean() ** 2
        assert abs(both) < 5 * spread**2 / count**0.5
    torch.manual_seed(0)
    assert torch.equal(out, dropout(torch.ones(count)))
    assert torch.equal(dropout.eval()(x), x)
