"""Lines that make up much of the text: found by a sample that no division into tasks changes, and said."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.readers import plain_text
from data_prep.repeated_lines import SAMPLED_LINES, LineSample
from tests.data_prep.conftest import made_up_documents

LICENCE = "All rights reserved by the owners of the site, whatever it may hold. " * 9 + "End."


def sample_of(documents: list[tuple[int, str]], groups: list[int]) -> LineSample:
    """The merged samples of tasks that end at these documents, each of which reads in groups."""
    sample = LineSample()
    for start, end in zip([0, *groups], [*groups, len(documents)]):
        task = LineSample()
        for first in range(start, end, 7):
            keys, texts = zip(*documents[first : min(end, first + 7)])
            task.add(keys, texts)
        sample.merge(task.lines())
    return sample


def documents_with(line: str, share: float, count: int = 3000) -> list[str]:
    """Documents of three lines, the second of which is `line` in this share of all lines."""
    texts, rng = made_up_documents(2 * count, words=10), random.Random(1)
    pairs = zip(texts[::2], texts[1::2])
    return [f"{a}\n{line if rng.random() < 3 * share else a[::-1]}\n{b}" for a, b in pairs]


@pytest.mark.parametrize("groups", [[], [1000], [10, 11, 500, 2000], list(range(50, 3000, 50))])
def test_the_sample_is_the_same_for_any_division(groups: list[int]) -> None:
    rng = random.Random(0)
    documents = [(rng.getrandbits(64), text) for text in documents_with("--", 0.05)]
    whole = sample_of(documents, [])
    assert sample_of(documents, groups).lines() == whole.lines()
    assert sample_of([*documents, *documents[:200]], groups).lines() == whole.lines()
    assert len(whole.lines()) == SAMPLED_LINES


@pytest.mark.parametrize(
    ("line", "share", "is_much"),
    [
        ("<|endoftext|>", 0.1, True),
        ("*", 0.03, True),
        (LICENCE, 0.006, True),
        (LICENCE, 0.2, True),
        ("*", 0.001, False),
        ("nothing", 0, False),
    ],
)
def test_shares_are_those_of_the_text(line: str, share: float, is_much: bool) -> None:
    rng = random.Random(0)
    documents = [(rng.getrandbits(64), text) for text in documents_with(line, share)]
    lines = [text for _, document in documents for text in document.split("\n")]
    repeated = sample_of(documents, [1000]).repeated()
    assert [line.startswith(entry["line"]) for entry in repeated] == [True] * is_much
    for entry in repeated:
        of_lines = lines.count(line) / len(lines)
        of_bytes = lines.count(line) * len(line) / sum(map(len, lines))
        assert entry["of_lines"] == pytest.approx(of_lines, rel=0.4)
        assert entry["of_bytes"] == pytest.approx(of_bytes, rel=0.4, abs=0.001)


@pytest.mark.parametrize(
    ("line", "settings", "cure"),
    [
        ("<|endoftext|>", {}, "data.separator='\"<|endoftext|>\"'"),
        (LICENCE, {}, "Remove it if it says nothing\n"),
        ("<|endoftext|>", {"documents": "separator", "separator": "<|endoftext|>"}, None),
        ("<|endoftext|>", {"max_documents": 400}, "data.separator"),
    ],
)
def test_prepare_and_the_card_say_so(
    tmp_path: Path,
    text_config: Callable[..., dict[str, Any]],
    run: Any,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    settings: dict[str, Any],
    cure: str | None,
) -> None:
    monkeypatch.setattr(plain_text, "RANGE_BYTES", 10_000)
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(documents_with(line, 0.2, 500)))
    corpus = run(text_config(path, workers=1, **settings))
    said = capsys.readouterr().out
    card = (corpus.folder / "corpus_card.md").read_text(encoding="utf-8")
    if cure is None:
        assert "makes up" not in said and "Lines that make up" not in card
        assert corpus.manifest.statistics["repeated_lines"] == []
        return
    assert repr(line[:80]) in said and cure in said
    assert "| `" + line[:80].replace("|", r"\|") + "` |" in card
