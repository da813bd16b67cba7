"""Batches: a pure function of seed, corpus and sample index."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from cramming.config import UserError
from cramming.data.batches import Batch, BatchSource, permute, prefetch
from cramming.data.corpus import Corpus, TokenStream
from cramming.objectives.causal import NextTokens
from cramming.objectives.masking import IGNORE, MaskedTargets, Masker

Mode = Literal["rows", "documents"]
LENGTH = 32


def source(
    folder: Path,
    packing: Mode = "rows",
    length: int = LENGTH,
    seed: int = 0,
    order: str = "shuffled",
) -> BatchSource:
    corpus = Corpus.open(folder)
    special = corpus.special_ids
    masker = Masker(
        MaskedTargets(0.25, 0.8, 0.1),
        corpus.vocab_size,
        special.mask,
        tuple(special),
        seed,
    )
    return BatchSource(
        corpus.stream("train", order), masker, length, packing, seed, shuffle=order == "shuffled"
    )


def tensors(batch: Batch) -> list[torch.Tensor]:
    return [
        batch.ids_T,
        batch.positions_T,
        batch.packing.bounds_S,
        batch.target_positions_M,
        batch.target_ids_M,
    ]


def same(a: Batch, b: Batch) -> bool:
    return (
        all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b)))
        and a.num_targets == b.num_targets
    )


def trimmed(batch: Batch) -> Batch:
    """The batch without its empty sequences: how many there is room for depends on the rows."""
    return dataclasses.replace(
        batch, packing=batch.packing._replace(bounds_S=batch.packing.bounds_S.unique())
    )


def originals(batch: Batch) -> np.ndarray:
    """The batch's tokens with the targets put back."""
    ids = batch.ids_T.clone()
    valid = batch.target_ids_M != IGNORE
    ids[batch.target_positions_M[valid]] = batch.target_ids_M[valid]
    return ids.numpy()


def rows_of(batch: Batch, length: int = LENGTH) -> list[tuple[bytes, ...]]:
    """Each row as bytes of its tokens, its positions, and its targets as they lie in the row."""
    count = len(batch.ids_T) // length
    places = batch.target_positions_M.view(count, -1) - torch.arange(count)[:, None] * length
    parts = (
        batch.ids_T.view(count, -1),
        batch.positions_T.view(count, -1),
        places,
        batch.target_ids_M.view(count, -1),
    )
    return [tuple(p[row].numpy().tobytes() for p in parts) for row in range(count)]


@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 100, 255, 257, 1000, 4096, 4097, 70_001]
)
def test_permute_is_a_bijection(size: int) -> None:
    for seed in (0, 1, 2**63 + 5):
        assert np.array_equal(np.sort(permute(np.arange(size), size, seed)), np.arange(size))


def test_permute_scatters_neighbours_and_depends_on_its_key() -> None:
    size = 10_000
    first, second = permute(np.arange(size), size, 1), permute(np.arange(size), size, 2)
    assert np.mean(first == second) < 0.01
    assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(first)) < 10) < 0.01
    part = np.random.default_rng(0).integers(0, size, 50)
    assert np.array_equal(permute(part, size, 1), first[part])  # evaluated anywhere, alone


@pytest.mark.parametrize("order", ["shuffled", "source", "source_reversed"])
@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_any_split_into_batches_gives_the_same_rows(
    tiny_corpus: Path, packing: Mode, order: str
) -> None:
    source_a = source(tiny_corpus, packing, order=order)
    total = 3 * source_a.num_windows // 2  # over the end of an epoch
    whole = rows_of(source_a.batch(0, total))
    source_b = source(tiny_corpus, packing, order=order)
    for rows in (7, 100, 333):
        pieces = [
            r
            for first in range(0, total, rows)
            for r in rows_of(source_b.batch(first, min(rows, total - first)))
        ]
        assert pieces == whole
    assert [rows_of(source_b.batch(first, 1))[0] for first in range(50, 80)] == whole[50:80]
    assert same(source_a.batch(50, 6), source_b.batch(50, 6))  # whatever was read before


@pytest.mark.parametrize("order", ["source", "source_reversed"])
def test_a_curriculum_comes_in_its_order_and_again_in_each_epoch(
    tiny_corpus: Path, order: str
) -> None:
    reader = source(tiny_corpus, order=order)
    stream = Corpus.open(tiny_corpus).stream("train")
    documents = [stream.document(number) for number in range(stream.num_documents)]
    flat = np.concatenate(documents if order == "source" else documents[::-1])
    offsets = set()
    for epoch in range(3):
        order_read = originals(reader.batch(epoch * reader.num_windows, reader.num_windows))
        offset = int(reader.window_starts(np.array([epoch * reader.num_windows]))[0])
        np.testing.assert_array_equal(order_read, flat[offset : offset + len(order_read)])
        offsets.add(offset)
    assert len(offsets) > 1 and max(offsets) < LENGTH


