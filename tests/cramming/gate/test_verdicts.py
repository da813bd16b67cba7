"""Verdicts are kept, found again, and listened to: `pretrain` refuses what failed on this device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cramming.bench import gate, tricks
from cramming.bench.gate import Floor, Verdict
from cramming.bench.tricks import COARSE, SAME, TRICKS
from cramming.config import UserError

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
    failed = Verdict(tricks.BEST, False, None, 0.02, 10, 200, 1.0, tricks.spelled(tricks.best("cpu", mode).settings))
    gate.save(tmp_path / "g.json", "here", [replace(failed, settings="attention.last_layer=targets")])
    assert gate.check(settings, "here", "cpu", mode)[tricks.BEST] == "untested"  # another stack had that name
    gate.save(tmp_path / "g.json", "here", [failed])
    with pytest.raises(UserError, match=r"last_layer=targets.*'best stack' failed .*leave one of these off"):
        gate.check(settings, "here", "cpu", mode)
    assert gate.check(settings | {"forced": [tricks.BEST]}, "here", "cpu", mode)[tricks.BEST] == "forced"
    without = {**settings, "attention": {**settings["attention"], "last_layer": "all"}}
    assert tricks.BEST not in gate.check(without, "here", "cpu", mode)


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
