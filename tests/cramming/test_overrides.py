"""What is typed means what it says, whatever stands in the configuration that it changes."""

import random
import shlex
from typing import Any, get_args

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from cramming.budget import BudgetConfig
from cramming.config import UserError, build, config_folder
from cramming.overrides import compose, literal, parse, points_of, with_implied, with_quotes
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
    """What the message proposes, typed into a shell, is that text."""
    with pytest.raises(UserError) as error:
        compose(["data=text", f"data.paths={value}"])
    said = str(error.value)
    assert (
        said.startswith(f"data.paths={value}: cannot be read as one setting") and "\n" not in said
    )
    (word,) = shlex.split(said.partition(", as in ")[2])
    items = value.strip("[]").split(",")
    assert compose(["data=text", word])["data"]["paths"] == (
        items if value.startswith("[") else items[0]
    )


def test_a_literal_is_read_back_as_it_is() -> None:
    """Names of files come from strangers: none may be another file's, or a setting."""
    pieces = [*"\\'\"${},=[]()üa:\n*? ", "${seed}", "\\${", "\\\\"]
    draw, parser = random.Random(0), OverridesParser.create()
    for text in ("".join(draw.choices(pieces, k=draw.randint(1, 7))) for _ in range(2000)):
        (override,) = with_quotes([f"runs={literal(text)}"])
        config = OmegaConf.create({"seed": 3, "runs": parser.parse_override(override).value()})
        assert OmegaConf.to_container(config, resolve=True) == {"seed": 3, "runs": text}, text


@pytest.mark.parametrize("second", ["budget.hours=1", "++budget.minutes=3"])
def test_two_budgets_that_are_typed_are_refused(second: str) -> None:
    with pytest.raises(UserError, match=r"budget.*: a second limit"):
        budget_of("experiment=wiki-cpu", "budget.steps=3", second)


def test_what_says_no_budget_implies_none() -> None:
    for typed in (["name=a"], ["budget.hours=null"], with_implied(["budget.steps=3"])):
        assert with_implied(typed) == typed


@pytest.mark.parametrize(
    ("typed", "mode", "tf32"),
    [("bf16", "bf16", True), ("auto", "auto", True), ("fp32", "fp32", False)],
)
def test_a_precision_may_be_typed_by_its_mode(typed: str, mode: str, tf32: bool) -> None:
    found = compose([f"precision={typed}"])["precision"]
    assert (found["mode"], found["tf32"]) == (mode, tf32)


@pytest.mark.parametrize("typed", ["eval.data_dir=x", "budget.steps=3"])
@pytest.mark.parametrize(
    "words", [["{}", "--cfg", "job"], ["--cfg", "job", "{}"], ["a=1", "--cfg", "job", "{}"]]
)
def test_flags_may_stand_anywhere(typed: str, words: list[str]) -> None:
    found = parse("glue", [word.format(typed) for word in words])
    assert found.flags == ["--cfg", "job"] and typed in found.overrides and len(found.overrides) > 1


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


def test_of_a_setting_that_is_given_twice_in_a_multirun_the_last_one_counts() -> None:
    """As for Hydra, which starts the jobs: no other points are checked than will run."""
    assert points_of(["seed=1,2", "name=a,b", "seed=3"]) == [
        ["seed=3", "name=a"],
        ["seed=3", "name=b"],
    ]


def test_a_multirun_takes_the_files_of_a_group_by_a_pattern() -> None:
    assert points_of(["name=x-${model.num_layers}", "model=glob(t*)"]) == [
        [r"name=x-$\{model.num_layers\}", "model=tiny"]
    ]


def test_precisions_are_swept_by_their_mode() -> None:
    """fp32 is a file as well, which says more than its mode: a list cannot mean both."""
    assert with_implied(["precision=bf16,fp16"]) == ["precision.mode=bf16,fp16"]
    with pytest.raises(UserError, match=r"precision=bf16,fp32: .* sweep precision\.mode=bf16,fp32"):
        with_implied(["precision=bf16,fp32"])


def test_a_setting_of_another_choice_is_refused() -> None:
    with pytest.raises(UserError, match=r"Could not override 'schedule\.decay'"):
        compose(["schedule=linear", "schedule.decay=0.3"])
