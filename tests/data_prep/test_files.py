"""Local files: every format and compression gives the same documents, and every complaint names the place."""

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
import multiprocessing
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import datasets
import pyarrow
import pytest
import zstandard
from pyarrow import ipc, parquet
from pydantic import ValidationError

from cramming.config import UserError, file_sha256
from data_prep.filters.normalise import CleanConfig, normalize
from data_prep.readers import plain_text
from data_prep.readers.files import FORMATS, TextConfig, TextSource, format_of
from data_prep.readers.hub import HubConfig, HubSource
from data_prep.readers.plain_text import DOCUMENTS, TextFile
from data_prep.readers.source import Document

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
    return parquet_of({"id": range(len(texts)), "text": texts})


def parquet_of(columns: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def arrow_of(columns: dict[str, Any], writer: Any = ipc.new_stream) -> bytes:
    table, buffer = pyarrow.table(columns), io.BytesIO()
    with writer(buffer, table.schema) as sink:
        sink.write_table(table, max_chunksize=2)
    return buffer.getvalue()


def jsonl_of(records: list[Any]) -> bytes:
    return "\n".join(map(json.dumps, records)).encode()


WRITERS: dict[str, Callable[[list[str]], bytes]] = {
    ".txt": lambda texts: "\n\n".join(texts).encode(),
    ".jsonl": lambda texts: "\n".join(
        json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)
    ).encode(),
    ".csv": as_csv,
    ".tsv": lambda texts: "\n".join(
        ["id\ttext", *(f"{i}\t{text}" for i, text in enumerate(texts))]
    ).encode(),
    ".parquet": as_parquet,
    ".arrow": lambda texts: arrow_of({"text": texts}),
    ".feather": lambda texts: arrow_of({"text": texts}, ipc.new_file),
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
    names = {
        "x.JSONL.GZ": "jsonl",
        "wiki_core.00.xz": "txt",
        "a.xml.bz2": "wikipedia",
        "b.warc.wet.gz": "wet",
    }
    names |= {
        "big.jsonl.00": "jsonl",
        "big.JSONL.000.zst": "jsonl",
        "wiki.en.00": "txt",
        "b.csv.1": "csv",
    }  # parts
    assert {name: format_of(Path(name)) for name in names} == names
    suffixes = [suffix for kind in FORMATS.values() for suffix in kind.suffixes]
    assert len(suffixes) == len(set(suffixes))
    assert set(get_args(get_args(get_type_hints(TextConfig)["format"])[0])) == set(FORMATS)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_no_part_of_an_archive_is_lost_without_a_word(tmp_path: Path, suffix: str) -> None:
    """Wherever it is cut: the whole text, or a complaint; junk behind the first frame, or one that is damaged, too."""
    path, compress = tmp_path / f"a.txt{suffix}", COMPRESS[suffix]
    one, two = compress(b"one\n\n"), compress(b"two\n")
    damaged = [(one + two)[:end] for end in range(1, len(one + two)) if end != len(one)]
    for data in (*damaged, one + b"junk that is no frame", one + bytes([two[0] ^ 255]) + two[1:]):
        path.write_bytes(data)
        with pytest.raises(UserError, match=rf"cannot be read as \{suffix}"):
            texts_of(path)
    empty, padding = compress(b""), bytes(8) * (suffix == ".xz")
    path.write_bytes(empty + one + padding + empty + two)
    assert texts_of(path) == ["one", "two"]
    for data in (b"", empty):
        path.write_bytes(data)
        with pytest.raises(UserError, match="empty file"):
            texts_of(path)


def long_window(log: int, content: bytes) -> bytes:
    """A .zst file as by `zstd --long=<log>` of a stream, in several blocks."""
    parameters = zstandard.ZstdCompressionParameters(window_log=log, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(content) + compressor.flush()


@pytest.mark.parametrize("log", [28, 31])
def test_long_windows_of_zstd_are_read(tmp_path: Path, log: int) -> None:
    path, content = tmp_path / "a.txt.zst", b"".join(b"%d\n\n" % n for n in range(300_000))
    path.write_bytes(long_window(log, content))
    assert zstandard.get_frame_parameters(path.read_bytes()).window_size == 1 << log
    assert "\n\n".join([*texts_of(path), ""]).encode() == content


def test_how_text_is_cut_into_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffa b\r\nc\r\n\r\n \r\nd\ne".encode())
    assert texts_of(path, documents="line") == ["a b", "c", "d", "e"]
    assert texts_of(path, documents="block") == ["a b\nc", "d\ne"]
    assert texts_of(path, documents="file") == ["a b\nc\n\n \nd\ne"]


def test_text_is_cut_at_separators_on_lines_of_their_own_and_within_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("<|e|>\na\n\nb\n<|e|>\n\n c <|e|>d<|e|><|e|>\n|e|> \n<|e|>\n")
    texts = texts_of(path, documents="separator", separator="<|e|>")
    assert [text.split() for text in texts] == [["a", "b"], ["c"], ["d"], ["|e|>"]]


@pytest.mark.parametrize(
    "settings",
    [
        {"documents": "separator"},
        {"separator": "--"},
        {"documents": "separator", "separator": " "},
        {"documents": "separator", "separator": "a\nb"},
    ],
)
def test_a_separator_goes_with_its_setting(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="separator="):
        source_of("a.txt", **settings)


def test_parts_of_a_long_line_are_no_longer_than_documents(tmp_path: Path) -> None:
    """A longer text would be in memory several times before it is cut."""
    path, text = tmp_path / "a.txt", "word " * 2_000_000
    path.write_text(text)
    parts = list(TextFile(path).lines())
    assert "".join(parts) == text
    assert max(map(len, parts)) <= CleanConfig().max_characters


def test_a_long_line_is_cut_behind_a_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_text("some words, and<|e|>" * 100)
    lines = list(TextFile(path).lines(128, "<|e|>"))
    assert len(lines) > 10 and set("".join(lines).split("<|e|>")) == {"some words, and", ""}
    assert all(line.endswith("<|e|>") for line in lines)


def test_articles_that_wikiextractor_made_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "wiki_00"
    articles = [
        "Quay\n\nA quay is a place.<br />It is old.\n",
        'The "Docks"\n\nThey are <doc>uments.\n',
    ]
    path.write_text(
        "".join(f'<doc id="{n}" title="a">\n{a}\n</doc>\n' for n, a in enumerate(articles))
    )
    expected = [article.rstrip("\n") for article in articles]
    assert texts_of(path) == texts_of(path, documents="file") == expected
    path.write_text(" \n\n" + path.read_text())
    assert texts_of(path) == expected
    assert normalize(expected[0], CleanConfig()) == "Quay\nA quay is a place.\nIt is old."
    path.write_text('a "<doc id=" in a text\n\nb')
    assert texts_of(path) == ['a "<doc id=" in a text', "b"]


def test_globs_are_sorted_and_files_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wiki").mkdir()
    for name in ("wiki/b.00.xz", "wiki/a.txt.xz"):
        (tmp_path / name).write_bytes(lzma.compress(name.encode()))
    (tmp_path / "z.txt").write_text("z")
    assert texts_of(Path("z.txt"), Path("wiki/*.xz")) == ["z", "wiki/a.txt.xz", "wiki/b.00.xz"]


def test_a_folder_that_is_there_is_no_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [
        Path(place) for place in ("a.txt", "b/sp ace, [br] (x)/c.txt", "b/sp ace, [br] (x)/d/e.txt")
    ]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    (tmp_path / "b/sp ace, b (x)").mkdir()
    for root in ("", f"{tmp_path}/", "b/../"):
        for pattern, found in (
            ("b/sp ace, [br] (x)/*.txt", paths[1:2]),
            ("b/*/*.txt", paths[1:2]),
            ("b/sp ace, [br] (x)/*/*", paths[2:]),
            ("b/**", paths[1:]),
            ("b/**/*.txt", paths[1:]),
            ("**", paths),
        ):
            assert source_of(root + pattern).paths == [Path(root + str(path)) for path in found], (
                root + pattern
            )


def test_lines_of_any_length_come_whole_or_in_parts_that_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 64)
    for text in ("word " * 100, "é" * 300, "x" * 255 + "\n" + "y" * 10, "a\n" * 200):
        path = tmp_path / "a.txt"
        path.write_text(text, encoding="utf-8")
        assert list(TextFile(path).lines(longest=10_000)) == text.removesuffix("\n").split("\n")
        parts = list(TextFile(path).lines(longest=128))
        assert "".join(parts) == text.replace("\n", "") and max(map(len, parts)) <= 256
    path.write_text("x" * 2_000_000)
    begun = time.process_time()
    assert [len(line) for line in TextFile(path).lines()] == [2_000_000]
    assert time.process_time() - begun < 3  # copied anew with each of its blocks: 31 GB


def test_what_unpacks_to_far_more_is_unpacked_bit_by_bit(tmp_path: Path) -> None:
    path, before = tmp_path / "a.txt.bz2", pyarrow.total_allocated_bytes()
    path.write_bytes(bz2.compress(b"a" * (1 << 25)))
    with TextFile(path).decompressed() as handle:
        assert handle.read(1 << 20) == b"a" * (1 << 20)
        assert pyarrow.total_allocated_bytes() - before < 1 << 23


@pytest.mark.parametrize("documents", ["block", "file"])
def test_long_blocks_and_files_come_in_parts_that_lose_nothing(
    tmp_path: Path, documents: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(5000)))
    parts = list(DOCUMENTS[documents](TextFile(path).lines(), 1000))
    assert "".join(text for text, _ in parts) == path.read_text()
    lengths = [len(text) for text, _ in parts]
    assert (
        max(lengths) <= 1000 and min(lengths[:-1]) > 980
    )  # full of whole lines, and no crumbs between
    assert [part for _, part in parts] == list(range(len(parts)))
    parts = list(DOCUMENTS[documents](iter(["short", "x" * 1500, "short", "y" * 300]), 1000))
    assert [(len(text), part) for text, part in parts] == [
        (1507, 0),
        (307, 1),
    ]  # no crumb in front of a long line


