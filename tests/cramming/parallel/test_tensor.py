"""Tensor parallel runs are the run of one process: losses, gradient norms, validation, checkpoints; and what they cost.

Each number of ranks is started once, for all of its cases.
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cramming.checks import Config, Place, check
from cramming.config import UserError
from cramming.model.config import ModelConfig
from cramming.model.heads import MaskedLM

from .tensor_worker import train

WORKER = Path(__file__).parent / "tensor_worker.py"
STEPS = 30
SMALL = [
    "device=cpu", "precision=fp32", "model.hidden_size=32", "model.num_heads=4", "model.num_layers=3",
    "model.intermediate_size=48", "model.max_length=64", "train.sequence_length=32", "train.batch_size=8",
    "train.micro_batch=8", "train.validation_tokens=512", "optim.clip=0.3", "parallel.dp=null",
]  # fmt: skip
PARTS = [
    "model.local_window=8", "model.global_every=2", "model.value_embeddings=1", "model.value_residual=true",
    "model.attention_gate=true", "model.qk_norm=true",
]  # fmt: skip
RAGGED = ["model=bert-base", "train.packing=documents", "model.tie_embeddings=false"]
TP2, TP4, BY_TOKENS = ["parallel.tp=2"], ["parallel.tp=4"], ["parallel.sequence=true"]
DP2 = ["train.micro_batch=4", *TP2]

# name -> (overrides of the single process too, those of how it is spread)
TWO: dict[str, tuple[list[str], list[str]]] = {
    "tiny": (["model=tiny"], TP2),
    "bert-base": (["model=bert-base"], TP2),
    "crammed-bert": (["model=crammed-bert"], TP2),
    "modern": (["model=modern", *PARTS], TP2),
    "best": (["model=best"], ["train.micro_batch=4", *TP2]),
    "bert-base by tokens": (RAGGED, TP2 + BY_TOKENS),
    "best by tokens": (["model=best", "optim=lamb"], TP2 + BY_TOKENS),
}
FOUR: dict[str, tuple[list[str], list[str]]] = {
    "tp4": (["model=best", "model.num_layers=2"], TP4),
    "dp2 tp2": (["model=tiny", "model.num_layers=2"], DP2),
    "dp2 tp2 zero3": (["model=bert-base", "model.num_layers=2"], ["parallel=zero3", *DP2, *BY_TOKENS]),
}


@pytest.fixture(scope="module")
def run(compose: Callable[..., dict[str, Any]], tiny_corpus: Path) -> Callable[..., dict[str, Any]]:
    """`run(overrides, steps, ...)`: the arguments of `train`."""

    def of(overrides: list[str], steps: int = STEPS, **files: str | None) -> dict[str, Any]:
        groups = [o for o in overrides if "." not in o.split("=")[0]]
        own = [o for o in overrides if o not in groups]
        settings = compose("optim=adamw-tiny", *groups, f"data.corpus={tiny_corpus}", *SMALL, *own)
        return {"settings": settings, "steps": steps, **files}

    return of


def launch(folder: Path, ranks: int, cases: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Run all cases on so many ranks; of each what every rank found."""
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] % 40_000 + 10_000
    usual = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(folder / "cases.json"), str(folder / "found")]
    processes = [
        subprocess.Popen(command, env={**usual, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)})
        for rank in range(ranks)
    ]
    assert [process.wait(timeout=600) for process in processes] == [0] * ranks
    files = {name: [folder / f"found-{name}-{rank}.json" for rank in range(ranks)] for name in cases}
    return {name: [json.loads(path.read_text()) for path in paths] for name, paths in files.items()}


