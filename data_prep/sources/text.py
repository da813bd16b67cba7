"""Local files as a source: `data=text`. A new kind of file is one row of `FORMATS` and its reader."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from cramming.config import UserError, expand_home, file_sha256
from data_prep.sources import plain_text, records, wikipedia
from data_prep.sources.plain_text import COMPRESSIONS, Part, TextFile
from data_prep.sources.source import ESCAPED_BYTE, Damage, DataConfig, Document, Package, Source


class Format(NamedTuple):
    """A kind of file. `read` gives the records' texts, from their `field`; without it files are plain text."""

    suffixes: tuple[str, ...]
    read: Callable[[TextFile, str], Iterator[str]] | None = None
    package: Package | None = None


FORMATS: dict[str, Format] = {
    "txt": Format((".txt", ".text", ".md", "")),
    "jsonl": Format((".jsonl", ".ndjson", ".json"), records.read_jsonl),
    "csv": Format((".csv",), records.read_csv),
    "tsv": Format((".tsv",), records.read_tsv),
    "parquet": Format((".parquet",), records.read_parquet),
    "wikipedia": Format((".xml",), wikipedia.read_wikipedia, Package("mwparserfromhell", "wikipedia", "a dump")),
    "wet": Format((".wet", ".warc"), records.read_wet, Package("warcio", "warc", "a WET file")),
}


@dataclass(frozen=True, kw_only=True)
class TextConfig(DataConfig):
    """`data=text`."""

    paths: list[str]
    format: Literal["txt", "jsonl", "csv", "tsv", "parquet", "wikipedia", "wet"] | None = None  # null: by its name
    documents: Literal["block", "line", "file", "record"] = "block"
    text_field: str = "text"
    damaged: Literal["refuse", "drop"] = "refuse"  # empty and binary files, bytes that are not UTF-8


class TextSource(Source):
    """Local files, read one after the other in the order of `paths`; a glob's matches are sorted."""

    config_class: ClassVar[type[DataConfig]] = TextConfig
    config: TextConfig
    unit = "B"

    def __init__(self, config: TextConfig) -> None:
        self.config = config
        self.paths = list(dict.fromkeys(path for pattern in config.paths for path in _matches(pattern)))
        if not self.paths:
            raise UserError("data.paths is empty; name text files, for example data.paths='[a.txt,\"wiki/*.xz\"]'")
        self.formats = [config.format or format_of(path) for path in self.paths]
        self.in_parts = "txt" in self.formats
        if config.documents == "record" and self.in_parts:
            raise UserError("data.documents=record: plain text has no records; set block, line or file")
        self.packages = [package for name in self.formats if (package := FORMATS[name].package)]
        self._sizes = [path.stat().st_size for path in self.paths]
        self.total = sum(self._sizes)

    def inventory(self) -> list[dict[str, Any]]:
        entry = {"kind": "text", "license": self.config.license}
        stats = [path.stat() for path in self.paths]
        return [
            {"name": str(path), **entry, "bytes": s.st_size, "mtime_ns": s.st_mtime_ns, "sha256": file_sha256(path)}
            for path, s in zip(self.paths, stats)
        ]

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        """Files of the same size and time are taken for the same, others are read."""
        then = {entry["name"]: entry for entry in inventory}
        if different := then.keys() ^ set(map(str, self.paths)):
            return ", ".join(sorted(different))
        for path in self.paths:
            if not path.is_file():
                return str(path)
            old, now = then[str(path)], path.stat()
            same_time = now.st_size == old["bytes"] and now.st_mtime_ns == old["mtime_ns"]
            if not same_time and (now.st_size != old["bytes"] or file_sha256(path) != old["sha256"]):
                return str(path)
        return None

    def documents(self) -> Iterator[Document]:
        """Documents are numbered by file, from 0; a long one comes in parts."""
        self.position = before = 0
        for path, name, size in zip(self.paths, self.formats, self._sizes):
            file = TextFile(path, lenient=self.config.damaged == "drop")
            number = -1
            try:
                for text, part in self._texts(file, FORMATS[name]):
                    number += part == 0
                    self.position = before + file.position
                    place = f"{path}:{number} from its part {part + 1} on" if part else f"{path}:{number}"
                    yield Document(text, place, str(path), damage=_damage_of(text, file), part=part)
                unreadable = "empty_file" if number < 0 and file.lenient else None
            except plain_text.UnreadableError as error:
                if not file.lenient:
                    raise
                unreadable = error.reason
            if unreadable:
                yield Document("", str(path), str(path), damage=Damage(unreadable, size))
            before += size
        self.position = before

    def _texts(self, file: TextFile, kind: Format) -> Iterator[Part]:
        if kind.read:
            return ((text, 0) for text in kind.read(file, self.config.text_field))
        return plain_text.documents_of(file.lines(), self.config.documents, self.config.clean.max_characters)


def format_of(path: Path) -> str:
    """The format of a file by its name, without the suffix of a compression. UserError for a suffix not known."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    suffix = "" if name.suffix[1:].isdigit() else name.suffix.lower()  # `wiki_core.00.xz`: a numbered part
    for format_name, kind in FORMATS.items():
        if suffix in kind.suffixes:
            return format_name
    raise UserError(f"{path}: format not known from its name; set data.format={'|'.join(FORMATS)}")


def _damage_of(text: str, file: TextFile) -> Damage | None:
    """Only what stands in the file: a record's own escape for NUL is a control character as any other."""
    broken, binary = file.escaped and ESCAPED_BYTE.search(text), file.binary and "\0" in text
    reason = "not_utf8" if broken else "binary" if binary else None
    return Damage(reason, len(text.encode(errors="replace"))) if reason else None  # an escaped byte becomes one again


def _matches(pattern: str) -> list[Path]:
    """The files that an entry of `data.paths` names."""
    path = expand_home(pattern, "data.paths")
    if path.is_file():
        return [path]
    root = Path(path.anchor) if path.is_absolute() else Path()
    found = [path for path in root.glob(str(path.relative_to(root))) if path.is_file()] if path.name else []
    if not found:
        raise UserError(
            f"data.paths: {pattern} is no file (relative to {Path.cwd()}); name files or a glob, as 'folder/*.txt'"
        )
    return sorted(found)
