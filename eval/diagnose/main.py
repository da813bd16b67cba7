"""`cramming diagnose <run or corpus>`: why a model does not learn, by evidence, and which override would change it.

Reads the run's log, the checkpoints that are there, and the corpus, of which it counts a sample. Writes nothing.
"""

import os
from json import dumps
from pathlib import Path
from typing import Any

from cramming.config import UserError
from cramming.data.corpus import Corpus
from cramming.data.manifest import MANIFEST
from cramming.progress import Progress, say, use_stderr
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
    "the model knows the frequencies of tokens and hardly more. Every run is there for some hundred to some thousand"
    " steps; with no fault found, raise the budget"
)


def main(*, path: Path, corpus: Path | None, json: bool) -> None:
    """Print the findings about a run or a corpus, the strongest evidence first; they leave the exit code 0."""
    if json:
        use_stderr()
    evidence = gather(path, corpus)
    if json:
        print(dumps(summary(str(path), evidence)))
        return
    tell(path, evidence)


def gather(path: Path, corpus: Path | None) -> Evidence:
    """Return the evidence on a run folder, its archive, or a corpus folder; UserError where it is neither."""
    if has_log(path) or is_archive(path):
        with opened(path) as folder:
            return evidence_of_run(folder, corpus)
    if corpus is not None:
        raise UserError(f"--corpus={corpus}: for runs only, and {path} is none. Leave it out.")
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"{path}: no run and no corpus. Give the folder of one, or the archive of a run."
        )
    with Progress("counting the corpus", 1.0, "samples"):
        return Evidence(corpus=corpus_facts(Corpus.open(path)))


def evidence_of_run(folder: Path, corpus: Path | None) -> Evidence:
    """Return the evidence on a run; `corpus`: where its corpus lies, if not where the log says."""
    from cramming.data.run_data import RunData, fit_to_corpus  # torch, which a corpus does not need
    from cramming.recipe import Config
    from eval.diagnose.model_facts import model_facts
    from eval.diagnose.run_facts import run_facts

    read = read_evidence(folder)
    if read.record.pretrain is None:
        raise UserError(
            f"{folder}: no training in this run. Give the folder of one that `pretrain` made."
        )
    config = Config.of(read.record.config)
    place = corpus_place(read.record, corpus)
    data: Any = None
    counted = None
    with Progress("reading", 3.0, "parts") as bar:
        if place is not None:
            data = RunData.open(place, config, verify=False)
            config = config.replace(model=fit_to_corpus(config.model, data.corpus))
            counted = corpus_facts(data.corpus, data.validation_corpus)
        bar.advance()
        run = run_facts(read.record, read.training, config)
        bar.advance()
        model = model_facts(folder, read.training, config, data)
        bar.advance()
    return Evidence(counted, run, model)


def corpus_place(record: Any, corpus: Path | None) -> Path | None:
    """Return the folder of the run's corpus, None where it is not at hand; UserError for one of another run."""
    place = corpus or (Path(record.corpus.folder) if record.corpus.folder else None)
    if place is None or (corpus is None and not os.access(place / MANIFEST, os.R_OK)):
        return None
    if Corpus.open(place).manifest_sha256 != record.corpus.manifest_sha256:
        if corpus is not None:
            raise UserError(f"--corpus={corpus}: not the corpus of this run. Give that one.")
        return None
    return place


def tell(path: Path, evidence: Evidence) -> None:
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
