"""How far sound runs and planted faults stray at the correctness gate, beside what it allows.

    python benchmarks/gate.py --out benchmarks/results/gate_<device>_<date>.md

Every run is the gate's own size, 200 steps of `bench.gate`, in this process and one thread. Each is compared with the
reference by the gate's rule, for both kinds of rounding, and by four single numbers per curve, as multiples of the same
number of the farthest repetition: what a rule with one tolerance for all steps would have to go by.
"""

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from cramming.bench import gate, tricks
from cramming.bench.gate import BASELINE, Curves, NoiseFloor, gate_settings
from cramming.bench.tricks import COARSE, SAME, Trick
from cramming.bench.worker import Worker
from cramming.bench.workload import Candidate
from cramming.config import compose
from cramming.engine import Engine
from cramming.environment import cpu_name
from cramming.model import attention, layers

CPU = torch.device("cpu")
Run = Callable[["Gate"], list[float]]


class Gate:
    """The gate's size, and how a run of it is made."""

    def __init__(self, steps: int, overrides: Sequence[str]) -> None:
        settings = compose(["model=bert-base", "optim=adamw", *overrides])
        small = gate_settings(settings, settings["bench"]["gate"])
        self.steps = steps
        self.curves = Curves(small, steps, settings["bench"]["gate_vocab_size"], "cpu", Worker)

    def run(self, changes: tricks.Settings | None = None, micro_batches: int = 1, **more: Any) -> list[float]:
        """Losses with some settings changed."""
        trick = Trick("run", changes or {}, None, "", micro_batches=micro_batches)
        return Candidate(self.curves.spec(trick) | more, CPU).run(0, self.steps)[1]


def setting(name: str, value: Any) -> Run:
    return lambda g: g.run({name: value})


def learning_rate(factor: float) -> Run:
    """Off by a factor."""
    rate = Candidate.learning_rate

    def run(g: Gate) -> list[float]:
        with patch.object(Candidate, "learning_rate", lambda self, step: factor * rate(self, step)):
            return g.run()

    return run


def micro_batches(count: int, weight_of_last: float = 1.0) -> Run:
    """Accumulated, the last one's gradient weighed; the loss is reported right."""
    forward = Engine._forward

    def run(g: Gate) -> list[float]:
        calls = iter(range(g.steps * count))

        def weighed(self: Engine, batch: Any) -> Any:
            loss, correct = forward(self, batch)
            weight = weight_of_last if next(calls) % count == count - 1 else 1.0
            return loss * weight + loss.detach() * (1 - weight), correct

        with patch.object(Engine, "_forward", weighed):
            return g.run(micro_batches=count)

    return run


def _nothing(opt: Any) -> None:
    pass


def optimizer(before: Callable[[Any], None], after: Callable[[Any], None] = _nothing) -> Run:
    """AdamW with something done to it before and after each step."""
    step = torch.optim.AdamW.step

    def changed(self: Any, *args: Any) -> Any:
        before(self)
        result = step(self, *args)
        after(self)
        return result

    def run(g: Gate) -> list[float]:
        with patch.object(torch.optim.AdamW, "step", changed):
            return g.run()

    return run


def _no_bias_correction(opt: Any) -> None:
    for state in opt.state.values():
        state["step"].fill_(1000)


def _one_step_late(opt: Any) -> None:
    for state in opt.state.values():
        if state["step"] == 1:
            state["step"].add_(1)


def _without_masters(opt: Any) -> None:
    for group in opt.param_groups:
        for weight in group["params"]:
            weight.data.copy_(weight.data.bfloat16())


def gradients_lost(part: str) -> Run:
    """Of the parameters with that in their names."""
    update = Engine._update

    def run(g: Gate) -> list[float]:
        def lossy(self: Engine) -> Any:
            for name, weight in self.model.named_parameters():
                if part in name and weight.grad is not None:
                    weight.grad.zero_()
            return update(self)

        with patch.object(Engine, "_update", lossy):
            return g.run()

    return run


