"""One of the processes that go through runs of the verb `pretrain`: `launch(folder, cases, verb_worker.py)`.

Rank `rank` (0) of a case gets the `signal` (SIGTERM) at the beginning of step `at` of this process; after a restart by
torchrun nobody does.
"""

import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cramming import launch
from cramming.engine import Engine, Gradients
from cramming.invocation import Invocation
from tests.cramming.parallel.rank_worker import be_ranks, own_cases

forward_backward = Engine.forward_backward


def main(folder: Path) -> None:
    """All cases, each a whole run or a stretch of one."""
    now: dict[str, Any] = {}

    def signalled(engine: Engine, *arguments: Any, **named: Any) -> Gradients:
        now["step"] += 1
        if (now["step"], engine.mesh.rank) == (now.get("at"), now.get("rank", 0)):
            os.kill(os.getpid(), getattr(signal, now.get("signal", "SIGTERM")))
        return forward_backward(engine, *arguments, **named)

    Engine.forward_backward = signalled  # type: ignore[method-assign]
    for _, case in own_cases(folder):
        is_restarted = (
            "TORCHELASTIC_RUN_ID" in os.environ and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
        )
        now.clear()
        now.update({} if is_restarted else case, step=0)
        try:
            call = {**case["call"], "runs": Path(case["call"]["runs"])}
            launch.main(case["settings"], Invocation(device="cpu", **call))
        except SystemExit:  # stopped; a process of its own would end here
            if dist.is_initialized():
                dist.destroy_process_group()


if __name__ == "__main__":
    be_ranks(main)
