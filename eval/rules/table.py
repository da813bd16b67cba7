"""The rules of the suite as code: each numbered sentence of docs/rules.md is one pure function of a record.

A check never repairs or guesses: it looks at what is written (`eval.rules.record`), says whether the sentence holds,
and shows its evidence. A record that breaks a rule marked `both` is invalid: its numbers cannot be trusted, so it is
listed but not ranked. Rules marked `closed` decide between the closed and the open division.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from eval.rules import closed_division, fine_tuning, validity
from eval.rules.evidence import Check
from eval.rules.record import Record, read_record


class Finding(NamedTuple):
    """What one check found: the rule's number, whether its sentence holds, and the evidence in words."""

    rule: str
    ok: bool
    evidence: str


class Rule(NamedTuple):
    """A rule's number, the division it binds and its check, whose docstring is the rule's sentence."""

    number: str
    division: Literal["both", "closed"]
    check: Check

    @property
    def sentence(self) -> str:
        """The sentence, as docs/rules.md has it."""
        return " ".join((self.check.__doc__ or "").split())

    def __call__(self, record: Record) -> Finding:
        """Check `record`."""
        return Finding(self.number, *self.check(record))


class Verdict(NamedTuple):
    """A record's division with all findings, in the order of the rules."""

    division: Literal["closed", "open", "invalid"]
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings that keep the record out of the closed division."""
        return tuple(f for f in self.findings if not f.ok)


def judge(record: Record) -> Verdict:
    """Check all rules. Invalid: a rule for both divisions is broken. Closed: every rule holds, and the run does not
    itself claim the open division. Open: everything else.
    """
    findings = tuple(rule(record) for rule in RULES)
    broken = {rule.division for rule, finding in zip(RULES, findings) if not finding.ok}
    if "both" in broken:
        return Verdict("invalid", findings)
    holds = not broken and record.division_requested != "open"
    return Verdict("closed" if holds else "open", findings)


def foreseen(known: Mapping[str, Any]) -> list[str]:
    """One line for each rule of the closed division that a run breaks before its first step.

    `known`: what a record.json would have then; its seconds are those that the budget allows.
    """
    record = read_record(known)
    findings = [rule(record) for rule in RULES if rule.number in FORESEEABLE]
    return [f"{finding.rule}: {finding.evidence}" for finding in findings if not finding.ok]


# The rules that a run can already break when its training begins.
FORESEEABLE = ("R10", "R11", "R12", "R13", "R15", "R16", "R17", "R23", "R24", "R25")
_BOTH = {
    "R1": validity.format_and_versions,
    "R2": validity.finite_numbers,
    "R3": validity.pretraining_finished,
    "R4": validity.budget_kept,
    "R5": validity.journal_agrees,
    "R6": validity.scores_stated,
    "R7": validity.scores_are_medians,
    "R8": validity.averages_complete,
    "R9": validity.subsets_marked,
}
_CLOSED = {
    "R10": closed_division.one_device,
    "R11": closed_division.one_day,
    "R12": closed_division.masked_language_model,
    "R13": closed_division.from_scratch,
    "R14": closed_division.own_weights_scored,
    "R15": closed_division.corpus_declared,
    "R16": closed_division.no_downstream_text,
    "R17": closed_division.tokenizer_origin,
    "R18": fine_tuning.global_hyperparameters,
    "R19": fine_tuning.few_epochs,
    "R20": fine_tuning.nothing_selected,
    "R21": fine_tuning.enough_seeds,
    "R22": fine_tuning.full_tasks,
    "R23": closed_division.clean_code,
    "R24": closed_division.nothing_forced,
    "R25": closed_division.compiled_on_the_clock,
    "R26": closed_division.predictions_beside,
}
RULES = (
    *(Rule(name, "both", check) for name, check in _BOTH.items()),
    *(Rule(name, "closed", check) for name, check in _CLOSED.items()),
)
