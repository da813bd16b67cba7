"""One of the processes that `launch` starts; they go through all cases, each of a number of ranks of its own.

`train` is a run without its clock and files; the other processes wait for the next case.
"""

import faulthandler
import json
import multiprocessing.connection
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cramming.data.run_data import RunData, fit_to_corpus
from cramming.engine import Engine, build_engine
from cramming.parallel.mesh import Mesh
from cramming.recipe import Config

CPU = torch.device("cpu")
Cases = Mapping[str, Mapping[str, Any]]


def launch(
    folder: Path,
    cases: Cases,
    worker: Path = Path(__file__),
    agents: Sequence[Sequence[str]] = ((),),
) -> None:
    """Let processes go through all `cases`: as many as the largest has `ranks`, forks of one that runs `worker`, so
    that all that it imports is imported once; or those of torchrun, started with each of the `agents`' arguments."""
    (folder / "cases.json").write_text(json.dumps(cases, default=str))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = (
            free.getsockname()[1] % 20_000 + 10_000
        )  # below those that systems give out by themselves
    usual = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    usual["PYTHONPATH"] = os.pathsep.join(sys.path)
    torchrun = ["-m", "torch.distributed.run"]
    commands = [
        [sys.executable, *(torchrun if how else []), *how, str(worker), str(folder)]
        for how in agents
    ]
    started = [subprocess.Popen(command, env=usual) for command in commands]
    try:
        assert not any(process.wait(timeout=600) for process in started)
    finally:
        for process in started:
            process.kill()


def be_ranks(main: Callable[[Path], None]) -> None:
    """Run `main(folder)` in each fork of this worker, or in this process if torchrun has started it."""
    folder = Path(sys.argv[1])

    def be_rank(rank: int) -> None:
        os.environ.update(
            RANK=str(rank), TORCHELASTIC_RESTART_COUNT=str(rank)
        )  # torchrun's nodes count differently
        main(folder)

    if "RANK" in os.environ:
        return main(folder)
    fork = multiprocessing.get_context("fork").Process
    ranks = max(case["ranks"] for case in json.loads((folder / "cases.json").read_text()).values())
    forks = [fork(target=be_rank, args=(rank,)) for rank in range(ranks)]
    for process in forks:
        process.start()
    while alive := [process.sentinel for process in forks if process.exitcode is None]:
        multiprocessing.connection.wait(alive)
        if any(process.exitcode for process in forks):  # the others would wait for it
            for process in forks:
                process.kill()
    sys.exit(any(process.exitcode for process in forks))


def run_cases(folder: Path, cases: Cases) -> dict[str, list[dict[str, Any]]]:
    """Return the results of `train` on every rank, by case."""
    launch(folder, cases)
    files = {
        name: [folder / f"{name}-{rank}.json" for rank in range(case["ranks"])]
        for name, case in cases.items()
    }
    return {name: [json.loads(path.read_text()) for path in paths] for name, paths in files.items()}


def assert_same(name: str, actual: list[list[float]], expected: list[list[float]]) -> None:
    """Assert equal loss, accuracy and gradient norm of each step, within the error of fp32 sums in another order.

    Hits of a tie may differ.
    """
    loss, accuracy, norm = torch.tensor(actual, dtype=torch.float64).T
    one_loss, one_accuracy, one_norm = torch.tensor(expected, dtype=torch.float64).T
    torch.testing.assert_close(
        loss, one_loss, rtol=1e-5, atol=0, msg=lambda text: f"{name}: {text}"
    )
    torch.testing.assert_close(
        accuracy, one_accuracy, rtol=0, atol=0.01, msg=lambda text: f"{name}: {text}"
    )
    torch.testing.assert_close(
        norm, one_norm, rtol=1e-5, atol=0, msg=lambda text: f"{name}: {text}"
    )


