"""All scripts: what they import is there, and those for a bare machine start in a checkout that nobody installed."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
PACKAGES = ("cramming", "data_prep", "eval")


def imported() -> Iterator[tuple[str, str, str]]:
    """File, module and name of every import from this project's packages."""
    for file in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                yield from (
                    (str(file.relative_to(ROOT)), str(node.module), alias.name)
                    for alias in node.names
                )


def exists(module: str, name: str) -> bool:
    """Return whether the module has this name, as an attribute or a submodule."""
    if hasattr(importlib.import_module(module), name):
        return True
    with suppress(ModuleNotFoundError):  # no package
        return importlib.util.find_spec(f"{module}.{name}") is not None
    return False


def test_what_the_scripts_import_exists() -> None:
    modules = set(imported())
    assert len({file for file, _, _ in modules}) > 20
    assert not [each for each in sorted(modules) if not exists(*each[1:])]


@pytest.mark.parametrize("script", ["bundle", "run", "write"])
def test_a_script_starts_in_a_checkout_without_an_installation(script: str, tmp_path: Path) -> None:
    code = f"""
import runpy, sys
sys.path[:] = [folder for folder in sys.path if folder not in ("", {str(ROOT)!r})]
sys.path.insert(0, {str(FOLDER / "gpu")!r})
sys.argv = ["{script}.py", "--help"]
runpy.run_path({str(FOLDER / "gpu" / script)!r} + ".py", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr
