"""Environment of a run for its record: versions, device, commit. Nothing in it names a machine."""

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("cramming", "eval", "data_prep")
CODE = (".py", ".pyd", ".so", ".yaml")
CPUINFO = Path("/proc/cpuinfo")


def environment(device: Mapping[str, Any]) -> dict[str, Any]:
    """Return versions, hardware and the state of the source tree; `device` is `cramming.device.describe()`."""
    packages = ("torch", "transformers", "tokenizers", "datasets", "numpy", "triton")
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "platform": system(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "device": dict(device),
        "git": git_state(),
    }


def _version(package: str) -> str | None:
    versions = [distribution.version for distribution in metadata.distributions(name=package)]
    return versions[0] if versions else None


def system() -> str:
    """Return the operating system and its release number.

    The rest of the release may name the machine or its builder.
    """
    number = re.match(r"[\d.]+", platform.release())
    return f"{platform.system()} {number[0] if number else ''}".strip()


def cpu_name() -> str:
    """Return the name of the processor from the operating system.

    Of ARM processors, Linux has only the numbers of manufacturer and core types.
    """
    if sys.platform == "darwin":
        brand = _output(["sysctl", "-n", "machdep.cpu.brand_string"])
        if brand:
            return brand
    info = CPUINFO.read_text() if CPUINFO.exists() else ""
    models = re.findall(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    if models:
        return str(models[0])
    numbers = re.findall(r"^CPU (?:implementer|part)\s*:\s*(\S+)", info, re.MULTILINE)
    return " ".join(dict.fromkeys([platform.machine(), *numbers]))


def git_state() -> dict[str, Any]:
    """Return the commit of the checkout, its changes (five names at most) and the hash of its uncommitted diff.

    All are None in an installed wheel, and where git fails.
    """
    state: dict[str, Any] = dict.fromkeys(("commit", "dirty", "changed", "diff_sha256"))
    state["commit"] = git("rev-parse", "HEAD")
    if state["commit"] is None:
        return state
    changes = _changes()
    if changes is not None:
        state["dirty"] = bool(changes)
        state["changed"] = changes[:5]
    diff = git("diff-index", "-p", "HEAD")
    if diff:
        state["diff_sha256"] = hashlib.sha256(diff.encode()).hexdigest()
    return state


def _changes() -> list[str] | None:
    """Return the differences from the commit, including files that git was told to ignore; None where git fails."""
    status = git("status", "--porcelain", "--untracked-files=all")
    tracked, others = git("ls-files", "-v"), git("ls-files", "--others", "--", *PACKAGES, "conf")
    if status is None or tracked is None or others is None:
        return None
    changes = [line.split(maxsplit=1)[-1] for line in status.splitlines()]
    for line in tracked.splitlines():
        flag, name = line[0], line[2:]
        if flag == "S" or flag.islower():
            changes.append(f"{name} (git was told not to look at it)")
    for name in others.splitlines():
        if Path(name).suffix in CODE and name not in changes:
            changes.append(name)  # code in an ignored file
    for name in PACKAGES:
        if not _is_here(name):
            changes.append(f"{name}/ (runs from another folder)")
    return changes


def _is_here(package: str) -> bool:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return False
    return Path(spec.origin).resolve().parent.parent == _source()


def _source() -> Path:
    return Path(__file__).resolve().parent.parent


def git(*arguments: str) -> str | None:
    """Return the output of git in the checkout of this code, or None if there is no checkout (an installed package)."""
    source = _source()
    if not (source / ".git").exists():
        return None
    # Without optional locks (and by `diff-index`, not `diff`), because git would otherwise write to the index, possibly
    # during a commit. Repository and files are those of this folder, not those in variables that a git hook sets.
    options = [
        f"--git-dir={source / '.git'}",
        f"--work-tree={source}",
        "-c",
        "core.fsmonitor=false",
    ]
    command = ["git", "--no-optional-locks", *options, *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return _output(command, cwd=source, env=variables)


def _output(command: list[str], **options: Any) -> str | None:
    """Return the output of a program as UTF-8, or None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, **options, capture_output=True, encoding="utf-8", errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
