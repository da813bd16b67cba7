"""Electrical energy of an NVIDIA GPU, as its driver measures it.

NVML comes with the driver: it is loaded where it is there, and needs no package. Cards from Volta on count the energy
that they have used; of others the power is read at each entry of the run's journal (every few seconds) and taken to
change in straight lines between. Either is about the whole card, whoever else computes on it, and about nothing else in
the machine. Where there is no NVML, or it does not tell (a slice of a card, MIG), nothing takes the place of a number.
"""

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
COUNTER, SAMPLES = "NVML energy counter", "NVML power, sampled"


class Gpu:
    """What NVML tells of one GPU; a number that it does not give is None."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def open(cls, uuid: str | None) -> "Gpu | None":
        """The GPU of this UUID (`GPU-...`, as NVML has it); None for None, or where it is not to be had."""
        if uuid is None:
            return None
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
        handle = ctypes.c_void_p()
        found = library.nvmlInit_v2() == 0
        found = found and library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0
        return cls(library, handle) if found else None

    def joules(self) -> float | None:
        """Energy used since the driver was loaded."""
        return self._thousandths("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())

    def watts(self) -> float | None:
        """Power now."""
        return self._thousandths("nvmlDeviceGetPowerUsage", ctypes.c_uint())

    def limit_watts(self) -> float | None:
        """The power that the driver keeps it to."""
        return self._thousandths("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint())

    def _thousandths(self, function: str, value: ctypes.c_ulonglong | ctypes.c_uint) -> float | None:
        ask = getattr(self._library, function, None)  # an old driver may lack it
        done = ask is not None and ask(self._handle, ctypes.byref(value)) == 0
        return value.value / 1000 if done else None


class Meter:
    """What a GPU has used since this was made."""

    def __init__(self, gpu: Gpu, now: Callable[[], float] = time.monotonic) -> None:
        self._gpu, self._now = gpu, now
        self._first, self._watts, self._at = gpu.joules(), gpu.watts(), now()
        self._sum = 0.0
        self._works = self._first is not None or self._watts is not None

    def reading(self) -> dict[str, Any]:
        """`joules` and `joules_from` for an entry of the journal; nothing once a reading has failed."""
        if self._works and self._first is not None:
            self._count(self._first)
        elif self._works:
            self._sample()
        source = SAMPLES if self._first is None else COUNTER
        return {"joules": round(self._sum, 1), "joules_from": source} if self._works else {}

    def _count(self, first: float) -> None:
        joules = self._gpu.joules()
        self._works = joules is not None and joules >= first  # below: the driver was loaded anew
        self._sum = (joules or 0.0) - first

    def _sample(self) -> None:
        before, at = self._watts, self._at
        self._watts, self._at = self._gpu.watts(), self._now()
        self._works = self._watts is not None
        self._sum += ((before or 0.0) + (self._watts or 0.0)) / 2 * (self._at - at)


def of_run(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record's `energy_kwh` and `energy_source`: of all processes, each from its first entry in the journal to its
    last.

    Null where one process does not know: a sum without it would pass for the whole.
    """
    last = {event["process"]: event for event in events}.values()
    if not last or any("joules" not in event for event in last):
        return {"energy_kwh": None, "energy_source": None}
    source = SAMPLES if any(event["joules_from"] == SAMPLES for event in last) else COUNTER
    return {"energy_kwh": sum(event["joules"] for event in last) / 3.6e6, "energy_source": source}
