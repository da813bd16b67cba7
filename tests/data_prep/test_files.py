"""Local files: every format and compression gives the same documents, and every complaint names the place."""

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from cramming.config import UserError
from data_prep.filters.normalise import CleanConfig, normalize
from data_prep.sources import plain_text, records
from data_prep.sources.plain_text import DOCUMENTS, TextFile
from data_prep.sources.source import Document
from data_prep.sources.text import FORMATS, TextConfig, TextSource, format_of

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
TEXTS = ['First, "quoted" text.', "Zweiter Text: Grüße, 東京 😀", "third with words"]


def as_csv(texts: list[str]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer).writerows([["id", "text"], *enumerate(texts)])
    return buffer.getvalue().encode()


def as_parquet(texts: Any) -> bytes:
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), buffer)
    return buffer.getvalue()


WRITERS: dict[str, Callable[[list[str]], bytes]] = {
    ".txt": lambda texts: "\n\n".join(texts).encode(),
    ".jsonl": lambda texts: "\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)).encode(),
    ".csv": as_csv,
    ".tsv": lambda texts: "\n".join(["id\ttext", *(f"{i}\t{text}" for i, text in enumerate(texts))]).encode(),
    ".parquet": as_parquet,
}


def source_of(*paths: Path | str, **settings: Any) -> TextSource:
    return TextSource(TextConfig(name="t", source="text", paths=list(map(str, paths)), **settings))


def read(*paths: Path, **settings: Any) -> list[Document]:
    return list(source_of(*paths, **settings).documents())


def texts_of(*paths: Path, **settings: Any) -> list[str]:
    return [document.text.rstrip("\n") for document in read(*paths, **settings)]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("compression", COMPRESS)
def test_every_format_in_every_compression(tmp_path: Path, suffix: str, compression: str) -> None:
    path = tmp_path / f"a{suffix}{compression}"
    path.write_bytes(COMPRESS[compression](WRITERS[suffix](TEXTS)))
    assert texts_of(path) == texts_of(path, format=format_of(path)) == TEXTS


def test_formats_go_by_name() -> None:
    names = {"x.JSONL.GZ": "jsonl", "wiki_core.00.xz": "txt", "a.xml.bz2": "wikipedia", "b.warc.wet.gz": "wet"}
    assert {name: format_of(Path(name)) for name in names} == names
    suffixes = [suffix for kind in FORMATS.values() for suffix in kind.suffixes]
    assert len(suffixes) == len(set(suffixes))
    with pytest.raises(ValueError, match="format=doc: choose one of txt, jsonl"):
        TextConfig(name="t", source="text", paths=[], format="doc")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_no_part_of_an_archive_is_lost_without_a_word(tmp_path: Path, suffix: str) -> None:
    """Wherever it is cut, and whatever stands behind its first frame: the whole text, or a complaint."""
    path, compress = tmp_path / f"a.txt{suffix}", COMPRESS[suffix]
    one, two = compress(b"one\n\n"), compress(b"two\n")
    for end in range(1, len(one + two)):
        path.write_bytes((one + two)[:end])
        if end == len(one):  # here it cannot be told from a whole file
            assert texts_of(path) == ["one"]
            continue
        with pytest.raises(UserError, match=rf"cannot be read as \{suffix}"):
            texts_of(path)
    path.write_bytes(one + b"junk that is no frame")
    with pytest.raises(UserError, match=rf"cannot be read as \{suffix}"):
        texts_of(path)
    for padding in (b"", bytes(8)):  # xz allows it
        path.write_bytes(one + padding + two)
        assert texts_of(path) == ["one", "two"]


