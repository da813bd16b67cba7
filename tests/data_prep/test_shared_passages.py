"""A passage that alone makes documents near-duplicates is named; documents that are the same otherwise have none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.data.corpus import Corpus
from data_prep.dedup.near import NearDuplicateConfig
from data_prep.dedup.shared_passages import (
    RUN_TOKENS,
    SharedPassages,
    explaining_passage,
    longest_shared_run,
)

Config = Callable[..., dict[str, Any]]
MadeUp = Callable[..., list[str]]
Run = Callable[[dict[str, Any]], Corpus]
NEAR = NearDuplicateConfig(enabled=True)


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 30_000, count).astype(np.uint16)


@pytest.mark.parametrize("length", [0, RUN_TOKENS - 1, RUN_TOKENS, 500])
@pytest.mark.parametrize("before", [0, 70])
def test_the_longest_shared_run_is_where_it_was_planted(length: int, before: int) -> None:
    passage = tokens(length, 0)
    one = np.concatenate([tokens(before, 1), passage, tokens(90, 2)])
    other = np.concatenate([tokens(30, 3), passage[5:20], tokens(40, 4), passage, tokens(10, 5)])
    in_one, in_other = longest_shared_run(one, other)
    assert np.array_equal(one[in_one], passage if length >= RUN_TOKENS else [])
    assert np.array_equal(other[in_other], one[in_one])


PASSAGE, BODY = tokens(400, 0), tokens(300, 1)


@pytest.mark.parametrize(
    ("dropped", "kept", "explained"),
    [
        ([PASSAGE, tokens(90, 2)], [PASSAGE, tokens(200, 3)], True),
        ([tokens(90, 2), PASSAGE], [tokens(20, 3), PASSAGE, tokens(99, 4)], True),
        ([PASSAGE, BODY, tokens(60, 2)], [PASSAGE, tokens(40, 4), BODY], False),  # alike without
        ([PASSAGE], [PASSAGE, tokens(200, 3)], False),  # nothing is lost
        ([PASSAGE, tokens(20, 2)], [PASSAGE, tokens(200, 3)], False),
        ([tokens(90, 2)], [tokens(90, 3)], False),
        ([tokens(5, 2)], [tokens(90, 3)], False),
    ],
)
def test_a_passage_explains_only_documents_that_differ_otherwise(
    dropped: list[np.ndarray], kept: list[np.ndarray], explained: bool
) -> None:
    passage = explaining_passage(np.concatenate(dropped), np.concatenate(kept), NEAR)
    assert np.array_equal(passage, PASSAGE if explained else [])


def test_passages_are_counted_over_groups_and_must_explain_most_of_them() -> None:
    passages = SharedPassages(NEAR)
    licence, footer = tokens(400, 0), tokens(400, 1)

    def chapters(passage: np.ndarray, seed: int, count: int) -> list[np.ndarray]:
        return [np.concatenate([passage, tokens(99, seed + n)]) for n in range(count)]

    passages.add_group(chapters(licence, 2, 1)[0], chapters(licence, 10, 3))
    passages.add_group(chapters(licence, 3, 1)[0], chapters(licence, 20, 4))
    same = chapters(footer, 4, 1)[0]
    passages.add_group(same, [*chapters(footer, 30, 6), *[same] * 6])
    ((first, documents),) = passages.most_common()
    assert documents == 7 and np.array_equal(first, licence[: len(first)])


@pytest.mark.parametrize("workers", [1, 2])
def test_chapters_behind_one_licence_are_said_at_the_end_and_on_the_card(
    tmp_path: Path,
    text_config: Config,
    made_up: MadeUp,
    run: Run,
    workers: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    licence = "This licence lets you copy the book. " + " ".join(made_up(9, seed=1, words=70))
    own = made_up(30, seed=2, words=70)
    documents = [*made_up(40, seed=3), *(f"{licence}\n{text}" for text in own)]
    (tmp_path / "a.txt").write_text("\n\n".join(documents), encoding="utf-8")
    corpus = run(
        text_config(tmp_path / "a.txt", workers=workers, near_duplicates={"enabled": True})
    )
    stage = next(each for each in corpus.manifest.stages if each.name == "near deduplication")
    ((passage, count),) = stage.notes["shared_passages"].items()
    assert passage.startswith("this licence lets you copy the book")
    assert 10 < count <= stage.dropped["near_duplicate"].documents
    said = f'{count:,} documents were dropped as near-duplicates for one shared passage, "{passage}'
    assert said in capsys.readouterr().out
    assert said in (corpus.folder / "corpus_card.md").read_text(encoding="utf-8")
