"""constraints.txt and pyproject.toml agree, and the documented commands install the versions that CI tests."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_IN_CI = ("ray", "wandb")


def read_constraints() -> dict[str, str]:
    """Return the version of each package that constraints.txt names."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^([\w.-]+)==([\w.]+)$", text, flags=re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


def direct_requirements() -> list[Requirement]:
    """Return the requirements of the project and of every extra that CI installs."""
    texts = list(PROJECT["dependencies"])
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra not in NOT_IN_CI:
            texts += requirements
    parsed = map(Requirement, texts)
    return [requirement for requirement in parsed if requirement.name != PROJECT["name"]]


CONSTRAINTS = read_constraints()


@pytest.mark.parametrize("requirement", direct_requirements(), ids=str)
def test_the_tested_version_is_within_the_supported_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(CONSTRAINTS[canonicalize_name(requirement.name)])


def test_constraints_name_direct_dependencies_only() -> None:
    names = {canonicalize_name(requirement.name) for requirement in direct_requirements()}
    assert set(CONSTRAINTS) == names


def test_every_line_of_constraints_is_one_exact_version() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(CONSTRAINTS)


@pytest.mark.parametrize("name", ["README.md", "docs/submission.yml"])
def test_the_cpu_build_of_torch_that_is_documented_is_the_tested_one(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    versions = re.findall(r"pip install torch==(\S+)", text)
    assert versions == [CONSTRAINTS["torch"]]


def test_the_commands_of_the_readme_install_the_tested_versions() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python3 -m venv .*$", text, flags=re.MULTILINE)
    assert len(commands) == 2
    assert all("/pip install -c constraints.txt " in command for command in commands)
