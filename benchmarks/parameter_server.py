"""The parameter server's bottleneck: synchronous and asynchronous, against the ring all-reduce of `parallel=ddp`.

    python benchmarks/parameter_server.py --corpus <folder> > parameter_server_<device>_<date>.md     (as root, Linux)

Hosts are network namespaces, as in benchmarks/wire.py; here their links carry `--mbit` each way, so that the network
and not this machine's cores is the limit. A worker sends its gradient to the server (torch.distributed.rpc over TCP)
and gets the weights back; the synchronous server waits for all workers' gradients and applies their mean, the
asynchronous one applies each alone (Dean et al. 2012; Li et al. 2014). A round is a batch of every worker: P parameters
in fp32 from and to each of N workers, 2 N x 4 P bytes through the server, in the synchronous case one way after the
other; in the ring every process sends 2 (N - 1) / N x 4 P bytes and receives as many, both at once. A second pass, over
links without a limit, trains ring and asynchronous server on the same samples: the loss, and how many updates old a
gradient is. The synchronous server's losses are the ring's (tests/benchmarks/test_parameter_server.py).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from wire import ADDRESS, INTERFACE, ROUTER, hosts, in_hosts

from cramming.bench.tables import versions
from cramming.data.batches import BERT_MASKING, BatchSource, HeldOut
from cramming.data.corpus import Corpus
from cramming.engine import Engine, build_engine
from cramming.environment import cpu_name
from cramming.objectives.masking import Masker
from cramming.optim.build import set_learning_rate
from cramming.overrides import compose
from cramming.parallel.mesh import Mesh
from cramming.recipe import Config
from cramming.schedule import learning_rate_factor

MODES = ("ring", "synchronous", "asynchronous")
ROWS, LENGTH = 16, 32  # of a worker's batch
DEVICE = torch.device("cpu")
SERVER: "Server"  # of the process that is it


class Task:
    """Training task of every process: the model, its batches by sample index, and the rate by finished samples."""

    def __init__(self, corpus: Path, samples: int) -> None:
        opened = Corpus.open(corpus)
        sizes = [
            f"model.vocab_size={opened.vocab_size}",
            f"train.sequence_length={LENGTH}",
            f"train.micro_batch={ROWS}",
        ]
        self.config = Config.of(
            compose(["model=tiny", *sizes, "train.batch_size=64", "precision=fp32"])
        )
        self.samples = samples
        special = opened.special_ids
        masker = Masker(
            self.config.objective.at(0.0), opened.vocab_size, special.mask, tuple(special), 0
        )
        self.source = BatchSource(opened.stream("train"), masker, LENGTH, "rows", 0)
        self.held_out = HeldOut(
            BatchSource(opened.stream("validation"), masker, LENGTH, "rows", 0), 65536
        )
        torch.manual_seed(0)

    def rate(self, done: int) -> float:
        return self.config.peak_learning_rate * learning_rate_factor(
            self.config.schedule, done / self.samples
        )

    def loss(self, engine: Engine) -> float:
        return engine.evaluate(self.held_out.batches(BERT_MASKING, ROWS))[0]


class Counts:
    """Time, and bytes sent and received by this host, at the end of every update."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []

    def note(self) -> None:
        folder = Path(f"/sys/class/net/{INTERFACE}/statistics")
        self.rows.append(
            (
                time.monotonic(),
                *(int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx")),
            )
        )

    def per_update(self) -> list[float]:
        """Seconds, bytes sent, bytes received; the first quarter is left out: connections are made, queues filled."""
        first = len(self.rows) // 4
        return [
            (b - a) / (len(self.rows) - 1 - first) for a, b in zip(self.rows[first], self.rows[-1])
        ]


class Server:
    """Holds the weights and the optimizer; `needed` gradients are one update."""

    def __init__(self, task: Task, needed: int) -> None:
        self.task, self.needed, self.engine = (
            task,
            needed,
            build_engine(task.config, Mesh.solo(DEVICE), DEVICE),
        )
        self.lock, self.counts = Lock(), Counts()
        self.waiting: list[Future[tuple[Tensor, int]]] = []
        self.sum = torch.zeros_like(self.weights())
        self.updates, self.ages = 0, list[int]()

    def weights(self) -> Tensor:
        """A copy, as one vector."""
        return parameters_to_vector(self.engine.parameters).detach()

    def push(self, gradient: Tensor, age_of: int) -> Future[tuple[Tensor, int]]:
        """The weights after the update that has this gradient, of the weights after `age_of` updates."""
        future: Future[tuple[Tensor, int]] = Future()
        with self.lock:
            self.ages.append(self.updates - age_of)
            self.sum += gradient
            self.waiting.append(future)
            if len(self.waiting) < self.needed:
                return future
            self._update()
            reply, ready, self.waiting = (self.weights(), self.updates), self.waiting, []
        for each in ready:
            each.set_result(reply)
        return future

    def _update(self) -> None:
        parameters, optimizer = self.engine.parameters, self.engine.optimizer
        parts = (self.sum / self.needed).split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts):
            parameter.grad = part.view_as(parameter)
        assert self.engine.clip is not None
        clip_grad_norm_(parameters, self.engine.clip)
        set_learning_rate(optimizer, self.task.rate(self.updates * self.needed * ROWS))
        optimizer.step()
        self.sum.zero_()
        self.updates += 1
        self.counts.note()


