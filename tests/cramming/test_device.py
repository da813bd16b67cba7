"""What a process computes on, and how: devices, memory, energy, the compiler and where its code is kept."""

import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cramming
from cramming import CACHE_VARIABLES, device
from cramming.budget import BudgetClock, BudgetConfig
from cramming.config import UserError
from cramming.device import RuntimeConfig, is_out_of_memory, select
from cramming.recipe import Config, Hardware, check
from cramming.record import load_record
from cramming.runlog import RUN_LOG, EventLog, read_log, training_of


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_an_amd_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, requested: str) -> None:
    """torch built for ROCm calls its devices cuda."""
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=f"--device={requested}: .*ROCm.*[Ss]et --device=cpu"):
        select(requested)
    assert select("cpu").type == "cpu"


PYPI_2_11 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # torch 2.11.0+cu130


@pytest.mark.parametrize(
    ("name", "capability", "architectures", "fix"),
    [
        ("V100", (7, 0), PYPI_2_11, "for CUDA 12.6 (cu126"),
        ("Tesla P100", (6, 0), PYPI_2_11, "for CUDA 12.6 (cu126"),
        ("V100", (7, 0), ["sm_50", "sm_60", "sm_70", "sm_90"], None),
        ("T4", (7, 5), PYPI_2_11, None),
        ("RTX 3060", (8, 6), PYPI_2_11, None),
        ("L4", (8, 9), PYPI_2_11, None),  # runs code for 8.6
        ("H200", (9, 0), PYPI_2_11, None),
        ("Thor", (11, 0), PYPI_2_11, "a newer torch"),
        ("Thor", (11, 0), [*PYPI_2_11, "compute_90"], None),  # compiles PTX of an earlier one
        ("a later one", (13, 0), [*PYPI_2_11, "compute_120"], None),
        ("H100", (9, 0), ["sm_90a"], None),
        ("B200", (10, 0), ["sm_90a", "compute_90a"], "a newer torch"),
        ("B300", (10, 3), ["sm_100f"], None),
        ("B300", (10, 3), ["sm_100a"], "a newer torch"),
        ("A100", (8, 0), ["sm_86"], "a newer torch"),
        ("a GPU of a build that does not tell", (7, 0), [], None),
    ],
)
@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_a_card_that_this_torch_has_no_kernels_for_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    requested: str,
    name: str,
    capability: tuple[int, int],
    architectures: list[str],
    fix: str | None,
) -> None:
    answers: dict[str, Any] = {
        "is_available": True,
        "current_device": 0,
        "get_arch_list": architectures,
        "get_device_capability": capability,
        "get_device_name": name,
    }
    for function, answer in answers.items():
        monkeypatch.setattr(torch.cuda, function, lambda answer=answer: answer)
    if fix is None:
        assert select(requested).type == "cuda"
        return
    with pytest.raises(UserError, match=rf"^--device={requested}: .*{name}") as refusal:
        select(requested)
    says = str(refusal.value)
    assert fix in says and "--device=cpu" in says and "\n" not in says
    assert select("cpu").type == "cpu"


