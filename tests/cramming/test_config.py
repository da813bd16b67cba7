"""Settings become dataclasses strictly, and files are replaced whole or not at all."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from cramming.config import RootConfig, UserError, build, settings_hash


@dataclass(frozen=True)
class Inner:
    size: int
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size={self.size} is below 0")


@dataclass(frozen=True)
class Outer:
    flag: bool = False
    count: int = 1
    rate: float = 0.5
    text: str = "x"
    place: Path | None = None
    switch: Literal["off", "on"] = "off"
    names: list[str] = field(default_factory=list)
    pair: tuple[float, float] = (0.0, 1.0)
    many: tuple[int, ...] = ()
    table: dict[str, int] = field(default_factory=dict)
    inner: Inner = field(default_factory=lambda: Inner(1))
    maybe: Inner | None = None
    number_or_text: int | str = 0


def error_of(node: Any) -> str:
    with pytest.raises(UserError) as caught:
        build(Outer, node, "top")
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("flag", True, True),
        ("count", 3, 3),
        ("count", 3.0, 3),
        ("count", -1, -1),
        ("rate", 2, 2.0),
        ("rate", "1e-4", 1e-4),
        ("text", "word", "word"),
        ("text", 42, "42"),
        ("place", None, None),
        ("place", "a/b", Path("a/b")),
        ("switch", "on", "on"),
        ("names", ["a", "b"], ["a", "b"]),
        ("pair", [1, 2], (1.0, 2.0)),
        ("many", [1, 2, 3], (1, 2, 3)),
        ("table", {"a": 1}, {"a": 1}),
        ("inner", {"size": 4, "kind": "b"}, Inner(4, "b")),
        ("maybe", None, None),
        ("maybe", {"size": 4}, Inner(4)),
        ("number_or_text", "a", "a"),
        ("number_or_text", 5, 5),
    ],
)
def test_accepted_values(key: str, value: Any, expected: Any) -> None:
    found = getattr(build(Outer, {key: value}, "top"), key)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("flag", 1),
        ("flag", "true"),
        ("flag", None),
        ("count", True),
        ("count", 1.5),
        ("count", "3"),
        ("count", float("inf")),
        ("rate", 10**400),
        ("place", "~nobody-here/a"),
        ("rate", True),
        ("rate", "fast"),
        ("rate", float("nan")),
        ("rate", "inf"),
        ("rate", None),
        ("text", True),
        ("text", ["a"]),
        ("place", 3),
        ("place", ""),
        ("switch", True),
        ("switch", "maybe"),
        ("names", "a"),
        ("names", {"a": 1}),
        ("pair", [1, 2, 3]),
        ("table", ["a"]),
        ("inner", 3),
        ("number_or_text", [1]),
    ],
)
def test_rejected_values_name_their_path(key: str, value: Any) -> None:
    assert error_of({key: value}).startswith(f"top.{key}")


def test_one_and_true_are_not_the_same_choice() -> None:
    @dataclass(frozen=True)
    class Level:
        level: Literal[0, 1]

    assert build(Level, {"level": 1}, "x").level == 1
    with pytest.raises(UserError, match=r"x\.level=True: choose one of 0, 1"):
        build(Level, {"level": True}, "x")


def test_unknown_key_lists_the_known_ones() -> None:
    message = error_of({"colour": 1})
    assert message.startswith("top.colour: unknown setting")
    assert "count" in message
    assert "rate" in message


def test_choices_are_listed() -> None:
    assert "a, b" in error_of({"inner": {"size": 1, "kind": "c"}})


@pytest.mark.parametrize(
    ("node", "path"),
    [
        ({"inner": {"size": 1, "colour": 2}}, "top.inner.colour"),
        ({"inner": {"size": "one"}}, "top.inner.size"),
        ({"inner": {}}, "top.inner.size"),
        ({"inner": {"size": -1}}, "top.inner: size=-1 is below 0"),
        ({"maybe": {"size": -1}}, "top.maybe: size=-1 is below 0"),
        ({"maybe": {"size": True}}, "top.maybe.size"),
        ({"table": {"a": "b"}}, "top.table.a"),
        ({"names": ["a", None]}, "top.names[1]"),
        ({"pair": [1, "x"]}, "top.pair[1]"),
    ],
)
def test_nested_places_are_named(node: Any, path: str) -> None:
    assert error_of(node).startswith(path)


def test_a_section_must_be_a_mapping() -> None:
    for node in (None, 3, [1]):
        assert error_of(node).startswith("top: expected a section")


def test_settings_hash_ignores_order_and_sees_values() -> None:
    assert settings_hash({"a": 1, "b": [1, 2]}) == settings_hash({"b": [1, 2], "a": 1})
    assert len(settings_hash({})) == 12
    different = [settings_hash(n) for n in ({"a": 1}, {"a": 2}, {"a": "1"}, {"a": [1]}, {"b": 1}, {"a": True})]
    assert len(set(different)) == len(different)
    assert settings_hash({"a": 1}, {}) != settings_hash({"a": 1})


ROOT = {"name": "a", "seed": 0, "resume": False, "device": "auto", "division": "closed", "runs": "r", "corpora": "c"}
ROOT |= {"gates": "g", "forced": []}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seed": "abc"}, "seed='abc': expected a whole number"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": -1}, "seed=-1 is not between"),
        ({"seed": 2**63}, "seed=9223372036854775808 is not between"),
        ({"resume": "maybe"}, "resume='maybe': expected true or false"),
        ({"device": "tpu"}, "device='tpu': choose one of auto, cpu, cuda"),
        ({"division": "first"}, "division='first': choose one of closed, open"),
        ({"name": None}, "name=None"),
        ({"seed": 10**400}, "seed=1000"),
        ({"runs": ["a"]}, r"runs=\['a'\]: expected a path"),
        ({"colour": "red"}, "colour: unknown setting; the root has"),
    ],
)
def test_the_roots_own_settings(changes: dict[str, Any], names: str) -> None:
    build(RootConfig, {**ROOT, "model_path": None}, "")
    with pytest.raises(UserError, match=names) as caught:
        build(RootConfig, {**ROOT, "model_path": None, **changes}, "")
    assert str(caught.value).startswith(next(iter(changes)))