@rpc.functions.async_execution  # no thread of the server waits
def push(gradient: Tensor, age_of: int) -> Future[tuple[Tensor, int]]:
    """Called on the server by its workers."""
    return SERVER.push(gradient, age_of)


def serve(task: Task, mode: str, rank: int, workers: int) -> dict[str, Any]:
    """Rank 0 is the server, the others are workers."""
    global SERVER
    if rank == 0:
        SERVER = Server(task, workers if mode == "synchronous" else 1)
    options = (
        rpc.TensorPipeRpcBackendOptions(  # over TCP: no memory that processes of one machine share
            init_method=f"tcp://{ADDRESS.format(0, 2)}:29618",
            rpc_timeout=600,
            _transports=["uv"],
            _channels=["basic"],
        )
    )
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=workers + 1, rpc_backend_options=options)
    if rank > 0:
        engine = build_engine(task.config, Mesh.solo(DEVICE), DEVICE)
        weights, updates = (
            parameters_to_vector(engine.parameters).detach(),
            0,
        )  # of one seed, so the server's
        for first in range((rank - 1) * ROWS, task.samples, workers * ROWS):
            vector_to_parameters(weights, engine.parameters)
            gradients = engine.accumulate([task.source.batch(first, ROWS)])
            gradient = torch.cat(
                [p.grad.flatten() for p in engine.parameters if p.grad is not None]
            )
            engine.discard(gradients)
            weights, updates = rpc.rpc_sync("rank0", push, args=(gradient, updates))
    rpc.shutdown()
    if rank > 0:
        return {}
    server = SERVER
    per_round = [each * workers / server.needed for each in server.counts.per_update()]
    age = sum(server.ages) / len(server.ages)
    return {
        "per_round": per_round,
        "age": age,
        "loss": task.loss(server.engine),
        "parameters": server.sum.numel(),
    }


def ring(task: Task) -> dict[str, Any]:
    """One process of `parallel=ddp`."""
    mesh = Mesh(task.config.parallel, DEVICE)
    engine, counts = build_engine(task.config, mesh, DEVICE), Counts()
    for first in range(0, task.samples, mesh.world_size * ROWS):
        engine.step([task.source.batch(first + mesh.rank * ROWS, ROWS)], task.rate(first))
        counts.note()
    measured = {"per_round": counts.per_update(), "age": 0, "loss": task.loss(engine)}
    measured["parameters"] = sum(p.numel() for p in engine.parameters)
    mesh.close()
    return measured if mesh.is_main else {}


def limit(name: str, mbit: int) -> None:
    """The rate of a host's link, each way; packets wait, at most a second, or are lost as on a switch."""
    for namespace, device in ((name, INTERFACE), (ROUTER, name)):
        shape = f"tc -n {namespace} qdisc add dev {device} root tbf rate {mbit}mbit burst 128kb latency 1s"
        subprocess.run(shape.split(), check=True)


