"""The process that measures the rows; run.py starts it with its arguments as JSON, watches, and prints.

A row that fails leaves its traceback and nothing else: compiled code, settings and memory go with it. Where the device
does not answer any more, this process ends so that another takes over.
"""

import functools
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lab as laboratory
import torch
from in_process import clean, release
from lab import SCALES, TOLD, Lab, Result, Row, Spec
from processes import ANEW, Jobs
from record import MEASURED, Record, State
from warm import warm_up_jobs

from cramming import device as devices
from cramming.bench.tables import versions
from cramming.config import UserError
from cramming.environment import git

PRIOR_SECONDS = 30.0  # weight of the estimates against what was measured
DETAILS = 5  # lines under a row's own


def measured_ratio(rows: Sequence[Row], states: dict[str, State], factor: float) -> float:
    """Return measured over estimated seconds of the rows so far; a prior of 30 seconds keeps it near 1 at first."""
    estimated = measured = PRIOR_SECONDS * factor
    for row in rows:
        state = states.get(row.name, {})
        if "result" in state and "refused" not in state["result"]:
            estimated += row.seconds * factor
            measured += state["seconds"]
    return measured / estimated


def choose(rows: Sequence[Row], left: float, ratio: float) -> Row | None:
    """Return the row to measure next: the first of the most valuable ones that fit together, or any that fits."""
    chosen: list[Row] = []
    free = left
    by_value = sorted(rows, key=lambda row: -row.value)
    for row in by_value:
        free -= row.seconds * ratio
        if free < 0:
            break
        chosen.append(row)
    if not chosen:
        chosen = [row for row in by_value if row.seconds * ratio <= left][:1]
    return next((row for row in rows if row in chosen), None)


def measure_all(lab: Lab, rows: Sequence[Row]) -> None:
    """Measure the rows that have no result and can end in time; say of the others why not."""
    factor = lab.scale.factor
    while True:
        states = lab.record.rows()
        open_rows = [row for row in rows if not is_measured(states, row.name)]
        ratio = factor * measured_ratio(rows, states, factor)
        row = choose(open_rows, lab.left(), ratio)
        if row is None:
            break
        measure_row(lab, row, ratio)
    for row in open_rows:
        reason = f"it needs about {row.seconds * ratio:.0f} s, and {lab.left():.0f} s were left"
        lab.record.add(row=row.name, skipped=reason)


def measure_row(lab: Lab, row: Row, ratio: float) -> None:
    """Measure a row and write down how it ended."""
    end_warm_ups(lab, row)
    lab.row, began = row.name, time.monotonic()
    lab.record.add(row=row.name, begun=began, at_most=row.limit(row.seconds * ratio))
    try:
        with clean(lab.device, lab.candidates):
            result = row.measure(lab)
        ended = {"result": result, "told": told(row, {**lab.record.result(row.name), **result})}
    except (Exception, SystemExit) as error:
        ended = {"error": traceback.format_exc()}
        if is_refusal(error):  # what this device cannot do is said in a line
            ended = {"result": {"refused": str(error)}, "told": f"refused: {error}"}
    release(lab.device)  # the frames of an exception have held tensors until here
    lab.record.add(row=row.name, seconds=round(time.monotonic() - began, 1), **ended)
    if "error" in ended and not laboratory.answers(lab.device):
        os._exit(ANEW)  # a thread may hang in the device


def end_warm_ups(lab: Lab, row: Row) -> None:
    """End the processes that warm up before a timed row, once `lab.go` has let them use the device."""
    warm_ups: Jobs | None = lab.shared.get("warm-ups")
    if warm_ups and row.is_timed and lab.go.exists():
        warm_ups.end()


def is_refusal(error: BaseException) -> bool:
    """Return whether a setting cannot be had here; cramming/model knows no UserError and names the setting.

    A process of `cramming bench` that died is a UserError as well, but a failure.
    """
    is_dead_process = str(error).startswith("bench: ")
    is_named = isinstance(error, UserError) or str(error).startswith("attention.kernel=")
    return is_named and not is_dead_process


def told(row: Row, result: Result) -> str:
    """Return a row's line and its details, each cut."""
    try:
        text = row.tell(result)
    except Exception as error:  # the numbers are worth more than their sentence
        text = f"measured; its line failed: {error!r}"
    lines = [line[:TOLD] for line in text.splitlines() if line]
    shown = lines[: 1 + DETAILS]
    if len(shown) < len(lines):
        shown.append(f"and {len(lines) - len(shown)} more")
    return "\n".join(shown)


def about(lab: Lab, scale: str) -> dict[str, Any]:
    """Return where and with what the rows are measured. `--commit` serves where git knows none."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        "commit": git("describe", "--always", "--dirty", "--exclude=*") or lab.commit,
        "scale": scale,
        "python": sys.version.split()[0],
        "versions": versions(),
        **asdict(devices.describe(lab.device)),
    }


def write_head(record: Record, head: dict[str, Any]) -> None:
    """Write the head of the record; SystemExit if its rows are measured elsewhere or with something else."""
    first, others = record.about(), []
    for name, value in first.items():
        if name != "date" and value != head[name]:
            others.append(f"{name}={value} (this call {head[name]})")
    if others:
        problem = f"its rows have {', '.join(others)}"
        raise SystemExit(f"--work={record.work}: {problem}. Name another folder.")
    if not first:
        record.add(about=head)


def main() -> None:
    """Measure what is left."""
    options = json.loads(sys.argv[1])
    lab = Lab(
        scale=SCALES[options["scale"]],
        device=devices.select(options["device"]),
        record=Record(Path(options["work"])),
        bundle=Path(options["bundle"]) if options["bundle"] else None,
        began=options["began"],
        deadline=options["deadline"],
        commit=options["commit"],
    )
    if lab.device.type == "cpu":  # its kernels would take minutes to compile, and are not a GPU's
        torch.compile = functools.partial(torch.compile, backend="eager")
    module = importlib.import_module(options["rows"])
    rows = module.rows(lab)
    if options["only"]:
        rows = [row for row in rows if any(text in row.name for text in options["only"])]
    if not rows:
        raise SystemExit(f"--only={options['only']}: no row has such a name. See rows.py.")
    names = [row.name for row in rows]
    write_head(lab.record, about(lab, options["scale"]))
    lab.record.add(names=names)
    if module.WARM_UP in names and not is_measured(lab.record.rows(), module.WARM_UP):
        start_warm_ups(lab, module.warm_steps(lab))
    measure_all(lab, rows)


def start_warm_ups(lab: Lab, steps: dict[str, Callable[[], Spec]]) -> None:
    """Start the first processes that warm up; they wait for the device until nothing is timed."""
    states = lab.record.rows()
    missing = {name: spec for name, spec in steps.items() if not is_measured(states, name)}
    lab.shared["warm-ups"] = warm_up_jobs(lab, missing)
    lab.shared["warm-ups"].poll()


def is_measured(states: dict[str, State], name: str) -> bool:
    """Return whether a row has a result, or has failed."""
    return bool(states.get(name, {}).keys() & set(MEASURED))


if __name__ == "__main__":
    main()
