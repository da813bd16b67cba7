"""How the processes of a run find each other: by the store of whoever started them, under a name that all of them know.

torchrun (2.13) has one store for all restarts, and in it the addresses of processes that are no more; so a group's name
must be new. The number of restarts would not do: each node counts those that its own processes have caused.
"""

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cramming.config import require

WAIT_SECONDS = 1800  # as long as the others wait for an answer


def join(backend: str) -> None:
    """Join the group of all processes."""
    store, rank, size = next(iter(dist.rendezvous("env://")))
    name = _agreed(store, rank, size, uuid.uuid4().hex)
    wait = timedelta(hours=2)  # for rank 0, which hashes the corpus, counts in it and writes alone
    dist.init_process_group(
        backend, store=dist.PrefixStore(name, store), rank=rank, world_size=size, timeout=wait
    )


def _agreed(store: Any, rank: int, size: int, own: str) -> str:
    """Rank 0's `own`, on every rank. Each asks by its own, under which there is no answer from before a restart;
    torchrun ends all processes before it restarts them, so none from before can still ask."""
    if rank:
        store.set(f"asks {rank}", own)
        name: str = store.get(f"answer {own}").decode()
        store.set(f"knows {name} {rank}", "")
        return name
    others, deadline = list(range(1, size)), time.monotonic() + WAIT_SECONDS
    while others := [other for other in others if not store.check([f"knows {own} {other}"])]:
        for other in others:
            if store.check([f"asks {other}"]):
                store.set(f"answer {store.get(f'asks {other}').decode()}", own)
        require(
            time.monotonic() < deadline,
            f"torchrun: of {size} processes those of rank {', '.join(map(str, others))} did not answer within"
            f" {WAIT_SECONDS // 60} minutes; see why they ended, and start all of them again",
        )
        time.sleep(0.01)
    return own
