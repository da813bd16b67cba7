"""How often does a duel of a recipe against itself end with a winner, and is a planted gain found when it is predicted?

    python benchmarks/duel_honesty.py --duels 200 --seconds 1.0 --out benchmarks/results/duel_honesty_cpu_<date>

Real duels (eval/duel/main.py): real runs of a tiny model on the embedded corpus, both sides at once, a core each, with
so many seconds of CPU time. Only the processes are forks of one that has imported torch, 0.1 s in place of 3 s. With
one seed for both sides, what differs is how many steps the clock allowed. Beside it the same with normal numbers, which
the test's boundaries were made for; and the real differences again, put together to other duels with a gain of two
standard deviations added.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cramming import launch
from cramming.children import run_or_exit
from cramming.invocation import Invocation
from cramming.overrides import compose
from eval.duel import main as duel_main
from eval.duel import sides
from eval.duel.duel_log import DuelLog
from eval.duel.main import DuelConfig, Opponent
from eval.duel.sequential_test import RULE, SequentialTest
from eval.duel.sides import Side

SETTINGS = [
    "data.size=200000",
    "tokenizer.vocab_size=1024",
    "precision=fp32",
    "model=tiny",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=48",
    "train.sequence_length=32",
    "train.validations=0",
    "train.validation_tokens=2048",
    "budget.clock=cpu",
]
TEST, LONGER, PLANTED = SequentialTest(4, 0.05, 0.0), SequentialTest(8, 0.05, 0.0), 2.0


def fork_train(settings: dict[str, Any]) -> Any:
    """A replacement of `sides.train` whose processes are forks of this one."""

    def train(order: Sequence[Side], cores: Sequence[int], title: str) -> None:
        children = []
        for side, core in zip(order, cores):
            seed = int(side.folder.name.rpartition("-")[2])
            if (child := os.fork()) == 0:
                os.sched_setaffinity(0, {core})
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                try:
                    launch.main({**settings, "seed": seed}, side.call)
                    os._exit(0)
                except BaseException as error:
                    os.write(2, f"{type(error).__name__}: {error}\n".encode())
                    os._exit(1)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        assert all(side.has_trained() for side in order), f"{title}: a side failed"

    return train


def winners(rows: np.ndarray, test: SequentialTest) -> list[int]:
    """After how many pairs the duels over these differences [duels, pairs] end that end with a winner."""
    counts = range(1, test.pairs + 1)
    looks = [[(k, test.verdict(*test.interval(row[:k]))) for k in counts] for row in rows.tolist()]
    ends = [next((look for look in each if look[1] != "undecided"), each[-1]) for each in looks]
    return [k for k, verdict in ends if verdict in ("win", "loss")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--duels", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, required=True, help="gets .md and .json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    from cramming.bench.tables import versions
    from cramming.environment import cpu_name

    rows, num_decided = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        overrides = [
            *SETTINGS,
            f"budget.hours={args.seconds / 3600}",
        ]
        call = Invocation(
            corpora=Path(temporary) / "corpora", device="cpu", overrides=tuple(overrides)
        )
        run_or_exit(["prepare", *call.arguments("corpora")], stdout=sys.stderr.fileno())
        settings = compose(overrides)
        sides.train = fork_train(settings)
        rule = {name: getattr(TEST, name) for name in RULE}
        duels = Path(temporary) / "duels"
        config = DuelConfig(
            base="", candidate="", glue=False, keep=False, duels=duels, json=False, **rule
        )
        log = DuelLog(duels)
        judged = {**rule, "measure": "loss", "corpora": ("same", "same")}
        cores = sorted(os.sched_getaffinity(0))[:2]
        opponents = [Opponent(overrides, settings)] * 2
        for number in range(args.duels):
            name = f"self-{number}"
            duel_main.begin(
                log,
                name,
                opponents,
                ["same", "same"],
                {**judged, "seed": 1000 * number},
                cpu_name(),
            )
            duel_main.fight(log, name, cores, opponents, config, call, 1000 * number)
            duel = log.duels()[name]
            assert duel.decision is not None
            num_decided += duel.decision.verdict in ("win", "loss")
            rows.append(duel.differences())
            print(f"{number + 1} duels, {num_decided} with a winner", flush=True)
    text, raw = report(rows, num_decided, args.seconds)
    about = f"{cpu_name()}, torch {versions()['torch']}"
    command = f"python benchmarks/duel_honesty.py --duels {args.duels} --seconds {args.seconds}"
    args.out.with_suffix(".md").write_text(
        f"# Duels of a recipe against itself\n\n`{command}`: {about}\n\n{text}\n"
    )
    args.out.with_suffix(".json").write_text(json.dumps({**raw, "differences": rows}) + "\n")
    print(text)


def report(rows: list[list[float]], num_decided: int, seconds: float) -> tuple[str, dict[str, Any]]:
    """The text, and its numbers."""
    real = np.array([value for row in rows for value in row])
    sd = float(np.concatenate([np.array(row) - np.mean(row) for row in rows if row]).std())
    normal = len(winners(np.random.default_rng(1).normal(0.0, sd, (20_000, TEST.pairs)), TEST))
    predicted = LONGER.pairs_needed(PLANTED)
    assert predicted is not None
    shuffled = np.random.default_rng(2).permutation(real)[
        : len(real) // LONGER.pairs * LONGER.pairs
    ]
    ends = winners(shuffled.reshape(-1, LONGER.pairs) - PLANTED * real.std(), LONGER)
    planted = len(shuffled) // LONGER.pairs
    in_time = sum(end <= predicted for end in ends) / planted
    raw = {
        "duels": len(rows),
        "seconds": seconds,
        **asdict(TEST),
        "with_a_winner": num_decided / len(rows),
        "normal_with_a_winner": normal / 20_000,
        "sd_nats": sd,
        "mean_nats": float(real.mean()),
        "planted": {
            "sd": PLANTED,
            "predicted_pairs": predicted,
            "duels": planted,
            "found_in_time": in_time,
        },
    }
    lines = [
        f"- {len(rows)} duels of up to {TEST.pairs} pairs, {seconds} s of CPU time a side, error {TEST.error}:"
        f" {num_decided} ended with a winner ({num_decided / len(rows):.1%}); of 20,000 with normal numbers"
        f" {normal / 20_000:.1%}.",
        f"- Differences of {len(real)} pairs: mean {real.mean():+.5f} nats, standard deviation within duels {sd:.5f}.",
        f"- A gain of {PLANTED:g} standard deviations, planted into {planted} duels of up to {LONGER.pairs} of these"
        f" pairs each: predicted to take {predicted} pairs, found by then in {in_time:.1%}.",
    ]
    return "\n".join(lines), raw


if __name__ == "__main__":
    main()
