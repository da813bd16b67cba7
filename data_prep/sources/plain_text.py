"""Local files as streams of lines, plain or compressed, and how lines are cut into documents.

About one block is in memory, whatever the file's size. A complaint names the file and the place in it.
"""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, dropwhile, groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cramming.config import UserError
from cramming.process_pool import Submit

BLOCK_BYTES = 1 << 20
LONGEST_STRETCH = (
    1 << 23
)  # bytes; what has no end of a document for so long is not read in stretches
LONGEST_TEXT_LINE = 1 << 24  # bytes; a longer line of plain text is handed on in parts
OR_DROP = "; data.damaged=drop skips and counts damaged text"
AHEAD = 4  # blocks that are unpacked before they are asked for
MANY_NULS = 1e-3  # of the bytes: of binary data; random bytes have one in 256

Block = tuple[
    bytes, int
]  # of a file's content, unpacked, and how many bytes of the file itself are read then
Part = tuple[str, int]  # a text, and which part of its document it is, from 0


def _zstd(handle: BinaryIO) -> Any:
    """It refuses a file that was cut off, and what follows the last frame."""
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(handle, mode="r"), "zstd")


class Streams(io.RawIOBase):
    """The streams of an .xz or .bz2 file one after the other, some perhaps empty. Python's own readers take a stream
    whose header is damaged, and whatever else follows the first one, for the end of the file."""

    def __init__(self, handle: BinaryIO, begin: Callable[[], Any], padding: bytes = b"") -> None:
        self.handle, self.begin, self.padding, self.stream = handle, begin, padding, begin()

    def readable(self) -> bool:
        """As io.RawIOBase has it."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase has it; EOFError where the file was cut off, LZMAError or OSError where it is damaged."""
        data = b""
        while not data:
            packed = b""
            if self.stream.eof:
                packed = self.stream.unused_data.lstrip(self.padding)
                while not packed:
                    if not (block := self.handle.read(BLOCK_BYTES)):
                        return 0
                    packed = block.lstrip(self.padding)
                self.stream = self.begin()
            elif self.stream.needs_input and not (packed := self.handle.read(BLOCK_BYTES)):
                raise EOFError("it ends within a stream")
            data = self.stream.decompress(packed, len(buffer))
        buffer[: len(data)] = data
        return len(data)


COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda handle: gzip.GzipFile(fileobj=handle),
    ".xz": lambda handle: io.BufferedReader(
        Streams(handle, lzma.LZMADecompressor, b"\0"), BLOCK_BYTES
    ),
    ".bz2": lambda handle: io.BufferedReader(Streams(handle, bz2.BZ2Decompressor), BLOCK_BYTES),
    ".zst": _zstd,
}


