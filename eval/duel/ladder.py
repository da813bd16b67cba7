"""Output of duels: one duel as a sentence, all duels as a table, a picture and JSON."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cramming.files import write_atomically
from cramming.progress import say, show_table
from eval.duel.duel_log import Decision, Duel, DuelLog, SideResult, SideTerms
from eval.duel.sequential_test import Look
from eval.plots import Interval, Pair, against_seconds, intervals, svg
from eval.report.format import counted

HEADERS = (
    "candidate",
    "against",
    "budget",
    "pairs",
    "difference",
    "interval",
    "p",
    "reaches base at",
    "verdict",
)
VERDICT_TEXTS = {
    "win": "wins, its {measure} is {better} by {size:.4f}",
    "loss": "loses, its {measure} is {worse} by {size:.4f}",
    "equivalent": "makes no difference above {delta:g}, its {measure} differs by {mean:+.4f}",
    "undecided": "neither wins nor loses, its {measure} differs by {mean:+.4f}",
}
MEASURES = {
    "loss": ("pinned validation loss", "nats"),
    "bits_per_byte": ("bits per byte", "bits"),
    "score": ("mean score over the tasks", "points"),
}


def numbers(state: Look, first_look: int) -> str:
    """Return the state of the test in words."""
    if state.pairs < first_look:
        return f"mean difference {state.mean:+.4f}; the test begins with {first_look} pairs"
    more = ""
    if state.pairs_needed is not None:
        more = f", such an effect takes {state.pairs_needed} pairs"
    return f"mean difference {state.mean:+.4f} {interval_text(state.low, state.high)}, p {p_text(state.p)}{more}"


def p_text(p: float | None) -> str:
    """Return the p-value as text; values below a thousandth are not resolved (sequential_test.py)."""
    if p is None:
        return "–"
    return "<=0.001" if p <= 0.001 else f"{p:.2g}"


def interval_text(low: float | None, high: float | None) -> str:
    """Return an interval as text, with dashes for missing ends: too few pairs, or differences without variance."""
    return f"[{_end_text(low)}, {_end_text(high)}]"


def _end_text(end: float | None) -> str:
    if end is None or not math.isfinite(end):
        return "–"
    return f"{end:+.4f}"


def summary(duel: Duel) -> dict[str, Any]:
    """Return a duel as JSON values; numbers are those of the last look, `verdict` is None while it runs."""
    terms = duel.terms.model_dump()
    decision = duel.decision.model_dump() if duel.decision else {}
    scores = duel.score_differences()
    return {
        "id": duel.id,
        "base": terms["base"],
        "candidate": terms["candidate"],
        "verdict": decision.get("verdict"),
        "why": decision.get("why"),
        "measure": terms["measure"],
        "higher_is_better": duel.test.higher_is_better,
        **{key: decision.get(key) for key in ("mean", "low", "high", "p")},
        "pairs_fought": len(duel.pairs),
        "pairs_planned": terms["pairs"],
        "pairs_started": duel.starts,
        **{key: terms[key] for key in ("error", "delta", "budgets", "clock", "device", "code")},
        "reaches_base_at": reaches_base_at(duel),
        "score_difference": statistics.fmean(scores) if scores else None,
        "score_differences": scores,
    }


def reaches_base_at(duel: Duel) -> float | None:
    """Return the share of the candidate's budget after which its validation loss was as low as the base's final one.

    It is the median over pairs whose base has a loss, by linear interpolation between validations, and None if the
    candidate did not reach that loss in most pairs. Until the end of a run the learning rate has not decayed, so this
    says less than a duel with a smaller budget for the candidate.
    """
    if duel.terms.measure != "loss":
        return None
    ends = [(pair.candidate.curve, pair.base.loss) for pair in duel.pairs]
    shares = [_share(curve, target) for curve, target in ends if target is not None]
    middle = statistics.median(shares) if shares else math.inf
    return middle if middle <= 1 else None


def seconds_and_losses(duel: Duel) -> list[Pair]:
    """Return each pair's validations by spent seconds, with progress taken as proportional to time."""
    return [Pair(_points(pair.base), _points(pair.candidate)) for pair in duel.pairs]


def _points(side: SideResult) -> list[tuple[float, float]]:
    seconds = side.seconds or 0.0
    return [(progress * seconds, loss) for progress, loss in side.curve if loss is not None]


def _share(curve: Sequence[tuple[float, float | None]], target: float) -> float:
    before = (0.0, math.inf)
    for progress, loss in curve:
        if loss is not None and loss <= target:
            start, first = before
            if first == math.inf:
                return progress
            return start + (progress - start) * (first - target) / (first - loss)
        before = (progress, math.inf if loss is None else loss)
    return math.inf


def sentence(duel: Duel) -> str:
    """Return the verdict in words, with pairs, budget and scores."""
    terms, decision = duel.terms, duel.decision
    assert decision is not None
    name = f"{label(duel)} against {base_label(duel)}"
    if decision.why:
        return f"{name}: {decision.verdict}: {decision.why}"
    clock = "CPU time, a core for each" if terms.clock == "cpu" else "wall clock"
    parts = [
        f"{name}: the candidate {_decision_words(duel, decision)}",
        f"{len(duel.pairs)} pairs of {budget_text(duel)} ({clock}) on {terms.device}",
    ]
    share = reaches_base_at(duel)
    if share is not None:
        parts.append(f"it reaches the base's final loss after {share:.0%} of its budget")
    scores = duel.score_differences()
    if terms.measure != "score" and scores:
        spread = ""
        if len(scores) > 1:
            error = statistics.stdev(scores) / len(scores) ** 0.5
            spread = f" +- {error:.2f} (standard error)"
        mean = statistics.fmean(scores)
        parts.append(f"scores differ by {mean:+.2f}{spread}, which decides nothing")
    return "; ".join(parts)


