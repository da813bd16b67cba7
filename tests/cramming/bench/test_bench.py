"""The verb `bench` on shapes so small that the processes' start is what takes time."""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cramming.bench import gate, tables, tricks, verdicts, worker
from cramming.bench import main as bench
from cramming.bench.worker import Candidate, Steps, Worker, topic_batches
from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.device import DeviceInfo
from cramming.invocation import Invocation
from cramming.objectives.masking import MaskedTargets

Compose = Callable[..., dict[str, Any]]
TINY = [
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=48",
    "train.batch_size=4",
    "train.micro_batch=4",
    "train.sequence_length=16",
    "optim.lr=0.01",
]
CONDITIONS: dict[str, Any] = {
    "vocab_size": 128,
    "rounds": 2,
    "steps": 1,
    "gate_steps": 40,
    "gate_vocab_size": 64,
}
GATE = "model.hidden_size=32 train.batch_size=16 train.micro_batch=16"
HERE = Invocation(device="cpu")


@pytest.fixture
def measured(compose: Compose, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """`measured("bf16")`: the raw numbers and the lines of the table after a call of `bench` for some rows."""

    def run(only: str, *more: str) -> tuple[dict[str, Any], list[str]]:
        recipe = compose(*TINY, f"gates={tmp_path}/gates.json", *more)
        files = {"out": tmp_path / "tricks.md", "raw": tmp_path}
        bench.main(recipe, HERE, only=only, gate=GATE, **files, **CONDITIONS)
        (raw,) = tmp_path.glob("tricks_*.json")
        return json.loads(raw.read_text()), (tmp_path / "tricks.md").read_text().splitlines()

    return run


def test_tricks_are_measured_judged_and_written(measured: Any, tmp_path: Path) -> None:
    raw, lines = measured("checkpoint all")
    assert any("| checkpoint all |" in line and "passed (" in line for line in lines)
    (row,) = raw["rows"]
    assert len(row["raw_seconds"]["base"]) == len(row["raw_seconds"]["other"]) == 2
    assert row["tokens_per_second"] > 0 and row["peak_bytes"] > 0
    (here,) = verdicts.load(tmp_path / "gates.json").values()
    assert here.verdicts["checkpoint all"].passed and here.verdicts["checkpoint all"].steps == 40
    (floor,) = raw["floors"]
    assert len(floor["distances"]) == gate.REPETITIONS
    assert here.floors["1.19e-07"]["distances"] == floor["distances"]
    assert any(
        "3 repetitions of the reference with weights perturbed by 1.2e-07" in line for line in lines
    )


def test_a_call_for_some_rows_adds_to_those_of_before(
    measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows add up if they were measured under the same conditions; a new measurement replaces its row."""
    floor, count = gate.NoiseFloor(2.0**-23, [[0.0]]), itertools.count()

    def with_floor(*arguments: Any) -> gate.Curves:
        curves = gate.Curves(*arguments)
        curves.floors[floor.rounding] = floor
        return curves

    monkeypatch.setattr(bench, "Curves", with_floor)
    monkeypatch.setattr(bench, "measure", lambda *_: {"error": f"measurement {next(count)}"})
    monkeypatch.setattr(bench.Bench.__init__, "__defaults__", (FakeWorker,))

    def names_and_errors(only: str, *more: str) -> list[tuple[str, str]]:
        raw, lines = measured(only, *more)
        assert raw["floors"] == [{"rounding": 2.0**-23, "distances": [[0.0]]}]
        rows = [(row["name"], row["error"]) for row in raw["rows"]]
        assert [line.split(" | ")[0] for line in lines if "measurement" in line] == [
            f"| {name}" for name, _ in rows
        ]
        return rows

    assert names_and_errors("accumulation x4") == [("accumulation x4", "measurement 0")]
    added = [("bf16", "measurement 1"), ("accumulation x4", "measurement 0")]
    assert names_and_errors("bf16") == added  # in the table's order
    assert names_and_errors("accumulation x4") == [added[0], ("accumulation x4", "measurement 2")]
    assert names_and_errors("bf16", "train.batch_size=8") == [
        ("bf16", "measurement 3")
    ]  # other conditions


@pytest.mark.slow
def test_another_algorithm_says_what_it_learned(measured: Any, tmp_path: Path) -> None:
    raw, lines = measured("LAMB, square-root rule")
    (row,) = raw["rows"]
    assert row["learned"]["fall"] > 0.1 and row["learned"]["reference"] > 0.3
    assert any("(learned " in line for line in lines) and not (tmp_path / "gates.json").exists()


@pytest.mark.parametrize(
    ("override", "options", "message"),
    [
        ("seed=0", {"only": "magic"}, r"^--only=magic: .*last layer at targets"),
        ("optim=sgd", {}, "the row '8-bit AdamW': unknown setting optim.eps"),
        ("seed=0", {"gate_steps": 1}, r"--gate-steps=1: too few"),
        ("seed=0", {"gate": "model.wdith=3"}, r"--gate: unknown setting model.wdith"),
    ],
)
def test_what_cannot_be_measured_is_named(
    compose: Compose, tmp_path: Path, override: str, options: dict[str, Any], message: str
) -> None:
    arguments = {
        "only": None,
        "gate": GATE,
        "out": tmp_path / "a.md",
        "raw": tmp_path,
        **CONDITIONS,
    }
    with pytest.raises(UserError, match=message):
        bench.main(compose(*TINY, override), HERE, **{**arguments, **options})


def test_a_worker_that_cannot_build_says_why(compose: Compose) -> None:
    settings = compose(*TINY, "attention.kernel=magic")
    with pytest.raises(UserError, match=r"bench: a: .*kernel=magic: "):
        Worker({"name": "a", "settings": settings, "vocab_size": 128, "device": "cpu"})


def test_rows_of_other_devices_say_so(measured: Any, tmp_path: Path) -> None:
    _, lines = measured("attention varlen; attention flex; fp8")
    assert len([line for line in lines if "not run here: needs CUDA" in line]) == 3
    assert not (tmp_path / "gates.json").exists()


def test_a_worker_leaves_no_file_behind() -> None:
    """Compiled code goes where `TORCHINDUCTOR_CACHE_DIR` says, other files to `TMPDIR`."""
    write = (
        "import json, os, tempfile, pathlib\n"
        "input()\n"
        "cache = pathlib.Path(os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
        "cache.mkdir(); (cache / 'kernel').touch()\n"
        "print(json.dumps([str(cache), tempfile.mkdtemp()]))\n"
    )
    with Worker({"name": "a"}, [sys.executable, "-c", write]) as worker:
        folders = [Path(str(folder)) for folder in worker.facts]
    assert len(folders) == 2 and not any(folder.exists() for folder in folders)


@pytest.mark.slow
def test_the_best_stack_is_judged_and_leaves_nothing_compiled_behind(
    measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    stack = tricks.best("cpu", "fp32")  # whatever this machine has: the test is quick in fp32 only
    monkeypatch.setattr(tricks, "best", lambda *_: stack)
    measured(tricks.BEST)
    (here,) = verdicts.load(tmp_path / "gates.json").values()
    assert here.verdicts[tricks.BEST].passed
    assert not list(temporary.iterdir())


ROW = {"name": "a", "about": "b", "date": "2026-11-22", "commit": "aaa"}


def test_other_devices_keep_their_tables(compose: Compose, tmp_path: Path) -> None:
    out, rows = tmp_path / "t.md", [ROW | {"error": "no such device"}]
    for device in ("First", "Second", "First"):
        described = DeviceInfo("cpu", device, 1, None)
        tables.write(out, tmp_path, rows, described, compose(*TINY), CONDITIONS, [])
    titles = [line for line in out.read_text().splitlines() if line.startswith("## ")]
    assert titles == ["## tricks: First", "## tricks: Second"]


def test_a_utilisation_above_one_is_a_dash() -> None:
    row = ROW | {
        "shape": "full",
        "tokens_per_second": 1e6,
        "speedup": 1.0,
        "flops_per_token": 1e6,
        "peak_bytes": 2e6,
        "base_peak_bytes": 1e6,
        "precision": "bf16",
        "learned": {"fall": 1.0, "reference": 2.0},
    }
    rows = [row | {"ceiling_flops": c} for c in (2e12, 1e12, 9e11)]
    rows.append(row | {"ceiling_flops": 8e11, "precision": "fp8"})
    _, _, *lines, _, formula = tables.tricks_table(rows)
    assert [line.split(" | ")[4] for line in lines] == ["50%", "100%", "–", "125% of bf16's"]
    assert "more than 100 %" in formula and "fp8" in formula


@pytest.mark.parametrize("tf32", [True, False])
def test_the_ceiling_is_measured_as_it_is_named_and_leaves_no_setting(
    tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_float32_matmul_precision("medium")
    seen: list[str] = []
    monkeypatch.setattr(
        bench.devices,
        "synchronize",
        lambda device: seen.append(torch.get_float32_matmul_precision()),
    )
    assert bench.matmul_flops(torch.device("cpu"), torch.float32, tf32, seconds=0) > 0
    assert (
        set(seen) == {"high" if tf32 else "highest"}
        and torch.get_float32_matmul_precision() == "medium"
    )


class FakeWorker:
    """A candidate that is told what to do and does nothing."""

    def __init__(self, spec: dict[str, Any]) -> None:
        mode = spec["settings"]["precision"]["mode"]
        self.facts = {"flops_per_token": 1.0, "precision": "bf16" if mode == "auto" else mode}

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def run(self, first: int, count: int) -> Steps:
        return Steps([1.0] * count, [1.0] * count, 1)


def test_a_mode_is_measured_by_products_of_its_own_format(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench,
        "matmul_flops",
        lambda device, dtype, tf32: {torch.float32: 1.0 + tf32}.get(dtype, 4.0),
    )
    settings, rows = compose(*TINY), {trick.name: trick for trick in tricks.TRICKS}
    config = bench.BenchConfig(**CONDITIONS, gate=bench.changes_of_gate(GATE))
    with ExitStack() as running:
        on_gpu = bench.Bench(settings, config, torch.device("cuda"), running, FakeWorker)  # type: ignore[arg-type]
        names = ("compile blocks", "tf32", "compile model", "bf16")
        assert [on_gpu.row(rows[name])["ceiling_flops"] for name in names] == [1, 2, 1, 4]


def test_a_gpus_batches_are_made_ahead_in_pinned_memory(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.clone()) or pinned[-1]
    )
    candidate = Candidate(
        {"settings": compose(*TINY), "vocab_size": 128, "micro_batches": 2}, torch.device("cpu")
    )
    cpu = list(itertools.chain(*candidate.batches(1, 2)))
    candidate.device = torch.device("cuda")
    gpu = list(itertools.chain(*candidate.batches(1, 2)))
    tensors = [
        (b.ids_T, b.positions_T, b.packing.bounds_S, b.target_positions_M, b.target_ids_M)
        for b in gpu
    ]
    assert len(gpu) == 4 and all(
        any(tensor is other for other in pinned) for tensor in itertools.chain(*tensors)
    )
    assert [batch.ids_T.tolist() for batch in gpu] == [batch.ids_T.tolist() for batch in cpu]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_step_is_timed_with_its_batches_made_ahead_as_in_training(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """On a GPU: a whole step's micro-batches, the first step's too. On a CPU making them is part of the step."""
    settings = compose(*TINY, "runtime.prefetch=1")
    candidate = Candidate(
        {"settings": settings, "vocab_size": 128, "micro_batches": 4}, torch.device("cpu")
    )
    make, made, at_clock, ahead = candidate.source.batch, list[int](), list[int](), list[bool]()

    def batch(first: int, rows: int) -> Batch:
        made.append(first)
        return make(first, rows)

    def step(batches: Any, index: int) -> float:
        until = time.monotonic() + (10 if place == "cuda" else 0)
        while len(made) < 4 * (index + 2) and time.monotonic() < until:
            time.sleep(0.01)
        ahead.append(len(made) >= 4 * (index + 2))  # those of the next step
        return 0.0

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(worker.devices, "synchronize", lambda device: None)
    monkeypatch.setattr(
        worker, "time", SimpleNamespace(perf_counter=lambda: at_clock.append(len(made)) or 0.0)
    )
    monkeypatch.setattr(candidate, "source", SimpleNamespace(batch=batch))
    monkeypatch.setattr(candidate, "step", step)
    candidate.device = torch.device(place)
    candidate.run(0, 2)
    assert ahead == [place == "cuda"] * 2 and (at_clock[0] >= 4) == (place == "cuda")


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_synthetic_text_repeats_and_stays_in_the_vocabulary(packing: Any) -> None:
    objective = MaskedTargets(0.25, 0.8, 0.1)
    first, repeated = (topic_batches(objective, 64, 32, packing, 4).batch(8, 4) for _ in range(2))
    assert first.ids_T.equal(repeated.ids_T) and int(first.ids_T.max()) < 64
    assert not first.ids_T.equal(
        topic_batches(objective, 64, 32, packing, 4, seed=1).batch(8, 4).ids_T
    )
