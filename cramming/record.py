"""The run folder `runs/<name>/`, and its `record.json`, the one document that the rules and the report read.

The verbs write the record's sections (config, environment, corpus, pretrain, glue, ...) one after the other, each
atomically; cramming/record_schema.py has their fields. A number that is missing or not finite is stored as null: JSON
has no NaN, and nobody may mistake a substitute for a measurement.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from cramming import __version__
from cramming.config import UserError, expand_home, folder_name, settings_hash
from cramming.environment import git
from cramming.files import LOCK, lock, sweep, sync, write_atomically
from cramming.journal import parsed

FORMAT_VERSION = 1
# Of a run's pretraining; exhausted: the budget ended without a step that was kept.
Status = Literal["running", "interrupted", "finished", "diverged", "exhausted"]
WITHOUT_MODEL: tuple[Status, ...] = ("diverged", "exhausted")  # a run that ended, and left no model
RULES_VERSION = "6"


def run_folder(settings: Mapping[str, Any]) -> Path:
    """`<runs>/<name>` of the root configuration; UserError where the name cannot be a folder's."""
    name = folder_name(str(settings["name"]), "name", settings["runs"])
    if name == "report":
        raise UserError(
            f"name=report: the leaderboard of {settings['runs']} has that name; give another"
        )
    return expand_home(settings["runs"], "runs") / name


def refuse_finished_run(settings: Mapping[str, Any]) -> bool:
    """UserError where this name has a record and `resume` is not set, or nothing in it can be resumed.

    True for a finished run that `resume=true` leaves as it is.
    """
    folder, resume = run_folder(settings), settings["resume"]
    if not is_run(folder):
        return False
    record = load_record(folder)
    status, scored = (
        record.get("pretrain", {}).get("status"),
        record.get("config", {}).get("model_path"),
    )
    other = "give another name"
    rows = (
        (scored, f"has the scores of model_path={scored}; {other}"),
        (status == "diverged", f"has a run that diverged, which cannot go on; {other}"),
        (
            status == "exhausted",
            f"has a run whose budget is spent, without a step that was kept; {other}",
        ),
        (
            status == "finished" and not resume,
            f"already has a finished run; {other}, or resume=true keeps it (`cramming run` then goes on to score)",
        ),
        (status != "finished" and not resume, f"has an unfinished run; add resume=true or {other}"),
    )
    for applies, problem in rows:
        if applies:
            raise UserError(f"name={settings['name']}: {folder} {problem}")
    return bool(status == "finished")


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run's record."""
    return (folder / "record.json").exists()


def is_untouched(folder: Path) -> bool:
    """Whether a run's folder has nothing in it but its lock."""
    return [path.name for path in folder.iterdir()] == [LOCK]


def load_record(folder: Path) -> dict[str, Any]:
    """The record of a run folder; UserError if it is missing, broken or of another format version."""
    path = folder / "record.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such record; is {folder} a run folder?") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # not JSON, not UTF-8, a number too long, nested too deep
        reason = str(error).split(";")[0]
        raise UserError(
            f"{path}: not readable as JSON ({reason}); restore it or remove the run folder"
        ) from None
    found = record.get("format") if isinstance(record, dict) else type(record).__name__
    if found != FORMAT_VERSION:
        raise UserError(
            f"{path}: record format {found}, not {FORMAT_VERSION}; restore it, or use its version"
        )
    return dict(record)


