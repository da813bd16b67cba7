"""The tests that need a GPU, as one row: how each ended, whatever the others did to the process.

pytest runs in a process of its own with this module as a plugin, which writes down each test as it begins and ends, in
a file of the folder that comes back. A test that takes the process, or the device, with it has failed, and the ones
behind it run in a new process. A later call goes on behind what has ended.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from run import ANEW, ROOT, add_line, end_with_parent, rows_of

FILE = "tests.jsonl"
TESTS = ROOT / "tests" / "gpu"
OUTCOMES = "CRAMMING_TEST_OUTCOMES"  # the file
DEVICE = "CRAMMING_GPU_TESTS"  # cpu: run there what can
ALL_RAN = (0, 1, 5)  # pytest's codes: all passed, some failed, none was left
CUT_OFF = "under way when the call ended"


def run(lab: Any) -> dict[str, Any]:
    """How many passed, and what the others said."""
    file = lab.out / FILE
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {OUTCOMES: str(file), DEVICE: lab.device.type, "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-p", "gpu_tests", "-m", "gpu", str(TESTS)]
    for name in under_way(file):
        note(file, name, "skipped", CUT_OFF)
    while True:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=end_with_parent,
        )
        broken = under_way(file)
        for name in broken:
            note(
                file,
                name,
                "failed",
                f"the process ended with code {done.returncode}: {done.stderr[-500:]}",
            )
        if not broken and done.returncode != ANEW:
            break
    found = summary(file)
    if done.returncode not in ALL_RAN or not found["tests"]:
        raise RuntimeError(
            f"pytest ended with code {done.returncode}: {done.stdout[-1000:]} {done.stderr[-1000:]}"
        )
    return found


def summary(file: Path) -> dict[str, Any]:
    """Of the tests that have begun so far."""
    found = {
        name: row if row["outcome"] != "begun" else {"outcome": "skipped", "text": CUT_OFF}
        for name, row in rows_of(file).items()
    }
    texts = {
        kind: {name: row["text"] for name, row in found.items() if row["outcome"] == kind}
        for kind in ("failed", "skipped")
    }
    return {
        **Counter(row["outcome"] for row in found.values()),
        "tests": len(found),
        "texts": texts,
    }


def under_way(file: Path) -> list[str]:
    return [name for name, row in rows_of(file).items() if row["outcome"] == "begun"]


def note(file: Path, name: str, outcome: str, text: str = "") -> None:
    """`outcome`: begun, passed, skipped or failed; `text`: the end of what it said."""
    add_line(file, {"row": name, "outcome": outcome, "text": text})


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Of pytest's. What has ended does not run again; `--deselect` would take names that begin alike, too."""
    known = rows_of(Path(os.environ[OUTCOMES]))
    items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Of pytest's."""
    note(Path(os.environ[OUTCOMES]), nodeid, "begun")


def pytest_runtest_logreport(report: Any) -> None:
    """Of pytest's, for a test's setup, call and teardown: it has passed when all of them have."""
    file = Path(os.environ[OUTCOMES])
    if report.outcome != "passed":
        note(file, report.nodeid, report.outcome, report.longreprtext[-1500:])
    elif report.when == "teardown" and report.nodeid in under_way(file):
        note(file, report.nodeid, "passed")
    if report.failed and not device_answers():
        os._exit(ANEW)


def device_answers() -> bool:
    """Imported late: tests/conftest.py sets the number of threads before torch is there."""
    import torch
    from lab import answers

    return answers(torch.device(os.environ[DEVICE]))
