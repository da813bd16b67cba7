"""Which number format is in force where."""

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from cramming import precision
from cramming.config import UserError
from cramming.precision import (
    Precision,
    PrecisionConfig,
    refuse_missing_hardware,
    refuse_unfit_residual,
    resolve,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_an_explicit_mode_is_taken_as_it_is(mode: str, device: torch.device) -> None:
    assert resolve(mode, device) == mode


@pytest.mark.parametrize(
    ("avx512_bf16", "amx", "mode"),
    [(False, False, "fp32"), (True, False, "bf16"), (False, True, "bf16"), (True, True, "bf16")],
)
def test_auto_on_a_cpu(monkeypatch: pytest.MonkeyPatch, avx512_bf16: bool, amx: bool, mode: str) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert resolve("auto", CPU) == mode


@pytest.mark.parametrize(("native", "mode"), [(True, "bf16"), (False, "fp16")])
def test_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch, native: bool, mode: str) -> None:
    """Emulated bf16 (before Ampere) is slower than fp16, so it does not count."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert resolve("auto", GPU) == mode


@pytest.mark.parametrize(
    ("mode", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrix_products_run_in_the_mode_and_weights_stay_fp32(mode: str, dtype: torch.dtype) -> None:
    precision = Precision(PrecisionConfig(mode, False), CPU)  # type: ignore[arg-type]
    layer = torch.nn.Linear(2, 2)
    with precision.autocast():
        assert layer(torch.ones(1, 2)).dtype == dtype
    assert layer.weight.dtype == torch.float32
    assert precision.scaler.is_enabled() == (mode == "fp16")


def test_fp8_on_a_cpu_names_what_it_needs() -> None:
    if find_spec("torchao") is None:
        with pytest.raises(UserError, match=r"cramming\[lowbit\]"):
            Precision(PrecisionConfig("fp8", False, True), CPU)
        return
    with pytest.raises(UserError, match=r"Ada or Hopper.*this is a CPU") as caught:
        Precision(PrecisionConfig("fp8", False), CPU)
    assert "\n" not in str(caught.value)
    assert Precision(PrecisionConfig("fp8", False, True), CPU).mode == "fp8"


@pytest.mark.parametrize(("capability", "accepted"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], accepted: bool) -> None:
    monkeypatch.setattr(precision, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with nullcontext() if accepted else pytest.raises(UserError, match="this is NVIDIA A100"):
        refuse_missing_hardware(PrecisionConfig("fp8", False), GPU)


@pytest.mark.parametrize(("mode", "accepted"), [("fp32", False), ("fp16", False), ("bf16", True), ("fp8", True)])
def test_a_residual_stream_in_bf16_goes_with_products_in_bf16(mode: Any, accepted: bool) -> None:
    config = PrecisionConfig("auto", False, residual="bf16")
    with nullcontext() if accepted else pytest.raises(UserError, match=rf"residual=bf16.*they are in {mode}; set"):
        refuse_unfit_residual(config, mode)


@pytest.mark.parametrize(("tf32", "setting"), [(True, "high"), (False, "highest")])
def test_tf32(tf32: bool, setting: str) -> None:
    Precision(PrecisionConfig("fp32", tf32), CPU)
    assert torch.get_float32_matmul_precision() == setting
