"""Typed settings: the base class of sections, types of values, and validation errors as one line.

Hydra composes plain settings from `conf/`. Each part of the program declares the section that it reads as a frozen
pydantic model beside its code, and `build` validates the settings into it. A user's mistake ends with one line,
`section.key=value: problem. Fix.`; what is expected is worded from the JSON schema of the section.
"""

import difflib
import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, core_schema

T = TypeVar("T")
Schema = dict[str, Any]
NO_HOME = "there is no such home folder. Write the path out."
LONGEST_NAME = 200  # bytes; file systems allow 255, and temporary files beside it have longer names


class UserError(ValueError):
    """A mistake of the user's: one line that names the setting or file and says what to do. The CLI prints it."""


def require(holds: object, problem: str) -> None:
    """Raise UserError with this line unless `holds`."""
    if not holds:
        raise UserError(problem)


# Sections and the types of their values -------------------------------------------------------------------------------


class Section(BaseModel):
    """Part of the settings, valid by itself.

    A validator of a whole section raises ValueError with a line that begins with the setting's name and value.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_by_name=True
    )

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with these fields changed."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **changes}, by_name=True)


@dataclass(frozen=True)
class Choice:
    """Annotation of a section that is one of a table, by its setting `name`: each choice has settings of its own."""

    table: Mapping[str, type[Section]]

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the discriminated union."""
        choices = {name: handler.generate_schema(cls) for name, cls in self.table.items()}
        return core_schema.tagged_union_schema(choices, discriminator="name")


@dataclass(frozen=True)
class OneOf:
    """Annotation of text that is one of these names."""

    names: Collection[str]

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of a literal."""
        return core_schema.literal_schema(list(self.names))


# Bytes of a path that are not UTF-8 are lone surrogates in Python (PEP 383), which JSON cannot hold: characters of the
# last private plane stand for them.
TO_PRIVATE = {0xDC80 + byte: 0x10DC80 + byte for byte in range(128)}
FROM_PRIVATE = {private: surrogate for surrogate, private in TO_PRIVATE.items()}


def _text(value: object) -> object:
    """Return a number as the text that was typed."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def _home_expanded(value: object) -> object:
    """Return a path with `~` and `~user` replaced; ValueError where there is no such home, or no path."""
    if not isinstance(value, str | Path):
        return value
    if not str(value).strip():
        raise ValueError("expected a path. Give one.")
    try:
        return str(Path(str(value).translate(FROM_PRIVATE)).expanduser())
    except RuntimeError:
        raise ValueError(NO_HOME) from None


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, BeforeValidator(_text)]
LocalPath = Annotated[Path, BeforeValidator(_home_expanded)]


class RootConfig(Section):
    """Settings of the root itself, beside the sections."""

    seed: Seed
    nonce: Text | None
    division: Literal["closed", "open"]
    gates: LocalPath
    forced: tuple[str, ...]


# Validation -----------------------------------------------------------------------------------------------------------


def build(kind: type[T], settings: object, path: str) -> T:
    """Return plain settings as a section, or as another type that pydantic validates.

    `path` is the place of the settings in the root configuration ("" for the root), or a file; messages begin with it.
    Raises UserError. Validation is that of JSON, strictly: a list is a tuple, but text is no number, 1 is not true.
    """
    adapter: TypeAdapter[T] = _adapter(cast(Any, kind))
    text = json.dumps(plain_numbers(settings), ensure_ascii=False).translate(TO_PRIVATE)
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        raise UserError(_explain(error, adapter.json_schema(), path)) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # its schema takes milliseconds to build
    return TypeAdapter(kind)


def choose(table: Mapping[str, type[T]], settings: object, path: str) -> T:
    """Return the section of a table that the setting `name` chooses; UserError as of `build`."""
    name = shown(settings.get("name") if isinstance(settings, Mapping) else settings)
    if name not in table:
        raise UserError(unknown_choice(below(path, "name"), name, table))
    return build(table[name], settings, path)


