"""`cramming inspect`: the counts are the corpus's own, the texts those that were prepared."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.config import UserError
from cramming.data import inspect
from cramming.data.corpus import Corpus
from cramming.data.inspect import main
from cramming.invocation import Invocation
from data_prep import prepare


def show(folder: Path, **options: Any) -> None:
    main(path=folder, **{"split": "train", "documents": 2, "document": None, **options})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    place = tmp_path_factory.mktemp("inspect")
    lines = [" ".join(f"word{(i * j) % 97}" for j in range(5, 8 + i)) for i in range(60)]
    (place / "a.txt").write_text("\n\n".join(lines))
    data = {
        "name": "t",
        "source": "text",
        "paths": [str(place / "a.txt")],
        "validation_fraction": 0.1,
    }
    data["corpus"] = str(place / "corpus")
    tokenizer = {"kind": "wordpiece", "vocab_size": 200}
    prepare.main({"data": data, "tokenizer": tokenizer}, Invocation())
    return Corpus.open(place / "corpus")


def test_counts_lengths_sources_and_texts_are_shown(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    show(corpus.folder)
    out = capsys.readouterr().out
    stream = corpus.stream("train")
    lengths = np.diff(np.append(stream.document_starts, stream.num_tokens))
    rows = [line.split() for line in out.splitlines()]
    shards = str(len(corpus.manifest.splits["train"]))
    assert ["train", str(stream.num_documents), f"{stream.num_tokens:,}", shards] in rows
    train = next(row for row in rows if row[0] == "train" and len(row) == 7)
    assert train[1:4:2] == [str(lengths.min()), f"{np.median(lengths):.0f}"] and train[5] == str(
        lengths.max()
    )
    documents = corpus.manifest.counts["documents"]
    assert any(
        row[0].endswith("a.txt") and row[1] == str(documents) for row in rows if len(row) == 4
    )
    assert (
        "train document 0," in out and "train document 1," in out and "train document 2," not in out
    )
    assert "word" in out and "[CLS]" not in out


def test_one_document_is_shown_whole(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    last = corpus.stream("train").num_documents - 1
    show(corpus.folder, document=last)
    shown = capsys.readouterr().out.split("tokens:\n")[1].strip()
    assert len(shown) > 400 and shown in (corpus.folder.parent / "a.txt").read_text()
    with pytest.raises(
        UserError, match=rf"--document={last + 1}: the train split .* documents 0 to {last}"
    ):
        show(corpus.folder, document=last + 1)


def test_the_lines_of_a_document_stay_lines_and_steer_no_terminal(
    corpus: Corpus, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "_texts", lambda *_: [(0, 3, "one\n\ntwo\x1b[2J")])
    show(corpus.folder, documents=1)
    assert capsys.readouterr().out.endswith(" tokens:\none\n\ntwo\ufffd[2J\n")


def test_a_corpus_that_was_altered_is_shown_and_named(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(corpus.folder, tmp_path / "corpus"))
    shard = folder / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[20] ^= 1
    shard.write_bytes(data)
    with pytest.raises(
        UserError,
        match=r"altered since `prepare` wrote it: .*train-00000\.bin: its SHA-256[^;]*; .*verify",
    ) as error:
        show(folder)
    assert "train document 1," in capsys.readouterr().out and "\n" not in str(error.value)
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(
        UserError, match=r"train-00000\.bin: [^,]*$"
    ):  # a note that lies there alters nothing
        show(folder)
    show(folder, split="validation")
    # of a large corpus the shards that are shown are read, and small files
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"wrote it: .*tokenizer_config\.json"):
        show(folder, split="validation")


def test_a_folder_that_is_no_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no corpus here"):
        show(tmp_path / "none")
