"""The stages' frame: what fails, hangs, dies or comes too late is a line that says so, and the rest goes on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from cramming.config import UserError

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
# A stage of these rows, in place of one that measures.
STAGE = """
import json, os, signal, sys, time
from pathlib import Path
from run import ANEW, add_line, rows_of
told = json.loads(sys.argv[1])
file = Path(told["file"])
go = (file.parent / "go").exists()
time.sleep(0.6 if go else 0)  # imports
for name, at_most in (("good", 60), ("dies", 60), ("hangs", 0.5), ("slow", 60 if go else 3), ("last", 60)):
    if rows_of(file).get(name, {}).keys() & {"result", "error"}:
        continue
    add_line(file, {"row": name, "begun": time.time(), "at_most": at_most})
    if name == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hangs":
        time.sleep(60)
    if name == "slow":
        time.sleep(0 if go else 3)
    add_line(file, {"row": name, "result": {}})
    if name == "good":
        sys.exit(ANEW)
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scripts as modules."""
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.syspath_prepend(str(FOLDER))
    import in_process
    import lab
    import run
    import stage
    import write

    return SimpleNamespace(in_process=in_process, lab=lab, run=run, stage=stage, write=write)


def states(file: Path) -> dict[str, str]:
    """By row, how it ended."""
    rows: dict[str, str] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        rows[row["row"]] = next(
            key for key in ("result", "error", "skipped", "begun", "again") if key in row
        )
    return rows


def ends(process: int) -> bool:
    """Within ten seconds; what nobody waits for may stay in the table of processes."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if (
            not psutil.pid_exists(process)
            or psutil.Process(process).status() == psutil.STATUS_ZOMBIE
        ):
            return True
        time.sleep(0.05)
    return False


def start(folder: Path, *more: str) -> "subprocess.Popen[str]":
    (folder / "run.py").write_text((FOLDER / "run.py").read_text())
    (folder / "stage.py").write_text(STAGE)
    command = [
        sys.executable,
        folder / "run.py",
        "--stage",
        "1",
        "--out",
        folder,
        "--work",
        folder / "work",
        *more,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("stage", "missing"), [("1", "transformers"), ("3", "scikit-learn")])
def test_a_package_that_the_bundle_does_not_bring_is_named(
    gpu: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    missing: str,
) -> None:
    lacks = ("sklearn", missing)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in lacks else object()
    )
    with pytest.raises(SystemExit):
        gpu.run.main(["--stage", stage, "--out", str(tmp_path / "out")])
    assert (
        f"has no {missing}; install that first" in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )


def test_a_row_that_dies_or_hangs_is_named_and_the_rest_goes_on_after_a_kill_too(
    tmp_path: Path,
) -> None:
    file, first = tmp_path / "stage1.jsonl", start(tmp_path)
    while not (file.exists() and '"slow"' in file.read_text()):
        assert first.poll() is None
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    known = {"good": "result", "dies": "error", "hangs": "error"}
    assert states(file) == known | {"slow": "begun"}
    time.sleep(3.5)
    assert states(file)["slow"] == "begun"  # what measured has ended with what watched
    (tmp_path / "go").touch()
    with file.open("a") as stream:
        stream.write('{"row": "torn", "resu')  # as a kill may leave it
    again = start(tmp_path)
    said, _ = again.communicate(timeout=60)
    assert again.returncode == 1
    assert (
        "dies: the process ended with signal 11" in said and "hangs: took longer than 0 s" in said
    )
    lines = [line for line in file.read_text().splitlines() if "torn" not in line]
    file.write_text("\n".join(lines))
    assert states(file) == known | {"slow": "result", "last": "result"}


def test_a_failure_leaves_its_traceback_and_nothing_else(gpu: Any, tmp_path: Path) -> None:
    """Refusals are results; what cannot end in time is not begun; what is known is not measured again."""
    import torch._functorch.config as functorch

    budget, precision = functorch.activation_memory_budget, torch.get_float32_matmul_precision()

    def fails() -> dict[str, Any]:
        functorch.activation_memory_budget = 0.125
        torch.set_float32_matmul_precision("medium")
        raise ValueError("broken")

    def refuses() -> dict[str, Any]:
        assert (
            functorch.activation_memory_budget == budget
            and torch.get_float32_matmul_precision() == precision
        )
        raise UserError("not here")

    rows = [
        gpu.lab.Row("fails", 1, fails),
        gpu.lab.Row("refuses", 1, refuses),
        gpu.lab.Row("long", 1e5, fails),
        gpu.lab.Row("good", 1, lambda: {"a": 1}),
    ]
    file, scale = tmp_path / "rows.jsonl", gpu.lab.SCALES["full"]
    lab = gpu.lab.Lab(scale, torch.device("cpu"), tmp_path, tmp_path, None, time.time() + 1000)
    for _ in range(2):
        gpu.stage.measure_all(lab, rows, file)
    found = gpu.run.rows_of(file)
    assert "ValueError: broken" in found["fails"]["error"]
    assert found["refuses"]["result"] == {"refused": "not here"} and found["good"]["result"] == {
        "a": 1
    }
    assert "100000 s" in found["long"]["skipped"]
    assert file.read_text().count("begun") == 3  # once each


