"""The gate lets through what learns the same, catches what does not, and `pretrain` listens to it."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import gate, tricks
from cramming.bench import sides
from cramming.config import UserError
from cramming.gate import Floor, Verdict
from cramming.tricks import COARSE, SAME, TRICKS, Trick

STEPS = 60
SMALL = {
    "model.hidden_size": 32, "model.num_layers": 2, "model.num_heads": 2, "model.intermediate_size": 64,
    "train.batch_size": 16, "train.micro_batch": 16, "train.sequence_length": 32, "optim.lr": 1e-2,
}  # fmt: skip


def curve(compose: Callable[..., dict[str, Any]], trick: Trick, moved: tuple[float, int] | None = None) -> list[float]:
    """Losses of a small run with one trick, in this process."""
    settings = tricks.changed(tricks.changed(compose(), SMALL), tricks.REFERENCE)
    settings = tricks.changed(settings, {**trick.settings, "runtime.keep_heap": False})
    job = {"settings": settings, "micro_batches": trick.micro_batches, "vocab_size": 64, "device": "cpu"}
    return sides.Ours(job | ({"moved": moved} if moved else {}), torch.device("cpu")).run(0, STEPS)[1]


REFERENCE = Trick("reference", {}, None, "")


@pytest.fixture(scope="module")
def reference(compose: Callable[..., dict[str, Any]]) -> list[float]:
    return curve(compose, REFERENCE)


@pytest.fixture(scope="module")
def floors(compose: Callable[..., dict[str, Any]], reference: list[float]) -> dict[float | None, Floor]:
    """Measured as `bench tricks` does, for both kinds of rounding."""
    twins = {size: [curve(compose, REFERENCE, (size, seed)) for seed in (1, 2, 3)] for size in (SAME, COARSE)}
    return {size: Floor(size, [gate.strays(reference, twin) for twin in found]) for size, found in twins.items()}


@pytest.mark.parametrize("name", ["last layer at targets", "accumulation x4", "checkpoint all", "checkpoint every 2nd"])
def test_exact_tricks_pass(
    compose: Callable[..., dict[str, Any]], reference: list[float], floors: dict[float | None, Floor], name: str
) -> None:
    (trick,) = (t for t in TRICKS if t.name == name)
    verdict = gate.judge(trick, reference, curve(compose, trick), floors[SAME])
    assert verdict.passed and verdict.fall > gate.MIN_FALL


@pytest.mark.parametrize("rounding", [SAME, COARSE])
def test_another_twin_passes(
    compose: Callable[..., dict[str, Any]], reference: list[float], floors: dict[float | None, Floor], rounding: float
) -> None:
    verdict = gate.judge(
        Trick("x", {}, rounding, ""), reference, curve(compose, REFERENCE, (rounding, 4)), floors[rounding]
    )
    assert verdict.passed


def test_fp32_is_not_allowed_what_bf16_is(
    compose: Callable[..., dict[str, Any]], reference: list[float], floors: dict[float | None, Floor]
) -> None:
    coarse = curve(compose, REFERENCE, (COARSE, 4))
    assert not gate.judge(Trick("x", {}, SAME, ""), reference, coarse, floors[SAME]).passed


def test_the_tolerance_never_falls_and_has_a_least() -> None:
    allowed = Floor(SAME, [[0.0, 1e-6, 1e-3, 0.02, 0.01], [0.0, 0.0, 2e-3, 0.01, 0.03]]).allowed()
    assert allowed == pytest.approx([6e-3, 0.06, 0.09, 0.09, 0.09])
    assert Floor(SAME, [[0.0] * 4]).allowed() == [gate.LEAST] * 4


def _no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that forgets who asks: every token gets its own value."""
    from cramming.model import attention

    kernel = attention.KERNELS["sdpa"]
    broken = kernel._replace(attend=lambda q, k, v, layout, dropout: layout.at_asking(v))
    monkeypatch.setitem(attention.KERNELS, "sdpa", broken)


def _wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's queries belong to the neighbours of the targets."""
    from cramming.model import attention

    whole = attention.asked_by
    monkeypatch.setattr(attention, "asked_by", lambda layout, m, n: whole(layout, (m + 1).clamp(max=n - 1), n))


def _lost_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointed blocks whose parameters get no gradient."""
    from cramming.parallel import apply

    def broken(function: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            out = function(*args)
        return args[0] + (out - args[0]).detach()

    monkeypatch.setattr(apply, "checkpoint", broken)


def _coarse_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number format with three bits of mantissa."""
    from cramming.model import layers

    gelu = layers.ACTIVATIONS["gelu"]
    monkeypatch.setitem(layers.ACTIVATIONS, "gelu", lambda x: gelu(x) + (x.detach() * 1.5).round() - x.detach() * 1.5)


