"""The README's picture of all duels whose ledgers are in benchmarks/results.

python benchmarks/ladder.py --out docs/ladder.png
"""

import argparse
from pathlib import Path

from eval.duel.ledger import Duel, Ledger

from eval.duel import ladder
from eval.report.plots import Interval, intervals

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    ledgers = [Ledger(path.parent) for path in sorted(RESULTS.glob("duels*/ledger.jsonl"))]
    duels = [duel for ledger in ledgers for duel in ledger.duels().values() if duel.verdict]
    figure = intervals(
        [with_scale(duel) for duel in duels], "candidate minus base, pinned validation loss (nats)"
    )
    assert figure, f"{RESULTS}: no duel that has ended"
    figure.savefig(out, dpi=110)
    print(f"{out}: {len(duels)} duels of {len(ledgers)} ledgers")


def with_scale(duel: Duel) -> Interval:
    """The duel's line, with the size of its models first."""
    scale = next(
        word.partition("=")[2]
        for word in duel.terms["base"]["overrides"]
        if word.startswith("scale=")
    )
    line = ladder.interval(duel)
    return line._replace(label=f"{scale}, {line.label}")


if __name__ == "__main__":
    main()
