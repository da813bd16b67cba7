"""The progress bar of a pass over the text: how far, how long still, bytes per second, and memory in use."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from types import TracebackType

import psutil

from cramming.progress import Progress, format_count
from data_prep.sources.source import Document, Source
from data_prep.stage_stats import text_bytes

EVERY_SECONDS = 0.5
EVERY_DOCUMENTS = 256


class Meter:
    """`with Meter("tokenize", source) as meter: meter.update(position, bytes_of_text_done)`."""

    def __init__(self, title: str, source: Source) -> None:
        self._source = source
        self._bar = Progress(title, source.total, source.unit)
        self._process = psutil.Process()
        self._started = self._last = time.monotonic()

    def __enter__(self) -> "Meter":
        self._bar.__enter__()
        return self

    def update(self, position: float, text_done: int) -> None:
        """How far the source is read, and how many bytes of text are through."""
        now = time.monotonic()
        if now - self._last >= EVERY_SECONDS:
            self._last = now
            rate = format_count(text_done / (now - self._started), "B")
            self._bar.note(f"{rate}/s of text, memory {format_count(self._memory_bytes(), 'B')}")
        self._bar.update(position)

    def _memory_bytes(self) -> int:
        """Resident, of this process and its workers; libraries that they share count for each."""
        total = 0
        for process in (self._process, *self._process.children()):
            with contextlib.suppress(psutil.Error):  # it has just ended
                total += process.memory_info().rss
        return total

    def watch(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The same documents, each counted."""
        done = 0
        for index, document in enumerate(documents):
            yield document
            done += text_bytes(document.text)
            if index % EVERY_DOCUMENTS == 0:
                self.update(self._source.position, done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
