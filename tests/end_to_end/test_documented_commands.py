"""The commands of the README and of the pages run, on the embedded corpus and with small budgets.

tests/test_commands.py checks that every command is accepted; here those run that need no text, no GLUE files and no
other machine.
"""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "docs/tutorials/laptop.md",
    "docs/guides/publish_and_verify.md",
    "docs/guides/export.md",
    "docs/guides/studies.md",
    "docs/reference/settings.md",
    "README.md",
)
COMMAND = re.compile(r"^cramming (\w.*)$", re.MULTILINE)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
# What stands for a run, a corpus or an environment of the reader's.
NAMES = {
    "runs/first": "runs/default",
    "--name first": "--name default",
    "serving/bin/python": sys.executable,
}
SHORT = {
    "run": "budget.steps=8 train.validations=1 eval.tasks=[rte] eval.hyperparameters.epochs=1",
    "study": "budget.steps=4 train.validations=1",
}
# These need files or a run of the reader's, or a budget of hours.
NOT_HERE = (
    "experiment=",
    "data=text",
    "data.corpus=",
    "eval.data_dir=",
    "mine",
    "project",
)


def runnable_commands() -> list[str]:
    """Return the words behind `cramming` of the commands that run here, in the order of the pages."""
    commands: dict[str, None] = {}
    for page in PAGES:
        for command in COMMAND.findall((ROOT / page).read_text(encoding="utf-8")):
            command = command.partition("  #")[0].strip()
            for shown, here in NAMES.items():
                command = command.replace(shown, here)
            command = command.replace("corpora/<folder>", "corpora/embedded")
            if "<" not in command and not any(word in command for word in NOT_HERE):
                commands[command] = None
    return list(commands)


@pytest.mark.slow
def test_the_commands_of_the_pages_run(tmp_path: Path) -> None:
    commands = runnable_commands()
    verbs = {command.split()[0] for command in commands}
    assert verbs >= {"run", "report", "verify", "inspect", "export", "submit", "replay", "study"}
    (tmp_path / "corpora").mkdir()
    for command in commands:
        verb = command.split()[0]
        run_command([*shlex.split(command), *SHORT.get(verb, "").split()], tmp_path)
        for corpus in (tmp_path / "corpora").glob("embedded-*"):
            link = tmp_path / "corpora" / "embedded"
            if not link.exists():
                link.symlink_to(corpus)
    for page in ("docs/tutorials/laptop.md", "docs/guides/export.md"):
        for code in PYTHON.findall((ROOT / page).read_text(encoding="utf-8")):
            if "torch.onnx" in code and find_spec("onnxscript") is None:
                continue
            run_process([sys.executable, "-c", code], tmp_path)


def run_command(words: list[str], folder: Path) -> None:
    """Run a verb; `verify` may find that a run keeps not every rule, but may not fail."""
    run_process([sys.executable, "-m", "cramming", *words], folder)


def run_process(words: list[str], folder: Path) -> None:
    """Run a process in a folder and require that it ends well."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, f"{words}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
