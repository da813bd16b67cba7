"""The tests that need a GPU, in processes beside each other; a plugin of pytest notes how each test ended.

A test that takes its process, or the device, with it has failed, and the ones behind it run in a new process. What has
ended does not run again in a later call.
"""

import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from processes import ANEW, ROOT, Jobs, Process, start, tail
from record import append, last_line, rows_of

TESTS = ROOT / "tests" / "gpu"
SHARD = "CRAMMING_GPU_TESTS_SHARD"  # its file of outcomes, its number, and the number of all
DEVICE = "CRAMMING_GPU_TESTS"  # cpu: run there what can
MEMORY = "CRAMMING_GPU_TESTS_GB"
MEMORY_GB = "2"
STARTS = 4  # of one shard
# Tests by cost, the costliest first: they are dealt out to the shards in this order.
COSTS = ("resumed", "try_or", "compiled_step", "compiled_blocks", "fewer_bits", "less_memory")


class Shards(Jobs):
    """Jobs that each run a part of the tests; one that a test has ended starts anew."""

    def __init__(self, work: Path, device: str, chosen: str, count: int) -> None:
        self.work, self.command = work, [sys.executable, "-m", "pytest", "-p", "shards"]
        self.command += ["-m", "gpu", str(TESTS), "-k", chosen]
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {DEVICE: device, MEMORY: MEMORY_GB, "PYTHONPATH": os.pathsep.join(paths)}
        self.files = {f"{n} {count}": work / f"tests.{n}.jsonl" for n in range(count)}
        self.starts = Counter[str]()
        super().__init__({name: partial(self._start, name) for name in self.files}, count)

    def poll(self) -> bool:
        """Note the test that has ended a shard's process, and let the shard wait for a new one."""
        for name, (process, _) in self.running.items():
            if process.poll() is None:
                continue
            broken = [k for k, v in rows_of(self.files[name]).items() if v["outcome"] == "begun"]
            for test in broken:
                text = f"the process ended with code {process.returncode}"
                note(self.files[name], test, "failed", text)
            if (broken or process.returncode == ANEW) and self.starts[name] < STARTS:
                self.waiting[name] = partial(self._start, name)
        return super().poll()

    def summary(self) -> dict[str, Any]:
        """Return how many tests ended how, and what those said that failed."""
        rows = outcomes_in(self.work)
        if not rows:
            raise RuntimeError(f"no test ran: {tail(self.work / 'tests.0.log')}")
        failed = {name: row["text"] for name, row in rows.items() if row["outcome"] == "failed"}
        return {"tests": dict(Counter(row["outcome"] for row in rows.values())), "failed": failed}

    def _start(self, name: str) -> Process:
        self.starts[name] += 1
        shard = {SHARD: f"{self.files[name]} {name}"}
        return start(
            self.command, self.files[name].with_suffix(".log"), **self.environment, **shard
        )


def tell_tests(result: dict[str, Any]) -> str:
    """Return the counts, and each failure in a line of its own."""
    counts = dict(result["tests"])
    counts["cut off"] = counts.pop("begun", 0)
    line = f"{counts.pop('passed', 0)} of {sum(result['tests'].values())} tests passed"
    for name, count in counts.items():
        line += f", {count} {name}" if count else ""
    failed = [f"{k.split('/')[-1]}: {last_line(text)}" for k, text in result["failed"].items()]
    return "\n".join([line, *failed])


def outcomes_in(work: Path) -> dict[str, dict[str, Any]]:
    """Return all tests that have begun, by name."""
    rows = {}
    for file in sorted(work.glob("tests.*.jsonl")):
        rows |= rows_of(file)
    return rows


def note(file: Path, name: str, outcome: str, text: str = "") -> None:
    """Write down `begun`, `passed`, `skipped` or `failed`, with the end of what the test said."""
    append(file, {"row": name, "outcome": outcome, "text": text})


def cost(item: Any) -> int:
    """Return the place of a test among the costliest."""
    places = [place for place, text in enumerate(COSTS) if text in item.nodeid]
    return places[0] if places else len(COSTS)


def shard_of_this_process() -> tuple[Path, int, int]:
    """Return the file of outcomes, the number of the shard, and the number of all."""
    file, number, count = os.environ[SHARD].rsplit(" ", 2)
    return Path(file), int(number), int(count)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep this shard's tests that have not ended (a hook of pytest)."""
    file, number, count = shard_of_this_process()
    ended = [name for name, row in outcomes_in(file.parent).items() if row["outcome"] != "begun"]
    dealt = sorted(items, key=cost)[number::count]
    items[:] = [item for item in dealt if item.nodeid not in ended]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test begins (a hook of pytest)."""
    note(shard_of_this_process()[0], nodeid, "begun")


def pytest_runtest_logreport(report: Any) -> None:
    """Note how setup, call and teardown of a test ended (a hook of pytest)."""
    file = shard_of_this_process()[0]
    is_begun = rows_of(file)[report.nodeid]["outcome"] == "begun"
    if report.outcome != "passed":
        lines = report.longreprtext.splitlines()
        reasons = [line for line in lines if line.startswith("E ")] or lines
        note(file, report.nodeid, report.outcome, "\n".join([*lines[-20:], *reasons[-1:]]))
    elif report.when == "teardown" and is_begun:
        note(file, report.nodeid, "passed")
    if report.failed and not device_answers():
        os._exit(ANEW)


def device_answers() -> bool:
    """Return whether the device still computes; tests/conftest.py sets threads before torch is imported."""
    import torch
    from lab import answers

    return answers(torch.device(os.environ[DEVICE]))
