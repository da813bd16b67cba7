"""The measurement of a card in one call of nine and a half minutes.

    python3 benchmarks/gpu/run.py --bundle build/bundle --work build/gpu --out measured --commit <hash>
    python3 benchmarks/gpu/run.py --bundle build/bundle --work build/tried --out tried --scale tiny --device cpu

This process only watches and prints: another one (measure.py) measures the rows (rows.py). Each phase of a row is a
line of `rows.jsonl` in `--work`, below a head on scale, card and code; `--out` gets a copy. A row that fails, hangs or
takes its process with it costs itself and nothing else. The call ends by itself within `--seconds`; the same command
continues with what is missing. Rows that failed are measured again if `--only` names them.

What `--bundle` (bundle.py) brings is unpacked into `--work`; so is compiled code. Wheels of what is installed already,
in a version that will do, stay packed.
"""

import argparse
import fcntl
import importlib.util
import json
import os
import sys
import threading
import time
import zipfile
import zlib
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

import sampler
from processes import ANEW, LAST_SECONDS, ROOT, Process, kill, start, tail
from record import FILE, Record, State, bytes_of, kind_of, last_line

WORK = ROOT / "build" / "gpu"
NEEDED = ("torch", "transformers", "scipy", "sklearn")  # not in the bundle
POLL_SECONDS = 0.1
START_SECONDS = 100.0  # from one row to the next
STARTS_WITHOUT_A_ROW = 2
SUMMARY_LINES, SUMMARY_WIDTH = 60, 150
LOG_BYTES = 2**20  # of its end that is sent back
LOG = "measure.log"


def main(arguments: list[str] | None = None) -> int:
    """Measure until all rows have ended or the time is over; return 0 if all were measured and none is wrong."""
    began = time.monotonic()
    args = parse(arguments)
    record = Record(args.work)
    lock = lock_folder(args.work)
    if problem := copy_results(args.work, args.out):
        raise SystemExit(problem)
    if args.device == "cuda":
        read_libraries(args.work / LOG)
    forget_rows(record, args.only or [])
    samples = sampler.start_sampler(args.work)
    is_complete = False
    try:
        is_complete = Watcher(args, record, began).watch()
    except KeyboardInterrupt:
        say("interrupted")
    if samples:
        kill(samples)
    forget_rows(record, [])
    if problem := copy_results(args.work, args.out):
        say(problem)
    say(*summary(record.rows(), record.names()))
    lock.close()
    return 0 if is_complete else 1


def lock_folder(work: Path) -> TextIO:
    """Return a file whose lock keeps other calls out until it is closed, or its process has ended."""
    file = (work / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"--work={work}: another call measures here. Wait for it.") from None
    return file


def copy_results(work: Path, out: Path) -> str:
    """Append to the copy of the rows what it lacks, and copy samples and log; return why that failed, or nothing."""
    try:
        rows, copied = (bytes_of(folder / FILE) for folder in (work, out))
        if not rows.startswith(copied):
            return f"--out={out}: its rows are not those of --work={work}. Name another folder."
        with (out / FILE).open("ab") as stream:
            stream.write(rows[len(copied) :])
        for name in (sampler.FILE, LOG):
            (out / name).write_bytes(bytes_of(work / name)[-LOG_BYTES:])
    except OSError as error:
        return f"--out={out}: {error.strerror}. All results are in --work={work}."
    return ""


