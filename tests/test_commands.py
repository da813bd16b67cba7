"""Every `cramming ...` command that the README, docs/ and the headers of conf/ show still parses and composes."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from cramming import cli
from cramming.config import config_folder
from cramming.overrides import with_implied, with_quotes

ROOT = Path(__file__).resolve().parents[1]
VERB = f"(?:{'|'.join(cli.VERBS)})"
LINE = re.compile(rf"^(?:#\s+)?(?:.*: )?(?:\S+/bin/)?cramming ({VERB}\b.*)$", re.MULTILINE)
INLINE = re.compile(rf"`cramming ({VERB} [^`]*)`")
FLAGS = ("--check", "--multirun", "-m")


def commands(path: Path) -> list[str]:
    """The words behind `cramming` of each command, a line that ends in a backslash joined with the next."""
    text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
    found = [*LINE.findall(text), *(INLINE.findall(text) if path.suffix == ".md" else [])]
    return [re.sub(r"<[^>]*>", "x", command.replace("\n", " ")) for command in found]


SHOWN = {
    f"{path.relative_to(ROOT)}: {command}": command
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "conf").rglob("*.yaml")))
    for command in commands(path)
}


def test_the_commands_are_found() -> None:
    verbs = {command.split()[0] for shown, command in SHOWN.items() if shown.startswith("README.md")}
    assert verbs == set(cli.VERBS)
    files = {shown.split(":")[0] for shown in SHOWN}
    assert files >= {"conf/experiment/crammed-bert-day.yaml", "conf/study/default.yaml"}


@pytest.mark.parametrize("shown", SHOWN)
def test_a_command_composes(shown: str) -> None:
    verb, *words = shlex.split(SHOWN[shown], comments=True)
    overrides = with_quotes(with_implied(cli.with_positional(verb, words)))
    if {"--help", "--hydra-help", "--cfg"}.intersection(overrides):
        return
    several = {"--multirun", "-m"}.intersection(overrides)
    overrides = [word for word in overrides if word not in FLAGS]
    if several:  # one of the jobs
        overrides = [re.sub(r"=([^\[{',]*),.*", r"=\1", word) for word in overrides]
    assert all("=" in word for word in overrides), overrides
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        OmegaConf.to_container(compose("config", overrides), resolve=False)