def test_the_parts_of_a_document_are_numbered_anew_for_each(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(("word\n" * 500 + "\n") * 2 + "end\n")
    documents = read(path, clean=CleanConfig(max_characters=1000))
    assert [document.part for document in documents] == [0, 1, 2, 0, 1, 2, 0]
    assert (documents[3].number, documents[-1].number) == (1, 2)


def not_utf8() -> bytes:
    """Writers do not check: the column says text and holds other bytes."""
    column = pyarrow.array([b"one", b"caf\xe9 au lait"])
    return as_parquet(pyarrow.Array.from_buffers(pyarrow.string(), 2, column.buffers()))


ERRORS: dict[str, tuple[Any, ...]] = {
    "empty": (".txt", b"", "empty file"),
    "binary far on": (
        ".txt",
        b"word\n" * 400_000 + b"\x7fELF\0\0",
        "binary file .a NUL byte at offset 2000004.",
    ),
    "latin-1 far on": (
        ".txt",
        b"0123456789\n" * 200_000 + b"012\xff\n",
        r"byte 2200003 \(line 200001\)",
    ),
    "deep json": (".jsonl", b'{"text": "a"}\n' + b"[" * 200_000, r"a\.jsonl:2: not a JSON object"),
    "json array": (
        ".json",
        b'[\n {"text": "a"}\n]',
        r"not a JSON object on one line .*`jq -c '\.\[\]'`",
    ),
    "json field": (
        ".jsonl",
        b'{"title": "a", "body": "b"}',
        "no text in field 'text' .*fields title, body",
    ),
    "json type": (".jsonl", b'{"text": 3}', "no text in field 'text' of a record, but int"),
    "json parent that is text": (
        ".jsonl",
        b'{"title": "a"}',
        "no text in field 'title.text' of the first records .*fields title ",
        {"text_field": "title.text"},
    ),
    "json list of objects": (
        ".jsonl",
        b'{"turns": [{"text": "a"}]}',
        r"no text in field 'turns.text' .*fields turns \(list\)",
        {"text_field": "turns.text"},
    ),
    "json parent that is null first": (
        ".jsonl",
        b'{"t": "a", "m": null}\n' * 200 + b'{"t": "a", "m": {"text": "b"}}',
        "no text in field 'm.txt' of the first records .*fields t, m.text ",
        {"text_field": ["t", "m.txt"]},
    ),
    "csv semicolons": (".csv", b"id;text\n1;a\n", "among id;text .*with commas"),
    "parquet list": (
        ".parquet",
        as_parquet([["a"], ["b"]]),
        r"row 1: .*, but list \(make it one text\)",
    ),
    "shift-jis": (
        ".txt",
        "日本".encode("shift_jis"),
        r"`iconv -f <its encoding> -t UTF-8 a\.txt > utf8-a\.txt`, .*shift_jis",
    ),
    "tsv quotes": (
        ".tsv",
        b'id\ttext\n1\t"first line\nsecond line"\n',
        r"a\.tsv:3: 1 columns.*a quoted field with a line",
    ),
    "tsv quotes first": (
        ".tsv",
        b'text\tid\n"first line\nsecond line"\t1\n',
        r"a\.tsv:2: 1 columns.*a quoted field",
    ),
    "json list of texts": (".jsonl", b'[{"text": "a"}]', r"but list \(turn other JSON into lines"),
    "csv field": (".csv", b"title,body\n1,2\n", "not one column 'text' among title, body"),
    "csv row": (".tsv", b"id\ttext\n1\n", r"a\.tsv:2: 1 columns, the header has 2"),
    "csv open quote": (
        ".csv",
        b'id,text\n1,"o\n2,b\n',
        r"a\.csv:3: .*row begins in line 2: is a quote left open",
    ),
    "csv names": (".csv", b"text,text\n1,2\n", r"a\.csv: not one column 'text'"),
    "csv part": (".csv.1", b"3,word\n", r"among 3, word \(set data.text_field; join the parts"),
    "parquet part": (".parquet.01", b"word" * 9, "not a readable parquet file: .*is it whole"),
    "parquet utf-8": (".parquet", not_utf8(), "not a readable parquet file: 'utf-8'"),
    "parquet": (".parquet", b"PAR1 but not really", "not a readable parquet file"),
    "gzip": (".txt.gz", b"not gzip at all", r"cannot be read as \.gz"),
    "zstd": (".txt.zst", b"not zstd at all", r"cannot be read as \.zst"),
    "arrow": (".arrow", b"not arrow at all", "not a readable Arrow file: .*is it whole"),
    "several fields": (
        ".csv",
        b"title,text\n1,2\n",
        "not one column 'body' among title, text",
        {"text_field": ["text", "body"]},
    ),
    "suffix": (".docx", b"text", "format not known from its name"),
}


OTHER_CONTENT = {  # of a file whose name says plain text -> what it looks like, and the cure
    "JSON lines": (WRITERS[".jsonl"](TEXTS), "JSON, .*data.format=jsonl"),
    "JSON with a mark": (b"\xef\xbb\xbf" + WRITERS[".jsonl"](TEXTS), "JSON, .*data.format=jsonl"),
    "pretty JSON": (b'[\n  {\n "text": "a"}]', "JSON, .*data.format=jsonl"),
    "CSV": (as_csv(TEXTS), r"a table \(CSV\), .*data.format=csv"),
    "CSV cut in a row": (as_csv([*TEXTS, '"long" ' * 20_000]), r"a table \(CSV\)"),
    "TSV": (WRITERS[".tsv"](TEXTS), r"a table \(TSV\), .*data.format=tsv"),
    "CSV with semicolons": (as_csv(TEXTS).replace(b",", b";"), "semicolons.*Write it with commas"),
    "HTML": (b"\n<!-- saved -->\n<!DOCTYPE html>\n<html><p>Text", "HTML, .*Extract"),
    "body of HTML": (
        b'<p class="a">One\nline.</p>\n\nAnother <p>b</p>\n<div>c</div>',
        "HTML, .*Extract",
    ),
    "titles and HTML": (b"Title\n" + b"\n<p>Text <b>x</b></p>\n" * 3, "HTML, .*Extract"),
    "XML": (b'<?xml version="1.0"?>\n<TEI>', "XML, .*Extract"),
    "dump": (b'<mediawiki xmlns="http://x">\n', "Wikipedia dump, .*data.format=wikipedia"),
    "WET": (b"WARC/1.0\r\nWARC-Type: warcinfo", "WARC file, .*data.format=wet"),
    "parquet": (as_parquet(TEXTS), "parquet, .*data.format=parquet"),
    **{name: (COMPRESS[name](b"text"), rf"suffix \{name}") for name in COMPRESS if name},
}


@pytest.mark.parametrize("suffix", ["", ".txt", ".txt.gz", "-00000", ".html"])
@pytest.mark.parametrize("name", OTHER_CONTENT)
def test_what_is_not_plain_text_is_not_taken_for_it(tmp_path: Path, name: str, suffix: str) -> None:
    content, message = OTHER_CONTENT[name]
    path = tmp_path / f"part{suffix}"
    path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](content))
    with pytest.raises(UserError, match=message):
        source_of(path)
    assert source_of(path, format="txt").paths == [path]


