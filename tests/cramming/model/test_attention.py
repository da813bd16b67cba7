"""Every kernel equals the definition: dense masked softmax over all tokens, forward and backward."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain, combinations, product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cramming.model import attention
from cramming.model.attention import AttentionConfig, Packing
from cramming.model.attention_kernels import group_by_length
from cramming.plan.fake_gpu import FAKE_FLASH, fake_gpu
from cramming.plan.tracker import StorageTracker

HEADS, SIZE = 2, 8
ROWS = Packing(torch.arange(0, 97, 24, dtype=torch.int32), 24, 24)
RAGGED = Packing(torch.tensor([0, 1, 30, 30, 37, 90, 96, 96, 96], dtype=torch.int32), None, 53)
IN_ROWS = Packing(torch.tensor([0, 5, 24, 48, 60, 72, 73, 96, 96], dtype=torch.int32), None, 24, 24)
UNEVEN = Packing(
    torch.tensor([0, *range(2, 46, 2), 96], dtype=torch.int32), None, 52
)  # one long, many short: two groups


def run(kernel: str, packing: Packing, window: int | None, qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of its weighted sum."""
    qkv = qkv.clone().requires_grad_()
    layout = attention.prepare(kernel, packing, len(qkv), window, qkv.dtype, 0.0)
    out = attention.attend(*qkv.unbind(1), layout)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    assert qkv.grad is not None
    return out.detach(), qkv.grad


@pytest.mark.parametrize("window", [None, 0, 3, 23, 200])
@pytest.mark.parametrize(
    ("kernel", "packing"),
    [
        ("sdpa", ROWS), ("padded", ROWS), ("padded", RAGGED), ("sdpa", IN_ROWS), ("padded", IN_ROWS),
        ("padded", UNEVEN), ("products", ROWS), ("products", RAGGED), ("products", IN_ROWS), ("products", UNEVEN),
    ],
)  # fmt: skip
def test_kernel_equals_dense(kernel: str, packing: Packing, window: int | None) -> None:
    qkv = torch.randn(96, 3, HEADS, SIZE)
    expected, expected_grad = run("dense", packing, window, qkv)
    out, grad = run(kernel, packing, window, qkv)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packing", [ROWS, RAGGED, UNEVEN])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("kernel", ["padded", "products"])
def test_one_queries_token_of_each_ragged_sequence_gets_what_it_got_among_all(
    kernel: str, packing: Packing, place: int
) -> None:
    qkv = torch.randn(96, 3, HEADS, SIZE, requires_grad=True)
    q, k, v = qkv.unbind(1)
    bounds = packing.bounds_S.unique().long()
    queries = bounds[:-1] if place == 0 else bounds[1:] - 1
    layout = attention.prepare(kernel, packing, 96, None, torch.float32, 0.0)
    fewer = attention.restrict(layout, queries, 96)
    assert fewer is not None
    weights = torch.linspace(-1, 1, len(queries))[:, None, None]
    results = []
    for out in (attention.attend(q, k, v, layout)[queries], attention.attend(fewer.at_queries(q), k, v, fewer)):
        results.append((out, *torch.autograd.grad((out * weights).sum(), qkv)))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    if packing.row_length is None:
        assert attention.restrict(layout, queries[1:], 96) is None  # a sequence that does not ask: all are computed
        windowed = attention.prepare(kernel, packing, 96, 3, torch.float32, 0.0)
        assert attention.restrict(windowed, queries, 96) is None


SUBSET = torch.tensor([0, 3, 23, 24, 30, 47, 50, 60, 61, 73, 74, 95])  # three in each row of 24


