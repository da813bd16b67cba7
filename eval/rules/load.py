"""Runs in folders and archives, each read once: record, curve and verdict from one pass over `run.jsonl`.

`report`, `verify` and `submit` get their runs from here, so that none ranks a run that another refuses. `load_runs`
does not stop at a bad folder: each run comes with its verdict, or with one line that describes the problem.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cramming.config import UserError, printable
from cramming.process_pool import Map, parallel_map, serial_map, usable_cores
from cramming.record import derive, metrics_of, read_run, record_text
from cramming.record_schema import FilesPresent, FineTuning, OtherRun, Record, read_record
from cramming.runlog import RUN_LOG, training_of
from eval.archive import SUFFIX, changed_since, opened, weights_address
from eval.rules.evidence import Evidence, abbreviated
from eval.rules.table import Verdict, evaluate

# Bytes of logs. For small logs, sending the runs between processes costs more than reading the logs: the report of 100
# runs of three minutes takes 10 s with two processes and 6 s with one. The size from
# which two processes are faster was not measured: the bound is a judgement.
BYTES_PER_PROCESS = 500_000_000
READER_DIED = (
    "a process that reads the runs died, likely because memory ran out;"
    " give it more, or a folder of fewer runs"
)
_EMPTY = Verdict("invalid", ())


@dataclass(frozen=True)
class Run:
    """Run folder, or an archive of one. `record` is empty if `problem` says why it could not be read.

    `label` is a unique name within one report. `metrics` are the rows of the curve, without the numbers of single
    steps. `spent` holds by the SHA-256 of each scored checkpoint what the run had spent by then. `record_sha256` is the
    hash of the content that `record.json` must have.
    """

    folder: Path
    label: str
    record: Record = field(default_factory=Record)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    spent: dict[str, dict[str, Any]] = field(default_factory=dict)
    verdict: Verdict = _EMPTY
    problem: str | None = None
    record_sha256: str = ""

    @property
    def name(self) -> str:
        """Name in the record, which several runs of one report may share, or else the folder's."""
        name = self.record.name
        return printable(name if name.strip() else self.folder.name)


