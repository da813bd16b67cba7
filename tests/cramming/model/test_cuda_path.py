"""The Python of the CUDA path, run on a CPU: what it hands to the GPU's operators, and whole graphs of the models.

torch's FlashAttention operator has a kernel here that computes what its documentation says, slowly and in any type; all
around it is the real thing: our bounds, windows and fewer queries, torch's own wrapper and its autograd formula.
FlexAttention runs uncompiled, without the check that asks for a GPU in training, or compiled in the forward pass. What
is compared with is a softmax over each sequence alone, in fp64.
"""

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from cramming.config import build
from cramming.model import attention, flex, residual
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.model.heads import MaskedLM
from cramming.precision import Precision, PrecisionConfig

HEADS, SIZE, TOKENS = 2, 8, 96
PACKINGS = {
    "rows": Packing(torch.arange(0, 97, 24, dtype=torch.int32), 24, 24),
    "ragged": Packing(torch.tensor([0, 1, 30, 30, 37, 90, 96, 96, 96], dtype=torch.int32), None, 53),
    "in rows": Packing(torch.tensor([0, 5, 24, 48, 60, 72, 73, 96, 96], dtype=torch.int32), None, 24, 24),
}
QUERIES = torch.tensor([0, 3, 23, 24, 30, 47, 50, 60, 61, 73, 74, 95])  # three in each row of 24


