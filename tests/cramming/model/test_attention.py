"""Every kernel is its definition, a softmax over each sequence alone, forward and backward.

FlashAttention's operator is one that computes what its documentation says, and FlexAttention runs uncompiled: what is
tested of both is all around them, bounds, windows, masks and query subsets.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain, combinations
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from cramming.model import attention, flex
from cramming.model.attention import Packing
from cramming.model.attention_kernels import group_by_length

from .conftest import HEADS, PACKINGS, SIZE, SUBSET, TOKENS, alone

ROWS, RAGGED, IN_ROWS, UNEVEN = PACKINGS.values()
IN_FP32 = ("products", "sdpa", "padded")  # the softmax, at least


def compare(
    kernel: str,
    packing: Packing,
    window: int | None,
    subset: Tensor,
    size: int = SIZE,
    table_RH: Tensor | None = None,
) -> None:
    """Compare output and gradients of a weighted sum with the definition in fp64, for all tokens and a query subset."""
    qkv = torch.randn(TOKENS, 3, HEADS, size, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv.unbind(1)
    layout = attention.prepare(kernel, packing, TOKENS, window, qkv.dtype, 0.0, table_RH)
    truth = alone(qkv, packing, window, table_RH)
    leaves = [qkv] if table_RH is None else [qkv, table_RH]
    outputs = [(attention.attend(q, k, v, layout), truth)]
    fewer = attention.restrict(layout, subset, TOKENS)
    assert fewer is not None or (packing.whole_rows is None and kernel != "flex")
    if fewer is not None:
        outputs.append((attention.attend(fewer.at_queries(q), k, v, fewer), truth[subset]))
    tolerance = 1e-5 if kernel in IN_FP32 else 1e-10
    for out, expected in outputs:
        d_out = torch.randn_like(expected)
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        gradients = [
            torch.autograd.grad(x, leaves, d_out, retain_graph=True) for x in (out, expected)
        ]
        torch.testing.assert_close(*gradients, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 0, 3, 23, 200])
@pytest.mark.parametrize(
    ("kernel", "packing"),
    [
        *(("sdpa", packing) for packing in ("rows", "in rows")),
        *(
            (kernel, packing)
            for kernel in ("padded", "products", "varlen", "flex")
            for packing in PACKINGS
        ),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("gpu_kernels")
def test_a_kernel_is_the_definition(
    kernel: str, packing: str, window: int | None, causal: bool
) -> None:
    """A query subset where a kernel or, in rows, SDPA can do it: a last layer costs the FLOPs that are counted."""
    compare(kernel, PACKINGS[packing]._replace(causal=causal), window, SUBSET)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("kernel", "packing"),
    [
        *(("sdpa", packing) for packing in ("rows", "in rows")),
        *((kernel, packing) for kernel in ("padded", "products") for packing in PACKINGS),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_rows", [4, 32])
def test_relative_positions_are_terms_of_the_scores(
    kernel: str, packing: str, window: int | None, causal: bool, num_rows: int
) -> None:
    """By the distance within a sequence, whatever the packing; the table gets its gradient."""
    table_RH = torch.randn(num_rows, HEADS, dtype=torch.float64, requires_grad=True)
    packed = PACKINGS[packing]._replace(causal=causal)
    compare(kernel, packed, window, SUBSET, table_RH=table_RH)


def test_in_bf16_too_each_pair_of_tokens_counts_in_the_tables_gradient() -> None:
    """A sum of ones in bf16 ends at 256. The masks of all tokens and of a subset are such as a GPU's kernels take."""
    length = 300
    packing = Packing(torch.tensor([0, length], dtype=torch.int32), length, length)
    table_RH = torch.zeros(4, HEADS, requires_grad=True)
    layout = attention.prepare("sdpa", packing, length, None, torch.bfloat16, 0.0, table_RH)
    subset = attention.restrict(layout, torch.arange(200), length)
    assert subset is not None
    for masks, queries in ((layout.masks, length), (subset.masks, 200)):
        (mask,) = masks
        assert mask is not None and mask.dtype == torch.bfloat16 and mask.stride(-1) == 1
        (gradient_RH,) = torch.autograd.grad(mask, table_RH, torch.ones_like(mask))
        assert gradient_RH.sum(0).tolist() == [queries * length] * HEADS


@pytest.mark.parametrize("size", [4, 12])
@pytest.mark.usefixtures("gpu_kernels")
def test_flash_attention_gets_heads_of_a_size_that_it_takes(size: int) -> None:
    compare("varlen", RAGGED, None, SUBSET, size)


