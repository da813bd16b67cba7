"""Training throughput of Hugging Face's trainers and ours on the same architecture, shapes and tokens, interleaved.

    python benchmarks/peers.py --out benchmarks/results/peers_<device>_<date>.md [--only "bert loop"] [precision=bf16]

All get the same vocabulary, number format, optimizer (fused AdamW, same constants), clipping, and the same share of
masked tokens; of ours the best stack of `cramming bench`, eager and compiled. Peers are used as their own documentation
says (the extra `bench` brings accelerate):

    trainer          Hugging Face `Trainer` and `BertForMaskedLM`, `DataCollatorForLanguageModeling`
    bert loop        a plain loop around `BertForMaskedLM`, compiled, labels -100 where nothing was masked
    modernbert loop  the same around `ModernBertForMaskedLM` with its own `sparse_prediction`, sdpa attention
    predecessor      the engine of github.com/JonasGeiping/cramming, compiled, without its autotuning of products
    predecessor without CUDA graphs
    predecessor as it ships    fp16, autotuned; a GPU's number format whatever `precision` says

The predecessor needs packages of its own, by a virtual environment or by folders before all others on its path:

    git clone https://github.com/JonasGeiping/cramming checkout
    python -m venv old && old/bin/pip install "torch>=2.11,<2.14" transformers==4.57.6 datasets==5.0.1 hydra-core \\
        multiprocess nvidia-ml-py psutil einops
    python benchmarks/peers.py --checkout checkout --python old/bin/python --only predecessor --out <file>.md
"""

import argparse
import itertools
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cramming import device as devices
from cramming.bench import tricks
from cramming.bench.main import measure
from cramming.bench.tables import versions
from cramming.bench.worker import SPECIAL, Candidate, Spec, Worker, Workload, serve, warm_up
from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.model.config import ModelConfig
from cramming.overrides import compose
from cramming.precision import Precision, resolve
from cramming.recipe import Config

VOCABULARY, LENGTH = 32768, 128
SHAPES = ("256,4,4,32", "768,12,12,16")  # hidden size, layers, heads, sequences per step


class CompiledLoop(Workload):
    """A plain training loop around a Hugging Face model: what a careful person writes in an hour."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        super().__init__(spec, device)
        number_format = Precision(self.config.precision, device)
        self.precision, self.autocast = number_format.mode, number_format.autocast
        if self.precision == "fp16":
            raise UserError(
                "precision.mode=fp16: the plain loop has no loss scaling; take precision=bf16 or fp32"
            )
        torch.manual_seed(0)
        self.model = self.make_model().to(device).train()
        self.compiled = torch.compile(self.model) if spec["compile"] else self.model
        o = self.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=o.lr,
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
            fused=True,
        )

    def make_model(self) -> Any:
        """BERT with our configuration's shapes."""
        return _bert(self.config.model)

    def step(self, batches: Sequence[Batch], step: int) -> float:
        batch = batches[0].to(self.device)
        labels = torch.full_like(batch.ids_T, -100).scatter_(
            0, batch.target_positions_M, batch.target_ids_M
        )
        ids, labels = (
            x.view(self.train.batch_size, self.train.sequence_length) for x in (batch.ids_T, labels)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        with self.autocast() if self.precision != "fp32" else nullcontext():
            loss = self.compiled(input_ids=ids, labels=labels).loss
        loss.backward()
        if self.optim.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.item())


class ModernLoop(CompiledLoop):
    """ModernBERT in the loop of its base class."""

    def make_model(self) -> Any:
        from transformers import ModernBertConfig, ModernBertForMaskedLM

        c = self.config.model
        every = c.global_every if c.local_window else 1
        config = ModernBertConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            max_position_embeddings=c.max_length,
            global_attn_every_n_layers=every,
            local_attention=c.local_window or 128,
            sparse_prediction=True,
            attn_implementation="sdpa",
            pad_token_id=0,
            cls_token_id=2,
            sep_token_id=3,
            bos_token_id=2,
            eos_token_id=3,
        )
        return ModernBertForMaskedLM(config)


