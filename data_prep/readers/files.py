"""Local files as a source: `data=text`. A new kind of file is one row of `FORMATS` and its reader."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import model_validator

from cramming.config import UserError, expand_home, file_sha256, shown
from cramming.process_pool import parallel_map
from data_prep.readers import detect, plain_text, records, wikipedia
from data_prep.readers.plain_text import (
    COMPRESSIONS,
    Cut,
    FileRange,
    TextFile,
    names_file,
)
from data_prep.readers.source import (
    ESCAPED_BYTE,
    NULL,
    Damage,
    DataConfig,
    Document,
    Package,
    Source,
    Task,
    TextField,
    field_names,
    is_saved_to_disk,
)
from data_prep.task_grid import worker_count

MOST_FILES = 1 << 10  # of a task
HASHED_HERE = 1 << 28  # bytes of files, which take about as long as the start of a process
HASHER_DIED = "a process that hashes files died (out of memory?); run the same command again"
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def _sha256(path: Path) -> str:
    with names_file(path):
        return file_sha256(path)


class Format(NamedTuple):
    """A kind of file. `read` gives the records' texts, from their fields; without it files are plain text.

    `marks` are bytes that end a record wherever they stand; without them only a whole file can be read.
    """

    suffixes: tuple[str, ...]
    read: Callable[[TextFile, Any], Iterator[str | None]] | None = None
    package: Package | None = None
    marks: tuple[bytes, ...] = ()


FORMATS: dict[str, Format] = {
    "txt": Format((".txt", ".text", ".md", "")),
    "jsonl": Format((".jsonl", ".ndjson", ".json"), records.read_jsonl, marks=(b"\n",)),
    "csv": Format((".csv",), records.read_csv),
    "tsv": Format((".tsv",), records.read_tsv),
    "parquet": Format((".parquet",), records.read_parquet),
    "arrow": Format((".arrow", ".feather"), records.read_arrow),
    "wikipedia": Format(
        (".xml",), wikipedia.read_wikipedia, Package("mwparserfromhell", "wikipedia", "a dump")
    ),
    "wet": Format((".wet", ".warc"), records.read_wet, Package("warcio", "warc", "a WET file")),
}


class TextConfig(DataConfig):
    """`data=text`."""

    paths: list[str]
    format: Literal["txt", "jsonl", "csv", "tsv", "parquet", "arrow", "wikipedia", "wet"] | None = (
        None  # null: by its name
    )
    documents: Literal["block", "line", "file", "separator", "record"] = "block"
    separator: str | None = None  # of data.documents=separator
    text_field: TextField = "text"
    damaged: Literal["refuse", "drop"] = (
        "refuse"  # empty and binary files, bytes that are not UTF-8
    )

    @model_validator(mode="after")
    def _has_its_separator(self) -> Self:
        separator = self.separator
        if (self.documents == "separator") != (separator is not None):
            raise ValueError(
                f"separator={shown(separator)}: goes with documents=separator, and only with it."
                " Set both, for example to '<|endoftext|>'."
            )
        if separator is not None and (not separator.strip() or len(separator.splitlines()) > 1):
            raise ValueError(f"separator={shown(separator)}: a separator is text within one line.")
        return self


class TextSource(Source):
    """Local files, read one after the other in the order of `paths`; a glob's matches are sorted."""

    config_class: ClassVar[type[DataConfig]] = TextConfig
    config: TextConfig
    unit = "B"

    def __init__(self, config: TextConfig) -> None:
        self.config = config
        self._cut = Cut(config.documents, config.separator, config.clean.max_characters)
        self.paths = list(dict.fromkeys(chain.from_iterable(map(_matches, config.paths))))
        if not self.paths:
            raise UserError(
                "data.paths is empty; name text files, for example data.paths='[a.txt,\"wiki/*.xz\"]'"
            )
        self.names = list(map(_shown, self.paths))
        self.formats = [config.format or detected_format(path) for path in self.paths]
        self.in_parts = "txt" in self.formats
        if config.documents == "record" and self.in_parts:
            raise UserError(
                "data.documents=record: plain text has no records. Set block, line, file or separator."
            )
        packages = (FORMATS[name].package for name in dict.fromkeys(self.formats))
        self.packages = list(filter(None, packages))
        self._sizes = [path.stat().st_size for path in self.paths]
        self.total = sum(self._sizes)

    def inventory(self) -> list[dict[str, Any]]:
        entry = {"kind": "text", "license": self.config.license}
        stats = [path.stat() for path in self.paths]
        return [
            {"name": name, **entry, "bytes": s.st_size, "mtime_ns": s.st_mtime_ns, "sha256": sha256}
            for name, s, sha256 in zip(self.names, stats, self._hashes())
        ]

    def _hashes(self) -> list[str]:
        """Return the SHA-256 of each file; of much text by the cores that will work on it."""
        is_much = sum(self._sizes) > HASHED_HERE
        processes = min(len(self.paths), worker_count(self.config.processes)) if is_much else 1
        with parallel_map(processes, HASHER_DIED) as hash_map:
            return hash_map(_sha256, self.paths)

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        """Return the first file that differs; those of the same size and time are taken for the same, others read."""
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
        """Yield documents numbered by file, from 0; a long one comes in parts."""
        before = 0
        for place, size in enumerate(self._sizes):
            reader = self._reader(place, FileRange(self.paths[place]))
            file = TextFile(self.paths[place], reader.lenient)
            for document in reader.documents_of(file):
                self.position = before + file.position
                yield document
            before += size
        self.position = before

    def tasks(self) -> Iterator[Task]:
        """Yield tasks of about equal size: a range of a file, a file that cannot be cut, or several small ones."""
        if self.config.max_documents is not None or self.config.ray:
            yield from super().tasks()  # nothing is read behind the last; a cluster has no files
            return
        small: list[FileReader] = []
        before = waiting = 0
        for place, (path, size) in enumerate(zip(self.paths, self._sizes)):
            content_bytes = plain_text.content_bytes(path, size)
            is_full = waiting + content_bytes > plain_text.RANGE_BYTES or len(small) == MOST_FILES
            if small and is_full:
                yield FilesTask(before, tuple(small))
                small, waiting = [], 0
            if content_bytes < plain_text.RANGE_BYTES:
                small.append(self._reader(place, FileRange(path)))
                waiting += content_bytes
            else:
                for file_range, position in self._ranges(place):
                    yield FilesTask(before + position, (self._reader(place, file_range),))
            before += size
        if small:
            yield FilesTask(before, tuple(small))

    def _ranges(self, place: int) -> Iterator[tuple[FileRange, int]]:
        path, kind = self.paths[place], FORMATS[self.formats[place]]
        marks = kind.marks if kind.read else self._cut.marks
        if not marks or (kind.read is None and plain_text.is_wikiextractor(path)):
            return iter([(FileRange(path), self._sizes[place])])
        return plain_text.file_ranges(path, marks)

    def _reader(self, place: int, file_range: FileRange) -> "FileReader":
        return FileReader(
            file_range,
            self.names[place],
            self.formats[place],
            field_names(self.config.text_field),
            self._cut,
            self.config.damaged == "drop",
        )


