"""What a record says of the machine and the code."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cramming import environment


def test_the_git_state_is_this_checkouts_or_null(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        environment, "__file__", str(tmp_path / "site-packages" / "cramming" / "environment.py")
    )
    assert environment.git_state() == dict.fromkeys(["commit", "dirty", "changed", "diff_sha256"])


@pytest.mark.parametrize("silent", ["status", "ls-files"])
def test_a_status_that_git_does_not_tell_is_not_a_clean_one(
    monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """git ends with an error or takes too long: rule 23 then does not hold."""
    answers = {"rev-parse": "0123", "diff-index": "", "status": "", "ls-files": ""} | {silent: None}
    monkeypatch.setattr(environment, "git", lambda verb, *_: answers[verb])
    state = environment.git_state()
    assert state["dirty"] is None and state["changed"] is None


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with this code and one commit."""
    home = tmp_path / "checkout"
    for package in ("cramming", "eval", "data_prep"):
        (home / package).mkdir(parents=True)
        (home / package / "__init__.py").touch()
    shutil.copy(environment.__file__, home / "cramming")
    (home / ".gitignore").write_text("__pycache__/\n/runs/\n")
    run_git(home, "init", "--quiet")
    run_git(home, "add", ".")
    run_git(home, "commit", "--quiet", "--message", "a")
    return home


def run_git(home: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a")
    subprocess.run(["git", "-C", str(home), *who, *arguments], check=True)


def state_of(home: Path, before: str = "", **variables: str) -> dict[str, Any]:
    """Return the environment of this checkout's code; packages in the folder `before` come first."""
    code = "import json; from cramming.environment import git_state; print(json.dumps(git_state()))"
    path = os.pathsep.join([before, str(home)] if before else [str(home)])
    command, variables = [sys.executable, "-P", "-c", code], {"PYTHONPATH": path, **variables}
    completed = subprocess.run(command, env=os.environ | variables, check=True, capture_output=True)
    return dict(json.loads(completed.stdout))


def test_git_is_only_read(checkout: Path) -> None:
    """A plain `git status` renews what the index knows of a touched file, and holds the index's lock meanwhile."""
    os.utime(checkout / "eval/__init__.py", (1, 1))
    before = (checkout / ".git" / "index").read_bytes()
    assert state_of(checkout)["dirty"] is False
    assert (checkout / ".git" / "index").read_bytes() == before


def test_only_what_is_no_code_may_be_ignored(checkout: Path) -> None:
    (checkout / "runs").mkdir()
    (checkout / "runs/a.py").touch()
    assert state_of(checkout)["dirty"] is False
    (checkout / "cramming/more.py").touch()
    assert state_of(checkout)["changed"] == ["cramming/more.py"]
    (checkout / ".git/info/exclude").write_text("more.py\n")
    assert state_of(checkout)["changed"] == ["cramming/more.py"]


def test_a_changed_file_shows_whatever_git_was_told(checkout: Path, tmp_path: Path) -> None:
    """By the caller's variables, as in a hook, by the user's settings, or by a flag on the file."""
    clean = tmp_path / "clean"
    shutil.copytree(checkout, clean)
    (checkout / "eval/__init__.py").write_text("changed = True")
    (checkout / "eval/more.py").touch()
    changed = ["eval/__init__.py", "eval/more.py"]
    assert state_of(checkout)["changed"] == changed
    assert state_of(checkout, GIT_WORK_TREE=str(clean))["changed"] == changed
    assert (
        state_of(checkout, GIT_DIR=str(clean / ".git"), GIT_WORK_TREE=str(clean))["changed"]
        == changed
    )
    run_git(checkout, "config", "status.showUntrackedFiles", "no")
    run_git(checkout, "config", "core.worktree", str(clean))
    assert state_of(checkout)["changed"] == changed


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_a_file_that_git_does_not_look_at_is_no_clean_one(checkout: Path, flag: str) -> None:
    run_git(checkout, "update-index", flag, "eval/__init__.py")
    state = state_of(checkout)
    assert state["dirty"] is True and state["changed"] == [
        "eval/__init__.py (git was told not to look at it)"
    ]


def test_code_of_another_folder_is_not_of_this_commit(checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(checkout / "eval", tmp_path / "other/eval")
    state = state_of(checkout, before=str(tmp_path / "other"))
    assert state["changed"] == ["eval/ (runs from another folder)"]


ARM = "processor : 0\nBogoMIPS : 2000.00\nCPU implementer : 0x41\nCPU architecture: 8\nCPU part : {}\n\n"


@pytest.mark.parametrize(
    ("info", "machine", "shown"),
    [
        (2 * "model name\t: AMD EPYC 7B13\nflags : x\n\n", "x86_64", "AMD EPYC 7B13"),
        (4 * ARM.format("0xd0c"), "aarch64", "aarch64 0x41 0xd0c"),
        (ARM.format("0xd05") + ARM.format("0xd0a"), "aarch64", "aarch64 0x41 0xd05 0xd0a"),
        ("uarch : sifive,u74\n", "riscv64", "riscv64"),
    ],
    ids=["x86", "ARM", "ARM with two kinds of cores", "RISC-V"],
)
def test_two_kinds_of_processor_have_two_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, info: str, machine: str, shown: str
) -> None:
    """Gates and replays go by it: where it is the same, so are all bits."""
    (tmp_path / "cpuinfo").write_text(info)
    monkeypatch.setattr(environment, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert environment.cpu_name() == shown


def test_macos_tells_the_name_by_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    printing = subprocess.CompletedProcess([], 0, "Apple M3 Pro\n")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: printing if command[0] == "sysctl" else None
    )
    assert environment.cpu_name() == "Apple M3 Pro"


def test_a_changed_file_in_another_encoding_is_told_as_well(checkout: Path) -> None:
    (checkout / "eval/__init__.py").write_bytes("# größer".encode("latin-1"))
    state = state_of(checkout)
    assert state["changed"] == ["eval/__init__.py"] and state["diff_sha256"]


@pytest.mark.parametrize(
    ("release", "shown"), [("5.15.0-1034-host42", "Linux 5.15.0"), ("", "Linux")]
)
def test_of_the_system_the_name_and_the_number_are_told(
    monkeypatch: pytest.MonkeyPatch, release: str, shown: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(platform, "node", lambda: "host42")
    told = environment.environment({"kind": "cpu"})
    assert told["platform"] == shown
    assert "host42" not in str(told)
