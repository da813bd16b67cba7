"""The table of diagnoses, their findings by strength, and the loss compared with entropies of the corpus."""

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
    """Return the findings, the strongest evidence first."""
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
    """Return a text that compares the model's loss with entropies of the corpus, or says why that is not possible."""
    corpus, run = evidence.corpus, evidence.run
    if corpus is None:
        return "no corpus at hand: the loss cannot be compared with its entropies"
    entropies = {
        "uniform": math.log(corpus.vocab_size),
        "unigram": corpus.unigram,
        "bigram": corpus.bigram,
        "trigram": corpus.trigram,
    }
    if run is None:
        listed = ", ".join(f"{name} {value:.2f}" for name, value in entropies.items())
        return f"entropies in nats per token: {listed}"
    loss = evidence.hidden_loss
    if not math.isnan(loss):
        return f"loss {loss:.2f} nats for a hidden token: {_between(loss, entropies)}"
    loss = run.last_loss
    if not run.predicts_tokens or math.isnan(loss):
        return "no loss to compare with the entropies of the corpus"
    in_training = {name: shown_loss(value, run.form) for name, value in entropies.items()}
    return f"loss {loss:.2f} nats in training: {_between(loss, in_training)}"


def knows_frequencies_only(evidence: Evidence) -> bool:
    """Return whether the loss is no lower than the unigram entropy: predictions do not depend on neighbours yet."""
    return evidence.corpus is not None and (evidence.hidden_loss > evidence.corpus.unigram - SLACK)


def _between(loss: float, entropies: dict[str, float]) -> str:
    """Return in words between which two entropies a loss lies; they are in descending order."""
    above = ""
    for name, value in entropies.items():
        if loss < value:
            above = f"{name} {value:.2f}"
        elif above:
            return f"between {above} and {name} entropy {value:.2f}"
        else:
            return f"above {name} entropy {value:.2f}"
    return f"below {name} entropy {value:.2f}"


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