class HuggingFaceTrainer(Workload):
    """`Trainer.train()` anew for each round: the weights go on, the optimizer is new; its first step is left out."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        super().__init__(spec, device)
        self.precision = Precision(self.config.precision, device).mode
        torch.manual_seed(0)
        self.model = _bert(self.config.model)
        self.tokenizer = _word_tokenizer(spec["vocab_size"])

    def run(self, first: int, count: int) -> tuple[list[float], list[float]]:
        from transformers import (
            DataCollatorForLanguageModeling,
            Trainer,
            TrainerCallback,
            TrainingArguments,
        )

        ends: list[float] = []

        class Ends(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                ends.append(time.perf_counter())

        rows, length, o = self.train.batch_size, self.train.sequence_length, self.optim
        starts = self.source.window_starts(
            torch.arange(first * rows, (first + count + 1) * rows).numpy()
        )
        dataset = [{"input_ids": row} for row in self.source.stream.gather(starts, length).tolist()]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=rows,
                max_steps=count + 1,
                optim="adamw_torch_fused",
                max_grad_norm=o.clip or 0.0,
                learning_rate=self.config.peak_learning_rate,
                weight_decay=o.weight_decay,
                adam_beta1=o.betas[0],
                adam_beta2=o.betas[1],
                adam_epsilon=o.eps,
                bf16=self.precision == "bf16",
                fp16=self.precision == "fp16",
                use_cpu=self.device.type == "cpu",
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                logging_strategy="no",
            )
            collator = DataCollatorForLanguageModeling(
                self.tokenizer, mlm_probability=self.objective.rate
            )
            result = Trainer(self.model, arguments, collator, dataset, callbacks=[Ends()]).train()
        return [b - a for a, b in itertools.pairwise(ends)], [result.training_loss] * count


def _bert(c: ModelConfig) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            intermediate_size=c.intermediate_size,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=c.max_length,
        )
    )


def _word_tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = {f"{name}_token": f"[{name.upper()}]" for name in SPECIAL}
    words = [*special.values(), *(f"w{i}" for i in range(len(special), vocab_size))]
    table = {word: i for i, word in enumerate(words)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(table, unk_token="[UNK]")), **special
    )


class Peer(NamedTuple):
    """Another trainer.

    `model` is our model of the same architecture, and `inner` the inner size of its MLP in hidden sizes. A peer without
    `make` runs by another Python, and `overrides` are settings of its own.
    """

    model: str
    inner: float
    make: type[Workload] | None = None
    overrides: tuple[str, ...] = ()


NO_AUTOTUNING = "impl._inductor_vars.max_autotune_gemm=False"
NO_GRAPHS = "impl._inductor_vars.triton.cudagraphs=False"
AS_IT_SHIPS = "predecessor as it ships"
PEERS = {
    "trainer": Peer("bert-base", 4.0, HuggingFaceTrainer),
    "bert loop": Peer("bert-base", 4.0, CompiledLoop),
    "modernbert loop": Peer("modern", 1.5, ModernLoop),
    "predecessor": Peer("crammed-bert", 2.0, overrides=(NO_AUTOTUNING,)),
    "predecessor without CUDA graphs": Peer(
        "crammed-bert", 2.0, overrides=(NO_AUTOTUNING, NO_GRAPHS)
    ),
    AS_IT_SHIPS: Peer("crammed-bert", 2.0),
}
IN_THIS_PYTHON = [name for name, peer in PEERS.items() if peer.make]
PREDECESSORS = [name for name, peer in PEERS.items() if not peer.make]
# The predecessor's settings by our name of a number format. Only fp16 needs its loss scaling.
NUMBER_FORMATS = {
    "fp32": ["impl.mixed_precision=False"],
    "bf16": ["impl.mixed_precision_target_dtype=bfloat16", "impl.grad_scaling=False"],
    "fp16": ["impl.mixed_precision_target_dtype=float16"],
}


class Checkout(NamedTuple):
    """The predecessor's source, the Python that runs it, and folders of packages before all others on its path."""

    folder: Path
    python: Path = Path(sys.executable)
    path: Sequence[Path] = ()