def say(*lines: str) -> None:
    """Print lines at once. Where nothing can be printed any more, the call goes on in silence."""
    try:
        print("\n".join(lines).encode(errors="replace").decode(), flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    if not args.seconds > LAST_SECONDS:
        least = f"{LAST_SECONDS:g}"
        parser.error(f"--seconds={args.seconds:g}: no time for any row. Give more than {least}.")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if args.bundle and (python := python_of(args.bundle)) != here:
        problem = f"its bundle.json is for Python {python}, this is {here}"
        parser.error(f"--bundle={args.bundle}: {problem}. Make one with bundle.py --python {here}.")
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing:
        names = ", ".join(missing)
        parser.error(f"{sys.executable}: it has no {names}. Install that; no bundle brings it.")
    for name in ("work", "out"):
        path = getattr(args, name)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--{name}={path}: {error.strerror}. Name another folder.")
    return args


def python_of(bundle: Path) -> str:
    """Return the version of Python for which a bundle was made."""
    try:
        return str(json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))["python"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


def forget_rows(record: Record, only: list[str]) -> None:
    """Let rows be measured again in which a call has ended, or in which something failed and that are named now."""
    for name, state in record.rows().items():
        if kind_of(state) == "failed" and any(text in name for text in only):
            record.add(row=name, begun=0.0)
    while under_way := record.row_under_way():
        record.add(row=under_way[0], skipped="under way when a call ended")


class Watcher:
    """Measuring processes, one after the other, and what is printed of their rows."""

    def __init__(self, args: argparse.Namespace, record: Record, began: float) -> None:
        self.args, self.record, self.began = args, record, began
        self.deadline = began + args.seconds
        self.last = self.deadline - LAST_SECONDS
        self.environment = environment(args)
        self.log = args.work / LOG
        self.rows = record.rows()

    def watch(self) -> bool:
        """Start measuring processes; return whether all rows were measured and nothing failed."""
        starts_without_row = 0
        while starts_without_row < STARTS_WITHOUT_A_ROW and time.monotonic() < self.last:
            before = self.record.rows()
            process = self._start()
            try:
                reason = self._reason_to_end(process)
            finally:
                kill(process)
            self._end_row(reason)
            self._print_news()
            if process.returncode == 0:
                rows = self.record.rows()
                return {"failed", "missing"}.isdisjoint(
                    kind_of(rows[n]) for n in self.record.names()
                )
            starts_without_row = starts_without_row + 1 if self.record.rows() == before else 0
        if starts_without_row:
            problem = last_line(tail(self.log)) if process.returncode > 0 else reason
            say(f"no row could begin: {problem}")
        return False

    def _start(self) -> Process:
        options = {**vars(self.args), "began": self.began, "deadline": self.deadline}
        script = Path(__file__).with_name("measure.py")
        command = [sys.executable, script, json.dumps(options, default=str)]
        return start(command, self.log, own_group=True, **self.environment)

    def _reason_to_end(self, process: Process) -> str:
        """Print the rows that end; return why the process must be killed or has died, or nothing."""
        quiet_since = time.monotonic()
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            self._print_news()
            now = time.monotonic()
            if now > self.last:
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
        if time.monotonic() > self.last:
            ended = {"skipped": "the call's time was over"}
        self.record.add(row=name, seconds=round(time.monotonic() - state["begun"], 1), **ended)

    def _print_news(self) -> None:
        """Copy what is new, and print the rows that were measured or failed since the last time."""
        before, self.rows = self.rows, self.record.rows()
        if self.rows != before:
            copy_results(self.args.work, self.args.out)  # the end of the call says if it failed
        for name, state in self.rows.items():
            if state == before.get(name) or not state.keys() & {"result", "error"}:
                continue
            line, *details = outcome(state).splitlines()
            say(f"[{time.monotonic() - self.began:.0f} s] {name}: {line}"[:SUMMARY_WIDTH])
            for detail in details:
                say(f"    {detail}"[:SUMMARY_WIDTH])


def outcome(state: State) -> str:
    """Return what a row has to say; the first line says most."""
    if "result" in state:
        mark = "FAILED: " if kind_of(state) == "failed" else ""
        return mark + (state.get("told") or "measured")
    partial = state.get("partial", {})
    measured = f" (measured: {partial.get('told') or ', '.join(partial)})" if partial else ""
    if "error" in state:
        return f"FAILED: {last_line(state['error'])}{measured}"
    return f"not measured: {state.get('skipped', 'not begun')}{measured}"


def summary(rows: dict[str, State], names: list[str]) -> list[str]:
    """Return a line of counts and a line a row."""
    states = {name: rows.get(name, {}) for name in [*names, *rows]}
    kinds = Counter(kind_of(state) for state in states.values())
    line = f"{kinds['measured']} of {len(states)} rows measured"
    lines = [f"{line}, {kinds['refused']} refused, {kinds['failed']} failed"]
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
    """Unpack a wheel once. Without a damaged one some rows may do: they say what they lack."""
    done = site / f"{wheel.name}.done"
    if done.exists():
        return
    try:
        site.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        done.touch()
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        say(f"--bundle={wheel}: not unpacked, {error}. Make the bundle again.")


def read_libraries(log: Path) -> None:
    """Read torch's and NVIDIA's libraries, eight at a time: the first import then waits for no disk."""
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    folders = [Path(spec.origin).parents[1] / name for name in ("torch/lib", "nvidia")]
    find = f"find {folders[0]} {folders[1]} -name '*.so*'"
    start(["sh", "-c", f"{find} | xargs -P 8 -n 1 cat > /dev/null"], log)


if __name__ == "__main__":
    sys.exit(main())
