"""A projection's law finds what was planted, says how far it may be wrong, and is judged by runs it has not seen."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming import progress
from cramming.config import UserError
from eval.extras import project
from eval.extras.power_law import LEVEL, PowerLaw
from eval.extras.projection_runs import budgets_of, read_runs
from eval.rules.load import load_run
from tests.eval.runs import write_run

BUDGETS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]  # UNITs
STEPS = 10  # of one UNIT
UNIT = 3.97099008e-9  # exaFLOPs of so many steps of the runs here
Write = Callable[..., Path]


def planted(compute: float) -> float:
    """E = 2, A = 1 at the longest budget, alpha = 0.3."""
    return float(2 + (compute / BUDGETS[-1]) ** -0.3)


@pytest.mark.parametrize("budgets", [BUDGETS[:4], BUDGETS, BUDGETS + BUDGETS[:3]])
def test_intervals_cover_what_they_say(budgets: list[float]) -> None:
    """With as little as one degree of freedom, within the runs and far beyond: a new run's loss, E and alpha."""
    rng, times, hits = np.random.default_rng(0), 150, np.zeros(4)
    for _ in range(times):
        law = PowerLaw(budgets, [planted(c) + rng.normal(0, 0.02) for c in budgets])
        new = [(law.predict(c), planted(c) + rng.normal(0, 0.02)) for c in (3.0, 3000.0)]
        estimates = [*new, (law.floor, 2.0), (law.alpha, 0.3)]
        hits += [
            (e.low or 0.0) <= truth <= (np.inf if e.high is None else e.high)
            for e, truth in estimates
        ]
    four_errors = 4 * (LEVEL * (1 - LEVEL) / times) ** 0.5
    assert (abs(hits / times - LEVEL) < four_errors).all(), hits / times


def test_runs_without_noise_give_the_law_back() -> None:
    law = PowerLaw(BUDGETS, [planted(c) for c in BUDGETS])
    assert [law.floor.value, law.gain, law.alpha.value] == pytest.approx([2.0, 1.0, 0.3], rel=2e-3)
    assert law.predict(3000.0).value == pytest.approx(planted(3000.0), rel=1e-3)


def test_three_runs_have_no_interval() -> None:
    law = PowerLaw(BUDGETS[:3], [planted(c) for c in BUDGETS[:3]])
    assert law.noise is None
    assert law.predict(32.0)[1:] == law.floor[1:] == law.alpha[1:] == (None, None)


@pytest.fixture
def write_budget(tmp_path: Path) -> Write:
    """`write_budget(compute, ...)`: a finished run of so many UNITs with the planted loss, whatever it loses.

    Its score lacks ten times as many points.
    """

    def write(
        compute: float, seed: int = 0, lr: float = 1e-3, off: float = 0.0, **facts: Any
    ) -> Path:
        loss = planted(compute) + off + 0.001 * (seed - 0.5)
        name = f"{compute:g}-{seed}-{lr:g}"
        whole: dict[str, Any] = {"unit": "exaflops", "suite": "embedded"}
        whole["scores"] = {"pretrained": 1 - loss / 10 - 0.042}
        return write_run(
            tmp_path / "runs" / name,
            seed=seed,
            learning_rate=lr,
            steps=round(STEPS * compute),
            loss=loss,
            **{**whole, **facts},
        )

    return write


@pytest.fixture
def verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`cramming project` over the made-up runs; where it has turned what is said, that is turned back afterwards."""
    monkeypatch.setattr(progress, "_console", progress._console)

    def call(**changes: Any) -> None:
        arguments = {"names": None, "hours": 24.0, "exaflops": None, "out": None, "json": False}
        project.main(path=tmp_path / "runs", **{**arguments, **changes})

    return call


def read_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_full_budget_from_runs(
    write_budget: Write, verb: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Loss and score of a full budget; the runs that are none are named; both pictures are there."""
    for compute in BUDGETS:
        write_budget(compute)
    write_budget(1.0, seed=1)
    write_budget(3.0, ended=None)
    write_budget(2.0, lr=3e-3)
    verb(exaflops=320.0 * UNIT)
    said = capsys.readouterr().out
    verb(exaflops=320.0 * UNIT, json=True)
    report = read_json(capsys)
    law, score = report["loss"], report["lost_score"]
    assert len(report["runs"]) == 7
    assert report["left_out"] == ["3-0-0.001: is running", "2-0-0.003: optim.lr 0.001 and 0.003"]
    assert law["predicted"]["low"] < planted(320.0) < law["predicted"]["high"]
    assert score["predicted"]["value"] == pytest.approx(10 * planted(320.0), abs=1.0)
    assert law["full_budget"] == 320.0 * UNIT
    for kind in ("svg", "png"):
        assert (tmp_path / "runs" / "projection" / f"projection.{kind}").stat().st_size
    assert f"{law['predicted']['value']:.3f}" in said and "3-0-0.001: is running" in said


