"""Worker process that trains the predecessor (github.com/JonasGeiping/cramming) with its own engine.

peers.py starts it with the predecessor's Python and talks to it by the protocol of cramming.bench.worker. The
predecessor's package is also called `cramming`, so this file imports nothing of this project. The predecessor's data
loader is left out, in its favour: random batches come ready from memory, and the clock starts behind them.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MASK_ID = 4
SPECIAL_IDS = 5  # ids below are not drawn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SDPA_KERNELS = ("flash", "mem_efficient", "math")


def main() -> None:
    """Answer the parent's messages until it closes the pipe: a specification builds, a count of steps trains."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout, which is the pipe
    for line in sys.stdin:
        message = json.loads(line)
        if "checkout" in message:
            trainer = Predecessor(message)
            answer = trainer.facts
        else:
            answer = trainer.run(message["count"])
        print(json.dumps(answer), file=answers, flush=True)


class Predecessor:
    """The predecessor's model, engine and optimizer on one device."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        sys.path[:0] = [spec["checkout"], *spec["path"]]
        import transformers
        from hydra import compose, initialize_config_dir

        import cramming

        torch.manual_seed(0)
        self.device = torch.device(spec["device"])
        config_folder = Path(spec["checkout"], "cramming", "config")
        with initialize_config_dir(str(config_folder), version_base="1.1"):
            config = compose("cfg_pretrain", spec["overrides"])
        self.rows = config.impl.microbatch_size
        self.micro_batches = config.train.batch_size // self.rows
        self.length = config.arch.embedding.max_seq_length
        self.vocabulary = spec["vocab_size"]
        self.targets = round(config.train.objective.mlm_probability * self.rows * self.length)
        self.generator = torch.Generator().manual_seed(0)
        if self.device.type == "cuda":
            set_process_flags(config.impl)
        model = cramming.construct_model(config.arch, self.vocabulary)
        self.engine, *_ = cramming.load_backend(
            model,
            None,
            Tokenizer(self.length),
            config.train,
            config.impl,
            setup={"device": self.device, "dtype": torch.float},
        )
        self.engine.train(config.train.pretrain_in_train_mode)
        if self.device.type == "cpu" and spec["precision"] in DTYPES:
            # The engine switches autocast on for GPUs only.
            dtype = DTYPES[spec["precision"]]
            self.engine.amp_settings = {"device_type": "cpu", "enabled": True, "dtype": dtype}
        self.facts = {
            "flops_per_token": spec["flops_per_token"],
            "precision": spec["precision"],
            "micro_batches": self.micro_batches,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    def run(self, count: int) -> dict[str, Any]:
        """Train `count` steps; return the seconds and the loss of each, and the peak memory so far."""
        seconds = []
        losses = []
        for _ in range(count):
            batches = [self.make_batch() for _ in range(self.micro_batches)]
            began = time.perf_counter()
            losses.append(self.step(batches))
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "losses": losses, "peak_bytes": self.peak_bytes()}

    def step(self, batches: list[dict[str, Tensor]]) -> float:
        """Train on the micro-batches of one step and wait for the device; return the mean loss."""
        total_loss = 0.0
        for batch in batches:
            loss = self.engine.step(self.engine.to_device(batch))
            total_loss += float(loss)  # the predecessor's loop also waits for each loss
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return total_loss / len(batches)

    def make_batch(self) -> dict[str, Tensor]:
        """Return random tokens with a fixed number of targets, pinned if the device is a GPU."""
        size = self.rows * self.length
        ids_T = torch.randint(SPECIAL_IDS, self.vocabulary, (size,), generator=self.generator)
        positions_M = torch.randperm(size, generator=self.generator)[: self.targets]
        labels_T = torch.full((size,), -100)
        labels_T[positions_M] = ids_T[positions_M]
        ids_T[positions_M] = MASK_ID
        batch = {"input_ids": ids_T, "labels": labels_T}
        batch = {name: tensor.view(self.rows, self.length) for name, tensor in batch.items()}
        if self.device.type == "cpu":
            return batch
        return {name: tensor.pin_memory() for name, tensor in batch.items()}

    def peak_bytes(self) -> int:
        """Return the peak of allocated GPU memory, or of this process's resident memory on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Tokenizer:
    """The one property of a tokenizer that the engine reads."""

    def __init__(self, model_max_length: int) -> None:
        self.model_max_length = model_max_length


def set_process_flags(impl: Any) -> None:
    """Set the precision of fp32 products and the attention kernels that the predecessor's launcher sets."""
    torch.backends.cudnn.benchmark = impl.benchmark
    torch.set_float32_matmul_precision(impl.matmul_precision)
    torch.backends.cuda.matmul.allow_tf32 = impl.tf32_allowed
    torch.backends.cudnn.allow_tf32 = impl.tf32_allowed
    for name in SDPA_KERNELS:
        enabled = impl[f"enable_{name}_sdp"]
        if enabled is not None:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


if __name__ == "__main__":
    main()