@pytest.mark.parametrize(
    "text",
    [
        "Mother, father, and the dog\nsat there, silent, all\nday, night, and day\n",
        "import os,sys\nprint(os.name,sys.path)\n",
        "{ braces } are no JSON\n\n{a, b}\n",
        "# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
        "<doc> is a tag, <html> another\n",
        "<!-- a comment -->\n" * 100 + "text\n",
        "<p> begins and </p> ends a paragraph\n",
        "# Title\n\n<div align='center'>\n\n[![x](y)](z)\n\n</div>\n\nText.\n",
        "<div align='center'>\n<h1>Title</h1>\n<p>Badges</p>\n</div>\n" + "Markdown.\n\n" * 40,
        "def page():\n    return (\n'<p>a</p>'\n'<p>b</p>'\n'<p>c</p>'\n)\n\nprint(page())\n",
        '"Yes," he said,\n"no," she said,\n',
        "a,b\n",
        "key: value\nother: value\n",
    ],
)
def test_plain_text_is_not_taken_for_anything_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text)
    assert texts_of(path, documents="file") == [text.rstrip("\n")]


@pytest.mark.parametrize(
    "text", ["Some words, and more.\n\nEnd.\n" * 9, "東京は夜。\n大阪は朝。\n" * 9]
)
@pytest.mark.parametrize("name", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_wide_encodings_are_named(tmp_path: Path, text: str, name: str, mark: str) -> None:
    shown = name[:6] if mark else name[:6] + name[7:]
    convert = f"iconv -f {shown.upper()} -t UTF-8"
    for suffix, command in (
        ("", f"{convert} a.txt > utf8-a.txt"),
        (".gz", f"gzip -dc a.txt.gz | {convert} > utf8-a.txt"),
    ):
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(COMPRESS[suffix]((mark + text).encode(name)))
        with pytest.raises(UserError, match=re.escape(f"`{command}`")):
            texts_of(path)


META = [{"text": "one", "n": 1}, {"text": None, "n": 2}, None]
TITLES = ["A", "B", None]
NULLS = {  # records, fields -> their texts; None: null
    "JSON null": (".jsonl", jsonl_of([{"text": "a"}, {"text": None}]), "text", ["a", None]),
    "JSON field missing": (".jsonl", jsonl_of([{}, {"text": "a"}]), "text", [None, "a"]),
    "JSON text empty": (".jsonl", jsonl_of([{"text": ""}, {"text": "a"}]), "text", ["", "a"]),
    "CSV cell empty": (".csv", b'id,text\n1,\n2,a\n3,""\n', "text", [None, "a", None]),
    "parquet null": (".parquet", as_parquet(["a", None]), "text", ["a", None]),
    "Arrow null": (".arrow", arrow_of({"text": ["a", None, "b"]}), "text", ["a", None, "b"]),
    "JSON nested": (
        ".jsonl",
        jsonl_of([{"t": "A", "m": {"x": {"y": "one"}}}, {"m": None}, {"m": {"x": {"y": "two"}}}]),
        ["t", "m.x.y"],
        ["A\n\none", None, "two"],
    ),
    "JSON literal": (".jsonl", jsonl_of([{"a.b": "A", "a": {"b": "B"}}]), "a.b", ["A"]),
    "parquet nested": (
        ".parquet",
        parquet_of({"title": TITLES, "m": META}),
        ["title", "m.text"],
        ["A\n\none", "B", None],
    ),
    "parquet literal": (
        ".parquet",
        parquet_of({"m.text": TITLES, "m": META}),
        "m.text",
        TITLES,
    ),
    "Arrow nested": (
        ".arrow",
        arrow_of({"title": TITLES, "m": META}),
        ["m.text", "title"],
        ["one\n\nA", "B", None],
    ),
    "CSV columns": (".csv", b"a,b.c\nA,B\n,C\n", ["a", "b.c"], ["A\n\nB", "C"]),
}


@pytest.mark.parametrize("name", NULLS)
def test_nulls_are_counted_and_fields_may_be_several(tmp_path: Path, name: str) -> None:
    suffix, data, fields, expected = NULLS[name]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)
    documents = read(path, text_field=fields)
    assert [None if d.damage else d.text for d in documents] == expected
    assert {d.damage for d in documents} <= {None, ("null", 0)}
    assert [d.number for d in documents] == list(range(len(expected)))


