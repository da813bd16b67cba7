"""The gate lets through what learns the same, its tolerance is what rounding makes it, and its verdicts are kept."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cramming.bench import gate, tricks, verdicts
from cramming.bench.gate import BASELINE, NoiseFloor
from cramming.bench.tricks import COARSE, SAME, TRICKS
from cramming.bench.verdicts import Verdict
from cramming.config import UserError
from cramming.recipe import Config

Compose = Callable[..., dict[str, Any]]
PLAIN = replace(BASELINE, rounding=SAME)
FAILED = Verdict("checkpoint all", False, 0.4, 0.02, 30, 200, 1.0)


def test_a_trick_that_changes_no_number_is_at_no_distance(small: Any) -> None:
    (trick,) = (trick for trick in TRICKS if trick.name == "checkpoint every 2nd")
    verdict = small.sound(trick)
    assert verdict.passed and verdict.distance == 0 and verdict.fall > gate.MIN_FALL


def test_another_repetition_passes_and_fp32_is_not_allowed_what_bf16_is(small: Any) -> None:
    def judged(size: float, rounding: float) -> bool:
        (curve,) = small.losses([small.spec(BASELINE) | {"perturbed": (size, 4)}])
        trick = replace(PLAIN, rounding=rounding)
        return gate.compare_curves(trick, small.reference, curve, small.floor(rounding)).passed

    assert judged(SAME, SAME) and judged(COARSE, COARSE)
    assert not judged(COARSE, SAME)


def test_the_tolerance_never_falls_and_has_a_least() -> None:
    allowed = NoiseFloor(
        SAME, [[0.0, 1e-6, 1e-3, 0.02, 0.01], [0.0, 0.0, 2e-3, 0.01, 0.03]]
    ).tolerance()
    assert allowed == pytest.approx([6e-3, 0.06, 0.09, 0.09, 0.09])
    assert NoiseFloor(SAME, [[0.0] * 4]).tolerance() == [gate.LEAST] * 4


def test_a_curve_that_is_not_finite_fails() -> None:
    curve = [3.0] * 20 + [2.0] * 20
    verdict = gate.compare_curves(
        PLAIN, curve, [*curve[:-1], math.nan], NoiseFloor(SAME, [[0.0] * 4])
    )
    assert not verdict.passed and verdict.distance is None and verdict.at_step == 40


def test_steps_that_are_left_over_are_a_window_too() -> None:
    curve = [3.0] * 13
    assert gate.distances(curve, [3.5] * 10 + [5.0] * 3) == [0.5, 2.0]
    verdict = gate.compare_curves(PLAIN, curve, [*curve[:-1], 4.5], NoiseFloor(SAME, [[0.0] * 2]))
    assert not verdict.passed and (verdict.distance, verdict.at_step) == (0.5, 13)


@pytest.mark.parametrize("diverged", [math.inf, math.nan])
def test_a_repetition_that_diverged_judges_nothing(diverged: float, tmp_path: Path) -> None:
    """It would allow whatever there is, and a number that JSON has not would cost the whole file."""
    curve, floor = [3.0] * 20 + [2.0] * 20, NoiseFloor(SAME, [[0.1] * 4, [diverged] * 4])
    with pytest.raises(UserError, match="not finite"):
        gate.compare_curves(PLAIN, curve, curve, floor)
    with pytest.raises(UserError, match="not finite"):
        gate.save(tmp_path / "gates.json", "here", [], [floor])
    assert not (tmp_path / "gates.json").exists()


def test_a_reference_that_learns_nothing_proves_nothing(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = gate.Curves(small.settings, small.steps, small.vocab_size, small.device, small.make)
    monkeypatch.setattr(fresh, "losses", lambda specs: [[3.0] * 60 for _ in specs])
    with pytest.raises(UserError, match=r"^--gate-steps=60: "):
        fresh.floor(SAME)


def test_a_failed_trick_is_refused_unless_forced(compose: Compose, tmp_path: Path) -> None:
    gates = tmp_path / "gates.json"
    settings = compose(f"gates={gates}", "memory.checkpoint_every=1")
    assert verdicts.check(settings, "here", "cpu", "fp32")["checkpoint all"] == "untested"
    gate.save(gates, "elsewhere", [FAILED])
    assert verdicts.check(settings, "here", "cpu", "fp32")["checkpoint all"] == "untested"
    gate.save(gates, "here", [FAILED])
    with pytest.raises(
        UserError,
        match=r"checkpoint_every=1: .*strayed by 0.4 nats .*step 30.*\['checkpoint all'\]",
    ):
        verdicts.check(settings, "here", "cpu", "fp32")
    with pytest.raises(
        UserError, match=r"^memory\.checkpoint_every=3: the trick 'checkpoint all' failed"
    ):
        verdicts.check(
            compose(f"gates={gates}", "memory.checkpoint_every=3"), "here", "cpu", "fp32"
        )
    forced = settings | {"forced": ["checkpoint all"]}
    assert verdicts.check(forced, "here", "cpu", "fp32")["checkpoint all"] == "forced"
    assert "checkpoint all" not in verdicts.check(compose(f"gates={gates}"), "here", "cpu", "fp32")
    gate.save(gates, "here", [replace(FAILED, passed=True)])  # newer verdicts replace older
    assert verdicts.check(settings, "here", "cpu", "fp32")["checkpoint all"] == "passed"


NO_VERDICTS = (
    "",
    "[]",
    '{"format": 0}',
    "\udcff",
    '{"format": 2}',
    '{"format": 2, "places": []}',
    '{"format": 2, "places": {"here": 1}}',
    '{"format": 2, "places": {"here": {"verdicts": {"tf32": {}}, "floors": {}}}}',
)


@pytest.mark.parametrize("content", NO_VERDICTS)
def test_a_file_that_holds_no_verdicts_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "gates.json"
    file.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(
        UserError, match=r"gates\.json: no table of verdicts in format \d+. Remove it"
    ):
        verdicts.load(file)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_best_stack_has_a_verdict_of_its_own(
    compose: Compose, tmp_path: Path, mode: str
) -> None:
    """Each trick of a stack may pass while the stack fails: `pretrain` asks for both."""
    best = tricks.best("cpu", mode)
    settings = compose(
        f"gates={tmp_path / 'g.json'}", *(f"{key}={value}" for key, value in best.settings.items())
    )
    failed = Verdict(
        tricks.BEST, False, None, 0.02, 10, 200, 1.0, tricks.as_overrides(best.settings)
    )
    gate.save(
        tmp_path / "g.json", "here", [replace(failed, settings="attention.last_layer=targets")]
    )
    assert (
        verdicts.check(settings, "here", "cpu", mode)[tricks.BEST] == "untested"
    )  # another stack had that name
    gate.save(tmp_path / "g.json", "here", [failed])
    with pytest.raises(UserError, match=r"last_layer=targets.*'best stack' failed .*Leave it off"):
        verdicts.check(settings, "here", "cpu", mode)
    assert (
        verdicts.check(settings | {"forced": [tricks.BEST]}, "here", "cpu", mode)[tricks.BEST]
        == "forced"
    )
    without = {**settings, "attention": {**settings["attention"], "last_layer": "all"}}
    assert tricks.BEST not in verdicts.check(without, "here", "cpu", mode)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["memory.checkpoint_every=3"], {"checkpoint all"}),
        (
            ["memory.checkpoint_every=2", "memory.checkpoint=selective"],
            {"checkpoint all", "selective checkpoint"},
        ),
        (["optim=adamw8bit", "optim.eps=1e-7"], {"8-bit AdamW"}),
        (
            ["runtime.compile=model", "memory.activation_budget=0.4"],
            {"compile model", "activation budget 0.5"},
        ),
        (["precision.tf32=true"], set()),
    ],
)
def test_another_value_does_not_hide_a_trick(
    compose: Compose, overrides: list[str], names: set[str]
) -> None:
    plain = {trick.name for trick in tricks.in_force(compose(), "cpu", "fp32")}
    in_force = {trick.name for trick in tricks.in_force(compose(*overrides), "cpu", "fp32")}
    assert names <= in_force and in_force - plain <= names | {"checkpoint every 2nd"}
    assert "tf32" not in in_force


@pytest.mark.parametrize("content", ["[]", '{"here": {}}', '{"format": 3, "places": {}}'])
def test_a_table_of_another_format_is_named(compose: Compose, tmp_path: Path, content: str) -> None:
    (tmp_path / "gates.json").write_text(content)
    with pytest.raises(
        UserError, match=r"gates\.json: no table of verdicts in format 2. Remove it"
    ):
        verdicts.check(compose(f"gates={tmp_path / 'gates.json'}"), "here", "cpu", "fp32")


def test_an_unknown_name_in_forced_lists_the_known(compose: Compose) -> None:
    with pytest.raises(UserError, match="forced=magic: "):
        verdicts.check(compose("forced=[magic]"), "here", "cpu", "fp32")


def test_noise_floors_are_kept_with_the_verdicts(tmp_path: Path) -> None:
    gates = tmp_path / "gates.json"
    gate.save(
        gates,
        "here",
        [FAILED],
        [NoiseFloor(SAME, [[1e-7, 2e-3]]), NoiseFloor(COARSE, [[1e-3, 0.01]])],
    )
    gate.save(gates, "here", [], [NoiseFloor(SAME, [[1e-7, 3e-3]])])
    here = verdicts.load(gates)["here"]
    assert here.verdicts["checkpoint all"].passed is False
    assert {name: floor["distances"] for name, floor in here.floors.items()} == {
        "1.19e-07": [[1e-7, 3e-3]],
        "0.00391": [[1e-3, 0.01]],
    }
    assert here.floors["1.19e-07"]["tolerance"] == pytest.approx([9e-3, 9e-3])


def test_every_trick_names_settings_that_exist_and_builds(compose: Compose) -> None:
    reference = tricks.changed(compose(), tricks.REFERENCE)
    for trick in (*TRICKS, tricks.best("cpu", "bf16"), tricks.best("cuda", "fp16")):
        Config.of(tricks.changed(reference, trick.settings))
    assert "precision.mode" not in tricks.best("cpu", "fp32").settings
    assert tricks.best("cuda", "fp16").settings["precision.mode"] == "fp16"
