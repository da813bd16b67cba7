"""`cramming verify <folder or archive>`: is a run, or a corpus, what it says it is?

Of a run all rules are asked, with their evidence; R27 compares the folder's files with each other. Where the folder has
a list of its files (eval/archive.py), each that was changed is named. What all this cannot prove is said each time
(docs/rules.md, "What no check here can show").
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cramming.config import build
from cramming.data import inspect
from cramming.data.manifest import corpus_folder
from cramming.progress import say, use_stderr
from eval.archive import SUFFIX, altered_since, opened
from eval.rules.load import has_traces, load_run
from eval.rules.table import Verdict

UNPROVEN = (
    "This shows that the run agrees with itself, not that the training took place: who writes all files anew, hashes"
    " included, is found only by doing the work again (cramming replay)."
)


@dataclass(frozen=True)
class VerifyConfig:
    """Section `verify`: for programs, one line of JSON in place of the text."""

    json: bool


@dataclass(frozen=True)
class Verification:
    """Of a run: what is wrong with its files, and what the rules find."""

    problems: list[str]
    verdict: Verdict

    @property
    def in_order(self) -> bool:
        """Whether its numbers can be trusted as far as the folder shows, in whichever division."""
        return not self.problems and self.verdict.division != "invalid"


def verify_run(folder: Path) -> Verification:
    """Judge the run in `folder` by the list of its files and by all rules."""
    run = load_run(folder)
    return Verification([*altered_since(folder), *([run.problem] if run.problem else [])], run.verdict)


def main(config: Mapping[str, Any]) -> None:
    """The verb: a run's findings, exit code 1 where it is not in order; or a corpus's altered files (UserError)."""
    settings, place = build(VerifyConfig, config["verify"], "verify"), corpus_folder(config)
    if not place.name.endswith(SUFFIX) and not has_traces(place):
        inspect.verify(config)
        return
    if settings.json:
        use_stderr()
    with opened(place) as folder:
        found = verify_run(folder)
    for problem in found.problems:
        say(f"{place}: {problem}")
    for finding in found.verdict.findings:
        say(f"{finding.rule:<4}{'' if finding.ok else 'BROKEN: '}{finding.evidence}")
    if settings.json:
        findings = [finding._asdict() for finding in found.verdict.findings]
        told = {"run": str(place), "in_order": found.in_order, "problems": found.problems}
        print(json.dumps({**told, "division": found.verdict.division, "findings": findings, "unproven": UNPROVEN}))
    say(UNPROVEN)
    say(f"{place}: {f'in order, {found.verdict.division} division' if found.in_order else 'NOT in order'}")
    if not found.in_order:
        raise SystemExit(1)
