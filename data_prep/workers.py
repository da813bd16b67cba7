"""Functions of texts on all cores: the main process reads, decides about order and writes, workers do the rest.

Filters, the search for downstream text, signatures and tokenization are pure functions of a group of texts. Groups go
to processes and their results come back in the order of the groups, so the corpus is the same for any number of them.
Threads would not do, as most of the work holds the interpreter lock. Sending a text costs a hundredth of tokenizing it.

Groups under way are few, so memory does not depend on the corpus. No process starts for a small text, whose work is
done before one would be ready.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

from cramming.process_pool import Submit, process_pool

HERE_FIRST = 8  # calls in the main process before any other starts
AHEAD = 2  # groups per worker under way, for each map
DIED = (
    "a process of `cramming prepare` died (out of memory?); finished shards are kept; run the same command again, with"
    " a smaller data.workers if it happens again"
)

Kept = TypeVar("Kept")
Function = Callable[[Any], Any]


class Workers:
    """`with Workers(2, {"tokens": encoder}) as workers: for kept, result in workers.map("tokens", groups): ...`

    `functions` go to each process once, when it starts. With one worker everything happens in this process.
    """

    def __init__(self, count: int, functions: Mapping[str, Function]) -> None:
        self.functions = functions
        self._count = count
        self._here = HERE_FIRST
        self._submit: Submit | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Workers":
        self._stack.callback(_set_parallelism, os.environ.get("TOKENIZERS_PARALLELISM"))
        _set_parallelism("false")  # the processes are the parallelism
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def map(self, name: str, groups: Iterable[tuple[Kept, Any]]) -> Iterator[tuple[Kept, Any]]:
        """For each (kept, texts): (kept, result of the function of this name on the texts), in order; [] for no texts.

        `groups` is read ahead of what is given out. An error in a function is raised here, WorkerDiedError when a
        process is gone.
        """
        pending: deque[tuple[Kept, Future[Any]]] = deque()
        for kept, texts in groups:
            pending.append((kept, self._begun(name, texts)))
            while pending and (pending[0][1].done() or len(pending) >= AHEAD * self._count):
                kept, future = pending.popleft()
                yield kept, future.result()
        while pending:
            kept, future = pending.popleft()
            yield kept, future.result()

    def _begun(self, name: str, texts: Any) -> Future[Any]:
        if texts and self._here == 0 and self._count > 1:
            return self._processes()(_call, name, texts)
        done = Future[Any]()
        if texts:
            self._here = max(0, self._here - 1)
        done.set_result(self.functions[name](texts) if texts else [])
        return done

    def _processes(self) -> Submit:
        if self._submit is None:
            pool = process_pool(self._count, DIED, _begin, (self.functions,))
            self._submit = self._stack.enter_context(pool)
        return self._submit


def _set_parallelism(value: str | None) -> None:
    """Of `tokenizers`, which reads the variable at every call."""
    if value is None:
        os.environ.pop("TOKENIZERS_PARALLELISM", None)
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = value


_functions: Mapping[str, Function]


def _begin(functions: Mapping[str, Function]) -> None:
    global _functions
    _functions = functions


def _call(name: str, texts: Any) -> Any:
    return _functions[name](texts)
