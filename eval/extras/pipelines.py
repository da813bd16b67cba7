"""`cramming study pipelines`: what asynchronous pipelines cost in loss, and synchronous ones in time.

Every rule of eval/extras/staleness.py trains the same model on the same batches for budget.steps, in this process,
with each of study.seeds; study.stages stages are simulated, and a step has train.batch_size / train.micro_batch
micro-batches. The decoder has a matrix of its own (a tied one would be of two stages). `study.md` has the losses, and
for each schedule of cramming/parallel/stages.py the idle share of a step; `study.svg` the losses;
`time-<schedule>.svg` which rank computes what at which time. The same command again takes the runs that are done from
`<rule>-<seed>.json`.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cramming import device as devices
from cramming.checks import Config
from cramming.config import require
from cramming.data.batches import PINNED
from cramming.engine import DivergedError, build_engine
from cramming.files import write_atomically
from cramming.parallel.mesh import Mesh
from cramming.parallel.stages import ORDERS
from cramming.parallel.timeline import Slot, bubble, formula, most_kept, timeline
from cramming.progress import say
from cramming.record import finite
from cramming.schedule import learning_rate_factor
from cramming.train_state import RunData, fit_to_corpus
from eval.extras.staleness import RULES, Rule, Stages, StaleTraining
from eval.report import plots

HEADER = (
    "rule",
    "age of the weights, first to last stage",
    "seeds",
    "validation loss",
    "std",
    "against synchronous",
)
TIMES = ("schedule", "idle share", "by the formula", "most activations kept by a rank", "chart")
KINDS = {
    "F": ("forward", plots.COLOURS[0]),
    "B": ("backward", plots.COLOURS[2]),
    "I": ("backward, of inputs", plots.COLOURS[4]),
    "W": ("backward, of weights", plots.COLOURS[3]),
}
ANNEALING = 0.25  # share of the steps after which T1 no longer divides the learning rate
UNIT, ROW, LEFT = 14, 22, 60  # pixels: of a forward pass, of a rank, of its name


def main(settings: Mapping[str, Any], stages: int, seeds: Sequence[int], out: Path) -> None:
    """Train, or read what is done already, and write the study."""
    settings = {**settings, "model": {**settings["model"], "tie_embeddings": False}}
    config = Config.of(settings)
    require(
        not config.objective.replaces_tokens,
        "study pipelines: the generator of objective=rtd has no stage; take mlm",
    )
    is_plain = (
        config.train.batch_ramp is None
        and config.train.average is None
        and config.start.name == "random"
    )
    require(
        is_plain and config.objective.by_loss is None,
        "study pipelines: add train.batch_ramp=null train.average=null start=random objective.by_loss=null",
    )
    require(
        config.budget.unit == "steps",
        "study pipelines: needs a number of steps, such as budget.steps=300",
    )
    require(
        isinstance(config.train.micro_batch, int),
        "study pipelines: train.micro_batch=auto; give a number",
    )
    require(
        config.model.num_layers >= stages,
        f"study pipelines: study.stages={stages} is above model.num_layers={config.model.num_layers}; lower it",
    )
    sizes = Stages(stages, config.train.batch_size // config.train.rows)
    done: dict[str, list[dict[str, Any]]] = {name: [] for name in RULES}
    for seed in seeds:
        for name, rule in RULES.items():
            done[name].append(_trained(settings, seed, name, rule, sizes, out))
        _write(out, done, sizes)
    say(f"{out / 'study.md'}: {len(RULES)} rules with {len(seeds)} seeds")


def _trained(
    settings: Mapping[str, Any], seed: int, name: str, rule: Rule, stages: Stages, out: Path
) -> dict[str, Any]:
    """The rows of one run and its loss; None for the loss where it diverged."""
    sections = (
        "model",
        "objective",
        "optim",
        "schedule",
        "train",
        "budget",
        "data",
        "tokenizer",
        "precision",
    )
    recipe = {"stages": stages.number, **{section: settings[section] for section in sections}}
    file = out / f"{name}-{seed}.json"
    found: dict[str, Any] = (
        finite(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
    )
    if found.get("recipe") != json.loads(json.dumps(recipe, default=str)):
        found = finite({"recipe": recipe, **_train({**settings, "seed": seed}, rule, stages)})
        write_atomically(file, json.dumps(found, default=str))
        loss = found["validation_loss"]
        say(f"{name}, seed {seed}: {'diverged' if loss is None else f'validation loss {loss:.3f}'}")
    return found


def _train(settings: Mapping[str, Any], rule: Rule, stages: Stages) -> dict[str, Any]:
    config = Config.of(settings)
    data = RunData.open(settings, config, verify=False)
    config = replace(config, model=fit_to_corpus(config.model, data.corpus))
    device, steps, rows = (
        devices.select(settings["device"]),
        int(config.budget.limit),
        config.train.rows,
    )
    torch.manual_seed(config.seed)
    engine = build_engine(config, Mesh.solo(device), device)
    training = StaleTraining(engine, rule, stages, max(1, round(ANNEALING * steps)))
    log: list[dict[str, float]] = []
    for step in range(steps):
        rate = config.peak_learning_rate * learning_rate_factor(config.schedule, step / steps)
        source = data.source.with_objective(config.objective.at(step / steps))
        first = step * config.train.batch_size
        batches = [source.batch(first + k * rows, rows) for k in range(stages.micro_batches)]
        try:
            loss = training.step(batches, rate).loss
        except DivergedError:
            return {"rows": log, "validation_loss": None}
        tokens = (first + config.train.batch_size) * config.train.sequence_length
        log.append(
            {
                "step": step + 1,
                "progress": (step + 1) / steps,
                "tokens": tokens,
                "loss": loss,
                "lr": rate,
            }
        )
    return {"rows": log, "validation_loss": engine.evaluate(data.held_out.batches(PINNED, rows))[0]}


def _write(out: Path, done: Mapping[str, Sequence[Mapping[str, Any]]], stages: Stages) -> None:
    lines = [
        "# Study: pipelines",
        "",
        f"{stages.number} stages, {stages.micro_batches} micro-batches a step.",
        "",
    ]
    rows = [_row(name, runs, done["synchronous"], stages) for name, runs in done.items()]
    lines += [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER), *rows)]
    curves = [plots.Curve(name, runs[0]["rows"]) for name, runs in done.items()]
    if drawing := plots.training(curves, "training loss"):
        write_atomically(out / "study.svg", plots.svg(drawing, "study"))
        lines += ["", "![losses of the first seed](study.svg)"]
    lines += [
        "",
        "Times in forward passes of a rank; a backward pass takes two. Messages take none.",
        "",
    ]
    times = [_times(out, schedule, stages) for schedule in ORDERS]
    lines += [f"| {' | '.join(row)} |" for row in (TIMES, ["---"] * len(TIMES), *times)]
    write_atomically(out / "study.md", "\n".join([*lines, ""]))


def _row(
    name: str,
    runs: Sequence[Mapping[str, Any]],
    synchronous: Sequence[Mapping[str, Any]],
    stages: Stages,
) -> list[str]:
    """A line of the table. Differences are means over seeds, each against the synchronous run of its seed."""
    ages = [
        statistics.fmean(RULES[name].age(stages, stage, n) for n in range(stages.micro_batches))
        for stage in (0, stages.number - 1)
    ]
    losses, others = ([run["validation_loss"] for run in each] for each in (runs, synchronous))
    cells = [name, f"{ages[0]:.3g} to {ages[1]:.3g}", str(len(runs))]
    if None in losses:
        return [*cells, "diverged", "–", "–"]
    std = f"{statistics.stdev(losses):.3f}" if len(losses) > 1 else "–"
    against = (
        "–" if None in others else f"{statistics.fmean(a - b for a, b in zip(losses, others)):+.3f}"
    )
    return [*cells, f"{statistics.fmean(losses):.3f}", std, against]


def _times(out: Path, schedule: str, stages: Stages) -> list[str]:
    """A line about one schedule, and its chart."""
    ranks, micro_batches = stages.number, stages.micro_batches
    try:
        slots = timeline(schedule, ranks, micro_batches)
    except ValueError:  # torch's words, for programs
        return [
            schedule,
            f"needs another number of micro-batches than {micro_batches}",
            "–",
            "–",
            "–",
        ]
    write_atomically(out / f"time-{schedule}.svg", chart(slots, ranks, schedule))
    expected, v = formula(schedule, ranks, micro_batches), ORDERS[schedule].stages_per_rank
    most = max(most_kept(slots, ranks)) / v
    idle = f"{bubble(slots, ranks):.1%}"
    return [
        schedule,
        idle,
        "–" if expected is None else f"{expected:.1%}",
        f"{most:g}",
        f"[svg](time-{schedule}.svg)",
    ]


def chart(slots: Sequence[Slot], ranks: int, title: str) -> str:
    """An SVG: a row for each rank, a box for each action with the number of its micro-batch."""
    width = LEFT + round(max(slot.end for slot in slots) * UNIT) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 560)}" height="{(ranks + 2) * ROW + 10}"'
        f' font-family="sans-serif" font-size="9" fill="currentColor" role="img"><title>{title}</title>'
    ]
    for rank in range(ranks):
        parts.append(f'<text x="4" y="{rank * ROW + 16}">rank {rank}</text>')
    for slot in slots:
        x, size, y = LEFT + slot.begin * UNIT, (slot.end - slot.begin) * UNIT, slot.rank * ROW + 4
        stage = f", stage {slot.action.stage}"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="{ROW - 4}" fill="{KINDS[slot.action.kind][1]}"'
            f' stroke="#ffffff" stroke-width="0.5" opacity="{0.6 if slot.action.stage >= ranks else 1}">'
            f"<title>{KINDS[slot.action.kind][0]} of micro-batch {slot.action.micro_batch}{stage}</title></rect>"
        )
        if size >= 10:
            middle = x + size / 2
            number = f'<text x="{middle:.1f}" y="{y + 13}" text-anchor="middle" fill="#ffffff">'
            parts.append(f"{number}{slot.action.micro_batch}</text>")
    for place, (words, colour) in enumerate(
        KINDS[kind] for kind in sorted({slot.action.kind for slot in slots})
    ):
        x, y = LEFT + place * 130, ranks * ROW + 14
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{words}</text>')
    return "\n".join([*parts, "</svg>", ""])