def test_training_on_a_cpu_takes_no_memory_of_a_gpu_that_is_there(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading its random state would, hundreds of MB. SGD, as torch's AdamW asks the GPU about graph captures."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("_lazy_init", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a context is made"))
    start("budget.steps=2", "optim=sgd", name="a")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError(
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuDNN Frontend error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        RuntimeError("NCCL error ... Last error:\nCuda failure 2 'out of memory'"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_every_library_that_ran_out_of_memory_is_understood(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        RuntimeError("CUDA driver error: device not ready"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
        UserError(
            "cpu ran out of memory in training: CUDA error: out of memory"
        ),  # has been explained already
        OSError("out of memory"),
    ],
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)


class Nvml:
    """Stand-in for the driver's library: the joules that it says now; None is not supported (3)."""

    def __init__(self) -> None:
        self.joules: float | None = None

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        return 0 if uuid == b"GPU-1111" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, pointer: Any) -> int:  # noqa: N802
        pointer._obj.value = 0 if self.joules is None else round(1000 * self.joules)
        return 3 if self.joules is None else 0


GPU = torch.device("cuda", 0)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1111"))
    return library


def test_killed_and_resumed_processes_are_summed_up(nvml: Nvml, tmp_path: Path) -> None:
    """Null where one process does not know: the driver does not tell, or was loaded anew and counts from zero."""
    config = BudgetConfig(hours=1.0, exaflops=None, tokens=None, steps=None, heartbeat_seconds=5.0)
    read = device.energy_reader(GPU)

    def process() -> BudgetClock:
        earlier = training_of(read_log(tmp_path / RUN_LOG))
        clock = BudgetClock(config, EventLog(tmp_path / RUN_LOG), earlier)
        clock.start("a", "open", recipe=None if earlier.processes else {})
        clock.measure_energy(read)
        return clock

    def energy() -> tuple[float | None, str | None]:
        section = load_record(tmp_path)["pretrain"]
        return section["energy_kwh"], section["energy_source"]

    nvml.joules = 5e9  # more than 32 bits of millijoules
    killed = process()
    nvml.joules += 3.6e6
    killed.enter_checkpoint("ab" * 32, 0)
    killed.beat()
    nvml.joules = 9e9  # by others, until the next process begins; the killed one wrote nothing more
    resumed = process()
    nvml.joules += 1.8e6
    resumed.close("stopped")
    assert energy() == (1.5, "NVML energy counter")
    for told in (None, 0.0):
        nvml.joules = 9e9
        blind = process()
        nvml.joules = told
        blind.beat()
        nvml.joules = 9e9 + 1
        blind.close("stopped")
        assert energy() == (None, None)


def test_without_nvml_or_without_this_gpu_nothing_is_known(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.joules = 320.0
    assert device.energy_reader(GPU)() == 320.0
    assert device.energy_reader(torch.device("cpu"))() is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="2222"))
    assert device.energy_reader(GPU)() is None
    monkeypatch.undo()
    monkeypatch.setattr(device, "NVML", "libnvidia-ml-that-is-not-there.so.1")
    assert device.energy_reader(GPU)() is None


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_is_in_the_systems_unit(
    monkeypatch: pytest.MonkeyPatch, system: str, unit: int
) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=7))
    assert device.peak_memory_bytes(torch.device("cpu")) == 7 * unit


