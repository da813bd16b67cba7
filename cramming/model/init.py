"""Initialisation of every parameter, from torch's global generator.

Shapes: D hidden size, H heads, K head size.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import ModelConfig

ROLES: dict[str, str] = {  # end of a parameter's name -> its role
    "norm.weight": "one",
    "bias": "zero",
    "positions.scale": "scale",
    "taps": "tap",
    "skip_scales": "one",
    "value_scales": "half",
    "tokens.weight": "embedding",  # value_tokens too
    "positions.weight": "embedding",
    "token_types.weight": "embedding",
    "qkv.weight": "inner",
    "up.weight": "inner",
    "gate.weight": "inner",
    "out.weight": "residual",
    "down.weight": "residual",
    "dense.weight": "head",
    "decoder_weight": "head",
    "pooler.weight": "inner",
    "projection.weight": "projection",
    "transform.weight": "head",
    "classifier.weight": "classifier",
}


def _depth_scaled(config: ModelConfig, role: str) -> float:
    """Return the standard deviation of ModernBERT's "full megatron" scheme (its appendix A).

    Matrices that write to the residual stream shrink with depth.
    """
    shrunk = (2 * config.num_layers) ** -0.5
    scale = {
        "residual": shrunk,
        "head": shrunk,
        "classifier": config.hidden_size**-0.5 / config.init_std,
    }
    return config.init_std * scale.get(role, 1.0)


# scheme -> (standard deviation of a matrix by role, cut at this many deviations or None)
INITS: dict[str, tuple[Callable[[ModelConfig, str], float], float | None]] = {
    "normal": (lambda config, role: config.init_std, None),
    "truncated": (lambda config, role: config.init_std, 2.0),
    "depth_scaled": (_depth_scaled, 2.0),
    # Nguyen & Salazar 2019, section 2
    "small": (lambda config, role: math.sqrt(2 / (5 * config.hidden_size)), None),
}


def _role(name: str) -> str:
    role = next((role for ending, role in ROLES.items() if name.endswith(ending)), None)
    assert role is not None, f"no initialisation is defined for parameter {name}"
    return role


@torch.no_grad()
def initialize(module: nn.Module, config: ModelConfig, done: nn.Module | None = None) -> None:
    """Set every parameter of `module` by its role; a name without a role is an error.

    `done` is a submodule that is initialised already and stays unchanged.
    """
    finished = set() if done is None else set(done.parameters())
    for name, parameter in module.named_parameters():
        if parameter not in finished:
            _fill(parameter, _role(name), config)
    if config.attention_init == "mimetic":
        for part in module.modules():
            qkv, out = getattr(part, "qkv", None), getattr(part, "out", None)
            if not isinstance(qkv, nn.Linear) or not isinstance(out, nn.Linear):
                continue
            if qkv.weight not in finished:
                _set_mimetic(qkv.weight, out.weight, config.num_heads)


def _fill(parameter: Tensor, role: str, config: ModelConfig) -> None:
    constants = {"one": 1.0, "half": 0.5, "zero": 0.0, "scale": config.hidden_size**-0.5}
    if config.zero_residual:
        constants["residual"] = 0.0
    if role == "tap":
        # Random signs distinguish the two sides; all neighbours together have half the token's variance.
        nn.init.normal_(parameter, std=(2 * parameter.shape[0]) ** -0.5)
        return
    if role == "projection":
        # Projected token vectors keep about the size of their components.
        nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        return
    if role in constants:
        parameter.fill_(constants[role])
        return
    deviation, cut = INITS[config.init]
    std = deviation(config, role)
    if cut is None:
        nn.init.normal_(parameter, std=std)
    else:
        nn.init.trunc_normal_(parameter, std=std, a=-cut * std, b=cut * std)


# Shares of noise and identity in the products of two matrices (Trockman & Kolter 2023, "Mimetic Initialization of
# Self-Attention Layers", section 4): a head's queries and keys, and values and output.
QUERY_KEY, VALUE_OUT = (0.7, 0.7), (0.4, -0.4)


def _set_mimetic(qkv: Tensor, out: Tensor, heads: int) -> None:
    """Initialise attention so that a token attends to similar tokens and subtracts a share of their values.

    Trained models have this structure (Trockman & Kolter 2023).
    """
    width = out.shape[0]
    pairs = [_factors(out, width // heads, *QUERY_KEY) for _ in range(heads)]
    out_DD, values_DD = _factors(out, width, *VALUE_OUT)
    queries = [query.t() for query, _ in pairs]
    keys = [key.t() for _, key in pairs]
    qkv.copy_(torch.cat([*queries, *keys, values_DD.t()]))
    out.copy_(out_DD)


def _factors(like_DD: Tensor, rank: int, noise: float, identity: float) -> tuple[Tensor, Tensor]:
    """Return A and B [D, rank] such that A B^T is the best approximation of noise * Z + identity * I.

    The entries of Z are normal with variance 1 / D.
    """
    width = like_DD.shape[0]
    noise_DD = torch.empty_like(like_DD).normal_(std=noise * width**-0.5)
    left, values, right_t = torch.linalg.svd(noise_DD + identity * torch.eye(width).to(like_DD))
    root = values[:rank].sqrt()
    return left[:, :rank] * root, right_t[:rank].t() * root
