"""What the compressed sums of gradients are, in real DDP steps of two processes (gloo).

Weights never change here, so every step has the same gradients: what error feedback or random rounding leave out of one
step must come in others, and the mean over the steps is the exact sum.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from cramming.experimental.compression import LEVELS, START_POWER_SGD

STEPS, RANKS = 60, 2
CASES: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "bf16": {"name": "bf16"},
    "fp16": {"name": "fp16"},
    "powersgd": {"name": "powersgd", "rank": 2},
    "topk": {"name": "topk", "density": 0.1},
    "topk of all": {"name": "topk", "density": 1.0},
    "qsgd": {"name": "qsgd"},
}
# One rank: for each case the distance of each step's sum, and of the mean of all, from the exact sum, relative to it.
PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from cramming.config import build
from cramming.experimental.compression import TopK, build_hook
from cramming.parallel.data_parallel import GradientSum
from cramming.parallel.mesh import COMPRESSIONS
dist.init_process_group("gloo")
rank, found = dist.get_rank(), {}
cases, steps = json.loads(sys.argv[1]), int(sys.argv[2])
for name, case in cases.items():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(n, m) for n, m in ((48, 96), (96, 96), (96, 40))))
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(rank))
    loss = lambda module: module(x).square().sum()
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss(model), list(model.parameters()))])
    largest = exact.abs().amax()
    dist.all_reduce(exact)
    dist.all_reduce(largest)
    config = build(COMPRESSIONS[case["name"]], case, "compression")
    hook = GradientSum(dist.group.WORLD) if name == "none" else build_hook(config, dist.group.WORLD)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.01)  # of several buckets
    ddp.register_comm_hook(hook, lambda hook, bucket: hook(bucket))
    sums, state = [], torch.random.get_rng_state()
    for step in range(steps):
        model.zero_grad()
        loss(ddp).backward()
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    others = [torch.empty_like(sums[-1]) for _ in range(dist.get_world_size())]
    dist.all_gather(others, sums[-1])
    waits = torch.zeros(1)
    if isinstance(hook, TopK):  # what is not sent yet, of all entries and ranks
        waits = torch.stack([error.sum() for _, error in hook.errors.values()]).sum(0, keepdim=True)
        dist.all_reduce(waits)
    model.zero_grad()
    (loss(ddp) * float("nan" if rank else 1)).backward()
    hook.forget()
    model.zero_grad()
    loss(ddp).backward()
    after = torch.cat([p.grad.flatten() for p in model.parameters()])
    drawn = []
    for seed in (7, 8, 7):
        hook.begin_step(seed + rank)
        model.zero_grad()
        loss(ddp).backward()
        drawn.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    mean = sum(sums) / steps
    found[name] = {
        "steps": [((each - exact).norm() / exact.norm()).item() for each in sums],
        "after": ((after - exact).norm() / exact.norm()).item(),
        "mean": ((mean - exact).norm() / exact.norm()).item(),
        "entry": ((sums[-1] - exact).abs().max() / largest).item(),
        "sent": (torch.stack(sums[1:]).double().sum() + waits.double()).item(),
        "exact": (steps - 1) * exact.double().sum().item(),
        "nonzero": (sums[-1] != 0).float().mean().item(),
        "same": all(other.equal(sums[-1]) for other in others),
        "random": state.equal(torch.random.get_rng_state()),
        "follows the seed": drawn[0].equal(drawn[2]) and not drawn[0].equal(drawn[1]),
    }
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    program = tmp_path_factory.mktemp("compression") / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
        program,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, json.dumps(CASES), str(STEPS)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    results: dict[str, dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


@pytest.mark.parametrize("name", CASES)
def test_all_processes_have_the_same_sum_and_no_random_number_of_the_run_is_used(
    sums: Any, name: str
) -> None:
    assert sums[name]["same"] and sums[name]["random"]


@pytest.mark.parametrize("name", CASES)
def test_the_sum_after_a_step_that_was_skipped_is_as_good_as_any(sums: Any, name: str) -> None:
    """A loss was not finite, on one process."""
    assert sums[name]["after"] <= 1.1 * max(sums[name]["steps"])


@pytest.mark.parametrize(
    ("name", "nearly"), [("none", 1e-6), ("topk of all", 1e-6), ("bf16", 2**-7), ("fp16", 2**-10)]
)
def test_these_sums_are_exact_but_for_rounding(sums: Any, name: str, nearly: float) -> None:
    assert max(sums[name]["steps"]) < nearly


def test_powersgd_sums_its_first_steps_whole_and_what_it_leaves_out_later(sums: Any) -> None:
    steps = sums["powersgd"]["steps"]
    assert max(steps[:START_POWER_SGD]) < 1e-6 < 0.05 < min(steps[START_POWER_SGD:])
    assert sums["powersgd"]["mean"] < 0.2 * sum(steps[START_POWER_SGD:]) / len(steps)


def test_topk_sends_a_tenth_and_loses_nothing(sums: Any) -> None:
    """Sent and waiting entries add up to the gradient, in DDP's final buckets, which exist after the first step."""
    topk = sums["topk"]
    assert 0.1 <= topk["nonzero"] <= 0.2 + 1e-3
    assert topk["sent"] == pytest.approx(topk["exact"], rel=1e-4)
    assert topk["mean"] < 0.3 * min(topk["steps"])


def test_qsgd_rounds_each_entry_to_a_level_and_the_mean_to_none(sums: Any) -> None:
    qsgd = sums["qsgd"]
    assert 0 < qsgd["entry"] <= RANKS / LEVELS
    assert qsgd["mean"] < 2 * min(qsgd["steps"]) / STEPS**0.5
    assert qsgd["follows the seed"]