def attend(change: Callable[..., Any]) -> Run:
    """Attention with `change(the right function, q, k, v, layout, dropout)` in its place."""
    kernel = attention.KERNELS["sdpa"]

    def run(g: Gate) -> list[float]:
        with patch.dict(attention.KERNELS, {"sdpa": kernel._replace(attend=partial(change, kernel.attend))}):
            return g.run()

    return run


def activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    def run(g: Gate) -> list[float]:
        with patch.dict(layers.ACTIVATIONS, {"gelu": function}):
            return g.run()

    return run


def wrong_tokens(g: Gate) -> list[float]:
    """The last layer's queries are those of the targets' neighbours."""
    asked_by = attention.asked_by
    with patch.object(attention, "asked_by", lambda layout, m, n: asked_by(layout, (m + 1).clamp(max=n - 1), n)):
        return g.run({"attention.last_layer": "targets"})


def _gelu_on_a_grid(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x) + ((x * 4).round() / 4 - x).detach()


SOUND: dict[str, Run] = {
    **{f"another repetition, {size:.2g}, seed {seed}": (lambda g, m=(size, seed): g.run(perturbed=m))
       for size in (SAME, COARSE) for seed in (4, 5)},
    **{f"accumulation x{count}": micro_batches(count) for count in (2, 4, 16)},
    "last layer at targets": setting("attention.last_layer", "targets"),
    "compile model": setting("runtime.compile", "model"),
    "bf16": setting("precision.mode", "bf16"),
}  # fmt: skip
FAULTS: dict[str, Run] = {
    **{f"learning rate x{factor}": learning_rate(factor) for factor in (0.97, 0.99, 1.01, 1.03)},
    "no weight decay": setting("optim.weight_decay", 0.0),
    "beta2 0.9 for 0.98": setting("optim.betas", [0.9, 0.9]),
    "no bias correction": optimizer(_no_bias_correction),
    "bias correction one step late": optimizer(_one_step_late),
    "optimizer state lost": optimizer(lambda opt: opt.state.clear()),
    "bf16 weights, no masters": optimizer(_nothing, _without_masters),
    "one micro-batch of 16 without gradient": micro_batches(16, 0.0),
    "one micro-batch of 4 without gradient": micro_batches(4, 0.0),
    "one micro-batch of 4 counted twice": micro_batches(4, 2.0),
    "a block without gradient": gradients_lost("blocks.2."),
    "norms without gradient": gradients_lost("norm"),
    "attention scaled by 1.05": attend(lambda right, q, k, v, *rest: right(1.05 * q, k, v, *rest)),
    "no attention": attend(lambda right, q, k, v, layout, dropout: layout.at_asking(v)),
    "last layer asks for neighbours": wrong_tokens,
    "GELU's tanh form": activation(partial(torch.nn.functional.gelu, approximate="tanh")),
    "GELU on a grid of 1/4": activation(_gelu_on_a_grid),
}


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


def measure(g: Gate, names: Sequence[str], out: Path) -> None:
    """All runs; the file is written anew after each."""
    reference = g.run()
    seeds = range(1, gate.REPETITIONS + 1)
    again = {size: [g.run(perturbed=(size, seed)) for seed in seeds] for size in (SAME, COARSE)}
    floors = [NoiseFloor(size, [gate.distances(reference, one) for one in found]) for size, found in again.items()]
    far = {name: max(f([a - b for a, b in zip(one, reference)]) for one in again[SAME]) for name, f in SINGLE.items()}
    rules = [f"step by step, {floor.rounding:.2g}" for floor in floors]
    about = (
        f"{cpu_name()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}; {g.steps} steps,"
        f" {BASELINE.about}, whose loss falls by {gate.fall(reference):.2f} nats"
    )
    lines = [f"| run | {' | '.join([*SINGLE, *rules])} |", "|---" * (1 + len(SINGLE) + len(rules)) + "|"]
    raw: list[dict[str, Any]] = [{"floor": floor.rounding, "distances": floor.distances} for floor in floors]
    for name in names:
        losses = (SOUND | FAULTS)[name](g)
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
    measure(Gate(args.steps, args.overrides), args.only, args.out)


if __name__ == "__main__":
    main()
