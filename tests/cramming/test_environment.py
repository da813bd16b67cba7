"""What a record says of the machine and the code."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cramming import device, environment


def test_the_git_state_is_this_checkouts_or_null(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "site-packages" / "cramming" / "environment.py"))
    assert environment.git_state() == dict.fromkeys(["commit", "dirty", "changed", "diff_sha256"])


@pytest.mark.parametrize(("status", "dirty"), [(" M README.md", True), ("", False), (None, None)])
def test_a_status_that_git_does_not_tell_is_not_a_clean_one(
    monkeypatch: pytest.MonkeyPatch, status: str | None, dirty: bool | None
) -> None:
    """git ends with an error or takes too long: rule 23 then does not hold."""
    answers = {"rev-parse": "0123", "diff-index": "", "status": status}
    monkeypatch.setattr(environment, "git", lambda verb, *_: answers[verb])
    state = environment.git_state()
    assert state["dirty"] is dirty and state["changed"] == {True: ["README.md"], False: [], None: None}[dirty]


def test_git_is_only_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plain `git status` renews what the index knows of a touched file, and holds the index's lock meanwhile."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a", *arguments], check=True)

    monkeypatch.setattr(environment, "__file__", str(tmp_path / "cramming" / "environment.py"))
    git("init", "--quiet")
    (tmp_path / "file").write_text("text")
    git("add", "file")
    git("commit", "--quiet", "--message", "a")
    os.utime(tmp_path / "file", (1, 1))
    before = (tmp_path / ".git" / "index").read_bytes()
    assert environment.git_state()["dirty"] is False
    assert (tmp_path / ".git" / "index").read_bytes() == before


@pytest.mark.parametrize(
    ("release", "shown"),
    [("6.8.0-45-generic", "Linux 6.8.0"), ("5.15.0-1034-host42", "Linux 5.15.0"), ("", "Linux")],
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


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_is_in_the_systems_unit(monkeypatch: pytest.MonkeyPatch, system: str, unit: int) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=7))
    assert device.peak_memory_bytes(torch.device("cpu")) == 7 * unit
