"""The run folder, and `record.json`, the one document that the rules and the report read.

    runs/<name>/
        config.yaml        the resolved configuration of the first start
        environment.json   versions, device, git commit
        git.diff           the uncommitted changes, if any
        budget.jsonl       the clock's journal (cramming/journal.py): the truth about time
        metrics.jsonl      one line per logged step and per validation
        checkpoints/       what a resume needs
        compile_cache/     compiled code, made on this run's clock
        final/             the model, in a stock format where one exists
        export/            what `cramming export` makes of it, with a model card
        glue/<init>/       fine-tuning results and predictions
        glue/history.jsonl one line per fine-tuning that was ever scored (eval/finetune/history.py)
        record.json        everything a report needs, in sections: config, environment, corpus, pretrain, glue, the
                           lines of the history that it knows (`history`); and `resumed`, the environment of each
                           later process that went on with the training

A record is made of sections that the verbs write one after the other, each atomically. A number that is missing or not
finite is stored as null: JSON has no NaN, and nobody downstream may mistake a substitute for a measurement.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from cramming import __version__
from cramming.config import UserError, expand_home, folder_name
from cramming.environment import git
from cramming.files import LOCK, lock, sweep, sync, write_atomically

FORMAT_VERSION = 1
# Of a run's pretraining; exhausted: the budget ended without a step that was kept.
Status = Literal["running", "interrupted", "finished", "diverged", "exhausted"]
RULES_VERSION = "5"


def run_folder(settings: Mapping[str, Any]) -> Path:
    """`<runs>/<name>` of the root configuration; UserError where the name cannot be a folder's."""
    name = folder_name(str(settings["name"]), "name", settings["runs"])
    if name == "report":
        raise UserError(f"name=report: the leaderboard of {settings['runs']} has that name; give another")
    return expand_home(settings["runs"], "runs") / name


def refuse_finished_run(settings: Mapping[str, Any]) -> bool:
    """UserError where this name has a record and `resume` is not set, or nothing in it can be resumed.

    True for a finished run that `resume=true` leaves as it is.
    """
    folder = run_folder(settings)
    if not is_run(folder):
        return False
    record, begins = load_record(folder), f"name={settings['name']}: {folder}"
    status = record.get("pretrain", {}).get("status")
    if scored := record.get("config", {}).get("model_path"):
        raise UserError(f"{begins} has the scores of model_path={scored}; give another name")
    if status == "diverged":
        raise UserError(f"{begins} has a run that diverged, which cannot go on; give another name")
    if status == "exhausted":
        raise UserError(f"{begins} has a run whose budget is spent, without a step that was kept; give another name")
    if status == "finished" and not settings["resume"]:
        raise UserError(
            f"{begins} already has a finished run; give another name, or resume=true keeps it (`cramming run` then goes"
            " on with the scoring)"
        )
    if not settings["resume"]:
        raise UserError(f"{begins} has an unfinished run; add resume=true or give another name")
    return bool(status == "finished")


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run's record."""
    return (folder / "record.json").exists()


def is_untouched(folder: Path) -> bool:
    """Whether a run's folder has nothing in it but its lock."""
    return [path.name for path in folder.iterdir()] == [LOCK]


def nothing_to_resume(folder: Path) -> str:
    """What to say when `resume=true` finds no run of this name: a misspelt name must not pass for a resume."""
    names = sorted(other.name for other in folder.parent.iterdir() if is_run(other))
    near = difflib.get_close_matches(folder.name, names, n=1)
    hint = f"; did you mean name={near[0]}?" if near else f"; there are: {', '.join(names)}" if names else ""
    return f"resume=true: no run in {folder} to go on with, a new one begins{hint}"


# Sections and settings that a resume may change: where things lie, what other verbs do, and what the gate lets pass
# (the record keeps what any of its processes forced).
_FREE_TO_CHANGE = {
    "resume",
    "runs",
    "corpora",
    "checkpoint",
    "data.workers",
    "eval",
    "report",
    "export",
    "study",
    "bench",
    "plan",
    "inspect",
    "experiment",
    "model_path",
    "division",
    "gates",
    "forced",
}


def refuse_changed_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """UserError naming the first setting in which a resumed run differs from its first start."""
    before, now = _leaves(load_record(folder).get("config", {})), _leaves(settings)
    for key in sorted(before.keys() | now.keys()):
        free = key in _FREE_TO_CHANGE or key.split(".")[0] in _FREE_TO_CHANGE
        if not free and before.get(key) != now.get(key):
            began, again = f"with {key}={before.get(key)}", "resume with the same settings"
            if key not in before:
                began, again = "without this setting", "resume with the same settings, and the version that had them"
            raise UserError(
                f"{key}={now.get(key)}: the run in {folder} was started {began}; {again}, or start under another name"
            )


