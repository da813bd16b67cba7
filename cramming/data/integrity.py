"""What differs between a corpus folder and its manifest: each file altered, missing or unknown is named."""

import math
from collections.abc import Collection, Iterator
from pathlib import Path

from cramming.config import UserError
from cramming.data.corpus import damage
from cramming.data.manifest import MANIFEST, Manifest
from cramming.files import LOCK
from cramming.progress import Progress, say


def problems(folder: Path) -> Iterator[str]:
    """What differs from the manifest, one line each: files altered or missing, and files that are not in it."""
    try:
        manifest = Manifest.load(folder / MANIFEST)
    except UserError as error:
        yield str(error)
        return
    yield from damaged(folder, manifest)
    known = {MANIFEST, LOCK, *manifest.hashes()}  # a kill at the very end leaves the lock file
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        unlisted = manifest.format == 1 and name.startswith("tasks/")
        if (path.is_file() or path.is_symlink()) and name not in known and not unlisted:
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
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else 0 for name in hashes}
    chosen, left = [], most_bytes
    for name in sorted(sizes, key=lambda name: (name not in first, sizes[name])):
        if sizes[name] <= left:
            chosen.append(name)
            left -= sizes[name]
    with Progress("verify", float(len(chosen)), "files") as bar:
        for name in sorted(chosen):
            if problem := damage(folder / name, hashes[name]):
                yield problem
            bar.advance()
