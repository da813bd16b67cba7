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
from eval.extras.projection_words import _budget
from eval.recipe import SECTIONS

BUDGETS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]  # exaFLOPs
Write = Callable[..., None]


def planted(exaflops: float) -> float:
    """E = 2, A = 1 at the longest budget, alpha = 0.3."""
    return float(2 + (exaflops / BUDGETS[-1]) ** -0.3)


@pytest.mark.parametrize("budgets", [BUDGETS[:4], BUDGETS, BUDGETS + BUDGETS[:3]])
def test_intervals_cover_what_they_say(budgets: list[float]) -> None:
    """With as little as one degree of freedom, within the runs and far beyond: a new run's loss, E and alpha."""
    rng, times, hits = np.random.default_rng(0), 150, np.zeros(4)
    for _ in range(times):
        law = PowerLaw(budgets, [planted(c) + rng.normal(0, 0.02) for c in budgets])
        new = [(law.predict(c), planted(c) + rng.normal(0, 0.02)) for c in (3.0, 3000.0)]
        found = [*new, (law.floor, 2.0), (law.alpha, 0.3)]
        hits += [
            (e.low or 0.0) <= truth <= (np.inf if e.high is None else e.high) for e, truth in found
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
def write_budget(
    tmp_path: Path, make_record: Callable[..., dict[str, Any]], write_run: Callable[..., Path]
) -> Write:
    """A finished run of so many exaFLOPs with the planted loss, and a score that lacks ten times as many points."""

    def write(
        exaflops: float, seed: int = 0, lr: float = 1e-3, off: float = 0.0, **pretrain: Any
    ) -> None:
        record = make_record("embedded")
        record["name"] = f"{exaflops:g}-{seed}-{lr:g}"
        record["config"] = {section: {} for section in SECTIONS} | {"optim": {"lr": lr}}
        del record["glue"]["random"]
        training, loss = record["pretrain"], planted(exaflops) + off + 0.001 * (seed - 0.5)
        training["validation"]["loss"] = loss
        training |= {"exaflops": exaflops, "tokens": int(1e6 * exaflops), "seed": seed, **pretrain}
        training["budget"] |= {
            "unit": "exaflops",
            "limit": exaflops,
            "spent_seconds": 5 + 100 * exaflops,
        }
        record["glue"]["pretrained"]["averages"]["embedded"]["value"] = 100 - 10 * loss
        write_run(tmp_path / "runs" / record["name"], record)

    return write


@pytest.fixture
def verb(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """`cramming project` over the made-up runs; where it has turned what is said, that is turned back afterwards."""
    monkeypatch.setattr(progress, "_console", progress._console)

    def call(**changes: Any) -> None:
        settings = {**compose(), "runs": str(tmp_path / "runs")}
        project.main({**settings, "project": {**settings["project"], **changes}})

    return call


def test_the_full_budget_from_runs(
    write_budget: Write, verb: Any, capsys: Any, tmp_path: Path
) -> None:
    """Loss and score of a full budget; the runs that are none are named; both pictures are there."""
    for exaflops in BUDGETS:
        write_budget(exaflops)
    write_budget(1.0, seed=1)
    write_budget(64.0, status="running")
    write_budget(2.0, lr=3e-3)
    verb(exaflops=320.0)
    said = capsys.readouterr().out
    verb(exaflops=320.0, json=True)
    found = json.loads(capsys.readouterr().out)
    law, score = found["loss"], found["lost_score"]
    assert len(found["runs"]) == 7
    assert found["left_out"] == ["64-0-0.001: is running", "2-0-0.003: optim.lr 0.001 and 0.003"]
    assert law["predicted"]["low"] < planted(320.0) < law["predicted"]["high"]
    assert score["predicted"]["low"] < 10 * planted(320.0) < score["predicted"]["high"]
    assert law["full_budget"] == 320.0
    assert all(
        (tmp_path / "runs" / "projection" / f"projection.{kind}").stat().st_size
        for kind in ("svg", "png")
    )
    assert f"pinned validation loss {law['predicted']['value']:.3f} [" in said
    assert "left out: 64-0-0.001: is running" in said


def test_hours_are_those_after_the_start(
    write_budget: Write, verb: Any, capsys: Any, tmp_path: Path
) -> None:
    """Which takes ten seconds of each run, however long it is."""
    for exaflops in BUDGETS[:4]:
        write_budget(exaflops)
        steps = ((k, 1e6 * exaflops * k / 2, 10 + 100 * exaflops * k / 2) for k in (1, 2))
        rows = [
            {"step": k, "tokens": tokens, "seconds": seconds, "loss": 3.0}
            for k, tokens, seconds in steps
        ]
        end = {
            "step": 2,
            "tokens": 1e6 * exaflops,
            "seconds": 9e4,
            "validation_loss": 3.0,
        }  # off the clock
        log = tmp_path / "runs" / f"{exaflops:g}-0-0.001" / "metrics.jsonl"
        log.write_text("".join(json.dumps(row) + "\n" for row in (*rows, end)))
    verb(hours=1.0)
    assert "(60.0 min, x" in capsys.readouterr().out
    verb(hours=1.0, json=True)
    found = json.loads(capsys.readouterr().out)
    longest = found["runs"][-1]
    assert found["loss"]["full_budget"] == pytest.approx(8 + (3600 - longest["seconds"]) / 100)
    with pytest.raises(
        UserError, match=r"full budget of 0\.5 exaflops is below the shortest run's 1"
    ):
        verb(exaflops=0.5)


@pytest.mark.parametrize(("unit", "budgets"), [("hours", 6), ("tokens", 3)])
def test_the_same_hours_are_another_budget_on_another_device(
    write_budget: Write, tmp_path: Path, unit: str, budgets: int
) -> None:
    """There they are another amount of compute; as many tokens are the same everywhere."""
    for limit in (1.0, 2.0, 4.0):
        for name, speed in (("Slow GPU", 1.0), ("Fast GPU", 8.0)):
            done = limit * (speed if unit == "hours" else 1.0)
            write_budget(done, seed=int(speed))
            path = tmp_path / "runs" / f"{done:g}-{int(speed)}-0.001" / "record.json"
            record = json.loads(path.read_text())
            record["environment"]["device"]["name"] = name
            record["pretrain"]["budget"] |= {"unit": unit, "limit": limit}
            path.write_text(json.dumps(record))
    points = read_runs(tmp_path / "runs", None).points
    groups = budgets_of(points)
    assert len(groups) == budgets and sum(map(len, groups)) == 6
    shown = {_budget(point.budget) for point in points}
    assert len(shown) == budgets and ("60.0 min on Slow GPU" in shown) == (unit == "hours")


def test_equal_work_is_one_budget_whatever_its_unit(
    write_budget: Write, verb: Any, tmp_path: Path
) -> None:
    """Of hours as well, where other runs' compute lies between those of their seeds."""
    for place, (exaflops, unit, limit) in enumerate(
        [
            (1.0, "steps", 20),
            (1.0, "tokens", 40_960),
            (2.0, "hours", 1),
            (2.2, "hours", 1),
            (2.1, "steps", 42),
        ]
    ):
        write_budget(exaflops, seed=place)
        path = tmp_path / "runs" / f"{exaflops:g}-{place}-0.001" / "record.json"
        record = json.loads(path.read_text())
        record["pretrain"]["budget"] |= {"unit": unit, "limit": limit}
        path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="2 finished budgets of one recipe, a law takes 3"):
        verb()
    write_budget(4.0)
    groups = budgets_of(read_runs(tmp_path / "runs", None).points)
    assert [[point.exaflops for point in group] for group in groups] == [
        [1.0, 1.0],
        [2.0, 2.1, 2.2],
        [4.0],
    ]


@pytest.mark.parametrize("count", [3, 4])
def test_seeds_do_not_stand_for_budgets(
    write_budget: Write, verb: Any, capsys: Any, count: int
) -> None:
    """They tell their own noise, not how well a law fits: with as many more as one likes its interval stays."""
    found = []
    for seeds in (
        range(1, 2),
        range(4),
    ):  # of which the second and the mean of four differ by 0.001
        for place, seed in product(range(count), seeds):
            write_budget(BUDGETS[place], seed=seed, off=0.1 * (-1) ** place)
        verb(exaflops=320.0, json=True)
        found.append(json.loads(capsys.readouterr().out)["loss"]["predicted"])
    assert found[0]["value"] == pytest.approx(found[1]["value"], abs=2e-3)
    assert (found[0]["high"] is None) == (found[1]["high"] is None) == (count == 3)
    if count == 4:
        assert found[0]["high"] == pytest.approx(found[1]["high"], abs=2e-3)


def test_a_held_out_budget_has_no_part_in_its_prediction(
    write_budget: Write, verb: Any, capsys: Any
) -> None:
    """The longest runs are off by half a nat: the law through the others does not know it, and the error says so."""
    for exaflops in BUDGETS:
        write_budget(exaflops, off=0.5 * (exaflops == BUDGETS[-1]))
    verb(json=True)
    held_out = json.loads(capsys.readouterr().out)["loss"]["held_out"]
    assert [held["budget"] for held in held_out] == ["8 exaflops", "16 exaflops", "32 exaflops"]
    true, measured = planted(32.0), held_out[-1]["measured"]
    assert held_out[-1]["predicted"]["value"] == pytest.approx(true, abs=2e-3)
    assert measured == pytest.approx(true + 0.5, abs=1e-3)
    assert held_out[-1]["error"] == pytest.approx(100 * (true / measured - 1), abs=0.1)


def test_what_makes_no_law_is_refused(write_budget: Write, verb: Any) -> None:
    write_budget(1.0)
    write_budget(2.0, seed=0)
    write_budget(2.0, seed=1)
    write_budget(4.0, status="diverged")
    with pytest.raises(
        UserError,
        match=r"2 finished budgets of one recipe, a law takes 3 \(4-0-0.001: is diverged\)",
    ):
        verb()
    write_budget(4.0, lr=2e-3)
    with pytest.raises(
        UserError, match=r"do not compare, optim\.lr 0\.001 and 0\.002; name runs of one recipe"
    ):
        verb(names=["1-0-0.001", "2-0-0.001", "4-0-0.002"])
    for exaflops in (2.0, 4.0, 8.0):
        write_budget(exaflops, off=exaflops)
    with pytest.raises(UserError, match="do not fall with compute"):
        verb()
