"""A run as one file that others can check, `<name>.record.zip`, and the list of files in it, `files.json`.

The archive holds what a run's numbers rest on, and not the weights: `files.json` has the SHA-256 and bytes of every
file that is inside, of those that stayed outside (checkpoints, final/), and of itself. The same run gives the same
bytes. A folder of eval/records is such an archive unpacked, so the list also tells which of its files was changed.

Archives come from strangers: names are those that a run has, so none leads elsewhere, links are not made, and nothing
is unpacked beyond a size. (The zip of `cramming report`, for the GLUE server, is another: eval/report/submission.py.)
"""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cramming.config import UserError, file_sha256, require
from cramming.files import overwrite_atomically

LIST = "files.json"
SUFFIX = ".record.zip"
FORMAT_VERSION = 1
KEPT = {
    "record.json",
    "budget.jsonl",
    "metrics.jsonl",
    "config.yaml",
    "corpus.json",
    "environment.json",
    "git.diff",
    "README.md",
}
KEPT_BELOW, BY_HASH = ("glue/", "logs/"), ("checkpoints/", "final/")
NAME = re.compile(r"\w[\w.+=,@-]*(/\w[\w.+=,@-]*)*")  # no part is hidden, empty or `..`
MOST_FILES, MOST_BYTES = (
    10_000,
    2**28,
)  # a day's journal and metrics take a sixth of it, of a tiny model a half


def is_kept(name: str) -> bool:
    """Whether a file of a run folder goes into its archive."""
    return bool(NAME.fullmatch(name)) and (name in KEPT or name.startswith(KEPT_BELOW))


def list_of(folder: Path) -> dict[str, Any]:
    """`files.json` of a run folder as it is now."""
    outside = _described(folder, lambda name: name.startswith(BY_HASH))
    return _signed(
        {"format": FORMAT_VERSION, "files": _described(folder, is_kept), "outside": outside}
    )


def _described(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Bytes and SHA-256 by name; of what a link leads to, as of a `glue/` on another disk."""
    files = {str(path.relative_to(folder)): path for path in _files(folder) if path.is_file()}
    chosen = [(name, files[name]) for name in sorted(files) if wanted(name)]
    return {
        name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for name, path in chosen
    }


def _files(folder: Path) -> Iterator[Path]:
    """Those at the top and below the folders that count, each real folder once."""
    seen: set[str] = set()
    for place, below, names in os.walk(folder, followlinks=True):
        at_top = place == str(folder)
        below[:] = [name for name in below if not at_top or f"{name}/" in (*KEPT_BELOW, *BY_HASH)]
        if (real := os.path.realpath(place)) in seen:
            below.clear()
            continue
        seen.add(real)
        yield from (Path(place, name) for name in names)


def _signed(files: dict[str, Any]) -> dict[str, Any]:
    """With the SHA-256 of all the rest: of the whole run, therefore."""
    rest = {key: value for key, value in files.items() if key != "sha256"}
    return {**rest, "sha256": hashlib.sha256(_text(rest)).hexdigest()}


def _text(files: dict[str, Any]) -> bytes:
    return (json.dumps(files, indent=1, sort_keys=True) + "\n").encode()


def altered_since(folder: Path) -> list[str]:
    """What is not as the folder's `files.json` says, each file by its name; nothing where there is no such list."""
    if not (path := folder / LIST).exists():
        return []
    text = path.read_bytes()
    try:
        listed = json.loads(text)
        was = listed["files"]
        is_whole = isinstance(was, dict) and text == _text(_signed(listed))
    except (ValueError, LookupError, TypeError, RecursionError):
        is_whole, was = False, {}
    if not is_whole:
        return [f"{LIST} is not as it was written"]
    now = _described(folder, is_kept)
    changes = {"is missing": was.keys() - now.keys(), f"is not in {LIST}": now.keys() - was.keys()}
    changes["was changed"] = {name for name in was.keys() & now.keys() if was[name] != now[name]}
    return [f"{name} {what}" for what, names in changes.items() for name in sorted(names)]


def pack(folder: Path, archive: Path) -> dict[str, Any]:
    """Write the archive of a run folder; its list of files. UserError where the folder's name cannot stand in it."""
    require(
        NAME.fullmatch(folder.name),
        f"{folder}: a folder of this name cannot stand in an archive; rename it to letters, digits, - . _",
    )
    files = list_of(folder)

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w") as bundle:
            for name in (LIST, *files["files"]):
                content = _text(files) if name == LIST else (folder / name).read_bytes()
                bundle.writestr(
                    zipfile.ZipInfo(f"{folder.name}/{name}"), content, zipfile.ZIP_DEFLATED
                )
            _checked(archive, bundle.infolist())

    overwrite_atomically(archive, write)
    return files


def is_archive(path: Path) -> bool:
    """Whether a path is an archive's: by its name, or by its content, whatever it was renamed to."""
    return path.name.endswith(SUFFIX) or zipfile.is_zipfile(path)


@contextmanager
def opened(run: Path) -> Iterator[Path]:
    """The folder of a run: `run` itself, or where it is an archive, what is in it, for as long as this context."""
    if run.is_dir():
        yield run
        return
    with TemporaryDirectory(prefix="cramming-") as place:
        yield unpack(run, Path(place))


def unpack(archive: Path, into: Path) -> Path:
    """Write the run folder that is in an archive below `into`; UserError for anything that `pack` does not make."""
    try:
        with zipfile.ZipFile(archive) as bundle:
            entries = bundle.infolist()
            name = _checked(archive, entries)
            for entry in entries:
                path = into / entry.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                with bundle.open(entry) as content:  # at most what was counted, whatever is packed
                    path.write_bytes(content.read(entry.file_size))
    except UserError:
        raise
    except Exception as error:  # whatever the file of a stranger makes of the code that unpacks it
        raise UserError(
            f"{archive}: not an archive that can be unpacked ({error}); get it again"
        ) from None
    return into / name


def _checked(archive: Path, entries: Sequence[zipfile.ZipInfo]) -> str:
    """The folder that all entries are in."""
    names = [entry.filename for entry in entries]
    inside = [name.partition("/")[2] for name in names]
    odd = [
        name
        for name, inner in zip(names, inside)
        if not NAME.fullmatch(name) or not (inner == LIST or is_kept(inner))
    ]
    odd += [
        entry.filename
        for entry in entries
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    ]
    folders, size = (
        {name.partition("/")[0] for name in names},
        sum(entry.file_size for entry in entries),
    )
    require(not odd, f"{archive}: holds {odd[:1]}, which no run's archive does")
    require(
        len(folders) == 1 and inside.count(LIST) == 1,
        f"{archive}: not one run folder with its {LIST}; `cramming submit` makes an archive",
    )
    require(
        len(set(names)) == len(names) <= MOST_FILES and size <= MOST_BYTES,
        f"{archive}: {len(names)} files of {size / 2**20:.0f} MiB, or some twice; a run's archive has at most"
        f" {MOST_FILES} of {MOST_BYTES / 2**20:.0f} MiB",
    )
    return folders.pop()
