"""`cramming study pipelines`: the cost of asynchronous pipelines in loss, and of synchronous ones in time.

Every rule of stale_updates.py trains the same model on the same batches for budget.steps, in this process, in --stages
simulated stages, with each of --seeds; the decoder has its own matrix. `study.md` has the losses, and for each schedule
of stages.py the idle share of a step and a chart. The same command again reads the finished runs from
`<rule>-<seed>.json`.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cramming import device as devices
from cramming.config import require
from cramming.data.batches import BERT_MASKING
from cramming.data.manifest import corpus_folder
from cramming.data.run_data import RunData, fit_to_corpus
from cramming.engine import DivergedError, build_engine
from cramming.experimental.stages import ORDERS
from cramming.experimental.stale_updates import RULES, Rule, Stages, StaleTraining
from cramming.experimental.timeline import bubble, draw, expected_bubble, peak_activations, timeline
from cramming.files import write_atomically
from cramming.invocation import Invocation
from cramming.parallel.mesh import Mesh
from cramming.progress import say
from cramming.recipe import Config
from cramming.record_schema import finite
from cramming.schedule import learning_rate_factor

LOSS_COLUMNS = (
    "rule",
    "age of the weights, first to last stage",
    "seeds",
    "validation loss",
    "std",
    "against synchronous",
)
TIME_COLUMNS = (
    "schedule",
    "idle share",
    "by the formula",
    "most activations kept by a rank",
    "chart",
)
# Sections that a run's numbers depend on.
RECIPE = (
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
# share of the steps after which PipeMare's T1 (stale_updates.py) no longer divides the learning rate
ANNEALING = 0.25

Runs = Sequence[Mapping[str, Any]]
DrawLosses = Callable[[Mapping[str, Sequence[Mapping[str, Any]]]], str | None]


def main(
    settings: Mapping[str, Any],
    invocation: Invocation,
    stages: int,
    seeds: Sequence[int],
    out: Path,
    draw_losses: DrawLosses,
) -> None:
    """Train, or read what is done already, and write the study.

    `draw_losses` makes an SVG of the rows of one run of each rule, or None where there is nothing to draw.
    """
    settings = {**settings, "model": {**settings["model"], "tie_embeddings": False}}
    config = Config.of(settings)
    _check(config, stages)
    sizes = Stages(stages, config.train.batch_size // config.train.rows)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in RULES}
    for seed in seeds:
        for name in RULES:
            runs[name].append(_trained({**settings, "seed": seed}, invocation, name, sizes, out))
        _write(out, runs, sizes, draw_losses)
    say(f"{out / 'study.md'}: {len(RULES)} rules with {len(seeds)} seeds")


def _check(config: Config, stages: int) -> None:
    train = config.train
    require(
        config.objective.has_masked_lm,
        "study pipelines: the generator of objective=rtd has no stage. Set objective=mlm.",
    )
    require(
        train.batch_ramp is None
        and train.average is None
        and config.start.name == "random"
        and not config.objective.gives_losses,
        "study pipelines: add train.batch_ramp=null train.average=null start=random objective=mlm",
    )
    require(
        config.budget.unit == "steps",
        "study pipelines: needs a number of steps, such as budget.steps=300",
    )
    require(
        isinstance(train.micro_batch, int),
        "study pipelines: train.micro_batch=auto: needs a number. Set one.",
    )
    require(
        config.model.num_layers >= stages,
        f"study pipelines: --stages={stages} is above model.num_layers={config.model.num_layers}. Lower it.",
    )


def _trained(
    settings: Mapping[str, Any], invocation: Invocation, name: str, stages: Stages, out: Path
) -> dict[str, Any]:
    """Return the rows of one run and its loss, None where it diverged; train it unless its file has them."""
    recipe = {"stages": stages.number, **{section: settings[section] for section in RECIPE}}
    recipe = json.loads(json.dumps(recipe, default=str))  # comparable with the file's
    seed = settings["seed"]
    file = out / f"{name}-{seed}.json"
    if file.exists():
        run: dict[str, Any] = finite(json.loads(file.read_text(encoding="utf-8")))
        if run["recipe"] == recipe:
            return run
    run = finite({"recipe": recipe, **_train(settings, invocation, RULES[name], stages)})
    write_atomically(file, json.dumps(run))
    loss = run["validation_loss"]
    outcome = "diverged" if loss is None else f"validation loss {loss:.3f}"
    say(f"{name}, seed {seed}: {outcome}")
    return run


def _train(
    settings: Mapping[str, Any], invocation: Invocation, rule: Rule, stages: Stages
) -> dict[str, Any]:
    config = Config.of(settings)
    data = RunData.open(corpus_folder(settings, invocation.corpora), config, verify=False)
    config = config.replace(model=fit_to_corpus(config.model, data.corpus))
    device = devices.select(invocation.device)
    steps, rows = int(config.budget.limit), config.train.rows
    torch.manual_seed(config.seed)
    engine = build_engine(config, Mesh.solo(device), device)
    training = StaleTraining(engine, rule, stages, max(1, round(ANNEALING * steps)))
    log: list[dict[str, float]] = []
    for step in range(steps):
        rate = config.peak_learning_rate * learning_rate_factor(config.schedule, step / steps)
        source = data.source.with_targets(config.objective.at(step / steps))
        first = step * config.train.batch_size
        batches = [source.batch(first + k * rows, rows) for k in range(stages.micro_batches)]
        try:
            loss = training.step(batches, rate).loss
        except DivergedError:
            return {"rows": log, "validation_loss": None}
        row = {
            "step": step + 1,
            "progress": (step + 1) / steps,
            "tokens": (first + config.train.batch_size) * config.train.sequence_length,
            "loss": loss,
            "lr": rate,
        }
        log.append(row)
    loss, _, _ = engine.evaluate(data.held_out.batches(BERT_MASKING, rows))
    return {"rows": log, "validation_loss": loss}


def _write(out: Path, runs: Mapping[str, Runs], stages: Stages, draw_losses: DrawLosses) -> None:
    lines = [
        "# Study: pipelines",
        "",
        f"{stages.number} stages, {stages.micro_batches} micro-batches a step.",
        "",
        *_table(LOSS_COLUMNS, [_loss_row(name, runs, stages) for name in runs]),
        "",
    ]
    drawing = draw_losses({name: of_rule[0]["rows"] for name, of_rule in runs.items()})
    if drawing:
        write_atomically(out / "study.svg", drawing)
        lines += ["![losses of the first seed](study.svg)", ""]
    lines += [
        "Times in forward passes of a rank; a backward pass takes two. Messages take none.",
        "",
        *_table(TIME_COLUMNS, [_time_row(out, schedule, stages) for schedule in ORDERS]),
        "",
    ]
    write_atomically(out / "study.md", "\n".join(lines))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def _loss_row(name: str, runs: Mapping[str, Runs], stages: Stages) -> list[str]:
    """Return a line of the table; differences are means over seeds, each against the synchronous run of its seed."""
    ages = []
    for stage in (0, stages.number - 1):
        of_stage = [RULES[name].age(stages, stage, n) for n in range(stages.micro_batches)]
        ages.append(f"{statistics.fmean(of_stage):.3g}")
    losses = [run["validation_loss"] for run in runs[name]]
    synchronous = [run["validation_loss"] for run in runs["synchronous"]]
    cells = [name, " to ".join(ages), str(len(losses))]
    if None in losses:
        return [*cells, "diverged", "–", "–"]
    std = against = "–"
    if len(losses) > 1:
        std = f"{statistics.stdev(losses):.3f}"
    if None not in synchronous:
        differences = [a - b for a, b in zip(losses, synchronous, strict=True)]
        against = f"{statistics.fmean(differences):+.3f}"
    return [*cells, f"{statistics.fmean(losses):.3f}", std, against]


def _time_row(out: Path, schedule: str, stages: Stages) -> list[str]:
    """Return a line about one schedule, and write its chart."""
    ranks, micro_batches = stages.number, stages.micro_batches
    try:
        slots = timeline(schedule, ranks, micro_batches)
    except ValueError:  # the schedule does not take so many micro-batches
        reason = f"needs another number of micro-batches than {micro_batches}"
        return [schedule, reason, "–", "–", "–"]
    file = f"time-{schedule}.svg"
    write_atomically(out / file, draw(slots, ranks, schedule))
    expected = expected_bubble(schedule, ranks, micro_batches)
    by_formula = "–" if expected is None else f"{expected:.1%}"
    highest = max(peak_activations(slots, ranks)) / ORDERS[schedule].stages_per_rank
    return [schedule, f"{bubble(slots, ranks):.1%}", by_formula, f"{highest:g}", f"[svg]({file})"]