@contextmanager
def readers(runs: Path) -> Iterator[Map]:
    """Yield a map with a number of processes that suits the size of the runs in a folder."""
    size_bytes = sum(_bytes_to_read(path) for path in _run_paths(runs))
    processes = min(size_bytes // BYTES_PER_PROCESS, usable_cores())
    with parallel_map(processes, READER_DIED) as run_map:
        yield run_map


def _run_paths(runs: Path) -> list[Path]:
    inside = sorted(runs.iterdir()) if runs.is_dir() else []
    folders = [path for path in inside if has_log(path)]
    return folders + [path for path in inside if path.name.endswith(SUFFIX)]


def _bytes_to_read(place: Path) -> int:
    file = place / RUN_LOG if place.is_dir() else place
    return file.stat().st_size


def has_log(folder: Path) -> bool:
    """Return whether a folder holds the log of a run."""
    return (folder / RUN_LOG).is_file()


def load_runs(runs: Path, run_map: Map = serial_map) -> list[Run]:
    """Return every run, and every archive of one, directly inside `runs`, by name; raise UserError if there is none."""
    loaded: list[Run] = run_map(_load, _run_paths(runs))
    if not loaded:
        raise UserError(
            f"{runs}: no run inside. Pretrain or score something first, or give another folder."
        )
    labels = [run.label for run in loaded]
    named = [_with_unique_label(run, labels) for run in loaded]
    by_weights = _runs_by_weights(named)
    return [_with_elsewhere(run, by_weights) for run in named]


def _with_unique_label(run: Run, labels: Sequence[str]) -> Run:
    if labels.count(run.label) == 1:
        return run
    return replace(run, label=printable(f"{run.label} ({run.folder.name})"))


def _runs_by_weights(runs: Sequence[Run]) -> dict[str, list[OtherRun]]:
    """Return the runs that fine-tuned or scored each model, by the SHA-256 of its weights."""
    by_weights: dict[str, list[OtherRun]] = {}
    for run in runs:
        lines: dict[str | None, list[FineTuning]] = {}
        if run.record.trained:
            lines[run.record.trained.model_sha256] = []
        for line in run.record.history:
            lines.setdefault(line.model_sha256, []).append(line)
        for sha256, of_weights in lines.items():
            if sha256 is not None:
                other = OtherRun(run=run.label, lines=of_weights)
                by_weights.setdefault(sha256, []).append(other)
    return by_weights


def _with_elsewhere(run: Run, by_weights: Mapping[str, Sequence[OtherRun]]) -> Run:
    """Return the run with the fine-tunings of its weights by other runs, evaluated with these."""
    trained = run.record.trained
    sha256 = trained.model_sha256 if trained else None
    if sha256 is None:
        return run
    others = [other for other in by_weights[sha256] if other.run != run.label]
    if not others:
        return run
    record = run.record.model_copy(update={"elsewhere": others})
    return replace(run, record=record, verdict=run.verdict.with_record(record))


def _load(path: Path) -> Run:
    return load_run(path) if path.is_dir() else load_archive(path)


def load_run(folder: Path) -> Run:
    """Return the run of a folder with its verdict; a problem of its log is stored in `problem`."""
    try:
        evidence = read_evidence(folder)
        verdict = evaluate(evidence)
    except UserError as error:
        return _unread(folder, str(error))
    except OSError as error:
        return _unread(folder, f"{error.filename or folder}: {error.strerror}")
    except Exception as error:  # a stranger's log may cause errors of any type
        return _unread(folder, not_checked(folder, error))
    rows = [_without_lists(row) for row in metrics_of(evidence.training)]
    sha256 = evidence.record_sha256
    checkpoints = set().union(*evidence.record.checkpoints.values())
    spent = {each: evidence.spent_until(each) for each in checkpoints}
    run = Run(folder, "", evidence.record, rows, spent, verdict, record_sha256=sha256)
    return replace(run, label=run.name)


def read_evidence(folder: Path) -> Evidence:
    """Read the log of a run folder once; raise UserError if it is damaged or of another format."""
    entries = read_run(folder)
    training = training_of(entries)
    derived = derive(entries, training)
    record = read_record(derived).model_copy(update={"files": files_present(folder)})
    sha256 = hashlib.sha256(record_text(derived).encode()).hexdigest()
    return Evidence(record, training, entries, sha256)


def files_present(folder: Path) -> FilesPresent:
    """Return the files named by a log that exist in its folder; none of them is read."""
    predictions = frozenset(path.stem for path in (folder / "predictions").glob("*.npz"))
    final = folder / "final" / "model.safetensors"
    address = weights_address(folder)
    return FilesPresent(predictions=predictions, weights="final/" if final.is_file() else address)


def _without_lists(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the numbers of each step, which are most of a long run's log."""
    return {key: value for key, value in row.items() if not isinstance(value, list)}


def _unread(place: Path, problem: str) -> Run:
    return Run(place, printable(place.name), problem=printable(problem))


def not_checked(what: object, error: Exception) -> str:
    """Return the problem of files on which the code that reads them fails."""
    return f"{what}: cannot be checked ({type(error).__name__}: {str(error)[:80]})"


def load_archive(archive: Path) -> Run:
    """Return the run of an archive (eval/archive.py), which is named as if it were its folder."""
    try:
        with opened(archive) as folder:
            run = load_run(folder)
            changed = changed_since(folder)
    except UserError as error:
        return _unread(archive, str(error))
    except Exception as error:
        return _unread(archive, not_checked(archive, error))
    problem = run.problem or abbreviated(changed)
    if problem:
        return _unread(archive, f"{archive}: {problem.replace(str(folder), 'in it')}")
    return replace(run, folder=archive)


def unscored(folder: Path, record: Record) -> str | None:
    """Return the missing step of a run that is trained and not scored yet, or None for any other run."""
    if record.training.status != "finished" or record.trained:
        return None
    return f"no scores yet; `cramming glue --name {folder.absolute().name}`"
