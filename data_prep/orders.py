"""Order files: the training documents in another order, for reading the same shards as a curriculum (`train.order`).

    sentence_length    mean words per sentence, short ones first (Bengio et al. 2009 begin with the short)
    compressibility    tokens per character, what the tokenizer compresses best first
    token_prevalence   mean log2 probability of the tokens by their own counts in the corpus, likely ones first

Geiping and Goldstein 2022 (section 4.4) filter by tokens per character, and sort rows by their average token
prevalence; their code also offers the length. Here documents are sorted, whole, because the sequence length is not part
of a corpus. An order file is a .npy of uint32 document numbers; the reverse is read from the same file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from cramming.data.corpus import Curriculum, Shard
from cramming.data.stream import TokenStream
from cramming.files import overwrite_atomically
from data_prep.text_measures import TextMeasures


@dataclass(frozen=True)
class Documents:
    """The finished documents of one split, and what they can be sorted by."""

    folder: Path
    shards: list[Shard]
    dtype: np.dtype[np.generic]
    texts: TextMeasures
    token_use: np.ndarray

    def starts(self) -> np.ndarray:
        """Where each document begins in the stream: [D]."""
        return TokenStream(self.folder, self.shards, self.dtype).document_starts

    def lengths(self) -> np.ndarray:
        """Tokens of each document, [CLS] and [SEP] included: [D]."""
        return np.diff(self.starts(), append=sum(shard.tokens for shard in self.shards))

    def mean_log_probabilities(self) -> np.ndarray:
        """Mean over each document of log2 of (count + 1) / (all + vocabulary): [D]."""
        log_V = np.log2((self.token_use + 1) / (self.token_use.sum() + len(self.token_use)))
        starts_D, sums_D = self.starts(), np.zeros(self.texts.documents)
        base = 0
        for shard in self.shards:
            values = log_V[np.memmap(self.folder / shard.file, dtype=self.dtype, mode="r")]
            first = int(np.searchsorted(starts_D, base, side="right")) - 1  # the one that the shard begins in
            last = int(np.searchsorted(starts_D, base + shard.tokens))
            sums_D[first:last] += np.add.reduceat(values, np.maximum(starts_D[first:last] - base, 0))
            base += shard.tokens
        return sums_D / self.lengths()


# Each gives the number to sort by, ascending.
SORT_KEYS: dict[Curriculum, Callable[[Documents], np.ndarray]] = {
    "sentence_length": lambda documents: documents.texts.sentence_lengths(),
    "compressibility": lambda documents: documents.lengths() / np.maximum(1, documents.texts.characters_of_each()),
    "token_prevalence": lambda documents: -documents.mean_log_probabilities(),
}


def write(documents: Documents, names: list[Curriculum]) -> dict[str, str]:
    """Write the order files; their names. Text is needed for all but `token_prevalence`: ready-made ids have none."""
    written: dict[str, str] = {}
    for name in names:
        if name == "token_prevalence" or documents.texts.characters:
            order_D = np.argsort(SORT_KEYS[name](documents), kind="stable").astype("<u4")
            written[name] = f"order-{name}.npy"
            overwrite_atomically(documents.folder / written[name], partial(_save, order_D))
    return written


def _save(array: np.ndarray, path: Path) -> None:
    with path.open("wb") as handle:
        np.save(handle, array)
