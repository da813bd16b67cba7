"""The on-disk format: what is written is what is read, at any place, across shards, and damage is noticed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.config import UserError
from cramming.data import manifest
from cramming.data.corpus import Corpus, TokenStream
from cramming.data.manifest import (
    MANIFEST,
    TOKENIZER,
    Split,
    content_settings,
    token_dtype,
)
from cramming.overrides import compose as composed
from data_prep.shard_writer import ShardWriter


def write_documents(
    folder: Path, documents: list[np.ndarray], shard_tokens: int, chunk: int = 7
) -> ShardWriter:
    """Append the documents' concatenation in chunks that respect no boundary."""
    flat = np.concatenate(documents)
    starts = np.cumsum([0] + [len(document) for document in documents[:-1]])
    writer = ShardWriter(folder, "train", np.dtype("<u2"), shard_tokens)
    for at in range(0, len(flat), chunk):
        inside = starts[(starts >= at) & (starts < at + chunk)] - at
        writer.append(flat[at : at + chunk], inside)
    writer.close()
    return writer


@pytest.fixture
def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 60_000, size=length) for length in (3, 50, 1, 17, 200, 2, 33)]


@pytest.mark.parametrize(
    "shard_tokens", [10, 51, 306, 10_000]
)  # 306: one full shard, nothing behind it
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_stream_is_the_concatenation_of_the_documents(
    tmp_path: Path, documents: list[np.ndarray], shard_tokens: int, chunk: int
) -> None:
    shards = write_documents(tmp_path, documents, shard_tokens, chunk).shards
    assert [shard.tokens for shard in shards[:-1]] == [shard_tokens] * (len(shards) - 1)
    assert 0 < shards[-1].tokens <= shard_tokens
    stream = TokenStream(tmp_path, shards, np.dtype("<u2"))
    flat = np.concatenate(documents)
    assert (stream.num_tokens, stream.num_documents) == (len(flat), len(documents))
    np.testing.assert_array_equal(
        stream.document_starts, np.cumsum([0] + [len(d) for d in documents[:-1]])
    )
    np.testing.assert_array_equal(stream.gather(np.array([0]), len(flat))[0], flat)
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob(".*"))


def test_gather_equals_slicing_at_any_place_and_length(
    tmp_path: Path, documents: list[np.ndarray]
) -> None:
    shards = write_documents(tmp_path, documents, shard_tokens=25).shards
    stream = TokenStream(tmp_path, shards, np.dtype("<u2"))
    flat = np.concatenate(documents)
    rng = np.random.default_rng(1)
    for length in (1, 2, 24, 25, 26, 100):
        starts = rng.integers(0, len(flat) - length + 1, size=64)
        expected = np.stack([flat[start : start + length] for start in starts])
        gathered = stream.gather(starts, length)
        assert gathered.dtype == np.int64
        np.testing.assert_array_equal(gathered, expected)
    assert stream.gather(np.empty(0, np.int64), 5).shape == (0, 5)


def test_open_gives_back_what_the_manifest_says(tiny_corpus: Path) -> None:
    corpus = Corpus.open(tiny_corpus, verify=True)
    described = corpus.describe()
    assert described["tokens"] == corpus.stream("train").num_tokens
    assert described["validation_tokens"] == corpus.stream("validation").num_tokens
    first_tokens = corpus.stream("train").gather(corpus.stream("train").document_starts, 1)
    assert set(first_tokens.ravel()) == {corpus.special_ids.cls}
    assert json.loads(json.dumps(described)) == described


def _truncate(folder: Path) -> None:
    path = folder / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])


