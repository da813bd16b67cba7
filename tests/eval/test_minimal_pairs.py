"""Pseudo-log-likelihoods equal the definition, packed or padded, and broken files are named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertModel,
)

from cramming.config import UserError
from eval.extras import minimal_pairs
from eval.extras.minimal_pairs import (
    _own_model,
    _stock_model,
    likelihoods,
    read_pairs,
    score_pairs,
    word_ends,
)
from eval.finetune.models import open_model

CPU = torch.device("cpu")
MASK = 4


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, write_bert: Callable[..., Path]) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), num_hidden_layers=2, initializer_range=0.5)


def test_likelihoods_are_the_definition_packed_and_padded(bert: Path) -> None:
    random = np.random.default_rng(0)
    sentences = [
        [2, *random.integers(5, 25, size).tolist(), 3] for size in random.integers(1, 12, 15)
    ]
    model = AutoModelForMaskedLM.from_pretrained(bert).eval()
    ends = []
    for ids in sentences:  # words of two tokens
        pairs = [min(place + 1 + place % 2, len(ids) - 1) for place in range(1, len(ids) - 1)]
        ends.append([1, *pairs, len(ids)])
    expected = np.zeros((2, len(sentences)))
    for index, ids in enumerate(sentences):
        for place in range(1, len(ids) - 1):
            for scoring, end in enumerate((place + 1, ends[index][place])):
                masked = torch.tensor([ids[:place] + [MASK] * (end - place) + ids[end:]])
                with torch.no_grad():
                    logits_V = model(masked).logits[0, place]
                expected[scoring, index] += logits_V.log_softmax(-1)[ids[place]].item()
    for make in (_own_model, _stock_model):
        for tokens in (1, 200, 10**6):
            likelihoods_2N = likelihoods(sentences, ends, MASK, {2, 3}, make(bert, CPU), tokens)
            np.testing.assert_allclose(likelihoods_2N, expected, atol=1e-3)
    assert np.std(expected[0]) > 1 and (expected[0] != expected[1]).any()


@pytest.mark.parametrize(
    ("text", "offsets", "ends"),
    [
        (
            "a barking dog.",
            [(0, 0), (0, 1), (2, 6), (6, 9), (10, 13), (13, 14), (0, 0)],
            [1, 2, 4, 4, 5, 6, 7],
        ),
        ("a barking dog", [(0, 1), (1, 6), (6, 9), (9, 13)], [1, 3, 3, 4]),  # byte level
    ],
)
def test_a_word_ends_behind_its_last_token(
    text: str, offsets: list[tuple[int, int]], ends: list[int]
) -> None:
    assert word_ends(text, offsets) == ends


def write(path: Path, pairs: list[tuple[str, str]]) -> None:
    rows = [{"sentence_good": good, "sentence_bad": bad, "UID": path.stem} for good, bad in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_accuracy_is_the_mean_over_paradigms_and_turns_with_the_pairs(
    bert: Path, tmp_path: Path
) -> None:
    pairs = [("w1 w2 w3", "w3 w2 w1"), ("w4 w5", "w6 w7"), ("w8 w9 w1", "w9 w9 w9")]
    write(tmp_path / "a.jsonl", pairs)
    write(tmp_path / "b.jsonl", [(bad, good) for good, bad in pairs])
    for source in (open_model(bert), replace(open_model(bert), is_native=False)):
        scores = score_pairs(source, read_pairs(tmp_path), CPU, 24, None)
        first, second = (scores.paradigms[name]["accuracy"] for name in "ab")
        assert first + second == pytest.approx(100) and scores.accuracy == pytest.approx(50)
    write(tmp_path / "b.jsonl", [("w1", "w1")])  # equal: a miss
    scores = score_pairs(open_model(bert), read_pairs(tmp_path), CPU, 24, None)
    assert scores.paradigms["b"]["accuracy"] == 0


def test_what_is_known_of_this_model_and_these_pairs_is_not_scored_again(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", [("w1 w2 w3", "w3 w2 w1")])
    source, pairs = open_model(bert), read_pairs(tmp_path)
    known = score_pairs(source, pairs, CPU, 24, None)
    turned = [each._replace(good=each.bad, bad=each.good) for each in pairs]
    assert score_pairs(source, turned, CPU, 24, known).accuracy == 100 - known.accuracy
    monkeypatch.setattr(minimal_pairs, "open_masked_lm", interrupt)
    assert score_pairs(source, pairs, CPU, 24, known) is known
    others = (
        replace(source, sha256="0"),
        replace(source, files={**source.files, "tokenizer.json": "0"}),
    )
    for model, length in ((source, 16), *((other, 24) for other in others)):
        with pytest.raises(KeyboardInterrupt):
            score_pairs(model, pairs, CPU, length, known)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_head_that_was_never_trained_scores_nothing(tmp_path: Path) -> None:
    config = DistilBertConfig(vocab_size=25, dim=16, n_heads=2, n_layers=1, hidden_dim=32)
    DistilBertModel(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no masked language model: its weights lack .*vocab_"):
        _stock_model(tmp_path, CPU)
    DistilBertForMaskedLM(config).save_pretrained(tmp_path)
    _stock_model(tmp_path, CPU)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \.jsonl file"):
        read_pairs(tmp_path)
    file = tmp_path / "a.jsonl"
    write(file, [("w1", "w2")])
    good = file.read_text()
    for line in (
        "{",
        "[]",
        '{"sentence_good": "w1"}',
        '{"sentence_good": "w1", "sentence_bad": 3}',
    ):
        file.write_text(good + line + "\n")
        with pytest.raises(UserError, match=r"a\.jsonl:2: "):
            read_pairs(tmp_path)
    file.write_text("")
    with pytest.raises(UserError, match=r"a\.jsonl: no pairs"):
        read_pairs(tmp_path)
