"""When which stage of a pipeline computes what: the order that torch's schedules give, with a time for each action.

Each rank does its actions in the schedule's order, each as soon as what it needs is there: a forward pass needs that of
the stage before, a backward pass that of the stage after (messages take no time). Times are in forward passes of all
that a rank has: with v stages on it each takes 1 / v, a backward pass twice as long, of which one half is for the
inputs and one for the weights.
"""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from cramming.parallel.pipeline import make_schedule
from cramming.parallel.stages import ORDERS

COSTS = {
    "F": 1.0,
    "B": 2.0,
    "I": 1.0,
    "W": 1.0,
}  # forward; backward, whole, of the inputs, of the weights


class Action(NamedTuple):
    """`kind` of `COSTS`, of one stage and micro-batch."""

    kind: str
    stage: int
    micro_batch: int


class Slot(NamedTuple):
    """An action of a rank, from `begin` to `end`."""

    rank: int
    action: Action
    begin: float
    end: float


def actions(schedule: str, ranks: int, micro_batches: int) -> list[list[Action]]:
    """What each rank computes, in order. ValueError where the schedule does not take so many micro-batches."""
    order = ORDERS[schedule]
    stages = ranks * order.stages_per_rank
    mine = [stage for stage in range(stages) if order.rank_of(stage, ranks) == 0]
    seats = [
        SimpleNamespace(
            stage_index=stage, num_stages=stages, group_rank=0, group_size=ranks, submod=None
        )
        for stage in mine
    ]
    by_rank = make_schedule(schedule, seats, micro_batches).pipeline_order
    return [_counted(by_rank[rank]) for rank in range(ranks)]


def _counted(found: Sequence[Any]) -> list[Action]:
    """Torch's actions without what is no computation. The k-th forward pass of a stage is of micro-batch k: all
    schedules take them in order, and torch 2.13 numbers those of the last stage in 1F1B from 1."""
    plain = [
        part
        for action in found
        if action
        for part in (getattr(action, "sub_actions", None) or (action,))
    ]
    seen = Counter[int]()
    actions = []
    for one in plain:
        kind, stage, micro_batch = (
            str(one.computation_type.value),
            int(one.stage_index),
            one.microbatch_index,
        )
        if kind == "F":
            micro_batch = seen[stage]
            seen[stage] += 1
        if kind in COSTS:
            actions.append(Action(kind, stage, micro_batch))
    return actions


def timeline(schedule: str, ranks: int, micro_batches: int) -> list[Slot]:
    """All actions with their times."""
    waiting = actions(schedule, ranks, micro_batches)
    last = ranks * ORDERS[schedule].stages_per_rank - 1
    ends: dict[Action, float] = {}
    free, slots = [0.0] * ranks, list[Slot]()
    while any(waiting):
        before = len(slots)
        for rank, queue in enumerate(waiting):
            while queue and all(need in ends for need in _needs(queue[0], last)):
                action = queue.pop(0)
                begin = max([free[rank], *(ends[need] for need in _needs(action, last))])
                free[rank] = begin + COSTS[action.kind] / ORDERS[schedule].stages_per_rank
                for known in (
                    (action, action._replace(kind="I")) if action.kind == "B" else (action,)
                ):
                    ends[known] = free[rank]
                slots.append(Slot(rank, action, begin, free[rank]))
        assert len(slots) > before, f"{schedule}: the ranks wait for each other"
    return slots


def _needs(action: Action, last: int) -> list[Action]:
    """What must have been computed before; a whole backward pass counts as one of the inputs."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [Action("F", stage - 1, micro_batch)] * (stage > 0)
    if kind == "W":
        return [Action("I", stage, micro_batch)]
    after = [Action("I", stage + 1, micro_batch)] * (stage < last)
    return [Action("F", stage, micro_batch), *after]


def bubble(slots: Sequence[Slot], ranks: int) -> float:
    """Share of the ranks' time in which they compute nothing, by counted occupancy."""
    busy = sum(slot.end - slot.begin for slot in slots)
    return 1 - busy / (ranks * max(slot.end for slot in slots))


def most_kept(slots: Sequence[Slot], ranks: int) -> list[int]:
    """Of each rank, the most micro-batches (times stages) whose activations it keeps at one time."""
    kept, most = [0] * ranks, [0] * ranks
    for slot in sorted(slots, key=lambda slot: slot.begin):
        kept[slot.rank] += {"F": 1, "I": 0}.get(slot.action.kind, -1)
        most[slot.rank] = max(most[slot.rank], kept[slot.rank])
    return most


def formula(schedule: str, ranks: int, micro_batches: int) -> float | None:
    """What the papers say `bubble` is, for p ranks and m micro-batches; None for schedules without such a formula.

    gpipe: Huang et al. 2019, section 2.3; 1f1b: the same, in less memory; interleaved: Narayanan et al. 2021
    (Megatron-LM), section 2.2; zero_bubble: ZB-H1, a third of the idle time of 1F1B (Qi et al. 2023, section 2.3).
    """
    p, m = ranks, micro_batches
    v = ORDERS[schedule].stages_per_rank
    shares = {
        "gpipe": (p - 1) / (m + p - 1),
        "1f1b": (p - 1) / (m + p - 1),
        "interleaved": (p - 1) / (v * m + p - 1),
    }
    return {**shares, "zero_bubble": (p - 1) / (3 * m + p - 1)}.get(schedule)
