"""Text made up by the test, and `prepare` as a function of overrides."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cramming.data.corpus import Corpus
from tests.data_prep.calls import corpus_folder, main

SYLLABLES = "ka lo mi ren tas vu del or sin pel ga tho bra ek".split()
BASE = {"seed": 0, "workers": 2, "shard_tokens": 1 << 20, "validation_fraction": 0.05}
TOKENIZER = {"kind": "wordpiece", "vocab_size": 300}


def made_up_documents(count: int, seed: int = 0, words: int = 60) -> list[str]:
    rng = random.Random(seed)
    lexicon = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(400)]
    return [
        " ".join(rng.choices(lexicon, k=rng.randint(5, 2 * words))).capitalize() + "."
        for _ in range(count)
    ]


@pytest.fixture
def made_up() -> Callable[..., list[str]]:
    """`made_up(count, seed=0, words=60)`: that many documents of about so many invented words."""
    return made_up_documents


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """300 documents, one per block, with enough rare characters that some become unknown tokens."""
    path = tmp_path / "text.txt"
    documents = [
        f"{text} {chr(0x4E00 + index // 3)}" for index, text in enumerate(made_up_documents(300))
    ]
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def text_config_in() -> Callable[..., dict[str, Any]]:
    """A recipe, with `corpora` in this folder that reads these paths; keywords override `data`,
    `tokenizer={...}` the tokenizer."""

    def make(
        folder: Path, *paths: Path | str, tokenizer: dict[str, Any] | None = None, **data: Any
    ) -> dict[str, Any]:
        section = {"name": "test", "source": "text", **BASE, "paths": list(map(str, paths)), **data}
        return {
            "corpora": str(folder / "corpora"),
            "data": section,
            "tokenizer": {**TOKENIZER, **(tokenizer or {})},
        }

    return make


@pytest.fixture
def text_config(
    tmp_path: Path, text_config_in: Callable[..., dict[str, Any]]
) -> Callable[..., dict[str, Any]]:
    """The same in the test's folder."""
    return partial(text_config_in, tmp_path)


def decoded_documents(corpus: Corpus) -> list[str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_file))
    streams = corpus.stream("train"), corpus.stream("validation")
    return [
        tokenizer.decode(stream.document(n).tolist())
        for stream in streams
        for n in range(stream.num_documents)
    ]


@pytest.fixture
def decode() -> Callable[[Corpus], list[str]]:
    """All documents of a corpus as text, train first, without special tokens."""
    return decoded_documents


@pytest.fixture
def run() -> Callable[[dict[str, Any]], Corpus]:
    """`run(config)`: prepares, then opens what came out with every file's SHA-256 checked."""

    def call(config: dict[str, Any]) -> Corpus:
        main(config)
        return Corpus.open(corpus_folder(config), verify=True)

    return call


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    """`contents(folder)`: every file's bytes by its path in the folder."""

    def read(folder: Path) -> dict[str, bytes]:
        return {
            str(p.relative_to(folder)): p.read_bytes()
            for p in sorted(folder.rglob("*"))
            if p.is_file()
        }

    return read
