"""A run as one file for verifiers, `<name>.record.zip`, and the list of its files, `files.json`.

The archive holds the log, the predictions and the corpus's manifest, not the weights. `files.json` has size and
SHA-256 of every file inside and of checkpoints and final weights outside, the address of the weights if there is one,
and a hash of itself. The same run gives the same bytes. Archives come from strangers: only names of a run's files are
accepted, links are not created, and the unpacked size is limited.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cramming.config import UserError, file_sha256
from cramming.data.manifest import MANIFEST
from cramming.files import overwrite_atomically
from cramming.runlog import RUN_LOG

LIST = "files.json"
SUFFIX = ".record.zip"
FORMAT_VERSION = 2
README = "README.md"
PREDICTIONS = re.compile(r"predictions/[0-9a-f]{64}\.npz")
OUTSIDE = ("checkpoints", "final")  # folders whose files are listed, but not packed
NAME = re.compile(r"\w[\w.+=,@-]*(/\w[\w.+=,@-]*)*")  # no part is hidden, empty or `..`
MAX_FILES = 10_000
MAX_BYTES = 2**28  # ten times the log of a day


def is_packed(name: str) -> bool:
    """Return whether a file of a run folder goes into its archive."""
    return name in (RUN_LOG, MANIFEST, README) or bool(PREDICTIONS.fullmatch(name))


def list_of(
    folder: Path, *, manifest: Path | None = None, weights: str | None = None
) -> dict[str, Any]:
    """Return `files.json` of a run folder in its present state.

    `manifest` is that of the corpus, if it is not in the folder, and `weights` the address of the final weights.
    """
    files = _described(folder, [RUN_LOG, MANIFEST, README, *_names(folder, "predictions")])
    if manifest is not None and MANIFEST not in files:
        files[MANIFEST] = _facts(manifest)
    outside: list[str] = []
    for part in OUTSIDE:
        outside += _names(folder, part)
    listed = {
        "format": FORMAT_VERSION,
        "files": files,
        "outside": _described(folder, outside),
        "weights": weights,
    }
    return _signed(listed)


def _names(folder: Path, part: str) -> list[str]:
    """Return the names of the files directly inside a folder of the run; links count as their targets."""
    if not (folder / part).is_dir():
        return []
    return [f"{part}/{path.name}" for path in sorted((folder / part).iterdir())]


def _described(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for name in sorted(names):
        path = folder / name
        is_known = is_packed(name) or name.startswith(OUTSIDE)
        if is_known and NAME.fullmatch(name) and path.is_file():
            described[name] = _facts(path)
    return described


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _signed(listed: dict[str, Any]) -> dict[str, Any]:
    """Return the list with a hash of itself, which identifies the whole run."""
    content = {key: value for key, value in listed.items() if key != "sha256"}
    return {**content, "sha256": hashlib.sha256(_text(content)).hexdigest()}


def _text(listed: dict[str, Any]) -> bytes:
    return (json.dumps(listed, indent=1, sort_keys=True) + "\n").encode()


def read_list(folder: Path) -> dict[str, Any] | None:
    """Return the folder's `files.json`, or None if there is none.

    Raises UserError if it was altered or has an old format.
    """
    path = folder / LIST
    if not path.exists():
        return None
    text = path.read_bytes()
    try:
        listed = json.loads(text)
        version = listed["format"]
        is_whole = text == _text(_signed(listed))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        version, is_whole = None, False
    if version not in (None, FORMAT_VERSION):
        raise UserError(
            f"{path}: format {version}. This version reads {FORMAT_VERSION}. Get a new archive."
        )
    if not is_whole:
        raise UserError(f"{path}: not as `cramming submit` wrote it. Get the archive again.")
    return dict(listed)


def weights_address(folder: Path) -> str | None:
    """Return the address of the final weights in the folder's `files.json`, or None."""
    listed = read_list(folder)
    return str(listed["weights"]) if listed and listed["weights"] else None