def test_a_field_that_no_record_has_is_an_error_in_tasks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_text, "RANGE_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl_of([{"m": {"text": f"text {n}"}, "id": n} for n in range(300)]))
    tasks = list(source_of(path, text_field="m.text").tasks())
    assert len(tasks) > 20
    texts = [document.text for task in tasks for document in task.documents()]
    assert texts == [f"text {n}" for n in range(300)]
    first = next(iter(source_of(path, text_field=["m.text", "m.titel"]).tasks()))
    with pytest.raises(UserError, match=r"a\.jsonl:\d+: no text in field 'm.titel' .*m\.text, id"):
        list(first.documents())


def test_separators_that_overlap_are_found_alike_in_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task may begin in a run of dashes, of which a whole file has another number."""
    monkeypatch.setattr(plain_text, "RANGE_BYTES", 40)
    runs = random.Random(0)
    words = [f"{'-' * runs.randrange(9)}\nword {number}" for number in range(400)]
    path = tmp_path / "a.txt"
    path.write_text("".join(words))
    opened = source_of(path, documents="separator", separator="---")
    tasks = list(opened.tasks())
    texts = [document.text for task in tasks for document in task.documents()]
    assert len(tasks) > 20 and texts == [document.text for document in opened.documents()]


def test_what_save_to_disk_wrote_is_read_by_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    data = datasets.Dataset.from_dict({"text": [*TEXTS, None]})
    datasets.DatasetDict({"train": data}).save_to_disk(folder)
    for place in (folder, folder / "train"):
        with pytest.raises(UserError, match=r"`save_to_disk`. Name .*\*\*/\*\.arrow"):
            source_of(place)
        with pytest.raises(UserError, match=r"`save_to_disk`.*\*\*/\*\.arrow"):
            HubSource(HubConfig(name="h", source="hub", dataset=str(place)))
    assert texts_of(folder / "**/*.arrow") == [*TEXTS, ""]


@pytest.mark.parametrize("name", ERRORS)
def test_a_bad_file_is_a_one_line_user_error(tmp_path: Path, name: str) -> None:
    suffix, data, message, *settings = ERRORS[name]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as error:
        texts_of(path, **dict(*settings))
    assert path.name in str(error.value) and "\n" not in str(error.value)


def test_quotes_are_text_in_tsv_as_glue_has_it(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"Yes," she said.\n2\t"No."\n3\ta 5" disk\n')
    assert texts_of(tmp_path / "a.tsv") == ['"Yes," she said.', '"No."', 'a 5" disk']
    (tmp_path / "a.tsv").write_text('id\ttext\n1\tone "two"\n2\n')
    with pytest.raises(UserError, match=r"a\.tsv:3: 1 columns, the header has 2$"):
        texts_of(tmp_path / "a.tsv")


def test_what_the_system_says_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is away for a moment must not cost the shards that are finished."""
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"text\n"))

    def away(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(gzip.GzipFile, "read", away)
    with pytest.raises(OSError, match="Input/output") as error:
        texts_of(path)
    assert error.value.filename == str(path)  # not the corpus, which is what the caller works on


def test_a_damaged_page_of_parquet_is_known_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"{number} " + "word " * 50 for number in range(100)]})
    parquet.write_table(
        table, path, write_page_checksum=True, compression="none", use_dictionary=False
    )
    assert len(texts_of(path)) == 100
    data = bytearray(path.read_bytes())
    data[9000:9004] = b"####"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.parquet: .*checksum.*is it whole"):
        texts_of(path)


