"""Verbs as child processes: they hear of signals, do not outlive us, and take none from us that was ours."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def parent_of(code: str) -> subprocess.Popen[str]:
    """A process that runs `code` in a child, as `cramming run` runs a verb; the child has already said `on`."""
    parent = f"""
import signal, sys
from cramming.children import run_process
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore it
sys.exit(run_process([sys.executable, "-c", {code!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "on\n"
    return process


def test_a_child_gets_our_sigterm() -> None:
    """A job scheduler ends `cramming run` with SIGTERM; the running verb must receive it."""
    code = (
        "import os, signal, time; signal.signal(15, lambda *_: (os.write(1, b'told'), os._exit(7)));"
        " print('on', flush=True); time.sleep(30)"
    )
    with parent_of(code) as process:
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
        assert process.stdout and process.stdout.read() == "told"


@pytest.mark.parametrize("ended", [0, 2, 143])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_ours_however_the_child_ends(sent: signal.Signals, ended: int) -> None:
    """Ctrl-C may come while a verb finishes without error: the next verb must not start."""
    child = "import os, signal, time; [signal.signal(s, lambda *_: None) for s in (2, 15)]; print('on', flush=True)"
    with parent_of(f"{child}; time.sleep(0.5); os._exit({ended})") as process:
        time.sleep(0.1)
        process.send_signal(sent)
        assert process.wait(10) == -sent


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must tell the child")
def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """`kill -9` of `cramming run`: the verb that runs ends in its own orderly way."""
    code = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(15, lambda *_: (pathlib.Path({str(tmp_path / 'ended')!r}).touch(), sys.exit()))\n"
        "print('on', flush=True); time.sleep(30)"
    )
    with parent_of(code) as process:
        process.kill()
        process.wait(10)
        assert (
            process.stdout and process.stdout.read() == ""
        )  # the pipe's other end is closed when the child has ended
    assert (tmp_path / "ended").exists()
