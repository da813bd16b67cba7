"""The verb `cramming verify <folder or archive>`: check a run, or a corpus.

The record of a run is derived anew from its log, whose chain is checked, and all rules are evaluated. Each file that
the log names by hash is compared. Further checks depend on the verifier's inputs: with the tasks' files the scores
are computed from the predictions; with the corpus its text is searched for the tasks; with the weights and the corpus
the last validation is recomputed; on request one fine-tuning is repeated. Checks that were not possible are listed.
"""

import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from json import dumps, loads
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cramming.config import UserError, file_sha256
from cramming.data import inspect
from cramming.data.corpus import Corpus
from cramming.data.manifest import MANIFEST, Manifest
from cramming.progress import say, use_stderr
from cramming.record import RECORD
from cramming.record_schema import Record, Scores
from cramming.runlog import RUN_LOG
from eval.archive import changed_since, is_archive, opened
from eval.rescore import misfitting_predictions, predictions_file, rescore, sections_of
from eval.rules.evidence import NO_SCORES, Evidence
from eval.rules.load import has_log, not_checked, read_evidence
from eval.rules.table import KINDS, Finding, Verdict, evaluate

UNPROVEN = (
    "A log in order is one that training can have written, not proof that it did."
    " `cramming replay` repeats the steps."
)
GIVE_TASKS = "Give --tasks <folder with CoLA/, SST-2/, ...>"
INVALID, UNFINISHED = 1, 3  # exit codes
MakeTasks = Callable[[Path, int, str], bool]  # data_prep.verify_corpus.embedded_tasks
Search = Callable[[Path, Path, float], tuple[list[str], str]]  # data_prep.verify_corpus.overlap


@dataclass(frozen=True)
class Inputs:
    """Inputs of a verifier besides the run. Those that are None are looked up in the log.

    `make_tasks` and `search` are functions of data_prep, which this package does not import. `draw` chooses the
    fine-tuning to repeat.
    """

    make_tasks: MakeTasks
    search: Search
    tasks: Path | None = None
    corpus: Path | None = None
    seconds: float = 60.0
    weights: Path | None = None
    refinetune: bool = False
    draw: random.Random = field(default_factory=random.SystemRandom)


@dataclass
class Verification:
    """Problems of a run's files, its verdict by the rules, and the further checks that were made or not possible.

    `verdict` is None if the log cannot be read.
    """

    problems: list[str] = field(default_factory=list)
    verdict: Verdict | None = None
    checked: list[str] = field(default_factory=list)

    @property
    def in_order(self) -> bool:
        """True if nothing contradicts the run, in whichever division, and it is finished."""
        return not self.problems and self.division in ("closed", "open")

    @property
    def is_unfinished(self) -> bool:
        """True if nothing contradicts the run, and it is not finished."""
        return not self.problems and self.division == "unfinished"

    @property
    def division(self) -> str | None:
        """Division of the run, or None if the log cannot be read."""
        return self.verdict.division if self.verdict else None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of the rules."""
        return self.verdict.findings if self.verdict else ()

    @property
    def exit_code(self) -> int:
        """Exit code: 0 in order, 1 not in order, 3 not finished."""
        if self.in_order:
            return 0
        return UNFINISHED if self.is_unfinished else INVALID


def verify_run(folder: Path, inputs: Inputs) -> Verification:
    """Check the run in `folder`: its log, its files, the rules, and everything that the verifier's inputs allow."""
    result = Verification()
    try:
        evidence = read_evidence(folder)
        result.verdict = evaluate(evidence)
    except UserError as error:
        result.problems.append(str(error))
        return result
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a stranger's log may cause errors of any type
        result.problems.append(not_checked(folder / RUN_LOG, error))
        return result
    checks = {
        "files": lambda: _check_files(folder, evidence, result),
        "scores": lambda: _check_scores(folder, evidence.record, inputs, result),
        "corpus": lambda: _check_corpus(folder, evidence.record, inputs, result),
        "weights": lambda: _check_weights(folder, evidence.record, inputs, result),
        "checkpoints": lambda: _check_checkpoints(folder, evidence, result),
    }
    for name, check in checks.items():
        with _problem_of(name, result):
            check()
    return result


