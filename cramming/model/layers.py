"""Norms, activations, dropout, MLP and position encodings.

Position encodings are computed from the token positions in each forward pass (microseconds), not stored in buffers,
which would have to be moved and resized, and would be lost on the meta device. Shapes: T tokens, D hidden size, F
intermediate size, H heads, K head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}

NORMS: dict[str, Callable[[ModelConfig, int], nn.Module]] = {
    "layernorm": lambda c, width: nn.LayerNorm(width, eps=c.norm_eps, bias=c.norm_bias),
    "rmsnorm": lambda c, width: RMSNorm(width, eps=c.norm_eps),
}

Rope = tuple[Tensor, Tensor]


def make_norm(config: ModelConfig, present: bool = True, width: int | None = None) -> nn.Module:
    """Return the configured norm over D, or over another `width`; the identity if `present` is false."""
    return NORMS[config.norm](config, width or config.hidden_size) if present else nn.Identity()


class RMSNorm(nn.RMSNorm):
    """RMS norm of the input in the weight's type (fp32), as autocast runs it on a GPU.

    On a CPU, torch computes the same from an input of another type, but warns.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class MLP(nn.Module):
    """Two-layer perceptron D -> F -> D; with `glu` the first matrix computes activation and gate (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "glu"
        inner = config.intermediate_size
        self.up = nn.Linear(
            config.hidden_size, 2 * inner if self.gated else inner, bias=config.mlp_bias
        )
        self.down = nn.Linear(inner, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_TD: Tensor) -> Tensor:
        inner = self.up(x_TD)
        if self.gated:
            value, gate = inner.chunk(2, dim=-1)
            return self.down(self.activation(value) * gate)
        return self.down(self.activation(inner))


class Dropout(nn.Dropout):
    """Dropout that on a CPU uses each random number of 64 bits for four elements, in half the time of torch's.

    The rate is then rounded to a multiple of 2^-16.
    """

    def forward(self, x: Tensor) -> Tensor:
        dropped = round(self.p * 2**16)
        is_eager_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if not self.training or not is_eager_cpu or not 0 < dropped < 2**16:
            return super().forward(x)
        drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device)
        drawn = drawn.random_(-(2**63), None).view(torch.int16)
        is_retained = (drawn[: x.numel()] >= dropped - 2**15).view(x.shape)
        return x * is_retained.to(x.dtype).mul_(2**16 / (2**16 - dropped))


def residual_sum(stream: Tensor, branch: Tensor) -> Tensor:
    """Return `stream + branch`; compiled code adds a 16-bit branch in fp32 and rounds, which gives the same number.

    Inductor would otherwise fuse product and sum to one `addmm`, for which cuBLAS first copies the whole stream.
    """
    if not torch.compiler.is_dynamo_compiling() or branch.dtype.itemsize != 2:
        return stream + branch
    dtype = torch.promote_types(stream.dtype, branch.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (stream.to(wide) + branch.to(wide)).to(dtype)


def materialized(x: Tensor) -> Tensor:
    """Return `x`. Compiled code writes it to memory here, and the backward pass reads it from there.

    Inductor would otherwise write only some sums of a residual stream, recompute those between from their terms in
    each kernel, and save the outputs of norms for the backward pass.
    """
    if torch.compiler.is_dynamo_compiling() and _can_materialize():
        written: Tensor = _Materialized.apply(x)
        return written
    return x


@torch.compiler.assume_constant_result  # a property of the installed torch: read while compiling, not traced
def _can_materialize() -> bool:
    import torch._inductor.inductor_prims  # registers the operation; loads the compiler

    return hasattr(torch.ops.prims, "inductor_force_stride_order")


class _Materialized(torch.autograd.Function):
    """Identity, as an operation that inductor neither fuses nor computes twice.

    With the strides that `x` has already, the operation copies nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        written: Tensor = torch.ops.prims.inductor_force_stride_order(x, x.stride())
        return written

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class ScaledSinusoid(nn.Module):
    """Sinusoids of Vaswani et al. (2017, section 3.5) times one trained scalar (Hua et al. 2022, FLASH)."""

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        self.max_length, self.width = max_length, width
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, positions_T: Tensor) -> Tensor:
        all_positions = torch.arange(self.max_length, device=positions_T.device)
        cos, sin = angle_tables(all_positions, self.width, 10_000.0)
        table = torch.stack((sin, cos), dim=-1).flatten(1)
        return (self.scale * table).to(self.scale.dtype).index_select(0, positions_T)


def rotary_frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    """Return the angular frequency of each pair of dimensions in radians per token, fp32 [width / 2], descending."""
    return 1.0 / theta ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)


def angle_tables(positions_T: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of each position, two fp32 [T, width / 2].

    The compiler treats both as one opaque operation. It would otherwise compute them anew for every head of every
    layer, forward and backward. `torch.export` does not use dynamo and traces the formula.
    """
    if torch.compiler.is_dynamo_compiling():
        tables: tuple[Tensor, Tensor] = torch.ops.cramming.angle_tables(positions_T, width, theta)
        return tables
    return _angle_tables(positions_T, width, theta)


def _angle_tables(positions_T: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    angles = positions_T.float()[:, None] * rotary_frequencies(width, theta, positions_T.device)
    return angles.cos(), angles.sin()


def _shapes_of_angle_tables(positions_T: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    shape = (positions_T.shape[0], width // 2)
    cos = positions_T.new_empty(shape, dtype=torch.float32)
    return cos, torch.empty_like(cos)


torch.library.custom_op("cramming::angle_tables", _angle_tables, mutates_args=()).register_fake(
    _shapes_of_angle_tables
)


def rope_tables(positions_T: Tensor, head_size: int, theta: float) -> Rope:
    """Return cosines and signed sines of rotary positions (Su et al. 2021), two fp32 [T, 1, K], in half-split layout.

    The rotation of halves (x1, x2) is (x1 cos - x2 sin, x2 cos + x1 sin); the minus sign is part of the table.
    """
    cos, sin = angle_tables(positions_T, head_size, theta)
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def apply_rope(x_THK: Tensor, rope: Rope) -> Tensor:
    """Rotate queries or keys, in fp32 whatever their type."""
    cos, sin = rope
    if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
        rotated: Tensor = _Rotation.apply(x_THK, cos, sin)
        return rotated
    return (x_THK * cos + x_THK.roll(x_THK.shape[-1] // 2, -1) * sin).to(x_THK.dtype)


class _Rotation(torch.autograd.Function):
    """Rotation of eager execution: two passes over memory each way, where separate operations take four."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x_THK, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, d_THK: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(d_THK, cos, sin, -1), None, None


def _rotated(x_THK: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half, x = x_THK.shape[-1] // 2, x_THK.float()
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=direction)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
    return out.to(x_THK.dtype)
