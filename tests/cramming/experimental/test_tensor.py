"""Tensor parallel runs are the run of one process: losses, gradient norms, validation, checkpoints; and what they cost.

The processes are started once, for all cases.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cramming.config import UserError
from cramming.model.config import ModelConfig
from cramming.model.heads import MaskedLM
from cramming.recipe import Config, Hardware, check
from tests.cramming.parallel.rank_worker import assert_same, run_cases, train

PARTS = [
    "model.local_window=8",
    "model.global_every=2",
    "model.value_embeddings=1",
    "model.value_residual=true",
    "model.attention_gate=true",
    "model.qk_norm=true",
]
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
    "dp2 tp2 zero3": (
        ["model=bert-base", "model.num_layers=2"],
        ["parallel=zero3", *DP2, *BY_TOKENS],
    ),
}


@pytest.fixture(scope="module")
def spread(
    case: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Results of every rank for each case.

    Two ranks leave a checkpoint of step 10, from which four resume, in two ways, and leave one of step 20.
    """
    folder = tmp_path_factory.mktemp("spread")
    ten, twenty = str(folder / "ten.pt"), str(folder / "twenty.pt")
    cases = {
        **{name: case(model + how, ranks=2) for name, (model, how) in TWO.items()},
        "saved": case(["model=best", *TP2], ranks=2, steps=10, save=ten),
        **{name: case(model + how, ranks=4) for name, (model, how) in FOUR.items()},
        "resumed": case(["model=best", *TP4, *BY_TOKENS], ranks=4, steps=10, load=ten, save=twenty),
        "sharded": case(["model=best", "parallel=zero2", *DP2], ranks=4, steps=20, load=ten),
    }
    return {**run_cases(folder, cases), "ten": ten, "twenty": twenty}


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_losses_are_those_of_one_process(spread: Any, alone: Any, name: str) -> None:
    each, single = spread[name], alone((TWO | FOUR)[name][0])
    for rank_result in each:
        assert rank_result["steps"] == each[0]["steps"]
        assert rank_result["drift"] == 0.0, "parameters that all ranks have are the same on all"
        assert rank_result["masks_differ"], "dropout on what is cut"
        assert_same(name, rank_result["steps"], single["steps"])
        assert rank_result["validation"][0] == pytest.approx(single["validation"][0], rel=1e-5)


def test_a_checkpoint_of_two_ranks_goes_on_in_four_and_in_one(
    case: Callable[..., dict[str, Any]], spread: Any, alone: Any
) -> None:
    def one_from(file: str, steps: int) -> list[list[float]]:
        steps_of_rank: list[list[float]] = train(
            case(["model=best"], steps=steps, load=spread[file])
        )["steps"]
        return steps_of_rank

    expected = alone(["model=best"])["steps"]
    assert_same(
        "2 to 4", spread["saved"][0]["steps"] + spread["resumed"][0]["steps"], expected[:20]
    )
    assert_same("2 to 2 x 2", spread["sharded"][0]["steps"], expected[10:])
    assert_same("2 to 1", one_from("ten", 20), expected[10:])
    assert_same("4 to 1", one_from("twenty", 10), expected[20:])


def whole_model(case: dict[str, Any]) -> tuple[ModelConfig, dict[str, int]]:
    """Its configuration, and the size of each parameter."""
    config = replace(Config.of(case["settings"]).model, vocab_size=320)
    return config, {name: p.numel() for name, p in MaskedLM(config).named_parameters()}


CUT = (
    "qkv.weight",
    "out.weight",
    "up.weight",
    "up.bias",
    "down.weight",
    "gate.weight",
    "tokens.weight",
)


@pytest.mark.parametrize("name", [*TWO, "tp4"])
def test_a_rank_holds_its_part_only(spread: Any, case: Any, name: str) -> None:
    _, sizes = whole_model(case((TWO | FOUR)[name][0]))
    cut = (*CUT, "decoder_weight", "decoder_bias")
    held = sum(n // len(spread[name]) if key.endswith(cut) else n for key, n in sizes.items())
    for rank_result in spread[name]:
        assert rank_result["parameters"] == held
        assert rank_result["moments"] == 2 * held


@pytest.mark.parametrize("name", list(TWO))
def test_what_is_exchanged_follows_the_formula(spread: Any, case: Any, name: str) -> None:
    """docs/explanation/experimental.md has it; the few numbers of the gradient's norm are not counted."""
    model, sizes = whole_model(case(TWO[name][0]))
    layers, late, width, rank_result = (
        model.num_layers,
        model.late_layers,
        model.hidden_size,
        spread[name][0],
    )
    passes, targets, counted = (
        len(rank_result["targets"]),
        rank_result["targets"][0],
        rank_result["collectives"],
    )
    stream, late_stream = 8 * 32 // passes * width, targets * width
    early = layers - late if "by tokens" in name else 0
    summed = stream * (1 + 4 * (layers - early) - 3 * late) + 4 * late * late_stream + 4 * targets
    # parameters that all have, and of whose gradient each makes a part
    in_parts = r"(qkv|out|down)\.bias|[qk]_norm\.weight|value_scales"
    in_parts += "".join(
        rf"|blocks\.{layer}\.(attn|mlp)_norm" for layer in range(early)
    ) + "|taps" * (early > 0)
    once = sum(n for key, n in sizes.items() if re.search(in_parts, key))
    assert counted["all_reduce"] == passes * summed + once
    if early:
        gathers, scatters = (
            4 * early + 1 + late + model.num_convolutions,
            4 * early + model.num_convolutions,
        )
        assert counted["all_gather_into_tensor"] == passes * gathers * stream // 2
        assert counted["reduce_scatter_tensor"] == passes * scatters * stream


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            ["parallel.tp=3"],
            "parallel.tp=3: does not divide model.num_heads=4",
        ),
        (
            ["parallel.tp=2", "model.vocab_size=301"],
            "parallel.tp=2: does not divide model.vocab_size=301",
        ),
        (
            ["parallel.tp=2", "parallel.sequence=true", "train.sequence_length=31"],
            "train.sequence_length=31",
        ),
        (["parallel.tp=2", "objective=rtd"], "objective.name=rtd: not with parallel.tp"),
        (["parallel.tp=2", "optim=muon"], "optim.name=muon: not where a process has a part"),
        (
            ["parallel.tp=2", "runtime.compile=blocks"],
            "runtime.compile=blocks: not with parallel.tp",
        ),
        (
            ["parallel.tp=2", "train.micro_batch=auto"],
            "train.micro_batch=auto: not with parallel.tp=2",
        ),
        (
            ["parallel.tp=2", "parallel.compression=bf16"],
            "parallel.tp=2: not with parallel.compression",
        ),
        (["parallel.sequence=true"], "parallel.sequence=true: needs parallel.tp=2"),
        (
            ["parallel.tp=2", "parallel.sequence=true", "model.unet_skips=true"],
            "parallel.sequence=true: not with model.unet_skips",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(
    case: Callable[..., dict[str, Any]], overrides: list[str], names: str
) -> None:
    settings = case(overrides)["settings"]
    with pytest.raises(UserError) as error:
        config = Config.of(settings)
        check(config, Hardware("cpu", "a CPU", "fp32", processes=config.parallel.tp))
    assert names in str(error.value)
