"""Order files: the same documents in another order, read over the same shards, as a pure function of the place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.config import UserError
from cramming.data.corpus import CURRICULA, ORDERS, Corpus, OrderedStream, TokenStream
from tests.data_prep.calls import corpus_folder, main

Config = Callable[..., dict[str, Any]]


def documents_of(stream: TokenStream) -> list[list[int]]:
    return [stream.document(number).tolist() for number in range(stream.num_documents)]


@pytest.fixture
def corpus(tmp_path: Path, text_config: Config, made_up: Callable[..., list[str]]) -> Corpus:
    texts = [
        text.replace(" ", ". " if i % 3 else " ", i % 7) for i, text in enumerate(made_up(150))
    ]
    (tmp_path / "a.txt").write_text("\n\n".join(texts), encoding="utf-8")
    config = text_config(tmp_path / "a.txt", shard_tokens=700, orders=list(CURRICULA))
    main(config)
    return Corpus.open(corpus_folder(config), verify=True)


def test_every_order_holds_every_document_once(corpus: Corpus) -> None:
    source = documents_of(corpus.stream("train"))
    assert len(corpus.manifest.splits["train"]) > 5 and set(corpus.manifest.orders) == set(
        CURRICULA
    )
    orders = {
        order: documents_of(corpus.stream("train", order))
        for order in ORDERS
        if order != "shuffled"
    }
    for name, documents in orders.items():
        assert sorted(documents) == sorted(source)
        if not name.endswith("_reversed"):
            assert orders[f"{name}_reversed"] == documents[::-1]
    assert orders["source"] == source
    assert len({str(documents) for documents in orders.values()}) == len(orders)


def test_documents_come_by_what_the_order_is_called_after(corpus: Corpus) -> None:
    use_V = np.bincount(
        np.concatenate(
            [np.array(d) for s in ("train", "validation") for d in documents_of(corpus.stream(s))]
        )
    )  # type: ignore[arg-type]
    log_V = np.log2((use_V + 1) / (use_V.sum() + corpus.vocab_size))
    means = [
        float(log_V[d[1:-1]].mean())
        for d in documents_of(corpus.stream("train", "token_prevalence"))
    ]
    assert means == sorted(means, reverse=True) and len(set(means)) > 100
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(str(corpus.tokenizer_file))
    by_length = [
        (len(d) - 2) / len(model.decode(d))
        for d in documents_of(corpus.stream("train", "compressibility"))
    ]
    assert by_length == sorted(by_length) and len(set(by_length)) > 100


def test_windows_of_an_ordered_stream_equal_slices_at_any_place() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 40, size=30)
    starts = np.cumsum(lengths) - lengths
    flat = np.arange(lengths.sum())
    order = rng.permutation(30)
    expected = np.concatenate([flat[starts[d] : starts[d] + lengths[d]] for d in order])
    stream = OrderedStream(TokenStream.of_array(flat, starts), order)
    for length in (1, 5, 100):
        places = rng.integers(0, len(flat) - length + 1, size=50)
        np.testing.assert_array_equal(
            stream.gather(places, length), np.stack([expected[p : p + length] for p in places])
        )


def test_an_order_that_is_not_there_is_a_clear_mistake(
    tmp_path: Path, text_file: Path, text_config: Config
) -> None:
    config = text_config(text_file, orders=["compressibility"])
    main(config)
    corpus = Corpus.open(corpus_folder(config))
    with pytest.raises(
        UserError, match=r"train.order=sentence_length: .* only: shuffled, source, compressibility"
    ):
        corpus.stream("train", "sentence_length_reversed")
