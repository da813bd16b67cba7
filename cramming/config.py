"""The border between YAML and code.

Hydra composes one root configuration from `conf/`. Each part of the program declares the section it reads as a frozen
dataclass beside its code, and `build` turns the plain mapping into that dataclass, strictly: an unknown key, a missing
key, a value of the wrong type or outside its choices ends with one line that names the full path and what would be
accepted. Below the entry modules nobody sees a dictionary of settings or a DictConfig.
"""

import dataclasses
import hashlib
import json
import math
import re
import types
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

T = TypeVar("T")
LONGEST_NAME = 200  # bytes; file systems allow 255, and temporary files beside it have longer names


class UserError(ValueError):
    """A mistake of the user's: one line that names the thing, its place and what to do. The CLI prints it."""


def require(holds: object, problem: str) -> None:
    """UserError with this line unless `holds`; in a `__post_init__` it needs no path, which `build` puts before it."""
    if not holds:
        raise UserError(problem)


class Within(NamedTuple):
    """A number's range, as the mark of an `Annotated` type: `build` refuses what lies outside."""

    holds: Callable[[Any], bool]
    says: str


Count = Annotated[int, Within(lambda n: n >= 1, "at least 1")]
Natural = Annotated[int, Within(lambda n: n >= 0, "at least 0")]
Seed = Annotated[int, Within(lambda n: 0 <= n < 2**63, "at least 0 and below 2^63")]
Positive = Annotated[float, Within(lambda x: x > 0, "above 0")]
NotNegative = Annotated[float, Within(lambda x: x >= 0, "at least 0")]
Share = Annotated[float, Within(lambda x: 0 <= x <= 1, "from 0 to 1")]
Fraction = Annotated[float, Within(lambda x: 0 <= x < 1, "at least 0 and below 1")]


@dataclasses.dataclass(frozen=True)
class RootConfig:
    """The settings of the root itself, beside the sections. The verbs read them as plain keys; this is their check."""

    seed: Seed
    nonce: str | None
    division: Literal["closed", "open"]
    gates: Path
    forced: list[str]


def folder_name(name: str, setting: str, place: object) -> str:
    """`name`, if it can be a folder's on every system; else UserError."""
    if not re.fullmatch(r"\w[\w.+=,@-]*", name):
        raise UserError(
            f"{setting}={name!r}: use letters, digits and . _ - + = , @ (it becomes a folder under {place})"
        )
    if len(name.encode()) > LONGEST_NAME:
        raise UserError(
            f"{setting}={name[:20]}...: {len(name)} characters are too many for the name of a folder"
        )
    return name


