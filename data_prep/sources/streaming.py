"""Reading a streamed data set across losses of the connection: wait, open it again, go on behind the last record.

`datasets` retries single requests by itself. What gets through to here is a longer loss; then the stream is opened anew
and set to a state kept a little before, so that nothing is downloaded twice but the last few records.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from cramming.config import UserError
from cramming.progress import say

WAIT_SECONDS = (1.0, 5.0, 15.0, 60.0, 120.0)  # before each attempt; a record that arrives starts the list anew
RECORDS_PER_STATE = 256
NETWORK_PACKAGES = {"httpx", "httpx2", "httpcore", "httpcore2", "aiohttp", "requests", "urllib3", "fsspec"}


def is_network_error(error: BaseException) -> bool:
    """Whether this came from the network; the clients' own errors derive from nothing in common."""
    modules = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    return isinstance(error, OSError) or bool(modules & NETWORK_PACKAGES)


def resumed(
    open_stream: Callable[[], Any], name: str, waits: tuple[float, ...] = WAIT_SECONDS, keep_state: bool = True
) -> Iterator[Any]:
    """The records of the stream that `open_stream` opens, each once and in order, whatever breaks in between.

    With `keep_state` a stream of `datasets` goes on from its `state_dict`; else, and for others, it is read again from
    the beginning. The error of the last attempt is raised when all `waits` are over.
    """
    reader = _Reader(open_stream, keep_state)
    attempts, done = iter(waits), 0
    while True:
        try:
            record = reader.next()
        except Exception as error:
            # Opening again may itself complain, in our words, that there is no network.
            wait = next(attempts, None) if is_network_error(error) or (done and isinstance(error, UserError)) else None
            if wait is None:
                raise
            say(f"{name}: connection lost after {done} records ({error}); going on in {wait:.0f} s")
            time.sleep(wait)
            reader.close()
            continue
        if record is None:
            return
        done, attempts = done + 1, iter(waits)
        yield record


class _Reader:
    """An iterator over a stream that can be closed and then goes on where it was."""

    def __init__(self, open_stream: Callable[[], Any], keep_state: bool) -> None:
        self._open, self._keep_state = open_stream, keep_state
        self._stream: Any = None
        self._iterator: Iterator[Any] | None = None
        self._state: Any = None
        self._behind = 0  # records since the state was taken

    def next(self) -> Any:
        """The next record, or None at the end."""
        if self._iterator is None:
            self._iterator = self._reopened()
        record = next(self._iterator, None)
        self._behind += 1
        if self._keep_state and self._behind >= RECORDS_PER_STATE and hasattr(self._stream, "state_dict"):
            self._state, self._behind = self._stream.state_dict(), 0
        return record

    def close(self) -> None:
        """Forget the open stream, not the place."""
        self._stream = self._iterator = None

    def _reopened(self) -> Iterator[Any]:
        self._stream = self._open()
        if self._state is not None:
            self._stream.load_state_dict(self._state)
        iterator = iter(self._stream)
        for _ in range(self._behind):
            next(iterator, None)
        return iterator
