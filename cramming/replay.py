"""The verb `replay`: proof by repetition. Stretches of a run's training are done again, and what they give is compared.

Whoever made a loss curve up, or put other weights into a checkpoint, has a log that its own settings, seed and corpus
do not give. A stretch begins at the seed or at a checkpoint of the journal; the very loop of `pretrain` does its steps,
by a clock that repeats the recorded progress (cramming/recorded.py). On a CPU of the same name, with the same torch and
threads, all numbers must be the same bit for bit. Elsewhere a tolerance is measured as the correctness gate measures
its own (cramming/bench/gate.py): from repetitions of the stretch with perturbed weights. docs/rules.md says what a
replay proves and what not.
"""

import json
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cramming.config import Count, Seed, build, require
from cramming.progress import say, show_table, use_stderr
from cramming.record import finite, run_folder
from cramming.recorded import RecordedRun, Segment
from cramming.repetition import Outcome, Replay

SHARE = 0.02  # of the run's steps that a replay repeats by default; its starts and validations cost something, too


@dataclass(frozen=True)
class ReplayConfig:
    """The section `replay`. `steps: None`: as many as `SHARE` of the run's for all segments together."""

    run: Path | None
    segments: Count | Literal["all"]
    steps: Count | Literal["all"] | None
    seed: Seed | None
    json: bool


def main(settings: dict[str, Any]) -> None:
    """The verb `replay`; exit code 1 where a number is not the run's."""
    config = build(ReplayConfig, settings["replay"], "replay")
    if config.json:
        use_stderr()
    began = time.monotonic()
    require(
        config.run is None or settings["name"] in ("default", config.run.name),
        f"name={settings['name']}: names no run beside the folder {config.run}; give one of the two",
    )
    run = RecordedRun.read(config.run or run_folder(settings))
    seed = secrets.randbits(32) if config.seed is None else config.seed
    replay = Replay.of(run, settings)
    chosen = draw(run, config, replay.repetitions, seed)
    say(
        f"{run.folder}: {len(chosen)} of {len(run.segments)} segments (replay.seed={seed}), {replay.how}"
    )
    outcomes = [Outcome("log and record", run.last, problems=list(run.contradictions()))]
    outcomes += [replay.outcome(segment) for segment in [*run.seed_check, *chosen]]
    outcomes += replay.end()
    steps = replay.repetitions * sum(segment.last - segment.first + 1 for segment in chosen)
    cost = cost_of(run, steps, time.monotonic() - began)
    show(outcomes)
    say(
        f"cost: {steps} of {run.last} steps ({cost['steps_share']:.1%}), {cost['seconds']:.1f} s"
        + (
            f", {cost['seconds_share']:.1%} of what the run was charged"
            if cost["seconds_share"]
            else ""
        )
    )
    if config.json:
        found = {"run": str(run.folder), "seed": seed, "how": replay.how, **cost}
        print(json.dumps(finite({**found, "outcomes": [asdict(outcome) for outcome in outcomes]})))
    if any(outcome.problems for outcome in outcomes):
        raise SystemExit(1)


def draw(run: RecordedRun, config: ReplayConfig, repetitions: int, seed: int) -> list[Segment]:
    """The segments to repeat, each cut to the steps that are wanted."""
    count = (
        len(run.segments) if config.segments == "all" else min(config.segments, len(run.segments))
    )
    chosen = sorted(random.Random(seed).sample(range(len(run.segments)), count))
    steps = run.last if config.steps == "all" else config.steps
    steps = steps or max(1, int(SHARE * run.last / (count * repetitions)))
    return [run.segments[index].cut(steps) for index in chosen]


def cost_of(run: RecordedRun, steps: int, seconds: float) -> dict[str, Any]:
    """Steps and seconds of a replay beside those of the run."""
    charged = run.record["pretrain"].get("budget", {}).get("spent_seconds")
    share = seconds / charged if charged else None
    return {
        "steps": steps,
        "steps_share": steps / run.last,
        "seconds": seconds,
        "seconds_share": share,
    }


def show(outcomes: Sequence[Outcome]) -> None:
    """A row for each, and below what was found."""

    def shown(value: float | None, digits: str = ".6g") -> str:
        return "" if value is None else format(value, digits)

    rows = [
        [
            o.what,
            str(o.steps),
            shown(o.recorded),
            shown(o.replayed),
            shown(o.difference, ".2g"),
            "" if o.difference is None else shown(o.allowed, ".2g"),
            o.state,
            "differs" if o.problems else "ok",
        ]
        for o in outcomes
    ]
    headers = [
        "",
        "steps",
        "recorded",
        "replayed",
        "difference",
        "allowed",
        "state at its end",
        "verdict",
    ]
    show_table("replay (mean loss in nats; largest difference)", headers, rows)
    for outcome in outcomes:
        for problem in outcome.problems:
            say(f"{outcome.what}: {problem}")
