"""Settings of the process: tried in a process of their own, since they cannot be taken back."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import CACHE_VARIABLES, runtime, train_state
from cramming.checks import Config, Place, check
from cramming.config import UserError, build
from cramming.journal import Journal
from cramming.record import load_record, write_record_section
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


CACHES = """
import os, sys
from pathlib import Path
from cramming import runtime
import torch._dynamo, torch._inductor.runtime.triton_heuristics
found = runtime.compile_cache(Path(sys.argv[1]), has_trained=False)
runtime.prepare(runtime.RuntimeConfig("off", False, 1), torch.device("cpu"), Path(sys.argv[1]))
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
print(cache_dir(), triton_cache_dir(0), found)
"""


@pytest.mark.parametrize("given", [(), CACHE_VARIABLES[:1], CACHE_VARIABLES[1:]])
def test_compiled_code_is_the_runs_own_unless_the_user_says_otherwise(tmp_path: Path, given: tuple[str, ...]) -> None:
    """In a fresh process: importing torch's compiler sets the first variable, to a place that all runs share."""
    environment = {name: value for name, value in os.environ.items() if name not in CACHE_VARIABLES}
    environment |= {variable: str(tmp_path / variable) for variable in given}
    run = tmp_path / "run"
    command = [sys.executable, "-c", CACHES, str(run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    own = dict(zip(CACHE_VARIABLES, (run / "compile_cache", run / "compile_cache" / "triton")))
    expected = [str(tmp_path / name if name in given else own[name]) for name in CACHE_VARIABLES]
    assert done.stdout.split()[-3:] == [*expected, "given" if given else "own"]


CHILD = """
import os, sys
import cramming.children
import torch._dynamo
assert "TORCHINDUCTOR_CACHE_DIR" in os.environ, "torch no longer sets it: this test shows nothing"
cramming.children.run_process([sys.executable, "-c", "import cramming; print(cramming.GIVEN_CACHES)"])
"""


def test_a_child_does_not_take_what_torch_has_set_for_the_users() -> None:
    """`--multirun` and `run` check the settings in the parent, with torch."""
    environment = {name: value for name, value in os.environ.items() if name not in CACHE_VARIABLES}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["{}"]


@pytest.mark.parametrize("how", ["'off'", "blocks"])
def test_the_record_says_where_compiled_code_was_kept_and_whether_there_is_any(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """FlexAttention and torchao's optimizers compile without `runtime.compile`."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    monkeypatch.setattr("cramming.train_state.compiled_graphs", lambda: 0)
    run = start("name=a", "budget.steps=1", f"runtime.compile={how}")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(run / "compile_cache")
    section = load_record(run)["pretrain"]
    assert (section["compile_cache"], section["compiled"]) == ("own", how == "blocks")
    monkeypatch.setattr(runtime, "GIVEN_CACHES", {"TORCHINDUCTOR_CACHE_DIR": "/warm"})
    monkeypatch.setattr("cramming.train_state.compiled_graphs", lambda: 1)
    section = load_record(start("name=b", "budget.steps=1", f"runtime.compile={how}"))["pretrain"]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/warm"
    assert (section["compile_cache"], section["compiled"]) == ("given", True)


def test_compiled_code_that_no_step_on_record_has_paid_for_is_not_used(tmp_path: Path) -> None:
    """Copied there before the first process, or once it was killed; after a step it is the run's own."""
    copied = tmp_path / "compile_cache" / "fxgraph" / "copied"
    write_record_section(tmp_path, pretrain={})
    journal = Journal(tmp_path / "budget.jsonl")
    for event, process, steps in (("start", 0, 0), ("start", 1, 0), ("heartbeat", 1, 1)):
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.touch()
        journal.write({"event": event, "process": process, "elapsed": 1.0, "steps": steps})
        found = train_state.compile_cache(tmp_path)
        write_record_section(tmp_path, pretrain={"compile_cache": found})
        assert (found, copied.exists()) == ("own", steps > 0)
    journal.close()


def test_a_resume_does_not_take_back_that_compiled_code_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record_section(tmp_path, pretrain={})
    assert train_state.compile_cache(tmp_path) == "own"
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "GIVEN_CACHES", {"TRITON_CACHE_DIR": "/warm"})
        found = train_state.compile_cache(tmp_path)
    write_record_section(tmp_path, pretrain={"compile_cache": found})
    assert (found, train_state.compile_cache(tmp_path)) == ("given", "given")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prefetch": 0}, "prefetch=0 is below 1"),
        ({"tune": "max-autotune"}, "tune=max-autotune does nothing with compile=off"),
        ({"cuda_graphs": True, "compile": "blocks"}, "cuda_graphs=true goes with compile=model, not blocks"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any], says: str) -> None:
    plain = {"compile": "off", "keep_heap": True, "prefetch": 1}
    with pytest.raises(UserError, match=says):
        build(RuntimeConfig, plain | changes, "runtime")


@pytest.mark.parametrize("changes", [{"tune": "coordinate-descent"}, {"cuda_graphs": True}])
def test_kernels_of_a_gpu_are_not_asked_of_a_cpu(
    compose: Callable[..., dict[str, Any]], changes: dict[str, Any]
) -> None:
    config = Config.of(compose("runtime.compile=model", *(f"runtime.{key}={value}" for key, value in changes.items())))
    with pytest.raises(UserError, match=rf"runtime\.{next(iter(changes))}=.*this is a CPU; set"):
        check(config, Place("cpu", "a CPU", "fp32"))
    check(config, Place("cuda", "a GPU", "bf16"))


def test_the_compiler_is_told_what_torch_means_by_the_same_names() -> None:
    from torch._inductor import list_mode_options

    modes = {"coordinate-descent": None, "max-autotune": "max-autotune-no-cudagraphs", "off": "default"}
    assert modes.keys() == runtime.TUNING.keys()
    for tune, mode in modes.items():
        config = RuntimeConfig("model", False, 1, tune=tune)  # type: ignore[arg-type]
        options = runtime.compile_arguments(config).get("options", {})
        assert options == (list_mode_options(mode) if mode else {"coordinate_descent_tuning": True})
    graphs = RuntimeConfig("model", False, 1, cuda_graphs=True)
    assert runtime.compile_arguments(graphs)["options"] == list_mode_options("reduce-overhead")
    plain = torch.nn.Linear(2, 2)
    plain.compile(**runtime.compile_arguments(graphs))  # which knows each option, or says so


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
