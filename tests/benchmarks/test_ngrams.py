"""Counted neighbours give probabilities, know a text that repeats itself, and use nothing behind [MASK]."""

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.data.batches import ALL_MASK, BERT_MASKING
from cramming.data.corpus import Corpus

MASK, VOCABULARY = 0, 6
TEXT = np.tile([1, 2, 3, 4, 5, 3], 50)


@pytest.fixture
def ngrams(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("ngrams")


@pytest.fixture
def neighbours(ngrams: Any) -> Any:
    return ngrams.Neighbours(TEXT, VOCABULARY)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere: no corpus here"),
        *[
            ([".", option, value], "at least 1")
            for option in ("--tokens", "--validation-tokens")
            for value in "0 -5".split()
        ],
        ([".", "--tokens", "nan"], "at least 1"),
    ],
)
def test_a_mistake_is_no_traceback(
    ngrams: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["ngrams.py", *words])
    with pytest.raises(SystemExit) as ended:
        ngrams.main()
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_no_more_tokens_are_counted_than_there_are(
    ngrams: Any,
    tiny_corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_tokens = f"{Corpus.open(tiny_corpus).stream('train').num_tokens:,}"
    for words, counted in (
        ([], num_tokens),
        (["--tokens", "1e3"], "1,000"),
        (["--tokens", "1e99"], num_tokens),
    ):
        monkeypatch.setattr(
            "sys.argv", ["ngrams.py", str(tiny_corpus), "--validation-tokens", "64", *words]
        )
        ngrams.main()
        assert capsys.readouterr().out.startswith(f"{counted} tokens counted")


@pytest.mark.parametrize("window", [[1, 2, MASK, 4, 5], [5, MASK, MASK, MASK, 1], [4, 1, 3, 2, 2]])
def test_losses_are_of_probabilities(neighbours: Any, window: list[int]) -> None:
    sums = [
        neighbours.losses(np.array(window), target, MASK, BERT_MASKING)
        for target in range(VOCABULARY)
    ]
    for used in sums[0]:
        assert sum(math.exp(-losses[used]) for losses in sums) == pytest.approx(1.0)


def test_what_was_seen_is_known_and_what_is_hidden_is_not_used(neighbours: Any) -> None:
    seen = neighbours.losses(np.array([1, 2, MASK, 4, 5]), 3, MASK, ALL_MASK)
    assert seen["both sides"] < 0.02 < seen["unigram"]
    hidden = neighbours.losses(np.array([1, MASK, MASK, MASK, 5]), 3, MASK, ALL_MASK)
    assert len(set(hidden.values())) == 1, "the unigram's"
    shown = neighbours.losses(np.array([MASK, MASK, 4, MASK, MASK]), 4, MASK, BERT_MASKING)
    assert shown["both sides"] == pytest.approx(
        -math.log(0.5 + 0.5 * math.exp(-hidden["unigram"]) / 2), abs=0.01
    )
