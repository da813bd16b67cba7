"""The rules of the suite as code: each numbered sentence of docs/rules.md is one pure function of a record.

A record is the whole content of a run's record.json, with one more section, `journal`, that the loader makes by reading
the run's budget.jsonl again (`eval.rules.reading`). A check never repairs or guesses: it looks at what is written, says
whether the sentence holds, and shows its evidence. Rules marked `both` hold in both divisions, and a record that breaks
one is invalid: its numbers cannot be trusted, so it is listed but not ranked. Rules marked `closed` decide between the
closed and the open division. The checks themselves are in `eval.rules.validity` and `eval.rules.closed`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from eval.rules import closed, validity
from eval.rules.closed import MIN_SEEDS
from eval.rules.reading import Outcome, Record, at
from eval.rules.validity import COMPARABLE

__all__ = ["COMPARABLE", "MIN_SEEDS", "RULES", "Finding", "Rule", "Verdict", "foreseen", "judge"]

Check = Callable[[Record], Outcome]


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
        """Check `record`; pure, and total over any JSON content."""
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
    holds = not broken and at(record, "division_requested") != "open"
    return Verdict("closed" if holds else "open", findings)


# The rules that a run can already break when its training begins.
FORESEEABLE = ("R10", "R11", "R12", "R13", "R15", "R16", "R17", "R23", "R24", "R25")


def foreseen(record: Record) -> list[str]:
    """One line for each rule of the closed division that a run breaks before its first step.

    `record`: what is known then, in a finished record's form; its seconds are those that the budget allows.
    """
    findings = [(rule, rule(record)) for rule in RULES if rule.number in FORESEEABLE]
    return [f"{rule.number}: {finding.evidence}" for rule, finding in findings if not finding.ok]


_BOTH: dict[str, Check] = {
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
_CLOSED: dict[str, Check] = {
    "R10": closed.one_device,
    "R11": closed.one_day,
    "R12": closed.masked_language_model,
    "R13": closed.from_scratch,
    "R14": closed.own_weights_scored,
    "R15": closed.corpus_declared,
    "R16": closed.no_downstream_text,
    "R17": closed.tokenizer_origin,
    "R18": closed.global_hyperparameters,
    "R19": closed.few_epochs,
    "R20": closed.nothing_selected,
    "R21": closed.enough_seeds,
    "R22": closed.full_tasks,
    "R23": closed.clean_code,
    "R24": closed.nothing_forced,
    "R25": closed.compiled_on_the_clock,
    "R26": closed.predictions_beside,
}
RULES = (
    *(Rule(name, "both", check) for name, check in _BOTH.items()),
    *(Rule(name, "closed", check) for name, check in _CLOSED.items()),
)
