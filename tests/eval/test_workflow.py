"""docs/submission.yml, its steps in the proposed tree: which records a pull request has them verify."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

WORKFLOW = Path(__file__).parents[2] / "docs" / "submission.yml"
(JOB,) = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].values()
STEPS = [step for step in JOB["steps"] if step.get("working-directory") == "proposed"]
# As GitHub runs it.
SHELL = {
    "bash": ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"],
    None: ["bash", "-e", "-c"],
}
RECORDS = "eval/records"
ODD_NAME = "a b\n-c '$(touch x)'"

Change = Callable[[Path], object]


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def committed(folder: Path) -> str:
    git(folder, "add", "-A")
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    git(folder, *author, "commit", "-q", "--allow-empty", "-m", "-", "--no-verify")
    return git(folder, "rev-parse", "HEAD")


def run_steps(folder: Path, base: str, head: str, tools: Path) -> bool:
    """Return whether all steps succeed; `tools` come first in PATH."""
    environment = {
        **os.environ,
        "BASE": base,
        "HEAD": head,
        "PATH": f"{tools}:{os.environ['PATH']}",
    }
    commands = ([*SHELL[step.get("shell")], step["run"]] for step in STEPS)
    return all(
        subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode == 0
        for command in commands
    )


def add(*names: str) -> Change:
    def change(place: Path) -> None:
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(f"{name}, new")

    return change


def link(name: str, target: str) -> Change:
    return lambda place: (place / name).symlink_to(target)


@pytest.mark.parametrize(
    ("change", "verified"),
    [
        (add("new/record.json", "new/glue/a.json", "one.record.zip"), ["new", "one.record.zip"]),
        (add("accepted/metrics.jsonl", "accepted/README.md"), ["accepted"]),
        (add("README.md", "../../docs/log.md"), []),
        (add("x.md/record.json"), ["x.md"]),
        (add(f"{ODD_NAME}/record.json"), [ODD_NAME]),
        (add("notes.txt"), ["notes.txt"]),
        (lambda place: (place / "accepted" / "metrics.jsonl").unlink(), ["accepted"]),
        (lambda place: shutil.rmtree(place / "accepted"), []),  # nothing is left to look at
        (
            lambda place: (place / "accepted" / "metrics.jsonl").rename(place / "moved.txt"),
            ["accepted", "moved.txt"],
        ),
        (link("accepted/budget.jsonl", "/dev/zero"), None),
        (link("other", "accepted"), None),
        (link("../../eval/x", "records"), None),
    ],
)
def test_what_a_pull_request_changes_is_verified(
    change: Change, verified: list[str] | None, tmp_path: Path
) -> None:
    """None: refused."""
    place, tools = tmp_path / "proposed" / RECORDS, tmp_path / "bin"
    add("accepted/record.json", "accepted/metrics.jsonl", "README.md", "../../docs/log.md")(place)
    git(tmp_path / "proposed", "init", "-q")
    base = committed(tmp_path / "proposed")
    change(place)
    head = committed(tmp_path / "proposed")
    tools.mkdir()
    (tools / "cramming").write_text(f"#!/bin/bash\nprintf '%s\\0' \"$*\" >> {tmp_path / 'asked'}\n")
    (tools / "cramming").chmod(0o755)
    is_green = run_steps(tmp_path / "proposed", base, head, tools)
    asked = (
        (tmp_path / "asked").read_text().split("\0")[:-1] if (tmp_path / "asked").exists() else []
    )
    assert is_green == (verified is not None)
    assert asked == [f"verify {RECORDS}/{name}" for name in verified or []]


def test_no_text_of_a_record_is_a_command_to_the_runner() -> None:
    """Commands are stopped before the text is printed, until a random word."""
    before = [
        step["run"].partition("cramming ")[0]
        for step in JOB["steps"]
        if "cramming " in step.get("run", "")
    ]
    assert len(before) == 2 and all(
        'echo "::stop-commands::$(cat /proc/sys/kernel/random/uuid)"' in earlier
        for earlier in before
    )


def test_a_commit_that_is_not_there_is_no_empty_change(tmp_path: Path) -> None:
    (tmp_path / "proposed").mkdir()
    git(tmp_path / "proposed", "init", "-q")
    assert not run_steps(
        tmp_path / "proposed", "0" * 40, committed(tmp_path / "proposed"), tmp_path
    )