def write_record_section(folder: Path, **sections: Any) -> None:
    """Merge `sections` into the record, atomically; a mapping is merged one level deep (glue: one key per init)."""
    record = load_record(folder) if is_run(folder) else _new_record(folder.name)
    for key, value in sections.items():
        old = record.get(key)
        record[key] = (
            {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
        )
    write_record(folder, record)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Replace the whole record, atomically."""
    text = json.dumps(finite(record), indent=1, allow_nan=False, ensure_ascii=False, default=str)
    write_atomically(folder / "record.json", text + "\n")


def _new_record(name: str) -> dict[str, Any]:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    versions = {"suite_version": __version__, "rules_version": RULES_VERSION}
    return {"format": FORMAT_VERSION, "name": name, "created": created, **versions}


def finite(value: Any) -> Any:
    """The same structure with every NaN and infinity replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def load_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`; a line cut short by a crash, or damaged, is left out: it must not cost the run.

    A resume does the steps behind its checkpoint again, or has no time for them: a row takes back those of later steps,
    and an earlier one of its kind of the same step. A loss takes back what came behind that one, too, and each row of
    the steps that it is the mean of, unless that row's progress lies between the starts of its step and of the next.
    """
    path = folder / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    for line in (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ()
    ):
        if (row := parsed(line)) and isinstance(row.get("step"), int):
            _take_back(rows, row)
            rows.append(row)
    return rows


def _take_back(rows: list[dict[str, Any]], row: Mapping[str, Any]) -> None:
    """Remove from `rows`, whose steps ascend, what stands no longer once there is `row`."""
    begun: Any = row.get("each_progress")
    begun = begun if isinstance(begun, list) else []
    first, begins = len(rows), row["step"] - max(0, len(begun) - 1)
    while first and rows[first - 1]["step"] >= begins:
        first -= 1
    before = [other for other in rows[first:] if other["step"] < row["step"]]
    before = [
        other
        for other in before
        if _is_of_step(other, begun[(place := other["step"] - begins) : place + 2])
    ]
    same = [other for other in rows[first:] if other["step"] == row["step"]]
    is_validation = "validation_loss" in row
    twin = next(
        (i for i, other in enumerate(same) if ("validation_loss" in other) == is_validation),
        len(same),
    )
    rows[first:] = before + same[:twin] + (same[twin + 1 :] if is_validation else [])


def _is_of_step(row: Mapping[str, Any], begun: Sequence[Any]) -> bool:
    """Whether the row's progress lies between those at which its step and the next one began; true if one is none."""
    numbers = [begun[0], row.get("progress"), *begun[1:2]]
    return not all(isinstance(n, int | float) for n in numbers) or numbers == sorted(numbers)


class MetricsLog:
    """Appends rows to `metrics.jsonl`; each line reaches the file system at once, so a crash loses at most one."""

    def __init__(self, folder: Path):
        path = folder / "metrics.jsonl"
        torn = path.exists() and path.read_bytes()[-1:] not in (
            b"",
            b"\n",
        )  # by a crash: a row needs its own line
        self._file = path.open("a", encoding="utf-8")
        self._file.write("\n" if torn else "")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(finite(row), allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Have all rows on the disk."""
        sync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def setup_hash(environment: Mapping[str, Any]) -> str:
    """Of a process's environment as the record has it: the journal's witness of where and with which code it ran."""
    return settings_hash({"environment": environment})


def create_run_folder(
    folder: Path, settings: Mapping[str, Any], environment: Mapping[str, Any], *, resume: bool
) -> None:
    """Write what is known at the start: config.yaml, environment.json, git.diff and the record's first sections.

    A resumed run keeps what its first start wrote; the record adds where and with which code it goes on, and the
    division claimed now: the open one, once claimed, stays.
    """
    before = load_record(folder) if resume and is_run(folder) else {}
    division = "open" if before.get("division_requested") == "open" else settings["division"]
    if before:
        resumed = [*before.get("resumed", []), environment]
        write_record_section(folder, resumed=resumed, division_requested=division)
        return
    text = OmegaConf.to_yaml(OmegaConf.create(dict(settings)))
    write_atomically(folder / "config.yaml", text)
    write_atomically(folder / "environment.json", json.dumps(environment, indent=1))
    if diff := git("diff-index", "-p", "HEAD"):
        write_atomically(folder / "git.diff", diff + "\n")
    write_record_section(
        folder, config=dict(settings), environment=environment, division_requested=division
    )


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """One writer per run folder: a second process on the same name is refused. What killed ones left goes."""
    with lock(folder, "working on this run"):
        sweep(folder)
        yield
