"""The measurement of a card: what fails, hangs or dies costs its row, and what is dropped is worth least."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cramming.config import UserError
from tests.conftest import write_corpus

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
MODULES = ("check_rows", "in_process", "lab", "measure", "predict", "processes", "record", "rows")
MODULES += ("run", "run_rows", "sampler", "shards", "step_rows", "warm", "write")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scripts as modules."""
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.syspath_prepend(str(FOLDER))
    return SimpleNamespace(**{name: __import__(name) for name in MODULES})


@pytest.fixture
def tiny_lab(gpu: Any, tmp_path: Path) -> Any:
    """A laboratory on this CPU, with an hour left."""
    (tmp_path / "out").mkdir()
    record, now = gpu.record.Record(tmp_path, tmp_path / "out"), time.time()
    return gpu.lab.Lab(gpu.lab.TINY, torch.device("cpu"), record, None, now, now + 3600)


def start(folder: Path, *options: str, seconds: float = 120) -> "subprocess.Popen[str]":
    """Start the measurement with rows of a module in `folder`."""
    command = [
        sys.executable,
        FOLDER / "run.py",
        "--out",
        folder / "out",
        "--work",
        folder / "work",
    ]
    command += ["--device", "cpu", "--scale", "tiny", "--seconds", str(seconds), *options]
    env = os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def begins(file: Path) -> list[str]:
    """Return the names of rows in the order in which they began."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line["row"] for line in lines if line.get("begun")]


# The scheduler ---------------------------------------------------------------------------------


@pytest.mark.parametrize("slowness", [0.01, 1, 2, 4])
def test_what_is_dropped_is_worth_least(
    gpu: Any, tiny_lab: Any, monkeypatch: pytest.MonkeyPatch, slowness: float
) -> None:
    """All rows replaced by sleeps of their estimate; never dropped is what all else depends on."""
    clock = [1000.0]
    fake = SimpleNamespace(time=lambda: clock[0])
    monkeypatch.setattr(gpu.lab, "time", fake)
    monkeypatch.setattr(gpu.measure, "time", fake)
    full = replace(tiny_lab, scale=gpu.lab.SCALES["full"], began=1000.0, deadline=1560.0)

    def sleeping(row: Any) -> Any:
        def measure(lab: Any) -> dict[str, Any]:
            begun = lab.record.rows()[row.name]
            clock[0] += slowness * row.seconds
            assert clock[0] <= begun["begun"] + begun["at_most"]  # or it would have been killed
            return {}

        return replace(row, measure=measure, tell=lambda result: "slept")

    rows = [sleeping(row) for row in gpu.rows.rows(full)]
    gpu.measure.measure_all(full, rows)
    states = full.record.rows()
    assert states.keys() == {row.name for row in rows}
    assert clock[0] <= 1560
    measured = [row for row in rows if "result" in states[row.name]]
    dropped = [row for row in rows if "skipped" in states[row.name]]
    assert len(measured) + len(dropped) == len(rows)
    assert {"facts", "ceilings", "default paths", "parity"} <= {row.name for row in measured}
    assert not dropped if slowness < 1 else dropped
    for row in dropped:
        cheaper = [other for other in measured if other.value < row.value]
        assert all(other.seconds < row.seconds for other in cheaper)


def test_a_failure_leaves_nothing_behind_but_its_traceback(gpu: Any, tiny_lab: Any) -> None:
    """Refusals are results; what is known is not measured again."""
    import torch._functorch.config as functorch

    budget, precision = functorch.activation_memory_budget, torch.get_float32_matmul_precision()

    def fails(lab: Any) -> dict[str, Any]:
        lab.note(phase=1)
        functorch.activation_memory_budget = 0.125
        torch.set_float32_matmul_precision("medium")
        raise ValueError("broken")

    def refuses(lab: Any) -> dict[str, Any]:
        assert functorch.activation_memory_budget == budget
        assert torch.get_float32_matmul_precision() == precision
        raise UserError("not here")

    def tell(result: dict[str, Any]) -> str:
        return "x" * 500 + "\n" + "y" * 500

    Row = gpu.lab.Row
    rows = [Row("fails", 1, 3, fails, tell), Row("refuses", 1, 2, refuses, tell)]
    rows += [Row("long", 1e6, 1, fails, tell), Row("good", 1, 1, lambda lab: {"a": 1}, tell)]
    for _ in range(2):
        gpu.measure.measure_all(tiny_lab, rows)
    states = tiny_lab.record.rows()
    assert "ValueError: broken" in states["fails"]["error"]
    assert states["fails"]["partial"] == {"phase": 1}
    assert states["refuses"]["result"] == {"refused": "not here"}
    assert states["good"]["result"] == {"a": 1}
    assert [len(line) for line in states["good"]["told"].splitlines()] == [150, 150]
    assert "s were left" in states["long"]["skipped"]
    assert begins(tiny_lab.work / "rows.jsonl") == ["fails", "refuses", "good"]


# The watcher -----------------------------------------------------------------------------------

BAD_ROWS = """
import os, time
import lab
from lab import Row

