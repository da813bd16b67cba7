"""The border between YAML and code.

Hydra composes one root configuration from `conf/`. Each part of the program declares the section it reads as a frozen
dataclass beside its code, and `build` turns the plain mapping into that dataclass, strictly: an unknown key, a missing
key, a value of the wrong type or outside its choices ends with one line that names the full path and what would be
accepted. Below the entry modules nobody sees a dictionary of settings or a DictConfig.
"""

import dataclasses
import hashlib
import json
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
LONGEST_NAME = 200  # bytes; file systems allow 255, and temporary files beside it have longer names


class UserError(ValueError):
    """A mistake of the user's: one line that names the thing, its place and what to do. The CLI prints it."""


def require(holds: object, problem: str) -> None:
    """UserError with this line unless `holds`."""
    if not holds:
        raise UserError(problem)


def check_rules(*rules: tuple[object, str]) -> None:
    """For `__post_init__`: ValueError with the message of the first (rule, message) that does not hold."""
    for holds, problem in rules:
        if not holds:
            raise ValueError(problem)


@dataclasses.dataclass(frozen=True)
class RootConfig:
    """The settings of the root itself, beside the sections. The verbs read them as plain keys; this is their check."""

    name: str
    seed: int
    resume: bool
    device: Literal["auto", "cpu", "cuda"]
    division: Literal["closed", "open"]
    runs: Path
    corpora: Path
    model_path: str | None
    gates: Path
    forced: list[str]

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} is not between 0 and 2^63")


def folder_name(name: str, setting: str, place: object) -> str:
    """`name`, if it can be a folder's on every system; else UserError."""
    if not re.fullmatch(r"\w[\w.+=,@-]*", name):
        raise UserError(
            f"{setting}={name!r}: use letters, digits and . _ - + = , @ (it becomes a folder under {place})"
        )
    if len(name.encode()) > LONGEST_NAME:
        raise UserError(f"{setting}={name[:20]}...: {len(name)} characters are too many for the name of a folder")
    return name


def expand_home(path: str | Path, setting: str) -> Path:
    """`path` with `~` and `~user` replaced; UserError where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{setting}={path}: there is no such home folder; write the path out") from None


def config_folder() -> Path:
    """The folder of YAML files: `cramming/conf` in an installed wheel, `conf/` at the top of a checkout."""
    here = Path(__file__).resolve().parent
    installed = here / "conf"
    return installed if installed.is_dir() else here.parent / "conf"


def compose(overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The root configuration with these overrides, as every verb's `main` gets it; Hydra's own errors for mistakes."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        settings = OmegaConf.to_container(hydra_compose("config", list(overrides)), resolve=True)
    return typing.cast(dict[str, Any], settings)


def build(cls: type[T], node: Mapping[str, Any] | None, path: str) -> T:
    """Build the frozen dataclass `cls` from a plain mapping.

    `path` is the section's place in the root configuration (`"model"`, "" for the root), used in messages. Supported
    field types: bool, int, float, str, Path, Literal, Optional and unions, list, tuple, dict, nested dataclasses, and
    `Annotated[Base, table]` for one of several dataclasses (`choose`). A ValueError of the dataclass's own
    `__post_init__` comes out as a UserError that begins with the path.
    """
    if not isinstance(node, Mapping):
        raise UserError(f"{path}: expected a section of settings, found {node!r}")
    hints = get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in node:
        if key not in fields:
            raise UserError(
                f"{_below(path, key)}: unknown setting; {path or 'the root'} has: {', '.join(sorted(fields))}"
            )
    values = {}
    for name, field in fields.items():
        if name in node:
            values[name] = _convert(hints[name], node[name], _below(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{_below(path, name)}: missing setting ({_describe(hints[name])})")
    try:
        return cls(**values)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def choose(table: Mapping[str, type[T]], node: Mapping[str, Any] | None, path: str) -> T:
    """The dataclass of `table` that `node["name"]` names, built from `node`: each choice has settings of its own."""
    name = str(node.get("name")) if isinstance(node, Mapping) else ""
    if name not in table:
        raise UserError(f"{path}.name={name!r}: choose one of {', '.join(table)}")
    return build(table[name], node, path)


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _convert(kind: Any, value: Any, path: str) -> Any:
    if get_origin(kind) is Annotated:  # a table of choices; other marks are for others
        kind, mark = kind.__origin__, kind.__metadata__[0]
        return choose(mark, value, path) if isinstance(mark, dict) else _convert(kind, value, path)
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, path)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _convert_union(kind, args, value, path)
    if origin is Literal:
        # YAML reads `off` and `on` as booleans; 1 == True must not count as a match either.
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
        raise UserError(f"{path}={value!r}: choose one of {', '.join(map(str, args))}")
    if origin in (list, tuple):
        return _convert_sequence(origin, args, value, path)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{path}={value!r}: expected {_describe(kind)}")
        return {str(k): _convert(args[1], v, f"{path}.{k}") for k, v in value.items()}
    if kind is Any:
        return value
    return _convert_scalar(kind, value, path)


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


def _convert_sequence(origin: Any, args: tuple[Any, ...], value: Any, path: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{path}={value!r}: expected a list, for example {path}=[a,b]")
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        if len(value) != len(args):
            raise UserError(f"{path}={value!r}: expected {len(args)} values, found {len(value)}")
        return tuple(_convert(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, value)))
    return origin(_convert(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))


def _convert_scalar(kind: Any, value: Any, path: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if kind is float and number and abs(value) <= sys.float_info.max:
        return float(value)
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        try:
            return _convert_scalar(float, float(value), path)
        except ValueError:
            pass
    if kind is str and isinstance(value, str):
        return value
    if kind is str and number:  # a name such as `name=42`
        return str(value)
    if kind is Path and isinstance(value, (str, Path)) and str(value).strip():
        return expand_home(value, path)
    raise UserError(f"{path}={value!r}: expected {_describe(kind)}")


def _describe(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _describe(a) for a in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (list, tuple):
        return "a list"
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", Path: "a path"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def settings_hash(*nodes: Any) -> str:
    """First 12 hex digits of the SHA-256 of the nodes' canonical JSON: names things made from settings."""
    text = json.dumps(nodes, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def texts_sha256(texts: Iterable[str]) -> str:
    """SHA-256 of texts in whatever order, in hex; white space does not count."""
    return hashlib.sha256("\x1e".join(sorted(" ".join(text.split()) for text in texts)).encode()).hexdigest()
