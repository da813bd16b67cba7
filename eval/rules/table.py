"""Table of the rules: each numbered sentence of docs/reference/rules.md is one pure function.

A check never repairs or guesses: it reads the log, returns whether the sentence holds, and gives its evidence.
`report`, `verify` and `submit` all get a run's verdict from `evaluate`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from cramming.config import UserError
from cramming.record_schema import Record, read_record
from eval.rules import closed_division, curves, fine_tuning, plausibility, validity
from eval.rules.evidence import Evidence, Outcome

# Kind of a rule: its consequence if it is broken. The run is then not finished ("finished"), invalid ("both"), in the
# open division ("closed"), or only has a remark ("remark").
Kind = Literal["finished", "both", "closed", "remark"]
Division = Literal["closed", "open", "unfinished", "invalid"]


class Finding(NamedTuple):
    """Result of one check: the rule's number, whether its sentence holds, and the evidence as text."""

    rule: str
    ok: bool
    evidence: str


class Rule(NamedTuple):
    """Number of a rule, its kind and its check, whose docstring is the rule's sentence.

    `untrained` is the outcome for a record without pretraining, if that needs no check.
    """

    number: str
    kind: Kind
    check: Callable[[Any], Outcome]
    untrained: bool | None = None

    @property
    def sentence(self) -> str:
        """Sentence of the rule in docs/reference/rules.md."""
        return " ".join((self.check.__doc__ or "").split())

    def __call__(self, evidence: Record | Evidence) -> Finding:
        record = evidence.record if isinstance(evidence, Evidence) else evidence
        if record.pretrain is None and self.untrained is not None:
            return Finding(self.number, self.untrained, "no pretraining in this record")
        try:
            return Finding(self.number, *self.check(evidence))
        except (
            UserError
        ) as error:  # the recipe of the record is invalid, so that no run starts with it
            return Finding(self.number, False, str(error))


class Verdict(NamedTuple):
    """Division of a run with all findings, in the order of the rules."""

    division: Division
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """Findings that exclude the run from the closed division."""
        return tuple(f for f in self.findings if not f.ok and KINDS[f.rule] != "remark")

    def broken_of(self, kind: Kind) -> tuple[Finding, ...]:
        """Return the broken findings of one kind."""
        return tuple(f for f in self.findings if not f.ok and KINDS[f.rule] == kind)

    def with_record(self, record: Record) -> "Verdict":
        """Return the verdict on `record`, which other runs were added to. Only the rules that read them are checked."""
        findings = list(self.findings)
        for index, rule in enumerate(RECORD_RULES):
            if rule.number in READ_OTHER_RUNS:
                findings[index] = rule(record)
        return Verdict(_division(record, findings), tuple(findings))


# rules that are functions of the record
RECORD_RULES = (
    Rule("R1", "both", validity.versions_named),
    Rule("R2", "finished", validity.pretraining_finished, untrained=True),
    Rule("R3", "finished", validity.scoring_finished),
    Rule("R4", "both", validity.budget_kept, untrained=True),
    Rule("R5", "both", validity.scores_in_range),
    Rule("R6", "both", validity.subsets_marked),
    Rule("R7", "closed", closed_division.one_device, untrained=False),
    Rule("R8", "closed", closed_division.one_day, untrained=False),
    Rule("R9", "closed", closed_division.masked_language_model, untrained=False),
    Rule("R10", "closed", closed_division.from_scratch, untrained=False),
    Rule("R11", "closed", closed_division.trained_weights_scored, untrained=False),
    Rule("R12", "closed", closed_division.corpus_declared),
    Rule("R13", "closed", closed_division.no_downstream_text),
    Rule("R14", "closed", closed_division.tokenizer_origin),
    Rule("R15", "closed", fine_tuning.global_hyperparameters),
    Rule("R16", "closed", fine_tuning.few_epochs),
    Rule("R17", "closed", fine_tuning.nothing_selected),
    Rule("R18", "closed", fine_tuning.enough_seeds),
    Rule("R19", "closed", fine_tuning.full_tasks),
    Rule("R20", "closed", closed_division.clean_code),
    Rule("R21", "closed", closed_division.nothing_forced, untrained=False),
    Rule("R22", "closed", closed_division.compiled_on_the_clock, untrained=False),
    Rule("R23", "closed", closed_division.predictions_present),
    Rule("R24", "closed", closed_division.weights_at_hand, untrained=False),
)
# rules that are functions of the record and of the log that it was computed from
PLAUSIBILITY_RULES = (
    Rule("P1", "both", plausibility.setup_follows_recipe, untrained=True),
    Rule("P2", "both", plausibility.steps_logged, untrained=True),
    Rule("P3", "both", plausibility.steps_in_time, untrained=True),
    Rule("P4", "both", plausibility.tokens_add_up, untrained=True),
    Rule("P5", "both", plausibility.compute_adds_up, untrained=True),
    Rule("P6", "both", plausibility.progress_is_spent, untrained=True),
    Rule("P7", "both", plausibility.schedule_followed, untrained=True),
    Rule("P8", "both", plausibility.hardware_can_do_it, untrained=True),
    Rule("P9", "both", plausibility.clocks_agree, untrained=True),
    Rule("P10", "both", plausibility.heartbeats_came, untrained=True),
    Rule("P11", "both", plausibility.losses_are_means, untrained=True),
    Rule("P12", "both", plausibility.losses_fit_accuracies, untrained=True),
    Rule("P13", "both", plausibility.validations_as_planned, untrained=True),
    Rule("P14", "both", plausibility.accuracies_are_counts),
    Rule("P15", "both", plausibility.fine_tunings_in_order),
    Rule("P16", "remark", curves.falls_no_faster, untrained=True),
    Rule("P17", "remark", curves.varies_from_step_to_step, untrained=True),
)
RULES = (*RECORD_RULES, *PLAUSIBILITY_RULES)
READ_OTHER_RUNS = (
    "R17",
)  # rules that read `Record.elsewhere`, the fine-tunings of the same weights by other runs
KINDS: dict[str, Kind] = {rule.number: rule.kind for rule in RULES}
# rules that a run can already break when its training begins
FORESEEABLE = ("R7", "R8", "R9", "R10", "R12", "R13", "R14", "R20", "R21", "R22")


def evaluate(evidence: Evidence) -> Verdict:
    """Check all rules, and return the verdict.

    Invalid: a rule of both divisions is broken. Unfinished: the run or its scoring has not ended. Closed: every rule
    holds, and the run does not claim the open division. Open: everything else.
    """
    findings = [rule(evidence.record) for rule in RECORD_RULES]
    findings += [rule(evidence) for rule in PLAUSIBILITY_RULES]
    return Verdict(_division(evidence.record, findings), tuple(findings))


def _division(record: Record, findings: list[Finding]) -> Division:
    broken = {KINDS[finding.rule] for finding in findings if not finding.ok}
    if "both" in broken:
        return "invalid"
    if "finished" in broken:
        return "unfinished"
    if "closed" in broken or record.claims_open:
        return "open"
    return "closed"


def foreseen(known: Mapping[str, Any]) -> list[str]:
    """Return one line for each rule of the closed division that a run breaks before its first step.

    `known` is the record of the log at that time, with the limit of the budget as the spent seconds.
    """
    record = read_record(known)
    findings = [rule(record) for rule in RECORD_RULES if rule.number in FORESEEABLE]
    return [f"{finding.rule}: {finding.evidence}" for finding in findings if not finding.ok]
