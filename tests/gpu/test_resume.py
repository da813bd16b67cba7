"""A run on the device, stopped and resumed, is as far from an unbroken one as that is from its own repetition."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import launch
from cramming.invocation import Invocation
from cramming.record import load_metrics, load_record
from tests.conftest import before_step

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _sums_in_one_order(device: torch.device) -> Iterator[None]:
    """On a GPU the gradients of embeddings and of attention are summed atomically, unless this is asked for."""
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("compiled", ["off", "model"])
def test_resumed_equals_unbroken_as_a_repetition_does(
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
    tmp_path: Path,
    device: torch.device,
    mode: str,
    compiled: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGTERM in the fifth of twelve steps. Bit for bit, where a repetition is."""

    def start(name: str, resume: bool = False) -> None:
        settings = [
            f"precision={mode}",
            f"runtime.compile='{compiled}'",
        ]
        here = Invocation(name, tmp_path, device=device.type, resume=resume)
        launch.main(compose(*tiny_overrides, *settings), here)

    start("whole")
    start("second")
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        before_step(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        start("broken")
    start("broken", resume=True)
    whole, second, broken = (
        load_record(tmp_path / name)["pretrain"] for name in ("whole", "second", "broken")
    )
    assert broken["steps"] == 12
    if second["final_sha256"] == whole["final_sha256"]:
        assert broken["final_sha256"] == whole["final_sha256"]
    losses, repeated, resumed = (
        [row["loss"] for row in load_metrics(tmp_path / name) if "loss" in row]
        for name in ("whole", "second", "broken")
    )
    noise = max(abs(a - b) for a, b in zip(losses, repeated, strict=True))
    assert noise < 0.01 and resumed == pytest.approx(losses, rel=0, abs=10 * noise)
