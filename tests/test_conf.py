"""Every YAML file under conf/ composes, and what it composes to builds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming import cli, launch
from cramming.config import Section, build, config_folder
from cramming.invocation import Invocation
from cramming.overrides import compose as compose_root
from cramming.recipe import Config, Hardware, check
from cramming.record import load_record
from cramming.schedule import sequences_per_step
from data_prep.readers.mix import SOURCES
from data_prep.tokenizer.load import TokenizerConfig
from eval.finetune.config import EvalConfig

SECTIONS: dict[str, type] = {  # beside those of training, which are `Config`
    "tokenizer": TokenizerConfig,
    "eval": EvalConfig,
}
FILES = sorted(path.relative_to(config_folder()) for path in config_folder().rglob("*.yaml"))
GROUPS = {
    str(group): [
        file.stem for file in FILES if file.parent == group and str(file) != "data/base.yaml"
    ]
    for group in sorted({file.parent for file in FILES} - {Path(), Path("study")})
}


def assert_defaults_are_written_once(built: Any, path: str) -> None:
    """Assert that defaults of a section in code are those of the configuration."""
    if dataclasses.is_dataclass(built):
        assert built == type(built)(), path
        return
    for name, field in type(built).model_fields.items():
        value = getattr(built, name)
        if isinstance(value, Section):
            assert_defaults_are_written_once(value, f"{path}.{name}")
        elif not field.is_required():
            assert value == field.default, f"{path}.{name}"


def names_of(built: Any) -> set[str]:
    if dataclasses.is_dataclass(built):
        return {field.name for field in dataclasses.fields(built)}
    return {field.alias or name for name, field in type(built).model_fields.items()}


def build_all(settings: dict[str, Any]) -> list[Any]:
    config, source = Config.of(settings), SOURCES[settings["data"]["source"]].config_class
    sections = {name: build(cls, settings[name], name) for name, cls in SECTIONS.items()}
    sections["data"] = build(source, settings["data"], "data")
    for name, built in (
        *sections.items(),
        *((n, getattr(config, n)) for n in settings.keys() - sections.keys() - {"scale"}),
    ):
        if isinstance(settings[name], dict):  # Hydra refuses a setting that is in none of the files
            assert set(settings[name]) == names_of(built), name
    return [config, *sections.values()]


def test_the_defaults_build_and_are_written_once(compose: Callable[..., dict[str, Any]]) -> None:
    config, *others = build_all(compose("model=bert-base"))
    for name in (
        "model",
        "train",
        "budget",
        "checkpoint",
        "attention",
        "precision",
        "memory",
        "runtime",
        "parallel",
    ):
        assert_defaults_are_written_once(getattr(config, name), name)
    assert_defaults_are_written_once(
        build(SOURCES["text"].config_class, {**compose("data=text")["data"]}, "data").clean, ""
    )
    assert len(others) == len(SECTIONS) + 1


# To compose takes a second, so each round takes one option of every group at once; a message names its group.
@pytest.mark.parametrize("turn", range(max(map(len, GROUPS.values()))))
def test_every_option_composes_and_builds(
    compose: Callable[..., dict[str, Any]], turn: int
) -> None:
    chosen = {
        group: options[turn % len(options)]
        for group, options in GROUPS.items()
        if group != "experiment"
    }
    if turn < len(GROUPS["parallel/compression"]):
        chosen["parallel"] = "ddp"
    else:  # other strategies compress nothing
        del chosen["parallel/compression"]
    user_gives = {
        "mix": [
            "data.parts=[{weight: 1, source: text, paths: [a.txt]}, {weight: 2, source: embedded, size: 9}]"
        ],
        "text": ["data.paths=[a.txt]"],
        "hub": ["data.dataset=a/b"],
    }
    build_all(
        compose(
            *(f"{group}={option}" for group, option in chosen.items()),
            *user_gives.get(chosen["data"], []),
        )
    )


@pytest.mark.parametrize("option", GROUPS["experiment"])
def test_every_experiment_composes_and_builds(
    compose: Callable[..., dict[str, Any]], option: str
) -> None:
    settings = compose(f"experiment={option}")
    if settings["data"]["source"] == "text":  # where a user's files lie is the user's to say
        settings["data"]["paths"] = ["a.txt"]
    build_all(settings)


@pytest.mark.parametrize("option", GROUPS["experiment"])
def test_every_experiment_trains_at_a_small_scale(
    compose: Callable[..., dict[str, Any]], tiny_corpus: Path, tmp_path: Path, option: str
) -> None:
    """Two steps with the parts, the batch ramp and the schedule that it has; the tiny corpus has no order files."""
    rows = [
        "train.sequence_length=32",
        "train.batch_size=10",
        "train.micro_batch=1",
        "train.order=shuffled",
    ]
    here = [
        f"data.corpus={tiny_corpus}",
        "precision=fp32",
        'runtime.compile="off"',
    ]
    fast = ["train.validations=1", "train.validation_tokens=512", "budget.steps=2"]
    if option == "adapt":
        # The user names the checkpoint; tests/cramming/starts/test_checkpoint.py starts from some.
        fast.append("start=random")
    launch.main(
        compose(f"experiment={option}", "scale=10M", "model.num_layers=2", *here, *rows, *fast),
        Invocation("a", tmp_path, device="cpu"),
    )
    section = load_record(tmp_path / "a")["pretrain"]
    assert (section["status"], section["steps"]) == ("finished", 2)


@pytest.mark.parametrize(
    "choice",
    [
        f"{group}={option}"
        for group in ("schedule", "train", "experiment")
        for option in GROUPS[group]
    ],
)
def test_no_option_has_a_ramp_that_its_batch_cannot_follow(
    compose: Callable[..., dict[str, Any]], choice: str
) -> None:
    config = Config.of(compose(choice))
    check(config, Hardware("cuda", "a GPU", "bf16", (9, 0)))
    sizes = [
        sequences_per_step(config.train.batch_ramp, p, config.train.batch_size) for p in (0.0, 1.0)
    ]
    assert (sizes[0] < sizes[1]) == (config.train.batch_ramp is not None)


@pytest.mark.parametrize("option", sorted(GROUPS["experiment"]))
def test_a_day_keeps_the_text_of_its_tasks_out_of_its_corpus(
    compose: Callable[..., dict[str, Any]], option: str
) -> None:
    """Contract of the closed division; the folder is the one that is scored."""
    assert compose(f"experiment={option}")["data"]["decontaminate"]["tasks"] is None
    composed = compose_root([f"experiment={option}", "eval.data_dir=/glue"])
    assert composed["data"]["decontaminate"]["tasks"] == "/glue"


def test_every_file_says_what_it_is_for() -> None:
    for file in FILES:
        lines = (config_folder() / file).read_text(encoding="utf-8").splitlines()
        first = lines[lines[0] == "# @package _global_"]
        assert first.startswith("# ") and len(first) > 10, file


def test_git_ignores_the_folders_that_verbs_write_to() -> None:
    """A file there would cost the next run its rank: R20 wants a clean checkout."""
    calls = [cli.parse(words) for words in (["run"], ["bench"], ["ladder"])]
    invocation = calls[0].invocation
    written = [invocation.runs, invocation.corpora, calls[1].options["raw"]]
    written.append(calls[2].options["duels"])
    ignored = (Path(__file__).parents[1] / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {f"/{folder}/" for folder in written} <= set(ignored)