def test_hours_are_those_after_the_start(
    write_budget: Write, verb: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The speed is that from the first logged step to the last; what comes before is paid once."""
    folders = [write_budget(compute) for compute in BUDGETS[:4]]
    run = load_run(folders[-1])
    rows = [row for row in run.metrics if "loss" in row]
    tokens = rows[-1]["tokens"] - rows[0]["tokens"]
    tokens_per_second = tokens / (rows[-1]["seconds"] - rows[0]["seconds"])
    training = run.record.training
    assert training.exaflops and training.tokens and training.budget.spent_seconds
    speed = training.exaflops / training.tokens * tokens_per_second
    verb(hours=1.0, json=True)
    expected = training.exaflops + speed * (3600 - training.budget.spent_seconds)
    assert read_json(capsys)["loss"]["full_budget"] == pytest.approx(expected)
    with pytest.raises(UserError, match=r"project: a full budget of"):
        verb(exaflops=0.5 * UNIT)


@pytest.mark.parametrize(("unit", "budgets"), [("hours", 6), ("tokens", 3)])
def test_the_same_hours_are_another_budget_on_another_device(
    write_budget: Write, tmp_path: Path, unit: str, budgets: int
) -> None:
    """There they are another amount of compute; as many tokens are the same everywhere."""
    for amount in (1.0, 2.0, 4.0):
        for name, speed in (("Slow GPU", 1.0), ("Fast GPU", 8.0)):
            device = {"setup": {"environment": {"device": {"name": name}}}}
            in_hours = unit == "hours"
            write_budget(
                amount * speed if in_hours else amount,
                seed=int(speed),
                unit=unit,
                limit=amount / 100 if in_hours else None,
                change=device,
            )
    groups = budgets_of(read_runs(tmp_path / "runs", None).points)
    assert len(groups) == budgets and sum(map(len, groups)) == 6


def test_equal_work_is_one_budget_whatever_its_unit(
    write_budget: Write, verb: Any, tmp_path: Path
) -> None:
    """Hours are, too, where other runs' compute lies between those of their seeds."""
    for place, (compute, unit, limit) in enumerate(
        [
            (1.0, "steps", None),
            (1.0, "tokens", None),
            (2.0, "hours", 0.01),
            (2.2, "hours", 0.01),
            (2.1, "steps", None),
        ]
    ):
        write_budget(compute, seed=place, unit=unit, limit=limit)
    with pytest.raises(UserError, match="2 finished budgets of one recipe"):
        verb()
    write_budget(4.0)
    groups = budgets_of(read_runs(tmp_path / "runs", None).points)
    computes = [[round(point.exaflops / UNIT, 3) for point in group] for group in groups]
    assert computes == [[1.0, 1.0], [2.0, 2.1, 2.2], [4.0]]


@pytest.mark.parametrize("count", [3, 4])
def test_seeds_do_not_stand_for_budgets(
    write_budget: Write, verb: Any, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """They tell their own noise, not how well a law fits: with more of them its interval stays."""
    intervals = []
    for seeds in (range(1, 2), range(4)):  # the second and the mean of four differ by 0.001
        for place, seed in product(range(count), seeds):
            write_budget(BUDGETS[place], seed=seed, off=0.1 * (-1) ** place)
        verb(exaflops=320.0 * UNIT, json=True)
        intervals.append(read_json(capsys)["loss"]["predicted"])
    assert intervals[0]["value"] == pytest.approx(intervals[1]["value"], abs=2e-3)
    assert (intervals[0]["high"] is None) == (intervals[1]["high"] is None) == (count == 3)
    if count == 4:
        assert intervals[0]["high"] == pytest.approx(intervals[1]["high"], abs=2e-3)


def test_a_held_out_budget_has_no_part_in_its_prediction(
    write_budget: Write, verb: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest runs are off by half a nat: the law through the others does not have it, and the error says so."""
    for compute in BUDGETS:
        write_budget(compute, off=0.5 if compute == BUDGETS[-1] else 0.0)
    verb(json=True)
    held_out = read_json(capsys)["loss"]["held_out"]
    assert len(held_out) == 3
    true, measured = planted(32.0), held_out[-1]["measured"]
    assert held_out[-1]["predicted"]["value"] == pytest.approx(true, abs=2e-3)
    assert measured == pytest.approx(true + 0.5, abs=1e-3)
    assert held_out[-1]["error"] == pytest.approx(100 * (true / measured - 1), abs=0.1)


def test_what_makes_no_law_is_refused(write_budget: Write, verb: Any) -> None:
    write_budget(1.0)
    write_budget(2.0, seed=0)
    write_budget(2.0, seed=1)
    write_budget(4.0, ended="diverged")
    with pytest.raises(UserError, match=r"2 finished budgets of one recipe.*is diverged"):
        verb()
    write_budget(4.0, lr=2e-3)
    with pytest.raises(UserError, match=r"optim\.lr 0\.001 and 0\.002"):
        verb(names="1-0-0.001,2-0-0.001,4-0-0.002")
    for compute in (2.0, 4.0, 8.0):
        write_budget(compute, off=compute)
    with pytest.raises(UserError, match="do not fall with compute"):
        verb()