WARM_UP = "none"

def prints(lab):
    print("x" * 2**20)
    raise ValueError("printed")

def breaks(lab_):
    lab.answers = lambda device: False
    raise RuntimeError("illegal access")

def notes(lab):
    lab.note(first={"loss": 1.0})
    time.sleep(60)

def rows(lab):
    kinds = {
        "prints": prints,
        "aborts": lambda lab: os.abort(),
        "breaks": breaks,
        "hangs": notes,
        "good": lambda lab: {"process": os.getpid()},
    }
    return [Row(k, 1, 1, v, lambda result: "told", least=2.0) for k, v in kinds.items()]
"""


def test_a_bad_row_costs_itself_and_is_told_in_a_line(gpu: Any, tmp_path: Path) -> None:
    """It raises and prints 1 MB; it aborts; the device stops answering; it hangs."""
    (tmp_path / "bad_rows.py").write_text(BAD_ROWS)
    process = start(tmp_path, "--rows", "bad_rows")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    states = gpu.record.rows_of(tmp_path / "out" / "rows.jsonl")
    assert states["good"]["result"]
    assert "printed" in states["prints"]["error"]
    *lines, counts, prints, aborts, breaks, hangs, good = said.splitlines()
    assert len(lines) == 5 and len(said) < 4000
    assert counts == "1 of 5 rows measured, 0 refused, 4 failed"
    assert prints == "prints: FAILED: ValueError: printed"
    assert aborts == f"aborts: FAILED: the process ended with signal {signal.SIGABRT}"
    assert breaks == "breaks: FAILED: RuntimeError: illegal access"
    assert hangs == "hangs: FAILED: took longer than 2 s (measured: first)"
    assert good == "good: told"
    assert len(list((tmp_path / "out").iterdir())) <= 8


SHORT_ROWS = """
import time
from lab import Row

WARM_UP = "none"

def measure(lab):
    for phase in range(3):
        time.sleep(0.1)
        lab.note(**{f"phase {phase}": phase})
    return {}

def rows(lab):
    return [Row(f"row {n}", 0.3, 1, measure, lambda result: str(result)) for n in range(6)]