def expand_home(path: str | Path, setting: str) -> Path:
    """`path` with `~` and `~user` replaced; UserError where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{setting}={path}: there is no such home folder; write the path out"
        ) from None


def config_folder() -> Path:
    """The folder of YAML files: `cramming/conf` in an installed wheel, `conf/` at the top of a checkout."""
    here = Path(__file__).resolve().parent
    return installed if (installed := here / "conf").is_dir() else here.parent / "conf"


def build(cls: type[T], node: Mapping[str, Any] | None, path: str) -> T:
    """Build the frozen dataclass `cls` from a plain mapping.

    `path` is the section's place in the root configuration (`"model"`, "" for the root), used in messages. Supported
    field types: bool, int, float, str, Path, Literal, Optional and unions, list, tuple, dict, nested dataclasses,
    `Annotated[number, Within]`, and `Annotated[Base, table]` for one of several dataclasses (`choose`). A ValueError of
    the dataclass's own `__post_init__` comes out as a UserError that begins with the path.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if not isinstance(node, Mapping):
        raise UserError(
            f"{path}={node}: is a section; set one of {', '.join(fields)}, as in {path}.{next(iter(fields))}="
        )
    if unknown := [key for key in node if key not in fields]:
        known = f"{path or 'the root'} has: {', '.join(sorted(fields))}"
        raise UserError(f"{_below(path, unknown[0])}: unknown setting; {known}")
    hints, values = get_type_hints(cls, include_extras=True), {}
    for name, field in fields.items():
        if name in node:
            values[name] = _convert(hints[name], node[name], _below(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{_below(path, name)}: missing setting ({_describe(hints[name])})")
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{path}: {error}" if path else str(error)) from None


def choose(table: Mapping[str, type[T]], node: Mapping[str, Any] | None, path: str) -> T:
    """The dataclass of `table` that `node["name"]` names, built from `node`: each choice has settings of its own."""
    name = str(node.get("name")) if isinstance(node, Mapping) else ""
    if name not in table:
        raise UserError(f"{path}.name={name!r}: choose one of {', '.join(table)}")
    return build(table[name], node, path)


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _convert(kind: Any, value: Any, path: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        mark = kind.__metadata__[0]
        if isinstance(mark, dict):
            return choose(mark, value, path)
        found = _convert(kind.__origin__, value, path)
        if isinstance(mark, Within):
            require(mark.holds(found), f"{path}={found} must be {mark.says}")
        return found
    if dataclasses.is_dataclass(kind):
        return build(cast(type, kind), value, path)
    if origin in (Union, types.UnionType):
        return _convert_union(kind, args, value, path)
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        many = origin is list or args[1:] == (Ellipsis,)
        if many or len(args) == len(value):
            kinds = args[:1] * len(value) if many else args
            return origin(
                _convert(k, v, f"{path}[{i}]") for i, (k, v) in enumerate(zip(kinds, value))
            )
    if origin is dict and isinstance(value, Mapping):
        return {str(k): _convert(args[1], v, f"{path}.{k}") for k, v in value.items()}
    # YAML reads `off` and `on` as booleans; 1 == True must not count as a match either.
    if kind is Any or (
        origin is Literal and any(value == one and type(value) is type(one) for one in args)
    ):
        return value
    if kind is Path and isinstance(value, (str, Path)) and str(value).strip():
        return expand_home(value, path)
    if (scalar := _scalar(kind, value)) is None:
        raise UserError(
            f"{path}={value!r}: {'choose' if origin is Literal else 'expected'} {_describe(kind)}"
        )
    return scalar


def _convert_union(kind: Any, args: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [a for a in args if a is not type(None)]
    for choice in choices:
        try:
            return _convert(choice, value, path)
        except UserError:
            if len(choices) == 1:
                raise
    raise UserError(f"{path}={value!r}: expected {_describe(kind)}")


def _scalar(kind: Any, value: Any) -> Any:
    """The value as a bool, int, float or str; None where it is none."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if kind is float and (number or isinstance(value, str)):  # YAML 1.1 reads 1e-4 as a string
        try:
            return float(value) if math.isfinite(float(value)) else None
        except (ValueError, OverflowError):
            return None
    return (
        str(value) if kind is str and (number or isinstance(value, str)) else None
    )  # a name such as `name=42`


def _describe(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        within = f" {kind.__metadata__[0].says}" if isinstance(kind.__metadata__[0], Within) else ""
        return _describe(kind.__origin__) + within
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _describe(a) for a in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (list, tuple):
        return f"a list{f' of {len(args)}' if origin is tuple and Ellipsis not in args else ', for example [a,b]'}"
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a finite number",
        str: "text",
        Path: "a path",
    }
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def shown(value: Any) -> str:
    """As a user types it: null, true, `[a, b]`, and a section as `{start: 0.3, every: 0.1}`."""
    value = (
        dataclasses.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
        else value
    )
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {shown(one)}' for name, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def printable(text: str) -> str:
    """One line, without control characters, halves of a surrogate pair and what turns the direction of all that
    follows; other signs without a shape of their own stay."""
    shown = (
        c if c.isprintable() or _is_format(c) else " " if c.isspace() else "\ufffd" for c in text
    )
    return "".join(shown)


def _is_format(sign: str) -> bool:
    turns = "\u202a" <= sign <= "\u202e" or "\u2066" <= sign <= "\u2069"
    return unicodedata.category(sign) == "Cf" and not turns


def plain_numbers(node: Any) -> Any:
    """The same settings with 1000 for 1e3 and 1000.0, which mean the same wherever a number is expected."""
    text = json.dumps(node, default=str)
    return json.loads(
        text, parse_float=lambda digits: int(x) if (x := float(digits)).is_integer() else x
    )


def settings_hash(*nodes: Any) -> str:
    """First 12 hex digits of the SHA-256 of the nodes' canonical JSON: names things made from settings."""
    text = json.dumps(nodes, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