@pytest.mark.parametrize("suffix", [".xz", ".bz2"])
def test_what_unpacks_to_far_more_is_unpacked_bit_by_bit(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](b"a" * (1 << 26)))
    tracemalloc.start()
    with TextFile(path).decompressed() as handle:
        assert handle.read(1 << 20) == b"a" * (1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 24  # the dictionary of xz is 8 MB
        assert sum(map(len, iter(lambda: handle.read(1 << 20), b""))) == (1 << 26) - (1 << 20)


@pytest.mark.parametrize("suffix", list(COMPRESS))
def test_nothing_in_any_compression_is_an_empty_file(tmp_path: Path, suffix: str) -> None:
    for number, data in enumerate((b"", COMPRESS[suffix](b""))):
        path = tmp_path / f"{number}.txt{suffix}"
        path.write_bytes(data)
        with pytest.raises(UserError, match="empty file"):
            texts_of(path)


def test_how_text_is_cut_into_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffa b\r\nc\r\n\r\n \r\nd\ne".encode())
    assert texts_of(path, documents="line") == ["a b", "c", "d", "e"]
    assert texts_of(path, documents="block") == ["a b\nc", "d\ne"]
    assert texts_of(path, documents="file") == ["a b\nc\n\n \nd\ne"]


def test_articles_that_wikiextractor_made_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "wiki_00"
    articles = ["Quay\n\nA quay is a place.<br />It is old.\n", 'The "Docks"\n\nThey are <doc>uments.\n']
    path.write_text("".join(f'<doc id="{n}" title="a">\n{a}\n</doc>\n' for n, a in enumerate(articles)))
    expected = [article.rstrip("\n") for article in articles]
    assert texts_of(path) == texts_of(path, documents="file") == expected
    path.write_text(" \n\n" + path.read_text())
    assert texts_of(path) == expected
    assert normalize(expected[0], CleanConfig()) == "Quay\nA quay is a place.\nIt is old."
    path.write_text('a "<doc id=" in a text\n\nb')
    assert texts_of(path) == ['a "<doc id=" in a text', "b"]


def test_globs_are_sorted_and_files_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wiki").mkdir()
    for name in ("wiki/b.00.xz", "wiki/a.txt.xz"):
        (tmp_path / name).write_bytes(lzma.compress(name.encode()))
    (tmp_path / "z.txt").write_text("z")
    assert texts_of(Path("z.txt"), Path("wiki/*.xz")) == ["z", "wiki/a.txt.xz", "wiki/b.00.xz"]


def test_lines_of_any_length_come_whole_or_in_parts_that_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 64)
    for text in ("word " * 100, "é" * 300, "x" * 255 + "\n" + "y" * 10, "a\n" * 200):
        path = tmp_path / "a.txt"
        path.write_text(text, encoding="utf-8")
        assert list(TextFile(path).lines(longest=10_000)) == text.removesuffix("\n").split("\n")
        parts = list(TextFile(path).lines(longest=128))
        assert "".join(parts) == text.replace("\n", "") and max(map(len, parts)) <= 256


@pytest.mark.parametrize("documents", ["block", "file"])
def test_long_blocks_and_files_come_in_parts_that_lose_nothing(tmp_path: Path, documents: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(5000)))
    parts = list(DOCUMENTS[documents](TextFile(path).lines(), 1000))
    assert "".join(text for text, _ in parts) == path.read_text()
    lengths = [len(text) for text, _ in parts]
    assert max(lengths) <= 1000 and min(lengths[:-1]) > 980  # full of whole lines, and no crumbs between
    assert [part for _, part in parts] == list(range(len(parts)))


def test_a_line_above_the_limit_leaves_no_crumb_in_front() -> None:
    for documents in ("block", "file"):
        parts = DOCUMENTS[documents](iter(["short", "x" * 1500, "short", "y" * 300]), 1000)
        assert [(len(text), part) for text, part in parts] == [(1507, 0), (307, 1)]


