"""Functions of texts on all cores: the main process reads, decides about order and writes, workers do the rest.

Filters, the search for downstream text, signatures and tokenization are pure functions of a group of texts. Groups go
to processes (most of the work holds the interpreter lock) and their results come back in the order of the groups, so
the corpus is the same for any number of workers. Few groups are under way, so memory does not depend on the corpus. No
process starts for a text that may be small, whose work is done before one would be ready. With `data.ray` groups go to
a cluster (data_prep/ray_cluster.py).
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from cramming.process_pool import process_pool, usable_cores

MOST_WORKERS = (
    32  # by themselves: the main process feeds 40, or 30 with documents of 500 bytes (docs/log.md)
)
HERE_FIRST = (
    4  # calls in the main process before any other starts, unless the text is known to be large
)
AHEAD = 2  # groups per worker under way, for each map
DIED = (
    "a process of `cramming prepare` died (out of memory?); finished shards are kept; run the same command again, with"
    " a smaller data.workers if it happens again"
)

Kept = TypeVar("Kept")
Item = TypeVar("Item")
Function = Callable[[Any], Any]


def grouped(
    items: Iterable[Item], most: int, length: Callable[[Item], int], enough: int
) -> Iterator[list[Item]]:
    """Lists of at most `most` items, or fewer whose lengths add up to `enough`."""
    group: list[Item] = []
    total = 0
    for item in items:
        group.append(item)
        total += length(item)
        if len(group) >= most or total >= enough:
            yield group
            group, total = [], 0
    if group:
        yield group


class Workers(ExitStack):
    """`with Workers(2, {"tokens": encoder}) as workers: for kept, result in workers.map("tokens", groups): ...`

    `functions` go to each process once, when it starts. With one worker everything happens in this process. `ray`: the
    address of a cluster that does the work, with all its cores where `count` is None; else one process for each core of
    this machine, up to `MOST_WORKERS`. `large`: there is work for all of them.
    """

    def __init__(
        self,
        count: int | None,
        functions: Mapping[str, Function],
        ray: str | None = None,
        large: bool = False,
    ) -> None:
        super().__init__()
        self.functions, self._count, self._ray = (
            functions,
            count or min(usable_cores(), MOST_WORKERS),
            ray,
        )
        self._here = 0 if large else HERE_FIRST
        self._all = count is None
        self._submit: Callable[[str, Any], Future[Any]] | None = None

    def __enter__(self) -> "Workers":
        self.callback(_set_parallelism, os.environ.get("TOKENIZERS_PARALLELISM"))
        _set_parallelism("false")  # the processes are the parallelism
        if self._ray:
            from data_prep.ray_cluster import ray_tasks

            self._submit, cores = self.enter_context(ray_tasks(self._ray, self.functions))
            self._count = cores if self._all else self._count
        return self

    def map(self, name: str, groups: Iterable[tuple[Kept, Any]]) -> Iterator[tuple[Kept, Any]]:
        """For each (kept, texts): (kept, result of the function of this name on the texts), in order; [] for no texts.

        `groups` is read ahead of the results. An error in a function is raised here, WorkerDiedError when a process is
        gone.
        """
        pending: deque[tuple[Kept, Future[Any]]] = deque()
        for kept, texts in groups:
            pending.append((kept, self._begin(name, texts)))
            while pending and (pending[0][1].done() or len(pending) >= AHEAD * self._count):
                kept, future = pending.popleft()
                yield kept, future.result()
        for kept, future in pending:
            yield kept, future.result()

    def _begin(self, name: str, texts: Any) -> Future[Any]:
        if texts and self._here == 0 and (self._ray or self._count > 1):
            if self._submit is None:
                pool = self.enter_context(
                    process_pool(self._count, DIED, _set_functions, (self.functions,))
                )
                self._submit = partial(pool, _call)
            return self._submit(name, texts)
        done = Future[Any]()
        if texts:
            self._here = max(0, self._here - 1)
        done.set_result(self.functions[name](texts) if texts else [])
        return done


def _set_parallelism(value: str | None) -> None:
    """Of `tokenizers`, which reads the variable at every call."""
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    if value is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = value


_functions: dict[str, Function] = {}  # of a worker process


def _set_functions(functions: Mapping[str, Function]) -> None:
    _functions.update(functions)


def _call(name: str, texts: Any) -> Any:
    return _functions[name](texts)