def _forgotten_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulation that keeps the first micro-batch's gradient only."""
    from cramming.engine import Engine

    accumulate = Engine._accumulate
    monkeypatch.setattr(Engine, "_accumulate", lambda self, batches, *rest: accumulate(self, batches[:1], *rest))


def _stale_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer whose state is lost at every step."""
    step = torch.optim.AdamW.step

    def broken(self: Any, *args: Any) -> Any:
        self.state.clear()
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)


def _learning_rate_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """By 2 percent."""
    rate = sides.Ours.learning_rate
    monkeypatch.setattr(sides.Ours, "learning_rate", lambda self, step: 1.02 * rate(self, step))


def _uncorrected_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam that takes its second step for the first."""
    step = torch.optim.AdamW.step

    def broken(self: Any, *args: Any) -> Any:
        for state in self.state.values():
            if state["step"] == 1:
                state["step"].add_(1)
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)


def _weights_without_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are kept in bf16, so that small updates are lost."""
    step = torch.optim.AdamW.step

    def broken(self: Any, *args: Any) -> Any:
        step(self, *args)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.copy_(weight.data.bfloat16())

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)


def _one_micro_batch_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulation that reports the loss of all micro-batches and drops the last one's gradient."""
    from cramming.engine import Engine

    forward, calls = Engine._forward, itertools.count(1)

    def broken(self: Any, batch: Any) -> Any:
        loss, correct = forward(self, batch)
        return (loss.detach() + 0 * loss if next(calls) % 4 == 0 else loss), correct

    monkeypatch.setattr(Engine, "_forward", broken)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Trick]] = {
    "attention": (_no_attention, Trick("attention", {}, SAME, "")),
    "last layer": (_wrong_tokens, Trick("last layer", {"attention.last_layer": "targets"}, SAME, "")),
    "checkpointing": (_lost_gradient, Trick("checkpointing", {"memory.checkpoint_every": 1}, SAME, "")),
    "precision": (_coarse_products, Trick("precision", {}, COARSE, "")),
    "master weights": (_weights_without_masters, Trick("master weights", {}, SAME, "")),
    "accumulation": (_forgotten_micro_batches, Trick("accumulation", {}, SAME, "", micro_batches=4)),
    "one micro-batch": (_one_micro_batch_less, Trick("one micro-batch", {}, SAME, "", micro_batches=4)),
    "optimizer": (_stale_state, Trick("optimizer", {}, SAME, "")),
    "optimizer in few bits": (_stale_state, Trick("optimizer in few bits", {}, COARSE, "")),
    "bias correction": (_uncorrected_bias, Trick("bias correction", {}, SAME, "")),
    "learning rate": (_learning_rate_too_high, Trick("learning rate", {}, SAME, "")),
}


