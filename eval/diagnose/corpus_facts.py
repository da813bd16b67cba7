"""Facts of a corpus that decide what a model can learn from it, counted in a sample of its tokens. No torch.

Entropies are the cross entropies of n-gram models on held-out text, in nats per token, with interpolated absolute
discounting (Ney, Essen & Kneser 1994) of counts in training text.
Shapes: N tokens of the sample, M places of the held-out text, V vocabulary.
"""

import math

import numpy as np
from tokenizers import Tokenizer

from cramming.data.corpus import Corpus, TokenStream
from eval.diagnose.evidence import CorpusFacts

SAMPLE_TOKENS, HELD_OUT_TOKENS = 2_000_000, 100_000
BLOCK_TOKENS = 16_384  # consecutive tokens of a sample that is not the whole text
DISCOUNT = 0.75
REPEATED_WORDS = 12  # length of the windows whose repetitions are counted
FAR = 3  # distance of the word that is compared with the neighbour, in words
# First characters of entries that begin a word, in byte-level BPE and in Unigram
WORD_MARKS = ("\u0120", "\u2581")


class Continuations:
    """Counts of the tokens that follow each context, smoothed by absolute discounting.

    A context is one number, such as `first * vocab_size + second` for two tokens. With the token behind it, it must be
    below 2^63, which holds for two tokens of a vocabulary below 2^21.
    """

    def __init__(self, contexts_N: np.ndarray, tokens_N: np.ndarray, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        pairs = contexts_N * vocab_size + tokens_N
        self.pairs, self.pair_counts = np.unique(pairs, return_counts=True)
        self.contexts, first = np.unique(self.pairs // vocab_size, return_index=True)
        self.totals = np.add.reduceat(self.pair_counts, first)
        self.kinds = np.diff(first, append=len(self.pairs))  # different tokens after each context

    def probabilities(
        self, contexts_M: np.ndarray, tokens_M: np.ndarray, backoff_M: np.ndarray
    ) -> np.ndarray:
        """Return P(token | context) [M]; the discounted mass is distributed by `backoff_M`, P(token | less context)."""
        place_M, is_known_M = _find(self.contexts, contexts_M)
        pair_M, is_seen_M = _find(self.pairs, contexts_M * self.vocab_size + tokens_M)
        counts_M = np.where(is_seen_M, self.pair_counts[pair_M] - DISCOUNT, 0.0)
        freed_M = DISCOUNT * self.kinds[place_M]
        smoothed_M = (counts_M + freed_M * backoff_M) / self.totals[place_M]
        return np.where(is_known_M, smoothed_M, backoff_M)


def _find(sorted_K: np.ndarray, wanted_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each wanted number in the sorted numbers, and whether it is one of them."""
    place_M = np.minimum(np.searchsorted(sorted_K, wanted_M), len(sorted_K) - 1)
    return place_M, sorted_K[place_M] == wanted_M


def corpus_facts(corpus: Corpus, validation_corpus: Corpus | None = None) -> CorpusFacts:
    """Return the facts of a corpus from a sample, which takes some seconds for two million tokens.

    Held-out tokens are those of `validation_corpus` if a run was validated on another corpus.
    """
    stream = corpus.stream("train")
    train_N = sample(stream, SAMPLE_TOKENS)
    held_out_M = sample((validation_corpus or corpus).stream("validation"), HELD_OUT_TOKENS)
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_file))
    vocab_size = max(corpus.vocab_size, int(train_N.max()) + 1, int(held_out_M.max()) + 1)
    is_regular_V = np.ones(vocab_size, dtype=bool)
    is_regular_V[list(corpus.special_ids)] = False
    counts_V = np.bincount(train_N, minlength=vocab_size)
    unigram_V = (counts_V + 0.5) / (counts_V.sum() + 0.5 * vocab_size)
    begins_V = begins_word(tokenizer, vocab_size)
    near, far = neighbour_gains(train_N, held_out_M, begins_V & is_regular_V)
    unigram, bigram, trigram = entropies(train_N, held_out_M, unigram_V, is_regular_V)
    unknown = corpus.special_ids.unk
    tokens_per_word = corpus.manifest.statistics.get("tokens_per_word")
    window_tokens = round(REPEATED_WORDS * (tokens_per_word or 1.0))
    repeated, times, window = repetition(train_N, window_tokens)
    is_target_M = is_regular_V[held_out_M]
    unseen = 0.0
    if is_target_M.any():
        unseen = float((counts_V[held_out_M[is_target_M]] == 0).mean())
    return CorpusFacts(
        vocab_size=corpus.vocab_size,
        sampled_tokens=len(train_N),
        unigram=unigram,
        bigram=bigram,
        trigram=trigram,
        repeated=repeated,
        repeated_text=tokenizer.decode(window.tolist()),
        repeated_times=times,
        unseen=unseen,
        unknown=float((train_N == unknown).mean()),
        tokens_per_word=tokens_per_word,
        used_entries=int(np.count_nonzero(counts_V)),
        neighbour_gain=near,
        far_gain=far,
        tokens_per_document=stream.num_tokens / max(1, stream.num_documents),
    )


def sample(stream: TokenStream, max_tokens: int) -> np.ndarray:
    """Return at most `max_tokens` tokens of a stream, int64 [N]: all of it, or blocks spread evenly over it."""
    if stream.num_tokens <= max_tokens:
        return stream.gather(np.zeros(1, np.int64), stream.num_tokens).reshape(-1)
    last_start = stream.num_tokens - BLOCK_TOKENS
    starts = np.linspace(0, last_start, max_tokens // BLOCK_TOKENS).astype(np.int64)
    return stream.gather(starts, BLOCK_TOKENS).reshape(-1)


def entropies(
    train_N: np.ndarray, held_out_M: np.ndarray, unigram_V: np.ndarray, is_regular_V: np.ndarray
) -> tuple[float, float, float]:
    """Return the cross entropies of a unigram, bigram and trigram model on the regular held-out tokens."""
    size = len(unigram_V)
    before_N, before_M = train_N[:-1], held_out_M[:-1]
    bigrams = Continuations(before_N, train_N[1:], size)
    trigrams = Continuations(before_N[:-1] * size + before_N[1:], train_N[2:], size)
    tokens_M = held_out_M[2:]
    one_M = unigram_V[tokens_M]
    two_M = bigrams.probabilities(before_M[1:], tokens_M, one_M)
    three_M = trigrams.probabilities(before_M[:-1] * size + before_M[1:], tokens_M, two_M)
    is_target_M = is_regular_V[tokens_M]
    unigram, bigram, trigram = (
        -float(np.log(p_M[is_target_M]).mean()) for p_M in (one_M, two_M, three_M)
    )
    return unigram, bigram, trigram


def neighbour_gains(
    train_N: np.ndarray, held_out_M: np.ndarray, begins_V: np.ndarray
) -> tuple[float, float]:
    """Return the nats by which the word before, and the word `FAR` words before, improve the prediction of a word.

    A word is represented by its first token. If the words of a document are in random order, both gains are equal.
    """
    words_N, words_M = train_N[begins_V[train_N]], held_out_M[begins_V[held_out_M]]
    if min(len(words_N), len(words_M)) <= FAR:
        return math.nan, math.nan
    counts_V = np.bincount(words_N, minlength=len(begins_V))
    unigram_V = (counts_V + 0.5) / (counts_V.sum() + 0.5 * len(begins_V))
    gains: list[float] = []
    for distance in (1, FAR):
        pairs = Continuations(words_N[:-distance], words_N[distance:], len(begins_V))
        one_M = unigram_V[words_M[distance:]]
        two_M = pairs.probabilities(words_M[:-distance], words_M[distance:], one_M)
        gains.append(float(np.log(two_M / one_M).mean()))
    return gains[0], gains[1]


def repetition(ids_N: np.ndarray, length: int) -> tuple[float, int, np.ndarray]:
    """Return the share of windows that occur earlier, the count of the most frequent window, and its tokens."""
    number = len(ids_N) - length + 1
    if number < 1:
        return 0.0, 0, ids_N[:0]
    hashes_N = np.zeros(number, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(length):
            tokens_N = ids_N[offset : offset + number].astype(np.uint64)
            hashes_N = hashes_N * np.uint64(0x9E3779B97F4A7C15) + tokens_N + np.uint64(1)
    _, first, counts = np.unique(hashes_N, return_index=True, return_counts=True)
    most_frequent = int(counts.argmax())
    start = int(first[most_frequent])
    return 1 - len(counts) / number, int(counts[most_frequent]), ids_N[start : start + length]


def begins_word(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Return which entries begin a word, bool [V].

    These are the entries with a mark, or those with a letter first if the tokenizer has no marks.
    """
    words = [tokenizer.id_to_token(entry) or "" for entry in range(vocab_size)]
    if marks_words(tokenizer):
        return np.array([word.startswith(WORD_MARKS) for word in words])
    return np.array([word[:1].isalpha() for word in words])


def marks_words(tokenizer: Tokenizer) -> bool:
    """Return whether entries that begin a word have a mark. In WordPiece, marks would be characters of the text."""
    if type(tokenizer.model).__name__ == "WordPiece":
        return False
    return any(entry.startswith(WORD_MARKS) for entry in tokenizer.get_vocab())
