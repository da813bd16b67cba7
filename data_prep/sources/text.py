"""Local files as a source: `data=text`. A new kind of file is one row of `FORMATS` and its reader."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from cramming.config import UserError, expand_home, file_sha256
from cramming.process_pool import WorkerDiedError, parallel_map, process_pool, usable_cores
from data_prep.sources import plain_text, records, wikipedia
from data_prep.sources.plain_text import (
    COMPRESSIONS,
    DOCUMENT_ENDS,
    Part,
    Stretch,
    TextFile,
    names_file,
)
from data_prep.sources.source import (
    CHUNK_CHARACTERS,
    CHUNK_DOCUMENTS,
    ESCAPED_BYTE,
    Chunk,
    Damage,
    DataConfig,
    Document,
    Documents,
    Package,
    Parts,
    Source,
    in_chunks,
)
from data_prep.workers import MOST_WORKERS, grouped

LARGE = 1 << 25  # bytes of files
UNPACKED_HERE = 1 << 20  # bytes of compressed files, for which no process is started
HASHED_HERE = 1 << 28  # bytes of files, which take about as long as the start of a process
UNPACKER_DIED = "the process that unpacks files died (out of memory?); run the same command again"
HASHER_DIED = "a process that hashes files died (out of memory?); run the same command again"
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def _sha256(path: Path) -> str:
    with names_file(path):
        return file_sha256(path)


class Format(NamedTuple):
    """A kind of file. `read` gives the records' texts, from their `field`; without it files are plain text.

    `record_end` says where in bytes the last record ends, 0 if none does; without it only a whole file can be told
    apart into its records.
    """

    suffixes: tuple[str, ...]
    read: Callable[[TextFile, str], Iterator[str]] | None = None
    package: Package | None = None
    record_end: Callable[[bytes], int] | None = None


FORMATS: dict[str, Format] = {
    "txt": Format((".txt", ".text", ".md", "")),
    "jsonl": Format(
        (".jsonl", ".ndjson", ".json"), records.read_jsonl, record_end=plain_text.end_of_line
    ),
    "csv": Format((".csv",), records.read_csv),
    "tsv": Format((".tsv",), records.read_tsv),
    "parquet": Format((".parquet",), records.read_parquet),
    "wikipedia": Format(
        (".xml",), wikipedia.read_wikipedia, Package("mwparserfromhell", "wikipedia", "a dump")
    ),
    "wet": Format((".wet", ".warc"), records.read_wet, Package("warcio", "warc", "a WET file")),
}


class TextConfig(DataConfig):
    """`data=text`."""

    paths: list[str]
    format: Literal["txt", "jsonl", "csv", "tsv", "parquet", "wikipedia", "wet"] | None = (
        None  # null: by its name
    )
    documents: Literal["block", "line", "file", "record"] = "block"
    text_field: str = "text"
    damaged: Literal["refuse", "drop"] = (
        "refuse"  # empty and binary files, bytes that are not UTF-8
    )


class TextSource(Source):
    """Local files, read one after the other in the order of `paths`; a glob's matches are sorted."""

    config_class: ClassVar[type[DataConfig]] = TextConfig
    config: TextConfig
    unit = "B"

    def __init__(self, config: TextConfig) -> None:
        self.config = config
        self.paths = list(
            dict.fromkeys(path for pattern in config.paths for path in _matches(pattern))
        )
        if not self.paths:
            raise UserError(
                "data.paths is empty; name text files, for example data.paths='[a.txt,\"wiki/*.xz\"]'"
            )
        self.names = list(map(_shown, self.paths))
        self.formats = [config.format or format_of(path) for path in self.paths]
        self.in_parts = "txt" in self.formats
        if config.documents == "record" and self.in_parts:
            raise UserError(
                "data.documents=record: plain text has no records; set block, line or file"
            )
        self.packages = [package for name in self.formats if (package := FORMATS[name].package)]
        self._sizes = [path.stat().st_size for path in self.paths]
        self.total = sum(self._sizes)
        self.large = self.total >= LARGE and config.max_documents is None

    def inventory(self) -> list[dict[str, Any]]:
        entry = {"kind": "text", "license": self.config.license}
        stats = [path.stat() for path in self.paths]
        return [
            {"name": name, **entry, "bytes": s.st_size, "mtime_ns": s.st_mtime_ns, "sha256": sha256}
            for name, s, sha256 in zip(self.names, stats, self._hashes())
        ]

    def _hashes(self) -> list[str]:
        """SHA-256 of each file; of much text by the cores that will work on it."""
        processes = min(len(self.paths), self.config.processes or min(usable_cores(), MOST_WORKERS))
        with parallel_map(
            processes if sum(self._sizes) > HASHED_HERE else 1, HASHER_DIED
        ) as hash_map:
            return hash_map(_sha256, self.paths)

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        """Files of the same size and time are taken for the same, others are read."""
        then = {entry["name"]: entry for entry in inventory}
        if different := then.keys() ^ set(self.names):
            return ", ".join(sorted(different))
        for name, path in zip(self.names, self.paths):
            if not path.is_file():
                return name
            old, now = then[name], path.stat()
            same_time = now.st_size == old["bytes"] and now.st_mtime_ns == old["mtime_ns"]
            if not same_time and (now.st_size != old["bytes"] or _sha256(path) != old["sha256"]):
                return name
        return None

    def documents(self) -> Iterator[Document]:
        """Documents are numbered by file, from 0; a long one comes in parts."""
        before = 0
        for place, size in enumerate(self._sizes):
            yield from self.documents_of(place, before)
            before += size
        self.position = before

    def documents_of(self, place: int, before: int) -> Iterator[Document]:
        """Those of one file, by its place in `paths`; files of so many bytes were read `before` it."""
        name, number, self.position = self.names[place], -1, before
        file = TextFile(self.paths[place], lenient=self.config.damaged == "drop")
        try:
            for text, part in self._reader(place)(file):
                number += part == 0
                self.position = before + file.position
                yield Document(
                    text, _name(name, number, part), name, damage=_damage_of(text, file), part=part
                )
            unreadable = "empty_file" if number < 0 and file.lenient else None
        except plain_text.UnreadableError as error:
            if not file.lenient:
                raise
            unreadable = error.reason
        if unreadable:
            yield Document("", name, name, damage=Damage(unreadable, self._sizes[place]))

    def _reader(self, place: int) -> Callable[[TextFile], Iterator[Part]]:
        """What reads this file, here or elsewhere: of the settings it takes no more than it needs."""
        config, kind = self.config, self.formats[place]
        return partial(
            texts_of,
            kind=kind,
            field=config.text_field,
            cut=config.documents,
            longest=config.clean.max_characters,
        )

    def chunks(self) -> Iterator[Chunk]:
        """Stretches of the files, which workers read; files of other formats whole, up to `LONGEST_STRETCH`."""
        if self.config.max_documents is not None:  # nothing is read behind the last
            return super().chunks()
        small_files = groupby(self._stretches(), lambda found: found[1].begins and found[1].ends)
        return (
            _Stretches(self, group)
            for small, found in small_files
            for group in grouped(
                found, CHUNK_DOCUMENTS, _content_bytes, CHUNK_CHARACTERS if small else 0
            )
        )

    def _stretches(self) -> Iterator[tuple["_FileState", Stretch]]:
        """All files' content. A file's stretches end with an empty one where it has to be read in another way.

        What is compressed is unpacked by a process of its own: of .xz that takes ten times as long as all else here.
        """
        packed = [path.suffix.lower() in COMPRESSIONS for path in self.paths]
        much = self.config.processes != 1 and sum(np.array(self._sizes)[packed]) > UNPACKED_HERE
        before = 0
        with process_pool(1, UNPACKER_DIED) if much else nullcontext() as unpacker:
            for place, (path, name, size) in enumerate(zip(self.paths, self.formats, self._sizes)):
                state, begins, read = _FileState(place, before), True, self._reader(place)
                plain = FORMATS[name].read is None
                end = (
                    DOCUMENT_ENDS.get(self.config.documents) if plain else FORMATS[name].record_end
                )
                elsewhere = packed[place] and unpacker
                blocks = (
                    plain_text.unpacked(path, elsewhere)
                    if elsewhere
                    else plain_text.blocks_of(path)
                )
                try:
                    for data, ends, position in plain_text.stretches(path, blocks, end):
                        self.position = before + position
                        yield state, Stretch(path, data, begins, ends, plain, read)
                        begins = False
                    if begins:
                        raise UserError(f"{path}: empty file")
                except WorkerDiedError:
                    raise
                except (
                    UserError
                ):  # what is wrong is said, or counted, when what stands before it was given
                    yield state, Stretch(path, b"", begins, True, plain, read)
                before += size
        self.position = before


