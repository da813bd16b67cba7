"""A split of a corpus as one flat stream of tokens, whatever its shards, and the same with its documents reordered.

Shards are memory-mapped; a window is copied on request. `cramming.data.batches` makes sequences of it.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cramming.data.manifest import INDEX_DTYPE, Shard
from cramming.files import Stamp


class TokenStream:
    """One flat stream of tokens over all shards of a split.

    `num_tokens`, `num_documents`; `shards`, an array of tokens each; `document_starts` int64 [num_documents], ascending
    stream offsets of each [CLS].
    `mapped`: which file each shard's tokens come from, by the shard's name.
    """

    def __init__(self, folder: Path, shards: list[Shard], dtype: np.dtype[Any], name: str = "stream") -> None:
        self.name = name  # for messages
        self.num_documents = sum(shard.documents for shard in shards)
        self._index_files = [folder / shard.index_file for shard in shards]
        self.mapped: dict[str, Stamp] = {}
        tokens = []
        for shard in shards:
            with (folder / shard.file).open("rb") as file:
                self.mapped[shard.file] = Stamp.of(file.fileno())
                # np.asarray: fancy indexing of the memmap subclass itself is slower.
                tokens.append(np.asarray(np.memmap(file, dtype=dtype, mode="r")))
        self._set_shards(tokens)

    @classmethod
    def of_array(cls, ids: np.ndarray, document_starts: np.ndarray) -> "TokenStream":
        """A stream in memory, for measurements: no folder, no files."""
        stream = cls(Path(), [], ids.dtype, "array")
        stream.num_documents, stream.document_starts = len(document_starts), document_starts.astype(np.int64)
        stream._set_shards([ids])
        return stream

    def _set_shards(self, shards: list[np.ndarray]) -> None:
        self.shards = shards
        self._bases = np.cumsum([0] + [len(shard) for shard in shards])
        self.num_tokens = int(self._bases[-1])
        self._views: dict[int, list[np.ndarray]] = {}

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Read from the index files on first use: `packing: rows` never needs them."""
        starts = [np.fromfile(file, INDEX_DTYPE).astype(np.int64) for file in self._index_files]
        return np.concatenate([shard_starts + base for shard_starts, base in zip(starts, self._bases)])

    def gather(self, starts_N: np.ndarray, length: int) -> np.ndarray:
        """Windows `[start, start + length)` at any places of the stream, also across shards: int64 [N, length]."""
        order_N = np.argsort(starts_N)  # by shard, and kind to the page cache
        sorted_N = starts_N[order_N]
        assert len(sorted_N) == 0 or (sorted_N[0] >= 0 and sorted_N[-1] + length <= self.num_tokens), (
            f"a window of {length} tokens reaches outside the stream of {self.num_tokens}"
        )
        out_NL = np.empty((len(starts_N), length), dtype=np.int64)
        edges = np.searchsorted(sorted_N, self._bases).tolist()
        for shard, windows in enumerate(self._windows(length)):
            first, last = edges[shard], edges[shard + 1]
            whole = first + int(np.searchsorted(sorted_N[first:last], self._bases[shard] + len(windows)))
            if whole > first:
                out_NL[order_N[first:whole]] = windows[sorted_N[first:whole] - self._bases[shard]]
            if last > whole:  # windows across shards
                out_NL[order_N[whole:last]] = self.take(sorted_N[whole:last, None] + np.arange(length))
        return out_NL

    def _windows(self, length: int) -> list[np.ndarray]:
        """For each shard a view [tokens - length + 1, length] of all windows that lie whole in it."""
        if length not in self._views:
            self._views[length] = [
                sliding_window_view(shard, length) if len(shard) >= length else np.empty((0, length), shard.dtype)
                for shard in self.shards
            ]
        return self._views[length]

    def take(self, places: np.ndarray) -> np.ndarray:
        """The tokens at these places of the stream: int64, of the same shape."""
        shard_of = np.searchsorted(self._bases, places, side="right") - 1
        out = np.empty(places.shape, dtype=np.int64)
        for shard in np.unique(shard_of):
            here = shard_of == shard
            out[here] = self.shards[shard][places[here] - self._bases[shard]]
        return out


class OrderedStream(TokenStream):
    """The same shards read as if their documents lay in another order. Memory: 16 bytes per document."""

    def __init__(self, stream: TokenStream, order_D: np.ndarray) -> None:
        self.name, self._stream = stream.name, stream
        self.num_tokens, self.num_documents = stream.num_tokens, stream.num_documents
        lengths_D = np.diff(stream.document_starts, append=stream.num_tokens)[order_D]
        self.document_starts = np.cumsum(lengths_D) - lengths_D
        self._there_D = stream.document_starts[order_D]  # where each document begins in the shards

    def gather(self, starts_N: np.ndarray, length: int) -> np.ndarray:
        """Windows `[start, start + length)` of this order: int64 [N, length]."""
        places_NL = starts_N[:, None] + np.arange(length)
        document_NL = np.searchsorted(self.document_starts, places_NL, side="right") - 1
        return self._stream.take(places_NL + (self._there_D - self.document_starts)[document_NL])
