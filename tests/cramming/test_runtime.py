"""Settings of the process: tried in a process of their own, since they cannot be taken back."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cramming import parts, runtime
from cramming.config import UserError, build
from cramming.record import load_record, write_record_section
from cramming.runtime import CACHE_VARIABLES, RuntimeConfig

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


@pytest.mark.parametrize("how", ["'off'", "blocks"])
def test_compiled_code_is_the_runs_own_whatever_compiles(
    start: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """FlexAttention and torchao's optimizers compile without `runtime.compile`; another run's code is told."""
    for variable in CACHE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    run = start("name=a", "budget.steps=1", f"runtime.compile={how}")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(run / "compile_cache")
    assert load_record(run)["pretrain"]["compile_cache"] == "own"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "warm"))
    run = start("name=b", "budget.steps=1", f"runtime.compile={how}")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "warm")
    assert load_record(run)["pretrain"]["compile_cache"] == "given"


@pytest.mark.parametrize("variable", CACHE_VARIABLES)
def test_a_resume_does_not_take_back_that_compiled_code_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    write_record_section(tmp_path, pretrain={})
    assert parts.compile_cache(tmp_path) == "own"
    with monkeypatch.context() as patch:
        patch.setenv(variable, str(tmp_path))
        found = parts.compile_cache(tmp_path)
    write_record_section(tmp_path, pretrain={"compile_cache": found})
    assert (found, parts.compile_cache(tmp_path)) == ("given", "given")


def test_bad_values_are_refused() -> None:
    with pytest.raises(UserError, match="prefetch=0 is below 1"):
        build(RuntimeConfig, {"compile": "off", "keep_heap": True, "side_by_side": True, "prefetch": 0}, "runtime")


def test_more_variants_than_the_compiler_may_make_end_the_run_in_one_line(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in code that runs uncompiled without a word. Of the two layers each is a variant."""
    from torch._dynamo import config

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled(module, backend="eager"))
    with config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        start("name=a", "budget.steps=1", "runtime.compile=blocks")
        assert config.recompile_limit >= 32
        monkeypatch.setattr(runtime, "MAX_VARIANTS", 1)
        torch.compiler.reset()
        with pytest.raises(UserError, match=r"runtime\.compile=blocks: more than .* variants"):
            start("name=b", "budget.steps=1", "runtime.compile=blocks")
    torch.compiler.reset()
