"""Assignment of layers to the stages of a pipeline, and of stages to ranks. Nothing is computed here."""

from dataclasses import dataclass

from cramming.model.config import ModelConfig

TOKENS = "encoder.embeddings.tokens.weight"


@dataclass(frozen=True)
class Order:
    """Row of `ORDERS`; `name` is that of torch's schedule class.

    With `is_v` the stages go down the ranks and come back up, so that the first and the last are on one rank; otherwise
    stage s is on rank s mod p. With `splits_backward` the gradients of the weights are computed apart from those of the
    inputs.
    """

    name: str
    stages_per_rank: int = 1
    is_v: bool = False
    splits_backward: bool = False

    def rank_of(self, stage: int, ranks: int) -> int:
        """Return the rank of a stage."""
        lap, rank = divmod(stage, ranks)
        return ranks - 1 - rank if self.is_v and lap % 2 else rank


# `parallel.schedule` -> torch's schedule. GPipe: Huang et al. 2019; 1F1B: DAPPLE, Fan et al. 2021; interleaved:
# Narayanan et al. 2021 (Megatron-LM), section 2.2; zero_bubble: ZB-H1, zbv: ZB-V, both Qi et al. 2023; dualpipev:
# DeepSeek-AI 2024, section 3.2.1, a descendant of the bidirectional pipelines of Chimera (Li and Hoefler 2021).
ORDERS: dict[str, Order] = {
    "gpipe": Order("ScheduleGPipe"),
    "1f1b": Order("Schedule1F1B"),
    "interleaved": Order("ScheduleInterleaved1F1B", 2),
    "zero_bubble": Order("ScheduleInterleavedZeroBubble", splits_backward=True),
    "zbv": Order("ScheduleZBVZeroBubble", 2, is_v=True, splits_backward=True),
    "dualpipev": Order("ScheduleDualPipeV", 2, is_v=True, splits_backward=True),
}


def layers_of_stage(stage: int, stages: int, num_layers: int) -> range:
    """Return the layers of a stage: equally many in each, one more in the first ones if they do not divide."""
    size, extra = divmod(num_layers, stages)
    first = stage * size + min(stage, extra)
    return range(first, first + size + (stage < extra))


def holders(name: str, config: ModelConfig, stages: int) -> tuple[int, ...]:
    """Return the stages that need the parameter of this name in a `MaskedLM`."""
    if name == TOKENS and config.tie_embeddings:
        return 0, stages - 1
    if name.startswith("encoder.embeddings."):
        return (0,)
    if name.startswith(("encoder.blocks.", "encoder.convolutions.")):
        layer = int(name.split(".")[2])
        return tuple(
            s for s in range(stages) if layer in layers_of_stage(s, stages, config.num_layers)
        )
    return (stages - 1,)


def fits(schedule: str, ranks: int, config: ModelConfig) -> bool:
    """Return whether each stage has a layer, and the last one all late layers."""
    stages = ranks * ORDERS[schedule].stages_per_rank
    return (
        config.num_layers >= stages
        and len(layers_of_stage(stages - 1, stages, config.num_layers)) >= config.late_layers
    )
