"""Settings of the process: tried in a process of their own, since they cannot be taken back."""

import os
import platform
import subprocess
import sys

import pytest

from cramming.config import UserError, build
from cramming.runtime import RuntimeConfig

FAULTS = """
import resource, sys, threading
from cramming.runtime import keep_freed_memory
if sys.argv[1] == "keep": assert keep_freed_memory()
def work():
    for _ in range(20): bytearray(48 * 2**20)
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
before = faults()
work()
other = threading.Thread(target=work); other.start(); other.join()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc's malloc")
def test_freed_memory_is_used_again() -> None:
    """20 blocks of 48 MB: without the option each is mapped anew, 12,288 pages a block."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    faults = {}
    for mode in ("keep", "default"):
        command = [sys.executable, "-c", FAULTS, mode]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    assert faults["keep"] < 15_000 < 200_000 < faults["default"]


def test_bad_values_are_refused() -> None:
    with pytest.raises(UserError, match="prefetch=0 is below 1"):
        build(RuntimeConfig, {"compile": "off", "keep_heap": True, "prefetch": 0}, "runtime")
