"""The last pass: the selected documents of all parts, in order, as the shards of both splits."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cramming.data.corpus import SPLITS
from cramming.data.manifest import INDEX_DTYPE, Shard, Split
from cramming.files import overwrite_atomically, sync
from data_prep.selection import Selection


class ShardWriter:
    """Writes one split of a corpus as a stream. A shard becomes visible whole, by renaming; memory is one append."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards: list[Shard] = []
        self._part: BinaryIO | None = None
        self._tokens = 0

    def append(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        """Append `tokens` [n]; `starts` are the offsets in it where documents begin."""
        while len(tokens):
            if self._part is None:
                self._file = f"{self.split}-{len(self.shards):05d}.bin"
                self._part = (self.folder / f"{self._file}.part").open("wb")
                self._hash, self._tokens, self._starts = hashlib.sha256(), 0, list[np.ndarray]()
            room = self.shard_tokens - self._tokens
            inside = int(np.searchsorted(starts, room))
            self._write(tokens[:room], starts[:inside])
            tokens, starts = tokens[room:], starts[inside:] - room
            if self._tokens == self.shard_tokens:
                self.close()

    def _write(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        assert self._part is not None
        self._starts.append(starts.astype(INDEX_DTYPE) + INDEX_DTYPE.type(self._tokens))
        data = np.ascontiguousarray(tokens, dtype=self.dtype).data
        self._part.write(data)
        self._hash.update(data)
        self._tokens += len(tokens)

    def close(self) -> None:
        """Finish the shard that is being written, if any: sync it, then give it and its index their names."""
        if self._part is None:
            return
        self._part.flush()
        sync(self._part.fileno())
        self._part.close()
        self._part = None
        index = b"".join(starts.tobytes() for starts in self._starts)
        documents = len(index) // INDEX_DTYPE.itemsize
        index_hash = hashlib.sha256(index).hexdigest()
        shard = Shard(self._file, self._tokens, documents, self._hash.hexdigest(), index_hash)
        overwrite_atomically(self.folder / shard.index_file, lambda path: path.write_bytes(index))
        (self.folder / f"{self._file}.part").rename(self.folder / self._file)
        self.shards.append(shard)


class CorpusWriter:
    """Writes the selected documents; `shards` are those of each split, `token_use` [V] how often each entry occurs."""

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], shard_tokens: int, vocab_size: int
    ) -> None:
        self.dtype = dtype
        self.token_use = np.zeros(vocab_size, dtype=np.int64)
        self._writers = {split: ShardWriter(folder, split, dtype, shard_tokens) for split in SPLITS}

    @property
    def shards(self) -> dict[Split, list[Shard]]:
        """The finished shards of each split."""
        return {split: writer.shards for split, writer in self._writers.items()}

    def write(self, selection: Selection) -> Iterator[int]:
        """Write everything; yield how many tokens of each part were read."""
        rows = selection.rows
        chosen_N = {split: selection.of_split(split) for split in SPLITS}
        for part, first, last in zip(rows.parts, rows.first_P, rows.first_P[1:]):
            tokens, lengths_N = part.tokens(), rows.rows_N["tokens"][first:last].astype(np.int64)
            for split, writer in self._writers.items():
                writer.append(*_chosen(tokens, lengths_N, chosen_N[split][first:last]))
            dropped, _ = _chosen(tokens, lengths_N, ~selection.keep_N[first:last])
            self.token_use += part.array("token_use")
            self.token_use -= np.bincount(dropped, minlength=len(self.token_use))
            yield len(tokens)
        for writer in self._writers.values():
            writer.close()


def _chosen(
    tokens: np.ndarray, lengths_N: np.ndarray, chosen_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the chosen documents, and where each begins among them."""
    lengths = lengths_N[chosen_N]
    starts = np.cumsum(lengths) - lengths
    if chosen_N.all():
        return tokens, starts
    return tokens[np.repeat(chosen_N, lengths_N)], starts
