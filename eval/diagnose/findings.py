"""The diagnoses: each is one pure function of the evidence, and its docstring is the sentence that people read.

A diagnosis compares one measured number with a limit. Its strength is the ratio of number and limit, from 1 at the
limit to `STRONGEST`. The limits lie between the numbers of healthy runs and those of planted faults
(benchmarks/results/diagnose_cpu_2026-11-28.md).
"""

import math
from typing import NamedTuple

from eval.diagnose.evidence import CorpusFacts, Evidence, ModelFacts, RunFacts, shown_loss

STRONGEST = 100.0
MOST_REPEATED = 0.2  # share of the windows of 12 words that occur earlier
MOST_UNKNOWN = 0.02  # share of the tokens
MOST_UNSEEN = 0.05  # share of the held-out tokens whose entry is not in the training text
MOST_TOKENS_PER_WORD = 2.0
SMALL_VOCABULARY = (
    4000  # entries; a vocabulary of more has few tokens per word on the text that it was made for
)
LEAST_USED = (
    0.35  # share of the entries that occur in a text of the kind that the vocabulary was made for
)
LEAST_ORDER = 0.15  # nats by which the word before predicts better than the third word before
LEAST_WORDS = 100_000  # sampled tokens below which counts of pairs of words are too few
LEAST_RATE, MOST_RATE = 0.05, 0.6  # share of the tokens that are targets
LEAST_STEP_TOKENS = 512
LEAST_SEQUENCE = 32  # tokens
MOST_DISTANCE = (
    10.0  # change of the weights over their length, from the first checkpoint to the second
)
LEAST_DISTANCE = 0.3  # the default recipe has 2.5
STRAIGHT = 0.3  # cosine of the weights' changes between checkpoints
UNCHANGED = 1e-4  # relative change of a parameter that counts as none
CHANGED = 1e-2  # median relative change of the parameters in a run that learns
MOST_SKIPPED = 0.1  # share of the steps
LEAST_SCALE = 1.0  # loss scale of fp16
ORDERLESS = 1e-4  # change of the states by shuffling words within sequences, over that by shuffling across them
BETTER_SHIFTED = 0.5  # nats by which a neighbour of the hidden word is the better answer
RISEN = 0.5  # nats above the best loss of the run
MOST_EPOCHS = 10.0
HALFWAY = 0.5  # share of the first loss; a run below it has learnt, if there is no entropy to compare with
LEAST_STEPS = (
    50  # steps between checkpoints below which their distance says nothing about the learning rate
)


class Symptom(NamedTuple):
    """Result of one diagnosis: its strength, the evidence in words, and the override that would change it."""

    strength: float
    evidence: str
    override: str


def strength(number: float, limit: float) -> float:
    """Return the ratio of a number and its limit, at least 1 and at most `STRONGEST`, also for an infinite number."""
    return min(STRONGEST, max(1.0, number / limit)) if limit else STRONGEST


def _below(number: float, limit: float) -> float:
    """Return the ratio of a limit and a number below it, as `strength` does for a number above."""
    return strength(limit, number)


def _noise_text(run: RunFacts) -> str:
    """Return a clause about the noise of the loss, or nothing for a run too short to measure it."""
    if math.isnan(run.noise):
        return ""
    return f"; the loss varies by {run.noise:.2f} nats from step to step"


# The text ---------------------------------------------------------------------------------------------------------


def repeated_text(evidence: Evidence) -> Symptom | None:
    """The text repeats itself: the model learns a few lines by heart instead of the language."""
    corpus = evidence.corpus
    if corpus is None or not corpus.repeated > MOST_REPEATED:
        return None
    words = (
        f"{corpus.repeated:.0%} of the windows of 12 words occur earlier in the text; the most frequent one"
        f" {corpus.repeated_times:,} times: {corpus.repeated_text!r}"
    )
    cure = (
        "data/filters=gopher data.near_duplicates.enabled=true, or remove such lines from the text"
    )
    return Symptom(strength(corpus.repeated, MOST_REPEATED), words, cure)


