"""The verb `bench` on shapes so small that the processes' start is what takes time."""

import importlib.util
import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from cramming.bench import gate, sides, tables, tricks
from cramming.bench import main as bench
from cramming.bench.data import topic_batches
from cramming.bench.sides import SIDES, Common
from cramming.bench.worker import Steps, Worker
from cramming.cli import with_positional
from cramming.config import UserError, build
from cramming.data.masking import ObjectiveConfig
from cramming.device import DeviceInfo

TINY = [
    "device=cpu", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2", "model.intermediate_size=48",
    "train.batch_size=4", "train.micro_batch=4", "train.sequence_length=16", "bench.vocab_size=128", "bench.rounds=2",
    "bench.steps=1", "bench.gate_steps=40", "bench.gate_vocab_size=64", "optim.lr=0.01",
    "bench.gate={model: {hidden_size: 32}, train: {batch_size: 16, micro_batch: 16}}",
]  # fmt: skip


def test_tricks_are_measured_judged_and_written(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    settings = compose(
        *TINY,
        f"bench.out={tmp_path}/tricks.md",
        f"bench.raw={tmp_path}",
        f"gates={tmp_path}/gates.json",
        "bench.only=[checkpoint all]",
    )
    bench.main(settings)
    table = (tmp_path / "tricks.md").read_text()
    assert "| checkpoint all |" in table and "passed (" in table
    (raw,) = tmp_path.glob("tricks_*.json")
    (row,) = json.loads(raw.read_text())["rows"]
    assert len(row["raw_seconds"]["base"]) == len(row["raw_seconds"]["other"]) == 2
    assert row["tokens_per_second"] > 0 and row["peak_bytes"] > 0
    (here,) = gate.load(tmp_path / "gates.json").values()
    assert here["verdicts"]["checkpoint all"]["passed"] and here["verdicts"]["checkpoint all"]["steps"] == 40
    (floor,) = json.loads(raw.read_text())["floors"]
    assert len(floor["strays"]) == gate.TWINS and here["floors"]["1.19e-07"]["strays"] == floor["strays"]
    assert "Gate: 3 twins of the reference with weights moved by 1.2e-07 strayed by up to" in table


def test_a_call_for_some_rows_adds_to_those_of_before(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as both were measured under the same conditions; a row measured again takes its own place."""
    files = [f"bench.out={tmp_path}/tricks.md", f"bench.raw={tmp_path}", f"gates={tmp_path}/gates.json"]
    floor, measured = gate.Floor(2.0**-23, [[0.0]]), itertools.count()
    monkeypatch.setattr(bench.Curves, "floors", [floor])
    monkeypatch.setattr(bench, "measure", lambda *_: {"error": f"measurement {next(measured)}"})
    monkeypatch.setattr(bench, "Worker", FakeWorker)

    def names_and_errors(only: str, *more: str) -> list[tuple[str, str]]:
        bench.main(compose(*TINY, *files, f"bench.only=[{only}]", *more))
        (raw,) = tmp_path.glob("tricks_*.json")
        content = json.loads(raw.read_text())
        assert content["floors"] == [{"rounding": 2.0**-23, "strays": [[0.0]]}]
        return [(row["name"], row["error"]) for row in content["rows"]]

    assert names_and_errors("accumulation x4") == [("accumulation x4", "measurement 0")]
    added = [("bf16", "measurement 1"), ("accumulation x4", "measurement 0")]
    assert names_and_errors("bf16") == added  # in the table's order
    lines = (tmp_path / "tricks.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines if "measurement" in line] == ["| bf16", "| accumulation x4"]
    assert names_and_errors("accumulation x4") == [added[0], ("accumulation x4", "measurement 2")]
    assert names_and_errors("bf16", "train.batch_size=8") == [("bf16", "measurement 3")]  # other conditions


@pytest.mark.slow
def test_another_algorithm_says_what_it_learned(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    files = [f"bench.out={tmp_path}/tricks.md", f"bench.raw={tmp_path}", f"gates={tmp_path}/gates.json"]
    bench.main(compose(*TINY, *files, "bench.only=['LAMB, square-root rule']"))
    (raw,) = tmp_path.glob("tricks_*.json")
    (row,) = json.loads(raw.read_text())["rows"]
    assert row["learned"]["fall"] > 0.1 and row["learned"]["reference"] > 0.3
    assert "(learned " in (tmp_path / "tricks.md").read_text() and not (tmp_path / "gates.json").exists()


def test_verdicts_of_an_older_gate_are_refused_before_anything_runs(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "gates.json").write_text('{"here": {"bf16": {"passed": true, "distance": 0.01, "tolerance": 0.05}}}')
    with pytest.raises(UserError, match=r"verdicts in format 1, not 2: .*remove it"):
        bench.main(compose(*TINY, "gates=~/gates.json", f"bench.out={tmp_path}/t.md"))
    assert not (tmp_path / "t.md").exists()


def test_an_unknown_trick_lists_the_known(compose: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"no trick .'magic'.; there are: last layer at targets"):
        bench.main(compose(*TINY, "bench.only=[magic]"))


def test_a_worker_that_cannot_build_says_why(compose: Callable[..., dict[str, Any]]) -> None:
    job = {"side": "ours", "settings": compose(*TINY, "attention.kernel=magic"), "vocab_size": 128, "device": "cpu"}
    with pytest.raises(UserError, match="kernel=magic: choose one of"), Worker(job):
        pass


def test_rows_of_other_devices_say_so(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    files = [f"bench.out={tmp_path}/tricks.md", f"bench.raw={tmp_path}", f"gates={tmp_path}/gates.json"]
    bench.main(compose(*TINY, *files, "bench.only=[attention varlen,attention flex,fp8]"))
    table = (tmp_path / "tricks.md").read_text()
    for name in ("attention varlen", "attention flex", "fp8"):
        (line,) = (line for line in table.splitlines() if line.startswith(f"| {name} |"))
        assert "not run here: needs CUDA" in line
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
    with Worker({"side": "ours"}, [sys.executable, "-c", write]) as worker:
        folders = [Path(str(folder)) for folder in worker.facts]
    assert len(folders) == 2 and not any(folder.exists() for folder in folders)


@pytest.mark.slow
def test_the_best_stack_is_judged_and_leaves_nothing_compiled_behind(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    gates = tmp_path / "gates.json"
    files = [f"bench.out={tmp_path}/tricks.md", f"bench.raw={tmp_path}", f"gates={gates}"]
    stack = tricks.best("cpu", "fp32")  # whatever this machine has: the test is quick in fp32 only
    monkeypatch.setattr(tricks, "best", lambda *_: stack)
    bench.main(compose(*TINY, *files, f"bench.only=[{tricks.BEST}]"))
    (here,) = gate.load(gates).values()
    assert here["verdicts"][tricks.BEST]["passed"]
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bench.shapes=[[256,4,4]]", r"bench: shapes: \[256, 4, 4\] is not hidden size, layers, heads and sequences"),
        ("bench.shapes=[[256,4,5,8]]", "hidden size a multiple of the heads"),
        ("bench.shapes=[[256,0,4,8]]", "all above 0"),
        ("bench.vocab_size=3", "bench: vocab_size=3 is below"),
        ("bench.gate={model: {wdith: 3}}", r"bench.gate.model.wdith: unknown setting"),
    ],
)
def test_what_cannot_be_measured_is_named(compose: Callable[..., dict[str, Any]], override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench.main(compose(*TINY, override))


PEERS = [*TINY, "bench.what=peers", "bench.shapes=[[32, 2, 2, 4]]"]


def peer_rows(tmp_path: Path) -> list[dict[str, Any]]:
    (raw,) = tmp_path.glob("peers_*.json")
    rows: list[dict[str, Any]] = json.loads(raw.read_text())["rows"]
    return rows


def test_a_peer_whose_package_is_missing_is_a_row_that_says_so(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    out = [f"bench.out={tmp_path}/tricks.md", f"bench.raw={tmp_path}"]
    bench.main(compose(*PEERS, *out, "bench.only=[trainer]"))
    (row,) = peer_rows(tmp_path)
    assert row["peer"] == "trainer" and "package accelerate; pip install 'cramming[bench]'" in row["error"]
    assert "not run: bench: trainer: needs the package" in (tmp_path / "tricks.md").read_text()


def test_a_peer_that_cannot_run_is_a_row_that_says_so(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    out = [f"bench.out={tmp_path}/tricks.md", f"bench.raw={tmp_path}"]
    bench.main(compose(*PEERS, *out, "bench.only=[bert loop]", "precision.mode=fp16"))
    (row,) = peer_rows(tmp_path)
    assert "precision.mode=fp16: the plain loop has no loss scaling" in row["error"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs the extra bench")
def test_peers_train_beside_ours(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    bench.main(
        compose(
            *TINY,
            "bench.what=peers",
            "bench.shapes=[[32, 2, 2, 4]]",
            f"bench.out={tmp_path}/tricks.md",
            f"bench.raw={tmp_path}",
        )
    )
    (raw,) = tmp_path.glob("peers_*.json")
    rows = json.loads(raw.read_text())["rows"]
    assert [(r["peer"], r["name"]) for r in rows] == [
        (peer, ours)
        for peer in ("trainer", "bert loop", "modernbert loop")
        for ours in ("ours, eager", "ours, compiled")
    ]
    assert all(r["speedup"] > 0 for r in rows)


def test_other_devices_keep_their_tables(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    out, settings, rows = tmp_path / "t.md", compose(*TINY), [{"name": "a", "about": "b", "error": "no such device"}]
    for device in ("First", "Second", "First"):
        tables.write(out, tmp_path, "tricks", rows, DeviceInfo("cpu", device, 1, None), settings)
    assert [line for line in out.read_text().splitlines() if line.startswith("## ")] == [
        "## tricks: First",
        "## tricks: Second",
    ]


def test_a_utilisation_above_one_is_a_dash() -> None:
    row = {"name": "a", "about": "b", "shape": "full", "tokens_per_second": 1e6, "speedup": 1.0, "flops_per_token": 1e6,
           "peak_bytes": 2e6, "base_peak_bytes": 1e6, "precision": "bf16"}  # fmt: skip
    rows = [row | {"ceiling_flops": c} for c in (2e12, 1e12, 9e11)]
    rows.append(row | {"ceiling_flops": 8e11, "precision": "fp8"})
    _, _, *lines, _, formula = tables.tricks_table(rows)
    assert [line.split(" | ")[4] for line in lines] == ["50%", "100%", "–", "125% of bf16's"]
    assert "A dash: it came to more than 100 %" in formula and "beside fp8" in formula


def test_rows_that_other_code_made_are_named_below_the_table() -> None:
    row = {"about": "b", "error": "no", "date": "2026-11-22", "commit": "aaa"}
    one, two = row | {"name": "one"}, row | {"name": "two", "commit": "bbb"}
    named = ["- 2026-11-22, commit aaa: one", "- 2026-11-22, commit bbb: two"]
    assert tables.tricks_table([one, two])[-2:] == named
    assert not any("commit" in line for line in tables.tricks_table([one, one]))


@pytest.mark.parametrize("tf32", [True, False])
def test_the_ceiling_is_measured_as_it_is_named_and_leaves_no_setting(
    tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_float32_matmul_precision("medium")
    seen: list[str] = []
    monkeypatch.setattr(sides.devices, "synchronize", lambda device: seen.append(torch.get_float32_matmul_precision()))
    assert sides.matmul_flops(torch.device("cpu"), torch.float32, tf32, seconds=0) > 0
    assert set(seen) == {"high" if tf32 else "highest"} and torch.get_float32_matmul_precision() == "medium"


class FakeWorker:
    """A side that is told what to do and does nothing; `jobs` are all that were built."""

    jobs: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, job: dict[str, Any]) -> None:
        self.jobs.append(job)
        self.facts = {"flops_per_token": 1.0, "precision": job["settings"]["precision"]["mode"]}

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def run(self, first: int, count: int) -> Steps:
        return Steps([1.0] * count, [1.0] * count, 1)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a GPU's workers would be told."""
    monkeypatch.setattr(FakeWorker, "jobs", [])
    monkeypatch.setattr(bench, "Worker", FakeWorker)
    monkeypatch.setattr(bench, "resolve", lambda mode, device: "bf16" if mode == "auto" else mode)
    return FakeWorker.jobs


def bench_config(settings: dict[str, Any]) -> bench.BenchConfig:
    return build(bench.BenchConfig, settings["bench"], "bench")


def test_a_mode_is_measured_by_products_of_its_own_format(
    compose: Callable[..., dict[str, Any]], jobs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "matmul_flops", lambda device, dtype, tf32: {torch.float32: 1.0 + tf32}.get(dtype, 4.0))
    settings, rows = compose(*TINY), {trick.name: trick for trick in tricks.TRICKS}
    config, gpu = bench_config(settings), torch.device("cuda")
    with ExitStack() as running:
        pairs = bench.Pairs({"full": settings, "small": settings}, config, gpu, running)
        names = ("compile blocks", "tf32", "compile model", "bf16")
        assert [pairs.row(rows[name])["ceiling_flops"] for name in names] == [1, 2, 1, 4]


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16"])
def test_ours_computes_in_the_peers_number_format(
    compose: Callable[..., dict[str, Any]], jobs: list[dict[str, Any]], precision: str
) -> None:
    settings = compose(*PEERS, f"precision={precision}")
    shape = {"model.hidden_size": 32, "train.batch_size": 4}
    bench.pair(settings, bench_config(settings), torch.device("cuda"), shape, bench.PEERS[1], "32x2")
    assert [job["side"] for job in jobs] == ["bert loop", "ours", "ours"]
    assert all(job["settings"]["precision"] == settings["precision"] for job in jobs)


def test_a_gpus_batches_are_made_ahead_in_pinned_memory(
    compose: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.clone()) or pinned[-1])
    job = {"settings": compose(*TINY), "vocab_size": 128}
    gpu, cpu = (list(Common(job, torch.device(kind)).batches(1, 2)) for kind in ("cuda", "cpu"))
    tensors = [(b.ids_T, b.positions_T, b.packing.bounds_S, b.target_positions_M, b.target_ids_M) for b in gpu]
    assert all(any(tensor is one for one in pinned) for tensor in itertools.chain(*tensors))
    assert [batch.ids_T.tolist() for batch in gpu] == [batch.ids_T.tolist() for batch in cpu]


def test_the_first_word_is_a_setting() -> None:
    assert with_positional("bench", ["peers", "--cfg", "job"]) == ["bench.what=peers", "--cfg", "job"]
    assert with_positional("bench", ["--cfg", "job"]) == ["--cfg", "job"]
    assert with_positional("glue", ["peers"]) == ["peers"]


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_synthetic_text_repeats_and_stays_in_the_vocabulary(packing: str) -> None:
    objective = ObjectiveConfig("mlm", 0.25, 0.8, 0.1)
    first, again = (topic_batches(objective, 64, 32, packing, 4).batch(8, 4) for _ in range(2))
    assert first.ids_T.equal(again.ids_T) and int(first.ids_T.max()) < 64
    assert not first.ids_T.equal(topic_batches(objective, 64, 32, packing, 4, seed=1).batch(8, 4).ids_T)


def test_the_other_trainer_gets_the_constants_of_ours(
    compose: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer  # noqa: F401 - the first import of it puts another module in transformers' place

    given: list[Any] = []

    class Noted:
        def __init__(self, model: Any, arguments: Any, *_: Any, **__: Any) -> None:
            given.append(arguments)

        def train(self) -> Any:
            return SimpleNamespace(training_loss=1.0)

    monkeypatch.setattr("transformers.Trainer", Noted)
    optim = [
        "optim.lr=0.01",
        "optim.scale_rule=sqrt",
        "optim.base_batch=1",
        "optim.betas=[0.8, 0.9]",
        "optim.eps=1.0e-7",
    ]
    job = {"side": "trainer", "settings": compose(*TINY, *optim), "vocab_size": 128, "device": "cpu"}
    SIDES["trainer"](job, torch.device("cpu")).run(0, 1)
    (arguments,) = given
    assert arguments.learning_rate == pytest.approx(0.02)  # four sequences
    assert (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon) == (0.8, 0.9, 1e-7)