@pytest.mark.parametrize("family", FAULTS)
def test_a_planted_fault_of_each_family_is_caught(
    compose: Callable[..., dict[str, Any]],
    reference: list[float],
    floors: dict[float | None, Floor],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    plant, trick = FAULTS[family]
    floor = floors[trick.rounding]
    if trick.settings or trick.micro_batches > 1:  # else it is the reference
        assert gate.judge(trick, reference, curve(compose, trick), floor).passed
    plant(monkeypatch)
    assert not gate.judge(trick, reference, curve(compose, trick), floor).passed


def test_a_curve_that_is_not_finite_fails(reference: list[float], floors: dict[float | None, Floor]) -> None:
    broken = [*reference[:-1], math.nan]
    verdict = gate.judge(Trick("x", {}, SAME, ""), reference, broken, floors[SAME])
    assert not verdict.passed and verdict.distance is None and verdict.at_step == STEPS


def test_a_reference_that_learns_nothing_proves_nothing() -> None:
    with pytest.raises(ValueError, match=r"fell by 0\.000"):
        gate.judge(Trick("x", {}, SAME, ""), [3.0] * 40, [3.0] * 40, Floor(SAME, [[0.0] * 4]))


FAILED = Verdict("checkpoint all", False, 0.4, 0.02, 30, 200, 1.0)


def test_a_failed_trick_is_refused_unless_forced(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    gates = tmp_path / "gates.json"
    settings = compose(f"gates={gates}", "memory.checkpoint_every=1")
    assert gate.check(settings, "here", "cpu", "fp32")["checkpoint all"] == "untested"
    gate.save(gates, "elsewhere", [FAILED])
    assert gate.check(settings, "here", "cpu", "fp32")["checkpoint all"] == "untested"
    gate.save(gates, "here", [FAILED])
    with pytest.raises(UserError, match=r"checkpoint_every=1: .*strayed by 0.4 nats .*step 30.*\['checkpoint all'\]"):
        gate.check(settings, "here", "cpu", "fp32")
    assert gate.check(settings | {"forced": ["checkpoint all"]}, "here", "cpu", "fp32")["checkpoint all"] == "forced"
    assert "checkpoint all" not in gate.check(compose(f"gates={gates}"), "here", "cpu", "fp32")


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_best_stack_has_a_verdict_of_its_own(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, mode: str
) -> None:
    """Each trick of a stack may pass while the stack fails: `pretrain` asks for both."""
    stack = [f"{key}={value}" for key, value in tricks.best("cpu", mode).settings.items()]
    settings = compose(f"gates={tmp_path / 'g.json'}", *stack)
    assert gate.check(settings, "here", "cpu", mode)[tricks.BEST] == "untested"
    gate.save(tmp_path / "g.json", "here", [Verdict(tricks.BEST, False, None, 0.02, 10, 200, 1.0)])
    with pytest.raises(UserError, match=r"runtime.compile=model.*'best stack' failed .*leave one of these off"):
        gate.check(settings, "here", "cpu", mode)
    assert gate.check(settings | {"forced": [tricks.BEST]}, "here", "cpu", mode)[tricks.BEST] == "forced"
    assert tricks.BEST not in gate.check({**settings, "runtime": {**settings["runtime"], "compile": "off"}}, "here",
                                         "cpu", mode)  # fmt: skip


def test_the_best_stack_computes_in_what_auto_means() -> None:
    for mode in ("bf16", "fp16"):
        assert tricks.best("cuda", mode).settings["precision.mode"] == mode
    assert "precision.mode" not in tricks.best("cpu", "fp32").settings


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["memory.checkpoint_every=3"], {"checkpoint all"}),
        (["memory.checkpoint_every=2", "memory.checkpoint=selective"], {"checkpoint all", "selective checkpoint"}),
        (["optim.name=adamw8bit", "optim.eps=1e-7"], {"8-bit AdamW"}),
        (
            ["runtime.compile=model", "memory.activation_budget=0.4"],
            {"compile model", "activation budget 0.5", "best stack"},
        ),
        (["precision.tf32=true"], set()),
    ],
)
def test_another_value_does_not_hide_a_trick(
    compose: Callable[..., dict[str, Any]], overrides: list[str], names: set[str]
) -> None:
    plain = {trick.name for trick in tricks.in_force(compose(), "cpu", "fp32")}
    found = {trick.name for trick in tricks.in_force(compose(*overrides), "cpu", "fp32")}
    assert names <= found and found - plain <= names | {"checkpoint every 2nd"}
    assert "tf32" not in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "not a table of verdicts"),
        (b'{"format": 2}', "not a table of verdicts"),
        (b'{"format": 2, "places": {"here": {"verdicts": {"bf16": true}, "floors": {}}}}', "not a table of verdicts"),
        (
            b'{"format": 2, "places": {"here": {"floors": {}, "verdicts":'
            b' {"bf16": {"passed": false, "distance": "far", "tolerance": 1, "at_step": 1}}}}}',
            "not a table of verdicts",
        ),
        (b'{"here": {"bf16": {"passed": true, "distance": 0.01, "tolerance": 0.05}}}', r"verdicts in format 1, not 2"),
    ],
)
def test_a_damaged_file_is_named(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "gates.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"gates\.json: {message}"):
        gate.check(compose(f"gates={tmp_path / 'gates.json'}"), "here", "cpu", "fp32")


def test_an_unknown_name_in_forced_lists_the_known(compose: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"no trick .'magic'.; there are: last layer at targets"):
        gate.check(compose("forced=[magic]"), "here", "cpu", "fp32")


def test_newer_verdicts_replace_older(tmp_path: Path) -> None:
    gates = tmp_path / "gates.json"
    gate.save(gates, "here", [FAILED])
    gate.save(gates, "here", [Verdict("checkpoint all", True, 0.0, 0.02, 10, 200, 1.0)])
    assert gate.load(gates)["here"]["verdicts"]["checkpoint all"]["passed"] is True


def test_floors_are_kept_beside_verdicts(tmp_path: Path) -> None:
    gates = tmp_path / "gates.json"
    gate.save(gates, "here", [FAILED], [Floor(SAME, [[1e-7, 2e-3]]), Floor(COARSE, [[1e-3, 0.01]])])
    gate.save(gates, "here", [], [Floor(SAME, [[1e-7, 3e-3]])])
    here = gate.load(gates)["here"]
    assert here["verdicts"]["checkpoint all"]["passed"] is False
    assert {name: floor["strays"] for name, floor in here["floors"].items()} == {
        "1.19e-07": [[1e-7, 3e-3]], "0.00391": [[1e-3, 0.01]]
    }  # fmt: skip
    assert here["floors"]["1.19e-07"]["allowed"] == pytest.approx([9e-3, 9e-3])


def test_every_trick_names_settings_that_exist(compose: Callable[..., dict[str, Any]]) -> None:
    settings = compose()
    for trick in (*TRICKS, tricks.best("cpu", "bf16"), tricks.best("cuda", "fp16")):
        tricks.changed(settings, trick.settings)