@pytest.mark.parametrize("packing", [ROWS, RAGGED, UNEVEN])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("kernel", ["padded", "products"])
def test_one_query_of_each_ragged_sequence(kernel: str, packing: Packing, place: int) -> None:
    bounds = packing.bounds_S.unique().long()
    queries = bounds[:-1] if place == 0 else bounds[1:] - 1
    for causal in (False, True):
        compare(kernel, packing._replace(causal=causal), None, queries)
    if packing.row_length is None:
        layout = attention.prepare(kernel, packing, TOKENS, None, torch.float32, 0.0)
        assert attention.restrict(layout, queries, TOKENS) is not None
        assert (
            attention.restrict(layout, queries[1:], TOKENS) is None
        )  # a sequence has none: all are computed


def test_one_long_sequence_among_short_ones_is_a_group_of_its_own() -> None:
    """This holds if it saves more than a group costs."""
    for kernel, dtype in (("padded", torch.float32), ("products", torch.bfloat16)):
        assert attention.prepare(kernel, UNEVEN, TOKENS, None, dtype, 0.0).groups == (
            (22, 2),
            (1, 52),
        )


@pytest.mark.parametrize(
    ("packing", "dtype", "dropout", "kernel"),
    [
        (ROWS, torch.float32, 0.0, "sdpa"),
        (IN_ROWS, torch.float32, 0.0, "sdpa"),
        (RAGGED, torch.float32, 0.0, "padded"),
        (ROWS, torch.float16, 0.0, "sdpa"),
        (ROWS, torch.bfloat16, 0.0, "products"),
        (RAGGED, torch.bfloat16, 0.0, "products"),
        (ROWS, torch.bfloat16, 0.1, "sdpa"),
        (RAGGED, torch.bfloat16, 0.1, "padded"),
        (
            Packing(torch.tensor([0, 1024], dtype=torch.int32), 1024, 1024),
            torch.bfloat16,
            0.0,
            "sdpa",
        ),
    ],
)
def test_auto_chooses_by_packing_and_type(
    packing: Packing, dtype: torch.dtype, dropout: float, kernel: str
) -> None:
    assert attention.choose(packing, None, dtype, dropout) == kernel


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packing", [ROWS, RAGGED])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_products_in_bf16_lose_no_more_than_fused_attention(
    spread: float, packing: Packing, window: int | None
) -> None:
    """Also where scores are large: rounding those to 8 bits before the softmax would cost five times as much."""
    qkv = torch.randn(TOKENS, 3, HEADS, SIZE)
    qkv[:, :2] *= spread**0.5 * SIZE**0.25  # scores of this standard deviation
    low = qkv.bfloat16().requires_grad_()
    truth = alone(low.float(), packing, window)
    d_out = torch.randn(truth.shape).bfloat16()
    right = [truth, *torch.autograd.grad(truth, low, d_out.float())]
    both = []
    for kernel in ("padded", "products"):
        out = attention.attend(
            *low.unbind(1), attention.prepare(kernel, packing, TOKENS, window, low.dtype, 0.0)
        )
        both.append([out, *torch.autograd.grad(out, low, d_out)])
    for exact, theirs, mine in zip(right, *both, strict=True):
        assert (mine.float() - exact).norm() <= 1.5 * (theirs.float() - exact).norm()