def changed_since(folder: Path) -> list[str]:
    """Return a message for each file that differs from the folder's `files.json`; nothing without such a list.

    Files outside the archive are compared if they exist.
    """
    listed = read_list(folder)
    if listed is None:
        return []
    inside = _described(folder, [RUN_LOG, MANIFEST, README, *_names(folder, "predictions")])
    problems = [f"{name}: missing" for name in listed["files"] if name not in inside]
    problems += [f"{name}: not in {LIST}" for name in inside if name not in listed["files"]]
    outside = _described(folder, [name for name in listed["outside"] if (folder / name).is_file()])
    for present, recorded in ((inside, listed["files"]), (outside, listed["outside"])):
        for name, facts in present.items():
            if recorded.get(name, facts) != facts:
                problems.append(f"{name}: changed since {LIST} was written")
    return problems


def pack(
    folder: Path, archive: Path, *, manifest: Path | None = None, weights: str | None = None
) -> dict[str, Any]:
    """Write the archive of a run folder, and return its list of files. Arguments as of `list_of`."""
    if not NAME.fullmatch(folder.name):
        raise UserError(
            f"{folder}: no name for a folder in an archive. Rename it to letters, digits, - . _"
        )
    listed = list_of(folder, manifest=manifest, weights=weights)

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w") as bundle:
            _write_entry(bundle, f"{folder.name}/{LIST}", _text(listed))
            for name in listed["files"]:
                path = folder / name
                source = manifest if manifest and not path.exists() else path
                _write_entry(bundle, f"{folder.name}/{name}", source.read_bytes())
            _check_entries(archive, bundle.infolist())

    overwrite_atomically(archive, write)
    return listed


def _write_entry(bundle: zipfile.ZipFile, name: str, content: bytes) -> None:
    bundle.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def is_archive(path: Path) -> bool:
    """Return whether a path is that of an archive, by its name or by its content."""
    return path.name.endswith(SUFFIX) or zipfile.is_zipfile(path)


@contextmanager
def opened(run: Path) -> Iterator[Path]:
    """Yield the folder of a run: `run` itself, or its archive unpacked for the duration of the context."""
    if run.is_dir():
        yield run
        return
    with TemporaryDirectory(prefix="cramming-") as scratch:
        yield unpack(run, Path(scratch))


def unpack(archive: Path, into: Path) -> Path:
    """Write the run folder of an archive below `into`; raise UserError for an archive that `pack` does not make."""
    try:
        with zipfile.ZipFile(archive) as bundle:
            entries = bundle.infolist()
            name = _check_entries(archive, entries)
            for entry in entries:
                path = into / entry.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                with bundle.open(entry) as content:  # at most the checked size, whatever is packed
                    path.write_bytes(content.read(entry.file_size))
    except UserError:
        raise
    except Exception as error:  # a stranger's file may cause errors of any type
        raise UserError(
            f"{archive}: not an archive that can be unpacked ({error}). Get it again."
        ) from None
    return into / name


def _check_entries(archive: Path, entries: Sequence[zipfile.ZipInfo]) -> str:
    """Return the folder that all entries are in; raise UserError for entries that no run's archive has."""
    folders: set[str] = set()
    inside: list[str] = []
    for entry in entries:
        folder, _, name = entry.filename.partition("/")
        folders.add(folder)
        inside.append(name)
        is_known = bool(NAME.fullmatch(entry.filename)) and (name == LIST or is_packed(name))
        if not is_known or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(
                f"{archive}: holds {entry.filename[:80]!r}, which no archive of this version does."
            )
    if len(folders) != 1 or inside.count(LIST) != 1 or inside.count(RUN_LOG) != 1:
        raise UserError(
            f"{archive}: not one run folder with its {LIST}. `cramming submit` makes an archive."
        )
    size = sum(entry.file_size for entry in entries)
    if len(set(inside)) != len(inside) or len(inside) > MAX_FILES or size > MAX_BYTES:
        raise UserError(
            f"{archive}: {len(inside)} files of {size / 2**20:.0f} MiB, or duplicates. The archive of a run"
            f" has at most {MAX_FILES} of {MAX_BYTES / 2**20:.0f} MiB."
        )
    return folders.pop()
