"""What is applied to a model from outside, in one function and one order: activation checkpointing, then compile.

Model code stays plain mathematics; this is the only place that changes how it is executed.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch.utils.checkpoint import checkpoint

from cramming.model.heads import MaskedLM


@dataclass(frozen=True)
class MemoryConfig:
    """Time for memory.

    `checkpoint_every: k` keeps only the input of every k-th block and computes the block again in the backward pass
    (Chen et al. 2016); 0 keeps everything. `compile: blocks` compiles one block and reuses it for all; `model`
    compiles the whole forward pass.
    """

    checkpoint_every: int
    compile: Literal["off", "blocks", "model"]

    def __post_init__(self) -> None:
        if self.checkpoint_every < 0:
            raise ValueError(f"checkpoint_every={self.checkpoint_every} is below 0; 0 turns it off")


def apply(model: MaskedLM, config: MemoryConfig) -> MaskedLM:
    """Apply the settings to a MaskedLM in place and return it."""
    blocks = model.encoder.blocks
    if config.checkpoint_every:
        for block in list(blocks)[:: config.checkpoint_every]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.compile == "blocks":
        for block in blocks:
            block.compile()
    elif config.compile == "model":
        model.compile()
    return model