class _Spot(NamedTuple):
    """Setting that an error is about: its dotted name, what its value may be, and the names beside it."""

    setting: str
    schemas: list[Schema]
    siblings: list[str]


def _explain(error: ValidationError, root: Schema, path: str) -> str:
    """Return the first error as one line."""
    first = error.errors(include_url=False)[0]
    kind, loc, value = first["type"], first["loc"], first["input"]
    if kind == "missing" and isinstance(loc[-1], int):  # a list that is too short
        kind, loc = "too_short", loc[:-1]
    setting, schemas, siblings = _locate(root, loc, path)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{setting}: unknown setting. {suggestion(setting.rpartition('.')[2], siblings)}"
    if kind == "missing":
        return f"{setting}: missing. Expected {describe(schemas)}."
    if kind.startswith("union_tag"):
        mapping = schemas[0]["discriminator"]["mapping"]
        return unknown_choice(below(setting, "name"), value.get("name"), mapping)
    if kind == "value_error":
        problem = str(first["ctx"]["error"])
        is_section = any("properties" in schema for schema in schemas)
        return below(setting, problem) if is_section else f"{setting}={shown(value)}: {problem}"
    names = list(chain.from_iterable(map(_names, schemas)))
    hint = suggestion(value, names) if closest(value, names) else ""
    return f"{setting}={shown(value)}: expected {describe(schemas)}. {hint}".rstrip()


def _locate(root: Schema, loc: Iterable[int | str], path: str) -> _Spot:
    """Return the setting at pydantic's location of an error.

    Some parts of a location are tags of a choice or labels of a union's members, which are no settings.
    """
    spot = _Spot(path, options_of(root, root), [])
    for part in loc:
        sections = [schema for schema in spot.schemas if schema.get("type") == "object"]
        choices = [
            schema["discriminator"]["mapping"] for schema in spot.schemas if "oneOf" in schema
        ]
        if isinstance(part, int):
            items = [_item(schema, part) for schema in spot.schemas if schema["type"] == "array"]
            spot = _Spot(f"{spot.setting}[{part}]", options_of(root, *items), [])
        elif choices and part in choices[0]:
            spot = spot._replace(schemas=options_of(root, {"$ref": choices[0][part]}))
        elif sections:
            values = [_value(section, part) for section in sections]
            siblings = list(chain.from_iterable(each.get("properties", {}) for each in sections))
            spot = _Spot(below(spot.setting, part), options_of(root, *values), siblings)
    return spot


def options_of(root: Schema, *schemas: Schema) -> list[Schema]:
    """Return the schemas of which a value has one, with references and unions resolved; a choice stays."""
    options = list[Schema]()
    for schema in schemas:
        if "$ref" in schema:
            options += options_of(root, root["$defs"][schema["$ref"].rpartition("/")[2]])
        elif "anyOf" in schema:
            options += options_of(root, *schema["anyOf"])
        else:
            options.append(schema)
    return options


def _item(schema: Schema, index: int) -> Schema:
    """Return the schema of an item of an array."""
    items: list[Schema] = schema.get("prefixItems", [])
    return items[index] if index < len(items) else schema.get("items", {})


def _value(section: Schema, name: str) -> Schema:
    """Return the schema of a setting, {} where the section has none of this name."""
    others = section.get("additionalProperties")
    value: Schema = section.get("properties", {}).get(name, others)
    return value if isinstance(value, dict) else {}


# Words ----------------------------------------------------------------------------------------------------------------

_TYPES = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "null",
    "array": "a list",
    "object": "a section",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def describe(schemas: Iterable[Schema]) -> str:
    """Return in words what a value must be, from the JSON schemas of which it has one."""
    return " or ".join(_describe(schema) for schema in schemas)


