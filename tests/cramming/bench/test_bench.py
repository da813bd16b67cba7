"""The verb `bench` on shapes so small that the processes' start is what takes time."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.bench import main as bench
from cramming.bench import report
from cramming.bench.data import topic_batches
from cramming.bench.worker import Worker
from cramming.cli import with_positional
from cramming.config import UserError
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
    (verdicts,) = json.loads((tmp_path / "gates.json").read_text()).values()
    assert verdicts["checkpoint all"]["passed"] and verdicts["checkpoint all"]["steps"] == 40


def test_an_unknown_trick_lists_the_known(compose: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"no trick .'magic'. here; there are: last layer at targets"):
        bench.main(compose(*TINY, "bench.only=[magic]"))


def test_a_worker_that_cannot_build_says_why(compose: Callable[..., dict[str, Any]]) -> None:
    job = {"side": "ours", "settings": compose(*TINY, "attention.kernel=magic"), "vocab_size": 128, "device": "cpu"}
    with pytest.raises(UserError, match="kernel=magic: choose one of"), Worker(job):
        pass


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
        report.write(out, tmp_path, "tricks", rows, DeviceInfo("cpu", device, 1, None), settings)
    assert [line for line in out.read_text().splitlines() if line.startswith("## ")] == [
        "## tricks: First",
        "## tricks: Second",
    ]


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
