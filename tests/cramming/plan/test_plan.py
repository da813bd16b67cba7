"""The plan proposes a setting that fits, says so where none does, and needs nothing but the configuration."""

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import device
from cramming.config import UserError, config_folder
from cramming.model.config import flops_per_token
from cramming.plan import main as plan
from cramming.plan import roofline, search
from cramming.plan.cards import CARDS, Card
from cramming.plan.memory import Simulation
from cramming.plan.roofline import POWER_SHARE, Costs
from cramming.plan.search import PlanConfig, find_target, planned_config, tokens_in_budget
from cramming.plan.tracker import Operation
from cramming.recipe import Hardware, check, tiny_defaults
from cramming.record import load_record

Compose = Callable[..., dict[str, Any]]
CARD = "plan.device=RTX 2080 Ti"
SMALL = [
    "model=bert-base",
    "model.hidden_size=64",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=128",
    "tokenizer.vocab_size=1000",
    "train.sequence_length=32",
    "train.batch_size=32",
    "train.micro_batch=8",
    "precision=fp16",
]
TINY = [
    "model.hidden_size=16",
    "model.num_layers=1",
    "model.intermediate_size=16",
    "train.batch_size=2",
    "train.micro_batch=2",
]


def planned(compose: Compose, folder: Path, *overrides: str) -> dict[str, Any]:
    path = folder / "plan.json"
    plan.main(compose(*SMALL, CARD, *overrides, f"plan.json={path}"))
    return json.loads(path.read_text())