@dataclass(eq=False)
class _FileState:
    """How far a file's documents have been given."""

    place: int  # in `TextSource.paths`
    before: int  # bytes of the files in front of it
    number: int = -1  # of the last document
    given: int = 0  # documents, a long one's parts counted singly
    left: bool = False  # to `_Stretches.again`


def _content_bytes(found: tuple[_FileState, Stretch]) -> int:
    return len(found[1].data)


class _Stretches(Chunk):
    """A stretch of a file, or several small files."""

    def __init__(self, source: TextSource, stretches: list[tuple[_FileState, Stretch]]) -> None:
        self._source, self._files = source, [state for state, _ in stretches]
        self.task = [stretch for _, stretch in stretches]

    @property
    def void(self) -> bool:  # type: ignore[override]
        return self._files[0].left  # of several files each stands in this chunk alone

    def documents(self, parts: Parts) -> Documents:
        names = [self._source.names[file.place] for file in self._files]
        count_S, begins_D = np.array(parts.documents_S), parts.part_D == 0
        begun_D, ends_S = np.cumsum(begins_D), np.cumsum(count_S)
        begun_S = np.concatenate([[0], begun_D])[ends_S - count_S]  # before each stretch
        last_S = np.array([file.number for file in self._files])
        number_D = begun_D + np.repeat(last_S - begun_S, count_S)
        source_D = np.repeat(np.arange(len(names)), count_S)
        for file, count, begun in zip(
            self._files, parts.documents_S, np.diff(begun_S, append=begun_D[-1:].sum())
        ):
            file.number += int(begun)
            file.given += count
        return Documents(
            parts.part_D,
            source_D,
            names,
            lambda place: _name(names[source_D[place]], number_D[place], parts.part_D[place]),
        )

    def again(self) -> Iterator[Chunk]:
        """Their files in this process, from the first document on that was not given."""
        ahead = self._source.position
        for file in self._files:
            file.left = True
            yield from in_chunks(
                islice(self._source.documents_of(file.place, file.before), file.given, None)
            )
        self._source.position = ahead


