"""How long `cramming report` takes over many runs, how large its page is, and how fast the page is usable in Chromium.

    python benchmarks/report_page.py --run runs/default --runs 500 --chromium /usr/bin/chromium

The runs are copies of one run folder without its checkpoints, under other names, losses, devices, dates, weights and
recipes. The page's times need `pip install 'cramming[browser]'`: until the tables sort and filter, until the
comparison stands too, and of one sort and one filter over all rows. On a machine that is
shared the CPU time of the page's main thread is what compares. Prints one line of JSON.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from cramming.record import RECORD
from cramming.runlog import RUN_EVENTS, RUN_LOG, EventLog, read_log
from eval.report.main import main as report

DEVICES = ("H200", "RTX A6000", "RTX 2080 Ti", "EPYC 9354")
LARGE = shutil.ignore_patterns("checkpoints", "report", "*.safetensors", RUN_LOG, RECORD)
PAINTED = "return new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
SORT = "() => { document.querySelector('table.runs thead th.n button').click(); " + PAINTED + " }"
FILTER = (
    "() => { const name = document.querySelector('.filters [name=name]'); name.value = '7';"
    " name.dispatchEvent(new Event('input', {bubbles: true})); " + PAINTED + " }"
)


def copies(run: Path, folder: Path, count: int) -> None:
    """Write so many runs into the folder, with whole logs and chains."""
    entries = read_log(run / RUN_LOG)
    for place in range(count):
        copy = folder / f"run{place:03d}"
        shutil.copytree(run, copy, ignore=LARGE)
        noise = random.Random(place)  # or the curves would pack into the space of one
        with closing(EventLog(copy / RUN_LOG, durable=False)) as log:
            for entry in entries:
                changed = _changed(entry.event.model_dump(), place, noise)
                log.append(RUN_EVENTS.validate_python(changed), sync_now=False)


def _changed(event: dict[str, Any], place: int, noise: random.Random) -> dict[str, Any]:
    """Return an event of the run as that of another recipe, device, day, model and score."""
    later = timedelta(days=place)
    weights = f"{place:064x}"
    if "wall" in event:
        event["wall"] += later.total_seconds()
    if "time" in event:
        event["time"] = (datetime.fromisoformat(event["time"]) + later).isoformat()
    kind = event["event"]
    if kind == "start" and event["recipe"]:
        event["name"] = f"recipe {place}"
        event["recipe"]["optim"]["weight_decay"] = place * 1e-6
    elif kind == "setup":
        event["environment"]["device"]["name"] = DEVICES[place % len(DEVICES)]
    elif kind == "steps":
        event["each_loss"] = [loss * noise.gauss(1, 0.02) for loss in event["each_loss"]]
        event["loss"] = sum(event["each_loss"]) / len(event["each_loss"])
    elif kind == "exported":
        event["files"]["model.safetensors"] = weights
    elif kind == "scoring" and event["model_files"]:
        event["model_files"]["model.safetensors"] = weights
        event["model_sha256"] = weights if event["init"] == "pretrained" else None
    return event


def seconds(action: Callable[[], Any]) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    action()
    return round(time.perf_counter() - start, 3)


def one_load(browser: Any, page_file: Path) -> dict[str, float]:
    """Seconds of each step on a fresh page: of the wall, and of the main thread's CPU since the load began."""
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    page.set_default_timeout(300_000)  # a machine can be that busy
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def cpu() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(
            next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")
        )

    timings, start = {}, time.perf_counter()
    page.goto(page_file.as_uri(), wait_until="commit")
    for step, state in (
        ("usable", ""),
        ("complete", "[data-ready=complete]"),
    ):
        page.wait_for_selector(f"html[data-ready]{state}", state="attached")
        page.evaluate(f"() => {{ {PAINTED} }}")
        timings[step], timings[f"{step}_cpu"] = (
            round(time.perf_counter() - start, 3),
            round(cpu(), 3),
        )
    for step, script in (("sort", SORT), ("filter", FILTER)):
        before = cpu()
        timings[step] = seconds(partial(page.evaluate, script))
        timings[f"{step}_cpu"] = round(cpu() - before, 3)
    page.close()
    return timings


def in_chromium(
    pages: Sequence[Path], chromium: str, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return the timings of `one_load` for each page, round after round, with the pages interleaved."""
    from playwright.sync_api import sync_playwright

    loads: dict[str, list[dict[str, float]]] = {str(page): [] for page in pages}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(rounds):
            for page in pages:
                loads[str(page)].append(one_load(browser, page))
        browser.close()
    return {
        page: {step: [load[step] for load in timings] for step in timings[0]}
        for page, timings in loads.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="a run folder")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--chromium", help="path of the browser; without it the page is not opened")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--beside", type=Path, nargs="*", default=[], help="other pages, loaded in between"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "runs"
        copies(asked.run, folder, asked.runs)
        write = partial(
            report,
            runs=folder,
            out=None,
            each_run=True,
            duels=folder / "duels",
            repository=None,
        )
        cpu = time.process_time()
        measured: dict[str, Any] = {
            "runs": asked.runs,
            "report_seconds": seconds(write),
        }
        measured["report_cpu_seconds"] = round(time.process_time() - cpu, 2)
        page_file = folder / "report" / "leaderboard.html"
        measured["page_megabytes"] = round(page_file.stat().st_size / 1e6, 2)
        if asked.chromium:
            measured["page_seconds"] = in_chromium(
                [page_file, *asked.beside], asked.chromium, asked.rounds
            )
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
