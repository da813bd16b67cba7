"""Whole steps on fake `cuda` tensors: forward, backward, clipping and update, as the engine and fine-tuning run them.

A device mistake (a CPU tensor that meets one on the GPU), a wrong signature and a data-dependent shape end such a step.
A number that the host reads from the device in the middle of a pass, for which it would wait there, is counted: fake
tensors have none, so such a read is answered.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cramming.config import UserError, build
from cramming.engine import build_model, equip
from cramming.model.attention import KERNELS, Packing
from cramming.model.classifier import SequenceClassifier
from cramming.model.config import ModelConfig
from cramming.model.encoder import Encoder
from cramming.optim.build import parameter_groups
from cramming.overrides import compose
from cramming.parallel.mesh import Mesh
from cramming.parallel.offload import CopyStream
from cramming.plan.memory import batch_without_data
from cramming.plan.search import choose, explore, find_target, planned_config
from cramming.precision import Precision, PrecisionConfig
from cramming.recipe import Config

VOCABULARY = 32768
LAYERS = 4  # a window, a global layer, the last one, and more than offloading keeps on the device
LENGTH, ROWS = 128, 8
LENGTHS = (64, 3, 61, 40, 33, 20, 7, 12)  # of texts in a batch of fine-tuning
MODELS = ("bert-base", "crammed-bert", "modern")
MODES = ("bf16", "fp16", "fp8", "fp32")
MEMORY = {
    "plain": "memory.checkpoint_every=0",
    "checkpoint": "memory.checkpoint_every=1",
    "selective": "memory=selective",
    "offload": "memory.offload_activations=true",
    "offload-weights": "memory.offload_weights=true",
    "offload-optimizer": "memory.offload_optimizer=true",
    "offload-all": "memory=offload-all",
}
OPTIMIZERS = (
    "adamw8bit",
    "adamw4bit",
    "nadamw",
    "lamb",
    "lars",
    "sgd",
    "adagrad",
    "muon",
    "normuon",
    "adamw-cwd",
)
aten = torch.ops.aten
CUDA = torch.device("cuda")


def config_of(overrides: list[str], length: int, packing: Any) -> Config:
    """A step of this configuration."""
    config = Config.of(compose(overrides))
    model, train = replace(config.model, vocab_size=VOCABULARY), config.train
    return config.replace(model=model, train=train.replace(sequence_length=length, packing=packing))


class Reads(TorchDispatchMode):
    """Answers and counts what the host reads from the device: in a pass, which should be nothing, and outside it."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self) -> None:
        super().__init__()
        self.in_forward, self.truth, self.count = False, True, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            in_pass = self.in_forward or torch._C._current_graph_task_id() != -1
            self.count["pass" if in_pass else "step"] += args[0].device.type == "cuda"
            kind = args[0].dtype
            return self.truth if kind == torch.bool else 0.0 if kind.is_floating_point else LENGTH
        if func is aten._pin_memory.default:  # which fake tensors lack
            return args[0]
        if func is aten.index.Tensor and args[1][0] is not None and args[1][0].dtype == torch.bool:
            self.count["pass"] += 1  # how many are true: all
            mask = args[1][0]
            return args[0].new_empty((mask.numel(), *args[0].shape[mask.dim() :]))
        if func is aten.equal.default:
            self.count["pass"] += 1
            return True
        if func is aten.nonzero.default:
            self.count["pass"] += 1
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


class Step:
    """Steps of one engine on fake `cuda` tensors, uncompiled, as the configuration names format and kernel."""

    def __init__(self, config: Config) -> None:
        self.config = config.replace(runtime=config.runtime.replace(compile="off"))
        self.reads = Reads()
        self._fake_mode = FakeTensorMode()
        self.reads.truth = False  # no random number is outside its bounds
        with self._without_data():
            model: Any = build_model(self.config)
        self.reads.truth = True  # gradients are finite
        with self._without_data():
            if config.memory.offload_weights:
                for encoder in model.encoders:
                    _move_to_host(encoder.blocks)
            self.engine = equip(model, self.config, Mesh.solo(CUDA), CUDA)
        model.register_forward_pre_hook(lambda *_: setattr(self.reads, "in_forward", True))
        model.register_forward_hook(lambda *_: setattr(self.reads, "in_forward", False))

    @contextmanager
    def _without_data(self) -> Iterator[None]:
        eager = torch.compiler.set_stance("force_eager")
        with eager, CUDA, self._fake_mode, self.reads:
            yield

    def outcome(self, kernel: str, packing: Any) -> str:
        """`ok`, with what the host read inside the pass if anything; why it was refused; or what failed."""
        self.config = self.config.replace(train=self.config.train.replace(packing=packing))
        model: Any = self.engine.model
        model.encoder.kernel, self.reads.in_forward = kernel, False
        self.reads.count.clear()
        try:
            with self._without_data():
                self.engine.step([batch_without_data(self.config, ROWS)], 0.0)
        except Exception as error:
            self.engine.optimizer.zero_grad(set_to_none=True)
            return _failed(error)
        return _passed(self.reads.count)


def _move_to_host(blocks: nn.Module) -> None:
    """Do what `parallel.apply.move_weights` does, with new parameters: those without data cannot be moved."""
    copy_stream = CopyStream(CUDA)
    for module in blocks.modules():
        for name, parameter in module.named_parameters(recurse=False):
            host = copy_stream.host_empty(parameter).copy_(parameter.detach())
            setattr(module, name, nn.Parameter(host, requires_grad=parameter.requires_grad))