def _describe(schema: Schema) -> str:
    if names := _names(schema):
        return ", ".join(names)
    if schema.get("format") == "path":
        return "a path"
    if "discriminator" in schema:
        return f"a section with the name {', '.join(schema['discriminator']['mapping'])}"
    if "properties" in schema:
        return f"a section with {', '.join(schema['properties'])}"
    words = _TYPES.get(schema.get("type", ""), "another value")
    bounds = [f"{word} {schema[name]}" for name, word in _BOUNDS.items() if name in schema]
    if "prefixItems" in schema:
        bounds.append(f"of {len(schema['prefixItems'])}")
    return " ".join([words, " and ".join(bounds)]).rstrip()


def _names(schema: Schema) -> list[str]:
    """Return the values of a schema that lists them."""
    values = schema.get("enum", [])
    if "const" in schema:
        values = [schema["const"]]
    return [shown(value) for value in values]


def closest(typed: object, known: Iterable[str]) -> str | None:
    """Return the known word that is most like the typed one, None if none is."""
    matches = difflib.get_close_matches(str(typed), list(known), n=1)
    return matches[0] if matches else None


def suggestion(typed: object, known: Iterable[str]) -> str:
    """Return the hint for an unknown word: the closest known word, or all known words."""
    words = list(known)
    meant = closest(typed, words)
    if meant is not None:
        return f"Did you mean {meant}?"
    return f"Choose one of {', '.join(words)}."


def unknown_choice(setting: str, typed: object, known: Iterable[str]) -> str:
    """Return the message for a name that is not in a table."""
    return f"{setting}={shown(typed)}: unknown choice. {suggestion(typed, known)}"


def below(path: str, key: str) -> str:
    """Return the dotted name of a setting in the section `path`."""
    return f"{path}.{key}" if path else key


def shown(value: Any, quote: Callable[[str], str] | None = None) -> str:
    """Return a value as a user types it: null, true, `[a, b]`, and a section as `{start: 0.3, every: 0.1}`.

    `quote` writes the texts in it; without, they are made `printable`.
    """
    if isinstance(value, Section):
        value = value.model_dump(by_alias=True)
    if isinstance(value, Mapping):
        pairs = [f"{name}: {shown(each, quote)}" for name, each in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(each, quote) for each in value)}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if quote and isinstance(value, str):
        return quote(value)
    return printable(str(value))


def folder_name(name: str, setting: str, place: object) -> str:
    """Return `name` if it can be a folder's on every system; UserError otherwise."""
    if not re.fullmatch(r"\w[\w.+=,@-]*", name):
        raise UserError(
            f"{setting}={printable(name)}: no name for a folder under {place}. Use letters, digits and . _ - + = , @."
        )
    if len(name.encode()) > LONGEST_NAME:
        raise UserError(f"{setting}={name[:20]}...: too long for the name of a folder. Shorten it.")
    return name


def expand_home(path: str | Path, setting: str) -> Path:
    """Return `path` with `~` and `~user` replaced; UserError where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{setting}={path}: {NO_HOME}") from None


def config_folder() -> Path:
    """Return the folder of YAML files: `cramming/conf` in an installed wheel, `conf/` at the top of a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def printable(text: str) -> str:
    """Return text as one line without control characters, halves of a surrogate pair and changes of direction.

    Other invisible format characters stay, such as joiners.
    """
    return "".join(map(_printable_sign, text))


def _printable_sign(sign: str) -> str:
    if sign.isprintable() or _is_format(sign):
        return sign
    return " " if sign.isspace() else "\ufffd"


def _is_format(sign: str) -> bool:
    turns = "\u202a" <= sign <= "\u202e" or "\u2066" <= sign <= "\u2069"
    return unicodedata.category(sign) == "Cf" and not turns


def plain_numbers(node: Any) -> Any:
    """Return the same settings with 1000 for 1e3 and 1000.0, which mean the same wherever a number is expected."""
    return json.loads(json.dumps(node, default=str), parse_float=_plain_number)


def _plain_number(digits: str) -> int | float:
    number = float(digits)
    return int(number) if number.is_integer() else number


def settings_hash(*nodes: Any) -> str:
    """Return the first 12 hex digits of the SHA-256 of the nodes' canonical JSON, for names made from settings."""
    text = json.dumps(nodes, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
