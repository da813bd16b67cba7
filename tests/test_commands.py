"""Every `cramming ...` command that the README, docs/ and the headers of conf/ show parses and is accepted."""

import gzip
import json
import lzma
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from cramming import cli, verbs
from cramming.invocation import Call
from cramming.parallel.mesh import data_size
from cramming.plan.search import planned_config
from cramming.recipe import Config, Hardware, check, tiny_defaults
from eval.extras.study import variants_of

ROOT = Path(__file__).resolve().parents[1]
VERBS = ("run", *verbs.MODULES)
VERB = f"(?:{'|'.join(VERBS)})"
LINE = re.compile(rf"^(?:#\s+)?(?:.*: )?(?:\S+/bin/)?cramming ({VERB}\b.*)$", re.MULTILINE)
INLINE = re.compile(rf"`cramming ({VERB} [^`]*)`")


def commands(path: Path) -> list[str]:
    """The words behind `cramming` of each command, a line that ends in a backslash joined with the next."""
    text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
    shown = [*LINE.findall(text), *(INLINE.findall(text) if path.suffix == ".md" else [])]
    return [re.sub(r"<[^>]*>", "x", command.replace("\n", " ")) for command in shown]


SHOWN = {
    f"{path.relative_to(ROOT)}: {command}": command
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "conf").rglob("*.yaml")),
    )
    if path.name != "log.md"  # history: commands of their time
    for command in commands(path)
}


def verbs_shown(prefix: str) -> set[str]:
    """Return the verbs of the commands in files whose paths begin so."""
    return {command.split()[0] for place, command in SHOWN.items() if place.startswith(prefix)}


def test_the_commands_are_found() -> None:
    """The README shows every everyday verb, and the pages show all verbs."""
    commands = typer.main.get_command(cli.app).commands
    everyday = {name for name, verb in commands.items() if verb.rich_help_panel == cli.EVERYDAY}
    assert verbs_shown("README.md") >= everyday
    assert verbs_shown("README.md") | verbs_shown("docs/") == set(VERBS)
    files = {shown.split(":")[0] for shown in SHOWN}
    assert files >= {"conf/experiment/crammed-bert-day.yaml", "conf/study/architectures.yaml"}


def call_of(words: list[str]) -> Call | None:
    """The call that is typed so, None where it only prints."""
    if "--help" in words:
        return None
    return cli.parse(words)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_corpus: Path) -> None:
    """Files that the commands name: texts, a corpus, and `x` or `...` as folder of GLUE and of a model."""
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
    config = {"model_type": "bert", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "intermediate_size": 48}
    (tmp_path / "x" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copyfile(tiny_corpus / "tokenizer.json", tmp_path / "x" / "tokenizer.json")
    (tmp_path / "wiki").mkdir()
    text = b"A bird sings. " * 40
    packed = lzma.compress(text)
    contents = {
        "a.txt": text,
        "b.txt": text,
        "dump.txt": text,
        "my.txt": text,
        "wiki/1.xz": packed,
        "wiki_core.00.txt.xz": packed,
    }
    contents["b.jsonl.gz"] = gzip.compress(b'{"text": "A bird."}\n')
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)


NEED_DATA = ("eval=superglue", "eval=hub")  # other tasks, the net


@pytest.mark.parametrize("shown", SHOWN)
def test_a_command_is_accepted(shown: str, files: None) -> None:
    """Its options are read, and its recipe is composed; verbs that can be checked beforehand check it."""
    words = shlex.split(SHOWN[shown], comments=True)
    call = call_of(words)
    if call is None or not call.has_recipe:
        return
    if call.sweep:
        for point in verbs.sweep_points(call):
            verbs.recipe_of(point)
        return
    recipe = verbs.recipe_of(call)
    if any(word.startswith(NEED_DATA) for word in words) or call.options.get("model"):
        return
    if call.verb in ("run", *verbs.PIPELINE):
        verbs.check(call.verb, recipe, call.invocation, **call.options)
    elif call.verb == "plan":
        planned_config(recipe)
    elif call.verb == "study" and call.options["what"] not in ("pipelines", "mine.yaml"):
        assert variants_of(call.options["what"], call.options["vocab_sizes"])


TORCHRUN = re.compile(r"^(.*\btorchrun .*) -m cramming pretrain (.*)$", re.MULTILINE)


def test_the_commands_for_several_processes_are_accepted_by_as_many() -> None:
    """Those of the guides on several processes and machines; and the batch script there is one for bash."""
    texts = [
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("docs/guides/several_processes.md", "docs/guides/several_machines.md")
    ]
    calls = [pair for text in texts for pair in TORCHRUN.findall(re.sub(r"\\\n\s*", "", text))]
    assert len(calls) == 4
    for launcher, words in calls:
        nodes, processes = (
            re.search(rf"--{name} (\d+)", launcher) for name in ("nnodes", "nproc-per-node")
        )
        count = int(nodes[1] if nodes else 2 if "nnodes" in launcher else 1) * int(
            processes[1] if processes else 1
        )
        call = call_of(["pretrain", *words.split()])
        assert call is not None
        config = Config.of(verbs.recipe_of(call))
        data_size(config.parallel, count)
        check(config, Hardware("cuda", "H100", "bf16", (9, 0), count))
    (script,) = re.findall(r"```bash\n(#!/bin/bash.*?)```", texts[1], re.DOTALL)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_recipes_of_a_day_are_no_laptops_defaults() -> None:
    """A large model comes with the batch and the learning rate that it was made for."""
    pages = ("README.md", "docs/tutorials/first_gpu_day.md")
    for shown, command in SHOWN.items():
        words = shlex.split(command, comments=True)
        if shown.startswith(pages) and words[0] in ("run", "pretrain", "plan"):
            call = call_of(words)
            if call is not None and not call.sweep:
                recipe = verbs.recipe_of(call)
                assert tiny_defaults(planned_config(recipe)) is None, shown


def test_the_workflow_for_submissions_uses_verbs_that_exist() -> None:
    """docs/submission.yml parses, and its commands are accepted."""
    workflow = yaml.safe_load((ROOT / "docs" / "submission.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    shown = [call for line in lines for call in re.findall(r"\bcramming (\w+)([^<>|;&]*)", line)]
    assert [verb for verb, _ in shown] == ["verify", "report"] and not [
        line for line in lines if "${{" in line
    ]
    for verb, words in shown:
        path = [] if verb == "report" else ["eval/records/x"]
        assert call_of([verb, *path, *shlex.split(words)]) is not None
