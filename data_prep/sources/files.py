"""Reading local files as streams: plain or compressed text, and the record formats.

Every reader is a generator that holds about one block in memory, whatever the file's size, and every complaint names
the file and the place in it: a byte offset and line for text that is not UTF-8, a line for a bad record.
"""

import csv
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, dropwhile, groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from cramming.config import UserError
from data_prep.sources import compressed
from data_prep.sources.compressed import COMPRESSIONS

BLOCK_BYTES = 1 << 20
LONGEST_TEXT_LINE = 1 << 24  # a longer line of plain text is handed on in parts
LONGEST_RECORD = 1 << 29  # bytes; a longer line of a record file cannot be meant
LONGEST_FIELD = 1 << 26  # characters; nor a longer field of CSV, which takes 4 bytes for each while it is read


SUFFIXES = {
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
    "": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".xml": "wikipedia",
    ".wet": "wet",
    ".warc": "wet",
}


def format_of(path: Path) -> str:
    """The format of a file by its name, without the suffix of a compression. UserError for a suffix not known."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    suffix = name.suffix.lower()
    # `wiki_core.00.xz`: a numbered part, not a format.
    if suffix[1:].isdigit():
        suffix = ""
    if suffix not in SUFFIXES:
        known = " ".join(filter(None, SUFFIXES))
        raise UserError(
            f"{path}: format not known from its name ({known}, each also with {' '.join(COMPRESSIONS)});"
            " set data.format=txt|jsonl|csv|tsv|parquet|wikipedia|wet"
        )
    return SUFFIXES[suffix]


Part = tuple[str, int]  # a text, and which part of its document it is, from 0


class UnreadableError(UserError):
    """A file that is not text at all: found before anything of it was handed on."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class OpenFile:
    """A file being read: `position` counts the bytes of the file itself, before decompression, for the progress bar.

    `lenient`: bytes that are not UTF-8 become lone surrogates (Python's surrogateescape) instead of an error, NUL bytes
    behind the first block stay; `escaped` and `binary` tell that there were any.
    """

    def __init__(self, path: Path, lenient: bool = False) -> None:
        self.path, self.lenient, self.escaped, self.binary = path, lenient, False, False
        try:
            self.raw: BinaryIO = path.open("rb")
        except FileNotFoundError:
            raise UserError(f"{path}: was there when the preparation began, and is gone; put it back") from None

    @property
    def position(self) -> int:
        """Bytes read so far; 0 when the file is closed."""
        return 0 if self.raw.closed else self.raw.tell()

    @contextmanager
    def decompressed(self) -> Iterator[BinaryIO]:
        """The file's content. A damaged or cut-off archive becomes a UserError that names the file.

        What the system says (an unreachable disk, no room for unpacking) is no damage, and stays an OSError.
        """
        kind = self.path.suffix.lower()
        try:
            yield COMPRESSIONS.get(kind, lambda handle: handle)(self.raw)
        except compressed.errors(kind) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            advice = compressed.advice(error, self.path)
            raise UserError(f"{self.path}: cannot be read as {kind or 'a file'}: {error}; {advice}") from None
        finally:
            self.raw.close()


def read_lines(file: OpenFile, longest: int = LONGEST_TEXT_LINE, records: bool = False) -> Iterator[str]:
    """Lines without their ends. A line above `longest` bytes comes in parts, cut at a space where there is one.

    Line ends are those of Unix, Windows and the old Mac (CR alone). UserError: an empty file, a NUL byte (binary data
    or UTF-16), bytes that are not UTF-8; where lines are `records`, one above `longest`.
    """
    offset, line = 0, 1
    for block in _whole_lines(file, longest, records):
        yield from _decode(file, block, offset, line)
        offset += len(block)
        line += _count_lines(block)
    if offset == 0:
        raise UnreadableError("empty_file", f"{file.path}: empty file{_OR_DROP}")


def _whole_lines(file: OpenFile, longest: int, records: bool) -> Iterator[bytes]:
    """The content in blocks of whole lines, and of parts of lines above `longest` bytes."""
    begun: list[bytes] = []  # the line whose end is not read yet; joined once, or a long one would be copied each time
    size = total = 0
    with file.decompressed() as handle:
        while block := handle.read(BLOCK_BYTES):
            read = len(block)
            _look_for_binary(file, block, total)
            if total == 0:
                block = block.removeprefix(b"\xef\xbb\xbf")
            # A CR that is the last byte may be half of a CR LF.
            end = block.rfind(b"\n") + 1 or block.rfind(b"\r", 0, -1) + 1
            if end or size + len(block) > longest:
                if records and not end:
                    raise UserError(
                        f"{file.path}: the record at byte {total - size} is longer than {longest >> 20} MiB; is a line"
                        " end missing? each record is a line"
                    )
                block = b"".join([*begun, block])
                end = size + end if end else _cut(block)
                yield block[:end]
                begun, size, block = [], 0, block[end:]
            begun.append(block)
            size += len(block)
            total += read
    if size:
        yield b"".join(begun)


