"""What the machine and the code are, as a record tells it: versions, device, commit; nothing that names a machine."""

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
    """Versions, machine and the state of the source tree; `device` is `cramming.device.describe()`."""
    packages = ("torch", "transformers", "tokenizers", "datasets", "numpy", "triton")
    return {
        "python": platform.python_version(),
        **{
            name: next((found.version for found in metadata.distributions(name=name)), None)
            for name in packages
        },
        "platform": system(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "device": dict(device),
        "git": git_state(),
    }


def system() -> str:
    """The operating system and its release number; what follows the number may name the machine or its builder."""
    number = re.match(r"[\d.]+", platform.release())
    return f"{platform.system()} {number[0] if number else ''}".strip()


def cpu_name() -> str:
    """The processor's name as the operating system gives it; of ARM's, Linux has the numbers of maker and cores."""
    if sys.platform == "darwin" and (name := _output(["sysctl", "-n", "machdep.cpu.brand_string"])):
        return name
    info = CPUINFO.read_text() if CPUINFO.exists() else ""
    found = re.findall(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)[:1]
    found = found or [
        platform.machine(),
        *re.findall(r"^CPU (?:implementer|part)\s*:\s*(\S+)", info, re.MULTILINE),
    ]
    return " ".join(dict.fromkeys(found))


def git_state() -> dict[str, Any]:
    """Commit of the checkout the code runs from, what is changed in it (five names at most) and the hash of its
    uncommitted diff; nulls in an installed wheel, and where git did not tell."""
    commit = git("rev-parse", "HEAD")
    changes = None if commit is None else _changes()
    diff = None if commit is None else git("diff-index", "-p", "HEAD")
    return {
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
        "changed": None if changes is None else changes[:5],
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
    }


def _changes() -> list[str] | None:
    """What differs from the commit, whatever git was told to overlook; None where git did not tell."""
    status = git("status", "--porcelain", "--untracked-files=all")
    tracked, others = git("ls-files", "-v"), git("ls-files", "--others", "--", *PACKAGES, "conf")
    if status is None or tracked is None or others is None:
        return None
    found = [line.split(maxsplit=1)[-1] for line in status.splitlines()]
    flagged = (line[2:] for line in tracked.splitlines() if line[0] == "S" or line[0].islower())
    found += [f"{name} (git was told not to look at it)" for name in flagged]
    found += [
        name for name in others.splitlines() if Path(name).suffix in CODE and name not in found
    ]  # ignored code
    return found + [
        f"{name}/ (runs from another folder)" for name in PACKAGES if not _is_here(name)
    ]


def _is_here(package: str) -> bool:
    spec = find_spec(package)
    return (
        spec is not None
        and spec.origin is not None
        and Path(spec.origin).resolve().parent.parent == _source()
    )


def _source() -> Path:
    return Path(__file__).resolve().parent.parent


def git(*arguments: str) -> str | None:
    """Output of git in this code's own checkout; None where the code is not one (an installed package)."""
    source = _source()
    if not (source / ".git").exists():
        return None
    # Without optional locks (and `diff-index`, not `diff`): else git writes to the index, maybe beside a commit. This
    # folder's repository and files, not those that the caller's variables name (a git hook sets them).
    place = [f"--git-dir={source / '.git'}", f"--work-tree={source}", "-c", "core.fsmonitor=false"]
    command = ["git", "--no-optional-locks", *place, *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return _output(command, cwd=source, env=own)


def _output(command: list[str], **place: Any) -> str | None:
    """What a program writes, as far as it is UTF-8; None where it is not there, fails or takes too long."""
    try:
        done = subprocess.run(
            command, **place, capture_output=True, encoding="utf-8", errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
