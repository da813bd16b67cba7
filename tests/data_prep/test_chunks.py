"""Files read in stretches by the workers: the same documents, places and complaints as read from beginning to end."""

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from cramming.process_pool import WorkerDiedError
from data_prep.filters.normalise import CleanConfig
from data_prep.normaliser import READ, read, through_workers
from data_prep.sources import plain_text, text
from data_prep.sources.source import Document
from data_prep.sources.text import TextConfig, TextSource
from data_prep.workers import Workers


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several stretches in a file of some hundred bytes."""
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 64)
    monkeypatch.setattr(plain_text, "LONGEST_STRETCH", 400)
    monkeypatch.setattr(text, "CHUNK_CHARACTERS", 300)


def source_of(*paths: Path, **settings: Any) -> TextSource:
    return TextSource(TextConfig(name="t", source="text", paths=list(map(str, paths)), **settings))


def by_workers(source: TextSource) -> list[Document]:
    documents: list[Document] = []
    with Workers(1, {READ: read}) as workers:
        for named, found in through_workers(READ, source.chunks(), workers):
            rows = enumerate(zip(found.contents, named.source_D.tolist(), named.part_D.tolist()))
            documents += [
                named.others.get(n)
                or Document(text, named.name(n), named.sources[source], part=part)
                for n, (text, source, part) in rows
            ]
    return documents


BLOCKS = "\n\n".join(
    f"text {n} é " + "word " * (n % 7) + "\nand a line " * (n % 3) for n in range(40)
)
RECORDS = "\n".join(json.dumps({"text": f"record {n}\n{'x ' * n}"}) for n in range(30))
FILES: dict[str, tuple[bytes, dict[str, Any]]] = {
    "a.txt": (BLOCKS.encode(), {}),
    "lines.txt": (BLOCKS.encode(), {"documents": "line"}),
    "whole.txt": (BLOCKS.encode()[:300], {"documents": "file"}),
    "too_long.txt": (BLOCKS.encode(), {"documents": "file"}),
    "windows.txt": (b"\xef\xbb\xbf" + BLOCKS.replace("\n", "\r\n").encode(), {}),
    "mac.txt": (BLOCKS.replace("\n", "\r").encode(), {}),
    "bom_inside.txt": (BLOCKS.replace("\n\ntext", "\n\n\ufefftext").encode(), {}),
    "blank.txt": (b" \n\n" * 100 + BLOCKS.encode(), {}),
    "parts.txt": (
        ("line of some words\n" * 100 + "\n").encode() * 2 + BLOCKS.encode(),
        {"clean": {"max_characters": 1000}},
    ),
    "long_block.txt": (b"a line\n" * 200 + b"\n\n" + BLOCKS.encode(), {}),
    "a.txt.gz": (gzip.compress(BLOCKS.encode()), {}),
    "a.txt.xz": (lzma.compress(BLOCKS.encode()), {}),
    "a.jsonl": (RECORDS.encode(), {}),
    "html.jsonl": (RECORDS.replace("record 9", "<doc id=9>").encode(), {}),
    "a.csv": (b'id,text\n1,"two\nlines"\n2,one\n', {}),
    "long.csv": (b"id,text\n" + b'1,"two\n\nlines"\n' * 90, {}),
    "wiki_00": (
        b"".join(b'<doc id="%d" title="a">\nA\n\nquay.\n</doc>\n' % n for n in range(40)),
        {},
    ),
    "late.txt": (
        BLOCKS.encode() + b'\n\n<doc id="1" title="a">\nno article\n\n' + BLOCKS.encode(),
        {},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_stretches_give_the_documents_of_the_whole_file(name: str, tmp_path: Path) -> None:
    content, settings = FILES[name]
    clean = settings.get("clean")
    settings = {**settings, "clean": CleanConfig(**clean)} if clean else settings
    (tmp_path / "0.txt").write_bytes(b"in front\n\nof it")
    (tmp_path / name).write_bytes(content)
    (tmp_path / "small.txt").write_bytes(b"behind\n\nit")
    paths = [tmp_path / "0.txt", tmp_path / name, tmp_path / "small.txt"]
    expected = list(source_of(*paths, **settings).documents())
    source = source_of(*paths, **settings)
    assert by_workers(source) == expected and len(expected) > 2
    assert source.position == source.total


def test_no_process_but_a_worker_reads_text_of_which_the_pieces_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("a.txt", "a.txt.xz", "a.jsonl", "html.jsonl")
    for name in (*names, "whole.txt"):
        (tmp_path / name).write_bytes(FILES[name][0])
    monkeypatch.setattr(
        TextSource, "documents_of", lambda *_: pytest.fail("read from its beginning")
    )
    assert len(by_workers(source_of(*(tmp_path / name for name in names)))) == 140
    assert len(by_workers(source_of(tmp_path / "whole.txt", documents="file"))) == 1


def test_what_a_process_of_its_own_unpacks_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = {
        "a.xz": lzma.compress,
        "b.gz": gzip.compress,
        "c.xz": lambda data: lzma.compress(data)[:-40],
    }
    for name, pack in packed.items():
        (tmp_path / name).write_bytes(pack(BLOCKS.encode() * 50))
    (tmp_path / "plain.txt").write_bytes(BLOCKS.encode())
    paths = [tmp_path / name for name in ("a.xz", "plain.txt", "b.gz")]
    expected = list(source_of(*paths, format="txt").documents())
    monkeypatch.setattr(text, "UNPACKED_HERE", 0)
    read_here = plain_text.blocks_of
    monkeypatch.setattr(
        plain_text,
        "blocks_of",
        lambda path: read_here(path) if path.suffix == ".txt" else pytest.fail(str(path)),
    )
    assert by_workers(source_of(*paths, format="txt")) == expected and len(expected) > 3900
    with pytest.raises(
        UserError, match=r"c\.xz: cannot be read as \.xz: .*; is it whole\? get it anew"
    ):
        by_workers(source_of(*paths, tmp_path / "c.xz", format="txt"))


def test_an_unpacker_that_died_is_no_damage_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(*_: object) -> Iterator[plain_text.Block]:
        yield BLOCKS[:100].encode(), 10
        raise WorkerDiedError(text.UNPACKER_DIED)

    (tmp_path / "a.xz").write_bytes(lzma.compress(BLOCKS.encode()))
    monkeypatch.setattr(text, "UNPACKED_HERE", 0)
    monkeypatch.setattr(plain_text, "unpacked", died)
    with pytest.raises(WorkerDiedError):
        by_workers(source_of(tmp_path / "a.xz", format="txt", damaged="drop"))


DAMAGED: dict[str, bytes] = {
    "latin.txt": BLOCKS.encode() + b"\n\nGr\xfc\xdfe\n\n" + BLOCKS.encode(),
    "late_nul.txt": BLOCKS.encode() + b"\n\na\0b\n\n" + BLOCKS.encode(),
    "early_nul.txt": b"a\0b\n\n" + BLOCKS.encode(),
    "empty.txt": b"",
    "cut.txt.xz": lzma.compress(BLOCKS.encode() * 50)[:-40],
    "no_json.jsonl": RECORDS.encode() + b"\n{\n" + RECORDS.encode(),
    "no_text.jsonl": RECORDS.encode() + b'\n{"a": 1}\n',
}


@pytest.mark.parametrize("damaged", ["refuse", "drop"])
@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_told_or_counted_as_ever(name: str, damaged: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(DAMAGED[name])
    (tmp_path / "small.txt").write_bytes(b"behind\n\nit")
    (tmp_path / "big.txt").write_bytes(BLOCKS.encode())
    paths = [tmp_path / "small.txt", tmp_path / name, tmp_path / "big.txt"]

    def result(read_all: Callable[[TextSource], list[Document]]) -> list[Document] | str:
        try:
            return read_all(source_of(*paths, damaged=damaged))
        except UserError as error:
            return str(error)

    expected = result(lambda source: list(source.documents()))
    assert result(by_workers) == expected and (damaged == "drop" or isinstance(expected, str))


def test_the_corpus_is_that_of_one_reader(
    tmp_path: Path, text_file: Path, text_config: Any, run: Any, contents: Any
) -> None:
    """With a limit on documents the text is read by the main process from its beginning."""
    corpora = [
        run(
            text_config(
                text_file, corpus=str(tmp_path / str(limit)), shard_tokens=3000, max_documents=limit
            )
        )
        for limit in (None, 1_000_000)
    ]
    by_name = [
        {name: data for name, data in contents(corpus.folder).items() if "." in name}
        for corpus in corpora
    ]
    for files in by_name:
        del files["manifest.json"], files["corpus_card.md"]  # they name the settings
    assert by_name[0] == by_name[1] and len(by_name[0]) > 6
    assert corpora[0].manifest.stages == corpora[1].manifest.stages
