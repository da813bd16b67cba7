"""Other trainers get the constants of ours, and one that cannot run is a row that says so."""

import json
import sys
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
        (peer, name) for peer in peers.IN_THIS_PYTHON for name in ours
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

    received: list[Any] = []

    class Noted:
        def __init__(self, model: Any, arguments: Any, *_: Any, **__: Any) -> None:
            received.append(arguments)

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
    (arguments,) = received
    assert arguments.learning_rate == pytest.approx(0.02)  # four sequences
    assert (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon) == (0.8, 0.9, 1e-7)


def predecessor(peers: Any, device: str, *overrides: str, name: str = "predecessor") -> Any:
    """The predecessor's settings by name, and its specification."""
    checkout = peers.Checkout(Path("checkout"), Path("old/bin/python"), [Path("site")])
    spec, *_ = peers.specs_of(name, "64,3,2,8", torch.device(device), overrides, checkout)
    return dict(override.split("=") for override in spec["overrides"]), spec


def test_the_predecessor_trains_the_shapes_of_ours(peers: Any) -> None:
    theirs, spec = predecessor(peers, "cpu", "train.micro_batch=4", "objective.rate=0.2")
    ours = spec["settings"]
    assert theirs["arch"] == "crammed-bert" and ours["model"]["mlp"] == "glu"
    assert int(theirs["arch.hidden_size"]) == ours["model"]["hidden_size"] == 64
    assert int(theirs["arch.num_transformer_layers"]) == ours["model"]["num_layers"] == 3
    assert int(theirs["arch.intermed_size"]) == 2 * ours["model"]["intermediate_size"] == 256
    assert int(theirs["arch.embedding.max_seq_length"]) == peers.LENGTH
    assert int(theirs["train.batch_size"]) == ours["train"]["batch_size"] == 8
    assert int(theirs["impl.microbatch_size"]) == 4
    assert float(theirs["train.objective.mlm_probability"]) == 0.2
    assert spec["flops_per_token"] > 0


def test_the_predecessor_runs_by_its_own_python_and_packages(peers: Any) -> None:
    _, spec = predecessor(peers, "cpu")
    assert [Path(folder) for folder in spec["path"]] == [Path("site").resolve()]
    assert Path(spec["checkout"]) == Path("checkout").resolve()
    assert Path(spec["python"]) == Path.cwd() / "old" / "bin" / "python"


def test_the_predecessor_computes_in_our_number_format_unless_as_it_ships(peers: Any) -> None:
    theirs, spec = predecessor(peers, "cuda", "precision=bf16")
    assert spec["precision"] == "bf16"
    assert theirs["impl.mixed_precision_target_dtype"] == "bfloat16"
    assert theirs["impl._inductor_vars.max_autotune_gemm"] == "False"
    theirs, spec = predecessor(peers, "cuda", "precision=bf16", name="predecessor as it ships")
    assert spec["precision"] == "fp16"
    assert not [name for name in theirs if name.startswith("impl._inductor_vars")]


def test_a_number_format_that_the_predecessor_lacks_is_refused(peers: Any) -> None:
    with pytest.raises(peers.UserError, match="fp8: the predecessor lacks it"):
        predecessor(peers, "cuda", "precision=fp8")


def test_the_predecessor_needs_its_source(peers: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        measured(peers, tmp_path / "out.md", "--only", "predecessor")


ENGINE = """
import torch


def construct_model(arch, vocabulary):
    return torch.nn.Embedding(vocabulary, arch["width"])


class Engine:
    def __init__(self, model):
        self.model = model

    def train(self, mode):
        pass

    def to_device(self, batch):
        return batch

    def step(self, batch):
        hidden = (batch["labels"] >= 0).sum()
        assert hidden == 4 and (batch["input_ids"] == 4).sum() == hidden
        return self.amp_settings["dtype"].itemsize * torch.ones(())


def load_backend(model, dataset, tokenizer, train, impl, setup):
    return Engine(model), None, None, None
"""
CONFIG = """
arch: {width: 2, embedding: {max_seq_length: 8}}
train: {batch_size: 4, pretrain_in_train_mode: false, objective: {mlm_probability: 0.25}}
impl: {microbatch_size: 2}
"""


def test_the_worker_takes_the_engine_from_the_checkout_not_from_this_project(
    peers: Any, tmp_path: Path
) -> None:
    """A stand-in for the predecessor, of the same package name as ours, trained by the real worker process."""
    package = tmp_path / "cramming"
    (package / "config").mkdir(parents=True)
    (package / "__init__.py").write_text(ENGINE)
    (package / "config" / "cfg_pretrain.yaml").write_text(CONFIG)
    spec = {
        "name": "predecessor",
        "device": "cpu",
        "vocab_size": 32,
        "checkout": str(tmp_path),
        "python": sys.executable,
        "path": [],
        "overrides": [],
        "precision": "bf16",
        "flops_per_token": 7.0,
    }
    with peers.worker_of(spec) as worker:
        steps = worker.run(0, 3)
        assert worker.facts["micro_batches"] == 2 and worker.facts["flops_per_token"] == 7.0
    assert len(steps.seconds) == 3 and steps.losses == [2.0] * 3  # autocast to a type of two bytes
    assert steps.peak_bytes > 0
