"""Which tokens belong together, and what attention derives of it once per forward pass; what all kernels share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cramming.config import UserError


class Packing(NamedTuple):
    """Which tokens belong together.

    `bounds_S` (int32, one more than sequences) holds 0, the end of each sequence, and T; it may end in repeats of T
    (empty sequences), so that its size never changes. `row_length` is L when the sequences are exactly the rows 0, L,
    2L ... T, else None. `max_length` is a bound on the longest sequence. `aligned_length` may be set when ragged
    sequences never cross a multiple of it: documents packed into rows.
    """

    bounds_S: Tensor
    row_length: int | None
    max_length: int
    aligned_length: int | None = None


class Layout(NamedTuple):
    """What the layers of one kind need to know of a batch. `groups` are the [rows, length] blocks of equal rows."""

    kernel: str
    packing: Packing
    half_window: int | None
    groups: tuple[tuple[int, int], ...] = ()
    masks: tuple[Tensor | None, ...] = ()
    gather_P: Tensor | None = None  # token of each padded place
    scatter_T: Tensor | None = None  # padded place of each token
    asking_M: Tensor | None = None  # tokens whose output is wanted, ascending, as many in each row; None: all
    asking_bounds_S: Tensor | None = None  # bounds of the sequences among the asking tokens, for varlen
    asking_gather_M: Tensor | None = None  # asking token of each row of the groups, where every sequence asks once
    block_mask: Any = None  # of FlexAttention

    def is_windowed(self) -> bool:
        """Whether the window hides anything."""
        return self.half_window is not None and self.half_window < self.packing.max_length - 1

    def at_asking(self, x_TX: Tensor) -> Tensor:
        """The rows of `x_TX` that belong to the tokens that ask."""
        return x_TX if self.asking_M is None else x_TX.index_select(0, self.asking_M)


@torch.compiler.disable  # numbers of one batch: not for a graph
def group_by_length(lengths: Sequence[int], group_pairs: int) -> list[list[int]]:
    """Non-empty sequences, by index, in the groups of similar length that cost least.

    A group costs what its pairs of tokens do, rows times the square of the longest, and `group_pairs` as many again.
    """
    lengths_S = np.asarray(lengths)
    sizes, counts = np.unique(lengths_S[lengths_S > 0], return_counts=True)
    ends = np.concatenate([[0], counts.cumsum()])
    least, begins = np.zeros(len(sizes) + 1), np.zeros(len(sizes) + 1, np.int64)
    for last in range(1, len(sizes) + 1):  # the best grouping of all up to here, by where its last group begins
        costs = least[:last] + (ends[last] - ends[:last]) * sizes[last - 1] ** 2 + group_pairs
        begins[last] = costs.argmin()
        least[last] = costs[begins[last]]
    groups, last = [], len(sizes)
    while last:
        inside = (lengths_S >= sizes[begins[last]]) & (lengths_S <= sizes[last - 1])
        groups.append(inside.nonzero()[0].tolist())
        last = begins[last]
    return groups[::-1]


def sequence_ids(bounds_S: Tensor, num_tokens: int) -> Tensor:
    """For each token the index of its sequence, int64 [T]."""
    tokens_T = torch.arange(num_tokens, device=bounds_S.device, dtype=bounds_S.dtype)
    return torch.searchsorted(bounds_S, tokens_T, right=True) - 1


def refuse_dropout(kernel: str, dropout: float) -> None:
    """UserError where attention probabilities would be dropped by a kernel that cannot."""
    if dropout:
        raise UserError(
            f"attention.kernel={kernel}: has no dropout, and model.attention_dropout={dropout:g}; set it to auto, sdpa"
            " or padded, or model.attention_dropout=0"
        )