def _other_format(folder: Path) -> None:
    node = json.loads((folder / MANIFEST).read_text()) | {"format": 99}
    (folder / MANIFEST).write_text(json.dumps(node))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (shutil.rmtree, "no corpus here. Make it with `cramming prepare`"),
    "half-written": (lambda folder: (folder / MANIFEST).unlink(), "half-written"),
    "no json": (lambda folder: (folder / MANIFEST).write_text("{"), "not a corpus manifest"),
    "too deep": (
        lambda folder: (folder / MANIFEST).write_text("[" * 100_000),
        "not a corpus manifest",
    ),
    "other format": (_other_format, "corpus format 99, this version reads 2"),
    "cut short": (_truncate, r"train-00001.bin: \d+ bytes, should have \d+"),
    "shard missing": (
        lambda folder: (folder / "train-00001.bin").unlink(),
        "train-00001.bin: missing",
    ),
    "index missing": (
        lambda folder: (folder / "train-00001.idx").unlink(),
        "train-00001.idx: missing",
    ),
    "tokenizer altered": (
        lambda folder: (folder / TOKENIZER).write_text("{}"),
        "tokenizer.json: its SHA-256",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_a_user_error_that_names_the_file(
    tmp_path: Path, make_corpus: Callable[..., Path], name: str
) -> None:
    folder = make_corpus(tmp_path / "corpus", documents=100)
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        Corpus.open(folder)
    assert "\n" not in str(error.value)


def _put_back(path: Path) -> None:
    """Other tokens, then the same as before, with the time of the modification."""
    content, stat = path.read_bytes(), path.stat()
    path.write_bytes(bytes(len(content)))
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _exchange(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.replace(path)


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("change", [_put_back, _exchange, Path.unlink])
def test_a_file_that_was_written_to_since_it_was_checked_is_known(
    tmp_path: Path, make_corpus: Callable[..., Path], change: Callable[[Path], Any], split: Split
) -> None:
    """Whatever it holds by now: the shards are read from the disk while training goes on."""
    folder = make_corpus(tmp_path / "corpus", documents=100)
    corpora = [Corpus.open(folder, verify=verify) for verify in (True, split)]
    for corpus in corpora:
        corpus.stream(split)
    assert [corpus.changed() for corpus in corpora] == [[], []]
    change(folder / f"{split}-00000.bin")
    assert [corpus.changed() for corpus in corpora] == [[f"{split}-00000.bin"]] * 2


def test_a_process_without_descriptors_has_no_changed_files(
    tmp_path: Path, make_corpus: Callable[..., Path]
) -> None:
    resource = pytest.importorskip("resource")
    corpus = Corpus.open(make_corpus(tmp_path / "corpus"), verify=True)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        answers = (
            corpus.changed(),
            corpus.changed(last=True),
            corpus.is_as_prepared("tokenizer.json"),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert answers == ([], [], None)
    (corpus.folder / "tokenizer.json").unlink()
    assert corpus.changed() == ["tokenizer.json"]


def test_what_the_system_does_not_tell_for_a_moment_is_no_change(
    tmp_path: Path, make_corpus: Callable[..., Path]
) -> None:
    """A path that cannot be followed, as of a file system that is gone: the next look decides, or the last."""
    folder = make_corpus(tmp_path / "corpus")
    corpus = Corpus.open(folder, verify=True)
    folder.rename(tmp_path / "away")
    folder.symlink_to(folder)
    assert corpus.changed() == []
    assert set(corpus.changed(last=True)) == corpus.manifest.hashes().keys()
    folder.unlink()
    (tmp_path / "away").rename(folder)
    assert corpus.changed(last=True) == []


def test_tokens_that_come_from_another_file_than_was_checked_are_known(
    tmp_path: Path, make_corpus: Callable[..., Path]
) -> None:
    """A folder that was exchanged between the check and the opening of the shards, and is back again."""
    folder, other = make_corpus(tmp_path / "corpus"), make_corpus(tmp_path / "other")
    corpus = Corpus.open(folder, verify=True)
    folder.rename(tmp_path / "away")
    other.rename(folder)
    corpus.stream("train")
    folder.rename(other)
    (tmp_path / "away").rename(folder)
    assert corpus.changed() == [shard.file for shard in corpus.manifest.splits["train"]]


def corpus_folder(recipe: Any) -> Path:
    return manifest.corpus_folder(recipe, Path("corpora"))


def test_folder_name_depends_on_what_not_on_where_or_how_fast() -> None:
    config = {
        "data": {"name": "mine", "corpus": None, "workers": 1, "paths": ["a.txt"]},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
    }
    folder = corpus_folder(config)
    assert folder.parent == Path("corpora") and folder.name.startswith("mine-bpe-300-")
    assert corpus_folder(config | {"data": {**config["data"], "workers": 7}}) == folder
    assert corpus_folder(config | {"data": {**config["data"], "paths": ["b.txt"]}}) != folder
    assert (
        corpus_folder(config | {"tokenizer": {"kind": "bpe", "vocab_size": 300, "lowercase": True}})
        != folder
    )
    assert corpus_folder(config | {"data": {**config["data"], "corpus": "here"}}) == Path("here")


SPELT = {  # another way to type the same number
    "tokenizer.vocab_size=1000": "tokenizer.vocab_size=1e3",
    "tokenizer.sample_mb=5": "tokenizer.sample_mb=5.0",
    "data.max_documents=2000": "data.max_documents=2.0e+3",
    "data.clean.min_characters=30": "data.clean.min_characters=3e1",
    "data.filters.max_top_ngrams=[1,0.5,0]": "data.filters.max_top_ngrams=[1.0,5e-1,0.0]",
    "+data.parts=[{weight: 2, seed: 1}]": "+data.parts=[{weight: 2.0, seed: 1.0}]",
}


def test_a_number_spelt_another_way_names_the_same_corpus() -> None:
    settings, respelt = composed(SPELT.keys()), composed(SPELT.values())
    assert (
        corpus_folder(settings) == corpus_folder(respelt)
        and "-1000-" in corpus_folder(respelt).name
    )
    assert json.dumps(content_settings(settings)) == json.dumps(
        content_settings(respelt)
    )  # the manifest's bytes


def test_settings_keep_the_name_that_earlier_versions_gave_them() -> None:
    """A corpus that took hours is found again."""
    data = {
        "name": "mine",
        "corpus": None,
        "workers": 1,
        "paths": ["a.txt"],
        "validation_fraction": 0.01,
    }
    data |= {"clean": {"min_characters": 20}, "filters": {"max_symbols": 0.5, "min_words": None}}
    tokenizer = {"kind": "bpe", "vocab_size": 300, "sample_mb": 100, "path": None}
    folder = corpus_folder({"data": data, "tokenizer": tokenizer})
    assert folder.name == "mine-bpe-300-f2d205e00192"


def test_a_filter_that_judges_otherwise_renames_the_corpora_that_it_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def folder(**filters: float) -> Path:
        data = {"name": "mine", "corpus": None, "filters": filters}
        return corpus_folder({"data": data, "tokenizer": {"kind": "bpe", "vocab_size": 300}})

    mine, others = {"max_duplicate_lines": 0.3, "min_words": 5}, {"min_words": 5}
    before = folder(**mine), folder(**others)
    monkeypatch.setattr(manifest, "FILTER_VERSIONS", {"max_duplicate_lines": 9})
    assert (folder(**mine) == before[0], folder(**others) == before[1]) == (False, True)


def test_a_limit_of_zero_is_no_limit_that_is_off() -> None:
    def folder(limit: float | None) -> Path:
        data = {"name": "mine", "corpus": None, "filters": {"max_curly_braces": limit}}
        return corpus_folder({"data": data, "tokenizer": {"kind": "bpe", "vocab_size": 300}})

    assert folder(None) != folder(0) == folder(0.0)


@pytest.mark.parametrize(("entries", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_tokens_take_two_bytes_as_long_as_every_id_fits(entries: int, dtype: str) -> None:
    assert token_dtype(entries) == np.dtype(dtype)