def wrong_tokenizer(evidence: Evidence) -> Symptom | None:
    """The tokenizer is not for this text: words become many pieces or unknown tokens."""
    corpus = evidence.corpus
    if corpus is None:
        return None
    cure = "tokenizer.path=null (trains one on this text)"
    if corpus.unknown > MOST_UNKNOWN:
        words = f"{corpus.unknown:.1%} of the tokens are unknown"
        return Symptom(strength(corpus.unknown, MOST_UNKNOWN), words, cure)
    pieces = corpus.tokens_per_word or math.nan
    if not pieces > MOST_TOKENS_PER_WORD or _is_small(corpus):
        return None
    words = (
        f"{pieces:.2f} tokens per word, and only {corpus.used_entries:,} of {corpus.vocab_size:,} entries of the"
        " vocabulary are in the text"
    )
    return Symptom(strength(pieces, MOST_TOKENS_PER_WORD), words, cure)


def small_vocabulary(evidence: Evidence) -> Symptom | None:
    """The vocabulary is too small: the model sees letters instead of words, and little text in a sequence."""
    corpus = evidence.corpus
    if corpus is None or corpus.tokens_per_word is None or not _is_small(corpus):
        return None
    if not corpus.tokens_per_word > MOST_TOKENS_PER_WORD:
        return None
    words = f"{corpus.vocab_size:,} entries give {corpus.tokens_per_word:.2f} tokens per word"
    cure = "tokenizer.vocab_size=32768"
    return Symptom(strength(corpus.tokens_per_word, MOST_TOKENS_PER_WORD), words, cure)


def _is_small(corpus: CorpusFacts) -> bool:
    """Return whether a vocabulary is small, and made for this text: most of it is in use."""
    is_used = corpus.used_entries >= LEAST_USED * corpus.vocab_size
    return corpus.vocab_size < SMALL_VOCABULARY and is_used


def no_word_order(evidence: Evidence) -> Symptom | None:
    """The words of the text are in random order: what stands beside a word says nothing about it."""
    corpus = evidence.corpus
    if corpus is None or corpus.sampled_tokens < LEAST_WORDS:
        return None
    if (corpus.tokens_per_word or 1.0) > MOST_TOKENS_PER_WORD:
        return None  # the first piece of a word does not stand for it
    gain = corpus.neighbour_gain - corpus.far_gain
    if not gain < LEAST_ORDER:
        return None
    words = (
        f"the word before predicts a word by {corpus.neighbour_gain:.2f} nats better than its frequency does, the third"
        f" before by {corpus.far_gain:.2f}: the nearer one is worth {gain:.2f} nats"
    )
    cure = "data.paths=[...] with text in its original order (`prepare` does not shuffle words)"
    return Symptom(_below(max(gain, LEAST_ORDER / STRONGEST), LEAST_ORDER), words, cure)


def unseen_labels(evidence: Evidence) -> Symptom | None:
    """The held-out text is out of the model's reach: it has tokens that the training text never shows."""
    corpus = evidence.corpus
    if corpus is None or not corpus.unseen > MOST_UNSEEN:
        return None
    words = f"{corpus.unseen:.1%} of the held-out tokens are not in {corpus.sampled_tokens:,} sampled training tokens"
    cure = "train.validation_corpus=null, or more text of that kind"
    return Symptom(strength(corpus.unseen, MOST_UNSEEN), words, cure)


# The recipe -------------------------------------------------------------------------------------------------------


def few_targets(evidence: Evidence) -> Symptom | None:
    """Too few tokens are hidden: a step learns from a few targets and computes all the rest for nothing."""
    run = evidence.run
    if run is None or not run.rate < LEAST_RATE or _has_learnt(evidence):
        return None
    targets = max(1, round(run.rate * run.sequence_length)) * run.sequences_per_step
    counts = f"{targets} of {run.tokens_per_step:,} in a step"
    words = f"{run.rate:.1%} of the tokens are targets, {counts}{_noise_text(run)}"
    return Symptom(_below(run.rate, LEAST_RATE), words, "objective.rate=0.25")


def few_words_left(evidence: Evidence) -> Symptom | None:
    """Too many tokens are hidden: hardly a word is left to predict the others from."""
    run = evidence.run
    if run is None or run.form is None or not run.rate > MOST_RATE or _has_learnt(evidence):
        return None
    words = f"{run.rate:.0%} of the tokens are hidden"
    return Symptom(strength(1 - MOST_RATE, 1 - run.rate), words, "objective.rate=0.25")


