"""Result of `cramming score`: a table on the terminal, `scores.md` for people and `scores.json` for programs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cramming.config import build
from cramming.files import write_atomically
from cramming.progress import say, show_table
from eval.own_tasks.compare import RESAMPLES, Comparison, Interval
from eval.own_tasks.metrics import METRICS

SMALLEST_P = 2 / (1 + RESAMPLES)


@dataclass(frozen=True)
class Result:
    """Comparisons on one labelled set of a task with the competitor `reference`.

    `seen_in_training` is the number of scored examples that are training examples too. Official numbers are those of
    GLUE's files, of which a folder may have a part; for own tasks they are the same.
    """

    task: str
    labelled_set: str
    kind: str
    metric: str
    train_examples: int
    official_train_examples: int
    examples: int
    official_examples: int
    seen_in_training: int
    reference: str
    comparisons: list[Comparison]

    @property
    def title(self) -> str:
        """Line with task, set, metric and numbers of examples."""
        direction = "" if METRICS[self.metric].higher_is_better else ", lower is better"
        seen = (
            f", {self.seen_in_training} of them also in training" if self.seen_in_training else ""
        )
        return (
            f"{self.task} ({self.labelled_set}): {self.metric}{direction};"
            f" {_count(self.train_examples, self.official_train_examples)} training examples,"
            f" {_count(self.examples, self.official_examples)} scored{seen}"
        )

    def headers(self) -> list[str]:
        """Return the column titles."""
        return ["", self.metric, "95 % interval", "difference", "95 % interval", "p"]

    def rows(self) -> Iterator[list[str]]:
        """Yield a row of text for each competitor."""
        for each in self.comparisons:
            is_reference = each.competitor == self.reference
            cells = [_number(each.score), _interval(each.interval)]
            cells += [_number(each.difference, "+"), _interval(each.difference_interval, "+")]
            cells.append(_p_value(each.p))
            yield [each.competitor, *(cells[:2] + ["reference", "", ""] if is_reference else cells)]


def show(results: Sequence[Result]) -> None:
    """Print a table for each labelled set."""
    for result in results:
        say("")
        show_table(result.title, result.headers(), list(result.rows()))


def write(folder: Path, results: Sequence[Result], provenance: Mapping[str, Any]) -> None:
    """Write `scores.json` and `scores.md`."""
    content = {**provenance, "resamples": RESAMPLES, "results": [asdict(each) for each in results]}
    write_atomically(folder / "scores.json", json.dumps(content, indent=2) + "\n")
    write_atomically(folder / "scores.md", _page(results, provenance))
    say("")
    say(f"written: {folder / 'scores.md'}, {folder / 'scores.json'}")


def read(folder: Path) -> list[Result]:
    """Return the results that `write` has stored in a folder."""
    path = folder / "scores.json"
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    return [build(Result, result, str(path)) for result in results]


def _page(results: Sequence[Result], provenance: Mapping[str, Any]) -> str:
    lines = [f"# Scores on {provenance['tasks_file']}", ""]
    for result in results:
        lines += [f"## {result.task}, {result.labelled_set}", "", f"{result.title}.", ""]
        for row in (result.headers(), ["---"] * len(result.headers()), *result.rows()):
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    lines += ["## How these numbers were made", "", *_notes(provenance)]
    return "\n".join(lines) + "\n"


def _notes(provenance: Mapping[str, Any]) -> Iterator[str]:
    seeds = provenance["seeds"]
    settings = ", ".join(f"{name} {value}" for name, value in provenance["hyperparameters"].items())
    yield f"- Every model has the same hyperparameters on every task: {settings}."
    yield "- The weights after the last epoch are scored."
    yield f"- Score: mean over seeds {', '.join(map(str, seeds))}. Precision {provenance['precision']}."
    drawn = (
        "examples and seeds"
        if len(seeds) > 1
        else "examples; the spread of seeds is unknown from one seed"
    )
    yield f"- Intervals and p-values: {RESAMPLES:,} bootstrap resamples of {drawn}."
    yield "- p-values are two-sided, for no difference to the reference, and not corrected for multiple comparisons."
    yield "- `random init`: fresh weights of the same architecture. Bag of words and constant class have no encoder."
    for name, model in provenance["models"].items():
        yield f"- {name}: weights {model['sha256'][:12]}."


def _count(examples: int, official: int) -> str:
    return f"{examples:,}" if examples == official else f"{examples:,} of {official:,}"


def _number(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.4f}"


def _interval(bounds: Interval | None, sign: str = "") -> str:
    if bounds is None:
        return "–"
    low, high = bounds
    return f"{low:{sign}.4f} to {high:{sign}.4f}"


def _p_value(p: float | None) -> str:
    if p is None:
        return "–"
    return f"< {SMALLEST_P:.3f}" if p <= SMALLEST_P else f"{p:.3f}"
