"""A grid of fixed tasks: who does them, which are done, and how an interrupted preparation resumes.

Each task writes its own part, a folder that appears whole or not at all. A resumed run skips the tasks whose part is
there. Tasks are pure functions of what they are given, so this process, a pool of processes (`data.workers`) and a Ray
cluster (`data.ray`) give the same parts. No other module knows whether a run was interrupted.

Until the manifest is written the corpus folder holds `unfinished.json`, which says what the parts were made from. As
long as it is there, `prepare` may clear the folder of everything that it makes itself, and of nothing else.
"""

import json
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cramming.config import UserError, build, file_sha256
from cramming.data.corpus import TASKS
from cramming.data.manifest import TOKENIZER
from cramming.files import LOCK, overwrite_atomically, remove, write_atomically
from cramming.process_pool import WorkerDiedError, process_pool, usable_cores
from cramming.progress import say
from data_prep.tokenizer.load import TOKENIZER_CONFIG

UNFINISHED = "unfinished.json"
PARTS = "parts"
CARD = "corpus_card.md"
DROPPED = "dropped.jsonl"
MAX_WORKERS = 32  # unless set
AHEAD = 2  # tasks per worker that have begun
RETRIES = 20  # of a task of Ray, each after a node or a process was lost
DIED = (
    "a process of `cramming prepare` died (out of memory?); finished tasks are kept. Run the same command again, with"
    " a smaller data.workers if it happens again."
)
LOST = (
    "the Ray cluster lost a task again and again (out of memory? no nodes left?); finished tasks are kept. Run the"
    " same command again, with a smaller data.workers if it happens again."
)

Item = TypeVar("Item")
Submit = Callable[[Any], Future[Any]]


class UnusableTextError(UserError):
    """No corpus can be made of this text with these settings: nothing of the work is worth keeping."""


class TransientError(UserError):
    """Failure after which the same command may succeed later; finished tasks stay."""


class Task(Protocol):
    """A task, as far as the grid knows it."""

    @property
    def name(self) -> str:
        """Name that no other task has."""

    @property
    def position(self) -> float:
        """Amount of the source that is read behind it."""


class Inputs(Protocol):
    """Inputs of a corpus."""

    @property
    def folder(self) -> Path:
        """Folder of the corpus."""

    @property
    def settings_hash(self) -> str:
        """Hash of its settings."""

    @property
    def compared(self) -> list[dict[str, Any]]:
        """The tasks' files that the text is compared with."""

    def inventory(self) -> list[dict[str, Any]]:
        """Return what the source consists of."""

    def changed(self, sources: list[dict[str, Any]], compared: list[dict[str, Any]]) -> str | None:
        """Return what differs from an earlier run's inputs, in words."""


Make = Callable[[Any, Path], None]  # writes the files of a task's part into a folder
IsWhole = Callable[[Path, str], bool]  # whether a folder is the whole part of the task of this name


@dataclass(frozen=True)
class Unfinished:
    """`unfinished.json`: what the parts are made from."""

    settings_hash: str
    sources: list[dict[str, Any]]
    compared: list[dict[str, Any]] = field(default_factory=list)  # the tasks' files
    tokenizer_sha256: str | None = None  # None: there is none yet that counts

    def save(self, folder: Path) -> None:
        """Write it into the corpus folder, atomically."""
        write_atomically(folder / UNFINISHED, json.dumps(vars(self)))

    @classmethod
    def load(cls, folder: Path) -> "Unfinished | None":
        """Return what an interrupted run left, or None. UserError: other things are in the folder."""
        path = folder / UNFINISHED
        if path.is_file():
            try:
                return build(cls, json.loads(path.read_text(encoding="utf-8")), str(path))
            except (ValueError, RecursionError) as error:
                problem = str(error).removeprefix(f"{path}: ")
                raise UserError(
                    f"{path}: damaged or of another version ({problem}). Delete {folder} and prepare anew, or resume"
                    " with the version that began it."
                ) from None
        begun = set(folder.glob(f".{UNFINISHED}.*.tmp"))  # of a run killed at its first write
        others = [item.name for item in folder.iterdir() if item not in begun and item.name != LOCK]
        if others:
            names = ", ".join(sorted(others)[:3])
            raise UserError(
                f"{folder}: not a corpus, and not empty ({names}). Give another data.corpus."
            )
        for file in begun:
            remove(file)
        return None


@contextmanager
def open_grid(inputs: Inputs) -> Iterator["TaskGrid"]:
    """Give the grid of a corpus, with what an interrupted run of the same inputs has finished.

    A UserError leaves nothing behind if nothing was finished; else its message says that the rest stays.
    """
    grid = TaskGrid(inputs)
    try:
        grid.begin()
        yield grid
    except UserError as error:
        grid.keep_or_discard(error)
        raise


