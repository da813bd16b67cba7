"""Packings and the definition of attention, small configurations of each family, models on padded and packed rows."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from cramming.model import attention
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.model.export import SPECIAL_TOKENS, save_pretrained
from cramming.model.heads import MaskedLM

HEADS, SIZE, TOKENS = 2, 8, 96
PACKINGS = {
    "rows": Packing(torch.arange(0, 97, 24, dtype=torch.int32), 24, 24),
    "ragged": Packing(
        torch.tensor([0, 1, 30, 30, 37, 90, 96, 96, 96], dtype=torch.int32), None, 53
    ),
    "in rows": Packing(
        torch.tensor([0, 5, 24, 48, 60, 72, 73, 96, 96], dtype=torch.int32), None, 24, 24
    ),
    "uneven": Packing(
        torch.tensor([0, *range(2, 46, 2), 96], dtype=torch.int32), None, 52
    ),  # one long, many short
}
SUBSET = torch.tensor([0, 3, 23, 24, 30, 47, 50, 60, 61, 73, 74, 95])  # three in each row of 24

BERT = ModelConfig(
    vocab_size=128, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, max_length=48
)
MODERN = replace(
    BERT,
    norm_order="pre",
    norm_bias=False,
    norm_eps=1e-5,
    final_norm=True,
    first_attn_norm=False,
    positions="rope",
    local_window=8,
    global_every=2,
    mlp="glu",
    token_types=0,
    head_bias=False,
    attention_bias=False,
    mlp_bias=False,
    init="depth_scaled",
)
CRAMMED = replace(
    MODERN,
    positions="scaled_sinusoidal",
    local_window=None,
    first_attn_norm=True,
    head_transform=False,
    decoder_bias=False,
    norm_bias=True,
    init="normal",
    norm_eps=1e-12,
    num_layers=3,
)

# Parts that an architecture may have, each by itself; what holds for all of them is tested in test_parts.py, that they
# are counted in test_config.py, and that exported folders compute them in test_hf_adapter.py.
PARTS: dict[str, dict[str, Any]] = {
    "relu2": {"activation": "relu2"},
    "relu2 glu": {"activation": "relu2", "mlp": "glu"},
    "softcap": {"logit_softcap": 0.8},
    "zero residual": {"zero_residual": True},
    "U-net skips": {"unet_skips": True},
    "value embeddings": {"value_embeddings": 1},
    "value residual": {"value_residual": True},
    "attention gate": {"attention_gate": True},
    "late layers": {"late_layers": 2},
    "convolution": {"convolution": 2},
    "relative positions": {"relative_positions": 8},
}
IN_STOCK = (
    "relu2",
    "relu2 glu",
    "zero residual",
)  # which transformers' own classes have, or which train only


def row_of(distance: int, num_rows: int) -> int:
    """Return the row of T5's table for this distance from query to key."""
    half, length = num_rows // 2, abs(distance)
    exact, direction = half // 2, half * (distance > 0)
    if length < exact:
        return direction + length
    steps = int(math.log(length / exact) / math.log(128 / exact) * (half - exact))
    return direction + min(exact + steps, half - 1)


def relative_terms(table_RH: Tensor, length: int) -> Tensor:
    """Return the terms of the scores [heads, queries, keys] of one sequence."""
    rows = [[row_of(k - q, len(table_RH)) for k in range(length)] for q in range(length)]
    return table_RH[torch.tensor(rows)].permute(2, 0, 1)


