"""What has been decided about each document so far: a file of two bytes per document, in the order of the source.

A filter is a pure function of a document and the settings, so what was decided once stays true: the second pass of
near-deduplication, and a run that goes on after an interruption, read it here instead of computing it again. For the
filter that works on tokens this is even needed, because a document of a finished shard is not tokenized again.
"""

from pathlib import Path

import numpy as np

from cramming.files import overwrite_atomically

DECIDING = ("filters", "decontamination", "tokens")  # stages whose verdicts are kept, in their order
PASSED = ""
_FIRST = 1 + len(DECIDING)  # code 0: undecided; 1 ...: passed up to this stage; from _FIRST on: a reason to drop
_BLOCK = 1 << 16


class Fates:
    """Verdicts by the number of the document. `reasons` are (stage, reason), in the order in which they first came."""

    def __init__(self, path: Path, reasons: list[list[str]]) -> None:
        """`reasons` as of the last safe point: a code beyond them is from work that was lost, and is forgotten."""
        self.path, self.reasons = path, [list(reason) for reason in reasons]
        self._codes = np.fromfile(path, np.uint16) if path.is_file() else np.zeros(0, np.uint16)
        self._codes[self._codes >= _FIRST + len(reasons)] = 0
        self._code_of = {(stage, reason): _FIRST + i for i, (stage, reason) in enumerate(reasons)}

    def get(self, number: int, stage: str) -> str | None:
        """The verdict of `stage` on document `number`: a reason to drop it, PASSED, or None: not decided."""
        code = int(self._codes[number]) if number < len(self._codes) else 0
        if code < _FIRST:
            return PASSED if code > DECIDING.index(stage) else None
        dropped_by, reason = self.reasons[code - _FIRST]
        return reason if dropped_by == stage else PASSED

    def set(self, number: int, stage: str, reason: str) -> None:
        """Note a verdict; PASSED keeps the document."""
        if number >= len(self._codes):
            more = max(_BLOCK, len(self._codes), number + 1 - len(self._codes))
            self._codes = np.concatenate([self._codes, np.zeros(more, np.uint16)])
        self._codes[number] = 1 + DECIDING.index(stage) if reason == PASSED else self._code(stage, reason)

    def _code(self, stage: str, reason: str) -> int:
        if (stage, reason) not in self._code_of:
            self._code_of[stage, reason] = _FIRST + len(self.reasons)
            self.reasons.append([stage, reason])
        return self._code_of[stage, reason]

    def save(self) -> None:
        """Write the file, atomically; the caller keeps `reasons` beside it."""
        overwrite_atomically(self.path, self._codes.tofile)