def texts_of(file: TextFile, kind: str, field: str, cut: str, longest: int) -> Iterator[Part]:
    """The documents of a file of this kind: its records, or plain text cut by `data.documents`."""
    if read := FORMATS[kind].read:
        return ((text, 0) for text in read(file, field))
    return plain_text.documents_of(file.lines(), cut, longest)


def _shown(path: Path) -> str:
    """The path as text of one line that can be written: bytes that are not UTF-8 and control characters are escaped."""
    return (
        str(path)
        .encode(errors="surrogateescape")
        .decode(errors="backslashreplace")
        .translate(_CONTROLS)
    )


def _name(file: str, number: int, part: int) -> str:
    return f"{file}:{number} from its part {part + 1} on" if part else f"{file}:{number}"


def format_of(path: Path) -> str:
    """The format of a file by its name, without the suffix of a compression. UserError for a suffix not known."""
    formats = {suffix: name for name, kind in FORMATS.items() for suffix in kind.suffixes}
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    if name.suffix[1:].isdigit():  # a numbered part: `big.jsonl.00`, `wiki.en.00.xz`
        return formats.get(name.with_suffix("").suffix.lower(), "txt")
    if name.suffix.lower() not in formats:
        raise UserError(
            f"{path}: format not known from its name; set data.format={'|'.join(FORMATS)}"
        )
    return formats[name.suffix.lower()]


def _damage_of(text: str, file: TextFile) -> Damage | None:
    """Only what stands in the file: a record's own escape for NUL is a control character as any other."""
    broken, binary = file.escaped and ESCAPED_BYTE.search(text), file.binary and "\0" in text
    reason = "not_utf8" if broken else "binary" if binary else None
    return (
        Damage(reason, len(text.encode(errors="replace"))) if reason else None
    )  # an escaped byte becomes one again


def _matches(pattern: str) -> list[Path]:
    """The files that an entry of `data.paths` names. Folders in front that are there are no pattern, whatever their
    name; `**` at the end stands for files too, as from Python 3.13 on."""
    path = expand_home(pattern, "data.paths")
    if path.is_file():
        return [path]
    if path.is_dir():
        raise UserError(
            f"data.paths: {path} is a folder; name the files in it, as '{path}/*.txt' or '{path}/**'"
        )
    root = next(folder for folder in path.parents if folder.is_dir())
    names = str((path / "*" if path.name == "**" else path).relative_to(root))
    try:
        found = [path for path in root.glob(names) if path.is_file()]
    except ValueError:  # before Python 3.13, where `**` is a part of a name
        found = []
    if not found:
        raise UserError(
            f"data.paths: {pattern} is no file (relative to {Path.cwd()}); name files or a glob, as 'folder/*.txt'"
        )
    return sorted(found)
