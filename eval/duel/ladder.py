"""What the ledger says: one duel in a sentence, all duels as a table, a picture and JSON."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cramming.files import write_atomically
from cramming.progress import say, show_table
from cramming.record import finite
from eval.duel.ledger import Duel, Ledger
from eval.duel.sequential_test import Look
from eval.report.plots import Interval, Pair, against_seconds, intervals, svg
from eval.report.wording import counted

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
SAID = {
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
    """The test's state in words."""
    if state.pairs < first_look:
        return f"mean difference {state.mean:+.4f}; the test begins with {first_look} pairs"
    more = (
        "" if state.pairs_needed is None else f", such an effect takes {state.pairs_needed} pairs"
    )
    return f"mean difference {state.mean:+.4f} {interval_text(finite(vars(state)))}, p {p_text(state.p)}{more}"


def p_text(p: float) -> str:
    """The p-value; those below a thousandth are not told apart (sequential_test.py)."""
    return "<=0.001" if p <= 0.001 else f"{p:.2g}"


def interval_text(look: Mapping[str, Any]) -> str:
    """A look's interval; dashes where there is none: after too few pairs, or where the differences have no spread."""
    low, high = ("–" if (end := look[name]) is None else f"{end:+.4f}" for name in ("low", "high"))
    return f"[{low}, {high}]"


def summary(duel: Duel) -> dict[str, Any]:
    """A duel for programs; numbers are those of its last look, `verdict` is null while it is fought."""
    terms, verdict = duel.terms, duel.verdict or {}
    scores = duel.score_differences()
    return {
        "id": duel.id,
        "base": terms["base"],
        "candidate": terms["candidate"],
        "verdict": verdict.get("verdict"),
        "why": verdict.get("why"),
        "measure": terms["measure"],
        "higher_is_better": duel.test.higher_is_better,
        **{key: verdict.get(key) for key in ("mean", "low", "high", "p")},
        "pairs_fought": len(duel.pairs),
        "pairs_planned": terms["pairs"],
        "pairs_started": duel.starts,
        **{key: terms[key] for key in ("error", "delta", "budgets", "clock", "device", "code")},
        "reaches_base_at": reaches_base_at(duel),
        "score_difference": statistics.fmean(scores) if scores else None,
        "score_differences": scores,
    }


def reaches_base_at(duel: Duel) -> float | None:
    """The share of the candidate's budget after which its validations were as low as the base's at its end.

    The median over pairs whose base has a loss; by straight lines between validations. None where it did not get there
    in most pairs. Before its last part a run's rate has not decayed, so this says less than a duel with a smaller
    budget for the candidate.
    """
    if duel.terms["measure"] != "loss":
        return None
    ends = [(pair["candidate"]["curve"], pair["base"]["loss"]) for pair in duel.pairs]
    found = [_share(curve, target) for curve, target in ends if target is not None]
    middle = statistics.median(found) if found else math.inf
    return middle if middle <= 1 else None


def seconds_and_losses(duel: Duel) -> list[Pair]:
    """Each pair's validations over the seconds that the run had spent, as if its speed had been one."""

    def points(side: Mapping[str, Any]) -> list[tuple[float, float]]:
        every = side["curve"]
        return [(progress * side["seconds"], loss) for progress, loss in every if loss is not None]

    return [Pair(points(pair["base"]), points(pair["candidate"])) for pair in duel.pairs]


def _share(curve: Sequence[Sequence[float]], target: float) -> float:
    before = (0.0, float("inf"))
    for progress, loss in curve:
        if loss is not None and loss <= target:
            start, first = before
            return (
                progress
                if first == float("inf")
                else start + (progress - start) * (first - target) / (first - loss)
            )
        before = (progress, float("inf") if loss is None else loss)
    return math.inf


def sentence(duel: Duel) -> str:
    """The verdict in words, with what it rests on."""
    terms, verdict = duel.terms, duel.verdict
    assert verdict is not None
    measure, unit = MEASURES[terms["measure"]]
    name = f"{label(duel)} against {base_label(duel)}"
    if verdict["why"]:
        return f"{name}: {verdict['verdict']}: {verdict['why']}"
    mean = verdict["mean"]
    better, worse = ("higher", "lower") if duel.test.higher_is_better else ("lower", "higher")
    said = SAID[verdict["verdict"]].format(
        measure=measure, better=better, worse=worse, size=abs(mean), mean=mean, delta=terms["delta"]
    )
    clock = "CPU time, a core for each" if terms["clock"] == "cpu" else "wall clock"
    parts = [
        f"{name}: the candidate {said} {unit} {interval_text(verdict)}, p {p_text(verdict['p'])}",
        f"{len(duel.pairs)} pairs of {budget_text(duel)} ({clock}) on {terms['device']}",
    ]
    if (share := reaches_base_at(duel)) is not None:
        parts.append(f"it is where the base ends after {share:.0%} of its budget")
    if terms["measure"] != "score" and (scores := duel.score_differences()):
        spread = (
            f" +- {statistics.stdev(scores) / len(scores) ** 0.5:.2f} (standard error)"
            if len(scores) > 1
            else ""
        )
        parts.append(
            f"scores differ by {statistics.fmean(scores):+.2f}{spread}, which decides nothing"
        )
    return "; ".join(parts)


