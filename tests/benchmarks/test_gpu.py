"""The measurement of a card: what fails, hangs or dies costs its row, and what is dropped is worth least."""

import gc
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
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
from tests.forge import write_events

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
MODULES = (
    "check_rows",
    "device_rows",
    "in_process",
    "lab",
    "measure",
    "predict",
    "processes",
    "record",
    "rows",
)
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
    record, now = gpu.record.Record(tmp_path), time.monotonic()
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
    fake = SimpleNamespace(monotonic=lambda: clock[0])
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
    rows += [Row("long", 1e6, 1, fails, tell), Row("exits", 1, 1, lambda lab: sys.exit(), tell)]
    rows += [Row("good", 1, 1, lambda lab: {"a": 1}, tell)]
    for _ in range(2):
        gpu.measure.measure_all(tiny_lab, rows)
    states = tiny_lab.record.rows()
    assert "ValueError: broken" in states["fails"]["error"]
    assert states["fails"]["partial"] == {"phase": 1}
    assert states["refuses"]["result"] == {"refused": "not here"}
    assert states["good"]["result"] == {"a": 1}
    assert [len(line) for line in states["good"]["told"].splitlines()] == [150, 150]
    assert "s were left" in states["long"]["skipped"]
    assert "SystemExit" in states["exits"]["error"]
    assert begins(tiny_lab.work / "rows.jsonl") == ["fails", "refuses", "exits", "good"]


def test_details_that_are_cut_are_counted(gpu: Any) -> None:
    row = gpu.lab.Row("many", 1, 1, dict, lambda result: "\n".join(map(str, range(18))))
    assert gpu.measure.told(row, {}).splitlines() == ["0", *"12345", "and 12 more"]


@pytest.mark.parametrize("name", ["scale", "kind", "name", "commit", "versions"])
def test_rows_are_not_mixed_with_those_of_another_scale_device_or_code(
    gpu: Any, tiny_lab: Any, name: str
) -> None:
    head = gpu.measure.about(tiny_lab, "tiny")
    for date in ("2026-11-28", "2026-11-29"):
        gpu.measure.write_head(tiny_lab.record, {**head, "date": date})
    before = (tiny_lab.work / "rows.jsonl").read_text()
    with pytest.raises(SystemExit, match=rf"--work=.*{name}=.*another"):
        gpu.measure.write_head(tiny_lab.record, {**head, name: "another"})
    assert (tiny_lab.work / "rows.jsonl").read_text() == before
    assert tiny_lab.record.about()["date"] == "2026-11-28"


