"""A finished corpus searched once more for the tasks' text, and the embedded tasks made once more."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from cramming.data.corpus import Corpus
from data_prep import verify_corpus
from data_prep.readers.demo import generator_sha256
from data_prep.verify_corpus import embedded_tasks, overlap

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Corpus]
MadeUp = Callable[..., list[str]]


def glue(folder: Path, texts: list[str]) -> Path:
    """SST-2's development set of these texts."""
    (folder / "SST-2").mkdir(parents=True)
    rows = "".join(f"{text}\t1\n" for text in texts)
    (folder / "SST-2" / "dev.tsv").write_text(f"sentence\tlabel\n{rows}", encoding="utf-8")
    return folder


@pytest.fixture
def texts(made_up: MadeUp) -> list[str]:
    """Examples of a task, of twenty words and more."""
    return [text for text in made_up(60, seed=3, words=40) if len(text.split()) > 20]


@pytest.mark.parametrize("planted", [0, 1, 20])
def test_what_the_manifest_says_that_was_removed_is_found_in_the_corpus(
    planted: int,
    tmp_path: Path,
    text_config: Config,
    made_up: MadeUp,
    run: Run,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Searched for other texts than the verifier's: one may come from anywhere, twenty contradict the manifest."""
    monkeypatch.setattr(verify_corpus, "GROUP_TOKENS", 500)
    documents = [*made_up(100), *(f"Before. {text} After." for text in texts[:planted])]
    (tmp_path / "a.txt").write_text("\n\n".join(documents), encoding="utf-8")
    others = glue(tmp_path / "others", made_up(50, seed=9))
    searched = {
        "decontaminate": {"tasks": str(others)},
        "validation_fraction": 0.0,
        "shard_tokens": 1500,
    }
    corpus = run(text_config(tmp_path / "a.txt", **searched))
    assert len(corpus.manifest.splits["train"]) > 2
    tasks = glue(tmp_path / "glue", texts)
    problems, told = overlap(corpus.folder, tasks, 60)
    documents_read = sum(shard.documents for shard in corpus.manifest.splits["train"])
    assert (
        told.startswith(f"{documents_read:,} of {documents_read:,} documents")
        and f"SST-2 {planted} (" in told
    )
    assert bool(problems) == (planted == 20)
    problems, told = overlap(corpus.folder, tasks, 0)
    assert not told.startswith(("0 of", f"{documents_read:,} of"))


def test_tasks_that_the_corpus_was_not_searched_for_contradict_nothing(
    tmp_path: Path, text_config: Config, made_up: MadeUp, run: Run, texts: list[str]
) -> None:
    documents = [*made_up(100), *(f"Before. {text} After." for text in texts)]
    (tmp_path / "a.txt").write_text("\n\n".join(documents), encoding="utf-8")
    others = glue(tmp_path / "others", made_up(50, seed=9))
    corpus = run(
        text_config(
            tmp_path / "a.txt", decontaminate={"tasks": str(others)}, validation_fraction=0.0
        )
    )
    (tmp_path / "glue" / "RTE").mkdir(parents=True)
    rows = "".join(f"{number}\t{text}\tNo.\tentailment\n" for number, text in enumerate(texts))
    header = "index\tsentence1\tsentence2\tlabel\n"
    (tmp_path / "glue" / "RTE" / "dev.tsv").write_text(header + rows, encoding="utf-8")
    problems, told = overlap(corpus.folder, tmp_path / "glue", 60)
    assert not problems and re.search(r"RTE [34]\d \(", told)


def test_a_shard_that_was_altered_is_refused(
    tmp_path: Path, text_config: Config, made_up: MadeUp, run: Run, texts: list[str]
) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(made_up(60)), encoding="utf-8")
    corpus = run(text_config(tmp_path / "a.txt"))
    shard = corpus.folder / corpus.manifest.splits["train"][0].file
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(UserError, match="SHA-256"):
        overlap(corpus.folder, glue(tmp_path / "glue", texts), 60)


def test_demo_tasks_are_made_by_the_same_generator_only(tmp_path: Path) -> None:
    assert not embedded_tasks(tmp_path, 0, "ab" * 32) and not list(tmp_path.iterdir())
    assert embedded_tasks(tmp_path, 0, generator_sha256())
    assert (tmp_path / "RTE" / "dev.tsv").exists()
