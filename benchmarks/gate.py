"""How far sound runs and planted faults stray at the correctness gate, relative to what it allows.

    python benchmarks/gate.py --out benchmarks/results/gate_<device>_<date>.md

Every run is the gate's own size, 200 steps of `bench.gate`, in this process and one thread. The faults are those of
tests/cramming/bench/test_faults.py and some smaller ones. Each run is compared with the reference by the gate's rule,
for both kinds of rounding, and by four single numbers per curve, as multiples of the same number of the farthest
repetition: what a rule with one tolerance for all steps would have to go by.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import gelu

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cramming.bench import gate
from cramming.bench.gate import BASELINE, Curves, NoiseFloor, gate_settings
from cramming.bench.tricks import COARSE, SAME, TRICKS, Trick
from cramming.bench.worker import Worker
from cramming.bench.workload import Candidate
from cramming.engine import Engine
from cramming.environment import cpu_name
from cramming.model import attention, layers
from cramming.overrides import compose
from tests.cramming.bench import test_faults

CPU = torch.device("cpu")
Plant = Callable[[pytest.MonkeyPatch], None]


class Run(NamedTuple):
    """A trick, a fault planted in what it runs, and changes of the specification."""

    trick: Trick = BASELINE
    plant: Plant = lambda monkeypatch: None
    more: dict[str, Any] = {}  # noqa: RUF012


def setting(name: str, value: Any) -> Run:
    return Run(Trick("run", {name: value}, None, ""))


def learning_rate(factor: float) -> Run:
    """Off by a factor."""
    rate = Candidate.learning_rate
    changed = lambda self, step: factor * rate(self, step)  # noqa: E731
    return Run(plant=lambda m: m.setattr(Candidate, "learning_rate", changed))


def gradients_lost(name: str) -> Run:
    """Of the parameters with that in their names."""
    update = Engine.update

    def lossy(self: Engine, learning_rate: float) -> Any:
        for parameter_name, weight in self.model.named_parameters():
            if name in parameter_name and weight.grad is not None:
                weight.grad.zero_()
        return update(self, learning_rate)

    return Run(plant=lambda m: m.setattr(Engine, "update", lossy))


def attention_scaled(factor: float) -> Run:
    kernel = attention.KERNELS["sdpa"]
    scaled = kernel._replace(attend=lambda q, k, v, *rest: kernel.attend(factor * q, k, v, *rest))
    return Run(plant=lambda m: m.setitem(attention.KERNELS, "sdpa", scaled))


def activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    return Run(plant=lambda m: m.setitem(layers.ACTIVATIONS, "gelu", function))


TRICK = {trick.name: trick for trick in TRICKS}
SOUND = {
    **{f"another repetition, {size:.2g}, seed {seed}": Run(more={"perturbed": (size, seed)})
       for size in (SAME, COARSE) for seed in (4, 5)},
    **{f"accumulation x{count}": Run(more={"micro_batches": count}) for count in (2, 4, 16)},
    **{name: Run(TRICK[name]) for name in ("last layer at targets", "compile model", "bf16")},
}  # fmt: skip
FAULTS = {
    **{name: Run(fault.trick, fault.plant) for name, fault in test_faults.FAULTS.items()
       if fault.package is None and fault.size == "small"},
    **{f"learning rate x{factor}": learning_rate(factor) for factor in (0.97, 0.99, 1.01, 1.03)},
    "no weight decay": setting("optim.weight_decay", 0.0),
    "beta2 0.9 for 0.98": setting("optim.betas", [0.9, 0.9]),
    "a block without gradient": gradients_lost("blocks.2."),
    "norms without gradient": gradients_lost("norm"),
    "attention scaled by 1.05": attention_scaled(1.05),
    "GELU's tanh form": activation(partial(gelu, approximate="tanh")),
    "GELU on a grid of 1/4": activation(lambda x: gelu(x) + ((x * 4).round() / 4 - x).detach()),
}  # fmt: skip


def losses_of(curves: Curves, run: Run) -> list[float]:
    """One curve, in this process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        run.plant(monkeypatch)
        return Candidate(curves.spec(run.trick) | run.more, CPU).run(0, curves.steps)[1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def largest_mean(differences: Sequence[float], size: int) -> float:
    return max(abs(_mean(differences[i : i + size])) for i in range(0, len(differences) - size + 1, size))


SINGLE: dict[str, Callable[[list[float]], float]] = {  # of the differences of two curves
    "largest mean of 10": lambda d: largest_mean(d, 10),
    "mean distance": lambda d: _mean([abs(x) for x in d]),
    "largest mean of 50": lambda d: largest_mean(d, min(50, len(d))),
    "mean of second half": lambda d: abs(_mean(d[len(d) // 2 :])),
}


def relative(found: list[float], allowed: list[float]) -> str:
    worst = max(range(len(found)), key=lambda i: found[i] / allowed[i])
    return f"{found[worst] / allowed[worst]:.2f} at {(worst + 1) * gate.WINDOW}"


def measure(curves: Curves, names: Sequence[str], out: Path) -> None:
    """All runs; the file is written anew after each."""
    reference = losses_of(curves, Run())
    again = {
        size: [losses_of(curves, Run(more={"perturbed": (size, seed)})) for seed in range(1, gate.REPETITIONS + 1)]
        for size in (SAME, COARSE)
    }
    floors = [NoiseFloor(size, [gate.distances(reference, one) for one in found]) for size, found in again.items()]
    far = {name: max(f([a - b for a, b in zip(one, reference)]) for one in again[SAME]) for name, f in SINGLE.items()}
    rules = [f"step by step, {floor.rounding:.2g}" for floor in floors]
    about = (
        f"{cpu_name()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}; {curves.steps} steps,"
        f" {BASELINE.about}, whose loss falls by {gate.fall(reference):.2f} nats"
    )
    lines = [f"| run | {' | '.join([*SINGLE, *rules])} |", "|---" * (1 + len(SINGLE) + len(rules)) + "|"]
    raw: list[dict[str, Any]] = [{"floor": floor.rounding, "distances": floor.distances} for floor in floors]
    for name in names:
        losses = losses_of(curves, (SOUND | FAULTS)[name])
        differences, found = [a - b for a, b in zip(losses, reference)], gate.distances(reference, losses)
        cells = [f"{f(differences) / far[key]:.2f}" for key, f in SINGLE.items()]
        cells += [relative(found, floor.tolerance()) for floor in floors]
        kind = "sound" if name in SOUND else "fault"
        lines.append(f"| {kind}: {name} | {' | '.join(cells)} |")
        raw.append({"kind": kind, "name": name, "distances": found})
        print(lines[-1], flush=True)
        head = f"# At the correctness gate\n\n`python benchmarks/gate.py`: {about}.\n"
        text = [head, *lines, "", "```json", *map(json.dumps, raw), "```", ""]
        out.write_text("\n".join(text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=[*SOUND, *FAULTS], default=[*SOUND, *FAULTS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="settings, such as bench.gate.optim.lr=1e-3")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = compose(["model=bert-base", "optim=adamw", *args.overrides])
    small, vocab_size = gate_settings(settings, settings["bench"]["gate"]), settings["bench"]["gate_vocab_size"]
    measure(Curves(small, args.steps, vocab_size, "cpu", Worker), args.only, args.out)


if __name__ == "__main__":
    main()
