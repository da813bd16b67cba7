"""The process that measures the rows of one stage in turn; run.py starts it and watches.

    python benchmarks/gpu/stage.py '{"stage": 1, "scale": "tiny", ...}'      # run.py's arguments

A row that fails leaves its traceback and nothing else: compiled code, settings and memory go with it. Where the device
itself does not answer any more, as after an illegal access, this process ends so that another takes over.
"""

import functools
import importlib
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from in_process import clean
from lab import SCALES, Lab, Row, answers
from run import ANEW, LAST_SECONDS, add_line, rows_of

from cramming import device as devices
from cramming.bench.tables import versions
from cramming.config import UserError
from cramming.environment import git

AT_LEAST = 180.0  # seconds that a row may take, whatever its estimate


def measure_all(lab: Lab, rows: Sequence[Row], file: Path) -> None:
    """Those that are not measured yet and can end in time."""
    known = rows_of(file)
    for row in rows:
        if known.get(row.name, {}).keys() & {"result", "error"}:
            continue
        needed, left = row.seconds * lab.scale.seconds, lab.left() - LAST_SECONDS
        if needed > left:
            add_line(
                file,
                {
                    "row": row.name,
                    "skipped": f"it needs about {needed:.0f} s, and {left:.0f} s were left",
                },
            )
            continue
        began = time.time()
        add_line(
            file, {"row": row.name, "begun": began, "at_most": min(left, max(AT_LEAST, 3 * needed))}
        )
        try:
            with clean(lab.device):
                found: dict[str, Any] = {"result": row.measure()}
        except UserError as error:  # what this device cannot do is said in one line
            found = {"result": {"refused": str(error)}}
        except Exception:
            found = {"error": traceback.format_exc()}
        add_line(file, {"row": row.name, "seconds": round(time.time() - began, 1), **found})
        print(
            f"{row.name}: {time.time() - began:.0f} s{', failed' if 'error' in found else ''}",
            flush=True,
        )
        if "error" in found and not answers(lab.device):
            sys.exit(ANEW)


def about(lab: Lab, stage: int) -> dict[str, Any]:
    """Where and with what the following lines were measured."""
    where = {
        **asdict(devices.describe(lab.device)),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    when = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    commit = git("rev-parse", "--short", "HEAD")
    return {
        "about": {
            "stage": stage,
            "date": when,
            "python": sys.version.split()[0],
            "commit": commit,
            **where,
        }
    }


def main() -> None:
    told = json.loads(sys.argv[1])
    out, work, bundle = (told[name] and Path(told[name]) for name in ("out", "work", "bundle"))
    lab = Lab(
        SCALES[told["scale"]], devices.select(told["device"]), out, work, bundle, told["deadline"]
    )
    file = Path(told["file"])
    if (
        lab.device.type == "cpu"
    ):  # a try-out: its kernels would take minutes to compile, and are not the GPU's
        torch.compile = functools.partial(torch.compile, backend="eager")
    rows = importlib.import_module(f"stage{told['stage']}").rows(lab)
    if told["only"]:
        known = ", ".join(row.name for row in rows)
        rows = [row for row in rows if any(text in row.name for text in told["only"])]
        if not rows:
            raise SystemExit(
                f"--only {' '.join(told['only'])}: no row of stage {told['stage']}; there are {known}"
            )
    add_line(file, {**about(lab, told["stage"]), "scale": told["scale"]})
    measure_all(lab, rows, file)


if __name__ == "__main__":
    main()
