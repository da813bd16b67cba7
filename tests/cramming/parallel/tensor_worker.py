"""One rank of the runs that test_tensor.py starts: `python tensor_worker.py cases.json results`."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cramming.checks import Config
from cramming.engine import Engine, build_engine
from cramming.parallel.mesh import Mesh
from cramming.train_state import RunData, fit_to_corpus

CPU = torch.device("cpu")


class Collectives(TorchDispatchMode):
    """Counts the numbers that this rank hands to collectives, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = str(function).split(".")[1]
        if function.namespace == "_c10d_functional" and kind != "wait_tensor" and not kind.startswith("_"):
            self.numbers[kind] = self.numbers.get(kind, 0) + args[0].numel()
        return function(*args, **(kwargs or {}))


def train(settings: dict[str, Any], steps: int, load: str | None = None, save: str | None = None) -> dict[str, Any]:
    """`steps` steps of the run that the settings describe: what each gave, the validation, and what lies here."""
    config = Config.of(settings)
    data = RunData.open(settings, config, verify=False)
    config = replace(config, model=fit_to_corpus(config.model, data.corpus))
    mesh = Mesh(config.parallel, CPU)
    torch.manual_seed(config.seed)
    engine = build_engine(config, mesh, CPU)
    first = _load(engine, load) if load else 0
    rows, found = config.train.rows, []
    passes = config.train.batch_size // (rows * mesh.data_size)
    counted = Collectives()
    for step in range(first, first + steps):
        begin = step * config.train.batch_size
        samples = [begin + (k * mesh.data_size + mesh.data_rank) * rows for k in range(passes)]
        batches = [data.source.of(config.objective.at(0.0)).batch(sample, rows) for sample in samples]
        if step == 0:
            with counted:
                engine.forward_backward(batches)
        else:
            engine.forward_backward(batches)
        stats = engine.update(config.peak_learning_rate)
        found.append([stats.loss, stats.accuracy, stats.grad_norm])
    validation = engine.evaluate(data.held_out.batches(config.objective.at(0.0), rows))
    if save:
        state = engine.spread.state(engine.optimizer) if engine.spread else _whole_state(engine)
        if mesh.is_main:
            torch.save((first + steps, state), save)
    held = sum(_held(p) for p in engine.parameters)
    moments = sum(_held(m) for state in engine.optimizer.state.values() for m in state.values() if m.ndim)
    drift = _drift(engine, mesh)
    own = _masks_differ(mesh)
    mesh.close()
    return {
        "steps": found, "validation": validation, "parameters": held, "moments": moments, "drift": drift,
        "masks_differ": own, "collectives": counted.numbers, "targets": [len(b.target_ids_M) for b in batches],
    }  # fmt: skip


def _whole_state(engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    return engine.model.state_dict(), engine.optimizer.state_dict()


def _load(engine: Engine, path: str) -> int:
    steps: int
    steps, state = torch.load(path, weights_only=True)
    if engine.spread:
        engine.spread.load_state(engine.optimizer, state if engine.mesh.is_main else ({}, {}))
    else:
        engine.model.load_state_dict(state[0])
        engine.optimizer.load_state_dict(state[1])
    return steps


def _held(tensor: torch.Tensor) -> int:
    """Numbers in memory here, not only those that are looked at."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().nbytes() // local.element_size()


def _drift(engine: Engine, mesh: Mesh) -> float:
    """The largest difference between ranks in parameters that all have."""
    if mesh.world_size == 1:
        return 0.0
    whole = [p for p in engine.parameters if isinstance(p, DTensor) and all(c.is_replicate() for c in p.placements)]
    drift = 0.0
    for p in whole:
        mean = p.to_local().detach().double().clone()
        torch.distributed.all_reduce(mean)
        drift = max(drift, float((mean / mesh.world_size - p.to_local()).abs().max()))
    return drift


def _masks_differ(mesh: Mesh) -> bool | None:
    """Whether two ranks of `tp` drop other things where the stream is cut, and go on with the same numbers."""
    if mesh.dims is None or mesh.dims["tp"].size() == 1:
        return None
    from cramming.parallel.tensor import _draw_own_numbers

    dropout = nn.Dropout(0.5)
    _draw_own_numbers(dropout, mesh.dims["tp"])
    drawn = torch.stack((dropout(torch.ones(64)), torch.rand(64)))
    each = [torch.empty_like(drawn) for _ in range(mesh.world_size)]
    torch.distributed.all_gather(each, drawn)
    return not torch.equal(each[0][0], each[1][0]) and torch.equal(each[0][1], each[1][1])


def main(cases: str, out: str) -> None:
    """Each case has a process group of its own."""
    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"])
    for number, (name, case) in enumerate(json.loads(Path(cases).read_text()).items()):
        os.environ["MASTER_PORT"] = str(port + number)
        found = train(**case)
        Path(f"{out}-{name}-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
