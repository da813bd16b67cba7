"""A start from the teacher of `objective=distill`: its parameters wherever name and shape agree, the rest at random."""

import torch

from cramming.data.corpus import Corpus
from cramming.engine import Engine
from cramming.model.distillation import DistilledLM
from cramming.progress import say
from cramming.recipe import Config


def set_weights(engine: Engine, corpus: Corpus, config: Config) -> None:
    """Set the weights that the teacher has, too; all processes get those of the first."""
    model = engine.whole_model(config)
    if isinstance(model, DistilledLM):  # rank 0's
        taken, total = take_over(model)
        say(f"start: {taken:,} of {total:,} parameters are the teacher's, the rest is random")
    if engine.strategy:
        engine.strategy.load_weights(model.state_dict() if model else {})


@torch.no_grad()
def take_over(model: DistilledLM) -> tuple[int, int]:
    """Copy the teacher's parameters where name and shape agree; return their numbers, copied and in all."""
    theirs = dict(model.teacher.named_parameters())
    taken = total = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        source = theirs.get(name)
        if source is not None and source.shape == parameter.shape:
            parameter.copy_(source)
            taken += parameter.numel()
    return taken, total