def predecessor_spec(spec: Spec, checkout: Checkout) -> dict[str, Any]:
    """Return the specification of a predecessor (`spec["peer"]`) that trains the shapes of `spec["settings"]`."""
    device = torch.device(spec["device"])
    config = Config.of(spec["settings"])
    model, train = replace(config.model, vocab_size=spec["vocab_size"]), config.train
    config = config.replace(model=model)
    micro_batch = train.batch_size if train.micro_batch == "auto" else train.micro_batch
    precision = resolve(config.precision.mode, device)
    if spec["peer"] == AS_IT_SHIPS:
        precision = "fp32" if device.type == "cpu" else "fp16"
    if precision not in NUMBER_FORMATS:
        formats = ", ".join(NUMBER_FORMATS)
        raise UserError(f"precision.mode={precision}: the predecessor lacks it. Use {formats}.")
    overrides = [
        "arch=crammed-bert",
        f"arch.hidden_size={model.hidden_size}",
        f"arch.num_transformer_layers={model.num_layers}",
        f"arch.attention.num_attention_heads={model.num_heads}",
        f"arch.intermed_size={2 * model.intermediate_size}",  # both halves of the gated layer
        f"arch.embedding.max_seq_length={train.sequence_length}",
        "train=bert-o4",
        f"train.objective.mlm_probability={config.objective.at(0.0).rate}",
        f"train.batch_size={train.batch_size}",
        "train.batch_size_ramp=0",
        f"impl.microbatch_size={micro_batch}",
        *NUMBER_FORMATS[precision],
        *PEERS[spec["peer"]].overrides,
    ]
    return {
        **spec,
        "overrides": overrides,
        "precision": precision,
        "flops_per_token": config.flops_per_token(),
        "checkout": str(checkout.folder.resolve()),
        "python": str(checkout.python.absolute()),
        "path": [str(folder.resolve()) for folder in checkout.path],
    }


def commit_of(checkout: Path) -> str | None:
    """Return the commit of a checkout with history, else None."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def candidate_of(spec: Spec, device: torch.device) -> Workload:
    """The peer that the specification names; else ours."""
    if "peer" not in spec:
        return Candidate(spec, device)
    make = PEERS[spec["peer"]].make
    assert make, "a predecessor runs by another Python: see worker_of"
    return make(spec, device)


def worker_of(spec: Spec, shares_code: bool = False) -> Worker:
    """A process that builds any of them."""
    if "checkout" in spec:
        script = Path(__file__).with_name("predecessor.py")
        return Worker(spec, [spec["python"], "-P", str(script)], shares_code)
    return Worker(spec, [sys.executable, __file__, "--serve"], shares_code)


def specs_of(
    name: str,
    shape: str,
    device: torch.device,
    overrides: Sequence[str],
    checkout: Checkout | None = None,
) -> list[dict[str, Any]]:
    """Return the candidates of one shape: the peer, then ours eager and compiled, in the peer's number format."""
    hidden, layers, heads, rows = map(int, shape.split(","))
    peer = PEERS[name]
    settings = compose(
        [
            f"model={peer.model}",
            "optim=adamw",
            f"train.sequence_length={LENGTH}",
            f"model.hidden_size={hidden}",
            f"model.num_layers={layers}",
            f"model.num_heads={heads}",
            f"model.intermediate_size={int(peer.inner * hidden)}",
            f"train.batch_size={rows}",
            f"train.micro_batch={rows}",
            *overrides,
        ]
    )
    stack = tricks.best(device.type, resolve("auto", device)).settings
    ours = {key: value for key, value in stack.items() if not key.startswith("precision.")}
    common = {"vocab_size": VOCABULARY, "device": device.type}
    specs = [{**common, "name": name, "peer": name, "settings": settings, "compile": True}]
    if not peer.make:
        assert checkout
        specs = [predecessor_spec(specs[0], checkout)]
    for label, compiled in (("ours, eager", "off"), ("ours, compiled", "model")):
        changed = tricks.changed(settings, {**ours, "runtime.compile": compiled})
        specs.append({**common, "name": label, "settings": changed})
    return specs


