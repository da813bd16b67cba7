"""JSON as frozen dataclasses: one tolerant reader, driven by their annotations.

A value that is missing or of another kind than its annotation says becomes None (a list, table or section: empty), and
is named among the problems. `X | None` may be missing; a field `raw` holds its section as it was.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Number = float | None  # finite; whole numbers stay whole
Text = str | None  # never empty


def number(value: Any) -> Number:
    """`value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # JSON allows whole numbers of any length
        return None


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, str]]:
    """Of a section: the type of each field, and in which records it must be."""
    hints = get_type_hints(kind, include_extras=True)
    names = [one.name for one in fields(kind) if one.default_factory is MISSING]
    return {
        name: (get_args(hints[name])[0], hints[name].__metadata__[0])
        if get_origin(hints[name]) is Annotated
        else (hints[name], "")
        for name in names
    }


@cache
def _without_none(hint: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True)."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, hint is Any
    (kind,) = (arg for arg in get_args(hint) if arg is not NoneType)
    return kind, True


_WORDS = {
    float: "a finite number", str: "text", bool: "true or false", list: "a list", dict: "a section"
}  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """`needed`: the marks (`Annotated[X, mark]`) of the fields that must be there."""

    needed: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)  # found so far

    def section(self, kind: type[T], raw: Any, place: str) -> T:
        found: dict[str, Any] = {}
        inside = raw if isinstance(raw, Mapping) else {}
        for name, (hint, when) in _fields(kind).items():  # type: ignore[arg-type]
            value = raw if name == "raw" else inside.get(name)
            if value is None and when in self.needed and isinstance(raw, Mapping):
                self.problems.append(f"{place}{name} is missing")
            found[name] = self.value(hint, value, f"{place}{name}")
        return kind(**found)

    def value(self, hint: Any, raw: Any, place: str) -> Any:
        kind, optional = _without_none(hint)
        if raw is None and optional:
            return None
        if kind is Any:
            return raw
        outer, inner = get_origin(kind) or kind, get_args(kind)
        if outer is Literal:
            return raw if raw in inner else self._wrong(raw, place, f"one of {', '.join(inner)}")
        if outer in (list, dict) or is_dataclass(outer):
            fits = isinstance(raw, list) if outer is list else isinstance(raw, Mapping)
            if raw is not None and not fits:
                self._wrong(raw, place, _WORDS[list if outer is list else dict])
            if outer is list:
                items = enumerate(raw if fits else [])
                return [self.value(inner[0], item, f"{place}[{index}]") for index, item in items]
            if outer is dict:
                pairs = (raw if fits else {}).items()
                return {str(key): self._entry(inner[1], item, f"{place}.{key}") for key, item in pairs}
            return self.section(outer, raw, f"{place}.")
        fits = number(raw) is not None if outer is float else isinstance(raw, outer) and raw != ""
        return raw if fits else self._wrong(raw, place, _WORDS[outer])

    def _entry(self, hint: Any, raw: Any, place: str) -> Any:
        if raw is None and is_dataclass(hint):
            self.problems.append(f"{place} is missing")
        return self.value(hint, raw, place)

    def _wrong(self, raw: Any, place: str, wanted: str) -> None:
        shown = f"{type(raw).__name__} of {len(raw)}" if isinstance(raw, Mapping | list) else repr(raw)[:40]
        self.problems.append(f"{place} is {shown}, not {wanted}")
