"""Reading a streamed data set across losses of the connection: wait, open it again, go on behind the last record.

`datasets` retries single requests by itself; this is for longer losses.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from cramming.config import UserError
from cramming.progress import say

WAIT_SECONDS = (1.0, 5.0, 15.0, 60.0, 120.0)  # before each attempt; a record that arrives starts the list anew
RECORDS_PER_STATE = 256  # so many are read again at most
NETWORK_PACKAGES = {"httpx", "httpx2", "httpcore", "httpcore2", "aiohttp", "requests", "urllib3", "fsspec"}


def is_network_error(error: BaseException) -> bool:
    """Whether this came from the network; the clients' own errors derive from nothing in common."""
    modules = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    return isinstance(error, OSError) or bool(modules & NETWORK_PACKAGES)


def reconnecting(
    open_stream: Callable[[], Any], name: str, waits: tuple[float, ...] = WAIT_SECONDS, keep_state: bool = True
) -> Iterator[Any]:
    """The records of the stream that `open_stream` opens, each once and in order, whatever breaks in between.

    With `keep_state` a stream of `datasets` goes on from its `state_dict`; else, and for others, it is read again from
    the beginning. The error of the last attempt is raised when all `waits` are over.
    """
    attempts, done = iter(waits), 0
    state, behind = None, 0  # records since the state was taken
    while True:
        try:
            stream = open_stream()
            if state is not None:
                stream.load_state_dict(state)
            records = iter(stream)
            for _ in range(behind):
                next(records, None)
            for record in records:
                done, behind, attempts = done + 1, behind + 1, iter(waits)
                if keep_state and behind >= RECORDS_PER_STATE and hasattr(stream, "state_dict"):
                    state, behind = stream.state_dict(), 0
                yield record
            return
        except Exception as error:
            # Opening again may itself complain, in our words, that there is no network.
            wait = next(attempts, None) if is_network_error(error) or (done and isinstance(error, UserError)) else None
            if wait is None:
                raise
            say(f"{name}: connection lost after {done} records ({error}); going on in {wait:.0f} s")
            time.sleep(wait)