@dataclass(frozen=True)
class FileReader:
    """A file or a range of it, and how it is read; `origin` is what it is called."""

    range: FileRange
    origin: str
    format: str
    text_fields: tuple[str, ...]
    cut: Cut
    lenient: bool

    def documents(self) -> Iterator[Document]:
        """Yield the documents, numbered from the range's first one. UserError with the true place in the file."""
        path = self.range.path
        if self.range.is_whole:
            yield from self.documents_of(TextFile(path, self.lenient))
            return
        try:
            if self.range.offset and self.lenient:
                next(TextFile(path, lenient=True).lines(), None)  # a binary file is so as a whole
            blocks, begins = self.range.blocks(), self.range.offset == 0
            yield from self.documents_of(TextFile(path, self.lenient, blocks, begins))
        except plain_text.UnreadableError:
            if not self.lenient:
                self._raise_from_the_beginning()
                raise
        except UserError:
            self._raise_from_the_beginning()
            raise

    def _raise_from_the_beginning(self) -> None:
        """Raise the error of this range with its offset and line in the whole file."""
        for _ in self._texts(TextFile(self.range.path, self.lenient)):
            pass

    def documents_of(self, file: TextFile) -> Iterator[Document]:
        """Yield the documents of this opened file; of an unreadable one what is to be counted."""
        number, name = -1, self.origin
        try:
            for text, part in self._texts(file):
                number += part == 0
                damage = NULL if text is None else _damage_of(text, file)
                lost, file.lost = file.lost, Counter()
                yield Document(text or "", name, number, name, damage=damage, part=part, lost=lost)
            is_empty = number < 0 and self.range.is_whole
            unreadable = "empty_file" if is_empty and file.lenient else None
        except plain_text.UnreadableError as error:
            if not file.lenient:
                raise
            unreadable = error.reason
        if unreadable:
            damage = Damage(unreadable, self.range.path.stat().st_size)
            yield Document("", name, 0, name, damage=damage)

    def _texts(self, file: TextFile) -> Iterator[tuple[str | None, int]]:
        """Yield the records of a file, or plain text cut by `data.documents`."""
        read = FORMATS[self.format].read
        if read:
            return ((text, 0) for text in read(file, self.text_fields))
        begins = self.range.offset == 0
        return plain_text.documents_of(file, self.cut, begins)


