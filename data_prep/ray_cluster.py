"""The preparation's workers on a Ray cluster (`data.ray`, extra `ray`), in place of processes of this machine.

Tasks are pure functions of what is sent, so a task whose node is lost is done again on another, a result that was lost
with a node is computed anew (Ray keeps what it needs for that), and the corpus stays the same. Text is read by the main
process: nodes need this package, but no common file system.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any

from cramming.config import UserError
from cramming.process_pool import WorkerDiedError

RETRIES = 20  # of a task, each after a node or a process of one was lost
LOST = (
    "the Ray cluster lost a task again and again (out of memory? no nodes left?); finished shards are kept; run the"
    " same command again, with a smaller data.workers if it happens again"
)


Submit = Callable[[str, Any], Future[Any]]


@contextmanager
def ray_tasks(
    address: str, functions: Mapping[str, Callable[[Any], Any]]
) -> Iterator[tuple[Submit, int]]:
    """For the length of the block: `submit(name, texts)` gives the future of what the function of this name makes of
    them, and the number of the cluster's cores. UserError: there is no cluster at the address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_NUM_REDIS_GET_RETRIES", "1"
    )  # a cluster that is gone: waits for 40 s, not 12 minutes
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"data.ray={address}: no Ray cluster there ({reason}); start one with `ray start`"
        ) from None
    try:
        sent = ray.put(dict(functions))
        task = ray.remote(_call).options(max_retries=RETRIES)

        def submit(name: str, texts: Any) -> Future[Any]:
            answer = Future[Any]()
            # In a list the reference stays one: fetched once by each process, not with every task.
            task.remote([sent], name, texts).future().add_done_callback(
                lambda done: _pass_on(done, answer)
            )
            return answer

        yield submit, int(ray.cluster_resources().get("CPU", 1))
    finally:
        ray.shutdown()


def _call(sent: list[Any], name: str, texts: Any) -> Any:
    return _functions(sent[0])[name](texts)


@cache
def _functions(sent: Any) -> Any:
    import ray

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks are the parallelism
    return ray.get(sent)


def _pass_on(done: Future[Any], answer: Future[Any]) -> None:
    """The result, or the error as the function raised it; `WorkerDiedError` where Ray gave the task up."""
    import ray

    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    elif isinstance(error, ray.exceptions.RayTaskError):
        answer.set_exception(error.cause if isinstance(error.cause, Exception) else error)
    else:
        answer.set_exception(
            WorkerDiedError(LOST) if isinstance(error, ray.exceptions.RayError) else error
        )