def test_every_window_comes_once_per_epoch_and_masks_change(tiny_corpus: Path) -> None:
    reader = source(tiny_corpus)
    stream = Corpus.open(tiny_corpus).stream("train")
    seen = []
    for epoch in range(3):
        samples = np.arange(epoch * reader.num_windows, (epoch + 1) * reader.num_windows)
        starts = np.sort(reader.window_starts(samples))
        assert (
            np.diff(starts) == LENGTH
        ).all()  # side by side: no token twice, none left out between
        assert 0 <= starts[0] < LENGTH
        assert starts[-1] + LENGTH <= stream.num_tokens
        assert len(starts) * LENGTH >= stream.num_tokens - 2 * LENGTH
        seen.append((starts[0], tuple(reader.window_starts(samples[:20]))))
    assert len({order for _, order in seen}) == 3
    assert len({offset for offset, _ in seen}) > 1


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_rows_are_windows_of_the_stream(tiny_corpus: Path, packing: Mode) -> None:
    reader = source(tiny_corpus, packing)
    flat = Corpus.open(tiny_corpus).stream("train")
    tokens = flat.gather(np.array([0]), flat.num_tokens)[0]
    starts = reader.window_starts(np.arange(40, 60))
    expected = np.concatenate([tokens[s : s + LENGTH] for s in starts])
    assert np.array_equal(originals(reader.batch(40, 20)), expected)


@pytest.mark.parametrize("packing", ["rows", "documents"])
@pytest.mark.parametrize("length", [4, 32, 200])
def test_bounds_and_positions_equal_a_brute_force_walk(
    tiny_corpus: Path, packing: Mode, length: int
) -> None:
    reader = source(tiny_corpus, packing, length)
    documents = set(reader.stream.document_starts.tolist())
    for first in (0, 11, 3 * reader.num_windows - 4):
        batch = reader.batch(first, 8)
        bounds, positions = [], []
        for row, start in enumerate(reader.window_starts(np.arange(first, first + 8))):
            for i in range(length):
                if i == 0 or (packing == "documents" and start + i in documents):
                    bounds.append(row * length + i)
                positions.append(row * length + i - bounds[-1])
        total = 8 * length
        bounds_of_batch = batch.packing.bounds_S.tolist()
        assert bounds_of_batch == bounds + [total] * (len(bounds_of_batch) - len(bounds))
        assert bounds_of_batch[-1] == total
        assert batch.positions_T.tolist() == positions
        if packing == "documents":  # every document in a row begins with [CLS]
            assert {int(originals(batch)[b]) for b in bounds if b % length} <= {2}


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_shapes_and_types_never_change(tiny_corpus: Path, packing: Mode) -> None:
    reader = source(tiny_corpus, packing)
    shapes = {
        tuple((t.shape, t.dtype) for t in tensors(reader.batch(first, 4)))
        for first in range(0, 120, 4)
    }
    assert len(shapes) == 1
    (ids, positions, bounds, places, targets) = next(iter(shapes))
    assert {ids[1], positions[1], places[1], targets[1]} == {torch.int64}
    assert bounds[1] == torch.int32
    packings = {reader.batch(first, 4).packing[1:] for first in range(0, 120, 4)}
    row_length = LENGTH if packing == "rows" else None
    assert packings == {(row_length, LENGTH, LENGTH, False, None, False)}


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_causal_targets_are_of_the_document_that_is_asked(tiny_corpus: Path, packing: Mode) -> None:
    reader = source(tiny_corpus, packing)
    batch = reader.with_targets(NextTokens(0.9)).batch(7, 40)
    tokens = (reader.window_starts(np.arange(7, 47))[:, None] + np.arange(LENGTH)).reshape(
        -1
    )  # places in the stream
    asked = batch.target_positions_M[batch.target_ids_M != IGNORE].numpy()
    document_of = np.searchsorted(reader.stream.document_starts, tokens, side="right")
    assert batch.packing.causal and len(asked) == batch.num_targets > 40 * LENGTH / 2
    assert np.array_equal(document_of[asked], document_of[asked + 1])


def test_ranks_together_read_what_one_process_reads(tiny_corpus: Path) -> None:
    reader, rows, world = source(tiny_corpus), 4, 3
    alone = [r for k in range(12) for r in rows_of(reader.batch(k * rows, rows))]
    shares = [
        [rows_of(reader.batch((k * world + rank) * rows, rows)) for k in range(4)]
        for rank in range(world)
    ]  # as pretrain.micro_batch_stream cuts them
    together = [r for k in range(4) for rank in range(world) for r in shares[rank][k]]
    assert together == alone


