"""Every `cramming ...` command that the README, docs/ and the headers of conf/ show parses and is accepted."""

import gzip
import lzma
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cramming import cli
from cramming.bench.main import BenchConfig
from cramming.config import build
from cramming.overrides import compose, with_quotes
from cramming.parallel.mesh import data_size
from cramming.plan.search import PlanConfig, planned_config
from cramming.recipe import Config, Hardware, check, tiny_defaults
from cramming.replay import ReplayConfig
from eval.duel.main import DuelConfig
from eval.export import ExportConfig
from eval.extras.project import ProjectConfig
from eval.extras.study import StudyConfig
from eval.submit import SubmitConfig
from eval.verify import VerifyConfig

ROOT = Path(__file__).resolve().parents[1]
VERB = f"(?:{'|'.join(cli.VERBS)})"
LINE = re.compile(rf"^(?:#\s+)?(?:.*: )?(?:\S+/bin/)?cramming ({VERB}\b.*)$", re.MULTILINE)
INLINE = re.compile(rf"`cramming ({VERB} [^`]*)`")
SECTIONS: dict[str, type] = {
    "bench": BenchConfig,
    "duel": DuelConfig,
    "export": ExportConfig,
    "project": ProjectConfig,
    "replay": ReplayConfig,
    "study": StudyConfig,
    "submit": SubmitConfig,
    "verify": VerifyConfig,
}
FLAGS = ("--check", "--json", "--multirun", "-m")


def commands(path: Path) -> list[str]:
    """The words behind `cramming` of each command, a line that ends in a backslash joined with the next."""
    text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
    found = [*LINE.findall(text), *(INLINE.findall(text) if path.suffix == ".md" else [])]
    return [re.sub(r"<[^>]*>", "x", command.replace("\n", " ")) for command in found]


SHOWN = {
    f"{path.relative_to(ROOT)}: {command}": command
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "conf").rglob("*.yaml")),
    )
    if path.name != "log.md"  # history: commands of their time
    for command in commands(path)
}


def test_the_commands_are_found() -> None:
    verbs = {
        command.split()[0] for shown, command in SHOWN.items() if shown.startswith("README.md")
    }
    assert verbs == set(cli.VERBS)
    files = {shown.split(":")[0] for shown in SHOWN}
    assert files >= {"conf/experiment/crammed-bert-day.yaml", "conf/config.yaml"}


def composed(words: list[str]) -> dict[str, Any] | None:
    """The settings of the command, of one of the jobs of several; None where it only prints."""
    if {"--help", "--hydra-help", "--cfg"}.intersection(words):
        return None
    if {"--multirun", "-m"}.intersection(words):
        words = [re.sub(r"=([^\[{',]*),.*", r"=\1", word) for word in words]
    words = [word for word in words if word not in FLAGS]
    assert all("=" in word for word in words), words
    return compose(words)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_corpus: Path) -> None:
    """What the commands name: texts, a corpus, and `x` or `...` as folder of GLUE and of a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpora").mkdir()
    (tmp_path / "corpora" / "x").symlink_to(tiny_corpus)
    for folder in ("x", "..."):
        for name in ("train", "dev"):
            file = tmp_path / folder / "RTE" / f"{name}.tsv"
            file.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                f"{i}\ta bird sings\tit sings\t{'not_' * (i % 2)}entailment\n" for i in range(8)
            ]
            file.write_text(
                "index\tsentence1\tsentence2\tlabel\n" + "".join(rows), encoding="utf-8"
            )
    (tmp_path / "wiki").mkdir()
    text = b"A bird sings. " * 40
    packed = lzma.compress(text)
    contents = {"a.txt": text, "b.txt": text, "wiki/1.xz": packed, "wiki_core.00.txt.xz": packed}
    contents["b.jsonl.gz"] = gzip.compress(b'{"text": "A bird."}\n')
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)


NEED_DATA = ("model_path=", "eval=superglue", "eval=hub")  # a model, other tasks, the net


@pytest.mark.parametrize("shown", SHOWN)
def test_a_command_is_accepted(shown: str, files: None) -> None:
    """Verbs that can be checked beforehand check it; of the others their sections are built."""
    verb, *words = shlex.split(SHOWN[shown], comments=True)
    settings = composed(with_quotes(cli.with_positional(verb, words)))
    if settings is None or any(word.startswith(NEED_DATA) for word in words):
        return
    if verb in ("run", *cli.PIPELINE):
        cli.check(verb, settings)
    elif verb == "plan":
        planned_config(settings)
        PlanConfig(**settings["plan"])
    elif verb in SECTIONS:
        build(SECTIONS[verb], settings[verb], verb)


TORCHRUN = re.compile(r"^(.*\btorchrun .*) -m cramming pretrain (.*)$", re.MULTILINE)


def test_the_commands_for_several_processes_are_accepted_by_as_many() -> None:
    """Those of README.md and docs/several_machines.md; and the batch script there is one for bash."""
    texts = [
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("README.md", "docs/several_machines.md")
    ]
    found = [pair for text in texts for pair in TORCHRUN.findall(re.sub(r"\\\n\s*", "", text))]
    assert len(found) == 4
    for launcher, words in found:
        nodes, processes = (
            re.search(rf"--{name} (\d+)", launcher) for name in ("nnodes", "nproc-per-node")
        )
        count = int(nodes[1] if nodes else 2 if "nnodes" in launcher else 1) * int(
            processes[1] if processes else 1
        )
        config = Config.of(compose(words.split()))
        data_size(config.parallel, count)
        check(config, Hardware("cuda", "H100", "bf16", (9, 0), count))
    (script,) = re.findall(r"```bash\n(#!/bin/bash.*?)```", texts[1], re.DOTALL)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_readmes_recipes_are_no_laptops_defaults() -> None:
    """A large model comes with the batch and the learning rate that it was made for."""
    for shown, command in SHOWN.items():
        verb, *words = shlex.split(command, comments=True)
        if shown.startswith("README.md") and verb in ("run", "pretrain", "plan"):
            settings = composed(with_quotes(words))
            if settings is not None:
                assert tiny_defaults(planned_config(settings)) is None, shown


def test_the_workflow_for_submissions_uses_verbs_that_exist() -> None:
    """docs/submission.yml parses, and its commands are accepted."""
    workflow = yaml.safe_load((ROOT / "docs" / "submission.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    shown = [found for line in lines for found in re.findall(r"\bcramming (\w+)([^<>|;&]*)", line)]
    assert [verb for verb, _ in shown] == ["verify", "report"] and not [
        line for line in lines if "${{" in line
    ]
    for verb, words in shown:
        composed(with_quotes(cli.with_positional(verb, shlex.split(words) or ["eval/records/x"])))
