"""Rotary positions: what eager execution computes in fewer passes is the definition, forward and backward."""

import pytest
import torch

from cramming.model.layers import apply_rope, rope_tables


def test_eager_rotation_and_its_gradient_are_the_definitions() -> None:
    torch.manual_seed(0)
    rope = rope_tables(torch.tensor([0, 1, 2, 0, 1, 7]), 8, 100.0)
    cos, sin = (table.double() for table in rope)
    found, expected = (torch.randn(6, 3, 2, 8, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    found.requires_grad_()
    expected = expected.double().requires_grad_()
    weight = torch.randn(6, 2, 8)
    queries, plain = found[:, 1], expected[:, 1]  # a part of the projection, as the encoder takes it
    rotated, defined = apply_rope(queries, rope), plain * cos + plain.roll(4, -1) * sin
    torch.testing.assert_close(rotated.double(), defined)
    (rotated * weight).sum().backward()
    (defined * weight.double()).sum().backward()
    assert found.grad is not None and expected.grad is not None
    torch.testing.assert_close(found.grad.double(), expected.grad)
    assert torch.equal(queries, found[:, 1])  # what came in is as it was


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
    assert low.grad is not None and full.grad is not None and rotated.dtype == low.grad.dtype == dtype
    for found, true in ((rotated, expected), (low.grad, full.grad)):
        assert (found != true.to(dtype)).float().mean() < 0.002