@contextmanager
def _problem_of(name: str, result: Verification) -> Iterator[None]:
    """Store the error of a check as a problem of the run, unless a full disk or lack of memory caused it."""
    try:
        yield
    except UserError as error:
        result.problems.append(str(error))
    except (OSError, MemoryError):
        raise
    except Exception as error:
        result.problems.append(not_checked(name, error))


def _check_files(folder: Path, evidence: Evidence, result: Verification) -> None:
    """Compare each existing file with the hash in the log, or in the archive's list."""
    result.problems += changed_since(folder)
    record = evidence.record
    result.problems += _other_predictions(folder, record)
    final = folder / "final"
    if final.is_dir() and record.training.final_files:
        from eval.recompute import other_files

        result.problems += other_files(final, record)
    result.problems += _other_checkpoints(folder, evidence)
    result.problems += _cut_log(folder, evidence)


def _other_predictions(folder: Path, record: Record) -> Iterator[str]:
    """Yield a message for each file of predictions whose name is not its hash, and for each missing one."""
    present = sorted((folder / "predictions").glob("*.npz"))
    for file in present:
        if file_sha256(file) != file.stem:
            yield f"predictions/{file.name}: not what its name says (by SHA-256)"
    if not present and not (folder / "final").exists():
        return  # a log alone, whose missing files the rules report
    named: dict[str, str] = {line.predictions_sha256: line.task for line in record.history}
    for section in sections_of(record).values():
        named |= {sha256: name for name, sha256 in section.predictions.items()}
    for sha256, name in named.items():
        if not predictions_file(folder, sha256).is_file():
            yield f"predictions/{sha256}.npz: missing ({name})"
    yield from misfitting_predictions(folder, record)


def _other_checkpoints(folder: Path, evidence: Evidence) -> Iterator[str]:
    """Yield a message for each checkpoint that is not in the log."""
    known = {saved.sha256 for saved in evidence.training.all_saved}
    for file in sorted((folder / "checkpoints").glob("*.pt")):
        if file_sha256(file) not in known:
            yield f"checkpoints/{file.name}: not a checkpoint of the log (by SHA-256)"


def _cut_log(folder: Path, evidence: Evidence) -> Iterator[str]:
    """Yield a message if the log lacks an event from which `record.json` was written: its last lines were removed.

    No other content of that file is used.
    """
    path = folder / RECORD
    if not path.is_file():
        return
    try:
        head = loads(path.read_text(encoding="utf-8"))["log"]["head"]
    except (ValueError, LookupError, TypeError, RecursionError):
        yield f"{RECORD}: not as the suite writes it. Delete it; `cramming report` writes it anew."
        return
    if head not in {entry.sha256 for entry in evidence.entries}:
        yield f"{RUN_LOG}: lacks an event that {RECORD} was written from. Restore the log."


def _check_scores(folder: Path, record: Record, inputs: Inputs, result: Verification) -> None:
    """Compute the scores from the predictions, and with `refinetune` repeat one of the fine-tunings."""
    by_suite = defaultdict[str, dict[str, Scores]](dict)
    for name, section in sections_of(record).items():
        by_suite[section.suite][name] = section
    if not by_suite:
        result.checked.append(f"scores: {NO_SCORES}")
    for sections in by_suite.values():
        with TemporaryDirectory(prefix="cramming-") as scratch:
            tasks, labels = _tasks(next(iter(sections.values())), record, inputs, Path(scratch))
            if tasks is None:
                result.checked.append(f"scores: not computed again. {labels}.")
                continue
            rescored = rescore(folder, sections, tasks)
            result.problems += [f"scores: {problem}" for problem in rescored.problems]
            result.checked.append(f"scores: {rescored.describe(labels)}")
            if inputs.refinetune and sections.keys() & record.glue.keys():
                _check_fine_tuning(folder, record, inputs, tasks, result)