def test_memory_of_a_failed_row_is_released_after_its_traceback(
    gpu: Any, tiny_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a frame still holds would stay in the allocator's cache."""
    held: list[weakref.ref[torch.Tensor]] = []
    free_at_release = []

    def fails(lab: Any) -> dict[str, Any]:
        tensor = torch.ones(2)
        held.append(weakref.ref(tensor))
        raise RuntimeError("out of memory")

    def release(device: torch.device) -> None:
        gc.collect()
        free_at_release.append(held[0]() is None)

    monkeypatch.setattr(gpu.measure, "release", release)
    row = gpu.lab.Row("fails", 1, 1, fails, str)
    gpu.measure.measure_all(tiny_lab, [row])
    assert free_at_release == [True]


def test_nothing_warms_up_beside_a_timed_row(gpu: Any, tiny_lab: Any) -> None:
    running: dict[str, bool] = {}
    sleeping = gpu.processes.start(["sleep", "60"], tiny_lab.work / "log")
    jobs = gpu.processes.Jobs({"step": lambda: sleeping}, 1)
    jobs.poll()
    tiny_lab.shared["warm-ups"] = jobs

    def note(lab: Any) -> dict[str, Any]:
        running[lab.row] = sleeping.poll() is None
        if lab.row == "checks":
            lab.go.touch()
        return {}

    rows = []
    for name, is_timed in (("facts", True), ("checks", False), ("parity", False), ("speed", True)):
        rows.append(gpu.lab.Row(name, 1, 1, note, str, is_timed=is_timed))
    try:
        gpu.measure.measure_all(tiny_lab, rows)
    finally:
        jobs.end()
    assert running == {"facts": True, "checks": True, "parity": True, "speed": False}
    names = {row.name for row in gpu.rows.rows(tiny_lab) if not row.is_timed}
    assert names == {"default paths", "parity", gpu.rows.WARM_UP}


@pytest.mark.parametrize("memory_gb", [24.0, 85.0, 150.0, 192.0])
def test_warm_ups_fit_into_memory_together(
    gpu: Any, tiny_lab: Any, monkeypatch: pytest.MonkeyPatch, memory_gb: float
) -> None:
    monkeypatch.setattr(gpu.lab.Lab, "memory_gb", memory_gb)
    jobs = gpu.warm.warm_up_jobs(tiny_lab, {})
    needed = gpu.warm.RESERVED_GB + jobs.at_a_time * gpu.warm.STEP_GB
    assert jobs.at_a_time == 1 or needed <= memory_gb


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


@pytest.mark.parametrize(
    ("rows", "seconds", "reason"),
    [
        ("raise ImportError('not to be had')", 120, "ImportError: not to be had"),
        ("import time; time.sleep(60)", 6, "time was over"),
    ],
)
def test_a_call_in_which_no_row_can_begin_fails_and_says_why(
    tmp_path: Path, rows: str, seconds: float, reason: str
) -> None:
    """It is not tried for ever."""
    (tmp_path / "no_rows.py").write_text(rows)
    process = start(tmp_path, "--rows", "no_rows", seconds=seconds)
    *_, why, counts = process.communicate(timeout=60)[0].splitlines()
    assert why.startswith("no row could begin: ") and reason in why
    assert counts.startswith("0 of 0 rows measured") and process.returncode == 1


def test_a_choice_that_names_no_row_is_said(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"scale": "tiny", "device": "cpu", "rows": "rows", "only": ["typo"], "bundle": None}
    options |= {"work": str(tmp_path), "commit": None, "began": 0.0, "deadline": 0.0}
    monkeypatch.setattr(sys, "argv", ["measure.py", json.dumps(options)])
    monkeypatch.setattr(torch, "compile", torch.compile)  # is put back
    with pytest.raises(SystemExit, match=r"--only=\['typo'\]"):
        gpu.measure.main()


def test_a_reader_that_goes_away_ends_no_call(gpu: Any, tmp_path: Path) -> None:
    (tmp_path / "short_rows.py").write_text(SHORT_ROWS)
    process = start(tmp_path, "--rows", "short_rows")
    assert process.stdout
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert len(gpu.record.rows_of(tmp_path / "out" / "rows.jsonl")) == 6


def test_one_call_at_a_time_measures_in_a_folder(gpu: Any, tmp_path: Path) -> None:
    for _ in range(2):
        with gpu.run.lock_folder(tmp_path), pytest.raises(SystemExit, match="--work="):
            gpu.run.lock_folder(tmp_path)


def test_a_copy_catches_up_and_replaces_no_rows_of_another_record(gpu: Any, tmp_path: Path) -> None:
    """Whatever stopped the copy, be it in the middle of a line."""
    work, out, other = (tmp_path / name for name in ("work", "out", "other"))
    work.mkdir()
    record = gpu.record.Record(work)
    record.add(row="a", begun=1.0)
    assert "--out=" in gpu.run.copy_results(work, out)  # there is no such folder
    out.mkdir()
    for size in (0, 3, None):
        record.add(row="a", partial={"size": size})
        (out / "rows.jsonl").write_bytes((work / "rows.jsonl").read_bytes()[:size])
        assert not gpu.run.copy_results(work, out)
        assert (out / "rows.jsonl").read_bytes() == (work / "rows.jsonl").read_bytes()
    other.mkdir()
    gpu.record.Record(other).add(row="a", begun=2.0)
    before = (other / "rows.jsonl").read_bytes()
    assert "--out=" in gpu.run.copy_results(work, other)
    assert (other / "rows.jsonl").read_bytes() == before


def test_the_name_of_an_error_is_not_the_line_that_marks_its_place(gpu: Any) -> None:
    assert gpu.record.last_line("RuntimeError: no\n  x y\n    ^^^^\n") == "  x y"


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
    [
        ("--work", "file"),
        ("--out", "file"),
        ("--out", "file/x"),
        ("--seconds", "0"),
        ("--seconds", "4"),
        ("--seconds", "nan"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_measured(
    gpu: Any, tmp_path: Path, capsys: Any, option: str, value: str
) -> None:
    (tmp_path / "file").touch()
    options = {"--out": str(tmp_path / "out"), "--work": str(tmp_path / "work")}
    options[option] = str(tmp_path / value) if value.startswith("file") else value
    words = [word for pair in options.items() for word in pair]
    with pytest.raises(SystemExit):
        gpu.run.main(words)
    assert f"{option}=" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"python": "2.7", "wheels": {}}'])
def test_a_bundle_for_another_python_or_without_a_whole_description_is_named(
    gpu: Any, tmp_path: Path, capsys: Any, content: str
) -> None:
    if content:
        (tmp_path / "bundle.json").write_text(content)
    with pytest.raises(SystemExit):
        gpu.run.main(["--out", str(tmp_path / "out"), "--bundle", str(tmp_path)])
    *_, last = capsys.readouterr().err.splitlines()
    assert f"--bundle={tmp_path}: " in last and f"--python 3.{sys.version_info.minor}" in last


def test_rows_that_were_refused_or_are_wrong_are_not_counted_as_measured(gpu: Any) -> None:
    rows = {"a": {"result": {"x": 1}}, "b": {"result": {"refused": "no card"}}, "c": {"error": "E"}}
    rows["d"] = {"result": {"failed": ["a model"]}}
    counts, *_, wrong, _ = gpu.run.summary(rows, ["e", "a", "b", "c", "d", "e", "f"])
    assert counts == "1 of 6 rows measured, 1 refused, 2 failed" and wrong.startswith("d: FAILED")


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


def test_the_predecessor_and_ours_train_whole_batches(
    gpu: Any, tiny_lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has as many tokens as that of a speed row, in micro-batches of the same size."""
    import peers

    specs = []

    class Built:
        def __init__(self, spec: dict[str, Any], shares_code: bool = False) -> None:
            specs.append(spec)
            self.facts: dict[str, Any] = {}

        def __enter__(self) -> "Built":
            return self

        def __exit__(self, *error: object) -> None:
            pass

    (tmp_path / "bundle" / "predecessor").mkdir(parents=True)
    monkeypatch.setattr(gpu.step_rows, "find_spec", lambda name: object())
    monkeypatch.setattr(peers, "worker_of", Built)
    monkeypatch.setattr(gpu.step_rows, "InProcess", Built)
    monkeypatch.setattr(gpu.step_rows, "interleaved", lambda *arguments: {})
    scale = gpu.lab.SCALES["full"]
    lab = replace(tiny_lab, bundle=tmp_path / "bundle", row="predecessor", scale=scale)
    gpu.step_rows.against_predecessor(lab, "predecessor")
    theirs, ours = specs
    batch = scale.batch // scale.lengths[0]
    assert {f"train.batch_size={batch}", "impl.microbatch_size=128"} <= set(theirs["overrides"])
    train = ours["settings"]["train"]
    assert (train["batch_size"], train["micro_batch"]) == (batch, 128)


def test_a_wheel_that_is_installed_in_a_fit_version_stays_packed(
    gpu: Any, tmp_path: Path, capsys: Any
) -> None:
    """One that is damaged or missing is named and costs no other."""
    (tmp_path / "wheels").mkdir()
    wheels = {"torch-9.whl": "torch>=2", "torch_other-9.whl": "torch>=99", "new-1.whl": "neww"}
    for name in wheels:
        with zipfile.ZipFile(tmp_path / "wheels" / name, "w") as archive:
            archive.writestr(f"from_{name.split('-')[0]}.py", "")
    wheels |= {"cut-1.whl": "cutt", "lost-1.whl": "lostt"}
    (tmp_path / "wheels" / "cut-1.whl").write_bytes(b"PK")
    (tmp_path / "bundle.json").write_text(json.dumps({"wheels": wheels}))
    for _ in range(2):
        gpu.run.unpack(tmp_path, tmp_path / "site")
    names = {path.name for path in (tmp_path / "site").glob("*.py")}
    assert names == {"from_torch_other.py", "from_new.py"}
    cut, lost = capsys.readouterr().out.splitlines()[:2]
    assert "cut-1.whl: " in cut and "lost-1.whl: " in lost


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
    with gpu.in_process.InProcess(specs[0]) as first, gpu.in_process.InProcess(specs[1]) as other:
        for candidate, precision in ((first, "high"), (other, "highest"), (first, "high")):
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
    assert tiny_lab.record.result(tiny_lab.row)["paths"] == paths  # noted before the row's end
    assert not result["failed"]


def test_an_optimizer_that_does_not_stay_finite_does_not_train(
    gpu: Any, tiny_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.check_rows, "MODELS", ())
    monkeypatch.setattr(gpu.check_rows, "MEMORY", ())
    monkeypatch.setattr(gpu.check_rows, "OPTIMIZERS", ("optim.lr=1e40",))
    tiny_lab.row = "default paths"
    tiny_lab.record.add(row=tiny_lab.row, begun=1.0)
    result = gpu.check_rows.default_paths(tiny_lab)
    line, detail = gpu.check_rows.tell_paths(result).splitlines()
    assert line.startswith("0 of 1 train") and "nan" in detail and result["failed"] == [detail]


@pytest.mark.parametrize(("skips", "tries"), [(0, 1), (3, 4), (99, 10)])
def test_a_step_that_is_skipped_is_repeated(gpu: Any, skips: int, tries: int) -> None:
    """fp16 begins with a loss scale that may be too large."""
    taken = []

    def step(batches: str, lr: float) -> Any:
        taken.append((batches, lr))
        return SimpleNamespace(skipped=len(taken) <= skips)

    candidate = SimpleNamespace(
        engine=SimpleNamespace(step=step),
        batches=lambda index, count: iter([f"batch {index}"]),
        learning_rate=lambda index: 0.1,
    )
    stats = gpu.in_process.train_step(candidate, 5)
    assert taken == [("batch 5", 0.1)] * tries
    assert stats.skipped == (skips >= tries)


def test_cache_hits_are_those_of_a_candidate(
    gpu: Any, tiny_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's own counter goes on over all candidates of a process, whatever is reset."""
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters["inductor"], "fxgraph_cache_hit", 5)
    with gpu.in_process.InProcess(tiny_lab.spec("bert-base", 16, rows=2)) as candidate:
        assert candidate.cache_hits == 0
        torch.compiler.reset()
        counters["inductor"]["fxgraph_cache_hit"] += 2
        assert candidate.cache_hits == 2


@pytest.mark.parametrize(
    ("rounded", "loss", "failed"),
    [
        ([1.0, 1.0], 9.0, []),
        ([1.0, 1.0], 9.1, ["crammed-bert"]),
        ([1.0, 1.0], math.nan, ["crammed-bert"]),
        ([1.0, 0.5], 9.0, ["crammed-bert"]),
        ([math.nan, 1.0], 9.0, ["crammed-bert"]),
    ],
)
def test_a_model_whose_gradients_are_others_than_in_fp32_fails_and_is_named(
    gpu: Any,
    tiny_lab: Any,
    monkeypatch: pytest.MonkeyPatch,
    rounded: list[float],
    loss: float,
    failed: list[str],
) -> None:
    """This holds for the first model and for the second."""

    def gradients(lab: Any, model: str, *more: str, rows: int) -> dict[str, Any]:
        is_tried = model == "crammed-bert" and not more
        numbers = {"first": torch.ones(2), "worst": torch.ones(2)}
        if is_tried:
            numbers["worst"] = torch.tensor(rounded)
        return {"loss": loss if is_tried else 9.0, "norm": 1.0, "gradients": numbers}

    monkeypatch.setattr(gpu.check_rows, "_gradients", gradients)
    row = gpu.lab.Row("parity", 1, 1, gpu.check_rows.parity, gpu.check_rows.tell_parity)
    gpu.measure.measure_all(tiny_lab, [row])
    assert tiny_lab.record.result("parity")["failed"] == failed
    counts, line = gpu.run.summary(tiny_lab.record.rows(), ["parity"])
    assert counts.endswith(f"{len(failed)} failed")
    assert f"{3 - len(failed)} of 3" in line and ("FAILED" in line) == bool(failed)
    assert not failed or (failed[0] in line and "BAD" in line)


def test_attention_is_timed_without_stacking_its_gradients(gpu: Any, tiny_lab: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    operators = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            operators.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    tiny_lab.row = "ceilings"
    tiny_lab.record.add(row=tiny_lab.row, begun=1.0)
    with Names():
        rates = gpu.device_rows.ceilings(tiny_lab)["attention"]
    assert any(isinstance(rate, float) for rate in rates.values())
    assert any("attention" in name and "backward" in name for name in operators)
    assert not operators & {"aten::stack", "aten::cat"}


KERNELS = {  # as CUPTI names them on a card of sm_90 with torch 2.11
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*)",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>",
    ),
    "products": ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "void cublasLt::splitKreduce_kernel"),
    "optimizer and copies": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
    ),
    "elementwise": ("triton_per_fused_add_native_layer_norm_3", "void at::native::reduce_kernel"),
}