def _decision_words(duel: Duel, decision: Decision) -> str:
    measure, unit = MEASURES[duel.terms.measure]
    better, worse = "lower", "higher"
    if duel.test.higher_is_better:
        better, worse = worse, better
    mean = decision.mean or 0.0
    words = VERDICT_TEXTS[decision.verdict].format(
        measure=measure,
        better=better,
        worse=worse,
        size=abs(mean),
        mean=mean,
        delta=duel.terms.delta,
    )
    return f"{words} {unit} {interval_text(decision.low, decision.high)}, p {p_text(decision.p)}"


def label(duel: Duel) -> str:
    """Return the overrides that only the candidate has."""
    return _only(duel.terms.candidate, duel.terms.base) or "without what the base sets"


def base_label(duel: Duel) -> str:
    """Return the overrides that only the base has."""
    return _only(duel.terms.base, duel.terms.candidate) or "the same without it"


def _only(side: SideTerms, other: SideTerms) -> str:
    differing = [word for word in side.overrides if word not in other.overrides]
    # `budget_text` shows the budget
    without_budget = [word for word in differing if not word.startswith("budget.")]
    if without_budget:
        return " ".join(without_budget)
    # a limit sets the other units to null
    return " ".join(word for word in differing if not word.endswith("=null"))


def budget_text(duel: Duel) -> str:
    """Return the budget as text, or both if they differ."""
    texts = []
    for budget in duel.terms.budgets:
        texts.append(" ".join(_limit(unit, value) for unit, value in budget.items()))
    base, candidate = texts
    return base if base == candidate else f"{base} against the candidate's {candidate}"


def _limit(unit: str, value: float) -> str:
    return f"{60 * value:.3g} min" if unit == "hours" else f"{value:g} {unit}"


def main(*, duels: Path, json: bool) -> None:
    """Run the verb `ladder` on a folder of duels."""
    show(DuelLog(duels), json)


def show(log: DuelLog, as_json: bool) -> None:
    """Print every duel of the log, lost ones too, and draw pictures beside it."""
    duels = list(log.duels().values())
    spent = sum(duel.terms.error for duel in duels)
    pictures = draw(log, duels)
    if as_json:
        print(json.dumps({"duels": [summary(duel) for duel in duels], "error_spent": spent}))
        return
    if not duels:
        say(
            f"{log.path}: no duel yet. Start one: cramming duel --base '...' --candidate '...' budget.minutes=5"
        )
        return
    show_table(f"{log.path}: {counted(len(duels), 'duel')}", HEADERS, [row(duel) for duel in duels])
    wins = sum(duel.decision is not None and duel.decision.verdict == "win" for duel in duels)
    say(
        f"error budget spent: at most {spent:.2f} false verdicts expected over {counted(len(duels), 'duel')}, of which"
        f" {wins} won. A win has the error of a single duel only if it was the only candidate."
    )
    if pictures:
        say(f"pictures: {log.path.with_name('ladder.svg')}, and each duel's <id>/curves.svg")


def draw(log: DuelLog, duels: Sequence[Duel]) -> list[Path]:
    """Draw the duels that losses decide, which have one unit: intervals, then curves; return the files."""
    by_loss = [duel for duel in duels if duel.terms.measure == "loss"]
    written: list[Path] = []
    lines = [line for line in map(interval, by_loss) if line is not None]
    figure = intervals(lines, "candidate minus base, pinned validation loss (nats)")
    if figure:
        written.append(log.path.with_name("ladder.svg"))
        write_atomically(written[-1], svg(figure, "ladder"))
    for duel in by_loss:
        title = f"{label(duel)} against {base_label(duel)}"
        figure = against_seconds(seconds_and_losses(duel), title)
        if figure:
            written.append(log.path.parent / duel.id / "curves.svg")
            write_atomically(written[-1], svg(figure, duel.id))
    return written


def row(duel: Duel) -> list[str]:
    """Return a line of the ladder, with dashes for a duel that is not over."""
    decision = duel.decision
    numbers_text = ["–", "–", "–"]
    ending = "running"
    if decision is not None:
        ending = f"{decision.verdict} ({decision.why})" if decision.why else decision.verdict
    if decision is not None and decision.mean is not None:
        unit = " points" if duel.terms.measure == "score" else ""
        numbers_text = [
            f"{decision.mean:+.4f}{unit}",
            interval_text(decision.low, decision.high),
            p_text(decision.p),
        ]
    share = reaches_base_at(duel)
    reached = "–" if share is None else f"{share:.0%}"
    pairs = str(len(duel.pairs))
    if duel.starts > len(duel.pairs):
        pairs += f" ({duel.starts} started)"
    return [
        label(duel),
        base_label(duel),
        budget_text(duel),
        pairs,
        *numbers_text,
        reached,
        ending,
    ]


def interval(duel: Duel) -> Interval | None:
    """Return the line of the picture for a duel with a verdict, or None without an interval."""
    decision = duel.decision
    if decision is None or decision.verdict == "void":
        return None
    if decision.mean is None or decision.low is None or decision.high is None:
        return None
    name = f"{budget_text(duel)}: {label(duel)} against {base_label(duel)}"
    return Interval(name, decision.mean, decision.low, decision.high, decision.verdict)
