"""Settings become dataclasses strictly."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from cramming.config import Count, RootConfig, Share, UserError, build, settings_hash, shown
from cramming.schedule import AverageConfig


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
        ("flag", None),
        ("count", True),
        ("count", 1.5),
        ("count", "3"),
        ("count", float("inf")),
        ("rate", 10**400),
        ("place", "~nobody-here/a"),
        ("rate", "fast"),
        ("rate", float("nan")),
        ("rate", None),
        ("text", True),
        ("text", ["a"]),
        ("place", ""),
        ("switch", True),
        ("switch", "maybe"),
        ("names", "a"),
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


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("count", [1, 9], [0, -1]), ("share", [0.0, 1.0], [-0.1, 1.1]), ("none", [None, 2], [0])],
)
def test_a_number_keeps_to_the_range_of_its_type(
    name: str, good: list[Any], bad: list[Any]
) -> None:
    @dataclass(frozen=True)
    class Ranges:
        count: Count = 1
        share: Share = 0.0
        none: Count | None = None

    for value in good:
        assert getattr(build(Ranges, {name: value}, "x"), name) == value
    for value in bad:
        with pytest.raises(
            UserError, match=rf"^x\.{name}={value} must be (at least 1|from 0 to 1)$"
        ):
            build(Ranges, {name: value}, "x")


def test_unknown_keys_and_choices_list_the_known_ones() -> None:
    message = error_of({"colour": 1})
    assert (
        message.startswith("top.colour: unknown setting")
        and "count" in message
        and "rate" in message
    )
    assert "choose one of a, b" in error_of({"inner": {"size": 1, "kind": "c"}})


@pytest.mark.parametrize(
    ("node", "path"),
    [
        ({"inner": {"size": 1, "colour": 2}}, "top.inner.colour"),
        ({"inner": {"size": "one"}}, "top.inner.size"),
        ({"inner": {}}, "top.inner.size"),
        ({"inner": {"size": -1}}, "top.inner: size=-1 is below 0"),
        ({"maybe": {"size": -1}}, "top.maybe: size=-1 is below 0"),
        ({"table": {"a": "b"}}, "top.table.a"),
        ({"names": ["a", None]}, "top.names[1]"),
        ({"pair": [1, "x"]}, "top.pair[1]"),
    ],
)
def test_nested_places_are_named(node: Any, path: str) -> None:
    assert error_of(node).startswith(path)


def test_a_section_must_be_a_mapping() -> None:
    for node in (None, 3, [1]):
        assert error_of(node).startswith(f"top={node}: is a section")


def test_what_is_shown_can_be_typed(compose: Callable[..., dict[str, Any]]) -> None:
    average = AverageConfig(start=0.3, every=0.1)
    assert shown(average) == "{start: 0.3, every: 0.1}"
    assert compose(f"train.average={shown(average)}")["train"]["average"] == asdict(average)
    values = (None, True, 3, 1e-5, 'é"', Path("a b"), (0.0, 0.5), ["a", None])
    assert list(map(shown, values)) == [
        "null",
        "true",
        "3",
        "1e-05",
        'é"',
        "a b",
        "[0.0, 0.5]",
        "[a, null]",
    ]


def test_settings_hash_ignores_order_and_sees_values() -> None:
    assert settings_hash({"a": 1, "b": [1, 2]}) == settings_hash({"b": [1, 2], "a": 1})
    assert len(settings_hash({})) == 12
    different = [
        settings_hash(n)
        for n in ({"a": 1}, {"a": 2}, {"a": "1"}, {"a": [1]}, {"b": 1}, {"a": True})
    ]
    assert len(set(different)) == len(different)
    assert settings_hash({"a": 1}, {}) != settings_hash({"a": 1})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seed": "abc"}, "seed='abc': expected a whole number"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be"),
        ({"division": "ajar"}, "division='ajar': choose one of closed, open"),
        ({"gates": ["a"]}, r"gates=\['a'\]: expected a path"),
        ({"colour": "red"}, "colour: unknown setting; the root has"),
    ],
)
def test_the_roots_own_settings(
    compose: Callable[..., dict[str, Any]], changes: dict[str, Any], names: str
) -> None:
    root = {key: value for key, value in compose().items() if not isinstance(value, dict)}
    build(RootConfig, root, "")
    with pytest.raises(UserError, match=f"^{names}"):
        build(RootConfig, {**root, **changes}, "")
