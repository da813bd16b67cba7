"""What `pretrain` would do, in words, for `--check`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cramming.checkpoint import KEEP
from cramming.data.manifest import MANIFEST
from cramming.progress import budget_text, format_count
from cramming.recipe import Config

# Of a checkpoint with the two moments of Adam, all in fp32.
BYTES_PER_PARAMETER = 12


def training_lines(config: Config, corpus: Path, vocab_size: int) -> Iterator[str]:
    """Yield the corpus, the sizes of model and step, the budget and the disk that checkpoints take.

    `vocab_size` of the tokenizer counts where the corpus is not prepared yet.
    """
    state = (
        ""
        if (corpus / MANIFEST).is_file()
        else ", not prepared yet, so what it holds was not checked"
    )
    yield f"corpus: {corpus}{state}"
    vocabulary = config.model.vocab_size or (vocab_size + 63) // 64 * 64
    config = config.replace(model=replace(config.model, vocab_size=vocabulary))
    tokens = config.train.batch_size * config.train.sequence_length
    parameters = config.parameters.total
    yield (
        f"model: {format_count(parameters, 'parameters')}; step: {config.train.batch_size} sequences of"
        f" {config.train.sequence_length} = {tokens:,} tokens"
    )
    unit, limit = config.budget.unit, config.budget.limit
    work = {
        "hours": "as many steps as the device makes (`cramming plan` predicts them)",
        "steps": f"{format_count(limit * tokens, 'tokens')}, as long as it takes",
        "tokens": f"{format_count(limit / tokens, 'steps')}, as long as they take",
        "exaflops": f"{format_count(1e18 * limit / config.flops_per_token(), 'tokens')}, as long as it takes",
    }
    yield f"budget: {budget_text(unit, limit)} by the {config.budget.clock} clock: {work[unit]}"
    files = len(config.checkpoint.keep_at) + KEEP
    disk = files * BYTES_PER_PARAMETER * parameters
    yield f"disk: about {format_count(disk, 'B')} for {files} checkpoints"