GPU_TESTS = """
import os, sys, time
from pathlib import Path
from types import ModuleType
import pytest

pytestmark = pytest.mark.gpu
sys.modules["torch"] = ModuleType("torch")  # takes seconds to import
sys.modules["torch"].device = str
lab = sys.modules["lab"] = ModuleType("lab")
broken = []
lab.answers = lambda device: not broken
GO = Path(__file__).with_name("go")

def test_passes():
    assert not GO.exists()

def test_hangs():
    GO.with_name("pid").write_text(str(os.getpid()))
    time.sleep(0 if GO.exists() else 60)

def test_breaks_the_device():
    broken.append(1)
    assert not broken

def test_next():
    assert not broken

@pytest.fixture
def late_end():
    yield
    os.abort()

def test_dies(late_end):
    pass

def test_dies_not():
    pass

def test_last():
    pytest.skip("not here")
"""


def test_the_gpus_tests_go_on_whatever_one_of_them_did_and_after_a_kill(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does the report of what has ended, while the row has not."""
    (tmp_path / "test_it.py").write_text(GPU_TESTS)
    code = f"""
from pathlib import Path
from types import SimpleNamespace
import gpu_tests
gpu_tests.TESTS = Path({str(tmp_path)!r})
gpu_tests.run(SimpleNamespace(out=gpu_tests.TESTS, device=SimpleNamespace(type="cpu")))
"""
    first = subprocess.Popen([sys.executable, "-c", code], cwd=FOLDER)
    while not (tmp_path / "pid").exists():
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.wait()
    assert ends(int((tmp_path / "pid").read_text()))  # pytest has, with what started it
    file = tmp_path / "tests.jsonl"
    with file.open("a") as stream:
        stream.write('{"row": "test_it.py::te')  # as a kill may leave it
    about = {
        "date": "2026-11-22 10:00:00",
        "commit": "abc",
        "name": "a",
        "python": "3.12",
        "versions": {},
    }
    (tmp_path / "stage1.jsonl").write_text(
        json.dumps({"about": about, "scale": "full"})
        + "\n"
        + json.dumps({"row": "tests", "begun": 1.0})
        + "\n"
    )
    assert "1 of 2 tests passed, 0 failed, 1 were skipped." in gpu.write.report(tmp_path)[1]

    (tmp_path / "go").touch()
    subprocess.run([sys.executable, "-c", code], cwd=FOLDER, check=True)
    found = {name.split("::")[1]: row["outcome"] for name, row in gpu.run.rows_of(file).items()}
    assert found == {
        "test_passes": "passed",
        "test_hangs": "skipped",
        "test_breaks_the_device": "failed",
        "test_next": "passed",
        "test_dies": "failed",
        "test_dies_not": "passed",
        "test_last": "skipped",
    }
    text = "\n".join(gpu.write.report(tmp_path)[1])
    assert (
        "3 of 7 tests passed, 2 failed, 2 were skipped." in text
        and "- test_it.py::test_dies: " in text
    )


def test_where_it_was_measured_is_told_without_git(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    lab = gpu.lab.Lab(gpu.lab.SCALES["tiny"], torch.device("cpu"), tmp_path, tmp_path, None, 0.0)
    where = gpu.stage.about(lab, 1)["about"]
    assert where["commit"] is None and where["versions"]["torch"]


def test_the_table_of_kernels_has_no_regions_that_someone_named(gpu: Any) -> None:
    import stage1

    def work() -> None:
        with torch.profiler.record_function("my region"):
            torch.ones(8) + 1

    names = [name for name, *_ in stage1.slowest_kernels(work, torch.device("cpu"))]
    assert "aten::add" in names and "my region" not in names


def test_fine_tuning_compares_the_same_seeds_and_a_failure_keeps_the_other_side(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import glue
    import stage3

    lab = gpu.lab.Lab(
        gpu.lab.SCALES["tiny"], torch.device("cpu"), tmp_path, tmp_path, tmp_path, 0.0
    )
    with pytest.raises(AssertionError, match="the row 'run killed and resumed' makes it"):
        stage3.fine_tuned(lab)
    (tmp_path / "runs" / stage3.NAME / "final").mkdir(parents=True)
    seeds: dict[str, list[int]] = {}

    def measure(side: str, _: Any, chosen: list[int]) -> dict[str, Any]:
        seeds[side] = chosen
        if side == "trainer" and (tmp_path / "full").exists():
            raise RuntimeError("no memory")
        return {"seconds": 2.0 if side == "trainer" else 1.0, "runs": [{"seconds": 0.5}]}

    monkeypatch.setattr(glue, "read", lambda arguments: {"rte": SimpleNamespace(train=range(8))})
    monkeypatch.setattr(glue, "measure", measure)
    assert stage3.fine_tuned(lab)["ratio"] == 2 and seeds["trainer"] == seeds["cramming"]
    (tmp_path / "full").touch()
    with pytest.raises(RuntimeError, match=r'(?s)"cramming": {"seconds": 1.0.*no memory'):
        stage3.fine_tuned(lab)


def test_a_side_of_fine_tuning_that_fails_says_why(gpu: Any) -> None:
    import glue

    arguments = glue.parser().parse_args(["--model", "a", "--data", "b"])
    arguments.precision = "fp7"
    with pytest.raises(
        RuntimeError, match=r"(?s)trainer ended with code 2: .*invalid choice: 'fp7'"
    ):
        glue.measure("trainer", arguments, [0])


def test_two_candidates_in_one_process_keep_their_precision(gpu: Any, compose: Any) -> None:
    small = [
        "model.hidden_size=16",
        "model.num_layers=1",
        "model.num_heads=2",
        "model.intermediate_size=16",
    ]
    spec = {"name": "ours", "vocab_size": 64, "device": "cpu"}
    sizes = [
        "train.batch_size=2",
        "train.micro_batch=2",
        "train.sequence_length=16",
        "precision=fp32",
    ]
    specs = [
        spec | {"settings": compose(*small, *sizes, f"precision.tf32={tf32}")}
        for tf32 in ("true", "false")
    ]
    with gpu.in_process.InProcess(specs[0]) as one, gpu.in_process.InProcess(specs[1]) as other:
        for candidate, precision in ((one, "high"), (other, "highest"), (one, "high")):
            assert (
                len(candidate.run(0, 2).losses) == 2
                and torch.get_float32_matmul_precision() == precision
            )


def test_a_wheel_that_is_installed_in_a_fit_version_stays_packed(gpu: Any, tmp_path: Path) -> None:
    import zipfile

    (tmp_path / "wheels").mkdir()
    wheels = {
        "torch-9-py3-none-any.whl": "torch>=2",
        "torch_other-9-py3-none-any.whl": "torch>=99",
        "new-1.whl": "neww",
    }
    for name in wheels:
        with zipfile.ZipFile(tmp_path / "wheels" / name, "w") as archive:
            archive.writestr(f"from_{name.split('-')[0]}.py", "")
    (tmp_path / "bundle.json").write_text(json.dumps({"wheels": wheels}))
    for _ in range(2):
        gpu.run.unpack(tmp_path, tmp_path / "site")
    assert {p.name for p in (tmp_path / "site").glob("*.py")} == {
        "from_torch_other.py",
        "from_new.py",
    }


def test_the_lines_become_a_devices_section_which_is_replaced(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import write

    about = {
        "date": "2026-11-22 10:00:00",
        "commit": "abc",
        "name": "NVIDIA H200",
        "python": "3.12",
        "versions": {},
    }
    ours = {
        "flops_per_token": 5e8,
        "tokens_per_second": 6e5,
        "peak_tflops": 989.0,
        "peak_bytes": 5e10,
        "first_steps_seconds": [40.0, 0.1],
        "plan": {"peak_bytes": 4.9e10, "tokens_per_second": 7e5},
    }
    lines: list[dict[str, Any]] = [
        {"about": about, "scale": "full"},
        {"row": "ours bert-base 128", "result": ours},
        {
            "row": "ceilings",
            "error": "Traceback\n  /a/b/site-packages/torch/x.py\nRuntimeError: /a/b/build/x",
        },
        {
            "row": "tests",
            "result": {
                "passed": 1,
                "tests": 2,
                "failed": 1,
                "texts": {"failed": {"t": "E  assert 1"}},
            },
        },
        {"row": "lever: fp8", "begun": 1.0},
    ]
    (tmp_path / "stage1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    docs = tmp_path / "tricks.md"
    docs.write_text("# Measured\n\n## A GPU, measured: NVIDIA H200\n\nold\n\n## after\n\nlast\n")
    for _ in range(2):
        write.main([str(tmp_path), "--results", str(tmp_path), "--docs", str(docs)])
    text = docs.read_text()
    assert (
        text.count("## A GPU, measured: NVIDIA H200\n") == 1
        and "old" not in text
        and "## after\n\nlast" in text
    )
    assert "| bert-base 128 | 600,000 | – | 30% | 700,000 | 50.00 | 49.00 | 40 |" in text
    assert "1 of 2 tests passed, 1 failed" in text and "- t: E  assert 1" in text
    assert (
        "- ceilings: RuntimeError: build/x" in text
        and "- lever: fp8: under way when all ended" in text
    )
    raw = (tmp_path / "gpu_nvidia-h200_2026-11-22.md").read_text()
    assert '"tokens_per_second": 600000.0' in raw and "/a/b/" not in raw