def test_kernels_are_counted_by_kind(gpu: Any) -> None:
    profile = [(name, 1, 1e4) for names in KERNELS.values() for name in names]
    shares = gpu.step_rows.shares_of({"step_seconds": [0.2, 0.2], "profile": profile})
    expected = {kind: 0.05 * len(names) for kind, names in KERNELS.items()}
    assert shares == pytest.approx({**expected, "idle": 1 - 0.05 * len(profile)})
    assert set(shares) == set(gpu.write.SHARES)


def test_a_device_without_a_profile_has_no_shares(
    gpu: Any, tiny_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual machine may refuse the profiler its counters, with an error or without."""

    def refuses(work: Any, device: torch.device) -> Any:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    name, *_ = gpu.step_rows.speed_cases(tiny_lab)
    for profile_of, reason in ((refuses, "PRIVILEGES"), (lambda *_: [], "no kernel")):
        monkeypatch.setattr(gpu.step_rows, "profile_of", profile_of)
        tiny_lab.row = name
        tiny_lab.record.add(row=name, begun=1.0)
        result = gpu.step_rows.speed(tiny_lab, name)
        assert result == {"shares": {}, "furthest": [], "failed": False}
        told = gpu.step_rows.tell_speed({**tiny_lab.record.result(name), **result})
        assert reason in told and "idle" not in told


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
    candidate = tiny_lab.candidates[name]
    ratio = gpu.step_rows.pair(tiny_lab, small, small, turns=1, reuse=name)["ratio"]
    assert ratio > 0 and not tiny_lab.candidates and candidate.candidate is None
    compared = tiny_lab.record.result(name)
    assert compared["other"]["micro_batches"] == 1
    assert "first_seconds" in compared["base"] and "first_seconds" not in compared["other"]
    assert gpu.step_rows.tell_pair(compared).count("first") == 1
    assert result["furthest"][0].startswith("aten::mm: ") and len(result["furthest"]) == 1
    assert set(result["shares"]) == set(gpu.write.SHARES)
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
        time_ = f"2026/11/28 10:00:0{second}.000"
        lines.append(f"GPU-a, {time_}, {clock}, {watts}.00, 0x0000000000000004")
    file = tmp_path / "clocks.csv"
    text = "\n".join([*lines, "GPU-a, [Not Supported], 1", "GPU-a, 2026/11"])
    file.write_bytes(text.encode() + b"\n\xff\n")
    first = time.mktime((2026, 11, 28, 10, 0, 0, 0, 0, -1))
    expected = {"mhz": 1960.0, "watts": 650.0, "reasons": 4}
    assert gpu.sampler.medians(tmp_path, "GPU-a", first + 0.5, first + 9) == expected
    assert gpu.sampler.medians(tmp_path, "MIG-1", first + 0.5, first + 9) == expected
    assert gpu.sampler.medians(tmp_path, "GPU-a", first + 5, first + 9) == {}
    idle = [line.replace("GPU-a", "GPU-b").replace("00, 0x", "99, 0x") for line in lines]
    file.write_text("\n".join([*lines, *idle, *idle]))
    assert gpu.sampler.medians(tmp_path, "GPU-a", first + 0.5, first + 9) == expected
    assert gpu.sampler.medians(tmp_path, "MIG-1", first + 0.5, first + 9) == {}


@pytest.mark.skipif(shutil.which("stdbuf") is None, reason="GNU coreutils")
def test_samples_are_in_the_file_while_the_sampler_runs(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that buffers by the C library's rules, as nvidia-smi may."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n(echo sample; sleep 10) | cut -c 1-\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    process = gpu.sampler.start_sampler(tmp_path)
    until = time.time() + 10
    try:
        while (tmp_path / "clocks.csv").read_text() != "sample\n":
            assert time.time() < until
            time.sleep(0.02)
    finally:
        gpu.processes.kill(process)


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


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"cards": {}, "kernels": 1}', b"\xff"])
def test_without_readable_predictions_there_are_none(
    gpu: Any, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "predictions.json").write_bytes(content)
    assert gpu.predict.read(tmp_path) == {"cards": {}, "kernels": {}}


EVENTS: dict[str, dict[str, Any]] = {
    "start": {"unit": "steps", "limit": 9, "clock": "wall", "division": "open", "name": "a"},
    "first": {"event": "checkpoint", "step": 0, "sha256": "0" * 64, "retained": True},
    "later": {"event": "checkpoint", "step": 5, "sha256": "5" * 64},
    "resume first": {"event": "resume", "sha256": "0" * 64},
    "resume later": {"event": "resume", "sha256": "5" * 64},
    "resume nothing": {"event": "resume"},
}


@pytest.mark.parametrize(
    ("names", "step"),
    [
        (["start", "first", "start", "resume first"], 0),
        (["start", "first", "later", "start", "resume later"], 5),
        (["start", "first", "later", "start", "resume later", "resume first"], 5),
        (["start", "first", "later", "start", "resume later", "start", "resume nothing"], 0),
        (["start", "first", "later", "start"], 0),
    ],
)
def test_a_resume_is_from_the_step_of_its_checkpoint(
    gpu: Any, tmp_path: Path, names: list[str], step: int
) -> None:
    """The last process counts, and what it begins with, not what it rolls back to."""
    events = []
    for number, name in enumerate(names):
        event = {"event": "start", "elapsed": 0.0, "wall": 1.0, **EVENTS[name]}
        if name == "start":
            event |= {"suite_version": "1", "rules_version": "1", "recipe": None if number else {}}
        events.append(event)
    write_events(tmp_path, events)
    assert gpu.run_rows.resumed_step(tmp_path) == step


# Tables ----------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A folder of results: speed rows and comparisons, one of each failed, and rows without a result."""
    about = {"date": "2026-11-28 10:00:00", "commit": "abc", "name": "NVIDIA H200"}
    about |= {"python": "3.12", "versions": {"torch": "2.11"}, "scale": "full"}
    names = ["ours bert-base 128", "ours best 128", "lever: fp8", "lever: cut", "ceilings"]
    ours = {"flops_per_token": 5e8, "tokens_per_second": 6e5, "peak_tflops": 1000.0}
    ours |= {"peak_bytes": 5e10, "first": {"seconds": 40.0}, "eager": {"peak_bytes": 6e10}}
    ours |= {"ceilings": {"burst": 800.0, "sustained": 600.0}, "shares": {"products": 0.6}}
    ours |= {"plan": {"peak_bytes": 4.9e10, "tokens_per_second": [3e5, 7e5]}}
    base = {"tokens_per_second": 1e5, "peak_bytes": 1e9}
    pair = {"base": base, "other": {**base, "tokens_per_second": 2e5}}
    error = "Traceback\n  /a/b/site-packages/torch/x.py\nRuntimeError: /a/b/build/x"
    lines: list[dict[str, Any]] = [
        {"about": about},
        {"names": [*names, "parity", "never"]},
        {"row": "ours bert-base 128", "partial": ours},
        {"row": "ours bert-base 128", "result": {}, "told": "fast"},
        {"row": "ours best 128", "partial": ours},
        {"row": "ours best 128", "result": {"failed": True}, "told": "wrong"},
        {"row": "lever: cut", "partial": {**pair, "ratio": 9.0, "told": "9.00x: much"}},
        {"row": "lever: cut", "error": "illegal access \ud800"},
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
    table = [line for line in text.splitlines() if line.startswith("| ") and "clock, power" in text]
    speeds = table[: [line.startswith("| row") for line in table].index(True)]
    assert len(speeds) == 4 and len({line.count("|") for line in speeds}) == 1
    assert "FAILED" in speeds[3] and "FAILED" not in speeds[2]
    assert not any("lever: cut" in line for line in table)
    assert "- lever: cut: FAILED: illegal access ? (measured: 9.00x: much)" in text
    assert "| lever: fp8 | 100,000 | 1.00 | 200,000 | 1.00 | 2.00x |" in text
    assert "- ceilings: FAILED: RuntimeError: build/x" in text
    assert "- parity: not measured" in text and "- never: not measured: not begun" in text
    raw = (measured / "gpu_nvidia-h200_2026-11-28.md").read_text()
    assert '"tokens_per_second": 600000.0' in raw and "/a/b/" not in raw


def test_tables_replace_those_of_no_other_measurement(
    gpu: Any, measured: Path, tmp_path: Path
) -> None:
    """Other tables of the same card and day stay; a continued measurement replaces its table."""
    results = tmp_path / "results"
    file = measured / "rows.jsonl"
    gpu.write.main([str(measured), "--results", str(results)])
    gpu.record.Record(measured).add(row="never", result={"more": 1}, told="more")
    gpu.write.main([str(measured), "--results", str(results)])
    [table] = results.iterdir()
    before = table.read_text()
    assert "never: more" in before
    file.write_text(file.read_text().replace("10:00:00", "11:00:00"))
    with pytest.raises(SystemExit, match=table.name):
        gpu.write.main([str(measured), "--results", str(results)])
    assert table.read_text() == before


def test_tables_without_rows_or_a_folder_end_in_a_line(gpu: Any, measured: Path) -> None:
    with pytest.raises(SystemExit, match="no rows"):
        gpu.write.main([str(measured / "none")])
    with pytest.raises(SystemExit, match="--results"):
        gpu.write.main([str(measured), "--results", str(measured / "rows.jsonl")])


def test_a_user_without_a_name_has_one_for_the_compiler() -> None:
    """In a container whose user's number stands in no list of users; torch's compiler calls `getuser`."""
    code = "import pwd, getpass; pwd.getpwuid = {}.__getitem__; import cramming; getpass.getuser()"
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


# All of it -------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path) -> Iterator[Path]:
    """A bundle without wheels, for an environment that has all packages."""
    folder = tmp_path / "bundle"
    write_corpus(folder / "corpus")
    content = {"wheels": {}, "python": f"3.{sys.version_info.minor}"}
    (folder / "bundle.json").write_text(json.dumps(content))
    yield folder


@pytest.mark.slow
def test_a_killed_run_is_resumed_from_a_checkpoint(gpu: Any, tiny_lab: Any, bundle: Path) -> None:
    tiny_lab.bundle = bundle
    tiny_lab.row = "run"
    tiny_lab.record.add(row="run", begun=1.0)
    result = gpu.run_rows.killed_and_resumed(tiny_lab)
    assert result["resumed_step"] > 0 and len(result["processes"]) == 2 and result["exported"]
    assert result["tokens_per_second"] > 0 and result["record"]["steps"] > result["resumed_step"]
    told = gpu.run_rows.tell_run({**result, **tiny_lab.record.result("run")})
    assert f"resumed from step {result['resumed_step']}" in told


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