@pytest.fixture(scope="module")
def two(run: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found; they also leave a checkpoint of step 10."""
    folder = tmp_path_factory.mktemp("two")
    saved = {"saved": run(["model=best", *TP2], steps=10, save=str(folder / "saved.pt"))}
    cases = {name: run(own + how) for name, (own, how) in TWO.items()}
    return {**launch(folder, 2, cases | saved), "file": str(folder / "saved.pt")}


@pytest.fixture(scope="module")
def four(run: Callable[..., dict[str, Any]], two: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four ranks found; they also go on from the two ranks' checkpoint, and leave one of step 20."""
    folder = tmp_path_factory.mktemp("four")
    resumed = run(["model=best", *TP4, *BY_TOKENS], steps=10, load=two["file"], save=str(folder / "saved.pt"))
    sharded = run(["model=best", "parallel=zero2", *DP2], steps=20, load=two["file"])
    cases = {name: run(own + how) for name, (own, how) in FOUR.items()}
    return {
        **launch(folder, 4, {**cases, "resumed": resumed, "sharded": sharded}),
        "file": str(folder / "saved.pt"),
    }


@pytest.fixture(scope="module")
def alone(run: Callable[..., dict[str, Any]]) -> Callable[[list[str]], dict[str, Any]]:
    """What one process finds."""
    found: dict[str, Any] = {}

    def of(overrides: list[str]) -> dict[str, Any]:
        key = " ".join(overrides)
        found[key] = found.get(key) or train(**run(overrides))
        return found[key]

    return of


def assert_same(name: str, found: list[list[float]], expected: list[list[float]]) -> None:
    """Losses within the error of sums in another order, fp32; hits of a tie may differ."""
    for (loss, accuracy, norm), (one_loss, one_accuracy, one_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(one_loss, rel=1e-5), name
        assert accuracy == pytest.approx(one_accuracy, abs=0.01), name
        assert norm == pytest.approx(one_norm, rel=1e-5), name


@pytest.mark.parametrize(("ranks", "name"), [("two", name) for name in TWO] + [("four", name) for name in FOUR])
def test_losses_are_those_of_one_process(request: Any, alone: Any, ranks: str, name: str) -> None:
    each, one = request.getfixturevalue(ranks)[name], alone((TWO | FOUR)[name][0])
    for found in each:
        assert found["steps"] == each[0]["steps"]
        assert found["drift"] == 0.0, "parameters that all ranks have are the same on all"
        assert found["masks_differ"], "dropout on what is cut"
        assert_same(name, found["steps"], one["steps"])
        assert found["validation"][0] == pytest.approx(one["validation"][0], rel=1e-5)


def test_a_checkpoint_of_two_ranks_goes_on_in_four_and_in_one(
    run: Callable[..., dict[str, Any]], two: Any, four: Any, alone: Any
) -> None:
    expected = alone(["model=best"])["steps"]
    for found in (two["saved"][0]["steps"] + four["resumed"][0]["steps"], two["saved"][0]["steps"]):
        assert_same("best", found, expected[: len(found)])
    assert_same("2 to 2 x 2", four["sharded"][0]["steps"], expected[10:])
    assert_same("2 to 1", train(**run(["model=best"], steps=20, load=two["file"]))["steps"], expected[10:])
    assert_same("4 to 1", train(**run(["model=best"], steps=10, load=four["file"]))["steps"], expected[20:])


def whole_model(case: dict[str, Any]) -> tuple[ModelConfig, dict[str, int]]:
    """Its configuration, and the size of each parameter."""
    config = replace(Config.of(case["settings"]).model, vocab_size=320)
    return config, {name: p.numel() for name, p in MaskedLM(config).named_parameters()}


CUT = ("qkv.weight", "out.weight", "up.weight", "up.bias", "down.weight", "gate.weight", "tokens.weight")


@pytest.mark.parametrize(("ranks", "name"), [("two", name) for name in TWO] + [("four", "tp4")])
def test_a_rank_holds_its_part_only(request: Any, run: Any, ranks: str, name: str) -> None:
    _, sizes = whole_model(run(TWO[name][0] if ranks == "two" else FOUR[name][0]))
    size = {"two": 2, "four": 4}[ranks]
    held = sum(n // size if key.endswith((*CUT, "decoder_weight", "decoder_bias")) else n for key, n in sizes.items())
    for found in request.getfixturevalue(ranks)[name]:
        assert found["parameters"] == held
        assert found["moments"] == 2 * held


@pytest.mark.parametrize("name", list(TWO))
def test_what_is_exchanged_follows_the_formula(two: Any, run: Any, name: str) -> None:
    """docs/tricks.md has it; the few numbers of the gradient's norm are not counted."""
    model, sizes = whole_model(run(TWO[name][0]))
    layers, late, width, found = model.num_layers, model.late_layers, model.hidden_size, two[name][0]
    passes, targets, counted = len(found["targets"]), found["targets"][0], found["collectives"]
    stream, kept = 8 * 32 // passes * width, targets * width
    early = layers - late if "by tokens" in name else 0
    summed = stream * (1 + 4 * (layers - early) - 3 * late) + 4 * late * kept + 4 * targets
    # parameters that all have, and of whose gradient each makes a part
    in_parts = r"(qkv|out|down)\.bias|[qk]_norm\.weight|value_scales"
    in_parts += "".join(rf"|blocks\.{layer}\.(attn|mlp)_norm" for layer in range(early)) + "|taps" * (early > 0)
    once = sum(n for key, n in sizes.items() if re.search(in_parts, key))
    assert counted["all_reduce"] == passes * summed + once
    if early:
        gathers, scatters = 4 * early + 1 + late + model.num_convolutions, 4 * early + model.num_convolutions
        assert counted["all_gather_into_tensor"] == passes * gathers * stream // 2
        assert counted["reduce_scatter_tensor"] == passes * scatters * stream


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["parallel.tp=3"], "parallel.tp=3: does not divide all of model.num_heads=4"),
        (["parallel.tp=2", "model.vocab_size=301"], "model.vocab_size=301"),
        (["parallel.tp=2", "parallel.sequence=true", "train.sequence_length=31"], "train.sequence_length=31"),
        (["parallel.tp=2", "objective=rtd"], "parallel.tp=2: not with objective=rtd"),
        (["parallel.tp=2", "optim=muon"], "optim.name=muon: not with parallel=ddp parallel.tp=2, which cut"),
        (["parallel.tp=2", "runtime.compile=blocks"], "work uncompiled only; set it to off"),
        (["parallel.tp=2", "train.micro_batch=auto"], "train.micro_batch=auto: not with"),
        (["parallel.sequence=true"], "parallel.sequence=true: goes with parallel.tp=2"),
        (["parallel.tp=2", "parallel.sequence=true", "model.unet_skips=true"], "without model.unet_skips"),
    ],
)
def test_what_cannot_be_cut_is_refused(run: Callable[..., dict[str, Any]], overrides: list[str], names: str) -> None:
    config = Config.of(run(overrides)["settings"])
    with pytest.raises(UserError) as error:
        check(config, Place("cpu", "a CPU", "fp32", processes=config.parallel.tp))
    assert names in str(error.value)
