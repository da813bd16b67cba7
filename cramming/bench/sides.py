"""The sides of a comparison: our engine, and how others train the same architecture on the same tokens.

All get the same shapes, tokens, vocabulary, number format, optimizer (fused AdamW, same constants), clipping, and the
same share of masked tokens. Peers are used as their own documentation says:

    trainer          Hugging Face `Trainer` and `BertForMaskedLM`, `DataCollatorForLanguageModeling`
    bert loop        a plain loop around `BertForMaskedLM`, compiled, labels -100 where nothing was masked
    modernbert loop  the same around `ModernBertForMaskedLM` with its own `sparse_prediction`, sdpa attention

A step's seconds run from the end of the step before to its own synchronised end, so masking is on everyone's clock.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cramming import device as devices
from cramming.bench.data import SPECIAL, topic_batches
from cramming.checks import TrainConfig
from cramming.config import UserError, build
from cramming.data.batches import Batch, BatchSource, made_ahead
from cramming.data.masking import ObjectiveConfig
from cramming.engine import StepStats
from cramming.execution import EngineConfig, build_engine
from cramming.model.attention import AttentionConfig
from cramming.model.config import ModelConfig, flops_per_token
from cramming.optim import OptimConfig
from cramming.parallel.mesh import Mesh, ParallelConfig
from cramming.plan.memory import Recipe
from cramming.plan.micro_batch import find_micro_batch
from cramming.precision import Precision, PrecisionConfig, float32_products
from cramming.runtime import RuntimeConfig, prepare_heap

WARMUP_STEPS = 20  # of the learning rate


class Common:
    """What all sides read from a job. Each has `precision` and `run`: seconds and mean loss of each step."""

    def __init__(self, job: Mapping[str, Any], device: torch.device) -> None:
        settings = job["settings"]
        self.device = device
        self.train = build(TrainConfig, settings["train"], "train")
        self.objective = build(ObjectiveConfig, settings["objective"], "objective")
        self.optim = build(OptimConfig, settings["optim"], "optim")
        self.runtime = build(RuntimeConfig, settings["runtime"], "runtime")
        self.model_config = replace(build(ModelConfig, settings["model"], "model"), vocab_size=job["vocab_size"])
        self.how = build(AttentionConfig, settings["attention"], "attention")
        length, rate = self.train.sequence_length, self.objective.targets_per_row(self.train.sequence_length)
        self.flops_per_token = flops_per_token(self.model_config, length, rate / length, self.how.last_layer)
        self.source: BatchSource = topic_batches(
            self.objective, job["vocab_size"], length, self.train.packing, self.train.batch_size
        )

    def batches(self, first: int, count: int, per_step: int = 1) -> Iterator[Batch]:
        """The micro-batches of `count` steps, `per_step` each. A GPU's are made ahead and pinned, as in a run."""
        rows = self.train.batch_size // per_step

        def make(index: int) -> Batch:
            return self.source.batch(first * self.train.batch_size + index * rows, rows)

        if self.device.type == "cpu":  # the cores have enough to do
            yield from map(make, range(count * per_step))
            return
        with closing(made_ahead(make, self.device, self.runtime.prefetch)) as ahead:
            yield from itertools.islice(ahead, count * per_step)

    def learning_rate(self, step: int) -> float:
        return self.optim.peak_learning_rate(self.train.batch_size) * min(1.0, (step + 1) / WARMUP_STEPS)


class Ours(Common):
    """`Engine.step`, as `cramming pretrain` calls it."""

    def __init__(self, job: Mapping[str, Any], device: torch.device) -> None:
        super().__init__(job, device)
        settings = job["settings"]
        prepare_heap(self.runtime, device)
        devices.seed_everything(0)
        mesh = Mesh(build(ParallelConfig, settings["parallel"], "parallel"), device)
        execution = EngineConfig.of(settings)
        self.engine = build_engine(execution, self.model_config, mesh, device)
        self.precision = self.engine.precision.mode
        self.micro_batches = job.get("micro_batches") or self.train.batch_size // self.rows_that_fit(execution)
        self.repeat_skipped = job.get("repeat_skipped", False)
        if "moved" in job:
            move(self.engine.parameters, *job["moved"])

    def rows_that_fit(self, execution: EngineConfig) -> int:
        """`train.micro_batch`, or what `auto` means here."""
        if self.train.micro_batch != "auto":
            return self.train.micro_batch
        length = self.train.sequence_length
        form = (length, self.objective.targets_per_row(length), self.train.packing)
        recipe = Recipe(self.model_config, execution, self.precision, self.device.type, *form)
        return find_micro_batch(self.engine, self.source.batch, recipe, self.train.batch_size).rows

    def run(self, first: int, count: int) -> tuple[list[float], list[float]]:
        seconds, losses, before = [], [], time.perf_counter()
        micro_batches = self.batches(first, count, self.micro_batches)
        for step in range(first, first + count):
            step_batches = list(itertools.islice(micro_batches, self.micro_batches))
            stats = self.step(step_batches, step)
            devices.synchronize(self.device)
            now = time.perf_counter()
            seconds.append(now - before)
            losses.append(stats.loss)
            before = now
        return seconds, losses

    def step(self, batches: Sequence[Batch], step: int) -> StepStats:
        """One step; a skipped one is done anew where the job asks for that, and the engine ends what never moves."""
        while True:
            stats = self.engine.step(batches, self.learning_rate(step))
            assert stats is not None
            if not (stats.skipped and self.repeat_skipped):
                return stats