def own_cases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and case, of those in which this process is a rank; each has a rendezvous of its own."""
    faulthandler.dump_traceback_later(600, exit=True)  # no test waits for ever
    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"])
    for number, (name, case) in enumerate(json.loads((folder / "cases.json").read_text()).items()):
        if int(os.environ["RANK"]) < case["ranks"]:
            os.environ.update(WORLD_SIZE=str(case["ranks"]), MASTER_PORT=str(port + number))
            yield name, case


class Collectives(TorchDispatchMode):
    """Counts the numbers that this rank hands to collectives, by kind: DTensor's, and those of DDP and FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kind, operand = str(function).split(".")[1], args[0] if args else None
        if (
            function.namespace == "_c10d_functional"
            and kind != "wait_tensor"
            and not kind.startswith("_")
        ):
            self._count(kind, [operand])
        elif function.namespace == "c10d" and kind in (
            "allreduce_",
            "_allgather_base_",
            "_reduce_scatter_base_",
        ):
            self._count(kind, operand if kind == "allreduce_" else [args[1]])
        return function(*args, **(kwargs or {}))

    def _count(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        self.numbers[kind] = self.numbers.get(kind, 0) + sum(tensor.numel() for tensor in tensors)


def train(case: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of the run that the case's settings describe: what each gave, the validation, and what lies here."""
    config = Config.of(case["settings"])
    data = RunData.open(Path(case["settings"]["data"]["corpus"]), config, verify=False)
    config = config.replace(model=fit_to_corpus(config.model, data.corpus))
    mesh = Mesh(config.parallel, CPU)
    torch.manual_seed(config.seed)
    engine = build_engine(config, mesh, CPU)
    first = _load(engine, case["load"]) if "load" in case else 0
    rows, steps = config.train.rows, []
    passes = config.train.batch_size // (rows * mesh.data_size)
    counted = Collectives()
    for step in range(first, first + case["steps"]):
        begin = step * config.train.batch_size
        samples = [begin + (k * mesh.data_size + mesh.data_rank) * rows for k in range(passes)]
        batches = [
            data.source.with_targets(config.objective.at(0.0)).batch(sample, rows)
            for sample in samples
        ]
        if step == 0:
            with counted:
                gradients = engine.forward_backward(batches)
        else:
            gradients = engine.forward_backward(batches)
        stats = engine.update(gradients, config.peak_learning_rate)
        steps.append([stats.loss, stats.accuracy, stats.grad_norm])
    validation = engine.evaluate(data.held_out.batches(config.objective.at(0.0), rows))
    if "save" in case:
        state = engine.strategy.state(engine.optimizer) if engine.strategy else _whole_state(engine)
        if mesh.is_main:
            torch.save((first + case["steps"], state), case["save"])
    held = sum(_held(p) for p in engine.parameters)
    moments = sum(
        _held(m) for state in engine.optimizer.state.values() for m in state.values() if m.ndim
    )
    drift = _drift(engine, mesh)
    masks_differ = _masks_differ(mesh)
    mesh.close()
    return {
        "steps": steps,
        "validation": validation,
        "parameters": held,
        "moments": moments,
        "drift": drift,
        "masks_differ": masks_differ,
        "collectives": counted.numbers,
        "targets": [len(b.target_ids_M) for b in batches],
    }


def _whole_state(engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    return engine.model.state_dict(), engine.optimizer.state_dict()


def _load(engine: Engine, path: str) -> int:
    steps: int
    steps, state = torch.load(path, weights_only=True)
    if engine.strategy:
        engine.strategy.load_state(engine.optimizer, state if engine.mesh.is_main else ({}, {}))
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
    whole = [
        p
        for p in engine.parameters
        if isinstance(p, DTensor) and all(c.is_replicate() for c in p.placements)
    ]
    drift = 0.0
    for p in whole:
        mean = p.to_local().detach().double().clone()
        torch.distributed.all_reduce(mean)
        drift = max(drift, float((mean / mesh.world_size - p.to_local()).abs().max()))
    return drift


def _masks_differ(mesh: Mesh) -> bool | None:
    """Return whether two ranks of `tp` drop different entries where the stream is cut, and then draw equal numbers."""
    if mesh.dims is None or mesh.dims["tp"].size() == 1:
        return None
    from cramming.experimental.tensor import _draw_local_numbers

    dropout = nn.Dropout(0.5)
    _draw_local_numbers(dropout, mesh.dims["tp"])
    drawn = torch.stack((dropout(torch.ones(64)), torch.rand(64)))
    each = [torch.empty_like(drawn) for _ in range(mesh.world_size)]
    torch.distributed.all_gather(each, drawn)
    return not torch.equal(each[0][0], each[1][0]) and torch.equal(each[0][1], each[1][1])


def main(folder: Path) -> None:
    """Write what each case gives on this rank."""
    for name, case in own_cases(folder):
        (folder / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(train(case)))


if __name__ == "__main__":
    be_ranks(main)