def _tasks(
    section: Scores, record: Record, inputs: Inputs, scratch: Path
) -> tuple[Path | None, str]:
    """Return the folder of a section's tasks and its origin, or None and the reason why there is none."""
    if section.suite != "embedded":
        return inputs.tasks, f"in {inputs.tasks}" if inputs.tasks else GIVE_TASKS
    sources = [each for each in record.corpus.sources if each.kind == "embedded"]
    seed = record.corpus.settings.get("data", {}).get("seed")
    if not sources or not isinstance(seed, int):
        return None, "The log does not say with which seed their tasks were generated"
    if section.tasks_corpus_sha256 != record.corpus.manifest_sha256:
        return None, "Their tasks are of another corpus than the run's"
    if not inputs.make_tasks(scratch, seed, sources[0].sha256 or ""):
        return None, "Another version of the suite generated their tasks"
    return scratch, "generated anew"


def _check_fine_tuning(
    folder: Path, record: Record, inputs: Inputs, tasks: Path, result: Verification
) -> None:
    """Repeat the fine-tuning of one task and seed, and recompute the baselines of one task."""
    from eval.recompute import recompute_baselines, repeat_fine_tuning

    weights = _weights_folder(folder, inputs)
    if weights is None:
        result.checked.append("fine-tuning: nothing done again. Give --weights <folder>.")
        return
    for outcome in (
        repeat_fine_tuning(folder, weights, record, tasks, inputs.draw),
        recompute_baselines(record, tasks, inputs.draw),
    ):
        result.checked.append(f"fine-tuning: {outcome.words}")
        if outcome.problem:
            result.problems.append(outcome.problem)


def _weights_folder(folder: Path, inputs: Inputs) -> Path | None:
    if inputs.weights is not None:
        return inputs.weights
    final = folder / "final"
    return final if final.is_dir() else None


def _find_corpus(record: Record, inputs: Inputs) -> Path | None:
    """Return the folder of the run's corpus, or None if it is not available."""
    folder = inputs.corpus
    if folder is None and record.corpus.folder:
        folder = Path(record.corpus.folder)
    if folder is None or not os.access(folder / MANIFEST, os.R_OK):
        return None
    return folder


def _check_corpus(folder: Path, record: Record, inputs: Inputs, result: Verification) -> None:
    """Compare the corpus, and the manifest in the archive, with the log; search the text for the tasks."""
    if record.pretrain is None:
        return
    packed = folder / MANIFEST
    if packed.is_file() and Manifest.load(packed).sha256() != record.corpus.manifest_sha256:
        result.problems.append(f"{MANIFEST}: not that of the run's corpus")
    corpus_path = _find_corpus(record, inputs)
    if corpus_path is None:
        result.checked.append("corpus: not at hand. Give --corpus <folder>.")
        return
    try:
        corpus = Corpus.open(corpus_path)
        if corpus.manifest_sha256 != record.corpus.manifest_sha256:
            raise UserError(f"{corpus_path} is not the corpus of this run. Give --corpus <folder>.")
        described = Record.model_validate({"corpus": corpus.describe()}).corpus
        for name in type(described).model_fields:
            if name in ("folder", "changed", "validation"):
                continue
            if getattr(described, name) != getattr(record.corpus, name):
                result.problems.append(f"corpus: {name} is not what the log has")
        if inputs.tasks is None:
            result.checked.append(
                f"corpus: as in the log; not searched for the tasks. {GIVE_TASKS}."
            )
            return
        problems, words = inputs.search(corpus.folder, inputs.tasks, inputs.seconds)
    except UserError as error:  # a problem of the verifier's copy, not of the run
        result.checked.append(f"corpus: not checked: {error}")
        return
    result.problems += problems
    result.checked.append(f"corpus: {words}")


def _check_weights(folder: Path, record: Record, inputs: Inputs, result: Verification) -> None:
    """Compare the final weights with the log, and recompute the last validation from them."""
    if not record.training.final_files:
        return
    weights = _weights_folder(folder, inputs)
    if weights is None:
        address = record.files.weights
        state = f"at {address}, not at hand" if address else "not given"
        result.checked.append(f"weights: {state}. Give --weights <folder>.")
        return
    from eval.recompute import other_files, recompute_validation

    if inputs.weights is not None:
        result.problems += other_files(weights, record)
    corpus = _find_corpus(record, inputs)
    if corpus is None:
        result.checked.append("weights: as in the log; no corpus at hand to validate them on.")
        return
    try:
        outcome = recompute_validation(weights, record, corpus)
    except UserError as error:
        result.checked.append(f"weights: not validated: {error}")
        return
    if outcome.problem:
        result.problems.append(f"weights: {outcome.problem}")
    else:
        result.checked.append(f"weights: verified: {outcome.words}")