@contextmanager
def names_file(path: Path) -> Iterator[None]:
    """An error of the disk says which file was read; the system's own says that only of opening one."""
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
    stay unless they are many in the first block; `escaped` and `binary` tell that there were any. `stretch`: read only
    this part of the file's content, unpacked already.
    """

    def __init__(self, path: Path, lenient: bool = False, stretch: "Stretch | None" = None) -> None:
        self.path, self.lenient, self.escaped, self.binary = path, lenient, False, False
        self.raw: BinaryIO = io.BytesIO(stretch.data) if stretch else path.open("rb")
        self._unpacked, self._begins = stretch is not None, stretch is None or stretch.begins

    @property
    def position(self) -> int:
        """Bytes of the file itself, before decompression, read so far; 0 when it is closed."""
        return 0 if self.raw.closed else self.raw.tell()

    @contextmanager
    def decompressed(self) -> Iterator[BinaryIO]:
        """The file's content. UserError for a damaged or cut-off archive; an error of the disk stays an OSError."""
        packed = (
            not self._unpacked and self.path.stat().st_size
        )  # a file of no bytes is empty, whatever its name
        suffix = self.path.suffix.lower() if packed else ""
        try:
            with names_file(self.path):
                yield COMPRESSIONS.get(suffix, lambda handle: handle)(self.raw)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            kind = suffix or "a file"
            raise UserError(
                f"{self.path}: cannot be read as {kind}: {error}; is it whole? get it anew"
            ) from None
        finally:
            self.raw.close()

    def decode(self, data: bytes, place: Callable[[int], str]) -> str:
        """These bytes as text. `place` says of a byte's index, if there it is not UTF-8, where that is in the file."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            if not self.lenient:
                raise UserError(f"{self.path}{place(error.start)}{OR_DROP}") from None
            self.escaped = True
            return data.decode("utf-8", "surrogateescape")

    def lines(self, longest: int = LONGEST_TEXT_LINE) -> Iterator[str]:
        """Lines without their ends, which are those of Unix, Windows and the old Mac (CR alone).

        A line above `longest` bytes comes in parts, cut at a space where there is one. UserError: an empty file, a NUL
        byte (binary data or UTF-16), bytes that are not UTF-8.
        """
        offset, line = 0, 1
        for block in self._whole_lines(longest):

            def place(
                start: int, block: bytes = block, offset: int = offset, line: int = line
            ) -> str:
                return (
                    f": not UTF-8 at byte {offset + start} (line {line + _count_lines(block[:start])}); convert it:"
                    f" `iconv -f <its encoding> -t utf-8 {self.path.name}`, for example latin1, shift_jis, gb18030"
                )

            text = self.decode(block, place)
            if "\r" in text:  # CR CR LF is what a program makes that takes CR LF for LF
                text = text.replace("\r\r\n", "\n").replace("\r\n", "\n").replace("\r", "\n")
            yield from text.removesuffix("\n").split("\n")
            offset += len(block)
            line += _count_lines(block)
        if offset == 0:
            raise UnreadableError("empty_file", f"{self.path}: empty file")

    def _whole_lines(self, longest: int) -> Iterator[bytes]:
        """The content in blocks of whole lines, and of parts of lines above `longest` bytes."""
        begun: list[
            bytes
        ] = []  # the line whose end is not read yet; joined once, or a long one would be copied often
        size = total = 0
        with self.decompressed() as handle:
            while block := handle.read(BLOCK_BYTES):
                read = len(block)
                self._look_for_binary(block, total)
                if total == 0 and self._begins:
                    block = block.removeprefix(b"\xef\xbb\xbf")
                # A CR that is the last byte may be half of a CR LF.
                end = block.rfind(b"\n") + 1 or block.rfind(b"\r", 0, -1) + 1
                if end or size + len(block) > longest:
                    block = b"".join([*begun, block])
                    end = size + end if end else _cut(block)
                    yield block[:end]
                    begun, size, block = [], 0, block[end:]
                begun.append(block)
                size += len(block)
                total += read
        if size:
            yield b"".join(begun)

    def _look_for_binary(self, block: bytes, offset: int) -> None:
        place = block.find(b"\0")
        if place < 0:
            return
        if not self.lenient or (offset == 0 and block.count(0) >= MANY_NULS * len(block)):
            message = f"{self.path}: binary file (a NUL byte at offset {offset + place}); text must be UTF-8"
            raise UnreadableError("binary_file", message)
        self.binary = True  # only documents with NUL bytes are left out


def blocks_of(path: Path) -> Iterator[Block]:
    """A file's content. UserError for a damaged or cut-off archive."""
    file = TextFile(path)
    with file.decompressed() as handle:
        while block := handle.read(BLOCK_BYTES):
            yield block, file.position


_unpacking: dict[Path, Iterator[Block]] = {}  # of the process that unpacks


def _next_block(path: Path) -> Block | None:
    return next(_unpacking.setdefault(path, blocks_of(path)), None)


def unpacked(path: Path, submit: Submit) -> Iterator[Block]:
    """The same, read by the only process of a pool, `AHEAD` blocks ahead."""
    pending = deque(submit(_next_block, path) for _ in range(AHEAD))
    while block := pending.popleft().result():
        pending.append(submit(_next_block, path))
        yield block