class TaskGrid:
    """The tasks of one corpus. `sources` and `compared` are the inputs as they were at the beginning."""

    def __init__(self, inputs: Inputs) -> None:
        self.folder, self._inputs = inputs.folder, inputs
        self._interrupted = Unfinished.load(self.folder)  # what cannot be read is not deleted

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Parts of the source."""
        return self._state.sources

    @property
    def compared(self) -> list[dict[str, Any]]:
        """The tasks' files that the text is compared with."""
        return self._state.compared

    def begin(self) -> None:
        """Resume the interrupted run, or clear it away if it had other inputs."""
        if self._interrupted:
            problem = self._why_not_resumed(self._interrupted)
            count = self.finished_tasks()
            if problem is None:
                say(f"{self.folder}: resuming an interrupted run, {count} tasks are finished")
                self._clear_unfinished(self._interrupted)
                self._state = self._interrupted
                return
            say(
                f"{self.folder}: an interrupted run was here and cannot be resumed ({problem}); starting over,"
                f" {count} finished tasks are lost"
            )
            self._discard()
        inputs = self._inputs
        self._state = Unfinished(inputs.settings_hash, inputs.inventory(), inputs.compared)
        self._state.save(self.folder)

    def keep_or_discard(self, error: UserError) -> None:
        """Remove everything that an error makes useless."""
        if isinstance(error, TransientError | WorkerDiedError):
            return
        count = self.finished_tasks()
        if isinstance(error, UnusableTextError) or not (self._interrupted or count):
            self._discard()
        elif count:
            error.args = (f"{error}; what is finished stays in {self.folder}",)

    def _why_not_resumed(self, state: Unfinished) -> str | None:
        if state.settings_hash != self._inputs.settings_hash:
            return "since then has changed: settings, or the rules for text"
        changed = self._inputs.changed(state.sources, state.compared)
        if changed:
            return f"since then has changed: {changed}"
        path, expected = self.folder / TOKENIZER, state.tokenizer_sha256
        if expected and not (path.is_file() and file_sha256(path) == expected):
            return f"{path}: not the tokenizer that it began with"
        return None

    def _clear_unfinished(self, state: Unfinished) -> None:
        """Remove everything that is made anew: all but parts, the state, and the tokenizer if it counts."""
        counting = {UNFINISHED, PARTS, TOKENIZER if state.tokenizer_sha256 else UNFINISHED}
        for path in self._made_here():
            if path.name not in counting:
                remove(path)
        for path in (self.folder / PARTS).glob(".*"):
            remove(path)

    def _discard(self) -> None:
        """Remove what `prepare` makes, and nothing else; the state last, as it says whose the rest is."""
        if (self.folder / UNFINISHED).is_file():
            for path in self._made_here():
                if path.name != UNFINISHED:
                    remove(path)
            remove(self.folder / UNFINISHED)

    def _made_here(self) -> list[Path]:
        """Return everything in the folder that `prepare` makes, temporary files included."""
        suffixes = (".bin", ".idx", ".npy", ".part", ".tmp", ".old")
        names = (UNFINISHED, PARTS, TOKENIZER, TOKENIZER_CONFIG, TASKS, CARD, DROPPED)
        paths = sorted(self.folder.iterdir())
        return [path for path in paths if path.suffix in suffixes or path.name in names]

    def finished_tasks(self) -> int:
        """Return how many tasks are done."""
        return sum(1 for _ in (self.folder / PARTS).glob("[0-9]*"))

    def tokenizer(self, make: Callable[[], str]) -> Path:
        """Return the corpus's tokenizer.json, after writing what `make` returns if there is none."""
        path = self.folder / TOKENIZER
        if not path.is_file():
            write_atomically(path, make())
        self._state = replace(self._state, tokenizer_sha256=file_sha256(path))
        self._state.save(self.folder)
        return path

    def parts(
        self,
        tasks: Iterable[Task],
        make: Make,
        is_whole: IsWhole,
        processes: int | None,
        ray: str | None,
    ) -> Iterator[tuple[Path, float]]:
        """Yield each task's part and position, in order, after making the parts that are not there yet."""
        in_order: deque[tuple[Path, float]] = deque()

        def missing() -> Iterator[tuple[Path, Task]]:
            for number, task in enumerate(tasks):
                part = self.folder / PARTS / f"{number:06d}"
                in_order.append((part, task.position))
                if not is_whole(part, task.name):
                    yield part, task

        work = _SendPart(make) if ray else _WritePart(make)
        for (part, _), files in map_tasks(work, missing(), processes, ray):
            if ray:
                overwrite_atomically(part, partial(_write_files, files))
            while in_order[0][0] != part:
                yield in_order.popleft()
            yield in_order.popleft()
        yield from in_order