def alone(
    qkv: Tensor, packing: Packing, window: int | None, table_RH: Tensor | None = None
) -> Tensor:
    """Attention by its definition: a softmax over each sequence by itself, a window to both sides or the one before."""
    outputs = []
    for first, last in zip(packing.bounds_S[:-1].tolist(), packing.bounds_S[1:].tolist()):
        q, k, v = qkv[first:last].unbind(1)
        place = torch.arange(last - first)
        hidden = (place[:, None] - place).abs() > (len(qkv) if window is None else window)
        if packing.causal:
            hidden = hidden | (place > place[:, None])
        scores = torch.einsum("qhk,lhk->hql", q, k) * q.shape[-1] ** -0.5
        if table_RH is not None and last > first:
            scores = scores + relative_terms(table_RH, last - first)
        outputs.append(
            torch.einsum("hql,lhk->qhk", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        )
    return torch.cat(outputs)


def _weights(
    q: Tensor, k: Tensor, bounds_q: Tensor, bounds_k: Tensor, max_q: int, max_k: int, *rest: Any
) -> tuple[Tensor, float]:
    """Return attention weights [H, queries, keys] and scale of `torch.nn.attention.varlen.varlen_attn` as documented.

    A window counts from the common end of a sequence's queries and keys. `rest` is causal (a window too), scale,
    window; the further arguments of 2.13 are not used.
    """
    assert q.shape[-1] % 8 == 0, (
        "head_size_og should be a multiple of 8, this is ensured by padding!"
    )
    scale, window = q.shape[-1] ** -0.5 if rest[1] is None else rest[1], rest[2]
    sequences, from_end = [], []
    for bounds, x, longest in ((bounds_q, q, max_q), (bounds_k, k, max_k)):
        lengths, tokens = bounds.diff(), torch.arange(len(x))
        assert (
            bounds.dtype == torch.int32
            and bounds[0] == 0
            and bounds[-1] == len(x)
            and x.stride(-1) == 1
        )
        assert lengths.min() >= 0 and lengths.max() <= longest
        sequences.append(torch.searchsorted(bounds, tokens, right=True) - 1)
        from_end.append(bounds[sequences[-1] + 1] - tokens)
    before = from_end[1][None] - from_end[0][:, None]  # by how much a key stands before the query
    seen = sequences[0][:, None] == sequences[1][None]
    for side, distance in zip(window, (before, -before), strict=True):
        seen = seen & (distance <= side) if side >= 0 else seen
    return (torch.einsum("qhk,lhk->hql", q, k) * scale).masked_fill(~seen, -torch.inf).softmax(
        -1
    ).to(q.dtype), scale


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.einsum("hql,lhk->qhk", _weights(q, k, *rest)[0], v).contiguous()
    return (
        out,
        out.new_zeros(out.shape[1], len(out), dtype=torch.float),
        torch.zeros(2, dtype=torch.uint64),
    )


def _backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, *packing, causal, _, scale, window = (
        rest  # without output, log-sum-exp and state of the generator
    )
    weights, scale = _weights(q, k, *packing, causal, scale, window)
    d_weights = torch.einsum("qhk,lhk->hql", d_out, v)
    d_scores = scale * weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
    d_q, d_k = torch.einsum("hql,lhk->qhk", d_scores, k), torch.einsum("hql,qhk->lhk", d_scores, q)
    return (
        d_q.contiguous(),
        d_k.contiguous(),
        torch.einsum("hql,qhk->lhk", weights, d_out).contiguous(),
    )


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels `varlen` and `flex` train on a CPU too: FlashAttention's operator computes what its documentation
    says, slowly and in any type, and FlexAttention runs uncompiled, without its own check that this is a GPU."""
    from torch.nn.attention import varlen

    operators: dict[Any, Any] = {
        varlen._varlen_attn: _forward,
        varlen._varlen_attn_backward: _backward,
    }
    for operator, kernel in operators.items():
        if "cpu" not in operator._backend_fns:
            operator.register_kernel("cpu")(kernel)
    module = __import__("torch.nn.attention.flex_attention", fromlist=["_validate_device"])
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    for name in ("varlen", "flex"):
        allowed = attention.KERNELS[name]._replace(reason_against=lambda *_: None)
        monkeypatch.setitem(attention.KERNELS, name, allowed)


def perturbed(model: nn.Module, by: float = 0.1) -> Any:
    """Every parameter off its initial value: zeros and ones would hide a swapped bias or norm."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * by)
    return model.eval()


def own_logits(model: MaskedLM, texts: list[Tensor]) -> list[Tensor]:
    """Return the logits of texts end to end."""
    lengths = [len(text) for text in texts]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    packing = Packing(bounds, None, max(lengths))
    return list(
        model.eval()
        .logits(torch.cat(texts), positions, packing, torch.arange(len(positions)))
        .split(lengths)
    )


def padded(texts: list[Tensor], side: str = "right") -> dict[str, Tensor]:
    """The texts as transformers takes them."""
    longest = max(map(len, texts))
    ids, mask = (torch.zeros(len(texts), longest, dtype=torch.long) for _ in range(2))
    for row, text in enumerate(texts):
        place = slice(0, len(text)) if side == "right" else slice(longest - len(text), longest)
        ids[row, place], mask[row, place] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers that are the same in every test."""
    torch.manual_seed(7)


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A WordPiece tokenizer of about sixty entries."""
    words = [
        *SPECIAL_TOKENS.values(),
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
    ]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def save(tokenizer_file: Path) -> Callable[[MaskedLM, Path], None]:
    """`save(model, folder)`: save_pretrained with that tokenizer."""
    return lambda model, folder: save_pretrained(model, folder, tokenizer_file)