def stretches(
    path: Path, blocks: Iterator[Block], document_end: Callable[[bytes], int] | None
) -> Iterator[tuple[bytes, bool, int]]:
    """A file's content in stretches of whole documents, whether each is the last one, and how far the file is read.
    `document_end` says where in bytes the last document ends that certainly does, 0 if none; None: only the file's end
    is one.

    UserError where no document ends within `LONGEST_STRETCH`.
    """
    begun, nothing = b"", (b"", 0)
    block, position = next(blocks, nothing)
    while block:
        begun, read = begun + block, position
        block, position = next(blocks, nothing)
        end = document_end(begun) if block and document_end else len(begun) * (not block)
        if end:
            yield begun[:end], not block, read
            begun = begun[end:]
        elif len(begun) > LONGEST_STRETCH:
            raise UserError(f"{path}: a document of more than {LONGEST_STRETCH} bytes")


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


def _by_line(lines: Iterator[str], longest: int) -> Iterator[Part]:
    return ((line, 0) for line in lines if line.strip())


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


_by_file = partial(_in_parts, blank_lines_end=False)
DOCUMENTS: dict[str, Callable[[Iterator[str], int], Iterator[Part]]] = {  # by `data.documents`
    "line": _by_line,
    "block": partial(_in_parts, blank_lines_end=True),
    "file": _by_file,
}
_WIKIEXTRACTOR = re.compile(r'<doc id="[^"]+" .*>$')  # in front of each article of WikiExtractor's


def end_of_line(data: bytes) -> int:
    """Where the last line ends in these bytes, 0 if none does."""
    return data.rfind(b"\n") + 1


def end_of_block(data: bytes) -> int:
    """Where the last empty line ends in these bytes, 0 if there is none."""
    ends = (b"\n\n", b"\n\r\n") if b"\r" in data else (b"\n\n",)  # to find one byte is quick
    found = ((data.rfind(end), len(end)) for end in ends)
    return max(place + length if place >= 0 else 0 for place, length in found)


DOCUMENT_ENDS: dict[str, Callable[[bytes], int]] = {
    "line": end_of_line,
    "block": end_of_block,
}  # by `data.documents`


class Stretch(NamedTuple):
    """Whole documents of a file, unpacked bytes that any process can read; `begins` and `ends` the file or not; `plain`
    text or records."""

    path: Path
    data: bytes
    begins: bool
    ends: bool
    plain: bool
    read: Callable[[TextFile], Iterator[Part]]

    def parts(self) -> list[Part]:
        """The documents. UserError where what came before matters or something is wrong: read the file from its
        beginning, which gives or refuses the same documents with their true places."""
        whole = self.begins and self.ends
        if (
            self.plain and not whole and b"<doc id=" in self.data
        ):  # perhaps WikiExtractor's: its first line tells
            raise UserError(f"{self.path}: its documents may not end where its stretches do")
        found = list(self.read(TextFile(self.path, stretch=self))) if self.data else []
        if not found and (self.begins or not self.data):
            raise UserError(f"{self.path}: no document")
        return found


def documents_of(lines: Iterator[str], kind: str, longest: int) -> Iterator[Part]:
    """The documents of plain text: by `DOCUMENTS`, or, in files of WikiExtractor's, the articles, whatever `kind`.

    Each at most about `longest` characters; a longer one comes in parts.
    """
    lines = dropwhile(lambda line: not line.strip(), lines)
    first = list(islice(lines, 1))
    if not (first and _WIKIEXTRACTOR.match(first[0])):
        yield from DOCUMENTS[kind](chain(first, lines), longest)
        return
    for inside, article in groupby(
        lines, lambda line: line != "</doc>" and not _WIKIEXTRACTOR.match(line)
    ):
        if inside:
            yield from (part for part in _by_file(article, longest) if part[0].strip())