def finish(folder: Path) -> None:
    """Remove what only an unfinished corpus needs, the state last."""
    for path in (folder / PARTS, folder / UNFINISHED):
        if path.exists():  # a finished corpus may lie where nothing can be removed
            remove(path)


def worker_count(processes: int | None) -> int:
    """Return how many processes work: as set, or one per usable core."""
    return processes or min(usable_cores(), MAX_WORKERS)


def map_tasks(
    work: Callable[[Any], Any], items: Iterable[Item], processes: int | None, ray: str | None
) -> Iterator[tuple[Item, Any]]:
    """Yield each item with the result of `work`, in order. An error of `work` is raised here.

    `items` are read ahead of the results. WorkerDiedError: a process is gone. No process starts for a single item.
    """
    items = iter(items)
    first = list(islice(items, 2))
    with ExitStack() as stack:
        stack.enter_context(_tokenizers_in_one_thread())
        if ray:
            submit, count = stack.enter_context(_ray_cluster(ray, work))
            count = processes or count
        elif len(first) < 2 or worker_count(processes) == 1:
            submit, count = partial(_call_here, work), 0
        else:
            count = worker_count(processes)
            pool = stack.enter_context(process_pool(count, DIED, _set_work, (work,)))
            submit = partial(pool, _call_work)
        begun: deque[tuple[Item, Future[Any]]] = deque()
        for item in chain(first, items):
            begun.append((item, submit(item)))
            while begun and (begun[0][1].done() or len(begun) >= AHEAD * count):
                done, future = begun.popleft()
                yield done, future.result()
        for done, future in begun:
            yield done, future.result()


@dataclass(frozen=True)
class _WritePart:
    """Makes a part where it belongs."""

    make: Make

    def __call__(self, item: tuple[Path, Any]) -> None:
        part, task = item
        overwrite_atomically(part, partial(self.make, task))


@dataclass(frozen=True)
class _SendPart:
    """Makes a part on a machine that does not see the corpus folder, and returns its files."""

    make: Make

    def __call__(self, item: tuple[Path, Any]) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "part"
            self.make(item[1], part)
            return {path.name: path.read_bytes() for path in sorted(part.iterdir())}


def _write_files(files: dict[str, bytes], folder: Path) -> None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _call_here(work: Callable[[Any], Any], item: Any) -> Future[Any]:
    done = Future[Any]()
    done.set_result(work(item))
    return done


_work: Callable[[Any], Any] | None = None  # of a worker process


def _set_work(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work


def _call_work(item: Any) -> Any:
    assert _work is not None
    return _work(item)


@contextmanager
def _tokenizers_in_one_thread() -> Iterator[None]:
    """Set the variable that `tokenizers` reads at every call: the processes are the parallelism."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


@contextmanager
def _ray_cluster(address: str, work: Callable[[Any], Any]) -> Iterator[tuple[Submit, int]]:
    """Give `submit` and the number of the cluster's cores. UserError: there is no cluster at the address.

    A task whose node is lost is done again on another. Nodes need this package, but neither the text nor a common file
    system.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A cluster that is gone: Ray waits for 40 s, not 12 minutes.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"data.ray={address}: no Ray cluster there ({reason}). Start one with `ray start`."
        ) from None
    try:
        sent = ray.put(work)
        task = ray.remote(call_on_node).options(max_retries=RETRIES)

        def submit(item: Any) -> Future[Any]:
            answer = Future[Any]()
            # In a list the reference stays one: fetched once by each process, not with every task.
            future = task.remote([sent], item).future()
            future.add_done_callback(lambda done: _pass_on(done, answer))
            return answer

        yield submit, int(ray.cluster_resources().get("CPU", 1))
    finally:
        ray.shutdown()


def call_on_node(sent: list[Any], item: Any) -> Any:
    """Return the result of the work that was sent; runs on a node of the cluster."""
    return _fetched(sent[0])(item)


@cache
def _fetched(sent: Any) -> Any:
    import ray

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return ray.get(sent)


def _pass_on(done: Future[Any], answer: Future[Any]) -> None:
    """Set the result, or the error as the work raised it; `WorkerDiedError` where Ray gave the task up."""
    import ray

    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    elif isinstance(error, ray.exceptions.RayTaskError):
        answer.set_exception(error.cause if isinstance(error.cause, Exception) else error)
    elif isinstance(error, ray.exceptions.RayError):
        answer.set_exception(WorkerDiedError(LOST))
    else:
        answer.set_exception(error)
