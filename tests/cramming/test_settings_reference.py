"""The settings reference names every setting that a recipe can have, with a meaning."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from cramming.overrides import setting_names
from cramming.settings_reference import SECTIONS, settings_reference

CONF = Path(__file__).parents[2] / "conf"
CHOICES = sorted(
    (file.parent.name, file.stem) for group in SECTIONS for file in (CONF / group).glob("*.yaml")
)


@pytest.fixture(scope="module")
def named() -> set[str]:
    return set(re.findall(r"^- `([\w.]+)`", settings_reference(SECTIONS), re.MULTILINE))


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_settings_of_every_choice_are_listed(
    compose: Callable[..., dict[str, Any]], named: set[str], group: str, choice: str
) -> None:
    for name in setting_names(compose(f"{group}={choice}")):
        sections = name.split(".")
        above = {".".join(sections[:length]) for length in range(1, len(sections) + 1)}
        assert above & named, name


def test_a_setting_of_one_choice_has_the_comment_of_that_choice() -> None:
    reference = settings_reference(["objective"])
    until = re.findall(r"^- `objective\.until` \((.*?)\): (.*)$", reference, re.MULTILINE)
    assert len(until) == 2 and until[0] != until[1]


def test_an_unknown_section_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(UserError, match=r"optm.*optim"):
        settings_reference(["optm"])
