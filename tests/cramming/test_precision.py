"""Which number format is in force where."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import device, recipe
from cramming.bench import gate, verdicts
from cramming.config import UserError
from cramming.precision import Precision, PrecisionConfig, resolve, resolve_residual
from cramming.recipe import Config, Hardware, check
from cramming.record import load_record

Compose = Callable[..., dict[str, Any]]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_an_explicit_mode_is_taken_as_it_is(mode: str, device: torch.device) -> None:
    assert resolve(mode, device) == mode


@pytest.mark.parametrize(
    ("avx512_bf16", "amx", "mode"),
    [(False, False, "fp32"), (True, False, "bf16"), (False, True, "bf16"), (True, True, "bf16")],
)
def test_auto_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, avx512_bf16: bool, amx: bool, mode: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert resolve("auto", CPU) == mode


@pytest.mark.parametrize(("native", "mode"), [(True, "bf16"), (False, "fp16")])
def test_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch, native: bool, mode: str) -> None:
    """Emulated bf16 (before Ampere) is slower than fp16, so it does not count."""
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: native or including_emulation,
    )
    assert resolve("auto", GPU) == mode


@pytest.mark.parametrize(
    ("mode", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrix_products_run_in_the_mode_and_weights_stay_fp32(
    mode: str, dtype: torch.dtype
) -> None:
    precision = Precision(PrecisionConfig(mode=mode, tf32=False), CPU)  # type: ignore[arg-type]
    layer = torch.nn.Linear(2, 2)
    with precision.autocast():
        assert layer(torch.ones(1, 2)).dtype == dtype
    assert layer.weight.dtype == torch.float32
    assert precision.scaler.is_enabled() == (mode == "fp16")


@pytest.mark.parametrize("lowbit", [False, True])
@pytest.mark.parametrize(
    ("name", "capability", "accepted"),
    [
        ("a CPU", (0, 0), False),
        ("A100", (8, 0), False),
        ("RTX 3060", (8, 6), False),
        ("RTX 4090", (8, 9), True),
    ],
)
def test_fp8_names_what_it_needs(
    compose: Compose,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    capability: tuple[int, int],
    accepted: bool,
    lowbit: bool,
) -> None:
    monkeypatch.setattr(recipe, "find_spec", lambda name: lowbit or None)
    hardware = Hardware("cuda", name, "fp8", capability, trains=True)
    says = rf"Ada or Hopper.*this is {name}" if lowbit else r"cramming\[lowbit\]"
    with nullcontext() if accepted and lowbit else pytest.raises(UserError, match=says):
        check(Config.of(compose("precision=fp8")), hardware)


@pytest.mark.parametrize(
    ("mode", "accepted"), [("fp32", False), ("fp16", False), ("bf16", True), ("fp8", True)]
)
def test_a_residual_stream_in_bf16_goes_with_products_in_bf16(
    compose: Compose, mode: Any, accepted: bool
) -> None:
    config = Config.of(compose("precision=auto", "precision.residual=bf16"))
    with (
        nullcontext()
        if accepted
        else pytest.raises(UserError, match=r"^precision\.residual=bf16: ")
    ):
        check(config, Hardware("cuda", "a GPU", mode, (9, 0)))


@pytest.mark.parametrize(
    ("device", "mode", "residual"),
    [
        (GPU, "bf16", "bf16"),
        (GPU, "fp8", "bf16"),
        (GPU, "fp16", "fp32"),
        (GPU, "fp32", "fp32"),
        (CPU, "bf16", "fp32"),
        (CPU, "fp32", "fp32"),
    ],
)
def test_auto_lowers_the_residual_stream_on_a_gpu_with_products_in_bf16(
    device: torch.device, mode: Any, residual: str
) -> None:
    assert resolve_residual("auto", mode, device.type) == residual
    for explicit in ("fp32", "bf16"):
        assert resolve_residual(explicit, mode, device.type) == explicit


@pytest.mark.parametrize(("residual", "resolved"), [("auto", "fp32"), ("bf16", "bf16")])
def test_the_record_has_the_residual_stream_that_was_in_force(
    start: Callable[..., Path], residual: str, resolved: str
) -> None:
    run = start("budget.steps=1", "precision=bf16", f"precision.residual={residual}", name="a")
    assert load_record(run)["pretrain"]["residual"] == resolved


def test_the_gate_judges_the_residual_stream_that_auto_means(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stream in bf16 that has failed on this GPU is refused, though nobody has typed it."""
    monkeypatch.setattr(device, "describe", lambda _: device.DeviceInfo("cuda", "a GPU", 1, None))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    where = verdicts.device_key("a GPU", torch.__version__)
    failed = verdicts.Verdict("bf16 residual stream", False, 1.0, 0.1, 20, 200, 1.0, "")
    gates = tmp_path / "gates.json"
    gate.save(gates, where, [failed], [])

    def state(*overrides: str) -> dict[str, str]:
        settings = compose(f"gates={gates}", "precision=bf16", *overrides)
        return recipe.check_gate(Config.of(settings), ["sdpa"], GPU)

    with pytest.raises(
        UserError, match=r"precision\.residual=bf16: .*'bf16 residual stream' failed"
    ):
        state()
    assert "bf16 residual stream" not in state("precision.residual=fp32")
    assert state("forced=['bf16 residual stream']")["bf16 residual stream"] == "forced"


@pytest.mark.parametrize(("tf32", "setting"), [(True, "high"), (False, "highest")])
def test_tf32(tf32: bool, setting: str) -> None:
    Precision(PrecisionConfig(mode="fp32", tf32=tf32), CPU)
    assert torch.get_float32_matmul_precision() == setting
