"""What is typed means what it says, whatever stands in the configuration that it changes."""

import shlex
from typing import Any, get_args

import pytest

from cramming.budget import BudgetConfig
from cramming.config import UserError, build, config_folder
from cramming.overrides import compose, hydra_words, offer, points_of, resumed, with_implied
from cramming.recipe import Config
from cramming.runlog import Unit

EXPERIMENTS = sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml"))
UNITS = (*get_args(Unit), "minutes")


def budget_of(*typed: str) -> BudgetConfig:
    return build(BudgetConfig, compose(typed)["budget"], "budget")


@pytest.mark.parametrize("base", [[], ["experiment=crammed-bert-day"]])
@pytest.mark.parametrize("unit", UNITS)
def test_the_budget_that_is_typed_wins_over_an_experiments(base: list[str], unit: str) -> None:
    limit = budget_of(f"budget.{unit}=6", *base)
    assert (limit.unit, limit.limit) == (("hours", 0.1) if unit == "minutes" else (unit, 6))


@pytest.mark.parametrize(
    "value",
    [
        "a=b",
        "[a=b.txt]",
        "[a&b.txt,c;d.txt]",
        "a(1).txt",
        "[a (1).txt,b.txt]",
        "[a.txt",
        "a#b",
        "a>b",
        "é=è",
    ],
)
def test_text_that_needs_quotes_is_refused_with_the_way_to_quote_it(value: str) -> None:
    """The proposed text, typed into a shell, is the refused text."""
    with pytest.raises(UserError) as error:
        compose(["data=text", f"data.paths={value}"])
    said = str(error.value)
    assert said.startswith(f"data.paths={value}: not readable as one setting") and "\n" not in said
    (word,) = shlex.split(said.partition(", as in ")[2])
    items = value.strip("[]").split(",")
    assert compose(["data=text", word])["data"]["paths"] == (
        items if value.startswith("[") else items[0]
    )


def test_letters_beyond_ascii_and_a_home_folder_need_no_quotes() -> None:
    typed = "data.paths=[~/a.txt,ü.txt,~/wiki/*.xz,'~/c, ö.txt']"
    quoted = hydra_words(["data=text", typed])
    assert list(hydra_words(quoted)) == list(quoted)
    paths = compose(["data=text", typed])["data"]["paths"]
    assert paths == ["~/a.txt", "ü.txt", "~/wiki/*.xz", "~/c, ö.txt"]


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("optim.lrr=1", "Did you mean optim.lr?"),
        ("colour=red", "colour=red: no such setting"),
        ("model=tony", "Did you mean model=tiny?"),
        ("model=huge", "model=huge: no such choice. There are bert-base"),
        ("optim.lr=1e-3,2e-3", "optim.lr=1e-3,2e-3: several values. Add --sweep"),
        ("seed", "seed: a setting has a value"),
        ("data.corpus=", "data.corpus=: has no value"),
        ("experiment=null", "experiment=null: no such choice"),
        ("data=3", "data=3: no such choice"),
        ("train=[1]", "train=[1]: one of these has a form"),
        ("model.hidden_size=${nothing}", "nothing"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(typed: str, names: str) -> None:
    with pytest.raises(UserError) as caught:
        compose([typed])
    assert names in str(caught.value) and "\n" not in str(caught.value)


def test_a_resumed_recipe_is_the_runs_own_with_what_was_typed() -> None:
    logged = compose(["model=small", "seed=3", "budget.steps=7"])
    assert resumed(logged, [], compose()) == logged
    typed = ["checkpoint.every_steps=5", "eval=glue_small", "seed=0"]
    recipe = resumed(logged, typed, compose(typed))
    assert (recipe["checkpoint"]["every_steps"], recipe["seed"]) == (5, 0)
    assert recipe["eval"] == compose(["eval=glue_small"])["eval"]
    assert (recipe["model"], recipe["budget"]) == (logged["model"], logged["budget"])
    whole = ["experiment=best", "seed=4"]
    assert resumed(logged, whole, compose(whole)) == compose(whole)


@pytest.mark.parametrize(
    ("incomplete", "offered"),
    [("optim=mu", "optim=muon"), ("optim.lr_w", "optim.lr_width="), ("exp", "experiment=")],
)
def test_a_shell_is_offered_groups_choices_and_settings(incomplete: str, offered: str) -> None:
    assert offered in offer(incomplete)


@pytest.mark.parametrize("second", ["budget.hours=1", "++budget.minutes=3"])
def test_two_budgets_that_are_typed_are_refused(second: str) -> None:
    with pytest.raises(UserError, match=r"budget.*: a second limit"):
        budget_of("experiment=wiki-cpu", "budget.steps=3", second)


def test_what_says_no_budget_implies_none() -> None:
    for typed in (["seed=1"], ["budget.hours=null"], with_implied(["budget.steps=3"])):
        assert with_implied(typed) == typed


@pytest.mark.parametrize(
    ("typed", "mode", "tf32"),
    [("bf16", "bf16", True), ("auto", "auto", True), ("fp32", "fp32", False)],
)
def test_a_precision_may_be_typed_by_its_mode(typed: str, mode: str, tf32: bool) -> None:
    composed = compose([f"precision={typed}"])["precision"]
    assert (composed["mode"], composed["tf32"]) == (mode, tf32)


@pytest.mark.parametrize("base", [[], *([f"experiment={name}"] for name in EXPERIMENTS)])
@pytest.mark.parametrize(
    "typed",
    [
        {"schedule": "linear", "optim": "sgd", "start": "cooccurrence"},
        {"schedule": "triangle", "start": "random"},
    ],
)
def test_a_choice_may_be_typed_by_its_name(base: list[str], typed: dict[str, str]) -> None:
    config: Any = Config.of(
        compose([*base, *(f"{section}.name={name}" for section, name in typed.items())])
    )
    assert {section: getattr(config, section).name for section in typed} == typed


def test_a_compression_may_be_typed_by_its_name_and_brings_its_own_settings() -> None:
    typed = ["parallel.compression=topk", "parallel.compression.density=0.5"]
    assert compose(typed)["parallel"]["compression"] == {"name": "topk", "density": 0.5}
    with pytest.raises(UserError, match=r"^parallel\.compression"):
        Config.of(compose(["parallel.compression=null"]))


def test_of_a_setting_that_is_given_twice_in_a_sweep_the_last_one_counts() -> None:
    """Hydra does the same, so the checked points are those that will run."""
    assert points_of(["seed=1,2", "optim.lr=1,2", "seed=3"]) == [
        ["seed=3", "optim.lr=1"],
        ["seed=3", "optim.lr=2"],
    ]


def test_a_sweep_takes_the_files_of_a_group_by_a_pattern() -> None:
    assert points_of(["seed=1", "model=glob(t*)"]) == [["seed=1", "model=tiny"]]


def test_precisions_are_swept_by_their_mode() -> None:
    """fp32 is a file as well, which says more than its mode: a list cannot mean both."""
    assert with_implied(["precision=bf16,fp16"]) == ["precision.mode=bf16,fp16"]
    with pytest.raises(UserError, match=r"precision=bf16,fp32: .* Sweep precision\.mode=bf16,fp32"):
        with_implied(["precision=bf16,fp32"])


def test_a_setting_of_another_choice_is_refused() -> None:
    with pytest.raises(UserError, match=r"schedule\.decay=0\.3: no such setting"):
        compose(["schedule=linear", "schedule.decay=0.3"])