_OR_DROP = "; data.damaged=drop leaves such things out and counts them"


def _look_for_binary(file: OpenFile, block: bytes, offset: int) -> None:
    place = block.find(b"\0")
    if place < 0:
        return
    if file.lenient and offset:  # documents were handed on: only those with such bytes are left out
        file.binary = True
        return
    message = f"{file.path}: binary file (a NUL byte at offset {offset + place}); text must be UTF-8{_OR_DROP}"
    raise UnreadableError("binary_file", message)


def _count_lines(data: bytes) -> int:
    lines = data.count(b"\n")
    return lines + data.count(b"\r") - data.count(b"\r\n") if b"\r" in data else lines


def _cut(block: bytes) -> int:
    """Where to cut one overlong line: behind its last space, else at the last character's first byte."""
    end = block.rfind(b" ") + 1
    if end:
        return end
    end = len(block) - 1
    while end > 1 and block[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _decode(file: OpenFile, block: bytes, offset: int, line: int) -> Iterator[str]:
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        if not file.lenient:
            line += _count_lines(block[: error.start])
            raise UserError(
                f"{file.path}: not UTF-8 at byte {offset + error.start} (line {line}); convert it, for example"
                f" `iconv -f latin1 -t utf-8 {file.path.name}`{_OR_DROP}"
            ) from None
        text, file.escaped = block.decode("utf-8", "surrogateescape"), True
    if "\r" in text:  # CR CR LF is what a program makes that takes CR LF for LF
        text = text.replace("\r\r\n", "\n").replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return iter(lines)


def _read_jsonl(file: OpenFile, field: str) -> Iterator[str]:
    for number, line in enumerate(read_lines(file, LONGEST_RECORD, records=True), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{file.path}:{number}: not a JSON object on one line ({error}){_as_lines(file.path, line)}"
            ) from None
        if not isinstance(record, dict):
            found = type(record).__name__
            raise UserError(f"{file.path}:{number}: expected a JSON object, found {found}{_as_lines(file.path, line)}")
        if field not in record:
            raise missing_field(f"{file.path}:{number}", field, record)
        yield text_value(f"{file.path}:{number}", field, record[field])


def _as_lines(path: Path, line: str) -> str:
    """A hint where a file is JSON, but not one object per line: an array, or objects over many lines."""
    first = line.lstrip()
    if not first.startswith("[") and first.rstrip() != "{":
        return ""
    what, each = ("a JSON array", ".[]") if first.startswith("[") else ("JSON over many lines", ".")
    name = path.name if path.suffix.lower() not in COMPRESSIONS else path.stem
    return f"; {what} is turned into such lines by `jq -c '{each}' {name} > {Path(name).stem}.jsonl`"


def _read_delimited(delimiter: str, quoting: Any) -> Callable[[OpenFile, str], Iterator[str]]:
    def read(file: OpenFile, field: str) -> Iterator[str]:
        csv.field_size_limit(LONGEST_FIELD)
        lines = (line + "\n" for line in read_lines(file, LONGEST_RECORD, records=True))
        rows = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
        begin = 1  # the line where the row begins that is being read
        try:
            header = next(rows)
            begin = rows.line_num + 1
            _require_one(file.path, field, header)
            column = header.index(field)
            for row in rows:
                if len(row) != len(header) and row:
                    raise UserError(f"{file.path}:{rows.line_num}: {len(row)} columns, the header has {len(header)}")
                if row:
                    yield row[column]
                begin = rows.line_num + 1
        except csv.Error as error:
            open_quote = (
                f" (its row begins in line {begin}: is a quote left open there?)" if rows.line_num > begin else ""
            )
            raise UserError(f"{file.path}:{rows.line_num}: {error}{open_quote}") from None

    return read


def _read_parquet(file: OpenFile, field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    with file.decompressed() as handle, tempfile.TemporaryFile() as spool:
        seekable: Any = handle
        if handle is not file.raw:  # parquet needs to seek: unpack to an anonymous file that vanishes by itself
            shutil.copyfileobj(handle, spool)
            seekable = spool
        try:
            table = parquet.ParquetFile(seekable, page_checksum_verification=True)
            _require_one(file.path, field, table.schema_arrow.names)
            row = 0
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                for value in _column_values(file, batch.column(0), field, row):
                    row += 1
                    yield text_value(f"{file.path} row {row}", field, value)
        except pyarrow.ArrowException as error:
            words = str(error).splitlines()[0]
            raise UserError(f"{file.path}: not a readable parquet file: {words}; is it whole? get it anew") from None


def _column_values(file: OpenFile, column: Any, field: str, before: int) -> list[Any]:
    """The column's values. Text in it need not be UTF-8: writers do not check. `before`: rows in front of them."""
    import pyarrow

    try:
        return cast(list[Any], column.to_pylist())
    except UnicodeDecodeError:
        values = column.cast(pyarrow.large_binary()).to_pylist()
    return [
        None if value is None else decoded(file, value, f"row {row}: field {field!r}")
        for row, value in enumerate(values, before + 1)
    ]


def decoded(file: OpenFile, value: bytes, place: str) -> str:
    """The text of one record's bytes, which stand at this place of the file. UserError: not UTF-8, as in plain text."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        if not file.lenient:
            raise UserError(f"{file.path} {place} is not UTF-8 at byte {error.start}{_OR_DROP}") from None
        file.escaped = True
        return value.decode("utf-8", "surrogateescape")


def _require_one(path: Path, field: str, columns: list[str]) -> None:
    if field not in columns:
        raise missing_field(str(path), field, columns)
    if (count := columns.count(field)) > 1:
        raise UserError(f"{path}: {count} columns are named {field!r}; rename all but the one with the text")


def missing_field(place: str, field: str, present: Any) -> UserError:
    """The complaint about a record without `field`, naming the fields it has."""
    return UserError(f"{place}: no field {field!r}; there are: {', '.join(map(str, present))} (set data.text_field)")


def text_value(place: str, field: str, value: Any) -> str:
    """A record's text; null counts as empty text, which the filters remove and count."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{place}: field {field!r} holds {type(value).__name__}, expected text (set data.text_field)")
    return value


RECORD_READERS: dict[str, Callable[[OpenFile, str], Iterator[str]]] = {
    "jsonl": _read_jsonl,
    "csv": _read_delimited(",", csv.QUOTE_MINIMAL),
    "tsv": _read_delimited("\t", csv.QUOTE_NONE),
    "parquet": _read_parquet,
}


def _by_line(lines: Iterator[str], longest: int) -> Iterator[Part]:
    return ((line, 0) for line in lines if line.strip())


def _by_block(lines: Iterator[str], longest: int) -> Iterator[Part]:
    return _in_parts(lines, longest, blank_lines_end=True)


def _by_file(lines: Iterator[str], longest: int) -> Iterator[Part]:
    return _in_parts(lines, longest, blank_lines_end=False)


def _in_parts(lines: Iterator[str], longest: int, blank_lines_end: bool) -> Iterator[Part]:
    """A part ends before the line that would take it above `longest`, unless it is not yet half as long."""
    text, size, part = io.StringIO(), 0, 0
    for line in lines:
        ends = blank_lines_end and not line.strip()
        if size and (ends or (size + len(line) >= longest and 2 * size >= longest)):
            yield text.getvalue(), part
            text, size, part = io.StringIO(), 0, part + 1
        if ends:
            part = 0
        else:
            size += text.write(line) + text.write("\n")
    if size:
        yield text.getvalue(), part


_EXTRACTED = re.compile(r'<doc id="[^"]+" .*>$')  # in front of each article of WikiExtractor's


def documents_of(lines: Iterator[str], kind: str, longest: int) -> Iterator[Part]:
    """The documents of plain text: by `TEXT_DOCUMENTS`, or, in files of WikiExtractor's, the articles, whatever `kind`.

    Each at most about `longest` characters; a longer one comes in parts.
    """
    lines = dropwhile(lambda line: not line.strip(), lines)
    first = list(islice(lines, 1))
    if first and _EXTRACTED.match(first[0]):
        return _by_article(lines, longest)
    return TEXT_DOCUMENTS[kind](chain(first, lines), longest)


def _by_article(lines: Iterator[str], longest: int) -> Iterator[Part]:
    for inside, article in groupby(lines, lambda line: line != "</doc>" and not _EXTRACTED.match(line)):
        if inside:
            yield from (part for part in _by_file(article, longest) if part[0].strip())


# How a plain text file is cut into documents. Each yields parts of at most about `longest` characters.
TEXT_DOCUMENTS: dict[str, Callable[[Iterator[str], int], Iterator[Part]]] = {
    "line": _by_line,
    "block": _by_block,
    "file": _by_file,
}
