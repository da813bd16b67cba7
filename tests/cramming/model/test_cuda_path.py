"""The Python of the CUDA path, run on a CPU: whole models by FlashAttention, one graph a pass, products in 8 bits.

Single kernels are in test_attention.py. torch's FlashAttention operator computes here what its documentation says.
"""

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from cramming.config import build
from cramming.model import residual
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.model.heads import MaskedLM
from cramming.precision import Precision, PrecisionConfig

from .conftest import PACKINGS, SUBSET, TOKENS

SMALL = ("hidden_size=32", "num_heads=2", "intermediate_size=32", "vocab_size=64", "max_length=32")
MODELS: dict[str, tuple[str, ...]] = {
    "bert-base": ("num_layers=2",),
    "crammed-bert": ("num_layers=3", "late_layers=2"),
    "modern": ("num_layers=3", "local_window=8", "global_every=2"),
}


def small_model(compose: Callable[..., dict[str, Any]], name: str, kernel: str) -> MaskedLM:
    settings = compose(f"model={name}", *(f"model.{change}" for change in (*SMALL, *MODELS[name])))
    torch.manual_seed(0)
    return MaskedLM(build(ModelConfig, settings["model"], "model"), kernel)


def batch_of(packing: Packing) -> list[Any]:
    lengths = packing.bounds_S.diff().tolist()
    ids = torch.randint(0, 64, (TOKENS,))
    return [ids, torch.cat([torch.arange(n) for n in lengths]), packing, SUBSET, ids[SUBSET]]


def gradients_of(model: MaskedLM, call: Callable[..., Any], batch: list[Any]) -> list[Tensor]:
    """The loss, and the gradient of each parameter."""
    model.zero_grad()
    loss, _ = call(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("packing", ["rows", "in rows"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("gpu_kernels")
def test_a_model_by_flash_attention_is_the_model(
    compose: Callable[..., dict[str, Any]], name: str, packing: str
) -> None:
    """Windows, documents and the last layer at the targets together; in fp64 up to the loss."""
    batch, results = batch_of(PACKINGS[packing]), []
    for kernel in ("varlen", "sdpa"):
        model = small_model(compose, name, kernel).double()
        results.append(gradients_of(model, model, batch))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


# `auto` is chosen while the compiler traces
WAYS = {
    "rows": ("rows", "auto", False),
    "documents, flash, bf16 residual": ("in rows", "varlen", True),
}


def compiled_equals_eager(
    compose: Callable[..., dict[str, Any]], name: str, way: str, backend: str
) -> None:
    """One graph for forward and backward pass, which a second batch finds compiled."""
    packing, kernel, lowered = WAYS[way]
    model = small_model(compose, name, kernel)
    if lowered:
        residual.lower(model.encoder, torch.bfloat16)
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch.compiler.reset()
    compiled = torch.compile(model, backend=counting, fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16) if lowered else nullcontext():
        for _ in range(2):
            batch = batch_of(PACKINGS[packing])
            expected, actual = (
                [x.clone() for x in gradients_of(model, c, batch)] for c in (model, compiled)
            )
            for a, b in zip(actual, expected, strict=True):
                assert (a - b).norm() <= (0.03 if lowered else 1e-5) * b.norm() + 1e-6
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("name", "way"), zip(MODELS, [*WAYS, list(WAYS)[-1]], strict=True)
)  # each takes seconds
@pytest.mark.usefixtures("gpu_kernels")
def test_a_pass_is_one_graph(compose: Callable[..., dict[str, Any]], name: str, way: str) -> None:
    compiled_equals_eager(compose, name, way, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("gpu_kernels")
def test_a_pass_is_one_graph_for_inductor(
    compose: Callable[..., dict[str, Any]], name: str, way: str
) -> None:
    compiled_equals_eager(compose, name, way, "inductor")


# Products in 8 bits ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is an extra")
@pytest.mark.parametrize(
    "scaling",
    [
        "tensorwise",
        pytest.param(
            "rowwise",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.12", reason="a CPU then has one scale a tensor"
            ),
        ),
    ],
)
def test_products_in_8_bits_are_called_as_the_gpus_kernels_want_them(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, scaling: Any
) -> None:
    """Left operand by rows, right one by columns, inner dimension a multiple of 16 (40 tokens are padded to 48), one
    scale for each, or for its rows and columns; the result is that of the numbers dequantised, and of the emulation.

    Of the products with scales by rows torchao leaves those of the backward pass to the kernel without, and scales
    what comes out.
    """
    calls, multiply = list[tuple[Tensor, Tensor, dict[str, Any], Tensor]](), torch._scaled_mm

    def noted(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        product = multiply(a, b, **options)
        calls.append((a, b, options, product.clone()))  # which is scaled in place
        return product

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    x, d_out, results = torch.randn(40, 32).bfloat16(), torch.randn(40, 96).bfloat16(), []
    for emulated in (False, True):
        encoder = make_model(hidden_size=32).encoder
        Precision(
            PrecisionConfig(mode="fp8", tf32=False, emulate_fp8=emulated, fp8_scaling=scaling),
            torch.device("cpu"),
        ).convert(encoder)
        layer, inputs = encoder.blocks[0].attn.qkv, x.clone().requires_grad_()
        out = layer(inputs)
        out.backward(d_out)
        results.append((out, inputs.grad, layer.weight.grad))
        assert len(calls) == 3  # by the first layer: output, gradient of the inputs, of the weights
    for a, b, options, product in calls:
        scale_a, scale_b = options["scale_a"], options["scale_b"]
        assert (
            a.stride()[1] == b.stride()[0] == 1
            and a.shape[1] == b.shape[0]
            and a.shape[1] % 16 == 0
        )
        assert (
            a.dtype.itemsize == b.dtype.itemsize == 1
            and scale_a.dtype == scale_b.dtype == torch.float32
        )
        by_rows = scaling == "rowwise" and options["use_fast_accum"]
        wanted = ((len(a), 1), (1, b.shape[1])) if by_rows else ((), ())
        assert (tuple(scale_a.shape), tuple(scale_b.shape)) == wanted
        exact = (a.double() * scale_a) @ (b.double() * scale_b)
        torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=1e-5)
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
