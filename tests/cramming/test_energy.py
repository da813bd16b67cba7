"""What a run's GPU has used: read from a library that stands in for NVML, summed over processes, or missing."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming import device, energy
from cramming.budget import BudgetClock, BudgetConfig
from cramming.energy import COUNTER, SAMPLES, Gpu, Meter, of_run
from cramming.journal import read_journal
from cramming.plan.search import power_of
from cramming.record import load_record

UUID = "GPU-11111111-2222-3333-4444-555555555555"
# The functions that are asked, with NVML's signatures; 3 is its "not supported", 6 its "not found".
SOURCE = """
#include <string.h>
typedef void *device;
static int card;
static long long millijoules, milliwatts, limit;
void stand_in(long long mj, long long mw, long long l) { millijoules = mj; milliwatts = mw; limit = l; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, device *found) {
    *found = &card;
    return strcmp(uuid, "%s") ? 6 : 0;
}
static int known(device d, long long value) { return d == &card && value >= 0 ? 0 : 3; }
int nvmlDeviceGetTotalEnergyConsumption(device d, unsigned long long *mj) { *mj = millijoules; return known(d, *mj); }
int nvmlDeviceGetPowerUsage(device d, unsigned int *mw) { *mw = milliwatts; return known(d, milliwatts); }
int nvmlDeviceGetEnforcedPowerLimit(device d, unsigned int *mw) { *mw = limit; return known(d, limit); }
"""
Set = Callable[..., None]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile the stand-in with")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(SOURCE % UUID)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "nvml.so", folder / "nvml.c"], check=True)
    return folder / "nvml.so"


@pytest.fixture
def nvml(library: Path, monkeypatch: pytest.MonkeyPatch) -> Set:
    """`nvml(joules=, watts=, limit=)`: what the stand-in says from now on; None is not supported."""
    monkeypatch.setattr(energy, "LIBRARY", str(library))

    def put(joules: float | None = None, watts: float | None = None, limit: float | None = None) -> None:
        values = (-1 if value is None else round(1000 * value) for value in (joules, watts, limit))
        ctypes.CDLL(str(library)).stand_in(*map(ctypes.c_longlong, values))

    put()
    return put


def meter(now: Callable[[], float] = lambda: 0.0) -> Meter:
    gpu = Gpu.open(UUID)
    assert gpu
    return Meter(gpu, now)


def test_the_counters_difference_is_what_was_used(nvml: Set) -> None:
    nvml(joules=5e9)  # more than 32 bits of millijoules
    one = meter()
    nvml(joules=5e9 + 1234.5)
    assert one.reading() == {"joules": 1234.5, "joules_from": COUNTER}


def test_power_is_summed_up_in_straight_lines_where_nothing_counts(nvml: Set) -> None:
    seconds = iter([10.0, 14.0, 15.0])
    nvml(watts=100)
    one = meter(lambda: next(seconds))
    nvml(watts=300)
    assert one.reading() == {"joules": 4 * 200.0, "joules_from": SAMPLES}
    nvml(watts=100)
    assert one.reading() == {"joules": 4 * 200.0 + 200.0, "joules_from": SAMPLES}


def test_a_failed_reading_is_never_made_up_for(nvml: Set) -> None:
    nvml(joules=7)
    failed, reloaded = meter(), meter()
    nvml()
    assert failed.reading() == {}
    nvml(joules=6)  # counts from zero again
    assert reloaded.reading() == {}
    nvml(joules=9)
    assert failed.reading() == reloaded.reading() == {}


def test_the_power_limit(nvml: Set) -> None:
    nvml(limit=320)
    gpu = Gpu.open(UUID)
    assert gpu and gpu.limit_watts() == 320.0 and gpu.joules() is None and gpu.watts() is None
    assert power_of(UUID, "NVIDIA GeForce RTX 3090") == (320.0, "its power limit by NVML")
    nvml()
    assert power_of(UUID, "NVIDIA GeForce RTX 3090") == (350.0, "board power by the data sheet")
    assert power_of(UUID, "a card that nobody knows")[0] is None


def test_without_nvml_or_without_this_gpu_there_is_none(nvml: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Gpu.open(None) is None
    assert Gpu.open(UUID.replace("1", "9")) is None
    monkeypatch.setattr(energy, "LIBRARY", "libnvidia-ml-that-is-not-there.so.1")
    assert Gpu.open(UUID) is None


def test_killed_and_resumed_processes_are_summed_up(nvml: Set, tmp_path: Path) -> None:
    config, journal = BudgetConfig(1.0, None, None, None, heartbeat_seconds=5.0), tmp_path / "budget.jsonl"
    nvml(joules=1000)
    killed = BudgetClock(config, journal, meter())
    nvml(joules=1000 + 3.6e6)
    killed.enter_checkpoint("ab")
    nvml(joules=9e9)  # by others, until the next process begins; the killed one wrote nothing more
    resumed = BudgetClock(config, journal, meter())
    nvml(joules=9e9 + 1.8e6)
    resumed.close("stopped")
    assert of_run(read_journal(journal)) == {"energy_kwh": 1.5, "energy_source": COUNTER}
    blind = BudgetClock(config, journal)
    blind.close("finished")
    assert blind.energy() == {"energy_kwh": None, "energy_source": None}


def test_a_run_has_its_energy_on_record(nvml: Set, start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(watts=360)
    monkeypatch.setattr(device, "nvml_uuid", lambda device: UUID)
    folder = start("name=measured")
    found: dict[str, Any] = load_record(folder)["pretrain"]
    spent = read_journal(folder / "budget.jsonl")[-1]["elapsed"]
    assert found["energy_source"] == SAMPLES
    assert 0 < found["energy_kwh"] <= 0.36 * spent / 3600
