"""What each rank of test_pipeline.py runs: `launch(folder, cases, pipeline_ranks.py)`.

Every setting trains `HALF` steps, gathers its state, loads it into an engine made anew, and trains `HALF` more. Rank 0
writes what it found of each setting, and which passes each rank computed in the first step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from cramming.data.batches import BERT_MASKING
from cramming.data.run_data import RunData, fit_to_corpus
from cramming.engine import Engine, build_engine
from cramming.parallel.mesh import Mesh
from cramming.recipe import Config
from tests.cramming.parallel.rank_worker import be_ranks, own_cases

HALF = 15
CPU = torch.device("cpu")


def start(config: Config, mesh: Mesh) -> Engine:
    """An engine with the weights of the seed."""
    torch.manual_seed(config.seed)
    return build_engine(config, mesh, CPU)


def train(engine: Engine, config: Config, data: RunData, steps: range) -> list[list[float]]:
    """Loss, accuracy and gradient norm of each step."""
    mesh, train, losses = engine.mesh, config.train, []
    for step in steps:
        count = train.batch_size // (train.rows * mesh.data_size)
        firsts = [
            step * train.batch_size + (k * mesh.data_size + mesh.data_rank) * train.rows
            for k in range(count)
        ]
        stats = engine.step(
            [data.source.batch(first, train.rows) for first in firsts], config.peak_learning_rate
        )
        losses.append([stats.loss, stats.accuracy, stats.grad_norm])
    return losses


def opened(settings: dict[str, Any]) -> tuple[Config, RunData]:
    """The configuration with the corpus's vocabulary, and its data."""
    config = Config.of(settings)
    data = RunData.open(Path(settings["data"]["corpus"]), config, verify=False)
    return config.replace(model=fit_to_corpus(config.model, data.corpus)), data


def note_passes(done: list[tuple[str, int, int]]) -> None:
    """Let torch's stages add what they compute to `done`: kind, stage and micro-batch."""

    def noting(method: str, kind: Callable[[dict[str, Any]], str]) -> None:
        compute = getattr(PipelineStage, method)

        def noted(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            done.append((kind(kwargs), self.stage_index, chunk))
            return compute(self, chunk, *args, **kwargs)

        setattr(PipelineStage, method, noted)

    noting("forward_one_chunk", lambda _: "F")
    noting("backward_one_chunk", lambda options: "B" if options.get("full_backward", True) else "I")
    noting("backward_weight_one_chunk", lambda _: "W")


def main(folder: Path) -> None:
    """All settings, one after the other."""
    done: list[tuple[str, int, int]] = []
    note_passes(done)
    for name, case in own_cases(folder):
        config, data = opened(case["settings"])
        mesh = Mesh(config.parallel, CPU)
        engine = start(config, mesh)
        done.clear()
        losses = train(engine, config, data, range(1))
        order: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(order, list(done))
        losses += train(engine, config, data, range(1, HALF))
        assert engine.strategy
        state = engine.strategy.state(engine.optimizer)
        engine = start(config, mesh)
        assert engine.strategy
        engine.strategy.load_state(engine.optimizer, state)
        losses += train(engine, config, data, range(HALF, 2 * HALF))
        validation = engine.evaluate(data.held_out.batches(BERT_MASKING, config.train.rows))
        counts = mesh.object_from_main(sum(p.numel() for p in engine.parameters))
        state = engine.strategy.state(engine.optimizer)
        if mesh.is_main:
            results = {
                "steps": losses,
                "validation": validation,
                "state": state,
                "counts": counts,
                "order": order,
            }
            torch.save(results, folder / name)
        mesh.close()


if __name__ == "__main__":
    be_ranks(main)