def test_the_parts_of_a_document_are_numbered_anew_for_each(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(("word\n" * 500 + "\n") * 2 + "end\n")
    documents = read(path, clean=CleanConfig(max_characters=1000))
    assert [document.part for document in documents] == [0, 1, 2, 0, 1, 2, 0]
    assert documents[3].id == f"{path}:1" and documents[-1].id == f"{path}:2"


JSON_LINES = r"not a JSON object on one line"
ERRORS = {
    "empty": (".txt", b"", "empty file"),
    "binary": (".txt", b"PK\x03\x04\x00\x00data", "binary file .a NUL byte at offset 4."),
    "binary far on": (".txt", b"word\n" * 400_000 + b"\x7fELF\0\0", "binary file .a NUL byte at offset 2000004."),
    "latin-1": (".txt", b"one\ntwo caf\xe9\n", r"not UTF-8 at byte 11 \(line 2\)"),
    "latin-1 far on": (".txt", b"0123456789\n" * 200_000 + b"012\xff\n", r"byte 2200003 \(line 200001\)"),
    "deep json": (".jsonl", b'{"text": "a"}\n' + b"[" * 200_000, r"a\.jsonl:2: not a JSON object"),
    "bad json": (".jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: not a JSON object"),
    "json list": (".json", b'[{"text": "a"}]', r"JSON object, found list; .*`jq -c '\.\[\]' a\.json > a\.jsonl`"),
    "json array": (".json", b'[\n {"text": "a"}\n]', rf"{JSON_LINES} .*`jq -c '\.\[\]' a\.json"),
    "json lines": (".json", b'{\n "text": "a"\n}', rf"{JSON_LINES} .*over many lines.*`jq -c '\.' a\.json"),
    "json field": (".jsonl", b'{"title": "a", "body": "b"}', "no field 'text'; there are: title, body"),
    "json type": (".jsonl", b'{"text": 3}', "field 'text' holds int, expected text"),
    "csv field": (".csv", b"title,body\n1,2\n", "no field 'text'; there are: title, body"),
    "csv row": (".tsv", b"id\ttext\n1\n", r"a\.tsv:2: 1 columns, the header has 2"),
    "csv open quote": (".csv", b'id,text\n1,"o\n2,b\n', r"a\.csv:3: .*row begins in line 2: is a quote left open"),
    "csv names": (".csv", b"text,text\n1,2\n", r"a\.csv: 2 columns are named 'text'; rename all but the one"),
    "zstd window": (
        ".txt.zst",
        b"\x28\xb5\x2f\xfd\x00" + bytes([(30 - 10) << 3]) + b"\x01\0\0",
        r"packed with `zstd --long`: `zstd -d --long=31 a\.txt\.zst`, and name",
    ),
    "parquet": (".parquet", b"PAR1 but not really", "not a readable parquet file"),
    "gzip": (".txt.gz", b"not gzip at all", r"cannot be read as \.gz"),
    "cut gzip": (".txt.gz", gzip.compress(b"text" * 1000)[:-10], r"cannot be read as \.gz"),
    "cut zstd": (".txt.zst", COMPRESS[".zst"](b"text\n" * 1000)[:-4], r"as \.zst: it ends in the middle"),
    "zstd": (".txt.zst", b"not zstd at all", r"cannot be read as \.zst"),
    "suffix": (".docx", b"text", "format not known from its name"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_bad_file_is_a_one_line_user_error(tmp_path: Path, name: str) -> None:
    suffix, data, message = ERRORS[name]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as error:
        texts_of(path)
    assert path.name in str(error.value) and "\n" not in str(error.value)


def test_what_the_system_says_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is away for a moment must not cost the shards that are finished."""
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"text\n"))

    def away(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(gzip.GzipFile, "read", away)
    with pytest.raises(OSError, match="Input/output"):
        texts_of(path)


@pytest.mark.parametrize("large", [False, True])
def test_text_of_parquet_that_is_not_utf8_is_named_or_left_out(tmp_path: Path, large: bool) -> None:
    """Writers do not check: the column says text and holds other bytes."""
    import pyarrow

    column = pyarrow.array([b"one", b"caf\xe9 au lait", None, "drei Grüße".encode()]).cast(pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 4, column.buffers())
    path = tmp_path / "a.parquet"
    path.write_bytes(as_parquet(text.cast(pyarrow.large_string()) if large else text))
    with pytest.raises(UserError, match=r"a\.parquet row 2: field 'text' is not UTF-8 at byte 3; data\.damaged=drop"):
        texts_of(path)
    documents = read(path, damaged="drop")
    assert [d.text for d in documents if not d.damage] == ["one", "", "drei Grüße"]
    assert [d.damage for d in documents if d.damage] == [("not_utf8", 12)]


def test_a_damaged_page_of_parquet_is_known_by_its_checksum(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"{number} " + "word " * 50 for number in range(100)]})
    parquet.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    assert len(texts_of(path)) == 100
    data = bytearray(path.read_bytes())
    data[9000:9004] = b"####"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.parquet: .*checksum.*is it whole"):
        texts_of(path)


def test_a_long_record_takes_time_in_proportion_to_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times as long, about eight times the time; copied anew with each of its blocks, 64 times."""
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 64)

    def seconds(words: int) -> float:
        path = tmp_path / f"{words}.jsonl"
        path.write_text(json.dumps({"text": "word " * words}) + "\n" + json.dumps({"text": "last"}))
        before = time.process_time()
        assert texts_of(path) == ["word " * words, "last"]
        return time.process_time() - before

    assert min(seconds(800_000) for _ in range(2)) < 24 * min(seconds(100_000) for _ in range(5))


def test_a_record_too_long_to_be_meant_is_refused_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 100)
    monkeypatch.setattr(records, "LONGEST_RECORD", 1 << 20)
    monkeypatch.setattr(records, "LONGEST_FIELD", 1 << 16)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "' + "a" * (1 << 20))
    with pytest.raises(UserError, match=r"a\.jsonl: the record at byte 14 is longer than 1 MiB; is a line end missing"):
        texts_of(tmp_path / "a.jsonl")
    (tmp_path / "a.csv").write_text("id,text\n0,ok\n" + '1,"open\n' + "2,all of this is one field\n" * 9000)
    with pytest.raises(UserError, match=r"a\.csv:\d+: field larger than .*row begins in line 3: is a quote left open"):
        texts_of(tmp_path / "a.csv")


@pytest.mark.parametrize("block_bytes", [1, 3, 64, 1 << 20])
def test_line_ends_of_every_system_are_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """CR alone is the old Mac's, and what some spreadsheets export."""
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", block_bytes)
    path, table = tmp_path / "a.txt", tmp_path / "a.csv"
    for end in ("\n", "\r\n", "\r"):
        path.write_bytes(f"a b{end}c{end}{end}d{end}e".encode())
        assert texts_of(path) == ["a b\nc", "d\ne"], repr(end)
        table.write_bytes(f"id,text{end}1,one{end}2,two{end}".encode())
        assert texts_of(table) == ["one", "two"], repr(end)
    path.write_bytes(b"one\r" * 50 + b"caf\xe9\r")
    with pytest.raises(UserError, match=r"byte 203 \(line 51\)"):
        texts_of(path)


def test_binary_data_far_into_a_file_is_left_out_where_damage_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 100)
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\n" * 50 + "zwei\n".encode("utf-16-le") + b"\n\nthree\n")
    *ones, bad, three = read(path, damaged="drop")
    assert {document.text for document in ones} == {"one\n"} and three.text == "three\n"
    assert bad.damage is not None and bad.damage.reason == "binary"


