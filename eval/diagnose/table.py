"""The table of diagnoses, and what they say together: findings by strength, and the loss put in perspective."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from cramming.plateau import SLACK
from eval.diagnose import findings
from eval.diagnose.evidence import Evidence, shown_loss
from eval.diagnose.findings import Symptom

CHECKS: tuple[Callable[[Evidence], Symptom | None], ...] = (
    findings.repeated_text,
    findings.wrong_tokenizer,
    findings.small_vocabulary,
    findings.no_word_order,
    findings.unseen_labels,
    findings.few_targets,
    findings.few_words_left,
    findings.small_batch,
    findings.short_sequences,
    findings.too_little_text,
    findings.rate_too_high,
    findings.rate_too_low,
    findings.loss_scale_stuck,
    findings.frozen_parameters,
    findings.no_positions,
    findings.shifted_labels,
)


class Finding(NamedTuple):
    """A diagnosis that applies: its name and sentence, and the symptom."""

    name: str
    sentence: str
    strength: float
    evidence: str
    override: str


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return what is wrong, the strongest evidence first; nothing where no fault is found."""
    findings: list[Finding] = []
    for check in CHECKS:
        symptom = check(evidence)
        if symptom is not None:
            findings.append(Finding(check.__name__, sentence_of(check), *symptom))
    return sorted(findings, key=lambda finding: -finding.strength)


def sentence_of(check: Callable[[Evidence], Symptom | None]) -> str:
    """Return the sentence of a diagnosis: its docstring as one line."""
    return " ".join((check.__doc__ or "").split())


def perspective(evidence: Evidence) -> str:
    """Return between which entropies of the corpus the model's loss lies; empty where there is nothing to compare."""
    corpus, run = evidence.corpus, evidence.run
    if corpus is None:
        return "no corpus at hand: the loss cannot be compared with its entropies"
    steps = {
        "uniform": math.log(corpus.vocab_size),
        "unigram": corpus.unigram,
        "bigram": corpus.bigram,
        "trigram": corpus.trigram,
    }
    if run is None:
        entropies = ", ".join(f"{name} {value:.2f}" for name, value in steps.items())
        return f"entropies in nats per token: {entropies}"
    loss, of = evidence.hidden_loss, "for a hidden token"
    if math.isnan(loss):
        if not run.predicts_tokens or math.isnan(run.last_loss):
            return "no loss to compare with the entropies of the corpus"
        loss, of = run.last_loss, "in training"
        steps = {name: shown_loss(value, run.form) for name, value in steps.items()}
    return f"loss {loss:.2f} nats {of}: {_between(loss, steps)}"


def knows_frequencies_only(evidence: Evidence) -> bool:
    """Return whether the loss lies at the unigram entropy or above it: no neighbour of a hidden token is used yet."""
    return evidence.corpus is not None and (evidence.hidden_loss > evidence.corpus.unigram - SLACK)


def _between(loss: float, steps: dict[str, float]) -> str:
    """Return the place of a loss among descending entropies, in words."""
    above: tuple[str, float] | None = None
    for name, value in steps.items():
        if loss >= value:
            here = f"{name} entropy {value:.2f}"
            return f"between {above[0]} {above[1]:.2f} and {here}" if above else f"above {here}"
        above = (name, value)
    assert above
    return f"below {above[0]} entropy {above[1]:.2f}"


def diagnoses_list() -> str:
    """Return the sentences of all diagnoses as a list in Markdown, for the site."""
    return "\n".join(f"- `{check.__name__}`: {sentence_of(check)}" for check in CHECKS)


def summary(place: str, evidence: Evidence) -> dict[str, Any]:
    """Return the diagnosis for programs."""
    return {
        "path": place,
        "perspective": perspective(evidence),
        "on_plateau": knows_frequencies_only(evidence),
        "findings": [finding._asdict() for finding in diagnose(evidence)],
    }
