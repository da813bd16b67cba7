"""The measurements for which there is half an hour of a GPU, in three commands of at most nine minutes, and one more.

    python benchmarks/gpu/run.py --stage 1 --bundle build/bundle --out measured      # then --stage 2 and --stage 3
    python benchmarks/gpu/run.py --stage 1 --bundle build/bundle --out measured --scale tiny --device cpu

    stage 1  is it right: tests that need a GPU (tests/gpu). How fast: the rate of matrix products, and our steps of
             three models at two lengths against what `cramming plan` says of them, kernel by kernel
    stage 2  against others: Hugging Face's compiled loops; 11 GiB of memory; each lever for speed with and without
    stage 3  a run of three minutes that is killed and resumed; fine-tuning against `Trainer`; every trick with its gate
    stage 4  experiment=best against the crammed BERT's recipe at 110M parameters, eight minutes each, and their scores;
             with --minutes 9.8, three times: it needs another half hour

This process only watches: a second one (stage.py) measures, all rows of a stage in turn. Each row is one line of
`stage<N>.jsonl` as soon as it ended; one that fails is its traceback, one that takes too long, or takes the process
with it, says so, and the rest goes on in a new process. No row is begun that cannot end before `--minutes`. The same
command goes on where a stage stopped: rows that are there are not measured again, failed ones only with `--again`.

What `--bundle` (bundle.py) brings is unpacked into `--work`, where compiled code is kept as well, for all stages. That
folder must survive between the calls: stage 3's fine-tuning and stage 4's scores are of models that earlier rows left
in it. Wheels of what is installed already, in a version that will do, stay packed.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu"
# Not in the bundle: module to import, what pip calls it, the first stage that needs it.
NEEDED = (
    ("torch", "torch", 1),
    ("transformers", "transformers", 1),
    ("scipy", "SciPy", 3),
    ("sklearn", "scikit-learn", 3),
)
POLL_SECONDS = 0.2
ANEW = 75  # how the measuring process ends when a failure has left the device unusable to it
LAST_SECONDS = 10  # kept free at the end of a stage: to end processes and write what is known


def rows_of(file: Path) -> dict[str, dict[str, Any]]:
    """The last line of each row. A row of which only its begin is there was under way when all ended."""
    rows = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # cut off by a kill
            continue
        if "row" in row:
            rows[row["row"]] = row
    return rows


def add_line(file: Path, line: dict[str, Any]) -> None:
    """What was cut off before stays a line of its own."""
    torn = file.exists() and file.stat().st_size and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as stream:
        stream.write("\n" * bool(torn) + json.dumps(line) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def unpack(bundle: Path, site: Path) -> None:
    """The wheels that this Python lacks. None of them needs more than to lie on its path."""
    from packaging.requirements import Requirement  # there with transformers

    site.mkdir(parents=True, exist_ok=True)
    content = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    for wheel, text in content["wheels"].items():
        requirement = Requirement(text)
        try:
            here = requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            here = False
        if not here and not (site / f"{wheel}.done").exists():
            with zipfile.ZipFile(bundle / "wheels" / wheel) as archive:
                archive.extractall(site)
            (site / f"{wheel}.done").touch()


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Of the measuring process and all that it starts."""
    site, code = args.work / "site", args.work / "compiled"
    if args.bundle:
        unpack(args.bundle, site)
    path = [str(ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "PYTHONPATH": os.pathsep.join(path),
        "TORCHINDUCTOR_CACHE_DIR": str(code),
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": str(code / "triton"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**os.environ, **own}


def end_with_parent() -> None:
    """Ask the system to kill this process when the one that started it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def under_way(file: Path) -> dict[str, Any] | None:
    """The row that was begun and has not ended."""
    return next((row for row in rows_of(file).values() if "begun" in row), None)


def ended_badly(process: "subprocess.Popen[bytes]", file: Path, deadline: float) -> Iterator[str]:
    """Watch the measuring process; say why it ended in the middle of a row, if it did."""
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        row, now = under_way(file), time.time()
        if row and now > row["begun"] + row["at_most"]:
            yield f"took longer than {row['at_most']:.0f} s"
            return
        if now > deadline - LAST_SECONDS / 2:
            yield "the stage's time was over"
            return
    if process.returncode not in (0, ANEW):
        yield f"the process ended with {'signal' if process.returncode < 0 else 'code'} {abs(process.returncode)}"


def measure(args: argparse.Namespace, file: Path, deadline: float) -> None:
    """Processes one after the other until all rows have ended or the time is over."""
    env = environment(args)
    anew = (
        ("begun", "error") if args.again else ("begun",)
    )  # begun: when an earlier call was ended from outside
    for name in [name for name, row in rows_of(file).items() if any(key in row for key in anew)]:
        add_line(file, {"row": name, "again": True})
    while time.time() < deadline - LAST_SECONDS:
        told = json.dumps(vars(args) | {"file": file, "deadline": deadline}, default=str)
        command = [sys.executable, Path(__file__).with_name("stage.py"), told]
        process = subprocess.Popen(command, env=env, process_group=0, preexec_fn=end_with_parent)
        reason = ""
        try:
            reason = next(ended_badly(process, file, deadline), "")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not reason and process.returncode != ANEW:
            return
        if not reason:
            continue
        row = under_way(file)
        if row is None:  # it could not even begin
            raise SystemExit(f"stage {args.stage}: {reason} before its next row")
        over = time.time() > deadline - LAST_SECONDS
        add_line(
            file,
            {
                "row": row["row"],
                "skipped" if over else "error": reason,
                "seconds": time.time() - row["begun"],
            },
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, choices=(1, 2, 3, 4), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--bundle",
        type=Path,
        help="the folder that bundle.py made; else all packages are installed",
    )
    parser.add_argument(
        "--work", type=Path, default=WORK, help="packages, compiled code, runs: keep it"
    )
    parser.add_argument("--scale", default="full", choices=("full", "tiny"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=9, help="after these everything has ended")
    parser.add_argument("--only", nargs="+", help="rows whose name contains one of these")
    parser.add_argument("--again", action="store_true", help="measure rows again that failed")
    args = parser.parse_args(arguments)
    deadline = time.time() + 60 * args.minutes
    for name in ("out", "work", "bundle"):
        setattr(args, name, getattr(args, name) and getattr(args, name).resolve())
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out}: is a file; name a folder")
    if args.bundle and not (args.bundle / "bundle.json").is_file():
        parser.error(f"--bundle {args.bundle}: has no bundle.json; bundle.py makes such a folder")
    lacking = [
        name
        for module, name, first in NEEDED
        if args.stage >= first and not importlib.util.find_spec(module)
    ]
    if lacking:
        parser.error(
            f"{sys.executable} has no {', '.join(lacking)}; install that first (the bundle does not bring it)"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"stage{args.stage}.jsonl"
    measure(args, file, deadline)
    rows = rows_of(file)
    for name, row in rows.items():
        state = (
            "measured" if "result" in row else row.get("error") or row.get("skipped") or "under way"
        )
        print(f"{name}: {str(state).strip().splitlines()[-1]}")
    return 0 if all("result" in row for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