"""


def test_a_killed_call_is_continued(gpu: Any, tmp_path: Path) -> None:
    """Killed in a row, with a line cut off; each row stands once in the summary, with all its phases."""
    (tmp_path / "short_rows.py").write_text(SHORT_ROWS)
    file = tmp_path / "work" / "rows.jsonl"
    process = start(tmp_path, "--rows", "short_rows")
    while not (file.exists() and '"row 1", "partial"' in file.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    with file.open("a") as stream:
        stream.write('{"row": "torn", "resu')
    (tmp_path / "out" / "rows.jsonl").unlink()
    said, _ = start(tmp_path, "--rows", "short_rows").communicate(timeout=60)
    whole = [line for line in file.read_text().splitlines() if "torn" not in line]
    file.write_text("\n".join(whole))
    assert begins(file) == [f"row {n}" for n in (0, 1, 1, 2, 3, 4, 5)]
    told = str({f"phase {n}": n for n in range(3)})
    expected = [
        "6 of 6 rows measured, 0 refused, 0 failed",
        *(f"row {n}: {told}" for n in range(6)),
    ]
    assert said.splitlines()[-7:] == expected
    copy = gpu.record.rows_of(tmp_path / "out" / "rows.jsonl")
    assert copy == gpu.record.rows_of(file)


def test_rows_that_cannot_begin_are_not_tried_for_ever(tmp_path: Path) -> None:
    (tmp_path / "no_rows.py").write_text("raise ImportError('not to be had')")
    said, _ = start(tmp_path, "--rows", "no_rows").communicate(timeout=60)
    assert "no row could begin: ImportError: not to be had" in said


@pytest.mark.parametrize("missing", ["transformers", "scipy"])
def test_a_package_that_no_bundle_brings_is_named(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, missing: str
) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == missing else object()
    )
    with pytest.raises(SystemExit):
        gpu.run.main(["--out", str(tmp_path / "out")])
    assert f"it has no {missing}. Install that" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--work", "file"), ("--out", "file"), ("--seconds", "0"), ("--seconds", "nan")],
)
def test_a_wrong_option_is_named_before_anything_is_written(
    gpu: Any, tmp_path: Path, capsys: Any, option: str, value: str
) -> None:
    (tmp_path / "file").touch()
    options = {"--out": str(tmp_path / "out"), "--work": str(tmp_path / "work")}
    options[option] = str(tmp_path / value) if value == "file" else value
    words = [word for pair in options.items() for word in pair]
    with pytest.raises(SystemExit):
        gpu.run.main(words)
    assert f"{option}=" in capsys.readouterr().err.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_rows_that_were_refused_are_not_counted_as_measured(gpu: Any) -> None:
    rows = {"a": {"result": {"x": 1}}, "b": {"result": {"refused": "no card"}}, "c": {"error": "E"}}
    assert gpu.run.summary(rows, ["d"])[0] == "1 of 4 rows measured, 1 refused, 1 failed"


@pytest.mark.parametrize("missing", ["pandas", "pyarrow"])
def test_the_predecessor_is_refused_without_what_no_bundle_brings(
    gpu: Any, tiny_lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    (tmp_path / "bundle" / "predecessor").mkdir(parents=True)
    monkeypatch.setattr(
        gpu.step_rows, "find_spec", lambda name: None if name == missing else object()
    )
    lab = replace(tiny_lab, bundle=tmp_path / "bundle")
    with pytest.raises(UserError, match=missing):
        gpu.step_rows.against_predecessor(lab, "predecessor")


def test_a_wheel_that_is_installed_in_a_fit_version_stays_packed(gpu: Any, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    wheels = {"torch-9.whl": "torch>=2", "torch_other-9.whl": "torch>=99", "new-1.whl": "neww"}
    for name in wheels:
        with zipfile.ZipFile(tmp_path / "wheels" / name, "w") as archive:
            archive.writestr(f"from_{name.split('-')[0]}.py", "")
    (tmp_path / "bundle.json").write_text(json.dumps({"wheels": wheels}))
    for _ in range(2):
        gpu.run.unpack(tmp_path, tmp_path / "site")
    names = {path.name for path in (tmp_path / "site").glob("*.py")}
    assert names == {"from_torch_other.py", "from_new.py"}


# Beside each other -----------------------------------------------------------------------------


def test_a_warm_up_that_dies_or_is_late_is_told(gpu: Any, tmp_path: Path) -> None:
    commands = {"good": ["true"], "dies": ["sh", "-c", "exit 3"], "late": ["sleep", "60"]}
    jobs = gpu.processes.Jobs(
        {
            name: lambda words=words: gpu.processes.start(words, tmp_path / "log")
            for name, words in [*commands.items(), ("never", ["true"])]
        },
        at_a_time=1,
    )
    until = time.time() + 10
    while len(jobs.outcomes) < 2:
        assert jobs.poll() and time.time() < until
        time.sleep(0.02)
    jobs.poll()
    outcomes = jobs.end()
    assert outcomes["good"] == "0 s"
    assert outcomes["dies"] == "0 s, ended with code 3"
    assert outcomes["late"].startswith("late, killed after")
    assert outcomes["never"] == "late, not begun"


GPU_TESTS = """
import os, sys, time
from types import ModuleType
import pytest

pytestmark = pytest.mark.gpu
sys.modules["torch"] = ModuleType("torch")  # takes seconds to import
sys.modules["torch"].device = str
lab = sys.modules["lab"] = ModuleType("lab")
broken = []
lab.answers = lambda device: not broken