@pytest.mark.parametrize(
    ("kernel", "packing", "window"),
    [
        *product(("sdpa", "products"), (ROWS, IN_ROWS), (None, 3)), *product(("dense",), (RAGGED,), (None, 3)),
        *product(("varlen", "padded", FAKE_FLASH), (ROWS, IN_ROWS), (3,)),
    ],
)  # fmt: skip
def test_a_query_subset_gets_what_it_got_among_all(kernel: str, packing: Packing, window: int | None) -> None:
    """With a window in rows SDPA does what some cannot: a last layer costs the FLOPs that are counted."""
    qkv = torch.randn(96, 3, HEADS, SIZE, requires_grad=True)
    q, k, v = qkv.unbind(1)
    expected = attention.attend(q, k, v, attention.prepare("dense", packing, 96, window, torch.float32, 0.0))[SUBSET]
    with fake_gpu(StorageTracker("cpu"), 2**26):
        fewer = attention.restrict(attention.KERNELS[kernel].prepare(packing, 96, window), SUBSET, 96)
    assert fewer is not None
    out = attention.attend(fewer.at_queries(q), k, v, fewer)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad((x * torch.arange(12.0)[:, None, None]).sum(), qkv)[0] for x in (out, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_dense_equals_each_sequence_alone(window: int | None) -> None:
    """The definition itself: a sequence does not see its neighbours, and a window counts to both sides."""
    qkv = torch.randn(96, 3, HEADS, SIZE)
    out, _ = run("dense", RAGGED, window, qkv)
    for first, last in zip(RAGGED.bounds_S[:-1].tolist(), RAGGED.bounds_S[1:].tolist()):
        q, k, v = qkv[first:last].unbind(1)
        for i in range(last - first):
            low = 0 if window is None else max(0, i - window)
            high = last - first if window is None else i + window + 1
            weights = (torch.einsum("hk,shk->hs", q[i], k[low:high]) * SIZE**-0.5).softmax(-1)
            torch.testing.assert_close(out[first + i], torch.einsum("hs,shk->hk", weights, v[low:high]))


def test_one_long_sequence_among_short_ones_is_a_group_of_its_own() -> None:
    """As far as what it saves is worth a group's cost."""
    layout = attention.prepare("padded", UNEVEN, 96, None, torch.float32, 0.0)
    assert layout.groups == ((22, 2), (1, 52))
    layout = attention.prepare("products", UNEVEN, 96, None, torch.bfloat16, 0.0)
    assert layout.groups == ((22, 2), (1, 52))


def test_auto_chooses_by_packing_and_type() -> None:
    chosen = [attention.choose(p, None, torch.float32, 0.0) for p in (ROWS, IN_ROWS, RAGGED)]
    assert chosen == ["sdpa", "sdpa", "padded"]
    chosen = [attention.choose(p, None, torch.bfloat16, 0.0) for p in (ROWS, IN_ROWS, RAGGED)]
    assert chosen == ["products"] * 3
    assert [attention.choose(p, None, torch.bfloat16, 0.1) for p in (ROWS, RAGGED)] == ["sdpa", "padded"]
    assert attention.choose(ROWS, None, torch.float16, 0.0) == "sdpa"
    long = Packing(torch.tensor([0, 1024], dtype=torch.int32), 1024, 1024)
    assert attention.choose(long, None, torch.bfloat16, 0.0) == "sdpa"


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packing", [ROWS, RAGGED])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_products_in_bf16_lose_no_more_than_fused_attention(
    spread: float, packing: Packing, window: int | None
) -> None:
    """Also where scores are large: rounding those to 8 bits before the softmax would cost five times as much."""
    qkv = torch.randn(96, 3, HEADS, SIZE)
    qkv[:, :2] *= spread**0.5 * SIZE**0.25  # scores of this standard deviation
    qkv = qkv.bfloat16()
    truth = run("dense", packing, window, qkv.float())
    fused, ours = (run(kernel, packing, window, qkv) for kernel in ("padded", "products"))
    for right, theirs, mine in zip(truth, fused, ours, strict=True):
        assert (mine.float() - right).norm() <= 1.5 * (theirs.float() - right).norm()


@pytest.mark.parametrize("group_pairs", [0, 20, 10_000])
@pytest.mark.parametrize("lengths", [[3, 1, 4, 1, 5, 0, 2, 6], [7], [2, 2, 2], [0, 1, 9, 1, 1]])
def test_no_grouping_by_length_costs_less(lengths: list[int], group_pairs: int) -> None:
    def cost(groups: Sequence[Sequence[int]]) -> int:
        return sum(len(g) * max(lengths[i] for i in g) ** 2 + group_pairs for g in groups)

    found = group_by_length(lengths, group_pairs)
    full = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: lengths[i])
    assert sorted(chain.from_iterable(found)) == sorted(full)
    cuts = chain.from_iterable(combinations(range(1, len(full)), n) for n in range(len(full)))
    assert cost(found) == min(
        cost([full[a:b] for a, b in zip((0, *cut), (*cut, len(full)), strict=True)]) for cut in cuts
    )


