"""Compressed files as streams of their content, and what their damage is."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

PACKED_BYTES = 1 << 12  # unpacked at a time: of zstandard 4 KB unpack to 128 MB at the very most
BUFFER_BYTES = 1 << 20  # and of xz and bzip2 to no more than this, since of bzip2 they can hold 4 GB


class _Frames(io.RawIOBase):
    """The content of a compressed file, frame after frame (xz and bzip2 say stream). `begin` makes a decompressor.

    The libraries' own readers take a file that was cut off (zstandard), or what follows the first frame and is none
    (lzma, bz2), for the end of the file. Here the one is an EOFError, the other the decompressor's error. Zeros between
    frames, as xz may have them, are no content.
    """

    def __init__(self, handle: BinaryIO, begin: Callable[[], Any]) -> None:
        self._handle, self._begin = handle, begin
        self._frame: Any = None
        self._packed, self._content = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            if self._frame is not None and not self._frame.needs_input:
                self._unpack(b"")
                continue
            packed = self._packed or self._handle.read(PACKED_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of the compressed data")
                return 0
            self._unpack(packed)
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        return size

    def _unpack(self, packed: bytes) -> None:
        self._packed = b""
        if self._frame is None:
            packed = packed.lstrip(b"\0")
            if not packed:
                return
            self._frame = self._begin()
        self._content = memoryview(self._frame.decompress(packed, BUFFER_BYTES))
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None


class _ZstandardFrame:
    """With the interface of lzma's and bz2's decompressors; but all that the packed bytes hold is unpacked at once."""

    needs_input = True

    def __init__(self) -> None:
        import zstandard

        self._frame = zstandard.ZstdDecompressor().decompressobj()

    def decompress(self, packed: bytes, most: int) -> bytes:
        return self._frame.decompress(packed)

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data


def _in_frames(begin: Callable[[], Any]) -> Callable[[BinaryIO], BinaryIO]:
    return lambda handle: io.BufferedReader(_Frames(handle, begin), BUFFER_BYTES)


COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda handle: gzip.GzipFile(fileobj=handle),
    ".xz": _in_frames(lzma.LZMADecompressor),
    ".bz2": _in_frames(bz2.BZ2Decompressor),
    ".zst": _in_frames(_ZstandardFrame),
}


def errors(suffix: str) -> tuple[type[BaseException], ...]:
    """What reading a damaged or cut-off file of this suffix raises. An OSError with a number is the system's."""
    found: tuple[type[BaseException], ...] = (EOFError, OSError, zlib.error, lzma.LZMAError)
    if suffix == ".zst":
        import zstandard

        return (*found, zstandard.ZstdError)
    return found


def advice(error: BaseException, path: Path) -> str:
    """What to do about one of `errors`."""
    if "too much memory" in str(error):  # zstandard's words for a window above 128 MB
        return f"it was packed with `zstd --long`: `zstd -d --long=31 {path.name}`, and name the unpacked file"
    return "is it whole? get it anew"
