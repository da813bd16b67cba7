"""Bytes on the wire per optimizer step, against theory: hosts in network namespaces train over TCP (gloo).

    python benchmarks/wire.py [--hosts 4] [--steps 8] > benchmarks/results/wire_<device>_<date>.md      (as root, Linux)

Each host is a network namespace with one end of a veth pair, the other end in a namespace that routes; each runs one
process, which counts what its interface sent (`/sys/class/net/*/statistics`) from the end of the 12th step on, frames
and all. Theory is what `cramming/experimental/compression.py` and `cramming/parallel/data_parallel.py` say of the
payload alone, but that a reduce-scatter of gloo counts as the all-reduce that it is.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INTERFACE, ROUTER, ADDRESS = "veth0", "wirerouter", "10.231.{}.{}"
WARM_UP = 12  # steps: PowerSGD begins after the 10th
SIZES = [
    "hidden_size=256",
    "num_layers=4",
    "num_heads=4",
    "intermediate_size=512",
    "vocab_size=4096",
]
ROWS, LENGTH, RANK, DENSITY = 2, 64, 4, 0.01
CASES = [
    "ddp",
    "ddp parallel.compression=bf16",
    f"ddp parallel.compression=powersgd parallel.compression.rank={RANK}",
    f"ddp parallel.compression=topk parallel.compression.density={DENSITY}",
    "ddp parallel.compression=qsgd",
    "zero1",
    "zero2",
    "zero3",
]


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Namespaces with an interface each, and one between them that forwards; gone afterwards."""
    names = [f"wire{number}" for number in range(count)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        ip("netns", "add", ROUTER)
        ip("netns", "exec", ROUTER, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip(
                "link",
                "add",
                name,
                "netns",
                ROUTER,
                "type",
                "veth",
                "peer",
                "name",
                INTERFACE,
                "netns",
                name,
            )
            for namespace, device, last in ((ROUTER, name, 1), (name, INTERFACE, 2)):
                ip(
                    "-n",
                    namespace,
                    "addr",
                    "add",
                    f"{ADDRESS.format(number, last)}/24",
                    "dev",
                    device,
                )
                ip("-n", namespace, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "route", "add", "default", "via", ADDRESS.format(number, 1))
        yield names
    finally:
        for name in (*names, ROUTER):
            ip("netns", "del", name)


def in_hosts(names: Sequence[str], command: Sequence[str]) -> list[str]:
    """Run a script with its arguments as one process on each host; what they printed."""
    place = {
        "WORLD_SIZE": str(len(names)),
        "MASTER_ADDR": ADDRESS.format(0, 2),
        "MASTER_PORT": "29617",
    }
    interface = {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }
    common = {**os.environ, **place, **interface, "LOCAL_RANK": "0", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, *command],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(names)
    ]
    outputs = [process.communicate(timeout=1200)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), (
        f"{' '.join(command)}: a process failed"
    )
    return outputs


def sent_bytes() -> int:
    """By this host since it has its interface."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def worker(case: str, steps: int) -> None:
    """One process: prints bytes per step, and the shapes of its parameters."""
    import torch
    import torch.distributed as dist

    from cramming.data.batches import BatchSource
    from cramming.data.corpus import TokenStream
    from cramming.engine import build_engine, build_model
    from cramming.objectives.masking import Masker
    from cramming.overrides import compose
    from cramming.parallel.mesh import Mesh
    from cramming.recipe import Config

    name, *more = case.split()
    sizes = [f"model.{size}" for size in SIZES]
    typed = [
        f"train.sequence_length={LENGTH}",
        f"train.micro_batch={ROWS}",
        "train.batch_size=64",
        "precision=fp32",
    ]
    config, device = (
        Config.of(compose(["model=tiny", f"parallel={name}", *more, *sizes, *typed])),
        torch.device("cpu"),
    )
    mesh = Mesh(config.parallel, device)
    torch.manual_seed(0)
    engine = build_engine(config, mesh, device)
    shapes = [list(parameter.shape) for parameter in build_model(config).parameters()]
    ids_N = torch.randint(5, config.model.vocab_size, (65536,)).numpy()
    stream = TokenStream.of_array(ids_N, ids_N[:1] * 0)
    source = BatchSource(
        stream, Masker(config.objective.at(0.0), 4096, 4, (0, 1, 2, 3, 4), 0), LENGTH, "rows", 0
    )
    before, losses = 0, []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            dist.barrier()
            before = sent_bytes()
        first = (step * mesh.world_size + mesh.rank) * ROWS
        losses.append(engine.step([source.batch(first, ROWS)], 1e-3).loss)
    dist.barrier()
    measured = {
        "rank": mesh.rank,
        "bytes": (sent_bytes() - before) / steps,
        "shapes": shapes,
        "losses": losses,
    }
    print("FOUND " + json.dumps(measured), flush=True)
    mesh.close()


def theory(case: str, shapes: list[list[int]], count: int) -> float:
    """Bytes of payload that a host sends per step of one micro-batch."""
    numbers, ring = sum(map(math.prod, shapes)), 2 * (count - 1) / count
    if "topk" in case:
        return 8 * DENSITY * numbers * (count - 1)
    if "qsgd" in case:
        return (1 + 4 / 512) * numbers * (count - 1)
    if "powersgd" in case:
        numbers = 0
        for shape in shapes:
            n, m = shape[0], math.prod(shape[1:])
            thin = RANK * (n + m)
            numbers += thin if len(shape) > 1 and 2 * thin < n * m else n * m
    # Of rings: an all-gather is one pass, and gloo makes a reduce-scatter of an all-reduce, two (NCCL's is one).
    passes = {"zero1": 1 + 2, "zero2": 1 + 2, "zero3": 2 + 2}
    if case in passes:
        return passes[case] / 2 * ring * 4 * numbers
    return ring * (2 if "bf16" in case else 4) * numbers


def measure(case: str, names: list[str], steps: int) -> list[dict[str, Any]]:
    """Return the results of the processes, one on each host."""
    outputs = in_hosts(names, [__file__, "--worker", case, "--steps", str(steps)])
    return [
        json.loads(line[6:])
        for output in outputs
        for line in output.splitlines()
        if line.startswith("FOUND ")
    ]


def main() -> None:
    """Measure all cases and print a table and the raw numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=CASES)
    parser.add_argument("--worker")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.steps)
        return
    raw = {}
    print(
        "| setting | parameters | theory, MB per host and step | measured | beside theory |\n|---|---|---|---|---|"
    )
    with hosts(arguments.hosts) as names:
        for case in arguments.only:
            measured = measure(case, names, arguments.steps)
            expected = theory(case, measured[0]["shapes"], len(names))
            mean = sum(each["bytes"] for each in measured) / len(measured)
            count = sum(map(math.prod, measured[0]["shapes"]))
            print(
                f"| {case} | {count} | {expected / 1e6:.3f} | {mean / 1e6:.3f} | {mean / expected:.3f} |",
                flush=True,
            )
            raw[case] = {
                "bytes": [each["bytes"] for each in measured],
                "losses": measured[0]["losses"],
            }
    print(
        f"\nRaw, bytes per step of each of {arguments.hosts} hosts, and losses:\n\n```json\n{json.dumps(raw)}\n```"
    )


if __name__ == "__main__":
    main()
