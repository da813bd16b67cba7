"""Run folders as the rules and the report read them: record.json, and what the files beside it say for themselves.

`load_runs` never stops at one bad folder, whatever a stranger has put into it: it hands back each run with its record,
or with one line that says what is wrong. Journal, history and hashes are read from their files; what a record has in
their place is no evidence.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from cramming.config import UserError, file_sha256, printable, require
from cramming.journal import JOURNAL, read_journal
from cramming.process_pool import Map, parallel_map, serial_map, usable_cores
from cramming.record import load_metrics, load_record
from cramming.record_schema import OtherRun, Record, read_record
from eval.archive import SUFFIX, altered_since, opened
from eval.finetune.history import history_file, read_history
from eval.rules.consistency import contradictions
from eval.rules.evidence import few
from eval.rules.journal import journal_evidence
from eval.rules.table import Verdict, judge

# Two seconds to read and judge; below that a process takes longer to start than it saves.
BYTES_PER_PROCESS = 25_000_000
READER_DIED = (
    "a process that reads the runs died, likely because memory ran out;"
    " give it more, or a folder of fewer runs"
)
MOST_NESTED = 100  # levels of a record; a run's has about ten
RUN_FILES = ("record.json", "budget.jsonl", "metrics.jsonl")
# Sections of `Record` that no record.json has.
FROM_FILES = ("journal", "history_file", "beside", "elsewhere", "contradictions", "known")
# The records of this project from before version 5 of the rules, by their SHA-256: no other may lack what they lack,
# whatever version it names.
KNOWN = frozenset({"545b8dc7ed7e6188fc76693ebe9a79fef52e0ba06827dbfdc61d8056f1f69f48"})


@dataclass(frozen=True)
class Run:
    """One run folder, or the archive of one. `record` is empty when `problem` says why it could not be read."""

    folder: Path
    label: str  # what the report calls it: unique within one report
    record: Record = field(default_factory=lambda: read_record({}))
    metrics: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None

    @property
    def name(self) -> str:
        """Its record's, which several runs of one report may have; else its folder's."""
        name = self.record.name or ""
        return printable(name if name.strip() else self.folder.name)

    @cached_property
    def verdict(self) -> Verdict:
        """What the rules say of the record."""
        return judge(self.record)


@contextmanager
def readers(runs: Path) -> Iterator[Map]:
    """A map by as many processes as the runs in a folder are worth."""
    worth = sum(_bytes_to_read(path) for path in _places(runs)) // BYTES_PER_PROCESS
    with parallel_map(min(worth, usable_cores()), READER_DIED) as run_map:
        yield run_map


def _places(runs: Path) -> list[Path]:
    inside = sorted(runs.iterdir()) if runs.is_dir() else []
    return [path for path in inside if has_traces(path)] + [
        path for path in inside if path.name.endswith(SUFFIX)
    ]


def _bytes_to_read(place: Path) -> int:
    files = (place / name for name in RUN_FILES) if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files if file.is_file())


def load_runs(runs: Path, run_map: Map = serial_map) -> list[Run]:
    """Every run folder, and every archive of one, directly inside `runs`, by name; UserError where there is none."""
    loaded: list[Run] = run_map(_load, _places(runs))
    if not loaded:
        raise UserError(
            f"runs={runs}: no run folder inside; pretrain or score something first, or give another folder"
        )
    labels = [run.label for run in loaded]
    named = [
        run
        if labels.count(run.label) == 1
        else replace(run, label=printable(f"{run.label} ({run.folder.name})"))
        for run in loaded
    ]
    return [
        replace(run, record=replace(run.record, elsewhere=others))
        if (others := list(_elsewhere(run, named)))
        else run
        for run in named
    ]


def _elsewhere(run: Run, runs: Sequence[Run]) -> Iterator[OtherRun]:
    """The other runs that scored the weights of this one, each with its lines of fine-tuning them."""
    sha256 = run.record.trained and run.record.trained.model_sha256
    for other in (other for other in runs if sha256 and other is not run):
        past = other.record.history_file.entries if other.record.history_file else []
        lines = [line for line in past if line.model_sha256 == sha256]
        if lines or (other.record.trained and other.record.trained.model_sha256 == sha256):
            yield OtherRun(other.label, lines)


def has_traces(folder: Path) -> bool:
    """Whether a folder holds anything of a run; a run that died early has no record yet but is still to be listed."""
    return folder.is_dir() and any((folder / name).exists() for name in RUN_FILES)


def _load(place: Path) -> Run:
    return load_run(place) if place.is_dir() else load_archive(place)


def load_run(folder: Path) -> Run:
    """Read one run folder, and judge it; what is wrong with it ends in `problem`."""
    try:
        run = _read(folder)
        assert run.verdict  # here, where an error is this run's, and by the process that reads it
    except UserError as error:
        return _unread(folder, str(error))
    except OSError as error:
        return _unread(folder, f"{error.filename or folder}: {error.strerror}")
    except Exception as error:
        return _unread(folder, not_judged(folder, error))
    return run


def _unread(place: Path, problem: str) -> Run:
    return Run(place, printable(place.name), problem=printable(problem))


def not_judged(what: object, error: Exception) -> str:
    """The problem of files that make the code that looks at them fail, whatever a stranger has put into them."""
    return f"{what}: cannot be judged ({type(error).__name__}: {str(error)[:80]})"


def _read(folder: Path) -> Run:
    raw = {key: value for key, value in load_record(folder).items() if key not in FROM_FILES}
    raw["beside"], raw["known"] = (
        _files_beside(folder),
        file_sha256(folder / "record.json") in KNOWN,
    )
    if (past := history_file(folder)).exists():
        raw["history_file"] = read_history(past, raw.get("history"))
    _refuse_nested(folder, raw)
    try:
        metrics = load_metrics(folder)
    except OSError:  # plots are a bonus: what is wrong with the log must not hide the scores
        metrics = []
    record = read_record(raw)
    events = cache(
        partial(read_journal, folder / JOURNAL)
    )  # a day's takes seconds, and R5 and R27 ask for them
    if (folder / JOURNAL).exists():
        record = replace(record, journal=journal_evidence(folder, events, record, metrics))
        raw["journal"] = vars(record.journal)
    found = None if record.known else list(contradictions(folder, events, record, metrics))
    record = replace(record, contradictions=found, raw={**raw, "contradictions": found})
    # Each step's own numbers, most of a long run's log, are for the rules: a report reads hundreds of runs.
    slim = [
        {key: value for key, value in row.items() if not isinstance(value, list | dict)}
        for row in metrics
    ]
    run = Run(folder, "", record, slim)
    return replace(run, label=run.name)


def _refuse_nested(folder: Path, raw: Any) -> None:
    """UserError for what is nested so deep that some reader, or a process that hands it on, cannot follow."""
    level = [raw]
    for _ in range(MOST_NESTED):
        inside = [
            node.values() if isinstance(node, dict) else node
            for node in level
            if isinstance(node, dict | list)
        ]
        level = list(chain.from_iterable(inside))
    require(
        not level,
        f"{folder}: record or history nested deeper than {MOST_NESTED} levels, as no run writes them",
    )


def unscored(folder: Path, record: Record) -> str | None:
    """What a run that was trained and is not scored yet still needs; None of any other."""
    if record.training.status != "finished" or record.trained:
        return None
    return f"no scores yet; `cramming glue name={folder.absolute().name}`"


def load_archive(archive: Path) -> Run:
    """Read the run that an archive holds (eval/archive.py), which stands for its folder."""
    try:
        with opened(archive) as folder:
            run, altered = load_run(folder), altered_since(folder)
    except UserError as error:
        return _unread(archive, str(error))
    except Exception as error:
        return _unread(archive, not_judged(archive, error))
    if problem := run.problem or few(altered):
        return _unread(archive, f"{archive}: {problem.replace(str(folder), 'in it')}")
    return replace(run, folder=archive)


def _files_beside(folder: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of the trained model's predictions and of the files of final/, by name; of what is there."""
    places = {
        "predictions": folder / "glue" / "pretrained" / "predictions",
        "final": folder / "final",
    }
    return {
        name: {file.name: file_sha256(file) for file in sorted(place.iterdir()) if file.is_file()}
        for name, place in places.items()
        if place.is_dir()
    }
