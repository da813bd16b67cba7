"""Remarks on the curve of the training loss: it should fall and vary as in the honest runs that were measured.

A remark breaks no rule, since a better recipe may fall faster. Measured on 2026-11-28: three runs of 7M parameters on
Wikipedia, 8,500 to 10,100 steps each, and 400 steps of seven tiny models on a text in which every token follows from
the one before, with learning rates and batches that learn it as fast as possible.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from eval.rules.evidence import Evidence, Outcome, all_or
from eval.rules.plausibility import NOTHING_LOGGED

WINDOW = 5  # steps over which losses are averaged
# The fastest measured run took 19 steps to 0.9 of the first loss, 52 to a half and 164 to a tenth. A run that takes
# half as many gets a remark.
STEPS_PER_E_FOLD = 30.0
# Natural text in nats per target: 5.3 after 0.6M tokens and 4.2 after 10M; a fifth less gets a remark.
NATURAL_VOCABULARY = (
    4096  # smallest vocabulary to which this applies; the measured runs have 16,384
)
NATURAL_NATS, NATURAL_TOKENS, NATURAL_POWER = 0.8 * 5.3, 6e5, 0.11
# Standard deviation of one target's loss: 3.4 to 4.6 nats in any 200 steps of the measured runs on natural text.
LEAST_DEVIATION = 0.5
LEAST_STEPS = 100


def falls_no_faster(evidence: Evidence) -> Outcome:
    """The training loss falls no faster than in any honest run that was measured."""
    facts = evidence.facts
    if facts is None:
        return True, NOTHING_LOGGED
    if not facts.is_plain:
        return True, "the objective changes"
    first = math.log(facts.model.vocab_size or 1)
    sources = evidence.record.corpus.sources
    is_generated = any(source.kind == "embedded" for source in sources)
    is_natural = not is_generated and (facts.model.vocab_size or 0) >= NATURAL_VOCABULARY
    tokens_of = {row.step: row.tokens for row in evidence.training.steps}
    problems: list[str] = []
    for step, loss in _means(evidence):
        least = first * math.exp(-step / STEPS_PER_E_FOLD)
        if is_natural and tokens_of.get(step):
            shrinking = (NATURAL_TOKENS / tokens_of[step]) ** NATURAL_POWER
            least = max(least, min(0.8 * first, NATURAL_NATS * shrinking))
        if loss < least:
            problems.append(
                f"step {step}: loss {loss:.3g}, {least:.3g} in the fastest that are known"
            )
    return all_or(problems, "no faster than known runs")


def _means(evidence: Evidence) -> Iterator[tuple[int, float]]:
    """Yield each logged step with the mean loss of the last steps up to it."""
    recent: list[float] = []
    for row in evidence.training.steps:
        recent += [loss for loss in row.each_loss if loss is not None]
        recent = recent[-WINDOW:]
        if len(recent) == WINDOW:
            yield row.step, statistics.fmean(recent)


def varies_from_step_to_step(evidence: Evidence) -> Outcome:
    """The training loss varies from step to step, as the mean over so few targets does in every honest run."""
    facts = evidence.facts
    if facts is None:
        return True, NOTHING_LOGGED
    if not facts.is_plain:
        return True, "the objective changes"
    length = facts.settings.train.sequence_length
    targets = facts.settings.train.batch_size * facts.objective.at(0.0).per_row(length)
    highest = 0.9 * math.log(facts.model.vocab_size or 1)
    losses = chain.from_iterable(row.each_loss for row in evidence.training.steps)
    learning = [loss for loss in losses if loss is not None and 1.0 < loss < highest]
    if len(learning) < LEAST_STEPS:
        return True, f"{len(learning)} steps are too few to tell"
    deviation = _deviation(learning) * math.sqrt(targets)
    words = f"{deviation:.2f} nats of deviation per target"
    return deviation >= LEAST_DEVIATION, words


def _deviation(losses: Sequence[float]) -> float:
    """Return the standard deviation of a step's loss from its neighbours, computed from second differences."""
    return float(np.diff(losses, 2).std()) / math.sqrt(6)