def test_a_small_model_on_a_large_card(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(compose, tmp_path, "plan.memory_gb=11", "budget.hours=24")
    assert found["vocab_size"] == 1024  # the tokenizer's limit in whole tiles of 64
    best, first = found["proposed"], found["options"][0]
    assert (first["micro_batch"], first["memory"]["checkpoint_every"]) == (8, 0)  # as configured
    assert best["overrides"] == ["train.micro_batch=32"]
    assert best["tokens_per_second"] == max(o["tokens_per_second"] for o in found["options"])
    assert found["costs"]["tokens"] == pytest.approx(24 * 3600 * best["tokens_per_second"])
    assert found["costs"]["hours"] == pytest.approx(24.0) and found["costs"]["price"] is None
    for option in found["options"]:
        assert sum(option["peak_by_component"].values()) == option["peak_bytes"]
        assert option["fits"] == (option["peak_bytes"] <= found["usable_bytes"])
    text = capsys.readouterr().out
    assert "not measured" in text
    assert (
        text.index("proposed: train.micro_batch=32:")
        < text.index("training: ")
        < text.index("electricity: ")
    )
    assert "price" not in text


def test_tight_memory_takes_checkpointing(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between what the whole batch needs with and without it; and a micro-batch smaller than the batch."""
    every = planned(compose, tmp_path)["options"]
    peaks = {(o["memory"]["checkpoint_every"], o["micro_batch"]): o["peak_bytes"] for o in every}
    between = (peaks[1, 32] + peaks[0, 32]) / 2
    monkeypatch.setitem(search.CONTEXT_BYTES, "cuda", 0)
    monkeypatch.setitem(search.ALLOCATOR_WASTE, "cuda", 0.0)
    found = planned(compose, tmp_path, f"plan.memory_gb={between / 2**30}")
    assert found["proposed"]["peak_bytes"] <= between
    assert found["proposed"]["fits"]
    sizes = {
        o["memory"]["checkpoint_every"]: o["micro_batch"]
        for o in found["options"]
        if o["micro_batch"] != 8
    }
    assert sizes[1] == 32
    assert sizes.get(0, 8) < 32


def test_where_nothing_fits_it_says_what_is_missing(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        UserError,
        match=r"plan\.memory_gb=0\.61: nothing fits; the least .*train\.micro_batch=1.*GiB",
    ):
        planned(compose, tmp_path, "plan.memory_gb=0.61", "model.hidden_size=512")
    assert " NO " in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["proposed"] is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.device=GTX 480"], "choose one of auto, cpu, cuda, RTX 2080 Ti"),
        (
            ["attention.kernel=varlen"],
            "attention.kernel=varlen: FlashAttention needs an Ampere or newer GPU",
        ),
        (
            ["attention.kernel=varlen", "plan.device=A100", "precision.mode=fp32"],
            "FlashAttention computes in 16 bits",
        ),
        (
            ["attention.kernel=varlen", "plan.device=A100", "model.attention_dropout=0.1"],
            "attention.kernel=varlen: has no dropout",
        ),
        (
            ["attention.kernel=varlen", "plan.device=cpu"],
            "attention.kernel=varlen: runs on CUDA only",
        ),
        (
            ["attention.kernel=flex", "model.attention_dropout=0.1"],
            "attention.kernel=flex: has no dropout",
        ),
        (["attention.kernel=products"], "attention.kernel=products: is for CPUs only"),
        (["plan.memory_gb=0"], "plan.memory_gb=0: "),
        (["plan.price_per_hour=-1"], "plan.price_per_hour=-1: "),
        (
            ["train.sequence_length=1024"],
            "train.sequence_length=1024: above model.max_length=512",
        ),
        (["precision=fp8"], "precision.mode=fp8: needs an Ada or Hopper GPU"),
        (
            ["precision=fp8", "plan.device=A100"],
            "precision.mode=fp8: needs an Ada",
        ),
        (["precision=fp8", "plan.device=cpu"], "precision.mode=fp8: needs an Ada or Hopper GPU"),
        (["memory=offload-all"], "memory.offload_weights=true: not with fp16"),
        (
            ["parallel=tp", "memory.offload_weights=true"],
            "memory.offload_weights=true: ",
        ),
        (["precision.residual=bf16"], "precision.residual=bf16: "),
        (
            ["memory.offload_weights=true", "runtime.compile=model", "precision=bf16"],
            "memory.offload_weights=true: ",
        ),
    ],
)
def test_mistakes_are_named(
    compose: Compose, tmp_path: Path, overrides: list[str], message: str
) -> None:
    """And what `pretrain` would refuse on the device is not planned."""
    with pytest.raises(UserError) as caught:
        planned(compose, tmp_path, *overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model=crammed-bert"], "warning: 2048 tokens a step and a peak learning rate of 0.003: "),
        (["model=crammed-bert", "train=day"], "warning: a peak learning rate of 0.003: "),
        (["model=crammed-bert", "optim=adamw"], "warning: 2048 tokens a step: "),
        (["model=crammed-bert", "train=day", "optim=adamw"], None),
        (["model=tiny"], None),
    ],
)
def test_a_large_model_with_a_laptops_defaults_is_announced(
    compose: Compose, overrides: list[str], said: str | None
) -> None:
    found = tiny_defaults(planned_config(compose(*overrides)))
    assert (found or "").startswith(said or "") and (found is None) == (said is None)


@pytest.mark.parametrize(
    "memory", sorted(path.stem for path in (config_folder() / "memory").glob("*.yaml"))
)
def test_every_memory_section_is_planned_with_what_goes_with_it(
    compose: Compose, memory: str
) -> None:
    config = planned_config(
        compose(*SMALL, *TINY, "train.micro_batch=1", f"memory={memory}", "precision=bf16")
    )
    target = find_target(PlanConfig(memory_gb=None, device="A100", json_file=None), "cpu", config)
    found = list(search.explore(config, target))
    assert found[0].memory == config.memory
    for option in found:
        check(config.replace(memory=option.memory), target.place)


def test_on_top_of_selective_checkpointing_everything_is_tried(compose: Compose) -> None:
    config = planned_config(compose(*SMALL, "memory=selective"))
    found = search.variants(config, Hardware("cuda", "RTX 3090", "fp16", (8, 6)))
    assert {(memory.checkpoint_every, memory.checkpoint) for memory in found} == {
        (0, "full"),
        (1, "selective"),
        (2, "full"),
        (1, "full"),
    }


def test_fp8_is_planned_as_bf16_and_says_so(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp8 = ("precision=fp8", "precision.emulate_fp8=true", "precision.fp8_scaling=rowwise")
    found = [
        planned(compose, tmp_path, *TINY, *how, "plan.device=H100")
        for how in (fp8, ("precision=bf16",))
    ]
    assert (
        found[0]["target"]["place"]["mode"] == "fp8" and found[0]["options"] == found[1]["options"]
    )
    assert capsys.readouterr().out.count("fp8: both memory and time are those of bf16") == 1


def test_this_machine_is_measured(compose: Compose, tmp_path: Path) -> None:
    found = planned(
        compose, tmp_path, "plan.device=cpu", "precision=fp32", "train.micro_batch=auto"
    )
    target = found["target"]
    assert target["place"]["kind"] == "cpu" and target["heap_factor"] > 1
    assert 1e9 < target["rates"]["flops"] < 1e14 and "measured now" in target["rates"]["basis"]
    assert target["memory_bytes"] == pytest.approx(device.available_bytes(), rel=0.5)
    assert found["proposed"]["fits"]


@pytest.mark.parametrize(("place", "least", "most"), [("cpu", 0.011, 0.1), ("cuda", 0.001, 0.005)])
def test_waiting_for_a_gpu_is_no_part_of_a_rate(
    monkeypatch: pytest.MonkeyPatch, place: str, least: float, most: float
) -> None:
    """Of work of a millisecond, where to wait for the device takes ten."""
    monkeypatch.setattr(roofline.devices, "synchronize", lambda device: time.sleep(0.01))
    assert (
        least
        < min(roofline.repeat_seconds(lambda: time.sleep(0.001), torch.device(place), 0.1))
        < most
    )


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (["budget.hours=24"], 24 * 3600),
        (["budget.tokens=1e6"], 1e6),
        (["budget.steps=10"], 10 * 32 * 32),
        (["budget.steps=10", "train.batch_ramp={start: 0.5, until: 1.0}"], 7.5 * 32 * 32),
        (["budget.exaflops=1"], None),
    ],
)
def test_tokens_of_a_budget(compose: Compose, budget: list[str], expected: float | None) -> None:
    config = planned_config(compose(*SMALL, *budget))
    length, last_layer = config.train.sequence_length, config.attention.last_layer
    if expected is None:
        per_token = flops_per_token(
            config.model, length, config.targets_per_row / length, last_layer
        )
        expected = config.budget.limit * 1e18 / per_token
    assert tokens_in_budget(config, 1.0) == pytest.approx(expected, rel=0.01)


def test_tokens_of_a_growing_batch_are_those_of_the_run(
    compose: Compose, start: Callable[..., Path], tiny_overrides: list[str]
) -> None:
    ramp = ["train.batch_ramp={start: 0.25, until: 0.9}", "train.micro_batch=2"]
    tokens = load_record(start("name=a", *ramp))["pretrain"]["tokens"]
    assert tokens < 12 * 8 * 32
    assert tokens_in_budget(planned_config(compose(*tiny_overrides, *ramp)), 1.0) == tokens


def test_a_growing_batch_is_planned_in_micro_batches_that_divide_its_steps(
    compose: Compose, tmp_path: Path
) -> None:
    ramp = ("train.batch_ramp={start: 0.5, until: 0.5}",)
    found = planned(compose, tmp_path, *ramp)
    assert found["proposed"]["micro_batch"] == 16  # of 32
    with pytest.raises(UserError, match=r"^train\.micro_batch=32: "):
        planned(compose, tmp_path, *ramp, "train.micro_batch=32")


@pytest.mark.parametrize("parallel", ["zero3", "tp", "pp"])
def test_a_model_that_will_be_spread_is_planned_on_one_device(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str], parallel: str
) -> None:
    """Which is said; and no micro-batch is proposed that a pipeline of two stages could not be filled with."""
    card = ("plan.device=A100", "precision=bf16")
    found, one = (
        planned(compose, tmp_path, *card, f"parallel={name}") for name in (parallel, "ddp")
    )
    assert found["options"][0] == one["options"][0]
    assert found["proposed"]["micro_batch"] == (16 if parallel == "pp" else 32)
    assert capsys.readouterr().out.count("parallel: memory and time are those of one device") == 1


@pytest.mark.parametrize(
    ("card", "mode", "tf32", "peak"),
    [
        ("RTX 2080 Ti", "fp16", True, 53.8e12),
        ("RTX 2080 Ti", "bf16", True, 13.4e12),  # emulated: no faster than what it is emulated by
        ("RTX 2080 Ti", "fp32", True, 13.4e12),  # TF32 came with Ampere
        ("A100", "fp32", True, 156e12),
        ("A100", "fp32", False, 19.5e12),
        ("H100", "fp8", True, 989e12),
    ],
)
def test_products_are_those_of_the_number_format(
    card: str, mode: Any, tf32: bool, peak: float
) -> None:
    assert roofline.products_per_second(roofline.named(card), mode, tf32) == peak


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_each_card_gets_a_number_format_and_kernels_that_it_has(
    compose: Compose, card: Card
) -> None:
    """Turing has neither bf16 nor FlashAttention: `auto` becomes fp16 and SDPA, whose masks are in memory."""
    config = planned_config(compose(*SMALL, *TINY, "precision=auto", "train.packing=documents"))
    target = find_target(
        PlanConfig(memory_gb=None, device=card.name, json_file=None), "cpu", config
    )
    old = card.capability < (8, 0)
    assert (target.place.mode, target.place.has_flash) == (
        ("fp16", False) if old else ("bf16", True)
    )
    assert 0.9 * card.memory < target.memory_bytes / 2**30 < card.memory
    assert 0 < target.rates.flops < card.tflops * 1e12
    is_volta = card.name.startswith("V100")
    assert ("CUDA 12.6 (cu126)" in target.rates.basis) == is_volta
    if card.name in ("T4", "A100 40GB"):
        found = Simulation(config, target.place)
        found.step(2)
        assert (found.sequences == 0) == old  # FlashAttention's scratch for every sequence


def test_time_is_the_largest_of_three() -> None:
    rates = roofline.Rates(flops=100.0, bandwidth=10.0, kernel_seconds=0.5, basis="")
    work = Counter({Operation(200, 1): 1, Operation(1, 30): 2, Operation(0, 1): 4})
    assert rates.seconds(work) == pytest.approx(2.0 + 2 * 3.0 + 4 * 0.5)


def test_costs_are_those_that_were_measured() -> None:
    """4 GB of Wikipedia: 2.006 bytes a token, 632 MB and 76 MB of index, 2,081 processor seconds (strict filters)."""
    tokens = 4e9 / 4.5
    plain, found, large = (
        Costs.of(tokens, 1e5, vocab_size, near_duplicates, watts, price)
        for vocab_size, near_duplicates, watts, price in (
            (32768, False, 450.0, 0.4),
            (32768, True, None, None),
            (100032, False, None, None),
        )
    )
    hours = tokens / 1e5 / 3600
    assert (plain.hours, plain.tokens_per_day, plain.price) == pytest.approx(
        (hours, 8.64e9, 0.4 * hours)
    )
    assert (
        plain.kwh == pytest.approx(POWER_SHARE * 0.45 * hours) and found.kwh is found.price is None
    )
    assert found.corpus_bytes / tokens == pytest.approx(2.006, rel=0.01)
    assert large.corpus_bytes / tokens == pytest.approx(4.006, rel=0.01)
    assert found.preparation_memory_bytes - plain.preparation_memory_bytes == pytest.approx(
        76e6, rel=0.02
    )
    assert plain.preparation_memory_bytes == pytest.approx(632e6, rel=0.15)
    assert plain.preparation_core_hours * 3600 == pytest.approx(2081, rel=0.15)
