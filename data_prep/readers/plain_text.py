"""Local files as streams of lines, plain or compressed, and how lines are cut into documents.

About one block is in memory, whatever the file's size. A complaint names the file and the place in it.
"""

import bz2
import gzip
import html
import io
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, dropwhile, groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import zstandard

from cramming.config import UserError
from data_prep.readers.detect import HEAD_BYTES, wide_encoding

BLOCK_BYTES = 1 << 20
RANGE_BYTES = 1 << 22  # unpacked, of a file that is cut into tasks
LONGEST_RANGE_BYTES = 1 << 26
USUAL_RATIO = 3  # of text to what a compressed file takes
PACKED_BYTES = 1 << 13  # of a .zst file that are unpacked together, perhaps to very many
LONGEST_WINDOW_BYTES = 1 << 31  # of a .zst file, the longest that `zstd` makes
# Bytes; a longer line of plain text is handed on in parts. They are short enough to be documents: texts above
# `clean.max_characters` would be in memory several times before they are cut.
LONGEST_TEXT_LINE = 3_000_000
OR_DROP = "; data.damaged=drop skips and counts damaged text"
MANY_NULS = 1e-3  # of the bytes: of binary data; random bytes have one in 256

Part = tuple[str, int]  # a text, and which part of its document it is, from 0


class ZstdFrame:
    """A frame of Zstandard behind the interface of `lzma.LZMADecompressor`.

    Memory: the frame's window, up to 2 GiB (`zstd --long=31`).
    """

    def __init__(self) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW_BYTES)
        self._frame = decompressor.decompressobj()
        self._unpacked = memoryview(b"")

    @property
    def needs_input(self) -> bool:
        """True if everything that was unpacked has been read."""
        return not self._unpacked

    @property
    def eof(self) -> bool:
        """True if the frame has been read to its end."""
        return self._frame.eof and not self._unpacked

    @property
    def unused_data(self) -> bytes:
        """Input behind the end of the frame."""
        return self._frame.unused_data

    def decompress(self, packed: bytes, longest: int) -> memoryview:
        """Return at most `longest` bytes."""
        if packed:
            self._unpacked = memoryview(self._frame.decompress(packed))
        data, self._unpacked = self._unpacked[:longest], self._unpacked[longest:]
        return data


