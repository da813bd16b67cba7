"""What is typed means what it says, whatever stands in the configuration that it changes."""

from typing import Any, get_args

import pytest
from hydra.errors import HydraException

from cramming.budget import BudgetConfig
from cramming.checks import Config
from cramming.config import UserError, build, compose, config_folder
from cramming.journal import Unit
from cramming.overrides import parse, with_implied

EXPERIMENTS = sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml"))
LIMITS = {"hours": 24, "minutes": 0.05, "exaflops": 1, "tokens": 1e9, "steps": 1000}  # of the groups


def composed(*typed: str) -> dict[str, Any]:
    return compose(with_implied(typed))


def budget_of(*typed: str) -> BudgetConfig:
    return build(BudgetConfig, composed(*typed)["budget"], "budget")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_budget_that_is_typed_wins_over_an_experiments(experiment: str) -> None:
    limit = budget_of(f"experiment={experiment}", "budget=steps", "budget.steps=400")
    assert (limit.unit, limit.limit) == ("steps", 400)
    limit = budget_of("budget.tokens=1e9", f"experiment={experiment}")
    assert (limit.unit, limit.limit) == ("tokens", 1e9)


@pytest.mark.parametrize("group", LIMITS)
def test_a_budget_group_that_is_typed_is_the_whole_budget(group: str) -> None:
    limit = budget_of("experiment=wiki-cpu", f"budget={group}")
    assert (limit.unit, limit.limit) == ("hours" if group == "minutes" else group, LIMITS[group])


@pytest.mark.parametrize("unit", get_args(Unit))
@pytest.mark.parametrize("form", ["budget.{}=7", "++budget.{}=7"])
def test_a_limit_without_its_group_is_enough(unit: str, form: str) -> None:
    implied = set(with_implied([form.format(unit), "name=a"])) - {form.format(unit), "name=a"}
    assert implied == {f"budget.{other}=null" for other in get_args(Unit) if other != unit}


def test_what_is_typed_twice_over_is_one_clear_message() -> None:
    for typed in (["budget.hours=1", "budget.steps=3"], ["budget=steps", "budget.steps=3", "budget.hours=1"]):
        with pytest.raises(UserError, match="found hours=1 and steps=3; give one"):
            budget_of("experiment=wiki-cpu", *typed)


def test_what_says_no_budget_implies_none() -> None:
    for typed in (["name=a"], ["budget.hours=null"], ["budget=hours,steps"], ["budget=nothing"]):
        assert with_implied(typed) == typed
    typed = ["budget=steps", "budget.hours=null", "budget.steps=3", "budget.exaflops=null", "budget.tokens=null"]
    assert with_implied(typed) == typed


@pytest.mark.parametrize("typed", ["eval.data_dir=x", "budget.steps=3"])
@pytest.mark.parametrize("words", [["{}", "--cfg", "job"], ["--cfg", "job", "{}"], ["a=1", "--cfg", "job", "{}"]])
def test_flags_may_stand_anywhere(typed: str, words: list[str]) -> None:
    found = parse("glue", [word.format(typed) for word in words])
    assert found.flags == ["--cfg", "job"] and typed in found.overrides and len(found.overrides) > 1


@pytest.mark.parametrize("base", [[], *([f"experiment={name}"] for name in EXPERIMENTS)])
@pytest.mark.parametrize(
    "typed",
    [
        "schedule.name=linear",
        "schedule.name=triangle",
        "optim.name=sgd",
        "optim.name=adagrad",
        "start.name=cooccurrence",
    ],
)
def test_a_choice_may_be_typed_by_its_name(base: list[str], typed: str) -> None:
    config = Config.of(composed(*base, typed))
    section, _, name = typed.partition(".name=")
    assert getattr(config, section).name == name


def test_a_setting_of_another_choice_is_refused() -> None:
    with pytest.raises(HydraException, match=r"Could not override 'schedule\.decay'"):
        composed("schedule=linear", "schedule.decay=0.3")
