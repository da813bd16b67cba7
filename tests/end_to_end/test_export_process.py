"""Exported folders of every family, used where this package is not: in a process with torch and transformers alone.

The quick test shows the process nothing but those two and what they need; the slow ones install them afresh, in the
present and in the previous major version.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from cramming import verbs
from cramming.config import build
from cramming.invocation import Invocation
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.model.export import save_pretrained
from cramming.model.heads import MaskedLM
from data_prep.tokenizer.load import TokenizerConfig
from data_prep.tokenizer.train import train
from eval import export
from eval.export_clients import CLIENTS
from tests.conftest import TINY_RUN

PROGRAM = Path(__file__).with_name("round_trip.py")
ROOT = PROGRAM.parents[2]
EXAMPLE = ROOT / "docs" / "sentence_embeddings.py"
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "intermediate_size": 48,
}
SIZES |= {"max_length": 64}
TEXT = "the cat sat on the mat while a dog ran home and my black bird saw the red sun"


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, compose: Callable[..., dict[str, Any]]
) -> dict[str, Path]:
    """A folder per family, with logits of our own model beside the weights."""
    torch.manual_seed(3)
    place = tmp_path_factory.mktemp("folders")
    for kind in ("wordpiece", "bpe"):
        settings = TokenizerConfig(
            kind=kind, vocab_size=300, lowercase=True, min_frequency=2, sample_mb=1, path=None
        )
        train([f"{TEXT} {number}" for number in range(200)], settings).save(
            str(place / f"{kind}.json")
        )
    families: dict[str, tuple[ModelConfig, str]] = {
        name: (
            build(ModelConfig, {**compose(f"model={name}")["model"], **SIZES}, "model"),
            "wordpiece",
        )
        for name in ("bert-base", "modern", "tiny", "crammed-bert")
    }
    families["local"] = (
        replace(families["modern"][0], first_attn_norm=True, qk_norm=True, local_window=8),
        "bpe",
    )
    for name, (config, kind) in families.items():
        model = MaskedLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        save_pretrained(model, place / name, place / f"{kind}.json")
        torch.save(expected(model), place / name / "expected.pt")
    return {name: place / name for name in families}


@torch.no_grad()
def expected(model: MaskedLM) -> dict[str, torch.Tensor]:
    """Ids of two rows, the second half padding, and our logits."""
    ids, lengths = torch.randint(5, 300, (2, 30)), [30, 15]
    mask = (torch.arange(30) < torch.tensor(lengths)[:, None]).long()
    positions = torch.cat([torch.arange(length) for length in lengths])
    packing = Packing(torch.tensor([0, 30, 45], dtype=torch.int32), None, 30)
    logits = torch.zeros(2, 30, SIZES["vocab_size"])
    logits[mask == 1] = model.logits(ids[mask == 1], positions, packing, torch.arange(45))
    return {"ids": ids, "mask": mask, "logits": logits}


def needed_by(*names: str) -> dict[str, Distribution]:
    """The installed packages of these names and all that they need, without extras."""
    distributions: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in distributions:
            continue
        try:
            distributions[name] = distribution(name)
        except PackageNotFoundError:
            continue
        needs = map(Requirement, distributions[name].requires or [])
        waiting += [
            need.name
            for need in needs
            if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
    return distributions


def use(python: list[str], folders: list[Path], cache: Path) -> list[dict[str, Any]]:
    """Return the results of the program in each folder."""
    environment = os.environ | {
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [*python, *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=cache,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_torch_and_transformers_are_enough(folders: dict[str, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for package in needed_by("torch", "transformers").values():
        for top in {Path(file).parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            source = Path(str(package.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    code = f"import runpy, sys; sys.path.append({str(site)!r}); runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    results = use([sys.executable, "-I", "-S", "-c", code], [folders["crammed-bert"]], tmp_path)
    assert [result["folder"] for result in results] == ["crammed-bert"]


def fresh_environment(folder: Path, *packages: str) -> str:
    """Return the Python of a new virtual environment with these packages and the torch of constraints.txt."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torch_pin = next(line for line in constraints.splitlines() if line.startswith("torch=="))
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", *packages, torch_pin], check=True)
    return python


VERSIONS = ["transformers>=5,<6", "transformers>=4.57,<5"]
CLIENT_PACKAGES = ["sentence-transformers", "onnx", "onnxscript", "onnxruntime", "faiss-cpu"]
CLIENT_PACKAGES.append("setfit")


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, compose: Callable[..., dict[str, Any]]
) -> Path:
    """Runs of twelve steps with the shapes of three families, and a tokenizer trained on real words."""
    runs = tmp_path_factory.mktemp("runs")
    settings = [option for option in TINY_RUN if not option.startswith("model=")]
    for name in ("bert-base", "modern", "crammed-bert"):
        recipe = compose("data=embedded", "tokenizer.vocab_size=512", f"model={name}", *settings)
        invocation = Invocation(runs=runs, name=name, corpora=runs / "corpora", device="cpu")
        for verb in ("prepare", "pretrain"):
            verbs.main_of(verb)(recipe, invocation)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_client_in_a_fresh_environment(version: str, trained: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "venv", version, *CLIENT_PACKAGES)
    options = {"model": None, "license": None, "language": None, "test": True, "python": python}
    for name in ("bert-base", "modern", "crammed-bert"):
        export.main(Invocation(name=name, runs=trained), out=tmp_path / name, **options)
        card = (tmp_path / name / "README.md").read_text(encoding="utf-8")
        lines = card.split("<details>")[0].splitlines()
        table = [line for line in lines if line.split(" | ")[0][2:] in CLIENTS]
        print(name, *table, sep="\n")
        assert len(table) == len(CLIENTS)
        assert not any("| not " in row for row in table)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_family_in_a_fresh_environment(
    version: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    python = fresh_environment(tmp_path / "venv", version)
    results = use([python, str(PROGRAM)], list(folders.values()), tmp_path)
    print(*results, sep="\n")
    assert [result["folder"] for result in results] == list(folders)
    assert all(
        result["transformers"].split(".")[0] == version[len("transformers>=")] for result in results
    )


@pytest.mark.slow
def test_the_example_of_sentence_embeddings_runs(folders: dict[str, Path], tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "venv", "sentence-transformers[train]>=6")
    for family in ("crammed-bert", "modern"):
        arguments = [
            str(EXAMPLE),
            str(folders[family]),
            "--device",
            "cpu",
            "--out",
            str(tmp_path / family),
        ]
        arguments += ["--learning-rate", "0.01", "--epochs", "20"]  # the weights are random
        done = subprocess.run(
            [python, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        before, after = map(int, re.findall(r"(\d+)% (?:before|after)", done.stdout))
        assert before < after and "32 numbers a text" in done.stdout
