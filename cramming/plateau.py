"""The plateau of a masked language model: it knows the frequencies of tokens, and uses no neighbour of a hidden one."""

import math
from pathlib import Path

import numpy as np

SLACK = 0.3  # nats around the unigram entropy


def plateau_line(held_out_N: np.ndarray, loss: float | None, folder: Path) -> str | None:
    """Return a line on a run that ended on the plateau, None for any other.

    `loss`: of the held-out tokens [N], all targets hidden; None where the model predicts no tokens.
    """
    entropy = unigram_entropy(held_out_N)
    if loss is None or loss < entropy - SLACK:
        return None
    return (
        f"the model knows little more than how frequent tokens are (loss {loss:.2f}, entropy of the held-out tokens"
        f" {entropy:.2f}); `cramming diagnose {folder}` looks for the cause"
    )


def unigram_entropy(ids_N: np.ndarray) -> float:
    """Return the entropy of the tokens' frequencies in nats."""
    counts = np.unique(ids_N, return_counts=True)[1]
    shares = counts / counts.sum()
    return -math.fsum(shares * np.log(shares))
