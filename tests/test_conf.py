"""Every YAML file under conf/ composes, and what it composes to builds."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cramming.bench.main import BenchConfig
from cramming.budget import BudgetConfig
from cramming.checkpoint import CheckpointConfig
from cramming.checks import STARTS, Config, Place, TrainConfig, check
from cramming.config import RootConfig, build, config_folder
from cramming.config import compose as compose_root
from cramming.data.inspect import InspectConfig
from cramming.data.masking import ObjectiveConfig
from cramming.model.attention import AttentionConfig
from cramming.model.config import ModelConfig
from cramming.optim import OPTIMIZERS
from cramming.parallel.apply import MemoryConfig
from cramming.parallel.mesh import ParallelConfig
from cramming.plan.main import PlanConfig
from cramming.precision import PrecisionConfig
from cramming.runtime import RuntimeConfig
from cramming.schedule import SCHEDULES, sequences_per_step
from data_prep.sources.mix import SOURCES
from data_prep.tokenizer.load import TokenizerConfig
from eval.export import ExportConfig
from eval.extras.study import StudyConfig
from eval.finetune.config import EvalConfig
from eval.report.main import ReportConfig

SECTIONS: dict[str, type] = {
    "tokenizer": TokenizerConfig,
    "model": ModelConfig,
    "objective": ObjectiveConfig,
    "precision": PrecisionConfig,
    "attention": AttentionConfig,
    "memory": MemoryConfig,
    "runtime": RuntimeConfig,
    "bench": BenchConfig,
    "parallel": ParallelConfig,
    "budget": BudgetConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "eval": EvalConfig,
    "report": ReportConfig,
    "export": ExportConfig,
    "inspect": InspectConfig,
    "study": StudyConfig,
    "plan": PlanConfig,
}
CHOICES: dict[str, dict[str, type]] = {"optim": OPTIMIZERS, "schedule": SCHEDULES, "start": STARTS}
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(config_folder().iterdir())
    if folder.is_dir()
}


def build_all(settings: dict[str, Any], *, data: bool = True) -> None:
    assert not settings.pop("experiment", None)  # an experiment overrides the sections, it has no settings of its own
    sections = {key for key, value in settings.items() if isinstance(value, dict)}
    assert sections == {*SECTIONS, *CHOICES, "data"}
    chosen = {section: table[settings[section]["name"]] for section, table in CHOICES.items()}
    for name, cls in (SECTIONS | chosen).items():
        # Hydra refuses a setting that is in none of the files, however good a default the dataclass has.
        assert set(settings[name]) == {field.name for field in fields(cls)}, name
        build(cls, settings[name], name)
    if data:
        build(SOURCES[settings["data"]["source"]].config_class, settings["data"], "data")
    build(RootConfig, {key: value for key, value in settings.items() if not isinstance(value, dict)}, "")


def test_the_defaults_build(compose: Callable[..., dict[str, Any]]) -> None:
    build_all(compose())


# To compose takes a second, so each round takes one option of every group at once; a message names its group.
@pytest.mark.parametrize("turn", range(max(map(len, GROUPS.values()))))
def test_every_option_composes_and_builds(compose: Callable[..., dict[str, Any]], turn: int) -> None:
    chosen = {group: options[turn % len(options)] for group, options in GROUPS.items() if group != "experiment"}
    user_gives = {
        "mix": ["data.parts=[{weight: 1, source: text, paths: [a.txt]}, {weight: 2, source: embedded, size: 9}]"],
        "text": ["data.paths=[a.txt]"],
        "hub": ["data.dataset=a/b"],
        "base": ["data.name=a", "data.source=b"],
    }
    settings = compose(*(f"{group}={option}" for group, option in chosen.items()), *user_gives.get(chosen["data"], []))
    build_all(settings, data=chosen["data"] != "base")


@pytest.mark.parametrize("option", GROUPS["experiment"])
def test_every_experiment_composes_and_builds(compose: Callable[..., dict[str, Any]], option: str) -> None:
    settings = compose(f"experiment={option}")
    if settings["data"]["source"] == "text":  # where a user's files lie is the user's to say
        settings["data"]["paths"] = ["a.txt"]
    build_all(settings)


@pytest.mark.parametrize(
    "choice", [f"{group}={option}" for group in ("schedule", "train", "experiment") for option in GROUPS[group]]
)
def test_no_option_has_a_ramp_that_its_batch_cannot_follow(compose: Callable[..., dict[str, Any]], choice: str) -> None:
    found = Config.of(compose(choice))
    check(found, Place("cuda", "a GPU", "bf16", (9, 0)))
    sizes = [sequences_per_step(found.train.batch_ramp, p, found.train.batch_size) for p in (0.0, 1.0)]
    assert (sizes[0] < sizes[1]) == (found.train.batch_ramp is not None)


@pytest.mark.parametrize("option", [option for option in GROUPS["experiment"] if option.endswith("-day")])
def test_a_day_keeps_the_text_of_its_tasks_out_of_its_corpus(
    compose: Callable[..., dict[str, Any]], option: str
) -> None:
    """Contract of the closed division; the folder is the one that is scored."""
    assert compose(f"experiment={option}")["data"]["decontaminate"]["tasks"] is None
    given = compose_root([f"experiment={option}", "eval.data_dir=/glue"])
    assert given["data"]["decontaminate"]["tasks"] == "/glue"


def test_every_file_is_an_option_of_a_group_of_the_root() -> None:
    groups = set(GROUPS)
    assert groups == {*SECTIONS, *CHOICES, "data", "experiment"} - {"checkpoint"}
    assert {p.name for p in config_folder().iterdir()} - groups == {"config.yaml"}
    nested = {p.relative_to(config_folder()).parent for p in config_folder().rglob("*.yaml")} - {
        Path(),
        *map(Path, GROUPS),
    }
    assert nested == {Path("data/filters")}  # a group of a source's own; its options: tests/data_prep/test_presets.py


def test_every_file_says_what_it_is_for_and_is_short() -> None:
    for path in Path(config_folder()).rglob("*.yaml"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line != "# @package _global_"]
        assert len(lines) <= 60, path
        assert lines[0].startswith("# ") and len(lines[0]) > 10, path
