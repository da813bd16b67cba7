"""Attention that finds like tokens before anything has been learnt (`attention_init: matching`).

In trained attention queries and keys are close to one matrix, and values and output to each other's inverse; a random
start has neither, and setting both spares the learning (Trockman & Kolter 2023, "Mimetic initialization of
self-attention layers"; here with positive signs). Every layer starts so.

Where there are token types, the queries and keys of the first layer also tell the segments apart: half of its heads
look for a token's like in the second segment, the others in the first, and find the token itself where there is none.
What they bring along are vectors with the other segment's type, so the layers above see which words of one sentence
stand in the other: what tasks on pairs of sentences are about (docs/log.md, 2026-11-21).

Random matrices come from torch's global generator. Shapes: V vocabulary, D hidden size, H heads, K head size.
"""

import torch
from torch import Tensor, nn

from cramming.model.config import ModelConfig
from cramming.model.layers import rotary_frequencies

LIKE_LOGIT = 5.0  # of a token with itself; unrelated tokens have logits around 0
COPIED_SHARE = 0.3  # of the attended vectors that is added to a token's own

# Between segments one token has to win against all others, so likeness weighs more.
LIKE_LOGIT_BETWEEN = 10.0
PREFERENCE = 1.5  # added to the logits of keys in the wanted segment, taken off those in the other
SLOW = 0.01  # radians per token: only such rotary pairs compare tokens that are dozens of places apart


@torch.no_grad()
def match_anywhere(qkv: nn.Linear, out: nn.Linear, head_size: int) -> None:
    """Queries and keys are one random rotation, values and output another and its inverse."""
    width = qkv.weight.shape[1]
    like = nn.init.orthogonal_(qkv.weight.new_empty(width, width))
    value = nn.init.orthogonal_(qkv.weight.new_empty(width, width))
    # A normalised input has length sqrt(D), a head's share of it sqrt(K): its product with itself, / sqrt(K).
    like *= (LIKE_LOGIT / head_size**0.5) ** 0.5
    qkv.weight.copy_(torch.cat((like, like, value)))
    out.weight.copy_(COPIED_SHARE * value.t())


@torch.no_grad()
def match_between_segments(qkv: nn.Linear, tokens_VD: Tensor, types_SD: Tensor, config: ModelConfig) -> None:
    """Set queries and keys alone, for inputs that are normalised sums of a token's and a segment's vector.

    Such an input is the token's content, plus what both segments have in common, plus (second) or minus (first) half of
    what tells them apart. A head compares contents in some dimensions; one more holds the key's segment.
    """
    width, size = config.hidden_size, config.head_size
    token_power, type_power = tokens_VD.square().sum(1).mean(), types_SD.square().sum(1).mean()
    scale = (width / (token_power + type_power)).sqrt()  # brings the sums to length sqrt(D)
    common_D, apart_D = scale * (types_SD[0] + types_SD[1]) / 2, scale * (types_SD[1] - types_SD[0]) / 2
    apart_D = apart_D - (apart_D @ _unit(common_D)) * _unit(common_D)
    compared, place = _slow_dimensions(config)
    like = (LIKE_LOGIT_BETWEEN * size**0.5 * width / len(compared)) ** 0.5 / (scale * token_power.sqrt())
    prefer = PREFERENCE * size**0.5 / (common_D.norm() * apart_D.norm())
    q_HKD, k_HKD = qkv.weight.new_zeros(2, config.num_heads, size, width)
    for head in range(config.num_heads):
        contents_CD = _directions(len(compared), torch.stack((_unit(common_D), _unit(apart_D))))
        q_HKD[head, compared] = k_HKD[head, compared] = like * contents_CD
        q_HKD[head, place] = _unit(common_D)  # the same for every token
        k_HKD[head, place] = (prefer if head % 2 == 0 else -prefer) * _unit(apart_D)
    qkv.weight[: 2 * width] = torch.cat((q_HKD, k_HKD)).flatten(0, 1)


def _slow_dimensions(config: ModelConfig) -> tuple[list[int], int]:
    """Dimensions of a head that compare contents, and the one for the segment; rotary positions leave few at rest."""
    size = config.head_size
    if config.positions != "rope":
        return list(range(min(size - 1, config.hidden_size - 2))), size - 1
    theta = config.rope_theta_global if config.half_window(0) is None else config.rope_theta_local
    turns = rotary_frequencies(size, theta, torch.device("cpu")).tolist()  # of the pairs (i, i + K/2), falling
    slow = [i for i, turn in enumerate(turns[:-1]) if turn < SLOW] or [len(turns) - 2]
    return [*slow, *(i + size // 2 for i in slow)], size // 2 - 1


def _directions(count: int, others_2D: Tensor) -> Tensor:
    """Random directions [count, D] at right angles to each other and to the given ones."""
    drawn_CD = torch.randn_like(others_2D[:1].expand(count, -1))
    drawn_CD = drawn_CD - drawn_CD @ others_2D.t() @ others_2D
    return torch.linalg.qr(drawn_CD.t())[0].t()


def _unit(vector_D: Tensor) -> Tensor:
    return vector_D / vector_D.norm()
