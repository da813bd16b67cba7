"""Settings become sections strictly, and a mistake becomes one line that names its setting."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import ValidationError, model_validator

from cramming.config import (
    Choice,
    Count,
    LocalPath,
    OneOf,
    Section,
    Share,
    Text,
    UserError,
    build,
    settings_hash,
    shown,
)
from cramming.schedule import AverageConfig


class Inner(Section):
    size: Count
    kind: Literal["a", "b"] = "a"

    @model_validator(mode="after")
    def _is_even(self) -> Self:
        if self.size % 2:
            raise ValueError(f"size={self.size}: odd. Double it.")
        return self


class Round(Section):
    name: str
    radius: Share


class Square(Section):
    name: str
    side: Count


class Outer(Section):
    flag: bool = False
    count: int = 1
    rate: float = 0.5
    text: Text = "x"
    place: LocalPath | None = None
    switch: Literal["off", "on", 2] = "off"
    letter: Annotated[str, OneOf(("alpha", "beta"))] = "alpha"
    pair: tuple[float, float] = (0.0, 1.0)
    many: tuple[int, ...] = ()
    table: dict[str, int] = {}  # noqa: RUF012
    inner: Inner = Inner(size=2)
    maybe: Inner | None = None
    parts: tuple[Inner, ...] = ()
    shape: Annotated[Section, Choice({"disc": Round, "ball": Round, "box": Square})] = Round(
        name="disc", radius=1
    )
    number_or_auto: Count | Literal["auto"] = "auto"


def error_of(node: Any) -> str:
    with pytest.raises(UserError) as caught:
        build(Outer, node, "top")
    message = str(caught.value)
    assert "\n" not in message and "pydantic" not in message and message.endswith((".", "?"))
    return message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("flag", True, True),
        ("count", 3, 3),
        ("count", 3.0, 3),
        ("rate", 2, 2.0),
        ("text", "word", "word"),
        ("text", 42, "42"),
        ("place", None, None),
        ("place", "a/b", Path("a/b")),
        ("switch", "on", "on"),
        ("letter", "beta", "beta"),
        ("pair", [1, 2], (1.0, 2.0)),
        ("many", [1, 2, 3], (1, 2, 3)),
        ("table", {"a": 1}, {"a": 1}),
        ("inner", {"size": 4, "kind": "b"}, Inner(size=4, kind="b")),
        ("maybe", {"size": 4}, Inner(size=4)),
        ("shape", {"name": "ball", "radius": 0.5}, Round(name="ball", radius=0.5)),
        ("shape", {"name": "box", "side": 3}, Square(name="box", side=3)),
        ("number_or_auto", "auto", "auto"),
        ("number_or_auto", 5, 5),
    ],
)
def test_accepted_values(key: str, value: Any, expected: Any) -> None:
    result = getattr(build(Outer, {key: value}, "top"), key)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("flag", 1),
        ("flag", None),
        ("count", True),
        ("count", 1.5),
        ("count", "3"),
        ("count", float("inf")),
        ("rate", 10**400),
        ("rate", "fast"),
        ("rate", float("nan")),
        ("rate", None),
        ("text", True),
        ("text", ["a"]),
        ("place", ""),
        ("place", ["a"]),
        ("place", "~nobody-here/a"),
        ("switch", True),
        ("switch", "maybe"),
        ("letter", "gamma"),
        ("many", "a"),
        ("pair", [1, 2, 3]),
        ("table", ["a"]),
        ("inner", 3),
        ("maybe", 3),
        ("number_or_auto", 0),
    ],
)
def test_a_rejected_value_is_named_as_it_was_typed(key: str, value: Any) -> None:
    assert error_of({key: value}).startswith(f"top.{key}={shown(value)}: ")


@pytest.mark.parametrize(
    ("node", "beginning"),
    [
        ({"inner": {"size": 2, "colour": 2}}, "top.inner.colour: unknown setting"),
        ({"inner": {"size": "one"}}, "top.inner.size=one: "),
        ({"inner": {}}, "top.inner.size: missing"),
        ({"inner": {"size": 3}}, "top.inner.size=3: odd"),
        ({"maybe": {"size": 3}}, "top.maybe.size=3: odd"),
        ({"parts": [{"size": 2}, {"size": 3}]}, "top.parts[1].size=3: odd"),
        ({"table": {"a": "b"}}, "top.table.a=b: "),
        ({"many": [1, None]}, "top.many[1]=null: "),
        ({"pair": [1, "x"]}, "top.pair[1]=x: "),
        ({"shape": {"name": "ball", "radius": 2}}, "top.shape.radius=2: "),
        ({"shape": {"name": "box", "radius": 2}}, "top.shape.side: missing"),
        ({"shape": {"name": "boxes"}}, "top.shape.name=boxes: "),
        ({"shape": {}}, "top.shape.name=null: "),
        ({"shape": 3}, "top.shape=3: "),
    ],
)
def test_nested_places_are_named(node: Any, beginning: str) -> None:
    assert error_of(node).startswith(beginning)


@pytest.mark.parametrize(
    ("node", "meant"),
    [
        ({"cout": 1}, "count"),
        ({"inner": {"size": 2, "knd": "a"}}, "kind"),
        ({"shape": {"name": "bal"}}, "ball"),
        ({"shape": {"name": "disc", "radius": 1, "radios": 1}}, "radius"),
        ({"letter": "alpa"}, "alpha"),
        ({"number_or_auto": "autp"}, "auto"),
    ],
)
def test_a_word_that_is_nearly_right_is_guessed(node: Any, meant: str) -> None:
    assert error_of(node).endswith(f"Did you mean {meant}?")


def test_a_word_that_is_like_none_gets_all_of_them() -> None:
    assert error_of({"shape": {"name": "xyz"}}).endswith("Choose one of ball, box, disc.")
    assert "count" in error_of({"zzz": 1})


@pytest.mark.parametrize("node", [None, 3, [1]])
def test_settings_are_a_mapping(node: Any) -> None:
    assert error_of(node).startswith(f"top={shown(node)}: expected a section")


def test_a_changed_copy_is_validated() -> None:
    section = Inner(size=2)
    assert section.replace(size=4) == Inner(size=4) and section.size == 2
    for changes in ({"size": 3}, {"size": 0}, {"colour": 1}):
        with pytest.raises(ValidationError):
            section.replace(**changes)


def test_what_is_shown_can_be_typed(compose: Callable[..., dict[str, Any]]) -> None:
    average = AverageConfig(start=0.3, every=0.1)
    assert shown(average) == "{start: 0.3, every: 0.1}"
    assert compose(f"train.average={shown(average)}")["train"]["average"] == dict(average)
    values = (None, True, 3, 1e-5, 'é"', Path("a b"), (0.0, 0.5), ["a", None])
    typed = ["null", "true", "3", "1e-05", 'é"', "a b", "[0.0, 0.5]", "[a, null]"]
    assert list(map(shown, values)) == typed


def test_settings_hash_ignores_order_and_sees_values() -> None:
    assert settings_hash({"a": 1, "b": [1, 2]}) == settings_hash({"b": [1, 2], "a": 1})
    assert len(settings_hash({})) == 12
    different = [
        settings_hash(n)
        for n in ({"a": 1}, {"a": 2}, {"a": "1"}, {"a": [1]}, {"b": 1}, {"a": True})
    ]
    assert len(set(different)) == len(different)
    assert settings_hash({"a": 1}, {}) != settings_hash({"a": 1})