def label(duel: Duel) -> str:
    """What only the candidate has of what was typed."""
    return _only(duel.terms["candidate"], duel.terms["base"]) or "without what the base sets"


def base_label(duel: Duel) -> str:
    """What the base has that the candidate lacks, or its settings as they were typed."""
    return _only(duel.terms["base"], duel.terms["candidate"]) or "the same without it"


def _only(side: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    own = [word for word in side["overrides"] if word not in other["overrides"]]
    named = [word for word in own if not word.startswith("budget.")]  # which `budget_text` says
    return " ".join(
        named or [word for word in own if not word.endswith("=null")]
    )  # the units that a limit replaced


def budget_text(duel: Duel) -> str:
    """Both budgets where they differ."""
    found = [
        " ".join(_limit(unit, value) for unit, value in budget.items())
        for budget in duel.terms["budgets"]
    ]
    return found[0] if found[0] == found[1] else f"{found[0]} against the candidate's {found[1]}"


def _limit(unit: str, value: float) -> str:
    return f"{60 * value:.3g} min" if unit == "hours" else f"{value:g} {unit}"


def show(ledger: Ledger, as_json: bool) -> None:
    """Every duel of the ledger, lost ones too, and what they could have been wrong about; with pictures beside it."""
    duels = list(ledger.duels().values())
    spent = sum(duel.terms["error"] for duel in duels)
    pictures = draw(ledger, duels)
    if as_json:
        print(json.dumps({"duels": [summary(duel) for duel in duels], "error_spent": spent}))
        return
    if not duels:
        say(
            f"{ledger.path}: no duel yet; cramming duel base='...' candidate='...' budget.minutes=5"
        )
        return
    show_table(
        f"{ledger.path}: {counted(len(duels), 'duel')}", HEADERS, [row(duel) for duel in duels]
    )
    wins = sum((duel.verdict or {}).get("verdict") == "win" for duel in duels)
    say(
        f"error budget spent: {spent:.2f} false verdicts by differences expected at most over"
        f" {counted(len(duels), 'duel')}, of which {wins} won; a single win is believed at its own error only if it was"
        " the only candidate"
    )
    if pictures:
        say(f"pictures: {ledger.path.with_name('ladder.svg')}, and each duel's <id>/curves.svg")


def draw(ledger: Ledger, duels: Sequence[Duel]) -> list[Path]:
    """The pictures of those duels that losses decide, which alone have one unit: intervals, then curves."""
    by_loss, written = [duel for duel in duels if duel.terms["measure"] == "loss"], []
    drawn = [
        duel
        for duel in by_loss
        if None not in [(duel.verdict or {}).get(end) for end in ("mean", "low", "high")]
    ]
    if figure := intervals(
        [interval(duel) for duel in drawn], "candidate minus base, pinned validation loss (nats)"
    ):
        written.append(ledger.path.with_name("ladder.svg"))
        write_atomically(written[-1], svg(figure, "ladder"))
    for duel in by_loss:
        if figure := against_seconds(
            seconds_and_losses(duel), f"{label(duel)} against {base_label(duel)}"
        ):
            written.append(ledger.path.parent / duel.id / "curves.svg")
            write_atomically(written[-1], svg(figure, duel.id))
    return written


def row(duel: Duel) -> list[str]:
    """A line of the ladder; dashes for a duel that is not over."""
    verdict, share = duel.verdict, reaches_base_at(duel)
    found = ["–", "–", "–"]
    if verdict and not verdict["why"]:
        unit = " points" if duel.terms["measure"] == "score" else ""
        found = [f"{verdict['mean']:+.4f}{unit}", interval_text(verdict), p_text(verdict["p"])]
    over = (
        "still fought"
        if verdict is None
        else verdict["verdict"] + (f" ({verdict['why']})" if verdict["why"] else "")
    )
    reached = "–" if share is None else f"{share:.0%}"
    pairs = (
        f"{len(duel.pairs)}{f' ({duel.starts} started)' if duel.starts > len(duel.pairs) else ''}"
    )
    return [label(duel), base_label(duel), budget_text(duel), pairs, *found, reached, over]


def interval(duel: Duel) -> Interval:
    """Of a duel with a verdict, for the picture."""
    verdict = duel.verdict
    assert verdict is not None
    name = f"{budget_text(duel)}: {label(duel)} against {base_label(duel)}"
    return Interval(name, verdict["mean"], verdict["low"], verdict["high"], verdict["verdict"])