@pytest.mark.parametrize(
    ("capability", "has_flash"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_flash_attention_is_taken_only_where_the_gpu_has_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_flash: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    on_gpu = cast(Tensor, SimpleNamespace(is_cuda=True, device=torch.device("cuda")))
    rows, in_rows, ragged = (p._replace(bounds_S=on_gpu) for p in (ROWS, IN_ROWS, RAGGED))
    chosen = [attention.choose(p, 3, torch.float16, 0.0) for p in (rows, in_rows, ragged)]
    assert chosen == (["varlen"] * 3 if has_flash else ["sdpa", "sdpa", "padded"])
    with nullcontext() if has_flash else pytest.raises(ValueError, match=r"varlen: .* 8\.0.*this is Tesla T4; set it"):
        attention.prepare("varlen", ragged, 96, 3, torch.float16, 0.0)


def test_no_mask_where_none_is_needed() -> None:
    """A window as wide as the row costs nothing."""
    assert attention.prepare("sdpa", ROWS, 96, 23, torch.float32, 0.0).masks == (None,)


@pytest.mark.parametrize("packing", [ROWS, RAGGED, IN_ROWS])
def test_dropout_of_probabilities_works_and_keeps_the_mean(packing: Packing) -> None:
    qkv = torch.randn(96, 3, HEADS, SIZE)
    layout = attention.prepare("auto", packing, 96, None, torch.float32, 0.5)
    exact = attention.attend(*qkv.unbind(1), layout)
    samples = torch.stack([attention.attend(*qkv.unbind(1), layout, 0.5) for _ in range(400)])
    assert samples.std(0).max() > 0.1
    torch.testing.assert_close(samples.mean(0), exact, atol=0.5, rtol=0)
    assert (samples.mean(0) - exact).abs().mean() < 0.06


def test_unknown_kernel_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="auto, varlen, products, sdpa, padded, flex, dense"):
        AttentionConfig("flash9", "all")


@pytest.mark.parametrize(("kernel", "packing"), [("varlen", ROWS), ("flex", ROWS), ("sdpa", RAGGED)])
def test_kernel_that_cannot_run_here_is_refused(kernel: str, packing: Packing) -> None:
    with pytest.raises(ValueError, match=f"attention.kernel={kernel}: "):
        attention.prepare(kernel, packing, 96, None, torch.float32, 0.0)


@pytest.mark.parametrize(
    ("kernel", "dtype", "dropout", "says"),
    [
        ("varlen", torch.float32, 0.0, "FlashAttention computes in 16 bits, not in float32; set it to auto"),
        ("varlen", torch.bfloat16, 0.1, "has no dropout, and model.attention_dropout=0.1; set it to auto"),
        ("products", torch.bfloat16, 0.0, "is for CPUs only; set it to auto"),
        ("flex", torch.float32, 0.1, "has no dropout, and model.attention_dropout=0.1; set it to auto"),
        ("varlen", torch.float16, 0.0, None),
        ("flex", torch.float32, 0.0, None),
    ],
)
def test_a_number_format_or_dropout_that_a_kernel_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, kernel: str, dtype: torch.dtype, dropout: float, says: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    reason = attention.reason_against(kernel, torch.device("cuda"), dtype, dropout)
    assert reason is None if says is None else str(reason).startswith(f"attention.kernel={kernel}: {says}")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packing", [ROWS, RAGGED, IN_ROWS])
def test_varlen_equals_dense_on_cuda(packing: Packing, window: int | None) -> None:
    packing = packing._replace(bounds_S=packing.bounds_S.cuda())
    qkv = torch.randn(96, 3, HEADS, 32, device="cuda", dtype=torch.bfloat16)
    expected, expected_grad = run("dense", packing, window, qkv)
    out, grad = run("varlen", packing, window, qkv)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(grad, expected_grad, atol=5e-2, rtol=5e-2)


def packed(num_tokens: int, aligned: int | None) -> Packing:
    """Documents of all lengths, cut at multiples of `aligned`; some empty ones at the end."""
    ends = torch.randint(1, 300, (num_tokens // 40,)).cumsum(0)
    ends = torch.cat([ends[ends < num_tokens], torch.arange(0, num_tokens + 1, aligned or num_tokens)])
    bounds = torch.cat([ends.unique(), torch.full((3,), num_tokens)]).int()
    return Packing(bounds, None, int(bounds.diff().max()), aligned)


@pytest.mark.parametrize("window", [None, 0, 3, 127, 128, 300])
@pytest.mark.parametrize("num_tokens", [128, 1000, 1024])
def test_blocks_of_flex_are_those_of_the_whole_mask(num_tokens: int, window: int | None) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    packing = packed(num_tokens, 500 if num_tokens == 1000 else None)
    with torch.no_grad():
        found = attention.prepare("flex", packing, num_tokens, window, torch.float32, 0.0).block_mask
    (mask_TT,) = attention.prepare("dense", packing, num_tokens, window, torch.float32, 0.0).masks
    assert mask_TT is not None
    shape = (None, None, num_tokens, num_tokens)
    expected = create_block_mask(lambda b, h, q, k: mask_TT[q, k], *shape, device="cpu")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.shape == expected.shape


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("packing", [ROWS, RAGGED, IN_ROWS, None])
def test_flex_equals_dense(packing: Packing | None, window: int | None) -> None:
    """Also over many blocks. Forward only: FlexAttention has no backward pass on a CPU."""
    tokens, subset = (96, SUBSET) if packing else (1000, torch.randperm(250)[:70].sort().values)
    subset = subset if packing else torch.cat([subset + first for first in range(0, 1000, 250)])
    packing = packing or packed(1000, 250)
    q, k, v = torch.randn(tokens, 3, HEADS, SIZE).unbind(1)
    with torch.no_grad():
        expected = attention.attend(q, k, v, attention.prepare("dense", packing, tokens, window, torch.float32, 0.0))
        flex = attention.prepare("flex", packing, tokens, window, torch.float32, 0.0)
        torch.testing.assert_close(attention.attend(q, k, v, flex), expected, atol=1e-5, rtol=1e-5)
        fewer = attention.restrict(flex, subset, tokens)
        assert fewer is not None
        torch.testing.assert_close(attention.attend(q[subset], k, v, fewer), expected[subset], atol=1e-5, rtol=1e-5)


def test_the_blocks_of_flex_take_no_mask_of_all_pairs() -> None:
    """65,536 tokens: with the whole mask 4.3 GB, once for each kind of layer in each pass."""
    largest = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            largest[0] = max([largest[0], *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
            return out

    with torch.no_grad(), Sizes():
        attention.prepare("flex", packed(2**16, 1024), 2**16, 128, torch.float32, 0.0)
    assert largest[0] <= 513 * 513  # blocks of 128 by blocks of 128, and one more in torch's own transposition


@pytest.mark.gpu
@pytest.mark.parametrize("packing", [ROWS, RAGGED, IN_ROWS])
def test_varlen_with_a_query_subset_equals_dense_on_cuda(packing: Packing) -> None:
    packing = packing._replace(bounds_S=packing.bounds_S.cuda())
    q, k, v = torch.randn(96, 3, HEADS, 32, device="cuda", dtype=torch.bfloat16).unbind(1)
    queries = torch.tensor([0, 3, 23, 24, 30, 47, 50, 60, 61, 73, 74, 95], device="cuda")
    expected = attention.attend(q, k, v, attention.prepare("dense", packing, 96, None, q.dtype, 0.0))[queries]
    fewer = attention.restrict(attention.prepare("varlen", packing, 96, None, q.dtype, 0.0), queries, 96)
    assert fewer is not None
    torch.testing.assert_close(attention.attend(q[queries], k, v, fewer), expected, atol=2e-2, rtol=2e-2)
