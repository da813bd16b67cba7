"""Single operations on the device beside their definition in fp64: attention by every kernel, and the loss."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cramming.model import attention
from cramming.model.attention import Packing, sequence_ids
from cramming.model.heads import linear_cross_entropy
from cramming.model.relative_positions import buckets

pytestmark = pytest.mark.gpu
TOKENS, HEADS, SIZE = 1024, 4, 64
# Of rounding inputs, probabilities and sums of gradients to 8 bits of mantissa; of fp32.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}


def packing_of(name: str, device: torch.device) -> Packing:
    if name == "rows":
        return Packing(
            torch.arange(0, TOKENS + 1, 128, dtype=torch.int32, device=device), 128, 128, 128
        )
    bounds = {
        "documents": [
            0,
            5,
            90,
            128,
            256,
            300,
            384,
            500,
            512,
            640,
            700,
            768,
            896,
            1000,
            1024,
            1024,
            1024,
        ],
        "ragged": [0, 1, 30, 30, 37, 190, 600, 1000, 1024, 1024, 1024],
    }[name]
    aligned = 128 if name == "documents" else None
    return Packing(
        torch.tensor(bounds, dtype=torch.int32, device=device),
        None,
        128 if aligned else 410,
        aligned,
    )


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected.detach()).norm() / expected.norm())


@pytest.mark.parametrize("num_rows", [0, 32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("name", ["rows", "documents", "ragged"])
@pytest.mark.parametrize("kernel", ["varlen", "flex", "sdpa", "padded", "products"])
def test_attention_is_its_definition(
    device: torch.device, kernel: str, name: str, window: int | None, causal: bool, num_rows: int
) -> None:
    """Forward and backward, on random numbers, and with terms of relative positions."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    packing = packing_of(name, device)._replace(causal=causal)
    if reason := attention.reason_against(kernel, device, dtype, 0.0, num_rows):
        pytest.skip(reason)
    if kernel == "sdpa" and name == "ragged":
        pytest.skip("takes rows only")
    torch.manual_seed(0)
    numbers_RH = torch.randn(num_rows, HEADS, device=device)
    table_RH, exact_RH = numbers_RH.clone().requires_grad_(), numbers_RH.double().requires_grad_()
    layout = attention.prepare(
        kernel, packing, TOKENS, window, dtype, 0.0, table_RH if num_rows else None
    )
    stacked = torch.randn(TOKENS, 3, HEADS, SIZE, device=device, dtype=dtype)
    weight = torch.randn(TOKENS, HEADS, SIZE, device=device, dtype=dtype)
    qkv, exact = stacked.clone().requires_grad_(), stacked.double().requires_grad_()
    out = attention.attend(*qkv.unbind(1), layout)
    (out * weight).sum().backward()
    expected = dense(exact, mask_of(packing, window), exact_RH)
    (expected * weight.double()).sum().backward()
    assert qkv.grad is not None and exact.grad is not None
    assert distance(out, expected) < TOLERANCE[dtype]
    assert distance(qkv.grad, exact.grad) < TOLERANCE[dtype]
    if num_rows:
        assert table_RH.grad is not None and exact_RH.grad is not None
        assert distance(table_RH.grad, exact_RH.grad) < TOLERANCE[dtype]


def mask_of(packing: Packing, window: int | None) -> Tensor:
    """Return the attention mask, bool [T, T]."""
    ids = sequence_ids(packing.bounds_S, TOKENS)
    mask, place = ids[:, None] == ids, torch.arange(TOKENS, device=ids.device)
    mask = mask.tril() if packing.causal else mask
    return mask if window is None else mask & ((place[:, None] - place).abs() <= window)


def dense(qkv: Tensor, mask: Tensor, table_RH: Tensor) -> Tensor:
    q, k, v = qkv.unbind(1)
    scores = torch.einsum("mhk,thk->hmt", q, k) * SIZE**-0.5
    if len(table_RH):
        place = torch.arange(TOKENS, device=qkv.device)
        rows = buckets(place - place[:, None], len(table_RH))
        scores = scores + table_RH[rows].permute(2, 0, 1)
    return torch.einsum("hmt,thk->mhk", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["rows", "documents"])
@pytest.mark.parametrize("kernel", ["varlen", "flex", "sdpa"])
def test_a_query_subset_gets_what_it_got_among_all(
    device: torch.device, kernel: str, name: str, causal: bool
) -> None:
    """Forward and backward: the gradients are those of the whole with none for the other queries."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    packing = packing_of(name, device)._replace(causal=causal)
    queries = torch.arange(3, TOKENS, 8, device=device)
    if reason := attention.reason_against(kernel, device, dtype, 0.0):
        pytest.skip(reason)
    torch.manual_seed(0)
    qkv = torch.randn(3, TOKENS, HEADS, SIZE, device=device, dtype=dtype)
    weight = torch.randn(len(queries), HEADS, SIZE, device=device, dtype=dtype)
    layout = attention.prepare(kernel, packing, TOKENS, None, dtype, 0.0)
    fewer = attention.restrict(layout, queries, TOKENS)
    assert fewer is not None
    subset, whole = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    q, k, v = subset.unbind()
    output = attention.attend(fewer.at_queries(q), k, v, fewer)
    (output * weight).sum().backward()
    among_all = attention.attend(*whole.unbind(), layout)[queries]
    (among_all * weight).sum().backward()
    assert subset.grad is not None and whole.grad is not None
    assert distance(output, among_all.double()) < TOLERANCE[dtype]
    for part, expected in zip(subset.grad, whole.grad, strict=True):
        assert distance(part, expected.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_fused_loss_is_cross_entropy(device: torch.device, compiled: bool) -> None:
    """With so many targets that their logits come in chunks; loss, hits and all gradients."""
    if compiled and device.type == "cpu":
        pytest.skip("compiles kernels that are not the GPU's")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    targets, vocabulary, width = (10240, 32768, 128) if device.type == "cuda" else (1500, 16384, 16)
    torch.manual_seed(0)
    hidden = torch.randn(targets, width, device=device)
    weight, bias = (
        torch.randn(vocabulary, width, device=device) * 0.1,
        torch.randn(vocabulary, device=device) * 0.1,
    )
    wanted = torch.randint(0, vocabulary, (targets,), device=device)
    wanted[::7] = -100
    function: Callable[..., tuple[Tensor, ...]] = linear_cross_entropy
    if compiled:
        function = torch.compile(linear_cross_entropy, fullgraph=True)
    ours = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    loss, hits, _ = function(*ours, wanted, dtype)
    (loss * 1e-3).backward()
    exact = [x.to(dtype).double().requires_grad_() for x in (hidden, weight, bias)]
    logits = F.linear(*exact)
    expected = F.cross_entropy(logits, wanted, reduction="sum")
    (expected * 1e-3).backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-3)
    assert abs(int(hits) - int((logits.argmax(-1) == wanted).sum())) <= 5  # equal logits in 16 bits
    for actual, right in zip(ours, exact, strict=True):
        assert actual.grad is not None and right.grad is not None
        assert distance(actual.grad, right.grad) < TOLERANCE[dtype]
