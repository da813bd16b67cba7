"""The plan proposes a setting that fits, says so where none does, and needs nothing but the configuration."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import device, preview
from cramming.config import UserError, config_folder
from cramming.invocation import Invocation
from cramming.model.config import flops_per_token
from cramming.plan import main as plan
from cramming.plan import search
from cramming.plan.cards import CARDS, Card
from cramming.plan.main import POWER_SHARE
from cramming.plan.memory import Simulation
from cramming.plan.search import find_target, planned_config, tokens_in_budget
from cramming.plan.speed import GPU_SHARES, find_card, products_per_second
from cramming.precision import resolve, slow_products
from cramming.progress import format_count
from cramming.recipe import Hardware, check, tiny_defaults
from cramming.record import load_record

Compose = Callable[..., dict[str, Any]]
OPTIONS: dict[str, Any] = {"device": "RTX 2080 Ti", "memory_gb": None, "price_per_hour": None}
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


def planned(compose: Compose, folder: Path, *overrides: str, **options: Any) -> dict[str, Any]:
    path = folder / "plan.json"
    plan.main(compose(*SMALL, *overrides), Invocation(), out=path, **{**OPTIONS, **options})
    return json.loads(path.read_text())


def test_a_small_model_on_a_large_card(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = planned(compose, tmp_path, "budget.hours=24", memory_gb=11)
    assert result["vocab_size"] == 1024  # the tokenizer's limit in whole tiles of 64
    first, best = result["options"]
    assert (first["micro_batch"], best["micro_batch"]) == (8, 32)  # configured, and the whole step
    assert best == result["proposed"]
    slow, fast = best["tokens_per_second"]
    assert slow / fast == pytest.approx(GPU_SHARES[0] / GPU_SHARES[1])
    assert best["tokens_in_budget"] == pytest.approx([24 * 3600 * slow, 24 * 3600 * fast])
    for option in result["options"]:
        assert sum(option["peak_by_category"].values()) == option["peak_bytes"]
        assert option["fits"] == (option["peak_bytes"] <= result["usable_bytes"])
    text = capsys.readouterr().out
    assert "not measured" in text and "price" not in text
    lines = ("proposed: train.micro_batch=32: ", "checkpoints: ", "training: ", "electricity: ")
    positions = [text.index(line) for line in lines]
    assert positions == sorted(positions)


def test_costs_are_those_of_the_budget(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(compose, tmp_path, "budget.hours=10", price_per_hour=0.4)
    text = capsys.readouterr().out
    assert f"electricity: {POWER_SHARE * 2.5:.3g} kWh" in text and "price: 4 at" in text
    result = planned(compose, tmp_path, "budget.tokens=1e12", price_per_hour=0.4)
    slow, fast = (1e12 / rate / 3600 for rate in result["proposed"]["tokens_per_second"])
    assert slow > fast
    text = capsys.readouterr().out
    assert "training: 1.0T tokens in" in text and "preparing 1.0T tokens: 2.0 TB of disk" in text


def test_tight_memory_takes_checkpointing(compose: Compose, tmp_path: Path) -> None:
    """Between what one row needs with and without it; else more than one checkpointing is not tried."""
    config = planned_config(compose(*SMALL, "train.sequence_length=512", "train.batch_size=1"))
    config = config.replace(train=config.train.replace(micro_batch=1))
    target = find_target(config, "A100")
    plentiful = list(search.explore(config, target))
    assert [option.memory.checkpoint_every for option in plentiful] == [0]
    full = config.memory.replace(checkpoint_every=1)
    needs = {
        memory.checkpoint_every: search.option_of(
            config, target, Simulation(config.replace(memory=memory), target.hardware), 1
        ).peak_bytes
        for memory in (config.memory, full)
    }
    between = (needs[0] + needs[1]) / 2
    context_bytes = search.CONTEXT_BYTES["cuda"]
    tight = replace(target, memory_bytes=between / search.SHARE["cuda"] + context_bytes)
    options = list(search.explore(config, tight))
    best = search.choose(options, 512)
    assert best and best.fits and best.memory.checkpoint_every > 0
    assert best.tokens_per_second[1] <= plentiful[0].tokens_per_second[1]
    assert "memory.checkpoint_every=" in search.overrides(best, config)


def test_where_nothing_fits_it_says_what_is_missing(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        UserError,
        match=r"--memory-gb=0\.67: nothing fits\. The least .*train\.micro_batch=1.*GiB",
    ):
        planned(compose, tmp_path, "model.hidden_size=512", memory_gb=0.67)
    assert " NO " in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["proposed"] is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--device=GTX 480"], "Known are auto, cpu, cuda, RTX 2080 Ti"),
        (
            ["attention.kernel=varlen"],
            "attention.kernel=varlen: RTX 2080 Ti in fp16 has no FlashAttention",
        ),
        (
            ["attention.kernel=varlen", "--device=A100", "precision.mode=fp32"],
            "attention.kernel=varlen: A100 40GB in fp32 has no FlashAttention",
        ),
        (
            ["attention.kernel=varlen", "--device=cpu"],
            "attention.kernel=varlen: runs on CUDA only",
        ),
        (
            ["train.sequence_length=1024"],
            "train.sequence_length=1024: above model.max_length=512",
        ),
        (["precision=fp8"], "precision.mode=fp8: needs an Ada or Hopper GPU"),
        (
            ["precision=fp8", "--device=A100"],
            "(compute capability 8.9), this is A100 40GB",
        ),
        (["precision=fp8", "--device=cpu"], "precision.mode=fp8: needs an Ada or Hopper GPU"),
        (["memory=offload-all"], "memory.offload_weights=true: not with fp16"),
        (
            ["parallel=tp", "memory.offload_weights=true"],
            "memory.offload_weights=true: not with several processes",
        ),
        (["precision.residual=bf16"], "precision.residual=bf16: not with products in fp32 or fp16"),
        (
            ["memory.offload_weights=true", "runtime.compile=model", "precision=bf16"],
            "memory.offload_weights=true: not with compiled code",
        ),
    ],
)
def test_mistakes_are_named(
    compose: Compose, tmp_path: Path, overrides: list[str], message: str
) -> None:
    """And what `pretrain` would refuse on the device is not planned."""
    typed = [word for word in overrides if not word.startswith("--device=")]
    devices = [word.removeprefix("--device=") for word in overrides if word not in typed]
    with pytest.raises(UserError) as caught:
        planned(compose, tmp_path, *typed, device=(devices or ["RTX 2080 Ti"])[0])
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
    warning = tiny_defaults(planned_config(compose(*overrides)))
    assert (warning or "").startswith(said or "") and (warning is None) == (said is None)


@pytest.mark.parametrize(
    "memory", sorted(path.stem for path in (config_folder() / "memory").glob("*.yaml"))
)
def test_every_memory_section_is_planned_with_what_goes_with_it(
    compose: Compose, memory: str
) -> None:
    config = planned_config(
        compose(*SMALL, *TINY, "train.micro_batch=1", f"memory={memory}", "precision=bf16")
    )
    target = find_target(config, "A100")
    options = list(search.explore(config, target))
    assert config.memory in [option.memory for option in options]
    for option in options:
        check(config.replace(memory=option.memory), target.hardware)


def test_checkpointing_is_tried_from_the_cheapest_on(compose: Compose) -> None:
    """On top of the configured section, which is one of them."""
    config = planned_config(compose(*SMALL, "memory=selective"))
    variants = search.variants(config, Hardware("cuda", "RTX 3090", "fp16", (8, 6)))
    assert [(memory.checkpoint_every, memory.checkpoint) for memory in variants] == [
        (0, "full"),
        (1, "selective"),
        (2, "full"),
        (1, "full"),
    ]
    passes = [search.forward_passes(memory) for memory in variants]
    assert passes == [1, 1, 1.5, 2]


def test_fp8_is_planned_as_bf16_and_says_so(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp8 = ("precision=fp8", "precision.emulate_fp8=true", "precision.fp8_scaling=rowwise")
    by_fp8, by_bf16 = (
        planned(compose, tmp_path, *TINY, *how, device="H100") for how in (fp8, ("precision=bf16",))
    )
    assert by_fp8["target"]["hardware"]["mode"] == "fp8" and by_fp8["options"] == by_bf16["options"]
    assert capsys.readouterr().out.count("fp8: both memory and speed are those of bf16") == 1


def test_this_machine_is_measured(compose: Compose, tmp_path: Path) -> None:
    result = planned(
        compose, tmp_path, "precision.mode=fp32", "train.micro_batch=auto", device="cpu"
    )
    target = result["target"]
    assert target["hardware"]["kind"] == "cpu"
    assert 1e9 < target["speed"]["least_flops"] < target["speed"]["most_flops"] < 1e14
    assert "measured now" in target["speed"]["basis"]
    assert target["memory_bytes"] == pytest.approx(device.available_bytes(), rel=0.5)
    assert result["proposed"]["fits"]


def test_a_format_that_a_cpu_emulates_is_warned_about(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(compose, tmp_path, *TINY, "precision=fp16", device="cpu")
    assert "warning: precision.mode=fp16" in capsys.readouterr().out
    assert slow_products(resolve("auto", torch.device("cpu")), "cpu") is None
    assert slow_products("fp32", "cpu") is None
    assert slow_products("fp16", "cuda") is None


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


@pytest.mark.parametrize(
    ("ramp", "ratio"), [([], 1), (["train.batch_ramp={start: 0.5, until: 0.5}"], 1.25)]
)
def test_check_predicts_what_plan_does_on_a_gpu(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, ramp: list[str], ratio: float
) -> None:
    """While a batch grows from its half, more steps than the tokens would fill at full size."""
    recipe = compose(*SMALL, "budget.hours=1", *ramp)
    config = planned_config(recipe)
    target = find_target(config, "RTX 2080 Ti")
    monkeypatch.setattr(device, "select", lambda _: torch.device("cuda"))
    monkeypatch.setattr(search, "find_target", lambda *_: target)
    lines = list(preview.training_lines(config, Path("none"), 32768, "auto"))
    (line,) = (line for line in lines if line.startswith("budget: "))
    assert "prediction" in line and "RTX 2080 Ti" in line
    tokens = [3600 * rate for rate in search.speed_range(config, target.speed)]
    for count in tokens:
        steps = search.steps_of_tokens(config, count)
        assert steps * 32 * 32 / count == pytest.approx(ratio, rel=0.05)
        for number in (steps, count):
            assert format_count(number, "") in line


def test_tokens_of_a_growing_batch_are_those_of_the_run(
    compose: Compose, start: Callable[..., Path], tiny_overrides: list[str]
) -> None:
    ramp = ["train.batch_ramp={start: 0.25, until: 0.9}", "train.micro_batch=2"]
    tokens = load_record(start(*ramp, name="a"))["pretrain"]["tokens"]
    assert tokens < 12 * 8 * 32
    assert tokens_in_budget(planned_config(compose(*tiny_overrides, *ramp)), 1.0) == tokens


def test_a_growing_batch_is_planned_in_micro_batches_that_divide_its_steps(
    compose: Compose, tmp_path: Path
) -> None:
    ramp = ("train.batch_ramp={start: 0.5, until: 0.5}",)
    result = planned(compose, tmp_path, *ramp)
    assert result["proposed"]["micro_batch"] == 16  # of 32
    with pytest.raises(UserError, match=r"train\.micro_batch=32: .*train\.batch_ramp"):
        planned(compose, tmp_path, *ramp, "train.micro_batch=32")


@pytest.mark.parametrize("parallel", ["zero3", "tp"])
def test_a_model_on_several_devices_is_planned_on_one(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str], parallel: str
) -> None:
    several, alone = (
        planned(compose, tmp_path, "precision=bf16", f"parallel={name}", device="A100")
        for name in (parallel, "ddp")
    )
    assert several["options"] == alone["options"]
    assert capsys.readouterr().out.count("parallel: memory and speed are those of one device") == 1


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
    assert products_per_second(find_card(card), mode, tf32) == peak


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_each_card_gets_a_number_format_and_kernels_that_it_has(
    compose: Compose, card: Card
) -> None:
    """Turing has neither bf16 nor FlashAttention: `auto` becomes fp16 and SDPA, whose masks are in memory."""
    config = planned_config(compose(*SMALL, *TINY, "precision=auto", "train.packing=documents"))
    target = find_target(config, card.name)
    old = card.capability < (8, 0)
    assert (target.hardware.mode, target.hardware.has_flash) == (
        ("fp16", False) if old else ("bf16", True)
    )
    assert 0.9 * card.memory < target.memory_bytes / 2**30 < card.memory
    assert 0 < target.speed.least_flops < target.speed.most_flops < card.tflops * 1e12
    is_volta = card.name.startswith("V100")
    assert ("CUDA 12.6 (cu126)" in target.speed.basis) == is_volta
