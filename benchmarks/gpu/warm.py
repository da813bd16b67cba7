"""One training step of a later row, beside the untimed rows, so that its code is compiled into the common cache.

    python benchmarks/gpu/warm.py spec.json go        # imports, waits for the file `go`, trains

A warm-up that is late or dies costs its row the time of a compilation and nothing else.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processes import Jobs, Process, start

if TYPE_CHECKING:
    from lab import Lab

COMPILE_THREADS = "4"
STEP_GB, RESERVED_GB = 37.0, 10.0  # of a micro-batch of 65,536 tokens; for all else on the device


def warm_up_jobs(lab: "Lab", steps: dict[str, Callable[[], Any]]) -> Jobs:
    """Return a job for each step, as many at a time as memory allows; they wait for `lab.go`."""
    lab.go.unlink(missing_ok=True)
    at_a_time = max(1, int((lab.memory_gb - RESERVED_GB) / STEP_GB))
    jobs = {name: partial(_start, lab.go, name, make) for name, make in steps.items()}
    return Jobs(jobs, at_a_time)


def _start(go: Path, name: str, make_spec: Callable[[], Any]) -> Process:
    file = go.with_name(f"warm {name}.json")
    file.write_text(json.dumps(make_spec(), default=str), encoding="utf-8")
    command = [sys.executable, __file__, file, go]
    log = file.with_suffix(".log")
    return start(command, log, TORCHINDUCTOR_COMPILE_THREADS=COMPILE_THREADS)


def main() -> None:
    """Train one step of the specification."""
    spec, go = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    from in_process import InProcess, cache_hits

    while not go.exists():
        time.sleep(0.1)
    with InProcess(spec) as candidate:
        steps = candidate.run(0, 1)
    print(json.dumps({"loss": steps.losses[0], "fxgraph_cache_hit": cache_hits()}))


if __name__ == "__main__":
    main()
