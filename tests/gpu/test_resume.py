"""A run on the device, stopped and resumed, ends with the weights of an unbroken one, bit for bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import pretrain
from cramming.engine import Engine
from cramming.record import load_metrics, load_record

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", ["off", "model"])
def test_resumed_equals_unbroken_bit_for_bit(
    compose: Callable[..., dict[str, Any]], tiny_overrides: list[str], tmp_path: Path, device: torch.device, mode: str,
    compiled: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """SIGTERM in the fifth of twelve steps."""

    def start(name: str, *more: str) -> None:
        settings = ["device=" + device.type, f"precision={mode}", f"runtime.compile='{compiled}'", f"runs={tmp_path}"]
        pretrain.main(compose(*tiny_overrides, *settings, f"name={name}", *more))

    start("whole")
    original, calls = Engine.step, [0]

    def counted(self: Engine, *arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Engine, "step", counted)
        start("broken")
    start("broken", "resume=true")
    whole, broken = (load_record(tmp_path / name)["pretrain"] for name in ("whole", "broken"))
    losses = [[r["loss"] for r in load_metrics(tmp_path / name) if "loss" in r] for name in ("whole", "broken")]
    assert losses[0] == losses[1]
    assert whole["final_sha256"] == broken["final_sha256"] and broken["steps"] == 12
