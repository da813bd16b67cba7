"""`optim.frozen`: parameters that stay as the start made them, whatever else the run does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cramming.config import UserError
from cramming.execution import EngineConfig, build_engine, build_model
from cramming.model.config import ModelConfig
from cramming.parallel.mesh import Mesh, ParallelConfig

CPU = torch.device("cpu")
MODEL = ModelConfig(vocab_size=320, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=32, max_length=32)


@pytest.mark.parametrize(
    "memory", [{}, {"update_in_backward": True}, {"offload_weights": True}, {"offload_optimizer": True}]
)
def test_frozen_parameters_stay_and_all_others_move(
    compose: Callable[..., dict[str, Any]], tiny_source: Any, memory: dict[str, bool]
) -> None:
    config = EngineConfig.of(
        compose("precision=fp32", "optim=adamw-tiny", r"optim.frozen=['encoder\.blocks\.0\.attn\..*']")
    )
    config = replace(
        config, optim=replace(config.optim, clip=None, weight_decay=0.1), memory=replace(config.memory, **memory)
    )
    torch.manual_seed(0)
    engine = build_engine(config, MODEL, Mesh(ParallelConfig("auto"), CPU), CPU)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    for step in range(2):
        assert engine.step([tiny_source.batch(4 * step, 4)], 1e-2)
    stayed = {name for name, p in engine.model.named_parameters() if torch.equal(p, before[name])}
    assert stayed == {name for name in before if name.startswith("encoder.blocks.0.attn.")}


@pytest.mark.parametrize("pattern", ["nothing_is_called_this", "blocks", ".*", "("])
def test_patterns_that_fit_no_parameter_or_leave_none_are_refused(
    compose: Callable[..., dict[str, Any]], pattern: str
) -> None:
    with pytest.raises(UserError, match="frozen"):
        build_model(EngineConfig.of(compose(f"optim.frozen=['{pattern}']")), MODEL)
