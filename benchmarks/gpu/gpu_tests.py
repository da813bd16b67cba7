"""The tests that need a GPU, as one row: how each ended, whatever the others did to the process.

pytest runs in a process of its own with this module as a plugin, which writes down each test as it begins and ends. A
test that takes the process with it has failed, and the ones behind it run in a new one.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
OUTCOMES = "CRAMMING_TEST_OUTCOMES"  # the file
DEVICE = "CRAMMING_GPU_TESTS"  # cpu: run there what can
LEAST_SECONDS = 5.0


def run(lab: Any) -> dict[str, Any]:
    """How many passed, and what the others said."""
    file = lab.work / "tests.jsonl"
    file.unlink(missing_ok=True)
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {OUTCOMES: str(file), DEVICE: lab.device.type, "PYTHONPATH": path}
    root = FOLDER.parents[1]
    command = [sys.executable, "-m", "pytest", "-p", "gpu_tests", "-m", "gpu", "tests/gpu"]
    while True:
        ended = outcomes(file)
        skip = [f"--deselect={name}" for name in ended]
        done = subprocess.run([*command, *skip], cwd=root, env=env, capture_output=True, text=True, check=False)
        found = outcomes(file)
        under_way = [name for name, (outcome, _) in found.items() if outcome == "begun"]
        if not under_way:
            break
        note(file, under_way[0], "failed", f"the process ended with code {done.returncode}: {done.stderr[-500:]}")
    if not found:
        raise RuntimeError(f"no test ran: {done.stdout[-1000:]} {done.stderr[-1000:]}")
    kinds = {kind: {n: text for n, (o, text) in found.items() if o == kind} for kind in ("failed", "skipped")}
    return {**Counter(outcome for outcome, _ in found.values()), "tests": len(found), "texts": kinds}


def outcomes(file: Path) -> dict[str, tuple[str, str]]:
    """By test: begun, passed, skipped or failed, and the end of what it said."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {name: (outcome, text) for name, outcome, text in map(json.loads, lines)}


def note(file: Path, name: str, outcome: str, text: str = "") -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps([name, outcome, text]) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Of pytest's."""
    note(Path(os.environ[OUTCOMES]), nodeid, "begun")


def pytest_runtest_logreport(report: Any) -> None:
    """Of pytest's, three times a test: the call tells, the others only if they fail or skip."""
    if report.when == "call" or report.outcome != "passed":
        note(Path(os.environ[OUTCOMES]), report.nodeid, report.outcome, report.longreprtext[-1500:])
