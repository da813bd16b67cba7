"""What differs between a corpus folder and its manifest: each file altered, missing or unknown is named."""

import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from cramming.config import UserError
from cramming.data.corpus import damage
from cramming.data.manifest import MANIFEST, Manifest
from cramming.files import LOCK
from cramming.progress import Progress, say


def problems(folder: Path) -> Iterator[str]:
    """What differs from the manifest, one line each: files altered or missing, and files that nobody knows."""
    place = folder / MANIFEST
    try:
        manifest = Manifest.from_json(place.read_text(encoding="utf-8"), str(place))
    except UnicodeDecodeError:
        yield f"{place}: not UTF-8; the file was altered"
        return
    except UserError as error:
        yield str(error)
        return
    yield from damaged(folder, manifest)
    known = {MANIFEST, LOCK, *manifest.hashes()}  # a kill at the very end leaves the lock file
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (path.is_file() or path.is_symlink()) and name not in known and not _of_format_1(manifest, name):
            yield f"{path}: unexpected; `prepare` has not made this file"


def damaged(
    folder: Path, manifest: Manifest, most_bytes: float = math.inf, first: Collection[str] = ()
) -> Iterator[str]:
    """The files that are altered or missing, one line each.

    At most `most_bytes` are read: those named `first`, then the smallest; one that would be too much is left out.
    """
    if manifest.format == 1:
        say(f"{folder / MANIFEST}: format 1 has no checksum of itself and none of tasks/; those are not checked")
    hashes = manifest.hashes()
    compared = _affordable(folder, hashes, most_bytes, first)
    with Progress("verify", float(len(compared)), "files") as bar:
        for name in sorted(compared):
            if problem := damage(folder / name, hashes[name]):
                yield problem
            bar.advance()


def _affordable(folder: Path, names: Iterable[str], most_bytes: float, first: Collection[str]) -> list[str]:
    """The names of files that have at most so many bytes together; of those that are missing too."""
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else 0 for name in names}
    chosen, left = [], most_bytes
    for name in sorted(sizes, key=lambda name: (name not in first, sizes[name])):
        if sizes[name] <= left:
            chosen.append(name)
            left -= sizes[name]
    return chosen


def _of_format_1(manifest: Manifest, name: str) -> bool:
    return manifest.format == 1 and name.startswith("tasks/")