@torch.no_grad()
def move(weights: Iterable[Tensor], size: float, seed: int) -> None:
    """Every weight up or down by the relative `size`, by chance; zeros stay."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        weight.mul_((1 + size * signs).to(weight))


class CompiledLoop(Common):
    """A plain training loop around a Hugging Face model: what a careful person writes in an hour."""

    def __init__(self, job: Mapping[str, Any], device: torch.device) -> None:
        super().__init__(job, device)
        precision = Precision(build(PrecisionConfig, job["settings"]["precision"], "precision"), device)
        self.precision, self.autocast = precision.mode, precision.autocast
        if precision.mode == "fp16":
            raise UserError("precision.mode=fp16: the plain loop has no loss scaling; take precision=bf16 or fp32")
        devices.seed_everything(0)
        self.model = self.make_model().to(device).train()
        self.compiled = torch.compile(self.model) if job["compile"] else self.model
        o = self.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True
        )

    def make_model(self) -> Any:
        """BERT with our configuration's shapes."""
        return _bert(self.model_config)

    def run(self, first: int, count: int) -> tuple[list[float], list[float]]:
        rows, length = self.train.batch_size, self.train.sequence_length
        seconds, losses, before = [], [], time.perf_counter()
        for step, batch in enumerate(self.batches(first, count), first):
            batch = batch.to(self.device)
            labels = torch.full_like(batch.ids_T, -100).scatter_(0, batch.target_positions_M, batch.target_ids_M)
            ids, labels = (x.view(rows, length) for x in (batch.ids_T, labels))
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(step)
            with self.autocast() if self.precision != "fp32" else nullcontext():
                loss: Tensor = self.compiled(input_ids=ids, labels=labels).loss
            loss.backward()
            if self.optim.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            devices.synchronize(self.device)
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
        return seconds, losses


class ModernLoop(CompiledLoop):
    """The same loop around ModernBERT."""

    def make_model(self) -> Any:
        from transformers import ModernBertConfig, ModernBertForMaskedLM

        c = self.model_config
        every = c.global_every if c.local_window else 1
        config = ModernBertConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, max_position_embeddings=c.max_length,
            global_attn_every_n_layers=every, local_attention=c.local_window or 128, sparse_prediction=True,
            attn_implementation="sdpa", pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3,
        )  # fmt: skip
        return ModernBertForMaskedLM(config)


class HuggingFaceTrainer(Common):
    """`Trainer.train()` anew for each round: the weights go on, the optimizer is new; its first step is left out."""

    def __init__(self, job: Mapping[str, Any], device: torch.device) -> None:
        super().__init__(job, device)
        self.precision = Precision(build(PrecisionConfig, job["settings"]["precision"], "precision"), device).mode
        devices.seed_everything(0)
        self.model = _bert(self.model_config)
        self.tokenizer = _word_tokenizer(job["vocab_size"])

    def run(self, first: int, count: int) -> tuple[list[float], list[float]]:
        from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

        ends: list[float] = []

        class Ends(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                ends.append(time.perf_counter())

        rows, length, o = self.train.batch_size, self.train.sequence_length, self.optim
        starts = self.source.window_starts(torch.arange(first * rows, (first + count + 1) * rows).numpy())
        dataset = [{"input_ids": row} for row in self.source.stream.gather(starts, length).tolist()]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, per_device_train_batch_size=rows, max_steps=count + 1, optim="adamw_torch_fused",
                max_grad_norm=o.clip or 0.0, learning_rate=o.peak_learning_rate(rows), weight_decay=o.weight_decay,
                adam_beta1=o.betas[0], adam_beta2=o.betas[1], adam_epsilon=o.eps, bf16=self.precision == "bf16",
                fp16=self.precision == "fp16", use_cpu=self.device.type == "cpu", report_to="none", disable_tqdm=True,
                save_strategy="no", logging_strategy="no",
            )  # fmt: skip
            collator = DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=self.objective.rate)
            result = Trainer(self.model, arguments, collator, dataset, callbacks=[Ends()]).train()
        return [b - a for a, b in itertools.pairwise(ends)], [result.training_loss] * count


def _bert(c: ModelConfig) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads, intermediate_size=c.intermediate_size, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, max_position_embeddings=c.max_length,
        )
    )  # fmt: skip


def _word_tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = {f"{name}_token": f"[{name.upper()}]" for name in SPECIAL}
    words = [*special.values(), *(f"w{i}" for i in range(len(special), vocab_size))]
    table = {word: i for i, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(table, unk_token="[UNK]")), **special)


SIDES: dict[str, type[Ours] | type[CompiledLoop] | type[HuggingFaceTrainer]] = {
    "ours": Ours,
    "trainer": HuggingFaceTrainer,
    "bert loop": CompiledLoop,
    "modernbert loop": ModernLoop,
}


def matmul_flops(device: torch.device, dtype: torch.dtype, tf32: bool = False, seconds: float = 1.0) -> float:
    """Floating-point operations per second of large square products here and now: the median of repeats.

    `tf32` concerns those of fp32.
    """
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    rates: list[float] = []
    with float32_products(tf32):
        a @ b
        until = time.perf_counter() + seconds
        while not rates or time.perf_counter() < until:
            devices.synchronize(device)
            began = time.perf_counter()
            a @ b
            devices.synchronize(device)
            rates.append(2 * size**3 / (time.perf_counter() - began))
    return statistics.median(rates)