def small_batch(evidence: Evidence) -> Symptom | None:
    """The batch is too small: the gradient of a step is mostly noise."""
    run = evidence.run
    if run is None or not run.tokens_per_step < LEAST_STEP_TOKENS or _has_learnt(evidence):
        return None
    words = f"{run.sequences_per_step} sequence(s) of {run.sequence_length} tokens in a step{_noise_text(run)}"
    sequences = -(-4 * LEAST_STEP_TOKENS // run.sequence_length)
    cure = f"train.batch_size={sequences} (train.micro_batch={run.sequences_per_step} keeps the memory)"
    return Symptom(_below(run.tokens_per_step, LEAST_STEP_TOKENS), words, cure)


def short_sequences(evidence: Evidence) -> Symptom | None:
    """Sequences are cut too short: most of the words that would predict a hidden one are cut off."""
    run, corpus = evidence.run, evidence.corpus
    if run is None or corpus is None or not run.sequence_length < LEAST_SEQUENCE:
        return None
    if corpus.tokens_per_document < 2 * run.sequence_length or _has_learnt(evidence):
        return None
    words = f"sequences of {run.sequence_length} tokens cut documents of {corpus.tokens_per_document:,.0f} on average"
    return Symptom(_below(run.sequence_length, LEAST_SEQUENCE), words, "train.sequence_length=128")


def too_little_text(evidence: Evidence) -> Symptom | None:
    """The text is too little for the training: the model learns it by heart, and the held-out loss rises."""
    run = evidence.run
    if run is None or not run.epochs > MOST_EPOCHS or len(run.validations) < 2:
        return None
    best = min(loss for _, loss in run.validations)
    risen = run.last_validation - best
    if not risen > RISEN / 2:
        return None
    words = (
        f"{run.epochs:.0f} passes over the text; the held-out loss rose from {best:.2f} to"
        f" {run.last_validation:.2f}"
    )
    return Symptom(
        strength(risen, RISEN / 2), words, "more text in data.paths, or a smaller budget"
    )


# The optimization -------------------------------------------------------------------------------------------------


def rate_too_high(evidence: Evidence) -> Symptom | None:
    """The learning rate is too high: an update is far larger than the weights it changes, or the loss explodes."""
    run, model = evidence.run, evidence.model or ModelFacts()
    if run is None or _overflows(run) or _has_learnt(evidence):
        return None
    cure = f"optim.lr={run.peak_rate / 10:.2g}"
    norms = "no clipping"
    if run.clip:
        norms = f"{run.clipped:.0%} of the logged gradients were clipped"
    if run.clip and math.isnan(run.clipped):
        norms = "no gradient norm is logged"
    if run.status == "diverged":
        words = (
            f"the gradient was not finite any more at a peak rate of {run.peak_rate:.2g} ({norms})"
        )
        return Symptom(STRONGEST, words, cure)
    moved = f"the peak rate is {run.peak_rate:.2g}; {norms}"
    if not math.isnan(model.distance):
        moved = (
            f"in {model.distance_steps} steps the weights moved {model.distance:.2g} times their length"
            f" at a peak rate of {run.peak_rate:.2g}; {norms}"
        )
    if model.distance > MOST_DISTANCE:
        return Symptom(strength(model.distance, MOST_DISTANCE), moved, cure)
    risen = run.last_loss - run.best_loss
    if risen > RISEN and _losses_compare(run):
        words = f"the training loss rose from {run.best_loss:.2f} to {run.last_loss:.2f}; {moved}"
        return Symptom(strength(risen, RISEN), words, cure)
    return None


def rate_too_low(evidence: Evidence) -> Symptom | None:
    """The learning rate is too low: weights move little and in one direction, and the loss hardly falls."""
    run, model = evidence.run, evidence.model
    if run is None or model is None or _has_learnt(evidence):
        return None
    if run.skipped > MOST_SKIPPED * run.steps or model.distance_steps < LEAST_STEPS:
        return None
    if not (model.distance < LEAST_DISTANCE and model.turn > STRAIGHT):
        return None
    words = (
        f"in {model.distance_steps} steps the weights moved {model.distance:.2g} times their length at a peak rate of"
        f" {run.peak_rate:.2g}, and then in the same direction (cosine {model.turn:.2f})"
    )
    return Symptom(
        _below(model.distance, LEAST_DISTANCE), words, f"optim.lr={10 * run.peak_rate:.2g}"
    )


def loss_scale_stuck(evidence: Evidence) -> Symptom | None:
    """The loss scale of fp16 is stuck: gradients overflow and steps are skipped, or gradients round to zero."""
    run = evidence.run
    if run is None or run.precision != "fp16":
        return None
    cure = "precision.mode=bf16, or precision=fp32"
    if run.skipped > MOST_SKIPPED * run.steps:
        share = run.skipped / max(1, run.steps)
        words = f"{run.skipped} of {run.steps} steps were skipped, although the loss is finite ({run.last_loss:.2f})"
        return Symptom(strength(share, MOST_SKIPPED), words, cure) if _overflows(run) else None
    scale = evidence.model.loss_scale if evidence.model else math.nan
    if not scale < LEAST_SCALE:
        return None
    words = f"the loss scale has fallen to {scale:.2g}: small gradients round to zero"
    return Symptom(_below(scale, LEAST_SCALE), words, cure)


def frozen_parameters(evidence: Evidence) -> Symptom | None:
    """Parameters are frozen: some are the same in the first and the last checkpoint, while the others learn."""
    model = evidence.model
    if model is None or not model.changes:
        return None
    changes = sorted(model.changes.values())
    frozen = [name for name, change in model.changes.items() if change < UNCHANGED]
    if not frozen or changes[len(changes) // 2] < CHANGED:
        return None
    shown = ", ".join(frozen[:4])
    if len(frozen) > 4:
        shown += f" and {len(frozen) - 4} more"
    words = f"{len(frozen)} of {len(changes)} parameters have not changed: {shown}"
    largest = max(model.changes[name] for name in frozen)
    cure = "requires_grad and the optimizer's groups of these parameters (no setting freezes any)"
    return Symptom(_below(max(largest, UNCHANGED / STRONGEST), UNCHANGED), words, cure)


# The model and its labels -----------------------------------------------------------------------------------------


def no_positions(evidence: Evidence) -> Symptom | None:
    """The model does not see positions: its answers depend on which words are visible, not on where they are."""
    model = evidence.model
    if model is None or not model.order_use < ORDERLESS * model.context_use:
        return None
    words = (
        f"with the visible words of a sequence in another order the states at hidden words change by"
        f" {model.order_use:.1g} of their length, and the loss by {model.order_loss:.2f} nats; with words of other"
        f" sequences the states change by {model.context_use:.1g}"
    )
    least = max(model.order_use, ORDERLESS * model.context_use / STRONGEST)
    return Symptom(_below(least, ORDERLESS * model.context_use), words, "model.positions=rope")


def shifted_labels(evidence: Evidence) -> Symptom | None:
    """The labels are shifted: the model predicts a neighbour of the hidden word, not the word."""
    model = evidence.model
    if model is None or not model.losses:
        return None
    offset = min(model.losses, key=lambda each: model.losses[each])
    gain = model.losses[0] - model.losses[offset]
    if not gain > BETTER_SHIFTED:
        return None
    side = "behind" if offset > 0 else "before"
    words = (
        f"the model's answers fit the token {abs(offset)} {side} the hidden one (loss {model.losses[offset]:.2f})"
        f" better than the hidden one itself ({model.losses[0]:.2f})"
    )
    cure = "the targets of the objective (cramming/objectives): no setting shifts them"
    return Symptom(strength(gain, BETTER_SHIFTED), words, cure)


# ------------------------------------------------------------------------------------------------------------------


def _overflows(run: RunFacts) -> bool:
    """Return whether steps were skipped because gradients overflow in fp16, while the loss is finite."""
    return (
        run.precision == "fp16"
        and run.skipped > MOST_SKIPPED * run.steps
        and run.last_loss < math.inf
    )


def _losses_compare(run: RunFacts) -> bool:
    """Return whether the losses of all steps are of one task. Other objectives change the masking or the task."""
    return run.objective == "mlm"


def _has_learnt(evidence: Evidence) -> bool:
    """Return whether the loss is below the trigram entropy, or without a corpus below half of the first loss.

    Such a run learns, so none of its settings is a fault.
    """
    corpus, run = evidence.corpus, evidence.run
    if run is None or run.status == "diverged":
        return False
    if corpus is None or not run.predicts_tokens:
        return run.last_loss < HALFWAY * run.first_loss
    if not math.isnan(evidence.hidden_loss):
        return evidence.hidden_loss < corpus.trigram
    return run.last_loss < shown_loss(corpus.trigram, run.form)