def test_a_corpus_below_two_windows_is_refused(tiny_corpus: Path) -> None:
    tokens = Corpus.open(tiny_corpus).stream("train").num_tokens
    assert source(tiny_corpus, length=tokens // 2).num_windows == 1
    source(tiny_corpus, length=tokens // 2).batch(0, 3)
    with pytest.raises(UserError, match="fewer than two windows"):
        source(tiny_corpus, length=tokens // 2 + 1)


class TestPrefetch:
    def running(self) -> int:
        return sum(t.name.startswith("prefetch") for t in threading.enumerate())

    @pytest.fixture(autouse=True)
    def _no_thread_is_left(self) -> Iterator[None]:
        assert self.running() == 0
        yield
        assert self.running() == 0

    def test_equals_direct_calls_and_resumes_anywhere(self, tiny_corpus: Path) -> None:
        reader = source(tiny_corpus)
        make: Callable[[int], Batch] = lambda k: reader.batch(4 * k, 4)  # noqa: E731
        stream = prefetch(make, 3)
        ahead = [next(stream) for _ in range(10)]
        stream.close()
        assert all(same(batch, make(k)) for k, batch in enumerate(ahead))
        resumed = prefetch(lambda k: make(6 + k), 3)
        assert all(same(next(resumed), batch) for batch in ahead[6:])
        resumed.close()

    def test_at_most_depth_wait(self, tiny_corpus: Path) -> None:
        reader, made = source(tiny_corpus), list[int]()

        def make(k: int) -> Batch:
            made.append(k)
            return reader.batch(k, 1)

        stream = prefetch(make, depth=2)
        next(stream)
        time.sleep(0.3)
        assert len(made) <= 4  # one taken, two waiting, one in the hand
        stream.close()

    def test_an_end_waits_for_one_batch_only(self, tiny_corpus: Path) -> None:
        reader, made = source(tiny_corpus), list[int]()

        def make(k: int) -> Batch:
            made.append(k)
            time.sleep(0.1)
            return reader.batch(k, 1)

        stream = prefetch(make, depth=20)
        next(stream)
        stream.close()
        assert len(made) <= 3

    def test_an_error_reaches_the_consumer_in_its_turn(self, tiny_corpus: Path) -> None:
        reader = source(tiny_corpus)

        def make(k: int) -> Batch:
            if k == 3:
                raise UserError("shard gone")
            return reader.batch(k, 1)

        stream = prefetch(make, 3)
        assert all(same(next(stream), reader.batch(k, 1)) for k in range(3))
        with pytest.raises(UserError, match="shard gone"):
            next(stream)


def test_room_for_sequences_is_by_the_documents_that_there_are() -> None:
    """One crowded window in a corpus of long documents: every window could be that one, but no 512 are.

    FlashAttention's backward pass has 128 tokens of scratch for each: 512 rows of 128 would need 10 times their own.
    """
    starts = np.unique(
        np.concatenate([np.arange(0, 2_000_000, 900), 640_000 + np.arange(0, 100, 10)])
    )
    stream = TokenStream.of_array(np.full(2_000_000, 7, dtype=np.uint16), starts)
    masker = Masker(MaskedTargets(0.25, 0.8, 0.1), 100, 4, (0, 1, 2, 3, 4), 0)
    packed = BatchSource(stream, masker, 128, "documents", 0)
    batches = [packed.batch(first, 512) for first in range(0, 40_000, 512)]  # two epochs and a half
    sizes = {len(batch.packing.bounds_S) for batch in batches}
    max_sequences = max(len(batch.packing.bounds_S.unique()) for batch in batches)
    assert len(sizes) == 1 and max_sequences <= sizes.pop() < 1.35 * max_sequences < 2 * 512
    in_order = BatchSource(stream, masker, 128, "documents", 0, shuffle=False)
    ordered = [in_order.batch(first, 64) for first in range(0, 15_000, 64)]
    max_sequences = max(len(batch.packing.bounds_S.unique()) for batch in ordered)
    assert {len(batch.packing.bounds_S) for batch in ordered} == {in_order.max_sequences(64) + 1}
    assert max_sequences <= in_order.max_sequences(64) + 1 <= max_sequences + 2


def test_a_batch_with_more_sequences_than_foreseen_takes_twice_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = TokenStream.of_array(np.full(4000, 7, dtype=np.uint16), np.arange(0, 4000, 5))
    masker = Masker(MaskedTargets(0.25, 0.8, 0.1), 100, 4, (0, 1, 2, 3, 4), 0)
    packed = BatchSource(stream, masker, 20, "documents", 0)
    expected = packed.batch(0, 6)
    monkeypatch.setattr(packed, "max_sequences", lambda rows: 7)
    large_batch = packed.batch(0, 6)
    assert len(large_batch.packing.bounds_S) == 28 + 1 and same(
        trimmed(large_batch), trimmed(expected)
    )