@dataclass(frozen=True)
class FilesTask(Task):
    """A range of a file, or some whole files."""

    position: float
    files: tuple[FileReader, ...]
    relative = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """The first file and range, and how many there are."""
        first = self.files[0]
        return f"{first.origin} {first.range.name}, {len(self.files)}"

    def documents(self) -> Iterator[Document]:
        """Yield the documents, numbered by file."""
        for file in self.files:
            yield from file.documents()


def _shown(path: Path) -> str:
    """Return the path as printable text of one line, with bytes that are not UTF-8 and control characters escaped."""
    return (
        str(path)
        .encode(errors="surrogateescape")
        .decode(errors="backslashreplace")
        .translate(_CONTROLS)
    )


def format_of(path: Path) -> str | None:
    """Return the format of a file by its name, without the suffix of a compression; None for a suffix not known."""
    formats = dict[str, str]()
    for format_name, kind in FORMATS.items():
        formats |= dict.fromkeys(kind.suffixes, format_name)
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    if name.suffix[1:].isdigit():  # a numbered part: `big.jsonl.00`, `wiki.en.00.xz`
        return formats.get(name.with_suffix("").suffix.lower(), "txt")
    return formats.get(name.suffix.lower())


def detected_format(path: Path) -> str:
    """Return the format by the file's name.

    UserError for a suffix not known, and for other content where the name says plain text.
    """
    by_name = format_of(path)
    if by_name not in ("txt", None):
        return by_name
    content = detect.other_content(plain_text.head_of(path, detect.HEAD_BYTES))
    if content:
        kind, cure = content
        raise UserError(
            f"data.paths: {path} looks like {kind}, not like plain text. {cure}, or data.format=txt to"
            " take it as it is."
        )
    if by_name is None:
        raise UserError(
            f"{path}: format not known from its name; set data.format={'|'.join(FORMATS)}"
        )
    return by_name


def _damage_of(text: str, file: TextFile) -> Damage | None:
    """Return the damage of what stands in the file: a record's escape for NUL is a control character as any other."""
    if file.escaped and ESCAPED_BYTE.search(text):
        reason = "not_utf8"
    elif file.binary and "\0" in text:
        reason = "binary"
    else:
        return None
    return Damage(reason, len(text.encode(errors="replace")))  # an escaped byte becomes one again


def _matches(pattern: str) -> list[Path]:
    """Return the files that an entry of `data.paths` names.

    Existing folders in front are no pattern, whatever their name; `**` at the end stands for files too, as from Python
    3.13 on.
    """
    path = expand_home(pattern, "data.paths")
    if path.is_file():
        return [path]
    if is_saved_to_disk(path):
        raise UserError(
            f"data.paths: {path} was written by `save_to_disk`. Name the files in it, as '{path}/**/*.arrow'"
        )
    if path.is_dir():
        raise UserError(
            f"data.paths: {path} is a folder; name the files in it, as '{path}/*.txt' or '{path}/**'"
        )
    root = next(folder for folder in path.parents if folder.is_dir())
    names = str((path / "*" if path.name == "**" else path).relative_to(root))
    try:
        files = [path for path in root.glob(names) if path.is_file()]
    except ValueError:  # before Python 3.13, where `**` is a part of a name
        files = []
    if not files:
        raise UserError(
            f"data.paths: {pattern} is no file (relative to {Path.cwd()}); name files or a glob, as 'folder/*.txt'"
        )
    return sorted(files)
