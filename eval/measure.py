"""The verb `cramming measure <run>`: numbers of a final model that need no fine-tuning, added to the run's log.

Speed and memory of the encoder alone, on full packed sequences of held-out text, and the pseudo-perplexity of held-out
text (eval/adapt/measure.py). Speed is the median over rounds of one batch, after rounds that warm up.
"""

import statistics
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cramming import device as devices
from cramming.config import UserError
from cramming.data.corpus import Corpus
from cramming.environment import environment
from cramming.invocation import DeviceKind, Invocation
from cramming.model.encoder import Encoder
from cramming.model.heads import MaskedLM
from cramming.model.load import load_exported
from cramming.precision import DTYPES, resolve
from cramming.progress import say
from cramming.record import load_record, run_lock, write_record
from cramming.runlog import Measured
from eval.adapt.measure import (
    BATCH_TOKENS,
    PERPLEXITY_TOKENS,
    held_out_windows,
    inputs,
    losses,
    masked,
    one_at_a_time,
)
from eval.finetune.models import ModelSource
from eval.finetune.run_models import find_model
from eval.finetune.store import ScoreLog, now

MAX_LENGTH = 128  # tokens of a sequence whose speed is measured, as in GLUE
WINDOWS = 256  # of held-out text, for the pseudo-perplexity
WARM_UP_ROUNDS, MIN_ROUNDS, MIN_SECONDS = 2, 5, 3.0


class Speed(NamedTuple):
    """Tokens per second of the encoder, the tokens of a batch, and the peak memory of the process or the GPU."""

    tokens_per_second: float
    batch_tokens: int
    memory_bytes: int


def main(*, path: Path, corpus: Path | None, device: DeviceKind) -> None:
    """Measure the final model of a run; `corpus` is the place of its corpus, if that is not the one in the log."""
    target = devices.select(device)
    source = find_model(Invocation(name=path.absolute().name, runs=path.absolute().parent), None)
    text = open_corpus(load_record(path)["corpus"], corpus)
    with run_lock(path), closing(ScoreLog(path)) as log:
        measured = measure(source, text, target)
        log.append(measured)
        write_record(path)
    perplexity = measured.pseudo_perplexity
    shown = "" if perplexity is None else f"pseudo-perplexity {perplexity:.2f}, "
    say(
        f"{path}: {shown}{measured.tokens_per_second:,.0f} tokens/s at inference in"
        f" {measured.precision}, {measured.memory_bytes / 1e9:.2f} GB"
    )


def measure(source: ModelSource, corpus: Corpus, device: torch.device) -> Measured:
    """Return the measures of a model of this suite."""
    model = load_exported(source.folder).to(device).eval()
    encoder = model.encoder if isinstance(model, MaskedLM) else model
    precision = resolve("auto", device)
    length = min(MAX_LENGTH, source.max_length or MAX_LENGTH)
    with torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32"):
        speed = measure_speed(encoder, corpus, length)
    return Measured(
        time=now(),
        model_sha256=source.sha256,
        pseudo_perplexity=pseudo_perplexity(model, corpus) if isinstance(model, MaskedLM) else None,
        **speed._asdict(),
        precision=precision,
        environment=environment(asdict(devices.describe(device))),
    )


def open_corpus(recorded: dict[str, str], corpus: Path | None) -> Corpus:
    """Return the corpus of a run; raise UserError if it is another."""
    text = Corpus.open(corpus or Path(recorded["folder"]))
    if text.manifest_sha256 != recorded["manifest_sha256"]:
        raise UserError(f"--corpus={text.folder}: not the corpus of this run. Give that one.")
    return text


@torch.inference_mode()
def measure_speed(encoder: Encoder, corpus: Corpus, length: int) -> Speed:
    """Return speed and memory of an encoder on a batch of held-out text."""
    device = encoder.embeddings.tokens.weight.device
    windows = held_out_windows(corpus, length, BATCH_TOKENS[device.type])
    ids_T, positions_T, packing, _ = inputs(masked(windows, corpus.special_ids.mask), device)
    seconds: list[float] = []
    while len(seconds) < WARM_UP_ROUNDS + MIN_ROUNDS or sum(seconds) < MIN_SECONDS:
        devices.synchronize(device)
        began = time.perf_counter()
        encoder(ids_T, positions_T, packing)
        devices.synchronize(device)
        seconds.append(time.perf_counter() - began)
    tokens = len(ids_T)
    memory_bytes = devices.peak_memory_bytes(device)
    return Speed(tokens / statistics.median(seconds[WARM_UP_ROUNDS:]), tokens, memory_bytes)


def pseudo_perplexity(model: MaskedLM, corpus: Corpus) -> float:
    """Return the exponential of the mean loss of held-out tokens, each the only masked one of its window."""
    windows = held_out_windows(corpus, PERPLEXITY_TOKENS, WINDOWS * PERPLEXITY_TOKENS)
    queries = one_at_a_time(windows[:WINDOWS], corpus.special_ids.mask)
    return float(np.exp(np.concatenate(losses(model, queries, "pseudo-perplexity")).mean()))
