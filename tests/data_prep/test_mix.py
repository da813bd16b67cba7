"""Mixing: exact proportions at every point of the stream, repeatable, resumable, and reported."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from cramming.data.corpus import Corpus
from data_prep.prepare import sample_texts
from tests.data_prep.calls import corpus_folder, main, parse

Config = Callable[..., dict[str, Any]]


@pytest.fixture
def mixed(tmp_path: Path, text_config: Config, made_up: Callable[..., list[str]]) -> Config:
    """`mixed(weights, **data)`: three files of 300 documents each, by weight."""
    for number in range(3):
        lines = (
            json.dumps({"text": text})
            for text in made_up(300, seed=number, words=20 * (number + 1))
        )
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))

    def make(weights: list[float], **data: Any) -> dict[str, Any]:
        parts = [
            {
                "weight": weight,
                "source": "text",
                "name": f"file{i}",
                "paths": [str(tmp_path / f"{i}.jsonl")],
            }
            for i, weight in enumerate(weights)
        ]
        config = text_config(source="mix", parts=parts, **data)
        del config["data"]["paths"]
        return config

    return make


@pytest.mark.parametrize("unit", ["documents", "bytes"])
def test_proportions_are_exact_at_every_point(mixed: Config, unit: str) -> None:
    weights = [5, 3, 2]
    documents = list(parse(mixed(weights, unit=unit)).source.documents())
    assert documents == list(parse(mixed(weights, unit=unit)).source.documents())
    assert documents[:9] != list(parse(mixed(weights, unit=unit, seed=4)).source.documents())[:9]
    longest = max(len(document.text.encode()) for document in documents)
    slack = 2 if unit == "documents" else 2 * longest + 4096
    given: Counter[str] = Counter()
    for document in documents:
        given[document.source] += 1 if unit == "documents" else len(document.text.encode())
        shares = [given[f"part {i}: file{i}"] for i in range(3)]
        assert all(
            abs(share - weight / 10 * sum(shares)) <= slack
            for share, weight in zip(shares, weights)
        )
    assert len(documents) > 400 and max(Counter(d.source for d in documents).values()) == 300


def test_a_document_in_parts_is_one_document(
    mixed: Config, tmp_path: Path, made_up: Callable[..., list[str]]
) -> None:
    (tmp_path / "long.txt").write_text(
        "\n\n".join("\n".join(made_up(20, number)) for number in range(5))
    )
    config = mixed([1, 2], unit="documents", clean={"max_characters": 1000})
    config["data"]["parts"][0]["paths"] = [str(tmp_path / "long.txt")]
    documents = list(parse(config).source.documents())
    of_long = [document for document in documents if document.source == "part 0: file0"]
    assert len(of_long) > 20 and sum(document.part == 0 for document in of_long) == 5
    assert 9 <= len(documents) - len(of_long) <= 12


def test_a_mix_becomes_a_corpus_whose_card_says_what_is_in_it(mixed: Config) -> None:
    config = mixed([1, 2, 1], unit="documents")
    main(config)
    corpus = Corpus.open(corpus_folder(config), verify=True)
    rows = corpus.manifest.statistics["by_source"]
    assert rows["part 1: file1"]["documents"] == 300
    assert abs(rows["part 0: file0"]["documents"] - 150) <= 2
    assert sum(row["documents"] for row in rows.values()) == corpus.manifest.counts["documents"]
    assert [entry["weight"] for entry in corpus.manifest.sources] == [1, 2, 1]
    card = (corpus.folder / "corpus_card.md").read_text()
    assert (
        "| part 1: file1 | 300 |" in card
        and "(normalised: single spaces, no indentation, no blank lines) |" in card
    )
    assert "The mix ended with part 1: file1, which has no more; " in card
    main(config)  # a no-op: the inventory compares equal


def test_a_mix_that_a_short_part_ends_says_so_where_too_little_is_left(
    mixed: Config, tmp_path: Path
) -> None:
    (tmp_path / "1.jsonl").write_text('{"text": "one document of few words"}')
    with pytest.raises(
        UserError, match=r"too little text .*; the mix ended with part 1: file1, which has no more"
    ):
        main(mixed([1, 1], unit="documents"))


def test_a_tokenizer_sample_does_not_read_a_whole_hub_part(
    mixed: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts' own samples by weight, as long as is set; where no part is costly, all of the text."""
    folder = tmp_path / "set"
    folder.mkdir()
    (tmp_path / "2.jsonl").rename(folder / "train.jsonl")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    config = mixed([1, 3, 1], tokenizer={"sample_mb": 0.04})
    hub = {"weight": 3, "source": "hub", "dataset": str(folder)}
    config["data"]["parts"] = [*config["data"]["parts"][:1], hub]
    sample, share = sample_texts(parse(config), Counter())
    assert share == 0 and 38_000 < sum(map(len, sample)) <= 40_000
    in_set = [
        json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()
    ]
    of_hub = [text for text in sample if text in in_set]
    assert 0.65 < sum(map(len, of_hub)) / sum(map(len, sample)) < 0.85
    assert set(of_hub) != set(in_set[: len(of_hub)])  # shuffled, as the hub's own sample is
    config["data"]["parts"][1]["max_documents"] = 150  # then it is small enough to be read twice
    config["tokenizer"]["sample_mb"] = 1
    whole = [document.text for document in parse(config).source.documents()]
    assert sample_texts(parse(config), Counter())[0] == whole and sum(map(len, whole)) > 50_000


def test_mistakes_in_parts_name_the_part(mixed: Config, tmp_path: Path) -> None:
    for change, message in (
        ({"weight": 0}, r"parts\[1\].weight=0: "),
        ({"seed": 3}, r"data.parts\[1\].seed: all parts share it"),
        ({"source": "mix"}, r"parts\[1\].source=mix: "),
        ({"paths": ["none.txt"]}, r"^data\.parts\[1\]\.paths: none\.txt is no file"),
    ):
        config = mixed([1, 1])
        config["data"]["parts"][1] |= change
        with pytest.raises(UserError, match=message):
            parse(config)
    (tmp_path / "part-0").write_text('{"text": "a"}')
    config["data"]["parts"][1] |= {"paths": [str(tmp_path / "part-0")]}
    with pytest.raises(UserError, match=r"looks like JSON.* Set data\.parts\[1\]\.format=jsonl"):
        parse(config)
    config = mixed([1, 1])
    (tmp_path / "1.jsonl").write_text("")
    with pytest.raises(
        UserError, match=r"1\.jsonl: empty file; damaged: drop in data\.parts\[1\] skips"
    ):
        list(parse(config).source.documents())
    (tmp_path / "1.jsonl").write_text('{"body": "a"}')
    with pytest.raises(UserError, match=r"\(set data\.parts\[1\]\.text_field\)"):
        list(parse(config).source.documents())
    with pytest.raises(UserError, match="at least two"):
        parse(mixed([1]))