def _check_checkpoints(folder: Path, evidence: Evidence, result: Verification) -> None:
    """Compare the weights that were scored along the way with those of the checkpoints that the log names."""
    by_suite = evidence.record.checkpoints.values()
    if not by_suite:
        return
    from eval.finetune.run_models import is_there, written_model

    compared = 0
    for saved in sorted(evidence.training.retained):
        sections = [section[saved.sha256] for section in by_suite if saved.sha256 in section]
        if not sections or not is_there(folder, saved):
            continue
        compared += 1
        with written_model(folder, saved) as model:
            sha256 = file_sha256(model / "model.safetensors")
            if any(section.model_sha256 != sha256 for section in sections):
                result.problems.append(
                    f"scores along the way: step {saved.steps} has other weights than were scored"
                )
    result.checked.append(
        f"scores along the way: weights of {compared} of {len(set().union(*by_suite))} checkpoints compared"
    )


def main(
    *,
    path: Path,
    json: bool,
    tasks: Path | None,
    corpus: Path | None,
    weights: Path | None,
    refinetune: bool,
    overlap_seconds: float,
    make_tasks: MakeTasks,
    search: Search,
) -> None:
    """Check a run or a corpus; exit with code 1 if it is not in order, 3 if a run is not finished."""
    if json:
        use_stderr()
    if is_archive(path) or has_log(path):
        if tasks is not None and not tasks.is_dir():
            raise UserError(f"--tasks={tasks}: no such folder. {GIVE_TASKS}.")
        if weights is not None and not weights.is_dir():
            raise UserError(f"--weights={weights}: no such folder. Check the path.")
        inputs = Inputs(
            make_tasks,
            search,
            tasks=tasks,
            corpus=corpus,
            seconds=overlap_seconds,
            weights=weights,
            refinetune=refinetune,
        )
        with opened(path) as folder:
            result = verify_run(folder, inputs)
        _print_result(path, result)
        code = result.exit_code
        summary = _summary(path, result)
    else:
        problems = inspect.verify(path)
        code = INVALID if problems else 0
        summary = {"corpus": str(path), "in_order": not problems, "problems": problems}
    if json:
        print(dumps(summary))
    if code:
        raise SystemExit(code)


def _print_result(path: Path, result: Verification) -> None:
    """Print problems, a line for each rule, the further checks, and the result."""
    for problem in result.problems:
        say(f"{path}: {problem}")
    for line in _lines_of(result.findings):
        say(line)
    for line in result.checked:
        say(line)
    if result.in_order:
        say(UNPROVEN)
        say(f"{path}: in order, {result.division} division")
    elif result.is_unfinished and result.verdict:
        reasons = "; ".join(each.evidence for each in result.verdict.broken_of("finished"))
        say(f"{path}: not finished: {reasons}")
    else:
        say(f"{path}: NOT in order")


def _lines_of(findings: tuple[Finding, ...]) -> Iterator[str]:
    """Yield a line for each rule, but a single one for all rules that wait for scores."""
    waiting = [each.rule for each in findings if not each.ok and each.evidence == NO_SCORES]
    for rule, ok, evidence in findings:
        if rule in waiting[1:]:
            continue
        mark = "REMARK: " if KINDS[rule] == "remark" else "BROKEN: "
        if rule in waiting:
            others = f", which {', '.join(waiting[1:])} need too" if waiting[1:] else ""
            yield f"{rule:<4}{evidence}{others}"
        else:
            yield f"{rule:<4}{'' if ok else mark}{evidence}"


def _summary(path: Path, result: Verification) -> dict[str, Any]:
    """Return the result for programs."""
    return {
        "run": str(path),
        "in_order": result.in_order,
        "unfinished": result.is_unfinished,
        "division": result.division,
        "problems": result.problems,
        "findings": [finding._asdict() for finding in result.findings],
        "checked": result.checked,
        "unproven": UNPROVEN,
    }