def refuse_changed_corpus(folder: Path, corpus: Mapping[str, Any]) -> None:
    """UserError when a resumed run would go on with another corpus than it began with (same folder, other content)."""
    before = load_record(folder).get("corpus", {})
    for was, now in ((before, corpus), (before.get("validation", {}), corpus.get("validation", {}))):
        if was.get("manifest_sha256") not in (None, now.get("manifest_sha256")):
            raise UserError(
                f"{now['folder']}: this corpus is not the one that the run in {folder} was started with (its manifest"
                " differs); restore that one, or start under another name"
            )


def _leaves(node: Any, path: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`; lists count as leaves."""
    if isinstance(node, Mapping):
        return {k: v for key, child in node.items() for k, v in _leaves(child, f"{path}.{key}".lstrip(".")).items()}
    return {path: list(node) if isinstance(node, tuple) else node}


def load_record(folder: Path) -> dict[str, Any]:
    """The record of a run folder; UserError if it is missing, broken or of another format version."""
    path = folder / "record.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such record; is {folder} a run folder?") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number too long, sections too deep
        reason = str(error).split(";")[0]
        raise UserError(f"{path}: not readable as JSON ({reason}); restore it or remove the run folder") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT_VERSION:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{path}: record format {found}, this version reads {FORMAT_VERSION}")
    return record


def write_record_section(folder: Path, **sections: Any) -> None:
    """Merge `sections` into the record, atomically; a mapping is merged one level deep (glue: one key per init)."""
    path = folder / "record.json"
    record = load_record(folder) if path.exists() else _new_record(folder.name)
    for key, value in sections.items():
        old = record.get(key)
        record[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    _write(path, record)


def drop_record_sections(folder: Path, names: Sequence[str]) -> None:
    """Take sections, or parts of one (`glue.random`), out of the record, atomically; each must be there."""
    record = load_record(folder)
    for name in names:
        section, _, part = name.rpartition(".")
        del (record[section] if section else record)[part]
    _write(folder / "record.json", record)


def _write(path: Path, record: Mapping[str, Any]) -> None:
    text = json.dumps(finite(record), indent=1, allow_nan=False, ensure_ascii=False, default=str)
    write_atomically(path, text + "\n")


def _new_record(name: str) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "format": FORMAT_VERSION,
        "name": name,
        "created": now,
        "suite_version": __version__,
        "rules_version": RULES_VERSION,
    }


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
    and an earlier one of its kind of the same step. A loss takes back what came behind that one, too.
    """
    path = folder / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                _take_back(rows, row)
                rows.append(row)
    return rows


def _take_back(rows: list[dict[str, Any]], row: Mapping[str, Any]) -> None:
    """Remove from `rows`, whose steps ascend, what stands no longer once there is `row`."""
    first = len(rows)
    while first and rows[first - 1]["step"] >= row["step"]:
        first -= 1
    same = [other for other in rows[first:] if other["step"] == row["step"]]
    is_validation = "validation_loss" in row
    twin = next((i for i, other in enumerate(same) if ("validation_loss" in other) == is_validation), len(same))
    rows[first:] = same[:twin] + (same[twin + 1 :] if is_validation else [])


class MetricsLog:
    """Appends rows to `metrics.jsonl`; each line reaches the file system at once, so a crash loses at most one."""

    def __init__(self, folder: Path):
        path = folder / "metrics.jsonl"
        torn = path.exists() and not path.read_bytes().endswith(b"\n")  # by a crash: the next row needs its own line
        self._file = path.open("a", encoding="utf-8")
        self._file.write("\n" if torn else "")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self._file.write(json.dumps(finite(row), allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Have all rows on the disk."""
        sync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def create_run_folder(
    folder: Path, settings: Mapping[str, Any], environment: Mapping[str, Any], *, resume: bool
) -> None:
    """Write what is known at the start: config.yaml, environment.json, git.diff and the record's first sections.

    A resumed run keeps what its first start wrote; the record adds where and with which code it goes on, and the
    division claimed now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if resume and is_run(folder):
        resumed = [*load_record(folder).get("resumed", []), environment]
        write_record_section(folder, resumed=resumed, division_requested=settings["division"])
        return
    text = OmegaConf.to_yaml(OmegaConf.create(dict(settings)))
    write_atomically(folder / "config.yaml", text)
    write_atomically(folder / "environment.json", json.dumps(environment, indent=1))
    diff = git("diff-index", "-p", "HEAD")
    if diff:
        write_atomically(folder / "git.diff", diff + "\n")
    write_record_section(
        folder, config=dict(settings), environment=environment, division_requested=settings["division"]
    )


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """One writer per run folder: a second process on the same name is refused. What killed ones left goes."""
    with lock(folder, "working on this run"):
        sweep(folder)
        yield
