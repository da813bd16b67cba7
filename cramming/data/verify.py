"""`cramming verify <corpus>`: every byte of a corpus folder against its manifest; each problem is named."""

from collections.abc import Mapping
from typing import Any

from cramming.config import UserError
from cramming.data.integrity import problems
from cramming.data.manifest import MANIFEST, corpus_folder
from cramming.progress import say


def main(config: Mapping[str, Any]) -> None:
    """The verb `verify`: prints every problem of `data.corpus`; UserError if there is any."""
    folder = corpus_folder(config)
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder}: no finished corpus here; name one: cramming verify <folder>")
    found = list(problems(folder))
    for problem in found:
        say(problem)
    if found:
        raise UserError(f"{folder}: {len(found)} problem(s); delete the folder and run `cramming prepare` again")
    say(f"{folder}: every file is as `prepare` wrote it")