def alone(qkv: Tensor, packing: Packing, window: int | None) -> Tensor:
    """Each sequence by itself: the definition."""
    outputs = []
    for first, last in zip(packing.bounds_S[:-1].tolist(), packing.bounds_S[1:].tolist()):
        q, k, v = qkv[first:last].unbind(1)
        place = torch.arange(last - first)
        hidden = (place[:, None] - place).abs() > (TOKENS if window is None else window)
        scores = torch.einsum("qhk,lhk->hql", q, k) * q.shape[-1] ** -0.5
        outputs.append(torch.einsum("hql,lhk->qhk", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


def _weights(
    q: Tensor, k: Tensor, bounds_q: Tensor, bounds_k: Tensor, max_q: int, max_k: int, *rest: Any
) -> tuple[Tensor, float]:
    """Of `torch.nn.attention.varlen.varlen_attn` by its documentation, [H, queries, keys], and the scale of scores.

    A window counts from the common end of a sequence's queries and keys. `rest`: causal (a window too), scale, window;
    what 2.13 has beyond that is not used.
    """
    assert q.shape[-1] % 8 == 0, "head_size_og should be a multiple of 8, this is ensured by padding!"
    scale, window = q.shape[-1] ** -0.5 if rest[1] is None else rest[1], rest[2]
    sequences, from_end = [], []
    for bounds, x, longest in ((bounds_q, q, max_q), (bounds_k, k, max_k)):
        lengths, tokens = bounds.diff(), torch.arange(len(x))
        assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == len(x) and x.stride(-1) == 1
        assert lengths.min() >= 0 and lengths.max() <= longest
        sequences.append(torch.searchsorted(bounds, tokens, right=True) - 1)
        from_end.append(bounds[sequences[-1] + 1] - tokens)
    before = from_end[1][None] - from_end[0][:, None]  # by how much a key stands before the query
    seen = sequences[0][:, None] == sequences[1][None]
    for side, distance in zip(window, (before, -before), strict=True):
        seen = seen & (distance <= side) if side >= 0 else seen
    return (torch.einsum("qhk,lhk->hql", q, k) * scale).masked_fill(~seen, -torch.inf).softmax(-1).to(q.dtype), scale


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.einsum("hql,lhk->qhk", _weights(q, k, *rest)[0], v).contiguous()
    return out, out.new_zeros(out.shape[1], len(out), dtype=torch.float), torch.zeros(2, dtype=torch.uint64)


def _backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, *packing, causal, _, scale, window = rest  # without output, log-sum-exp and state of the generator
    weights, scale = _weights(q, k, *packing, causal, scale, window)
    d_weights = torch.einsum("qhk,lhk->hql", d_out, v)
    d_scores = scale * weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
    d_q, d_k = torch.einsum("hql,lhk->qhk", d_scores, k), torch.einsum("hql,qhk->lhk", d_scores, q)
    return d_q.contiguous(), d_k.contiguous(), torch.einsum("hql,qhk->lhk", weights, d_out).contiguous()


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention's operator computes on a CPU too, from now on, and the kernel `varlen` is not refused there."""
    from torch.nn.attention import varlen

    operators: dict[Any, Any] = {varlen._varlen_attn: _forward, varlen._varlen_attn_backward: _backward}
    for operator, kernel in operators.items():
        if "cpu" not in operator._backend_fns:
            operator.register_kernel("cpu")(kernel)
    monkeypatch.setitem(
        attention.KERNELS, "varlen", attention.KERNELS["varlen"]._replace(reason_against=lambda *_: None)
    )


@pytest.fixture
def trains_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without its own check that training is on a GPU; uncompiled it is right on a CPU."""
    module = __import__("torch.nn.attention.flex_attention", fromlist=["_validate_device"])
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    monkeypatch.setitem(attention.KERNELS, "flex", attention.KERNELS["flex"]._replace(reason_against=lambda *_: None))


def compare(kernel: str, packing: Packing, window: int | None, size: int = SIZE) -> None:
    """Of all tokens, and of fewer that ask: output and gradients of a weighted sum, in fp64."""
    qkv = torch.randn(TOKENS, 3, HEADS, size, dtype=torch.float64, requires_grad=True)
    layout = attention.prepare(kernel, packing, TOKENS, window, qkv.dtype, 0.0)
    restricted = attention.KERNELS[kernel].restrict(layout, QUERIES, TOKENS)
    truth = alone(qkv, packing, window)
    found = [(attention.attend(*qkv.unbind(1), layout), truth)]
    if restricted is not None:
        q, k, v = qkv.unbind(1)
        found.append((attention.attend(q[QUERIES], k, v, restricted._replace(queries_M=QUERIES)), truth[QUERIES]))
    for out, expected in found:
        d_out = torch.randn_like(expected)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
        gradients = [torch.autograd.grad(x, qkv, d_out, retain_graph=True)[0] for x in (out, expected)]
        torch.testing.assert_close(*gradients, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("window", [None, 0, 3, 23, 200])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.usefixtures("flash")
def test_what_flash_attention_is_told_is_what_is_meant(packing: str, window: int | None) -> None:
    compare("varlen", PACKINGS[packing], window)


@pytest.mark.parametrize("size", [4, 12])
@pytest.mark.usefixtures("flash")
def test_flash_attention_gets_heads_of_a_size_that_it_takes(size: int) -> None:
    compare("varlen", PACKINGS["ragged"], None, size)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.usefixtures("trains_anywhere")
def test_what_flex_attention_is_told_is_what_is_meant(packing: str, window: int | None) -> None:
    compare("flex", PACKINGS[packing], window)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40])
def test_compiled_flex_attention_takes_the_blocks_that_are_meant(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Uncompiled it asks the mask for each pair; compiled it goes by blocks. Forward only: all that a CPU has."""
    compiled = flex.flex_attention(compiled=True)
    monkeypatch.setattr(flex, "flex_attention", lambda _: compiled)
    bounds = torch.tensor([0, 5, 250, 260, 500, 511, 700, 1000, 1000], dtype=torch.int32)
    packing, qkv = Packing(bounds, None, 300), torch.randn(1000, 3, HEADS, 16)
    with torch.no_grad():
        layout = attention.prepare("flex", packing, 1000, window, qkv.dtype, 0.0)
        dense = attention.prepare("dense", packing, 1000, window, qkv.dtype, 0.0)
        found, expected = (attention.attend(*qkv.unbind(1), one) for one in (layout, dense))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# Whole models ---------------------------------------------------------------------------------------------------------

SMALL = ("hidden_size=32", "num_heads=2", "intermediate_size=32", "vocab_size=64", "max_length=32")
MODELS: dict[str, tuple[str, ...]] = {
    "bert-base": ("num_layers=2",),
    "crammed-bert": ("num_layers=2",),
    "modern": ("num_layers=3", "local_window=8", "global_every=2"),
}


def small_model(compose: Callable[..., dict[str, Any]], name: str, kernel: str) -> MaskedLM:
    settings = compose(f"model={name}", *(f"model.{change}" for change in (*SMALL, *MODELS[name])))
    torch.manual_seed(0)
    return MaskedLM(build(ModelConfig, settings["model"], "model"), kernel)


def batch_of(packing: Packing) -> list[Any]:
    lengths = packing.bounds_S.diff().tolist()
    ids = torch.randint(0, 64, (TOKENS,))
    return [ids, torch.cat([torch.arange(n) for n in lengths]), packing, QUERIES, ids[QUERIES]]


def gradients_of(model: MaskedLM, call: Callable[..., Any], batch: list[Any]) -> list[Tensor]:
    """The loss, and the gradient of each parameter."""
    model.zero_grad()
    loss, _ = call(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("packing", ["rows", "in rows"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("flash")
def test_a_model_by_flash_attention_is_the_model(
    compose: Callable[..., dict[str, Any]], name: str, packing: str
) -> None:
    """Windows, documents and the last layer at the targets together; in fp64 up to the loss."""
    batch, results = batch_of(PACKINGS[packing]), []
    for kernel in ("varlen", "sdpa"):
        model = small_model(compose, name, kernel).double()
        results.append(gradients_of(model, model, batch))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


WAYS = {"rows": ("rows", "sdpa", False), "documents, flash, bf16 residual": ("in rows", "varlen", True)}


def compiled_equals_eager(compose: Callable[..., dict[str, Any]], name: str, way: str, backend: str) -> None:
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
            expected, found = ([x.clone() for x in gradients_of(model, c, batch)] for c in (model, compiled))
            for a, b in zip(found, expected, strict=True):
                assert (a - b).norm() <= (0.03 if lowered else 1e-5) * b.norm() + 1e-6
    assert len(graphs) == 1


@pytest.mark.parametrize(("name", "way"), zip(MODELS, [*WAYS, list(WAYS)[-1]], strict=True))  # each takes seconds
@pytest.mark.usefixtures("flash")
def test_a_pass_is_one_graph(compose: Callable[..., dict[str, Any]], name: str, way: str) -> None:
    compiled_equals_eager(compose, name, way, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("flash")
def test_a_pass_is_one_graph_for_inductor(compose: Callable[..., dict[str, Any]], name: str, way: str) -> None:
    compiled_equals_eager(compose, name, way, "inductor")


# Products in 8 bits ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is an extra")
@pytest.mark.parametrize(
    "scaling",
    [
        "tensorwise",
        pytest.param(
            "rowwise", marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="a CPU then has one scale a tensor")
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
        Precision(PrecisionConfig("fp8", False, emulated, scaling), torch.device("cpu")).convert(encoder)
        layer, inputs = encoder.blocks[0].attn.qkv, x.clone().requires_grad_()
        out = layer(inputs)
        out.backward(d_out)
        results.append((out, inputs.grad, layer.weight.grad))
        assert len(calls) == 3  # by the first layer: output, gradient of the inputs, of the weights
    for a, b, options, product in calls:
        scale_a, scale_b = options["scale_a"], options["scale_b"]
        assert a.stride()[1] == b.stride()[0] == 1 and a.shape[1] == b.shape[0] and a.shape[1] % 16 == 0
        assert a.dtype.itemsize == b.dtype.itemsize == 1 and scale_a.dtype == scale_b.dtype == torch.float32
        by_rows = scaling == "rowwise" and options["use_fast_accum"]
        wanted = ((len(a), 1), (1, b.shape[1])) if by_rows else ((), ())
        assert (tuple(scale_a.shape), tuple(scale_b.shape)) == wanted
        exact = (a.double() * scale_a) @ (b.double() * scale_b)
        torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=1e-5)
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
