"""The residual stream in 16 bits: where it is, that norms compute in fp32, and that nothing else changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cramming.model import residual
from cramming.model.config import ModelConfig
from cramming.model.layers import make_norm

FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "crammed": {"norm_order": "pre", "final_norm": True, "mlp": "glu"},
    "modern": {
        "norm_order": "pre",
        "norm": "rmsnorm",
        "norm_bias": False,
        "final_norm": True,
        "first_attn_norm": False,
        "qk_norm": True,
        "positions": "rope",
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_between_the_blocks_is_in_16_bits_and_no_weight(
    make_model: Callable[..., Any], tiny_source: Any, family: str
) -> None:
    """And the loss and its gradients are those of the stream in fp32, but for rounding."""
    results = []
    for lowered in (False, True):
        model, batch = make_model(**FAMILIES[family]), tiny_source.batch(0, 8)
        seen: list[Tensor] = []
        for block in model.encoder.blocks:
            for part in (block, block.attn_norm, block.mlp_norm):
                part.register_forward_hook(
                    lambda _, arguments, out, seen=seen: seen.extend((arguments[0], out))
                )
        if lowered:
            names = list(model.state_dict())
            residual.lower(model.encoder, torch.bfloat16)
            assert list(model.state_dict()) == names
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = model(
                batch.ids_T,
                batch.positions_T,
                batch.packing,
                batch.target_positions_M,
                batch.target_ids_M,
            )
        loss.backward()
        assert {x.dtype for x in seen} == {torch.bfloat16 if lowered else torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert 0 < (results[1] - results[0]).norm() < 0.03 * results[0].norm()


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_norm_computes_in_fp32_what_it_returns_in_16_bits(norm: Any) -> None:
    """Bit for bit the plain expression, in both passes; the input is far from centred."""
    part = make_norm(
        ModelConfig(hidden_size=32, num_heads=2, norm=norm, norm_bias=norm == "layernorm")
    )
    nn.init.normal_(part.weight)
    x_TD, d_TD = (
        (torch.randn(9, 32) * 3 + 100).bfloat16().requires_grad_(),
        torch.randn(9, 32).bfloat16(),
    )
    plain = type(part).forward(part, x_TD.float()).to(torch.bfloat16)  # type: ignore[operator]
    normed = residual._normed(part, x_TD)
    gradients = [
        torch.autograd.grad(out, [x_TD, *part.parameters()], d_TD) for out in (plain, normed)
    ]
    assert torch.equal(normed, plain)
    for expected, gradient in zip(*gradients, strict=True):
        assert torch.equal(gradient, expected) and gradient.dtype == expected.dtype