FAULTS = """
import resource, sys, threading
from cramming.device import keep_freed_memory
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
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    faults = {}
    for mode in ("keep", "default"):
        command = [sys.executable, "-c", FAULTS, mode]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    assert faults["keep"] < 15_000 < 200_000 < faults["default"]


CACHES = """
import os, sys
from pathlib import Path
from cramming import device
import torch._dynamo, torch._inductor.runtime.triton_heuristics
found = device.compile_cache(Path(sys.argv[1]), has_trained=False)
device.prepare(device.RuntimeConfig(compile="off", keep_heap=False, prefetch=1), torch.device("cpu"), Path(sys.argv[1]))
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
print(cache_dir(), triton_cache_dir(0), found)
"""


@pytest.mark.parametrize("preset", [(), CACHE_VARIABLES[:1], CACHE_VARIABLES[1:]])
def test_compiled_code_is_the_runs_own_unless_the_user_says_otherwise(
    tmp_path: Path, preset: tuple[str, ...]
) -> None:
    """In a fresh process: importing torch's compiler sets the first variable, to a place that all runs share."""
    environment = {name: value for name, value in os.environ.items() if name not in CACHE_VARIABLES}
    environment |= {variable: str(tmp_path / variable) for variable in preset}
    run = tmp_path / "run"
    command = [sys.executable, "-c", CACHES, str(run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    folders = dict(zip(CACHE_VARIABLES, (run / "compile_cache", run / "compile_cache" / "triton")))
    expected = [
        str(tmp_path / name if name in preset else folders[name]) for name in CACHE_VARIABLES
    ]
    assert done.stdout.split()[-3:] == [*expected, "given" if preset else "own"]


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
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["{}"]


@pytest.mark.parametrize("how", ["'off'", "blocks"])
def test_the_record_says_where_compiled_code_was_kept_and_whether_there_is_any(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """FlexAttention and torchao's optimizers compile without `runtime.compile`."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    monkeypatch.setattr(device, "compiled_graphs", lambda: 0)
    run = start("budget.steps=1", f"runtime.compile={how}", name="a")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(run / "compile_cache")
    record = load_record(run)
    assert (record["environment"]["compile_cache"], record["pretrain"]["compiled"]) == (
        "own",
        how == "blocks",
    )
    monkeypatch.setattr(device, "GIVEN_CACHES", {"TORCHINDUCTOR_CACHE_DIR": "/warm"})
    monkeypatch.setattr(device, "compiled_graphs", lambda: 1)
    record = load_record(start("budget.steps=1", f"runtime.compile={how}", name="b"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/warm"
    assert (record["environment"]["compile_cache"], record["pretrain"]["compiled"]) == (
        "given",
        True,
    )


@pytest.mark.parametrize("has_trained", [False, True])
def test_compiled_code_that_no_step_on_record_has_paid_for_is_not_used(
    tmp_path: Path, has_trained: bool
) -> None:
    """Copied there before the first process, or once it was killed; after a step it is the run's own."""
    copied = tmp_path / "compile_cache" / "fxgraph" / "copied"
    copied.parent.mkdir(parents=True)
    copied.touch()
    assert device.compile_cache(tmp_path, has_trained) == "own" and copied.exists() == has_trained


def test_the_compiler_is_told_what_torch_means_by_the_same_names() -> None:
    from torch._inductor import list_mode_options

    modes = {
        "coordinate-descent": None,
        "max-autotune": "max-autotune-no-cudagraphs",
        "off": "default",
    }
    assert modes.keys() == device.TUNING.keys()
    for tune, mode in modes.items():
        config = RuntimeConfig(compile="model", keep_heap=False, prefetch=1, tune=tune)  # type: ignore[arg-type]
        options = device.compile_arguments(config).get("options", {})
        assert options == (list_mode_options(mode) if mode else {"coordinate_descent_tuning": True})
    graphs = RuntimeConfig(compile="model", keep_heap=False, prefetch=1, cuda_graphs=True)
    assert device.compile_arguments(graphs)["options"] == list_mode_options("reduce-overhead")
    plain = torch.nn.Linear(2, 2)
    plain.compile(**device.compile_arguments(graphs))  # which knows each option, or says so


def test_more_variants_than_the_compiler_may_make_end_the_run_in_one_line(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in code that runs uncompiled without a word. Of the two layers each is a variant."""
    from torch._dynamo import config

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module: compiled(module, backend="eager")
    )
    untouched = {
        "recompile_limit": 8,
        "fail_on_recompile_limit_hit": False,
        "automatic_dynamic_shapes": True,
    }
    with config.patch(untouched):
        start("budget.steps=1", "runtime.compile=blocks", name="a")
        assert config.recompile_limit >= 32
        monkeypatch.setattr(device, "MAX_VARIANTS", 1)
        torch.compiler.reset()
        with pytest.raises(UserError, match=r"runtime\.compile=blocks: more than .* variants"):
            start("budget.steps=1", "runtime.compile=blocks", name="b")
    torch.compiler.reset()


@pytest.mark.skipif(sys.platform != "linux", reason="on Linux only")
@pytest.mark.parametrize(
    ("preset", "kernel", "expected"),
    [
        ({}, "6.8.0-generic", ("expandable_segments:True", None)),
        ({}, "6.18.33.2-microsoft-standard-WSL2", (None, None)),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, "6.8.0-generic", ("a:1", None)),
        ({"PYTORCH_CUDA_ALLOC_CONF": "b:1"}, "6.8.0-generic", (None, "b:1")),
    ],
)
def test_memory_segments_of_a_gpu_grow_unless_the_user_or_wsl_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    preset: dict[str, str],
    kernel: str,
    expected: tuple[str | None, str | None],
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in preset.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=kernel))
    importlib.reload(cramming)
    assert tuple(map(os.environ.get, names)) == expected


def test_torch_does_not_complain_about_the_allocator_setting() -> None:
    program = "import cramming, torch; torch.zeros(3).sum(); torch.cuda.is_available()"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "alloc" not in done.stderr.lower()


FLASH_3, FLASH_4 = "flash_attn_interface", "flash_attn.cute"


@pytest.mark.parametrize(
    ("overrides", "kind", "capability", "installed", "says"),
    [
        (["attention.flash=auto"], "cpu", (0, 0), (), None),
        (["attention.flash=2"], "cuda", (8, 0), (), None),
        (["attention.flash=2"], "cpu", (0, 0), (), "on a CPU"),
        (["attention.flash=3"], "cpu", (0, 0), (FLASH_3,), "on a CPU"),
        (["attention.flash=3"], "cuda", (9, 0), (FLASH_3,), None),
        (["attention.flash=3"], "cuda", (9, 0), (FLASH_4,), f"package with the module {FLASH_3}"),
        (["attention.flash=3"], "cuda", (10, 0), (FLASH_3,), "compute capability 9.x"),
        (["attention.flash=4"], "cuda", (10, 0), (FLASH_4,), None),
        (["attention.flash=4"], "cuda", (9, 0), (), f"package with the module {FLASH_4}"),
        (["attention.flash=4"], "cuda", (8, 6), (FLASH_4,), "compute capability 9.x or 10.x"),
        (
            ["attention.flash=3", "model.attention_dropout=0.1"],
            "cuda",
            (9, 0),
            (FLASH_3,),
            "model.attention_dropout",
        ),
    ],
)
def test_a_version_of_flash_attention_is_taken_where_it_runs(
    compose: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    kind: str,
    capability: tuple[int, int],
    installed: tuple[str, ...],
    says: str | None,
) -> None:
    monkeypatch.setattr(device, "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    config = Config.of(compose(*overrides))
    hardware = Hardware(kind, "this device", "bf16", capability, trains=True)
    with nullcontext() if says is None else pytest.raises(UserError) as refusal:
        check(config, hardware)
    if says is not None:
        message = str(refusal.value)
        assert message.startswith(overrides[0]) and says in message


def test_flash_attention_4_wants_the_torch_whose_backward_pass_takes_bounds(
    compose: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "find_spec", lambda name: True)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    hardware = Hardware("cuda", "H100", "bf16", (9, 0), trains=True)
    with pytest.raises(UserError, match=r"flash=4: needs torch 2\.13 or newer, this is 2\.11"):
        check(Config.of(compose("attention.flash=4")), hardware)


def test_the_version_of_flash_attention_is_torchs_to_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.nn.attention import current_flash_attention_impl

    device.activate_flash("auto")
    device.activate_flash(2)
    assert current_flash_attention_impl() is None
    activated = list[str]()
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    device.activate_flash(3)
    device.activate_flash(4)
    assert activated == ["FA3", "FA4"]
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"^attention\.flash=3: flash_attn_interface does not load"):
        device.activate_flash(3)  # nothing of it is installed here


@pytest.mark.skipif(sys.platform != "linux", reason="torch's threads are libgomp's on Linux")
@pytest.mark.parametrize(
    ("preset", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_threads_do_not_spin_for_long_unless_the_user_says_so(
    preset: dict[str, str], spins: str
) -> None:
    """libgomp prints the setting when it is loaded."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    program = [sys.executable, "-c", "import cramming, torch"]
    done = subprocess.run(
        program,
        env={**environment, "OMP_DISPLAY_ENV": "verbose", **preset},
        capture_output=True,
        text=True,
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
