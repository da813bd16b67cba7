"""The README's picture of all duels whose logs are in benchmarks/results.

python benchmarks/ladder.py --out docs/ladder.png
"""

import argparse
from pathlib import Path

from eval.duel import ladder
from eval.duel.duel_log import DUEL_LOG, Duel, DuelLog
from eval.plots import Interval, intervals

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    logs = [DuelLog(path.parent) for path in sorted(RESULTS.glob(f"duels*/{DUEL_LOG}"))]
    duels = [duel for log in logs for duel in log.duels().values()]
    lines = [line for duel in duels if (line := with_scale(duel)) is not None]
    figure = intervals(lines, "candidate minus base, pinned validation loss (nats)")
    assert figure, f"{RESULTS}: no duel that has ended"
    figure.savefig(out, dpi=110)
    print(f"{out}: {len(lines)} duels of {len(logs)} logs")


def with_scale(duel: Duel) -> Interval | None:
    """Return the duel's line, with the size of its models first; None where it has no interval."""
    line = ladder.interval(duel)
    if line is None:
        return None
    words = duel.terms.base.overrides
    scale = next(word.partition("=")[2] for word in words if word.startswith("scale="))
    return line._replace(label=f"{scale}, {line.label}")


if __name__ == "__main__":
    main()
