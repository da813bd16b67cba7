"""Files read in ranges: the same documents, places and complaints as read from beginning to end."""

import gzip
import json
import lzma
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from data_prep.filters.normalise import CleanConfig
from data_prep.readers import plain_text, source
from data_prep.readers.files import TextConfig, TextSource
from data_prep.readers.source import Document, Source, Task


@pytest.fixture(autouse=True, params=[64, 200])
def small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Several ranges in a file of some hundred bytes."""
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 64)
    monkeypatch.setattr(plain_text, "RANGE_BYTES", request.param)
    monkeypatch.setattr(plain_text, "LONGEST_RANGE_BYTES", 1000)
    monkeypatch.setattr(source, "TASK_SIZE", request.param)


def source_of(*paths: Path, **settings: Any) -> TextSource:
    return TextSource(TextConfig(name="t", source="text", paths=list(map(str, paths)), **settings))


def numbered(tasks: Iterator[Task]) -> Iterator[Document]:
    """All documents of the tasks, numbered as in the whole text."""
    begun = Counter[str]()
    for task in tasks:
        before = begun.copy() if task.relative else Counter[str]()
        for document in task.documents():
            begun[document.origin] += document.part == 0
            yield document._replace(number=document.number + before[document.origin])


BLOCKS = "\n\n".join(
    f"text {n} é " + "word " * (n % 7) + "\nand a line " * (n % 3) for n in range(40)
)
RECORDS = "\n".join(json.dumps({"text": f"record {n}\n{'x ' * n}"}) for n in range(30))
MARK = "<|endoftext|>"
SEPARATED: dict[str, Any] = {"documents": "separator", "separator": MARK}
FILES: dict[str, tuple[bytes, dict[str, Any]]] = {
    "a.txt": (BLOCKS.encode(), {}),
    "lines.txt": (BLOCKS.encode(), {"documents": "line"}),
    "whole.txt": (BLOCKS.encode(), {"documents": "file"}),
    "windows.txt": (b"\xef\xbb\xbf" + BLOCKS.replace("\n", "\r\n").encode(), {}),
    "mac.txt": (BLOCKS.replace("\n", "\r").encode(), {}),
    "bom_inside.txt": (BLOCKS.replace("\n\ntext", "\n\n\ufefftext").encode(), {}),
    "blank.txt": (b" \n\n" * 100 + BLOCKS.encode(), {}),
    "many_blank.txt": (BLOCKS.replace("\n\n", "\n" * 60).encode(), {}),
    "parts.txt": (
        ("line of some words\n" * 100 + "\n").encode() * 2 + BLOCKS.encode(),
        {"clean": {"max_characters": 1000}},
    ),
    "long_block.txt": (b"a line\n" * 200 + b"\n\n" + BLOCKS.encode(), {}),
    "a.txt.gz": (gzip.compress(BLOCKS.encode() * 9), {}),
    "a.txt.xz": (lzma.compress(BLOCKS.encode() * 9), {}),
    "a.jsonl": (RECORDS.encode(), {}),
    "html.jsonl": (RECORDS.replace("record 9", "<doc id=9>").encode(), {}),
    "a.csv": (b'id,text\n1,"two\nlines"\n2,one\n', {}),
    "long.csv": (b"id,text\n" + b'1,"two\n\nlines"\n' * 90, {}),
    "wiki_00": (
        b"".join(b'<doc id="%d" title="a">\nA\n\nquay.\n</doc>\n' % n for n in range(40)),
        {},
    ),
    "marked.txt": (BLOCKS.replace("\n\n", f"\n{MARK}\n").encode(), SEPARATED),
    "marked_inside.txt": (BLOCKS.replace("\n", MARK).encode() * 2, SEPARATED),
    "marked_mixed.txt": (
        (MARK + BLOCKS.replace("\n\nt", f" {MARK} \r\n\r\nt") + MARK * 3 + "\n\n").encode(),
        SEPARATED,
    ),
    "marked_parts.txt": (
        ("line of some words\n\n" * 100 + MARK).encode() * 3,
        {**SEPARATED, "clean": {"max_characters": 1000}},
    ),
    "late.txt": (
        BLOCKS.encode() + b'\n\n<doc id="1" title="a">\nno article\n\n' + BLOCKS.encode(),
        {},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_tasks_give_the_documents_of_the_whole_file(name: str, tmp_path: Path) -> None:
    content, settings = FILES[name]
    clean = settings.get("clean")
    settings = {**settings, "clean": CleanConfig(**clean)} if clean else settings
    (tmp_path / "0.txt").write_bytes(b"in front\n\nof it")
    (tmp_path / name).write_bytes(content)
    (tmp_path / "small.txt").write_bytes(b"behind\n\nit")
    opened = source_of(tmp_path / "0.txt", tmp_path / name, tmp_path / "small.txt", **settings)
    expected = list(opened.documents())
    assert list(numbered(opened.tasks())) == expected and len(expected) > 2
    assert list(numbered(Source.tasks(opened))) == expected  # as the main process reads them
    positions = [task.position for task in opened.tasks()]
    assert positions == sorted(positions) and positions[-1] == opened.total


def test_a_file_of_which_the_ends_of_documents_are_known_is_cut(tmp_path: Path) -> None:
    for name in ("a.txt", "lines.txt", "a.txt.xz", "a.jsonl", "marked.txt", "marked_inside.txt"):
        (tmp_path / name).write_bytes(FILES[name][0])
        tasks = list(source_of(tmp_path / name, **FILES[name][1]).tasks())
        sizes = [sum(1 for _ in task.documents()) for task in tasks]
        assert len(tasks) > 3 and len([size for size in sizes if size]) > 1, name


def test_small_files_go_together(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number:02d}.txt").write_text("a word")
    assert len(list(source_of(tmp_path / "*.txt").tasks())) < 20


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0, 2, 1], [1, 1, 0]])
def test_a_range_of_a_compressed_file_is_the_same_in_any_order(
    tmp_path: Path, order: list[int]
) -> None:
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(BLOCKS.encode() * 9))
    tasks = list(source_of(tmp_path / "a.txt.xz").tasks())
    expected = [list(task.documents()) for task in tasks]
    for number in order:
        assert list(tasks[number].documents()) == expected[number]


DAMAGED: dict[str, bytes] = {
    "latin.txt": BLOCKS.encode() + b"\n\nGr\xfc\xdfe\n\n" + BLOCKS.encode(),
    "late_nul.txt": BLOCKS.encode() + b"\n\na\0b\n\n" + BLOCKS.encode(),
    "early_nul.txt": b"a\0b\n\n" + BLOCKS.encode(),
    "empty.txt": b"",
    "cut.txt.xz": lzma.compress(BLOCKS.encode() * 50)[:-40],
    "no_json.jsonl": RECORDS.encode() + b"\n{\n" + RECORDS.encode(),
    "no_text.jsonl": RECORDS.encode() + b'\n{"text": 1}\n',
}


@pytest.mark.parametrize("damaged", ["refuse", "drop"])
@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named_and_counted_as_in_the_whole_file(
    name: str, damaged: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(DAMAGED[name])
    (tmp_path / "small.txt").write_bytes(b"behind\n\nit")
    (tmp_path / "big.txt").write_bytes(BLOCKS.encode())
    paths = [tmp_path / "small.txt", tmp_path / name, tmp_path / "big.txt"]

    def result(read_all: Callable[[TextSource], list[Document]]) -> list[Document] | str:
        try:
            return read_all(source_of(*paths, damaged=damaged))
        except UserError as error:
            return str(error)

    expected = result(lambda opened: list(opened.documents()))
    assert result(lambda opened: list(numbered(opened.tasks()))) == expected
    assert damaged == "drop" or isinstance(expected, str)
