"""The measurement of a card in one call of nine and a half minutes.

    python3 benchmarks/gpu/run.py --bundle build/bundle --work build/gpu --out measured --commit <hash>
    python3 benchmarks/gpu/run.py --bundle build/bundle --out measured --scale tiny --device cpu --seconds 90

This process only watches and prints: another one (measure.py) measures the rows (rows.py). Each phase of a row is a
line of `rows.jsonl` in `--work`, with a copy in `--out`. A row that fails, hangs or takes its process with it costs
itself and nothing else. The call ends by itself within `--seconds`; the same command continues with what is missing.
Rows that failed are measured again if `--only` names them.

What `--bundle` (bundle.py) brings is unpacked into `--work`; so is compiled code. Wheels of what is installed already,
in a version that will do, stay packed.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import threading
import time
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import sampler
from processes import ANEW, LAST_SECONDS, ROOT, Process, kill, start, tail
from record import Record, State, last_line

WORK = ROOT / "build" / "gpu"
NEEDED = ("torch", "transformers", "scipy", "sklearn")  # not in the bundle
POLL_SECONDS = 0.1
START_SECONDS = 100.0  # from one row to the next
STARTS_WITHOUT_A_ROW = 2
SUMMARY_LINES, SUMMARY_WIDTH = 60, 150
LOG_BYTES = 2**20  # of its end that is sent back
LOG = "measure.log"


def main(arguments: list[str] | None = None) -> int:
    """Measure until all rows have ended or the time is over; return 0 if all were measured."""
    began = time.time()
    args = parse(arguments)
    record = Record(args.work, args.out)
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    record.restore_copy()
    if args.device == "cuda":
        read_libraries(args.work / LOG)
    forget_rows_under_way(record, args.only)
    watcher = Watcher(args, record, began)
    samples = sampler.start_sampler(args.work)
    try:
        watcher.watch()
    finally:
        if samples:
            kill(samples)
        if (args.work / sampler.FILE).exists():
            shutil.copyfile(args.work / sampler.FILE, args.out / sampler.FILE)
        (args.out / LOG).write_text(tail(args.work / LOG, LOG_BYTES), encoding="utf-8")
    lines = summary(record.rows(), record.names())
    print(*lines, sep="\n", flush=True)
    return 0 if all("result" in record.rows().get(name, {}) for name in record.names()) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the arguments, with absolute paths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--bundle", type=Path, help="folder that bundle.py made")
    parser.add_argument("--work", type=Path, default=WORK, help="packages, compiled code: keep it")
    parser.add_argument("--seconds", type=float, default=560, help="after these all has ended")
    parser.add_argument("--commit", help="of this code, where git does not know it")
    parser.add_argument("--scale", default="full", choices=("full", "tiny"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", help="rows whose name contains one of these")
    parser.add_argument("--rows", default="rows", help="module of the rows")
    args = parser.parse_args(arguments)
    for name in ("out", "work", "bundle"):
        path = getattr(args, name)
        setattr(args, name, path and path.resolve())
    for name in ("out", "work"):
        path = getattr(args, name)
        if path.exists() and not path.is_dir():
            parser.error(f"--{name}={path}: it is a file. Name a folder.")
    if not args.seconds > 0:
        parser.error(f"--seconds={args.seconds:g}: no time for any row. Give more than 0.")
    if args.bundle and not (args.bundle / "bundle.json").is_file():
        parser.error(f"--bundle={args.bundle}: it has no bundle.json. Make one with bundle.py.")
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing:
        names = ", ".join(missing)
        parser.error(f"{sys.executable}: it has no {names}. Install that; no bundle brings it.")
    return args


def forget_rows_under_way(record: Record, only: list[str] | None) -> None:
    """Let rows be measured again that an earlier call was killed in, or that failed and are named now."""
    for name, state in record.rows().items():
        is_named = any(text in name for text in only or ())
        if "error" in state and is_named:
            record.add(row=name, begun=0.0)
    while under_way := record.row_under_way():
        record.add(row=under_way[0], skipped="under way when an earlier call ended")


class Watcher:
    """Measuring processes, one after the other, and what is printed of their rows."""

    def __init__(self, args: argparse.Namespace, record: Record, began: float) -> None:
        self.args, self.record, self.began = args, record, began
        self.deadline = began + args.seconds
        self.environment = environment(args)
        self.log = args.work / LOG
        self.printed = record.rows()

    def watch(self) -> None:
        """Start measuring processes until one has measured all, none can begin a row, or the time is over."""
        starts_without_row = 0
        while time.time() < self.deadline - LAST_SECONDS:
            begun = self._last_begin()
            process = self._start()
            reason = self._reason_to_end(process)
            kill(process)
            self._end_row(reason)
            self._print_news()
            if process.returncode == 0:
                return
            starts_without_row = starts_without_row + 1 if self._last_begin() == begun else 0
            if starts_without_row == STARTS_WITHOUT_A_ROW:
                print(f"no row could begin: {last_line(tail(self.log))}", flush=True)
                return

    def _start(self) -> Process:
        options = {**vars(self.args), "began": self.began, "deadline": self.deadline}
        script = Path(__file__).with_name("measure.py")
        command = [sys.executable, script, json.dumps(options, default=str)]
        return start(command, self.log, own_group=True, **self.environment)

    def _reason_to_end(self, process: Process) -> str:
        """Print the rows that end; return why the process must be killed or has died, or nothing."""
        quiet_since = time.time()
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            self._print_news()
            now = time.time()
            if now > self.deadline - LAST_SECONDS:
                return "the call's time was over"
            under_way = self.record.row_under_way()
            if under_way is None and now > quiet_since + START_SECONDS:
                return f"no row began within {START_SECONDS:.0f} s"
            if under_way is not None:
                quiet_since = now
                begun, at_most = under_way[1]["begun"], under_way[1]["at_most"]
                if now > begun + at_most:
                    return f"took longer than {at_most:.0f} s"
        if process.returncode in (0, ANEW):
            return ""
        kind = "signal" if process.returncode < 0 else "code"
        return f"the process ended with {kind} {abs(process.returncode)}"

    def _end_row(self, reason: str) -> None:
        """Write down how the row under way ended, if one was."""
        under_way = self.record.row_under_way()
        if under_way is None:
            return
        name, state = under_way
        ended = {"error": f"{tail(self.log)}\n{reason}"}
        if time.time() > self.deadline - LAST_SECONDS:
            ended = {"skipped": "the call's time was over"}
        self.record.add(row=name, seconds=round(time.time() - state["begun"], 1), **ended)

    def _last_begin(self) -> float:
        return max((state.get("begun", 0.0) for state in self.record.rows().values()), default=0.0)

    def _print_news(self) -> None:
        """Print the rows that were measured or failed since the last time."""
        for name, state in self.record.rows().items():
            if state == self.printed.get(name) or not state.keys() & {"result", "error"}:
                continue
            self.printed[name] = state
            line, *details = outcome(state).splitlines()
            seconds = time.time() - self.began
            print(f"[{seconds:.0f} s] {name}: {line}"[:SUMMARY_WIDTH], flush=True)
            for detail in details:
                print(f"    {detail}"[:SUMMARY_WIDTH], flush=True)


def outcome(state: State) -> str:
    """Return what a row has to say; the first line says most."""
    if "result" in state:
        return state.get("told") or "measured"
    partial = state.get("partial", {})
    measured = f" (measured: {partial.get('told') or ', '.join(partial)})" if partial else ""
    if "error" in state:
        return f"FAILED: {last_line(state['error'])}{measured}"
    return f"not measured: {state.get('skipped', 'not begun')}{measured}"


def summary(rows: dict[str, State], names: list[str]) -> list[str]:
    """Return a line of counts and a line a row."""
    states = {name: rows.get(name, {}) for name in [*names, *rows]}
    refused = sum("refused" in state.get("result", {}) for state in states.values())
    measured = sum("result" in state for state in states.values()) - refused
    failed = sum("error" in state for state in states.values())
    lines = [f"{measured} of {len(states)} rows measured, {refused} refused, {failed} failed"]
    for name, state in states.items():
        lines.append(f"{name}: {outcome(state).splitlines()[0]}"[:SUMMARY_WIDTH])
    return lines[:SUMMARY_LINES]


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Unpack the bundle; return the environment of all processes that measure."""
    site, code = args.work / "site", args.work / "compiled"
    if args.bundle:
        unpack(args.bundle, site)
        unpacking = threading.Thread(target=unpack_predecessor, args=(args.bundle, args.work))
        unpacking.start()
    path = [str(ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = {"OMP_NUM_THREADS": "1"} if args.device == "cpu" else {}
    return threads | {
        "PYTHONPATH": os.pathsep.join(path),
        "TORCHINDUCTOR_CACHE_DIR": str(code),
        "TRITON_CACHE_DIR": str(code / "triton"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def unpack(bundle: Path, site: Path) -> None:
    """Unpack the wheels that this Python lacks; none of them needs more than to lie on its path."""
    from packaging.requirements import Requirement  # there with transformers

    content = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    for wheel, text in content["wheels"].items():
        requirement = Requirement(text)
        try:
            is_here = requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            is_here = False
        if not is_here:
            extract(bundle / "wheels" / wheel, site)


def unpack_predecessor(bundle: Path, work: Path) -> None:
    """Unpack the packages that only the predecessor has; they stay apart from all others."""
    for wheel in sorted((bundle / "predecessor_wheels").glob("*.whl")):
        extract(wheel, work / "predecessor_site")


def extract(wheel: Path, site: Path) -> None:
    """Unpack a wheel once."""
    site.mkdir(parents=True, exist_ok=True)
    done = site / f"{wheel.name}.done"
    if done.exists():
        return
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done.touch()


def read_libraries(log: Path) -> None:
    """Read torch's and NVIDIA's libraries, eight at a time: the first import then waits for no disk."""
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    folders = [Path(spec.origin).parents[1] / name for name in ("torch/lib", "nvidia")]
    find = f"find {folders[0]} {folders[1]} -name '*.so*'"
    start(["sh", "-c", f"{find} | xargs -P 8 -n 1 cat > /dev/null"], log)


if __name__ == "__main__":
    sys.exit(main())