def _passed(count: Counter[str]) -> str:
    return f"ok, {count['pass']} reads" if count["pass"] else "ok"


def _failed(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    # model/ knows no UserError: its one refusal is a ValueError that names the setting.
    is_refusal = isinstance(error, UserError) or text.startswith("attention.kernel=")
    return f"refused: {text}" if is_refusal else f"FAILED: {type(error).__name__}: {text}"


def training(model: str, mode: str, memory: str, optimizer: str = "adamw") -> dict[str, Any]:
    """Steps of one engine in both packings, by every kernel."""
    overrides = [
        f"model={model}",
        f"precision={mode}",
        MEMORY[memory],
        f"optim={optimizer}",
        f"model.num_layers={LAYERS}",
    ]
    began = time.perf_counter()
    row: dict[str, Any] = {
        "part": "training",
        "model": model,
        "mode": mode,
        "memory": memory,
        "optimizer": optimizer,
    }
    try:
        step = Step(config_of(overrides, LENGTH, "rows"))
    except Exception as error:
        return row | {"outcomes": {"all": _failed(error)}, "seconds": time.perf_counter() - began}
    # FlexAttention runs compiled only (compiled.py). What a memory trick does to a block differs by how it is computed:
    # in rows, or by FlashAttention on bounds.
    kernels = (
        ["auto", *(k for k in KERNELS if k != "flex")] if memory == "plain" else ["sdpa", "varlen"]
    )
    kernels = kernels if optimizer == "adamw" else ["auto"]
    with torch.autograd.set_multithreading_enabled(
        False
    ):  # one fake tensor mode cannot serve two threads
        outcomes = {f"{p} {k}": step.outcome(k, p) for p in ("rows", "documents") for k in kernels}
    return row | {
        "outcomes": outcomes,
        "reads": step.reads.count["step"],
        "seconds": time.perf_counter() - began,
    }


def finetuning(model: str, mode: str) -> dict[str, Any]:
    """A fine-tuning step and a prediction, by pooling and dropout of attention."""
    from eval.finetune.config import Hyperparameters
    from eval.finetune.loop import Batch, train_step

    outcomes, began = {}, time.perf_counter()
    config = build(
        ModelConfig, compose([f"model={model}", f"model.num_layers={LAYERS}"])["model"], "model"
    )
    for pooling in ("mean", "cls", "pairs"):
        for dropout in (0.0, 0.1):
            reads = Reads()
            device = torch.device("cuda")
            try:
                with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False), reads:
                    reads.truth = False
                    with device:
                        encoder = Encoder(
                            replace(
                                config,
                                vocab_size=VOCABULARY,
                                attention_dropout=dropout,
                                dropout=0.1,
                            )
                        )
                        classifier = SequenceClassifier(
                            encoder, 3, cast(Any, pooling), config.hidden_size, 0.1
                        )
                    reads.truth = True
                    reads.count.clear()
                    ids, types, positions = (
                        torch.zeros(sum(LENGTHS), dtype=torch.int64, device=device)
                        for _ in range(3)
                    )
                    bounds = torch.zeros(len(LENGTHS) + 1, dtype=torch.int32, device=device)
                    labels = torch.zeros(len(LENGTHS), dtype=torch.int64, device=device)
                    packing = Packing(bounds, None, max(LENGTHS), lengths=LENGTHS)
                    batch = Batch(ids, positions, types, packing, labels)
                    number_format = Precision(
                        PrecisionConfig(mode=cast(Any, mode), tf32=mode != "fp32"), device
                    )
                    optimizer = torch.optim.AdamW(
                        parameter_groups(classifier, 0.01), lr=1e-4, fused=True
                    )
                    hyper = cast(Hyperparameters, SimpleNamespace(max_grad_norm=1.0))
                    reads.in_forward = True
                    train_step(
                        classifier,
                        cast(Any, SimpleNamespace(regression=False)),
                        batch,
                        optimizer,
                        hyper,
                        number_format,
                    )
                    classifier.eval()
                    with torch.no_grad(), number_format.autocast():
                        classifier(batch.ids_T, batch.positions_T, batch.packing, batch.types_T)
                outcomes[f"{pooling}, attention dropout {dropout:g}"] = _passed(reads.count)
            except Exception as error:
                outcomes[f"{pooling}, attention dropout {dropout:g}"] = _failed(error)
    row = {"part": "finetuning", "model": model, "mode": mode, "outcomes": outcomes}
    return row | {"seconds": time.perf_counter() - began}


def planning(model: str, mode: str, sheet: str) -> dict[str, Any]:
    """The verb `plan` on this machine's "GPU", by the card's data sheet."""
    began = time.perf_counter()
    found = compose(
        [
            f"model={model}",
            f"precision={mode}",
            "optim=adamw",
            "train=day",
            "train.batch_size=1024",
            f"tokenizer.vocab_size={VOCABULARY}",
        ]
    )
    try:
        config = planned_config(found)
        tried = list(explore(config, find_target(config, sheet)))
        best = choose(tried, config.train.sequence_length)
        size = best.micro_batch if best else None
        outcome = f"ok, {len(tried)} options, micro-batch {size}"
    except Exception as error:
        outcome = _failed(error)
    row = {"part": "plan", "model": model, "mode": mode, "outcomes": {sheet: outcome}}
    return row | {"seconds": time.perf_counter() - began}