@pytest.mark.parametrize("block_bytes", [1, 64])
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


@pytest.mark.parametrize("place", [0, 9, 19])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv"])
def test_a_stray_nul_byte_costs_one_document_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, place: int
) -> None:
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 4000)
    path, texts = (
        tmp_path / f"a{suffix}",
        [f"text {number} " + "word " * 100 for number in range(20)],
    )
    data = WRITERS[suffix](texts)
    path.write_bytes(data.replace(b"text %d w" % place, b"text %d \0w" % place))
    documents = read(path, damaged="drop")
    assert [document.damage and document.damage.reason for document in documents] == [
        "binary" if number == place else None for number in range(20)
    ]
    path.write_bytes(data.decode().encode("utf-16"))
    assert [
        document.damage and document.damage.reason for document in read(path, damaged="drop")
    ] == ["binary_file"]


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
        (["nothing.txt"], "nothing.txt is no file"),
        (["*.nothing"], r"\*.nothing is no file"),
        (["."], r"data\.paths: \. is a folder; name the files in it"),
        (["folder"], r"folder is a folder; .*'folder/\*\.txt' or 'folder/\*\*'"),
        (["f**/a.txt"], r"f\*\*/a\.txt is no file"),
        (["pipe.txt"], "pipe.txt is no file"),
    ],
)
def test_bad_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match=message):
        source_of(*paths)
    assert source_of("a.txt", "a.t*").paths == [Path("a.txt")]


def sha256_elsewhere(path: Path) -> str:
    assert multiprocessing.parent_process() is not None
    return file_sha256(path)


def test_processes_hash_files_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    alone = source_of(tmp_path / "*.txt", workers=1).inventory()
    monkeypatch.setattr("data_prep.readers.files.HASHED_HERE", 0)
    monkeypatch.setattr("data_prep.readers.files.file_sha256", sha256_elsewhere)
    assert source_of(tmp_path / "*.txt", workers=2).inventory() == alone


def test_a_file_that_is_gone_has_changed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    source = source_of(tmp_path / "*.txt")
    inventory = source.inventory()
    assert source.changed(inventory) is None
    (tmp_path / "a.txt").unlink()
    assert source.changed(inventory) == str(tmp_path / "a.txt")


def test_record_needs_record_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="plain text has no records"):
        texts_of(tmp_path / "a.txt", documents="record")
