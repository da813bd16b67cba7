"""Are two groups of seeds of one recipe called different no more often than the leaderboard says?

    python benchmarks/seed_noise.py --corpus <folder> --out benchmarks/results/seed_noise_cpu_<date>

Real runs for its test (eval/report/ranking.py): one small recipe, so many seconds of CPU time on one thread, seeds 0 to
9, one after the other, on real text; the pinned validation loss is the score. Then every way to make two groups of
five, or two of three, out of them; and a gain of two standard deviations, planted between groups that are drawn from
them again and again. The processes are forks of one that has imported torch. `--losses 4.31 4.28 ...` takes losses that
are there.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from cramming.invocation import Invocation
from cramming.overrides import compose
from cramming.record import load_record
from eval.report.ranking import NOISE, p_values, power, seeds_needed

SETTINGS = (
    "experiment=best scale=5M precision=fp32 train.batch_size=16 train.micro_batch=16 train.batch_ramp=null"
    " train.validations=0 train.validation_tokens=32768 runtime.compile=off division=open budget.clock=cpu"
    " tokenizer.vocab_size=4096"
).split()
SEEDS, PLANTED, DRAWS = 10, 2.0, 5_000


def train(overrides: Sequence[str], runs: str, seed: int) -> float:
    """The pinned validation loss of a run in a process of its own."""
    from cramming import launch

    settings = compose([*overrides, f"seed={seed}"])
    if (child := os.fork()) == 0:
        try:
            launch.main(settings, Invocation(name=f"seed{seed}", runs=Path(runs), device="cpu"))
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    os.waitpid(child, 0)
    return float(load_record(Path(runs) / f"seed{seed}")["pretrain"]["validation"]["loss"])


def splits(values: Sequence[float], size: int) -> Iterator[tuple[list[float], list[float]]]:
    """Every two groups of so many of the values, each pair of groups once."""
    for chosen in combinations(range(len(values)), 2 * size):
        first, *others = chosen
        for more in combinations(others, size - 1):
            yield [values[i] for i in (first, *more)], [values[i] for i in others if i not in more]


def called_different(values: Sequence[float], size: int) -> float:
    """The share of these splits that the test calls different."""
    return statistics.fmean(p_values(pair)[0, 1] < NOISE for pair in splits(values, size))


def found_gain(values: Sequence[float], seeds: int, gain: float) -> float:
    """The share of pairs of groups, drawn from the values with one shifted by `gain`, that are called different."""
    random, centre = np.random.default_rng(1), statistics.fmean(values)
    whole = (
        centre + (np.array(values) - centre) * (len(values) / (len(values) - 1)) ** 0.5
    )  # as spread as runs are
    pairs = (random.choice(whole, (2, seeds)).tolist() for _ in range(DRAWS))
    return statistics.fmean(
        p_values([first, [v - gain for v in other]])[0, 1] < NOISE for first, other in pairs
    )


def report(losses: Sequence[float]) -> tuple[str, dict[str, object]]:
    """The text, and its numbers."""
    sd, random = statistics.stdev(losses), np.random.default_rng(0)
    lines = [
        f"- Losses of {len(losses)} seeds: {', '.join(f'{loss:.4f}' for loss in losses)}; standard deviation {sd:.4f}."
    ]
    raw: dict[str, object] = {"losses": list(losses), "sd": sd}
    for size in (5, 3):
        pairs = sum(1 for _ in splits(losses, size))
        share = called_different(losses, size)
        normal = [
            called_different(random.standard_normal(len(losses)).tolist(), size)
            for _ in range(200 if size == 5 else 20)
        ]
        raw[f"called_different_{size}"] = {
            "pairs": pairs,
            "share": share,
            "normal_mean": statistics.fmean(normal),
        }
        lines.append(
            f"- All {pairs} pairs of groups of {size}: {share:.1%} called different at {NOISE:.0%}; of ten normal"
            f" numbers {statistics.fmean(normal):.1%} on average."
        )
    needed = seeds_needed(PLANTED)
    assert needed is not None
    for seeds in (5, needed):
        detected, predicted = found_gain(losses, seeds, PLANTED * sd), power(PLANTED, seeds)
        raw[f"planted_{seeds}"] = {"found": detected, "predicted": predicted}
        why = " (the number that is predicted for 90 %)" if seeds == needed else ""
        lines.append(
            f"- A gain of {PLANTED:g} standard deviations between groups of {seeds}{why}, drawn {DRAWS:,} times from"
            f" the losses: found in {detected:.1%}, predicted {predicted:.1%}."
        )
    return "\n".join(lines), raw


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--losses", type=float, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True, help="gets .md and .json")
    args = parser.parse_args()
    losses = args.losses
    if not losses:
        import torch

        torch.set_num_threads(1)
        overrides = [*SETTINGS, f"data.corpus={args.corpus}", f"budget.hours={args.seconds / 3600}"]
        with tempfile.TemporaryDirectory() as runs:
            for seed in range(SEEDS):
                losses.append(train(overrides, runs, seed))
                print(f"seed {seed}: {losses[-1]:.4f}", flush=True)
    from cramming.bench.tables import versions
    from cramming.environment import cpu_name

    text, raw = report(losses)
    about = f"`experiment=best scale=5M`, {args.seconds:g} s of CPU time on {cpu_name()}, torch {versions()['torch']}"
    args.out.with_suffix(".md").write_text(
        f"# Groups of seeds of one recipe\n\n{about}\n\n{text}\n"
    )
    args.out.with_suffix(".json").write_text(json.dumps({**raw, "seconds": args.seconds}) + "\n")
    print(text)


if __name__ == "__main__":
    main()