def test_passes():
    pass

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

def test_skips():
    pytest.skip("not here")

def test_hangs():
    time.sleep(60 if not os.path.exists(GO) else 0)
"""


def test_tests_in_shards_survive_each_other(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is cut off runs in a later call, the others do not."""
    go = tmp_path / "go"
    (tmp_path / "test_it.py").write_text(f"GO = {str(go)!r}\n{GPU_TESTS}")
    monkeypatch.setattr(gpu.shards, "TESTS", tmp_path)
    monkeypatch.setattr(gpu.processes, "ROOT", tmp_path)

    def run(tests: int) -> dict[str, Any]:
        shards = gpu.shards.Shards(tmp_path, "cpu", "test", 2)
        deadline = time.time() + 40
        while shards.poll() and time.time() < deadline:
            rows = gpu.shards.outcomes_in(tmp_path)
            under_way = [name for name, row in rows.items() if row["outcome"] == "begun"]
            if len(rows) == tests and under_way == [name for name in rows if "hangs" in name]:
                break
            time.sleep(0.05)
        shards.end()
        return dict(shards.summary())

    first = run(tests=6)
    assert first["tests"] == {"passed": 2, "failed": 2, "skipped": 1, "begun": 1}
    go.touch()
    second = run(tests=0)
    assert second["tests"] == {"passed": 3, "failed": 2, "skipped": 1}
    names = {name.split("::")[1] for name in second["failed"]}
    assert names == {"test_breaks_the_device", "test_dies"}
    line, *failed = gpu.shards.tell_tests(first).splitlines()
    assert line.startswith("2 of 6 tests passed, ") and "1 cut off" in line
    assert sorted(failed)[0] == "test_it.py::test_breaks_the_device: E       assert not [1]"


@pytest.mark.slow
def test_a_warmed_step_is_found_in_the_cache(gpu: Any, tiny_lab: Any, tmp_path: Path) -> None:
    """Compiled by this CPU's inductor in one process, found by the next."""
    spec = tiny_lab.spec("bert-base", 16, "runtime.compile=model")
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec, default=str))
    tiny_lab.go.touch()
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, FOLDER / "warm.py", file, tiny_lab.go]
    hits = []
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        hits.append(json.loads(done.stdout.splitlines()[-1])["fxgraph_cache_hit"])
    assert hits[0] == 0 and hits[1] > 0


# Rows ------------------------------------------------------------------------------------------


def test_two_candidates_in_one_process_keep_their_precision(gpu: Any, tiny_lab: Any) -> None:
    specs = [
        tiny_lab.spec("bert-base", 16, "precision=fp32", f"precision.tf32={tf32}", rows=2)
        for tf32 in ("true", "false")
    ]
    with gpu.in_process.InProcess(specs[0]) as one, gpu.in_process.InProcess(specs[1]) as other:
        for candidate, precision in ((one, "high"), (other, "highest"), (one, "high")):
            assert len(candidate.run(0, 2).losses) == 2
            assert torch.get_float32_matmul_precision() == precision


def test_a_path_that_fails_is_a_line_and_the_others_are_compared(
    gpu: Any, tiny_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.check_rows, "MODELS", ("bert-base",))
    monkeypatch.setattr(gpu.check_rows, "MODES", ("fp32", "bf16"))
    monkeypatch.setattr(gpu.check_rows, "OPTIMIZERS", ("optim.lr=1000",))
    monkeypatch.setattr(gpu.check_rows, "MEMORY", ("memory=selective", "train.micro_batch=3"))
    tiny_lab.row = "default paths"
    tiny_lab.record.add(row=tiny_lab.row, begun=1.0)
    result = gpu.check_rows.default_paths(tiny_lab)
    paths = result["paths"]
    refused = paths["train.micro_batch=3"]
    assert refused.startswith("refused: ") and len(paths) == 7
    assert all(text.startswith("ok: ") for text in paths.values() if text != refused)
    assert gpu.check_rows.tell_paths(result) == "6 of 7 train as fp32 does, 1 refused, 0 not"
    wrong = {"paths": {"a": "loss 1.000 for 2.000, norm 1.000 for 1.000"}}
    assert gpu.check_rows.tell_paths(wrong).splitlines()[1] == f"a: {wrong['paths']['a']}"


