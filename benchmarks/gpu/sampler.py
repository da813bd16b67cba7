"""Clock, power and throttle reasons of the GPU, sampled by nvidia-smi into a file; queries only, nothing is set."""

import shutil
import statistics
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from processes import Process, start

FILE = "clocks.csv"
QUERY = "uuid,timestamp,clocks.sm,power.draw,clocks_event_reasons.active"
PERIOD_MS = 500


def start_sampler(work: Path) -> Process | None:
    """Append samples of all GPUs to a file in `work` until the process is ended; None without nvidia-smi."""
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
    unbuffered = shutil.which("stdbuf")
    if unbuffered:  # into a file the C library writes blocks of many samples
        command = [unbuffered, "-oL", *command]
    return start(command, work / FILE)


def medians(work: Path, uuid: str, began: float, ended: float) -> dict[str, float]:
    """Return the median clock in MHz and power in watts between two times of `time.time`; empty without samples.

    They are those of the GPU with this UUID, or of the only GPU: a slice of a card (MIG) has a UUID of its own.
    """
    gpus = _samples(work / FILE, began, ended)
    chosen = gpus.get(uuid, [])
    if len(gpus) == 1:
        [chosen] = gpus.values()
    if not chosen:
        return {}
    bits = 0
    for sample in chosen:
        bits |= sample.reasons
    return {
        "mhz": statistics.median(sample.mhz for sample in chosen),
        "watts": statistics.median(sample.watts for sample in chosen),
        "reasons": bits,
    }


class Sample(NamedTuple):
    """Clock, power and throttle reasons of a GPU at one time."""

    mhz: float
    watts: float
    reasons: int


def _samples(file: Path, began: float, ended: float) -> dict[str, list[Sample]]:
    """Return the samples between two times by the UUID of their GPU."""
    gpus: dict[str, list[Sample]] = {}
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        try:
            uuid, when, clock, power, reason = (part.strip() for part in line.split(","))
            seconds = datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            bits = int(reason, 16) if reason.startswith("0x") else 0
            sample = Sample(float(clock), float(power), bits)
        except ValueError:  # cut off, or a number that this driver does not tell
            continue
        if began <= seconds <= ended:
            gpus.setdefault(uuid, []).append(sample)
    return gpus