def test_an_escape_in_json_is_no_damage_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "caf\xe9 \\ud83d"}\n{"text": "a\\u0000b"}\n')
    documents = read(path, damaged="drop")
    assert [document.damage for document in documents] == [None, ("not_utf8", 6), None]
    assert documents[2].text == "a\0b"  # normalisation deletes the character, and counts it


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "data.paths is empty"),
        (["nothing.txt"], "no file nothing.txt"),
        (["*.nothing"], "nothing matches"),
        (["."], "is a folder"),
        (["a.txt", "a.t*"], "names a file twice"),
        (["pipe.txt"], r"pipe\.txt is no regular file, and text is read more than once"),
        (["bad\udcff.md"], r"the name of .*bad\\udcff\.md is not UTF-8; rename it"),
        (["*.md"], r"the name of .*bad\\udcff\.md is not UTF-8; rename it"),
    ],
)
def test_bad_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bad\udcff.md").write_text("text")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match=message):
        source_of(*paths)


def test_a_file_that_is_gone_meanwhile_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("one\n\ntwo")
    source = source_of(tmp_path / "*.txt")
    inventory, documents = source.inventory(), source.documents()
    next(documents)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UserError, match=r"b\.txt: was there when the preparation began, and is gone"):
        list(documents)
    assert source.changed(inventory) == str(tmp_path / "b.txt")


def test_record_needs_record_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="plain text has no records"):
        texts_of(tmp_path / "a.txt", documents="record")