def test_a_speed_row_tells_both_ceilings_and_the_kernels_furthest_from_their_bytes(
    gpu: Any, tiny_lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is that of compiled and of eager steps; a kept candidate serves a later row."""
    tiny_lab.bundle = tmp_path
    name, *_ = gpu.step_rows.speed_cases(tiny_lab)
    raw = {"architecture": "sm_90", "model": "bert-base", "length": 16, "name": "", "kernels": []}
    raw["kernels"] = [{"name": "aten::mm", "launches": 2, "bytes": 1e3}]
    (tmp_path / "raw.jsonl").write_text(json.dumps(raw))
    kernels = gpu.predict.kernel_bytes(tmp_path / "raw.jsonl")
    assert kernels == {name: {"aten::mm": 1e3}}
    (tmp_path / "predictions.json").write_text(json.dumps({"kernels": kernels, "cards": {}}))
    ceilings = {"burst": 2.0, "sustained": 1.0, "copy_gb_per_second": 10.0}
    tiny_lab.record.add(row="ceilings", result=ceilings)
    tiny_lab.row = name
    tiny_lab.record.add(row=name, begun=1.0)
    result = {**gpu.step_rows.speed(tiny_lab, name, keep=True)}
    result |= tiny_lab.record.result(name)
    assert result["micro_batches"] == 2
    small = tiny_lab.spec("bert-base", 16)
    kept = tiny_lab.kept[name]
    ratio = gpu.step_rows.pair(tiny_lab, small, small, turns=1, kept=name)["ratio"]
    assert ratio > 0 and not tiny_lab.kept and kept.candidate is None
    assert tiny_lab.record.result(name)["other"]["micro_batches"] == 1
    assert result["furthest"][0].startswith("aten::mm: ") and len(result["furthest"]) == 1
    assert sum(result["shares"].values()) == pytest.approx(1, abs=0.5)
    result |= {"eager": {"loss": result["first"]["loss"], "peak_bytes": 2e9}, "peak_bytes": 1e9}
    result |= {"plan": {"peak_bytes": 3e9}, "clocks": {"mhz": 1980.0, "watts": 650.0}}
    result |= {"tokens_per_second": 1e6, "flops_per_token": 5e5}
    line = gpu.step_rows.tell_speed(result).splitlines()[0]
    for text in ("1,000,000 tok/s", "25% of 2 burst, 50% of 1 sustained", "as eager", "650 W"):
        assert text in line
    assert "1.0 GB (eager 2.0) (plan 3.0)" in line and len(line) <= 175


def test_clocks_are_medians_of_the_interval(gpu: Any, tmp_path: Path) -> None:
    lines = []
    for second, clock, watts in ((0, 345, 70), (1, 1980, 650), (2, 1960, 660), (3, 1940, 640)):
        lines.append(f"2026/11/28 10:00:0{second}.000, {clock}, {watts}.00, 0x0000000000000004")
    (tmp_path / "clocks.csv").write_text("\n".join([*lines, "[Not Supported], 1", "2026/11"]))
    first = time.mktime((2026, 11, 28, 10, 0, 0, 0, 0, -1))
    medians = gpu.sampler.medians(tmp_path, first + 0.5, first + 9)
    assert medians == {"mhz": 1960.0, "watts": 650.0, "reasons": 4}
    assert gpu.sampler.medians(tmp_path, first + 5, first + 9) == {}


def test_predictions_are_made_for_cards_that_are_not_here(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "predictions.json"
    name = "ours bert-base 128"
    monkeypatch.setattr(
        gpu.step_rows, "speed_cases", lambda lab: {name: ("bert-base", 128, "rows")}
    )
    gpu.predict.main(["--out", str(out)])
    cards = json.loads(out.read_text())["cards"]
    h100, h200 = (cards[card][name] for card in ("H100", "H200"))
    assert h100["peak_bytes"] == h200["peak_bytes"] > 1e10
    slow, fast = h100["tokens_per_second"]
    assert 1e5 < slow < fast < 1e7 and h200["tokens_per_second"] == [slow, fast]


# Tables ----------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A folder of results: a speed row, a comparison, a failure, a row that was cut off, and one that never began."""
    about = {"date": "2026-11-28 10:00:00", "commit": "abc", "name": "NVIDIA H200"}
    about |= {"python": "3.12", "versions": {"torch": "2.11"}, "scale": "full"}
    about["rows"] = ["ours bert-base 128", "lever: fp8", "ceilings", "parity", "never"]
    ours = {"flops_per_token": 5e8, "tokens_per_second": 6e5, "peak_tflops": 1000.0}
    ours |= {"peak_bytes": 5e10, "first": {"seconds": 40.0}, "eager": {"peak_bytes": 6e10}}
    ours |= {"ceilings": {"burst": 800.0, "sustained": 600.0}, "shares": {"products": 0.6}}
    ours |= {"plan": {"peak_bytes": 4.9e10, "tokens_per_second": [3e5, 7e5]}}
    base = {"tokens_per_second": 1e5, "peak_bytes": 1e9}
    pair = {"base": base, "other": {**base, "tokens_per_second": 2e5}}
    error = "Traceback\n  /a/b/site-packages/torch/x.py\nRuntimeError: /a/b/build/x"
    lines: list[dict[str, Any]] = [
        {"about": about},
        {"row": "ours bert-base 128", "partial": ours},
        {"row": "ours bert-base 128", "result": {}, "told": "fast"},
        {"row": "lever: fp8", "partial": pair},
        {"row": "lever: fp8", "result": {"ratio": 2.0}},
        {"row": "ceilings", "error": error},
        {"row": "parity", "begun": 1.0, "at_most": 2.0},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_rows_become_a_cards_section_which_is_replaced(gpu: Any, measured: Path) -> None:
    docs = measured / "tricks.md"
    docs.write_text("# Measured\n\n## A GPU, measured: NVIDIA H200\n\nold\n\n## after\n\nlast\n")
    for _ in range(2):
        gpu.write.main([str(measured), "--results", str(measured), "--docs", str(docs)])
    text = docs.read_text()
    assert text.count("## A GPU, measured: NVIDIA H200\n") == 1
    assert "old" not in text and "## after\n\nlast" in text
    row = "| bert-base 128 | 600,000 | 38% | 50% | 30% | 300,000 to 700,000 | 50.00 | 60.00 | 49.00 | 40 | 60% |"
    assert row in text
    assert "| lever: fp8 | 100,000 | 1.00 | 200,000 | 1.00 | 2.00x |" in text
    assert "- ceilings: FAILED: RuntimeError: build/x" in text
    assert "- parity: not measured" in text and "- never: not measured: not begun" in text
    raw = (measured / "gpu_nvidia-h200_2026-11-28.md").read_text()
    assert '"tokens_per_second": 600000.0' in raw and "/a/b/" not in raw


# All of it -------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path) -> Iterator[Path]:
    """A bundle without wheels, for an environment that has all packages."""
    folder = tmp_path / "bundle"
    write_corpus(folder / "corpus")
    (folder / "bundle.json").write_text('{"wheels": {}}')
    yield folder


@pytest.mark.slow
def test_the_whole_measurement_survives_five_kills(gpu: Any, tmp_path: Path, bundle: Path) -> None:
    """At the tiny scale on a CPU: killed at random moments, then continued in calls of 30 seconds and a long one."""
    choose = random.Random(0)
    for _ in range(5):
        process = start(tmp_path, "--bundle", str(bundle), seconds=30)
        try:
            process.wait(choose.uniform(5, 30))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
    said, _ = start(tmp_path, "--bundle", str(bundle), seconds=400).communicate(timeout=420)
    states = gpu.record.rows_of(tmp_path / "work" / "rows.jsonl")
    lines = said.splitlines()
    counts = [line for line in lines if f" of {len(states)} rows measured" in line]
    assert counts[0].endswith(", 0 failed")
    summary = lines[lines.index(counts[0]) :]
    assert [line.split(": ")[0] for line in summary[1:3]] == ["facts", "ceilings"]
    assert len(summary) == 1 + len(states) == 1 + len(set(summary[1:]))
    ends = [json.loads(line) for line in (tmp_path / "work" / "rows.jsonl").open()]
    results = [line["row"] for line in ends if "result" in line]
    assert sorted(results) == sorted(states)