def measure(
    mode: str, workers: int, corpus: Path, samples: int, mbit: int | None
) -> dict[str, Any]:
    """Return the result of rank 0, with one process on each host."""
    count = workers + (mode != "ring")
    command = [
        __file__,
        "--corpus",
        str(corpus),
        "--worker",
        mode,
        "--samples",
        str(samples),
        "--workers",
    ]
    with hosts(count) as names:
        for name in names if mbit else ():
            limit(name, mbit or 0)
        output, *_ = in_hosts(names, [*command, str(workers)])
    measured: dict[str, Any] = json.loads(
        next(line for line in output.splitlines() if line.startswith("{"))
    )
    print(f"{mode} {workers} {mbit}: {measured}", file=sys.stderr, flush=True)
    return measured


def theory(mode: str, workers: int, parameters: int, mbit: int) -> tuple[float, float]:
    """Return the payload of a round in bytes, sent and received, of the busiest process, and its network seconds."""
    one_way = 4 * parameters * (2 * (workers - 1) / workers if mode == "ring" else workers)
    ways = 2 if mode == "synchronous" else 1  # one after the other, or both at once
    return 2 * one_way, (ways if workers > 1 else 2 * (mode != "ring")) * one_way * 8 / (mbit * 1e6)


def row(
    mode: str,
    workers: int,
    fast: dict[str, Any],
    long: dict[str, Any] | None,
    mbit: int,
    alone: float,
) -> list[str]:
    """A line of the table; `alone`: samples per second of one process without a network."""
    seconds, sent, received = fast["per_round"]
    payload, network = theory(mode, workers, fast["parameters"], mbit)
    beside = f"{(sent + received) / payload:.3f}" if payload else "–"
    speed = workers * ROWS / seconds
    return [
        mode,
        str(workers),
        f"{payload / 1e6:.2f}",
        f"{(sent + received) / 1e6:.2f}",
        beside,
        f"{network:.2f}",
        f"{seconds:.2f}",
        f"{speed:.1f}",
        f"{speed / alone:.2f}",
        f"{(long or fast)['age']:.2f}",
        f"{long['loss']:.3f}" if long else "–",
    ]


HEADER = (
    "mode",
    "workers",
    "MB a round through the busiest, theory",
    "measured",
    "beside theory",
    "seconds a round, network alone",
    "measured",
    "samples/s",
    "x one process",
    "age of a gradient",
    "loss",
)


def main() -> None:
    """All cases with the limit and without, and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--mbit", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=16, help="of the cases with the limit")
    parser.add_argument("--samples", type=int, default=16384, help="of those without")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        task = Task(args.corpus, args.samples)
        is_ring, rank = args.worker == "ring", int(os.environ["RANK"])
        measured = ring(task) if is_ring else serve(task, args.worker, rank, args.workers[0])
        if rank == 0:
            print(json.dumps(measured), flush=True)
        return
    print(
        f"{cpu_name()}, a thread a process, torch {versions()['torch']}; links of {args.mbit} Mbit/s each way\n"
    )
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    alone, raw = 0.0, []
    for workers in args.workers:
        for mode in MODES[: 2 if workers == 1 else None]:  # one worker's gradients are never old
            fast = measure(mode, workers, args.corpus, args.rounds * workers * ROWS, args.mbit)
            long = (
                None
                if mode == "synchronous"
                else measure(mode, workers, args.corpus, args.samples, None)
            )
            alone = alone or workers * ROWS / fast["per_round"][0]
            print(f"| {' | '.join(row(mode, workers, fast, long, args.mbit, alone))} |", flush=True)
            raw.append({"mode": mode, "workers": workers, "limited": fast, "unlimited": long})
    print(
        f"\nRaw (`per_round`: seconds, bytes sent and received by rank 0):\n\n```json\n{json.dumps(raw)}\n```"
    )


if __name__ == "__main__":
    main()
