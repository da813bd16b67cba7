"""`cramming diagnose <run or corpus>`: likely reasons why a model does not learn, each with evidence and an override.

Reads the run's log, those of its checkpoints that exist, and a sample of the corpus. Writes nothing.
"""

import os
from json import dumps
from pathlib import Path
from typing import Any

from cramming.config import UserError
from cramming.data.corpus import Corpus
from cramming.data.manifest import MANIFEST
from cramming.progress import Progress, say, use_stderr
from cramming.record_schema import Record
from eval.archive import is_archive, opened
from eval.diagnose.corpus_facts import corpus_facts
from eval.diagnose.evidence import Evidence
from eval.diagnose.table import (
    Finding,
    diagnose,
    knows_frequencies_only,
    perspective,
    summary,
)
from eval.rules.load import has_log, read_evidence

ON_PLATEAU = (
    "the model has hardly learnt more than the frequencies of tokens. Every run passes through this state, for hundreds"
    " to thousands of steps; with no fault found, raise the budget"
)


def main(*, path: Path, corpus: Path | None, json: bool) -> None:
    """Print the findings about a run or a corpus, the strongest evidence first.

    Findings are not errors: the exit code stays 0.
    """
    if json:
        use_stderr()
    evidence = gather(path, corpus)
    if json:
        print(dumps(summary(str(path), evidence)))
        return
    print_findings(path, evidence)


def gather(path: Path, corpus: Path | None) -> Evidence:
    """Return the evidence on a run folder, its archive, or a corpus folder; UserError for anything else."""
    if has_log(path) or is_archive(path):
        with opened(path) as folder:
            return evidence_of_run(folder, corpus)
    if corpus is not None:
        raise UserError(f"--corpus={corpus}: only for runs, and {path} is not a run. Leave it out.")
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"{path}: no run and no corpus. Give the folder of one, or the archive of a run."
        )
    with Progress("counting the corpus", 1.0, "samples"):
        return Evidence(corpus=corpus_facts(Corpus.open(path)))


def evidence_of_run(folder: Path, corpus: Path | None) -> Evidence:
    """Return the evidence on a run; `corpus` is the folder of its corpus if that is not the folder in the log."""
    from cramming.data.run_data import RunData, fit_to_corpus  # torch, which a corpus does not need
    from cramming.recipe import Config
    from eval.diagnose.model_facts import model_facts
    from eval.diagnose.run_facts import run_facts

    logged = read_evidence(folder)
    if logged.record.pretrain is None:
        raise UserError(
            f"{folder}: no training in this run. Give the folder of one that `pretrain` made."
        )
    config = Config.of(logged.record.config)
    corpus_path = find_corpus(logged.record, corpus)
    data: Any = None
    counted = None
    with Progress("reading", 3.0, "parts") as bar:
        if corpus_path is not None:
            data = RunData.open(corpus_path, config, verify=False)
            config = config.replace(model=fit_to_corpus(config.model, data.corpus))
            counted = corpus_facts(data.corpus, data.validation_corpus)
        bar.advance()
        run = run_facts(logged.record, logged.training, config)
        bar.advance()
        model = model_facts(folder, logged.training, config, data)
        bar.advance()
    return Evidence(counted, run, model)


def find_corpus(record: Record, corpus: Path | None) -> Path | None:
    """Return the folder of the run's corpus: `corpus`, or else the folder in the log, None if it is not there any more.

    Raises UserError if `corpus` is the corpus of another run.
    """
    if corpus is not None:
        if Corpus.open(corpus).manifest_sha256 != record.corpus.manifest_sha256:
            raise UserError(f"--corpus={corpus}: not the corpus of this run. Give that one.")
        return corpus
    if not record.corpus.folder:
        return None
    logged = Path(record.corpus.folder)
    if not os.access(logged / MANIFEST, os.R_OK):
        return None
    is_same = Corpus.open(logged).manifest_sha256 == record.corpus.manifest_sha256
    return logged if is_same else None


def print_findings(path: Path, evidence: Evidence) -> None:
    """Print the findings with their numbers and overrides, and the loss in perspective."""
    findings = diagnose(evidence)
    for number, finding in enumerate(findings, 1):
        for line in _lines(number, finding):
            say(line)
    if not findings:
        say(f"{path}: no fault found")
    say(f"{path}: {perspective(evidence)}")
    if not findings and knows_frequencies_only(evidence):
        say(f"{path}: {ON_PLATEAU}")


def _lines(number: int, finding: Finding) -> list[str]:
    return [
        f"{number}. {finding.name} (strength {finding.strength:.2g}): {finding.sentence}",
        f"   evidence: {finding.evidence}",
        f"   try: {finding.override}",
    ]
