"""How a step is computed: the sections that decide it, and the engine they come to.

A run, a benchmark and a simulation without data build the same thing here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from cramming.config import build
from cramming.engine import Engine
from cramming.model.attention import AttentionConfig
from cramming.model.config import ModelConfig
from cramming.model.heads import MaskedLM
from cramming.optim import OptimConfig, build_host_optimizer, build_optimizer
from cramming.parallel.apply import MemoryConfig, apply, place
from cramming.parallel.mesh import Mesh
from cramming.precision import Precision, PrecisionConfig
from cramming.runtime import RuntimeConfig


@dataclass(frozen=True)
class EngineConfig:
    """The sections that say how a step is computed."""

    optim: OptimConfig
    attention: AttentionConfig
    memory: MemoryConfig
    runtime: RuntimeConfig
    precision: PrecisionConfig

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "EngineConfig":
        """From the root configuration."""
        return build(cls, {field.name: settings[field.name] for field in fields(cls)}, "")


def build_engine(config: EngineConfig, model_config: ModelConfig, mesh: Mesh, device: torch.device) -> Engine:
    """A model with random weights and all that `config` applies to it, its optimizer and number format."""
    return equip(place(build_model(config, model_config), config.memory, device), config, mesh, device)


def build_model(config: EngineConfig, model_config: ModelConfig) -> MaskedLM:
    """The plain model, with random weights."""
    attention = config.attention
    return MaskedLM(model_config, attention.kernel, attention.last_layer, config.memory.loss_chunk)


def equip(model: MaskedLM, config: EngineConfig, mesh: Mesh, device: torch.device) -> Engine:
    """The engine around a model that is where it belongs: number format, optimizer, memory tricks, compiler."""
    memory, precision = config.memory, Precision(config.precision, device)
    precision.convert(model.encoder)
    optimizer: torch.optim.Optimizer
    if memory.offload_optimizer:
        at_home = set(model.encoder.blocks.parameters()) if memory.offload_weights else set()
        optimizer = build_host_optimizer(model, config.optim, device, at_home)
    else:
        optimizer = build_optimizer(model, config.optim)
    model = apply(model, memory, config.runtime)
    return Engine(model, optimizer, precision, config.optim.clip, mesh, device, config.runtime.cuda_graphs)
