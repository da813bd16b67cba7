"""What `pretrain` would do, in words, for `--check`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cramming import device as devices
from cramming.checkpoint import MAX_NEWEST
from cramming.data.manifest import MANIFEST
from cramming.invocation import DeviceKind
from cramming.progress import budget_text, format_count
from cramming.recipe import Config

# Of a checkpoint with the two moments of Adam, all in fp32.
BYTES_PER_PARAMETER = 12


def training_lines(
    config: Config, corpus: Path, vocab_size: int, device: DeviceKind
) -> Iterator[str]:
    """Yield the corpus, the sizes of model and step, the budget and the disk that checkpoints take.

    `vocab_size`, in whole tiles of 64, counts where the corpus is not prepared yet. A budget of hours on a GPU has a
    prediction, for which its speed is measured in half a second.
    """
    state = (
        ""
        if (corpus / MANIFEST).is_file()
        else ", not prepared yet, so what it holds was not checked"
    )
    yield f"corpus: {corpus}{state}"
    vocabulary = config.model.vocab_size or vocab_size
    config = config.replace(model=replace(config.model, vocab_size=vocabulary))
    tokens = config.train.batch_size * config.train.sequence_length
    parameters = config.parameters.total
    yield (
        f"model: {format_count(parameters, 'parameters')}; step: {config.train.batch_size} sequences of"
        f" {config.train.sequence_length} = {tokens:,} tokens"
    )
    budget = budget_text(config.budget.unit, config.budget.limit)
    yield f"budget: {budget} by the {config.budget.clock} clock: {_work(config, device, tokens)}"
    files = len(config.checkpoint.keep_at) + MAX_NEWEST
    disk = files * BYTES_PER_PARAMETER * parameters
    yield f"disk: about {format_count(disk, 'B')} for {files} checkpoints"


def _work(config: Config, device: DeviceKind, tokens_per_step: int) -> str:
    """Return how much work the budget allows, in words."""
    unit, limit = config.budget.unit, config.budget.limit
    if unit == "hours" and devices.select(device).type == "cuda":
        return _prediction(config, device)
    if unit == "hours":
        # On two busy cores the measured speed of one product varied by a factor of 15.
        return "as many steps as the device makes (`cramming plan` predicts tokens)"
    if unit == "steps":
        return f"{format_count(limit * tokens_per_step, 'tokens')}, as long as it takes"
    if unit == "tokens":
        return f"{format_count(limit / tokens_per_step, 'steps')}, as long as they take"
    tokens = 1e18 * limit / config.flops_per_token()
    return f"{format_count(tokens, 'tokens')}, as long as it takes"


def _prediction(config: Config, device: DeviceKind) -> str:
    """Return the steps and tokens of a budget of hours: the range of `cramming plan`, for one device."""
    from cramming.plan.search import find_target, speed_range, steps_of_tokens, tokens_in_budget

    target = find_target(config, device)
    tokens = [tokens_in_budget(config, rate) for rate in speed_range(config, target.speed)]
    steps = [steps_of_tokens(config, count) for count in tokens]
    fewest_steps, most_steps = (format_count(count, "") for count in steps)
    fewest_tokens, most_tokens = (format_count(count, "") for count in tokens)
    return (
        f"{fewest_steps} to {most_steps} steps, {fewest_tokens} to {most_tokens} tokens on one {target.hardware.name}"
        " (a prediction, as by `cramming plan`)"
    )
