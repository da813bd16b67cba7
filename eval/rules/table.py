"""The rules of the suite as code: each numbered sentence of docs/rules.md is one pure function of a record.

A check never repairs or guesses: it looks at what is written (cramming/record_schema.py), says whether the sentence
holds, and shows its evidence. A record that breaks a rule marked `both` is invalid: its numbers cannot be trusted, so
it is listed but not ranked. Rules marked `closed` decide between the closed and the open division.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from cramming.record_schema import Record, read_record
from eval.rules import closed_division, consistency, fine_tuning, validity
from eval.rules.evidence import Outcome


class Finding(NamedTuple):
    """What one check found: the rule's number, whether its sentence holds, and the evidence in words."""

    rule: str
    ok: bool
    evidence: str


class Rule(NamedTuple):
    """A rule's number, the division it binds and its check, whose docstring is the rule's sentence.

    `untrained` is what it says of a record without pretraining, where that needs no check.
    """

    number: str
    division: Literal["both", "closed"]
    check: Callable[[Record], Outcome]
    untrained: bool | None = None

    @property
    def sentence(self) -> str:
        """The sentence, as docs/rules.md has it."""
        return " ".join((self.check.__doc__ or "").split())

    def __call__(self, record: Record) -> Finding:
        if record.pretrain is None and self.untrained is not None:
            return Finding(self.number, self.untrained, "no pretraining in this record")
        return Finding(self.number, *self.check(record))


class Verdict(NamedTuple):
    """A record's division with all findings, in the order of the rules."""

    division: Literal["closed", "open", "invalid"]
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings that keep the record out of the closed division."""
        return tuple(f for f in self.findings if not f.ok)


RULES = (
    Rule("R1", "both", validity.format_and_versions),
    Rule("R2", "both", validity.finite_numbers),
    Rule("R3", "both", validity.pretraining_finished, untrained=True),
    Rule("R4", "both", validity.budget_kept, untrained=True),
    Rule("R5", "both", validity.journal_agrees, untrained=True),
    Rule("R6", "both", validity.scores_stated),
    Rule("R7", "both", validity.scores_are_medians),
    Rule("R8", "both", validity.averages_complete),
    Rule("R9", "both", validity.subsets_marked),
    Rule("R10", "closed", closed_division.one_device, untrained=False),
    Rule("R11", "closed", closed_division.one_day, untrained=False),
    Rule("R12", "closed", closed_division.masked_language_model, untrained=False),
    Rule("R13", "closed", closed_division.from_scratch, untrained=False),
    Rule("R14", "closed", closed_division.own_weights_scored, untrained=False),
    Rule("R15", "closed", closed_division.corpus_declared),
    Rule("R16", "closed", closed_division.no_downstream_text),
    Rule("R17", "closed", closed_division.tokenizer_origin),
    Rule("R18", "closed", fine_tuning.global_hyperparameters),
    Rule("R19", "closed", fine_tuning.few_epochs),
    Rule("R20", "closed", fine_tuning.nothing_selected),
    Rule("R21", "closed", fine_tuning.enough_seeds),
    Rule("R22", "closed", fine_tuning.full_tasks),
    Rule("R23", "closed", closed_division.clean_code),
    Rule("R24", "closed", closed_division.nothing_forced, untrained=False),
    Rule("R25", "closed", closed_division.compiled_on_the_clock, untrained=False),
    Rule("R26", "closed", closed_division.predictions_beside),
    Rule("R27", "both", consistency.folder_agrees),
)
# What a run can already break when its training begins.
FORESEEABLE = ("R10", "R11", "R12", "R13", "R15", "R16", "R17", "R23", "R24", "R25")


def judge(record: Record) -> Verdict:
    """Check all rules. Invalid: a rule for both divisions is broken. Closed: every rule holds, and the run does not
    itself claim the open division. Open: everything else.
    """
    findings = tuple(rule(record) for rule in RULES)
    broken = {rule.division for rule, finding in zip(RULES, findings) if not finding.ok}
    if "both" in broken:
        return Verdict("invalid", findings)
    return Verdict("open" if broken or record.claims_open else "closed", findings)


def foreseen(known: Mapping[str, Any]) -> list[str]:
    """One line for each rule of the closed division that a run breaks before its first step.

    `known`: what a record.json would have then; its seconds are those that the budget allows.
    """
    record = read_record(known)
    findings = [rule(record) for rule in RULES if rule.number in FORESEEABLE]
    return [f"{finding.rule}: {finding.evidence}" for finding in findings if not finding.ok]
