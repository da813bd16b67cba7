"""All rows of the measurement, in the order in which they are measured when there is time for all.

Estimated seconds are those on an H100 with the code of the warmed steps compiled. Values say what is dropped when time
is short: the least valuable first.
"""

from collections.abc import Callable
from functools import partial

import check_rows
import device_rows
import run_rows
import shards
import step_rows
from lab import Lab, Row, Spec
from step_rows import LEVERS, speed_cases

ALWAYS = 100.0  # value of the rows that are never dropped
PATIENCE = 4.5  # their limit, in estimates: all else means little without them
STARTS_LIMIT = 60.0  # seconds that a row with two starts of `cramming` may take at least
WARM_UP = "tests and warm-up"


def rows(lab: Lab) -> list[Row]:
    """Return all rows."""
    bert, crammed, modern, best = speed_cases(lab)
    levers = []
    for name, lever in LEVERS.items():
        measure = partial(step_rows.with_and_without, lever=lever)
        name = f"lever: {name}"
        levers.append(Row(name, lever.seconds, lever.value, measure, step_rows.tell_pair))
    *first_levers, max_autotune = levers
    capped = partial(step_rows.capped, model="bert-base")
    check = partial(Row, patience=PATIENCE, is_timed=False)
    return [
        Row("facts", 12, ALWAYS, device_rows.facts, device_rows.tell_facts, PATIENCE),
        Row("ceilings", 16, ALWAYS, device_rows.ceilings, device_rows.tell_ceilings, PATIENCE),
        check("default paths", 22, ALWAYS, check_rows.default_paths, check_rows.tell_paths),
        check("parity", 13, ALWAYS, check_rows.parity, check_rows.tell_parity),
        Row(WARM_UP, 65, 95, run_rows.tests_and_warm_up, run_rows.tell_warm_up, is_timed=False),
        _ours(bert, 37, 90, keep=True),
        _ours(crammed, 40, 85),
        _ours(modern, 50, 80),
        _hugging_face("bert-base", "bert loop", 58, 75),
        Row(
            "run killed and resumed",
            95,
            70,
            run_rows.killed_and_resumed,
            run_rows.tell_run,
            least=STARTS_LIMIT,
        ),
        _predecessor("predecessor", 43, 65),
        *first_levers,
        _ours(best, 75, 50),
        Row("remaining tests", 90, 40, run_rows.remaining_tests, shards.tell_tests),
        _hugging_face("modern", "modernbert loop", 55, 38),
        max_autotune,
        Row("bert-base in 11 GiB", 30, 34, capped, step_rows.tell_capped),
        _predecessor("predecessor as it ships", 60, 32),
    ]


def warm_steps(lab: Lab) -> dict[str, Callable[[], Spec]]:
    """Return the steps to compile beside the untimed rows, by row, those that take longest first."""
    bert, crammed, modern, best = speed_cases(lab)
    step = partial(step_rows.speed_spec, lab, micro_batches=1)
    if lab.scale.compiled == "off":
        return {bert: partial(step, bert)}
    ours = {name: partial(step, name) for name in (modern, bert, crammed, best)}
    hugging_face = partial(lab.spec, "bert-base", lab.scale.lengths[0], peer="bert loop")
    return {**ours, "Hugging Face bert-base": hugging_face}


def _ours(name: str, seconds: float, value: float, keep: bool = False) -> Row:
    measure = partial(step_rows.speed, name=name, keep=keep)
    return Row(name, seconds, value, measure, step_rows.tell_speed)


def _hugging_face(model: str, peer: str, seconds: float, value: float) -> Row:
    measure = partial(step_rows.against_loop, model=model, peer=peer, turns=5)
    return Row(f"Hugging Face {model}", seconds, value, measure, step_rows.tell_pair)


def _predecessor(peer: str, seconds: float, value: float) -> Row:
    measure = partial(step_rows.against_predecessor, peer=peer)
    return Row(peer, seconds, value, measure, step_rows.tell_pair)
