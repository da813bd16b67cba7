"""Times at which the stages of a pipeline compute, in the order of torch's schedules.

Each rank does its actions in the schedule's order, each as soon as its inputs exist: a forward needs that of the stage
before, a backward that of the stage after (messages take no time). Times are in forwards of all that a rank has: with v
stages on it each takes 1 / v, a backward twice as long, of which one half is for the inputs and one for the weights.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from cramming.experimental.pipeline import make_schedule
from cramming.experimental.stages import ORDERS


class Kind(NamedTuple):
    """Cost of a kind of action, its name and its colour in charts."""

    cost: float
    name: str
    colour: str


KINDS = {
    "F": Kind(1.0, "forward", "#2f86c9"),
    "B": Kind(2.0, "backward", "#009e73"),
    "I": Kind(1.0, "backward, of inputs", "#e69f00"),
    "W": Kind(1.0, "backward, of weights", "#cc79a7"),
}


UNIT, ROW, LABEL_WIDTH = 14, 20, 60  # pixels: of a forward of a rank, of a row, of the rank's name


class Action(NamedTuple):
    """Action of a `KINDS` key, of one stage and micro-batch."""

    kind: str
    stage: int
    micro_batch: int


class Slot(NamedTuple):
    """Action of a rank, from `begin` to `end`."""

    rank: int
    action: Action
    begin: float
    end: float


def actions(schedule: str, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Return what each rank computes, in order; ValueError where the schedule does not take so many micro-batches."""
    order = ORDERS[schedule]
    stages = ranks * order.stages_per_rank
    placeholders = []
    for stage in range(stages):
        if order.rank_of(stage, ranks) == 0:
            sizes = {"num_stages": stages, "group_rank": 0, "group_size": ranks, "submod": None}
            placeholders.append(SimpleNamespace(stage_index=stage, **sizes))
    by_rank = make_schedule(schedule, placeholders, micro_batches).pipeline_order
    return [_computations(by_rank[rank]) for rank in range(ranks)]


def _computations(scheduled: Sequence[Any]) -> list[Action]:
    """Return torch's actions without those that compute nothing.

    The k-th forward of a stage is of micro-batch k: all schedules take them in order, and torch 2.13 numbers those of
    the last stage in 1F1B from 1.
    """
    forwards = Counter[int]()
    computations = []
    for action in _flat(scheduled):
        kind, stage = str(action.computation_type.value), int(action.stage_index)
        micro_batch = action.microbatch_index
        if kind == "F":
            micro_batch = forwards[stage]
            forwards[stage] += 1
        if kind in KINDS:
            computations.append(Action(kind, stage, micro_batch))
    return computations


def _flat(scheduled: Sequence[Any]) -> Iterator[Any]:
    """Yield the actions, those that torch groups one by one."""
    for action in scheduled:
        if action:
            yield from getattr(action, "sub_actions", None) or (action,)


def timeline(schedule: str, ranks: int, micro_batches: int) -> list[Slot]:
    """Return all actions with their times."""
    waiting = actions(schedule, ranks, micro_batches)
    last = ranks * ORDERS[schedule].stages_per_rank - 1
    ends: dict[Action, float] = {}
    free = [0.0] * ranks
    slots: list[Slot] = []
    while any(waiting):
        before = len(slots)
        for rank, queue in enumerate(waiting):
            while queue and _needs(queue[0], last) <= ends.keys():
                action = queue.pop(0)
                ready = [ends[need] for need in _needs(action, last)]
                begin = max([free[rank], *ready])
                free[rank] = begin + KINDS[action.kind].cost / ORDERS[schedule].stages_per_rank
                slots.append(Slot(rank, action, begin, free[rank]))
                ends[action] = free[rank]
                if action.kind == "B":
                    ends[action._replace(kind="I")] = free[rank]
        assert len(slots) > before, f"{schedule}: the ranks wait for each other"
    return slots


def _needs(action: Action, last: int) -> set[Action]:
    """Return what must have been computed before; a whole backward counts as one of the inputs."""
    kind, stage, micro_batch = action
    if kind == "F":
        return {Action("F", stage - 1, micro_batch)} if stage else set()
    if kind == "W":
        return {Action("I", stage, micro_batch)}
    needs = {Action("F", stage, micro_batch)}
    if stage < last:
        needs.add(Action("I", stage + 1, micro_batch))
    return needs


def bubble(slots: Sequence[Slot], ranks: int) -> float:
    """Return the share of the ranks' time in which they compute nothing."""
    busy = sum(slot.end - slot.begin for slot in slots)
    return 1 - busy / (ranks * max(slot.end for slot in slots))


def peak_activations(slots: Sequence[Slot], ranks: int) -> list[int]:
    """Return for each rank the most micro-batches (times stages) whose activations it keeps at one time."""
    held, peaks = [0] * ranks, [0] * ranks
    changes = {"F": 1, "I": 0, "B": -1, "W": -1}
    for slot in sorted(slots, key=lambda slot: slot.begin):
        held[slot.rank] += changes[slot.action.kind]
        peaks[slot.rank] = max(peaks[slot.rank], held[slot.rank])
    return peaks


def expected_bubble(schedule: str, ranks: int, micro_batches: int) -> float | None:
    """Return the papers' formula for `bubble`, None for schedules without one.

    gpipe: Huang et al. 2019, section 2.3; 1f1b: the same, in less memory; interleaved: Narayanan et al. 2021
    (Megatron-LM), section 2.2; zero_bubble: ZB-H1, a third of the idle time of 1F1B (Qi et al. 2023, section 2.3).
    """
    micro_batches_per_bubble = {
        "gpipe": micro_batches,
        "1f1b": micro_batches,
        "interleaved": ORDERS[schedule].stages_per_rank * micro_batches,
        "zero_bubble": 3 * micro_batches,
    }
    if schedule not in micro_batches_per_bubble:
        return None
    return (ranks - 1) / (micro_batches_per_bubble[schedule] + ranks - 1)


def draw(slots: Sequence[Slot], ranks: int, title: str) -> str:
    """Return an SVG with a row for each rank, and a box with its micro-batch for each action."""
    width = LABEL_WIDTH + UNIT * max(slot.end for slot in slots)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 560):.0f}" height="{(ranks + 2) * ROW}"'
        f' font-family="sans-serif" font-size="9" fill="currentColor"><title>{title}</title>'
    ]
    for rank in range(ranks):
        lines.append(f'<text x="4" y="{rank * ROW + 14}">rank {rank}</text>')
    for slot in slots:
        name, colour = KINDS[slot.action.kind][1:]
        label = f"{name} of micro-batch {slot.action.micro_batch}, stage {slot.action.stage}"
        x = LABEL_WIDTH + UNIT * slot.begin
        lines.append(_box(x, slot.rank * ROW, UNIT * (slot.end - slot.begin), colour, label))
        lines.append(
            f'<text x="{x + 2:.1f}" y="{slot.rank * ROW + 14}">{slot.action.micro_batch}</text>'
        )
    for position, kind in enumerate(KINDS.values()):
        x, y = LABEL_WIDTH + 110 * position, (ranks + 0.5) * ROW
        lines.append(_box(x, y, UNIT, kind.colour, kind.name))
        lines.append(f'<text x="{x + UNIT + 4}" y="{y + 14}">{kind.name}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _box(x: float, y: float, width: float, colour: str, label: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW - 2}" fill="{colour}" stroke="#ffffff">'
        f"<title>{label}</title></rect>"
    )
