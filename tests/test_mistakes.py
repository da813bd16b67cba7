"""A user's mistake is told in one line that begins with the setting."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cramming.config import UserError, build
from cramming.recipe import Config, Hardware, attention_kernels, check
from data_prep.readers.mix import open_source
from tests.test_conf import SECTIONS

CPU = Hardware("cpu", "a CPU", "fp32", trains=True)
CPU_FP16 = Hardware("cpu", "a CPU", "fp16", trains=True)
CPU_FP8 = Hardware("cpu", "a CPU", "fp8", trains=True)
TWO = Hardware("cpu", "a CPU", "fp32", processes=2, trains=True)
GPU = Hardware("cuda", "a GPU", "bf16", (8, 0), trains=True)
GPUS = Hardware("cuda", "a GPU", "bf16", (8, 0), processes=2)

# What is typed, the setting that the message must begin with (by default the first that is typed), and the hardware.
MISTAKES: list[tuple[Any, ...]] = [
    # numbers
    ("seed=abc",),
    ("seed=-1",),
    ("seed=9223372036854775808",),
    ("budget.steps=0", "budget.steps"),
    ("budget.hours=-1 budget.steps=null", "budget.hours"),
    ("budget.heartbeat_seconds=6",),
    ("train.batch_size=0",),
    ("train.batch_size=1.5",),
    ("train.batch_size=null",),
    ("train.batch_size=true",),
    ("train.micro_batch=0",),
    ("train.micro_batch=atuo",),
    ("train.validations=-1",),
    ("train.log_every=x",),
    ("checkpoint.every_minutes=0",),
    ("checkpoint.keep_at=[0,1]", "checkpoint.keep_at[1]"),
    ("objective.rate=1.0",),
    ("objective.random_share=-0.1",),
    ("optim.lr=0",),
    ("optim.lr=fast",),
    ("optim.lr=.nan",),
    ("optim.betas=[0.9]",),
    ("optim.betas=[0.9,1.0]", "optim.betas[1]"),
    ("schedule.warmup=-0.1",),
    ("schedule.decay=1.5",),
    ("model.hidden_size=0",),
    ("model.hidden_size=wide",),
    ("model.dropout=1.5",),
    ("model.init_std=0",),
    ("model.local_window=1",),
    ("memory.checkpoint_every=-1",),
    ("memory.activation_budget=2 runtime.compile=model", "memory.activation_budget"),
    ("runtime.prefetch=0",),
    ("parallel.tp=0",),
    ("data.size=0",),
    ("data.clean.min_characters=0",),
    ("data.near_duplicates.rows=9",),
    ("data.decontaminate.ngram=51",),
    ("data.validation_fraction=1.5",),
    ("tokenizer.vocab_size=1000000000",),
    ("tokenizer.sample_mb=0",),
    ("eval.hyperparameters.dropout=1",),
    ("eval.hyperparameters.epochs=0",),
    ("eval.hyperparameters.max_length=7",),
    ("eval.seeds=[]",),
    ("eval.seeds=[1,1]",),
    ("eval.seeds=[-1]", "eval.seeds[0]"),
    # choices
    ("division=half",),
    ("train.packing=tight",),
    ("train.order=random",),
    ("objective.name=xyz",),
    ("parallel.name=zero4",),
    ("parallel.compression.name=zip",),
    ("precision.mode=fp9",),
    ("attention.kernel=flash9",),
    ("attention.flash=5",),
    ("model.activation=swish",),
    ("model.norm=batchnorm",),
    ("runtime.compile=true",),
    ("memory.checkpoint=some",),
    ("data.source=disk",),
    ("data.clean.unicode=NFD",),
    ("data.name=a/b",),
    ("tokenizer.kind=words",),
    ("eval.source=web",),
    ("eval.precision=fp8",),
    ("train.average=yes",),
    # settings of one section that do not go together
    ("budget.hours=1 budget.steps=12", "budget.steps"),
    ("budget.hours=null budget.steps=null", "budget.hours"),
    ("model.hidden_size=33",),
    ("model.norm=rmsnorm model.norm_bias=true", "model.norm_bias"),
    ("model.late_layers=5",),
    ("model.relative_positions=7",),
    ("model.value_embeddings=3",),
    ("objective.mask_share=0.8 objective.random_share=0.3", "objective.random_share"),
    ("objective.phases=[{at: 0.9, rate: 0.1},{at: 0.5, rate: 0.2}]", "objective.phases"),
    ("objective=causal-then-mlm objective.until=0", "objective.until"),
    ("objective=mlm-by-loss objective.until=0.1", "objective.until"),
    ("objective=distill objective.weight=1.5", "objective.weight"),
    ("start=teacher", "objective.name"),
    ("objective=distill parallel=zero2", "parallel.name"),
    ("objective=distill parallel.tp=2", "objective.name", TWO),
    ("schedule.warmup=0.9 schedule.decay=0.5", "schedule.decay"),
    ("train.batch_ramp={start: 0.01, until: 0.5}", "train.batch_ramp.start"),
    ("memory.checkpoint=selective",),
    ("runtime.tune=max-autotune",),
    ("runtime.cuda_graphs=true", "runtime.cuda_graphs", GPU),
    ("precision.fp8_scaling=rowwise",),
    ("precision.emulate_fp8=true",),
    ("parallel.sequence=true",),
    ("parallel.pp=2",),
    ("eval.data_dir=/glue eval=embedded", "eval.data_dir"),
    # settings of several sections, and hardware
    ("train.sequence_length=1024",),
    ("train.batch_size=9",),
    ("train.batch_ramp={start: 0.25, until: 0.5}", "train.micro_batch"),
    ("train.validation_corpus=nowhere",),
    ("objective=rtd model.tie_embeddings=false", "model.tie_embeddings"),
    ("objective=rtd model.late_layers=2", "model.late_layers"),
    ("precision.residual=bf16",),
    ("precision.mode=fp8", "precision.mode", CPU_FP8),
    ("precision.mode=fp16 memory.offload_weights=true", "memory.offload_weights", CPU_FP16),
    ("attention.flash=3",),
    ("attention.flash=3", "attention.flash", GPU),
    ("attention.kernel=varlen",),
    ("attention.kernel=flex",),
    ("attention.kernel=varlen model.relative_positions=32", "attention.kernel", GPU),
    ("attention.kernel=flex model.relative_positions=32", "attention.kernel", GPU),
    ("budget.clock=cpu runtime.compile=blocks", "runtime.compile"),
    ("budget.clock=cpu", "budget.clock", TWO),
    ("budget.clock=cpu", "budget.clock", GPU),
    ("memory.offload_weights=true runtime.compile=model", "memory.offload_weights"),
    ("memory.activation_budget=0.5",),
    ("parallel=zero3 optim=muon", "optim.name", GPUS),
    ("parallel=zero2 train.micro_batch=auto", "train.micro_batch", GPUS),
    ("parallel.tp=4", "parallel.tp", GPUS),
    ("parallel=pp parallel.pp=2 model.unet_skips=true", "model.unet_skips", GPUS),
    ("parallel=pp parallel.pp=2 model.relative_positions=32", "model.relative_positions", GPUS),
    ("parallel.tp=2 model.relative_positions=32", "model.relative_positions", GPUS),
    ("parallel=pp parallel.pp=8", "parallel.pp", GPUS),
]


def validate(settings: dict[str, Any], hardware: Hardware) -> None:
    """Run the checks of all verbs, without a corpus."""
    for name, section in SECTIONS.items():
        build(section, settings[name], name)
    open_source(settings["data"])
    config = Config.of(settings)
    check(config, hardware)
    attention_kernels(config, torch.device("cpu"))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: str(mistake[0]))
def test_the_setting_is_named_first(
    compose: Callable[..., dict[str, Any]], tiny_overrides: list[str], mistake: tuple[Any, ...]
) -> None:
    typed, setting, hardware = (*mistake, None, None)[:3]
    words = typed.replace(", ", ",").replace(": ", ":").split()
    words = [word.replace(":", ": ").replace(",", ", ") for word in words]
    settings = compose(*tiny_overrides, *words)
    with pytest.raises(UserError) as caught:
        validate(settings, hardware or CPU)
    message = str(caught.value)
    assert message.startswith(f"{setting or typed.partition('=')[0]}=")
    assert "\n" not in message and message.endswith((".", "?"))


def test_there_are_enough_of_them() -> None:
    assert len(MISTAKES) >= 80


def test_the_recipe_without_a_mistake_is_valid(
    compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]
) -> None:
    validate(compose(*tiny_overrides), CPU)