@pytest.mark.parametrize("group_pairs", [0, 20, 10_000])
@pytest.mark.parametrize("lengths", [[3, 1, 4, 1, 5, 0, 2, 6], [7], [2, 2, 2], [0, 1, 9, 1, 1]])
def test_no_grouping_by_length_costs_less(lengths: list[int], group_pairs: int) -> None:
    def cost(groups: Sequence[Sequence[int]]) -> int:
        return sum(len(g) * max(lengths[i] for i in g) ** 2 + group_pairs for g in groups)

    grouped = group_by_length(lengths, group_pairs)
    full = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: lengths[i])
    assert sorted(chain.from_iterable(grouped)) == sorted(full)
    cuts = chain.from_iterable(combinations(range(1, len(full)), n) for n in range(len(full)))
    assert cost(grouped) == min(
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
    with (
        nullcontext()
        if has_flash
        else pytest.raises(ValueError, match=r"varlen: .* 8\.0.* on Tesla T4\. Set it")
    ):
        attention.prepare("varlen", ragged, TOKENS, 3, torch.float16, 0.0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kernel", ["padded", "products"])
@pytest.mark.parametrize("packing", [RAGGED, UNEVEN])
def test_lengths_that_the_host_knows_are_not_read_from_the_device(
    packing: Packing, kernel: str, window: int | None
) -> None:
    """Nor are queries that are known to be one for each sequence. A tensor without data cannot be read."""
    bounds_S = packing.bounds_S.unique()
    asked = packing._replace(bounds_S=bounds_S)
    known = asked._replace(lengths=tuple(bounds_S.diff().tolist()), one_query_each=True)

    def outputs(packing: Packing, device: str) -> list[Tensor]:
        q, k, v = (x.to(device) for x in qkv)
        packing = packing._replace(bounds_S=bounds_S.to(device))
        queries_S = packing.bounds_S[:-1].long()
        prepare = attention.KERNELS[kernel].prepare
        layout = prepare(packing, TOKENS, window)
        tensors = [attention.attend(q, k, v, layout)]
        fewer = attention.restrict(layout, queries_S, TOKENS)
        if fewer is not None:
            tensors.append(attention.attend(fewer.at_queries(q), k, v, fewer))
        return tensors

    qkv = torch.randn(TOKENS, 3, HEADS, SIZE).unbind(1)
    torch.testing.assert_close(outputs(known, "cpu"), outputs(asked, "cpu"), atol=0, rtol=0)
    assert all(out.is_meta for out in outputs(known, "meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        outputs(asked, "meta")


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("kernel", "packing"), [("sdpa", ROWS), ("sdpa", IN_ROWS), ("padded", RAGGED)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_layer_converts_a_mask(
    kernel: str, packing: Packing, window: int | None, dtype: torch.dtype
) -> None:
    """It is of the queries' type, its rows begin where a GPU's kernel wants it, and hides what the boolean one does."""
    layout = attention.prepare(kernel, packing, TOKENS, window, dtype, 0.0)
    plain = attention.KERNELS[kernel].prepare(packing, TOKENS, window)
    for mask, boolean in zip(layout.masks, plain.masks, strict=True):
        assert (mask is None) == (boolean is None)
        if mask is not None and boolean is not None:
            assert mask.dtype == dtype and all(n % 8 == 0 for n in mask.stride()[:-1])
            assert torch.equal(mask == 0, boolean) and torch.equal(mask.isinf(), ~boolean)
    qkv = torch.randn(TOKENS, 3, HEADS, SIZE).to(dtype).unbind(1)
    assert torch.equal(attention.attend(*qkv, layout), attention.attend(*qkv, plain))


def test_no_mask_where_none_is_needed() -> None:
    """A window as wide as the row costs nothing, and the kernel has causality of its own."""
    for packing in (ROWS, ROWS._replace(causal=True)):
        assert attention.prepare("sdpa", packing, TOKENS, 23, torch.float32, 0.0).masks == (None,)


@pytest.mark.parametrize("packing", [ROWS, RAGGED, IN_ROWS])
def test_dropout_of_probabilities_works_and_keeps_the_mean(packing: Packing) -> None:
    qkv = torch.randn(TOKENS, 3, HEADS, SIZE)
    layout = attention.prepare("auto", packing, TOKENS, None, torch.float32, 0.5)
    exact = attention.attend(*qkv.unbind(1), layout)
    samples = torch.stack([attention.attend(*qkv.unbind(1), layout, 0.5) for _ in range(400)])
    assert samples.std(0).max() > 0.1
    torch.testing.assert_close(samples.mean(0), exact, atol=0.5, rtol=0)
    assert (samples.mean(0) - exact).abs().mean() < 0.06


@pytest.mark.parametrize(
    ("kernel", "device", "dtype", "dropout", "says"),
    [
        ("varlen", "cpu", torch.bfloat16, 0.0, "runs on CUDA only. Set it to auto"),
        (
            "varlen",
            "cuda",
            torch.float32,
            0.0,
            "FlashAttention computes in 16 bits, not in float32",
        ),
        (
            "varlen",
            "cuda",
            torch.bfloat16,
            0.1,
            "has no dropout, and model.attention_dropout=0.1. Set it to auto",
        ),
        ("varlen", "cuda", torch.float16, 0.0, None),
        ("products", "cuda", torch.bfloat16, 0.0, "is for CPUs only"),
        ("products", "cpu", torch.bfloat16, 0.1, "has no dropout"),
        ("flex", "cpu", torch.float32, 0.0, "trains on CUDA only"),
        ("flex", "cuda", torch.float32, 0.1, "has no dropout"),
        ("flex", "cuda", torch.float32, 0.0, None),
        ("sdpa", "cuda", torch.float32, 0.1, None),
    ],
)
def test_where_a_kernel_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    device: str,
    dtype: torch.dtype,
    dropout: float,
    says: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    reason = attention.reason_against(kernel, torch.device(device), dtype, dropout)
    assert (
        reason is None
        if says is None
        else str(reason).startswith(f"attention.kernel={kernel}: {says}")
    )


def test_a_kernel_that_adds_nothing_to_scores_is_refused_and_never_chosen() -> None:
    table_RH, dtype = torch.randn(32, HEADS), torch.float32
    with torch.no_grad(), pytest.raises(ValueError, match=r"flex: .* model\.relative_positions=32"):
        attention.prepare("flex", RAGGED, TOKENS, None, dtype, 0.0, table_RH)
    on_gpu = cast(Tensor, SimpleNamespace(is_cuda=True, device=torch.device("cuda")))
    packing = RAGGED._replace(bounds_S=on_gpu)
    assert attention.choose(packing, None, torch.bfloat16, 0.0, 32) == "padded"


def test_a_kernel_that_does_not_take_the_packing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention\.kernel=sdpa: needs rows of equal length"):
        attention.prepare("sdpa", RAGGED, TOKENS, None, torch.float32, 0.0)
    with pytest.raises(ValueError, match=r"attention\.kernel=varlen: "):
        attention.prepare("varlen", ROWS, TOKENS, None, torch.float32, 0.0)


def packed(num_tokens: int, aligned: int | None) -> Packing:
    """Documents of all lengths, cut at multiples of `aligned`; some empty ones at the end."""
    ends = torch.randint(1, 300, (num_tokens // 40,)).cumsum(0)
    ends = torch.cat(
        [ends[ends < num_tokens], torch.arange(0, num_tokens + 1, aligned or num_tokens)]
    )
    bounds = torch.cat([ends.unique(), torch.full((3,), num_tokens)]).int()
    return Packing(bounds, None, int(bounds.diff().max()), aligned)


@pytest.mark.parametrize("window", [None, 0, 3, 127, 128, 300])
@pytest.mark.parametrize("num_tokens", [128, 1000, 1024])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_flex_are_those_of_the_whole_mask(
    num_tokens: int, window: int | None, causal: bool
) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    packing = packed(num_tokens, 500 if num_tokens == 1000 else None)._replace(causal=causal)
    with torch.no_grad():
        layout = attention.prepare(
            "flex", packing, num_tokens, window, torch.float32, 0.0
        ).block_mask
    ids_T, place = attention.sequence_ids(packing.bounds_S, num_tokens), torch.arange(num_tokens)
    reach = num_tokens if window is None else window
    mask_TT = (ids_T[:, None] == ids_T) & ((place[:, None] - place).abs() <= reach)
    mask_TT = mask_TT.tril() if causal else mask_TT
    shape = (None, None, num_tokens, num_tokens)
    expected = create_block_mask(lambda b, h, q, k: mask_TT[q, k], *shape, device="cpu")
    for name in (
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
        "q_num_blocks",
        "q_indices",
    ):
        assert torch.equal(getattr(layout, name), getattr(expected, name)), name
    assert layout.shape == expected.shape


def test_the_blocks_of_flex_take_no_mask_of_all_pairs() -> None:
    """65,536 tokens: with the whole mask 4.3 GB, once for each kind of layer in each pass."""
    tracker = MemTracker()
    with torch.no_grad(), tracker:
        attention.prepare("flex", packed(2**16, 1024), 2**16, 128, torch.float32, 0.0)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    assert 0 < peak["Total"] < 2**26  # lists of blocks of 128 by blocks of 128


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40])
def test_compiled_flex_attention_takes_the_blocks_that_are_meant(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Uncompiled it asks the mask for each pair; compiled it goes by blocks. Forward only: all that a CPU has."""
    compiled = flex.flex_attention(compiled=True)
    monkeypatch.setattr(flex, "flex_attention", lambda _: compiled)
    packing, qkv = packed(1000, None), torch.randn(1000, 3, HEADS, 16)
    with torch.no_grad():
        output = attention.attend(
            *qkv.unbind(1), attention.prepare("flex", packing, 1000, window, qkv.dtype, 0.0)
        )
    torch.testing.assert_close(output, alone(qkv, packing, window), atol=1e-5, rtol=1e-5)