class Streams(io.RawIOBase):
    """The streams of an archive one after the other, some perhaps empty.

    Python's own readers of .xz and .bz2 take a stream whose header is damaged, and whatever else follows the first one,
    for the end of the file. Each stream gets `packed_bytes` of the file at a time.
    """

    def __init__(
        self,
        handle: BinaryIO,
        begin: Callable[[], Any],
        padding: bytes = b"",
        packed_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.handle, self.begin, self.padding, self.stream = handle, begin, padding, begin()
        self.packed_bytes = packed_bytes

    def readable(self) -> bool:
        """Return True, as io.RawIOBase asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; EOFError where the file was cut off, else the decompressor's error."""
        data: bytes | memoryview = b""
        while not data:
            packed = b""
            if self.stream.eof:
                packed = self.stream.unused_data.lstrip(self.padding)
                while not packed:
                    if not (block := self.handle.read(self.packed_bytes)):
                        return 0
                    packed = block.lstrip(self.padding)
                self.stream = self.begin()
            elif self.stream.needs_input:
                packed = self.handle.read(self.packed_bytes)
                if not packed:
                    raise EOFError("it ends within a stream")
            data = self.stream.decompress(packed, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _streams(*arguments: Any) -> Callable[[BinaryIO], Any]:
    return lambda handle: io.BufferedReader(Streams(handle, *arguments), BLOCK_BYTES)


COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda handle: gzip.GzipFile(fileobj=handle),
    ".xz": _streams(lzma.LZMADecompressor, b"\0"),
    ".bz2": _streams(bz2.BZ2Decompressor),
    ".zst": _streams(ZstdFrame, b"", PACKED_BYTES),
}
UNPACKERS = {".gz": "gzip -dc", ".xz": "xz -dc", ".bz2": "bzip2 -dc", ".zst": "zstd -dc"}


@contextmanager
def names_file(path: Path) -> Iterator[None]:
    """Add the file's name to errors of the disk; the system has it only in those of opening a file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


class UnreadableError(UserError):
    """A file that is not text at all: found before anything of it was handed on."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message + OR_DROP)
        self.reason = reason


class TextFile:
    """A file being read.

    `lenient`: bytes that are not UTF-8 become lone surrogates (Python's surrogateescape) instead of an error, NUL bytes
    stay unless they are many in the first block; `escaped` and `binary` tell that there were any. `blocks`: the part of
    the file's content to read, unpacked already; `begins`: with the file's first byte. `lost` counts what its format
    has that is no text, by name, since a document was handed on.
    """

    def __init__(
        self,
        path: Path,
        lenient: bool = False,
        blocks: Iterator[bytes] | None = None,
        begins: bool = True,
    ) -> None:
        self.path, self.lenient, self.escaped, self.binary = path, lenient, False, False
        self.raw: BinaryIO = io.BytesIO() if blocks else path.open("rb")
        self._blocks, self.begins = blocks, begins
        self.lost = Counter[str]()

    @property
    def position(self) -> int:
        """Bytes of the file itself, before decompression, read so far; 0 when it is closed."""
        return 0 if self.raw.closed else self.raw.tell()

    @contextmanager
    def decompressed(self) -> Iterator[BinaryIO]:
        """Open the content. UserError for a damaged or cut-off archive; an error of the disk stays an OSError."""
        is_empty = not self.path.stat().st_size  # whatever its name
        suffix = "" if is_empty else self.path.suffix.lower()
        try:
            with names_file(self.path):
                yield COMPRESSIONS.get(suffix, lambda handle: handle)(self.raw)
        except (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            kind = suffix or "a file"
            raise UserError(
                f"{self.path}: cannot be read as {kind}: {error}; is it whole? get it anew"
            ) from None
        finally:
            self.raw.close()

    def decode(self, data: bytes, place: Callable[[int], str]) -> str:
        """Return bytes as text. `place` says where in the file the index of a byte is that is not UTF-8."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            if not self.lenient:
                raise UserError(f"{self.path}{place(error.start)}{OR_DROP}") from None
            self.escaped = True
            return data.decode("utf-8", "surrogateescape")

    def lines(self, longest: int = LONGEST_TEXT_LINE, separator: str = " ") -> Iterator[str]:
        """Yield lines without their ends, which are those of Unix, Windows and the old Mac (CR alone).

        A line above `longest` bytes comes in parts, cut behind a separator where there is one.

        UserError: an empty file, a NUL byte (binary data), UTF-16, bytes that are not UTF-8.
        """
        offset, line = 0, 1
        for block in self._whole_lines(longest, separator.encode()):

            def place(
                start: int, block: bytes = block, offset: int = offset, line: int = line
            ) -> str:
                return (
                    f": not UTF-8 at byte {offset + start} (line {line + _count_lines(block[:start])}); convert it:"
                    f" `{self._conversion_from('<its encoding>')}`, for example latin1, shift_jis, gb18030"
                )

            text = self.decode(block, place)
            if "\r" in text:  # CR CR LF is what a program makes that takes CR LF for LF
                text = text.replace("\r\r\n", "\n").replace("\r\n", "\n").replace("\r", "\n")
            yield from text.removesuffix("\n").split("\n")
            offset += len(block)
            line += _count_lines(block)
        if offset == 0 and self._blocks is None:
            raise UnreadableError("empty_file", f"{self.path}: empty file")

    def _whole_lines(self, longest: int, separator: bytes) -> Iterator[bytes]:
        """Yield the content in blocks of whole lines, and of parts of lines above `longest` bytes."""
        begun: list[
            bytes
        ] = []  # the line whose end is not read yet; joined once, or a long one would be copied often
        size = total = 0
        for block in self._blocks or self.blocks():
            read = len(block)
            is_head = total == 0 and self.begins
            if is_head:
                self._require_bytes_of_text(block)
            self._look_for_binary(block, total)
            if is_head:
                block = block.removeprefix(b"\xef\xbb\xbf")
            # A CR that is the last byte may be half of a CR LF.
            end = block.rfind(b"\n") + 1 or block.rfind(b"\r", 0, -1) + 1
            if end or size + len(block) > longest:
                block = b"".join([*begun, block])
                end = size + end if end else _cut(block, separator)
                yield block[:end]
                begun, size, block = [], 0, block[end:]
            begun.append(block)
            size += len(block)
            total += read
        if size:
            yield b"".join(begun)

    def blocks(self) -> Iterator[bytes]:
        """Yield the content. UserError for a damaged or cut-off archive."""
        with self.decompressed() as handle:
            while block := handle.read(BLOCK_BYTES):
                yield block

    def _require_bytes_of_text(self, head: bytes) -> None:
        encoding = wide_encoding(head[:HEAD_BYTES])
        if encoding:
            convert = self._conversion_from(encoding)
            message = f"{self.path}: text in {encoding}, must be UTF-8. Convert it: `{convert}`"
            raise UnreadableError("binary_file", message)

    def _conversion_from(self, encoding: str) -> str:
        """Return the command that makes a file in UTF-8 of this one, unpacked."""
        name, suffix = self.path.name, self.path.suffix.lower()
        convert = f"iconv -f {encoding} -t UTF-8"
        if suffix in UNPACKERS:
            return f"{UNPACKERS[suffix]} {name} | {convert} > utf8-{self.path.stem}"
        return f"{convert} {name} > utf8-{name}"

    def _look_for_binary(self, block: bytes, offset: int) -> None:
        place = block.find(b"\0")
        if place < 0:
            return
        is_head = self.begins and offset == 0
        if not self.lenient or (is_head and block.count(0) >= MANY_NULS * len(block)):
            message = f"{self.path}: binary file (a NUL byte at offset {offset + place}); text must be UTF-8"
            raise UnreadableError("binary_file", message)
        self.binary = True  # only documents with NUL bytes are left out


@dataclass(frozen=True)
class FileRange:
    """Documents that follow each other in a file, from byte `offset` of its unpacked content on.

    `data` is their text where it was read already; without it they are all that follow.
    """

    path: Path
    offset: int = 0
    data: bytes | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether it is the file, of which nothing has been read."""
        return self.offset == 0 and self.data is None

    @property
    def name(self) -> str:
        """Name that no other part of the file has."""
        return (
            f"{self.offset} to {'the end' if self.data is None else self.offset + len(self.data)}"
        )

    def blocks(self) -> Iterator[bytes]:
        """Yield the content. UserError for a damaged or cut-off archive."""
        if self.data is not None:
            for start in range(0, len(self.data), BLOCK_BYTES):
                yield self.data[start : start + BLOCK_BYTES]
            return
        position = 0
        for block in TextFile(self.path).blocks():
            yield block[max(0, self.offset - position) :]
            position += len(block)


def file_ranges(path: Path, marks: tuple[bytes, ...]) -> Iterator[tuple[FileRange, int]]:
    """Yield a file in ranges of about `RANGE_BYTES`, each with how many bytes of the file are read behind it.

    Each of `marks` ends a document, whatever stands around it; a range ends behind one. From where an archive is
    damaged, or has no mark for long, the rest is a range without `data`.
    """
    file, offset, data = TextFile(path), 0, bytearray()
    size_bytes, overlap = path.stat().st_size, max(map(len, marks)) - 1
    try:
        for block in file.blocks():
            searched = max(RANGE_BYTES, len(data)) - overlap
            data += block
            while end := _end_of_mark(data, max(0, searched), marks):
                yield FileRange(path, offset, bytes(data[:end])), file.position
                offset += end
                searched = RANGE_BYTES - overlap
                del data[:end]
            if len(data) > LONGEST_RANGE_BYTES:
                break
        else:
            yield FileRange(path, offset, bytes(data)), size_bytes
            return
    except UserError:  # raised again by the range, behind what comes in front of it
        pass
    yield FileRange(path, offset), size_bytes


def _end_of_mark(data: bytearray, start: int, marks: tuple[bytes, ...]) -> int:
    """Return where the first mark from `start` on ends; 0 if there is none."""
    places = [(_find_mark(data, start, mark), len(mark)) for mark in marks]
    return min((place + length for place, length in places if place >= 0), default=0)


def _find_mark(data: bytearray, start: int, mark: bytes) -> int:
    """Return the first place of a mark that no earlier one overlaps, as one in a run of dashes may; -1 without any."""
    place = data.find(mark, start)
    while place >= 0 and data.find(mark, max(0, place - len(mark) + 1)) < place:
        place = data.find(mark, place + 1)
    return place


def content_bytes(path: Path, size_bytes: int) -> int:
    """Return about how much a file of this size holds, unpacked."""
    return size_bytes * USUAL_RATIO if path.suffix.lower() in COMPRESSIONS else size_bytes


def head_of(path: Path, size_bytes: int) -> bytes:
    """Return the first bytes of the content; none of an archive that is damaged there."""
    with suppress(UserError), TextFile(path).decompressed() as handle:
        return handle.read(size_bytes)
    return b""


def is_wikiextractor(path: Path) -> bool:
    """Return whether WikiExtractor made the file: its articles are documents, however plain text is cut."""
    lines = TextFile(path, lenient=True).lines()
    try:
        first = next(dropwhile(_is_blank, lines), "")
    except UserError:  # told when the file is read
        return False
    return _WIKIEXTRACTOR.match(first) is not None


def _count_lines(data: bytes) -> int:
    lines = data.count(b"\n")
    return lines + data.count(b"\r") - data.count(b"\r\n") if b"\r" in data else lines


def _cut(block: bytes, separator: bytes) -> int:
    """Return the place to cut one overlong line.

    It is behind its last separator, else behind its last space, else at the last character's first byte.
    """
    for mark in (separator, b" "):
        place = block.rfind(mark)
        if place >= 0:
            return place + len(mark)
    end = len(block) - 1
    while end > 1 and block[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _by_line(lines: Iterator[str], longest: int) -> Iterator[Part]:
    return ((line, 0) for line in lines if line.strip())


def _in_parts(lines: Iterator[str], longest: int, ends: Callable[[str], bool]) -> Iterator[Part]:
    """Yield documents, which end at a line that `ends` tells, without the blank lines in front.

    A part ends before the line that would take it above `longest`, unless it is not yet half as long.
    """
    text, size, part = io.StringIO(), 0, 0
    for line in lines:
        is_end = ends(line)
        if size and (is_end or (size + len(line) >= longest and 2 * size >= longest)):
            yield text.getvalue(), part
            text, size, part = io.StringIO(), 0, part + 1
        if is_end:
            part = 0
        elif size or part or not _is_blank(line):
            size += text.write(line) + text.write("\n")
    if size:
        yield text.getvalue(), part


def _is_blank(line: str) -> bool:
    return not line.strip()


def _by_separator(lines: Iterator[str], longest: int, separator: str) -> Iterator[Part]:
    """Yield what stands between the separators, which may stand within lines."""
    divided = chain.from_iterable(_divided(line, separator) for line in lines)
    return _in_parts(divided, longest, separator.__eq__)


def _divided(line: str, separator: str) -> Iterator[str]:
    """Yield the parts of a line, and the separators between them."""
    for number, part in enumerate(line.split(separator)):
        if number:
            yield separator
        yield part


_by_file = partial(_in_parts, ends=lambda line: False)
DOCUMENTS: dict[str, Callable[[Iterator[str], int], Iterator[Part]]] = {  # by `data.documents`
    "line": _by_line,
    "block": partial(_in_parts, ends=_is_blank),
    "file": _by_file,
}
_WIKIEXTRACTOR = re.compile(r'<doc id="[^"]+" .*>$')  # in front of each article of WikiExtractor's


_MARKS: dict[str, tuple[bytes, ...]] = {"line": (b"\n",), "block": (b"\n\n", b"\n\r\n")}


class Cut(NamedTuple):
    """Division of plain text into documents: `data.documents`, `data.separator` and `clean.max_characters`."""

    kind: str
    separator: str | None
    longest: int  # characters of a document, or of a part of a longer one

    @property
    def marks(self) -> tuple[bytes, ...]:
        """Bytes that end a document wherever they stand; none where only the whole file has its documents."""
        return (self.separator.encode(),) if self.separator else _MARKS.get(self.kind, ())

    def documents(self, lines: Iterator[str]) -> Iterator[Part]:
        """Yield the documents."""
        if self.separator:
            return _by_separator(lines, self.longest, self.separator)
        return DOCUMENTS[self.kind](lines, self.longest)


def documents_of(file: TextFile, cut: Cut, begins: bool = True) -> Iterator[Part]:
    """Yield the documents of plain text, or the articles of a file that WikiExtractor made, which it escapes.

    `begins`: whether the lines begin with the file's first, which tells what made it. Each document has at most about
    `cut.longest` characters; a longer one comes in parts.
    """
    lines = dropwhile(_is_blank, file.lines(separator=cut.separator or " "))
    first = list(islice(lines, 1))
    if not (begins and first and _WIKIEXTRACTOR.match(first[0])):
        yield from cut.documents(chain(first, lines))
        return
    for is_article, article in groupby(lines, _is_inside_article):
        if is_article:
            for text, part in _by_file(article, cut.longest):
                if text.strip():
                    yield html.unescape(text), part


def _is_inside_article(line: str) -> bool:
    return line != "</doc>" and not _WIKIEXTRACTOR.match(line)
