"""Clock, power and throttle reasons of the GPU, sampled by nvidia-smi into a file; queries only, nothing is set."""

import shutil
import statistics
from datetime import datetime
from pathlib import Path

from processes import Process, start

FILE = "clocks.csv"
QUERY = "timestamp,clocks.sm,power.draw,clocks_event_reasons.active"
PERIOD_MS = 500


def start_sampler(work: Path) -> Process | None:
    """Append samples to a file in `work` until the process is ended; None without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [
        tool,
        f"--query-gpu={QUERY}",
        "--format=csv,noheader,nounits",
        "-lms",
        str(PERIOD_MS),
    ]
    return start(command, work / FILE)


def medians(work: Path, began: float, ended: float) -> dict[str, float]:
    """Return the median clock in MHz and power in watts between two times of `time.time`; empty without samples."""
    clocks, watts, reasons = [], [], set[str]()
    file = work / FILE
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            when, clock, power, reason = (part.strip() for part in line.split(","))
            if not began <= datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp() <= ended:
                continue
            clocks.append(float(clock))
            watts.append(float(power))
        except ValueError:  # cut off, or a number that this driver does not tell
            continue
        reasons.add(reason)
    if not clocks or not watts:
        return {}
    bits = 0
    for reason in reasons:
        bits |= int(reason, 16) if reason.startswith("0x") else 0
    return {"mhz": statistics.median(clocks), "watts": statistics.median(watts), "reasons": bits}
