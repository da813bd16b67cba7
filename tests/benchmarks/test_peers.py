"""Other trainers get the constants of ours, and one that cannot run is a row that says so."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = ["--shapes", "32,2,2,4", "--rounds", "1", "--steps", "1", "--device", "cpu"]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import peers

    monkeypatch.setattr(peers, "LENGTH", 16)
    monkeypatch.setattr(peers, "VOCABULARY", 128)
    return peers


def measured(peers: Any, out: Path, *arguments: str) -> list[dict[str, Any]]:
    peers.main([*SMALL, "--out", str(out), *arguments])
    raw = out.read_text().split("```json\n")[1].removesuffix("```\n")
    return [json.loads(line) for line in raw.splitlines()]


def test_a_peer_that_cannot_run_is_a_row_that_says_so(peers: Any, tmp_path: Path) -> None:
    (row,) = measured(peers, tmp_path / "out.md", "--only", "bert loop", "--", "precision=fp16")
    assert "precision.mode=fp16: the plain loop has no loss scaling" in row["error"]
    assert "not run: bench: bert loop: precision.mode=fp16" in (tmp_path / "out.md").read_text()


@pytest.mark.slow
def test_peers_are_measured_against_ours(peers: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    rows = measured(peers, tmp_path / "out.md")
    ours = ("ours, eager", "ours, compiled")
    assert [(r["peer"], r["name"]) for r in rows] == [
        (peer, name) for peer in peers.PEERS for name in ours
    ]
    assert all(r["speedup"] > 0 for r in rows)


@pytest.mark.parametrize("overrides", [[], ["precision=fp32"], ["precision=bf16"]])
def test_ours_computes_in_the_peers_number_format(peers: Any, overrides: list[str]) -> None:
    peer, *ours = peers.specs_of("bert loop", "32,2,2,4", torch.device("cuda"), overrides)
    assert peer["peer"] == "bert loop" and all("peer" not in spec for spec in ours)
    assert all(spec["settings"]["precision"] == peer["settings"]["precision"] for spec in ours)


def test_the_other_trainer_gets_the_constants_of_ours(
    peers: Any, monkeypatch: pytest.MonkeyPatch
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
        "optim.lr_scale={rule: sqrt, base_batch: 1}",
        "optim.betas=[0.8, 0.9]",
        "optim.eps=1e-7",
    ]
    spec, *_ = peers.specs_of("trainer", "32,2,2,4", torch.device("cpu"), optim)
    peers.candidate_of(spec, torch.device("cpu")).run(0, 1)
    (arguments,) = given
    assert arguments.learning_rate == pytest.approx(0.02)  # four sequences
    assert (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon) == (0.8, 0.9, 1e-7)
