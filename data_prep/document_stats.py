"""What is measured of every kept document, and the order files that are sorted by it.

Order files let the same shards be read with their documents in another order, as a curriculum (`train.order`):

    sentence_length    mean words per sentence, short ones first (Bengio et al. 2009 begin with the short)
    compressibility    tokens per character, what the tokenizer compresses best first
    token_prevalence   mean log2 probability of the tokens by their own counts in the corpus, likely ones first

[CLS] and [SEP], which every document has, are not counted: they would put the short ones on one side.
Geiping and Goldstein 2022 (section 4.4) filter by tokens per character, and sort rows by token prevalence. Here whole
documents are sorted, as sequence length is not part of a corpus. The reverse is read from the same file.
"""

import io
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from cramming.data.corpus import Curriculum, TokenStream
from cramming.files import overwrite_atomically

MOST_SOURCES = 32
OTHERS = "all others"


def measured(text: str) -> tuple[int, int, int]:
    """Characters, words (between white space) and sentences of a normalised text. All 0 for ready-made ids.

    A sentence ends with . ! or ? before a space, or with its line.
    """
    if not text:
        return 0, 0, 0
    lines = text.count("\n")
    ends = sum(text.count(end) for end in (". ", "! ", "? ", '." ', ".) "))
    return len(text), text.count(" ") + lines + 1, ends + lines + 1


class DocumentStats:
    """The measures of one split's documents, in the order of the shards. Memory: 14 bytes per document.

    `sources` are those to count by name; from a corpus of a thousand files the first are, the rest together.
    """

    def __init__(self, sources: Sequence[str] = ()) -> None:
        self.sources = [*sources[:MOST_SOURCES], OTHERS]
        self.documents = self.characters = self.words = 0
        self._index = {name: i for i, name in enumerate(self.sources)}
        self._bytes, self._characters = array("I"), array("I")
        self._sentence_length, self._source = array("f"), array("H")

    def add(
        self,
        measures_N3: np.ndarray,
        bytes_N: np.ndarray,
        source_N: np.ndarray,
        sources: Sequence[str],
    ) -> None:
        """The next documents, as `measured`, with their UTF-8 bytes and the places of their sources in `sources`."""
        characters_N, words_N, sentences_N = measures_N3.T
        self.documents += len(measures_N3)
        self.characters += int(characters_N.sum())
        self.words += int(words_N.sum())
        index_S = np.array(
            [self._index.get(source, len(self._index) - 1) for source in sources], dtype=np.uint16
        )
        self._bytes.frombytes(bytes_N.astype(np.uint32).tobytes())
        self._characters.frombytes(characters_N.astype(np.uint32).tobytes())
        self._sentence_length.frombytes(
            (words_N / np.maximum(1, sentences_N)).astype(np.float32).tobytes()
        )
        self._source.frombytes(index_S[source_N].tobytes())

    def by_source(self, lengths_D: np.ndarray) -> dict[str, dict[str, int]]:
        """Documents, bytes and tokens of each source that has any; `lengths_D` in tokens."""
        source_D, most = np.frombuffer(self._source, dtype=np.uint16), len(self.sources)
        counts = {
            "documents": np.bincount(source_D, minlength=most),
            "bytes": np.bincount(source_D, np.frombuffer(self._bytes, dtype=np.uint32), most),
            "tokens": np.bincount(source_D, lengths_D, most),
        }
        rows = {
            name: {key: int(value[i]) for key, value in counts.items()}
            for i, name in enumerate(self.sources)
        }
        return {name: row for name, row in rows.items() if row["documents"]}

    def sort_key(self, order: Curriculum, stream: TokenStream, token_use: np.ndarray) -> np.ndarray:
        """The number [D] to sort these documents by, ascending; `stream` holds their tokens."""
        if order == "sentence_length":
            return np.frombuffer(self._sentence_length, dtype=np.float32)
        if order == "compressibility":
            return (token_lengths(stream) - 2) / np.maximum(
                1, np.frombuffer(self._characters, dtype=np.uint32)
            )
        return -_mean_log_probabilities(stream, token_use)


def token_lengths(stream: TokenStream) -> np.ndarray:
    """Tokens of each document, [CLS] and [SEP] included: [D]."""
    return np.diff(stream.document_starts, append=stream.num_tokens)


def _mean_log_probabilities(stream: TokenStream, token_use: np.ndarray) -> np.ndarray:
    """Mean over each document of log2 of (count + 1) / (all + vocabulary), the count in `token_use` [V]: [D]. Without
    [CLS] and [SEP], which are the stream's first token and its last."""
    log_V = np.log2((token_use + 1) / (token_use.sum() + len(token_use)))
    starts_D, sums_D = stream.document_starts, np.zeros(stream.num_documents)
    base = 0
    for tokens in stream.shards:
        first = (
            int(np.searchsorted(starts_D, base, side="right")) - 1
        )  # the one that the shard begins in
        last = int(np.searchsorted(starts_D, base + len(tokens)))
        sums_D[first:last] += np.add.reduceat(
            log_V[tokens], np.maximum(starts_D[first:last] - base, 0)
        )
        base += len(tokens)
    ends = log_V[stream.shards[0][0]] + log_V[stream.shards[-1][-1]]
    return (sums_D - ends) / np.maximum(1, token_lengths(stream) - 2)


def write_orders(
    folder: Path,
    names: Sequence[Curriculum],
    stats: DocumentStats,
    stream: TokenStream,
    token_use: np.ndarray,
) -> dict[str, str]:
    """Write order files of uint32; their names. All but `token_prevalence` need text: ready-made ids have none."""
    written: dict[str, str] = {}
    for name in names:
        if name != "token_prevalence" and not stats.characters:
            continue
        order_D = np.argsort(stats.sort_key(name, stream, token_use), kind="stable").astype("<u4")
        written[name] = f"order-{name}.npy"
        np.save(
            buffer := io.BytesIO(), order_D
        )  # numpy's own writing to a file loses the system's errors
        overwrite_atomically(
            folder / written[name], partial(Path.write_bytes, data=buffer.getbuffer())
        )
    return written