def compare(name: str, shape: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Two rows; one that says why if the peer cannot run."""
    hidden, layers, _, rows = shape.split(",")
    about: dict[str, Any] = {
        "shape": f"{hidden}x{layers}",
        "tokens_per_step": int(rows) * LENGTH,
        "peer": name,
    }
    checkout = None
    if name in PREDECESSORS:
        checkout = Checkout(args.checkout, args.python, args.path)
    try:
        base, *ours = specs_of(name, shape, devices.select(args.device), args.overrides, checkout)
        with worker_of(base) as worker:
            warm_up(worker)
            if checkout:
                about["peer_versions"] = worker.facts["versions"]
            for spec in ours:
                yield {
                    **about,
                    "name": spec["name"],
                    **measure(worker, spec, args.rounds, args.steps, worker_of),
                }
    except UserError as error:  # the other peers can still be measured
        yield {**about, "name": "ours", "error": str(error)}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One row per shape, peer and mode of ours."""
    lines = [
        "| shape | tokens/step | peer | peer tokens/s | ours | tokens/s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row['shape']} | {row['tokens_per_step']} | {row['peer']} |"
        if "error" in row:
            lines.append(f"{start} | {row['name']} | not run: {row['error']} | |")
            continue
        lines.append(
            f"{start} {row['base_tokens_per_second']:.0f} | {row['name']} | {row['tokens_per_second']:.0f}"
            f" | **{row['speedup']:.2f}** |"
        )
    return lines


def write(
    out: Path, title: str, command: str, rows: Sequence[dict[str, Any]], **about: Any
) -> None:
    """The result file: the table, and raw numbers at its end."""
    where = {
        **asdict(devices.describe(devices.select("auto"))),
        "python": platform.python_version(),
        **versions(),
    }
    text = [f"# {title}", "", f"`{command}`: {where | about}", "", *table(rows), "", "```json"]
    out.write_text("\n".join([*text, *map(json.dumps, rows), "```", ""]), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(PEERS), help="else all that can run")
    parser.add_argument(
        "--shapes", nargs="+", default=list(SHAPES), help="hidden size, layers, heads, sequences"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--checkout", type=Path, help="source of the predecessor")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="the predecessor's Python"
    )
    parser.add_argument(
        "--path", type=Path, nargs="+", default=[], help="folders of the predecessor's packages"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="settings of both, such as precision=bf16")
    args = parser.parse_args(arguments)
    names = args.only or (list(PEERS) if args.checkout else IN_THIS_PYTHON)
    if not args.checkout and set(names) & set(PREDECESSORS):
        parser.error("--only predecessor: its source is not known. Name it with --checkout.")
    about = {"predecessor": commit_of(args.checkout)} if args.checkout else {}
    rows: list[dict[str, Any]] = []
    for shape, name in itertools.product(args.shapes, names):
        for row in compare(name, shape, args):
            rows.append(row)
            print({key: value for key, value in row.items() if key != "raw_seconds"}, flush=True)
            how = f"--rounds {args.rounds} --steps {args.steps} {' '.join(args.overrides)}".strip()
            write(
                args.out,
                "Training throughput of other trainers and ours",
                f"python benchmarks/peers.py {how}",
                rows,
                **about,
            )


if __name__ == "__main__":
    serve(candidate_of) if sys.argv[1:] == ["--serve"] else main()
