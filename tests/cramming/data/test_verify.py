"""`cramming verify`: one changed byte anywhere in a corpus folder is named, and no run opens such a corpus."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError, file_sha256
from cramming.data.corpus import Corpus
from cramming.data.inspect import problems, verify
from cramming.data.manifest import MANIFEST, NO_CHECKSUM, Manifest
from cramming.files import LOCK


@pytest.fixture
def folder(tmp_path: Path, make_corpus: Callable[..., Path]) -> Path:
    """A corpus with a file of each kind."""
    corpus = make_corpus(tmp_path / "corpus", documents=60)
    files = {
        "corpus_card.md": "# Card",
        "card/lengths.svg": "<svg/>",
        "tasks/CoLA/train.tsv": "a\tb\n",
    }
    for name, text in files.items():
        (corpus / name).parent.mkdir(parents=True, exist_ok=True)
        (corpus / name).write_text(text)
    manifest = Manifest.load(corpus / MANIFEST)
    manifest = replace(manifest, files={name: file_sha256(corpus / name) for name in files})
    (corpus / MANIFEST).write_text(manifest.to_json())
    return corpus


def flip(path: Path, place: int) -> bytes:
    before = path.read_bytes()
    path.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
    return before


def test_an_untouched_corpus_has_no_problems(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / LOCK).write_text("")  # that a kill leaves
    assert not list(problems(folder))
    assert not verify(folder)
    assert "every file is as `prepare` wrote it" in capsys.readouterr().out


def test_a_flipped_bit_in_any_file_is_named_and_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert len(paths) >= 8
    for path in paths:
        before = flip(path, path.stat().st_size // 2)
        messages = list(problems(folder))
        assert len(messages) == 1 and str(path) in messages[0]
        with pytest.raises(UserError, match=path.name):
            Corpus.open(folder, verify=True)
        path.write_bytes(before)
    (folder / "train-00000.bin").write_bytes(b"")
    (problem,) = verify(folder)
    said = capsys.readouterr().out
    assert (
        "train-00000.bin: its SHA-256" in problem
        and problem in said
        and "1 problem(s). Delete" in said
    )


def test_every_single_byte_of_the_manifest_counts(folder: Path) -> None:
    path = folder / MANIFEST
    for place in range(0, path.stat().st_size, 7):
        before = flip(path, place)
        assert len(list(problems(folder))) == 1, before[place - 20 : place + 20]
        with pytest.raises(UserError):
            Corpus.open(folder)
        path.write_bytes(before)


def test_missing_and_unexpected_files_are_named(folder: Path) -> None:
    (folder / "tasks" / "CoLA" / "train.tsv").unlink()
    (folder / "card" / "notes.txt").write_text("mine")
    (folder / "tasks" / "link").symlink_to(folder)
    messages = sorted(problems(folder))
    assert [(": missing" in line, ": unexpected" in line) for line in messages] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    assert (
        "card/notes.txt" in messages[0]
        and "CoLA/train.tsv" in messages[1]
        and "tasks/link" in messages[2]
    )


@pytest.mark.parametrize("section", ["special", "special_ids"])
@pytest.mark.parametrize(
    "change",
    [lambda special: special.pop("mask"), lambda special: special.update(bos=special["sep"])],
)
def test_a_manifest_without_its_five_special_tokens_is_one_line(
    folder: Path, section: str, change: Callable[[dict[str, Any]], object]
) -> None:
    node = json.loads((folder / MANIFEST).read_text())
    change(node["tokenizer"][section])
    text = json.dumps({**node, "checksum": NO_CHECKSUM}, indent=1, sort_keys=True) + "\n"
    signed = text.replace(NO_CHECKSUM, hashlib.sha256(text.encode()).hexdigest(), 1)
    (folder / MANIFEST).write_text(signed)
    with pytest.raises(UserError, match="not pad, unk, cls, sep, mask") as caught:
        Corpus.open(folder)
    assert "manifest.json.tokenizer" in str(caught.value) and section in str(caught.value)


def test_a_folder_without_a_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished corpus and no run here"):
        verify(tmp_path)
