"""Training a tokenizer on a sample of the text.

Training is deterministic. The WordPiece trainer of `tokenizers` is not: it numbers the inner `##x` forms, and drops
rare characters of equal count, in the order of a randomly seeded hash map. So both are fixed beforehand: we choose the
alphabet, and pass the inner forms in sorted order. Its Unigram trainer sums in the order of such a map, which cannot be
fixed from outside, so Unigram models are trained by `sentencepiece` in one thread.
"""

import hashlib
import heapq
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from cramming.config import UserError
from cramming.data.manifest import LARGEST_VOCABULARY
from data_prep.tokenizer.encode import split_at_whitespace, text_encoder
from data_prep.tokenizer.load import SPECIAL_TOKENS, TokenizerConfig, add_template

SPECIAL = list(SPECIAL_TOKENS.values())
LARGEST_ALPHABET = 1000  # of scripts that have few characters
SMALLEST_ALPHABET = 64
COVERAGE = 0.9995  # of the characters
SMALLEST_VOCABULARY = (
    4096  # of vocab_size=auto; English has 2.0 tokens per word with 2,048 entries, 1.8 with these
)
OCCURRENCES = 100
FREQUENT_SHARE = 0.95  # of the entries
DRAFT_CHARACTERS = 20_000_000  # of the sample, to find the size of the vocabulary
# GPT-2's words, but marks belong to their letter: vowel signs of Hindi are marks, and no token would go beyond them.
BPE_WORD = r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
SAMPLE_CHARACTERS = 20_000  # long documents enter the sample in parts of this length
LEAST_SAMPLE_CHARACTERS = 1000
LARGEST_NUMBER = 2**64 - 1


class Sampled(NamedTuple):
    """A text of a sample. Those with the smallest numbers stay; `place` is where it stands in the text."""

    number: int
    place: tuple[int, int]  # of tasks, and of texts in a task
    data: bytes


class Sample:
    """An even random sample of texts, at most `megabytes` of UTF-8, whatever the order in which they come.

    A bottom-k sample: every part of a document has a number by its content; those with the smallest numbers stay.
    """

    def __init__(self, megabytes: float, seed: int, threshold: int = LARGEST_NUMBER) -> None:
        self.threshold, self._limit = threshold, int(megabytes * 1e6)  # above it nothing stays
        self._salt = seed.to_bytes(8, "little", signed=True)
        self._size = self._texts = 0
        self._heap: list[tuple[int, Sampled]] = []  # the largest number on top (negated)

    def add(self, text: str, task: int, clean: Callable[[str], str]) -> None:
        """Add the next text of a task; what stays of it is cleaned."""
        for part in split_at_whitespace(text, SAMPLE_CHARACTERS):
            data = part.encode(errors="surrogatepass")
            digest = hashlib.blake2b(data, digest_size=8, salt=self._salt).digest()
            number = int.from_bytes(digest, "little")
            self._texts += 1
            if number <= self.threshold:
                self.take(Sampled(number, (task, self._texts), clean(part).encode()))

    def take(self, sampled: Sampled) -> None:
        """Add what another sample has."""
        if sampled.number > self.threshold:
            return
        heapq.heappush(self._heap, (-sampled.number, sampled))
        self._size += len(sampled.data)
        while self._size > self._limit and len(self._heap) > 1:
            self.threshold = self._heap[0][1].number - 1
            self._drop_above_threshold()

    def _drop_above_threshold(self) -> None:
        while len(self._heap) > 1 and self._heap[0][1].number > self.threshold:
            _, largest = heapq.heappop(self._heap)
            self._size -= len(largest.data)

    def sampled(self) -> list[Sampled]:
        """Return what stays, in the order of the text."""
        return sorted((sampled for _, sampled in self._heap), key=lambda sampled: sampled.place)


def train(sample: list[str], config: TokenizerConfig, share: float = 1.0) -> Tokenizer:
    """Return a tokenizer of `config.kind`, trained on a sample that is this share of the text.

    UserError: too little text, too small a vocabulary.
    """
    characters = sum(map(len, sample))
    if characters < LEAST_SAMPLE_CHARACTERS:
        raise UserError(
            f"too little text to train a tokenizer: {characters} characters, at least {LEAST_SAMPLE_CHARACTERS} are"
            " needed; name more text or set tokenizer.path to an existing tokenizer.json"
        )
    size = config.vocab_size
    if size == "auto":
        size = supported_vocabulary(sample, config, share)
    tokenizer = TRAINERS[config.kind](sample, config, size)
    add_template(tokenizer, SPECIAL_TOKENS)
    return tokenizer


def supported_vocabulary(sample: list[str], config: TokenizerConfig, share: float) -> int:
    """Return the largest multiple of 64, at most 32,768, of which 95 % of the entries occur 100 times in the text.

    This is the heuristic of Gowda and May 2020 ("Finding the Optimal Vocabulary Size for Neural Machine Translation").
    It is applied to the merges of a byte-level BPE for every kind of tokenizer: undoing the last merge gives the counts
    of a vocabulary that has one entry less. The characters of the text need twice as many entries at least.
    """
    every = 1 + int(sum(map(len, sample)) / DRAFT_CHARACTERS)
    part, least = sample[::every], OCCURRENCES * share / every
    draft = _train_bpe(part, config, LARGEST_VOCABULARY)
    vocabulary, merges = draft.get_vocab(), json.loads(draft.to_str())["model"]["merges"]
    use_V, first = _uses(draft, part), len(vocabulary) - len(merges)
    smallest = max(SMALLEST_VOCABULARY, 2 * _covering(character_counts(part, draft.normalizer)))
    for size in range(len(vocabulary), smallest, -1):
        is_frequent_M = use_V[first:size] >= least
        if size % 64 == 0 and is_frequent_M.mean() >= FREQUENT_SHARE:
            return size
        for entry in merges[size - 1 - first]:
            use_V[vocabulary[entry]] += use_V[size - 1]
    return min(smallest, LARGEST_VOCABULARY)


def _uses(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return how often each entry occurs, words apart: float64 [V]."""
    words = Counter[str]()
    for text in texts:
        words.update(text.split())
    ids = list(text_encoder(tokenizer, np.dtype("<u4"))(f" {word}" for word in words))
    times_W = np.array(list(words.values()), dtype=np.float64)
    times_T = np.repeat(times_W, list(map(len, ids)))
    return np.bincount(np.concatenate(ids), times_T, tokenizer.get_vocab_size())


def _train_wordpiece(sample: list[str], config: TokenizerConfig, size: int) -> Tokenizer:
    """Train WordPiece with BERT's normaliser and word splitting (Devlin et al. 2019)."""
    normalizer, unk = (
        normalizers.BertNormalizer(lowercase=config.lowercase, strip_accents=config.strip_accents),
        SPECIAL_TOKENS["unk"],
    )
    alphabet = _alphabet(character_counts(sample, normalizer), size, normalizer)
    entries = list[str]()
    for character in alphabet:
        entries += _entries_of(character, normalizer)
    _require_vocabulary(size, len(entries), "each character of the text at two places")
    draft = Tokenizer(models.WordPiece(unk_token=unk))
    draft.normalizer, draft.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=config.min_frequency,
        special_tokens=SPECIAL + [entry for entry in entries if entry not in alphabet],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    draft.train_from_iterator(sample, trainer)
    # Rebuilt from the vocabulary alone: the trainer has registered the inner forms as special tokens.
    tokenizer = Tokenizer(models.WordPiece(draft.get_vocab(with_added_tokens=True), unk_token=unk))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def _train_bpe(sample: list[str], config: TokenizerConfig, size: int) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019): no unknown tokens, spaces kept in front of their word, and marks in it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    _require_vocabulary(size, len(alphabet), "each of the 256 bytes")
    tokenizer = Tokenizer(models.BPE())
    if config.lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    words = pre_tokenizers.Split(Regex(BPE_WORD), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=config.min_frequency,
        special_tokens=SPECIAL[:-1]
        + [AddedToken(SPECIAL_TOKENS["mask"], lstrip=True, special=True)],  # with its space
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _train_unigram(sample: list[str], config: TokenizerConfig, size: int) -> Tokenizer:
    """Train Unigram (Kudo 2018) over words in NFKC; rare characters, 0.05 % of the text, become unknown."""
    normalizer = normalizers.Sequence(
        [normalizers.NFKC(), *[normalizers.Lowercase()] * config.lowercase]
    )
    alphabet = _alphabet(character_counts(sample, normalizer), size, normalizer)
    _require_vocabulary(size, 1 + len(alphabet), "each character of the text")
    lines = map(normalizer.normalize_str, chain.from_iterable(map(str.splitlines, sample)))
    vocabulary = [(token, 0.0) for token in SPECIAL] + _unigram_pieces(lines, size - len(SPECIAL))
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=SPECIAL.index(SPECIAL_TOKENS["unk"])))
    tokenizer.normalizer = normalizer
    # Words first: a line break separates them as a space does. Special tokens are pieces too, which no text may match.
    cut = pre_tokenizers.Split(
        Regex(rf"\[(?=({'|'.join(token[1:-1] for token in SPECIAL)})\])"), "isolated"
    )
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, *[cut] * (not config.lowercase)])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def _unigram_pieces(lines: Iterable[str], count: int) -> list[tuple[str, float]]:
    """Return at most `count` pieces with their log-probabilities."""
    import sentencepiece

    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=filter(None, lines),
            model_writer=written,
            model_type="unigram",
            vocab_size=count + 1,  # and its own sign for unknown
            hard_vocab_limit=False,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            normalization_rule_name="identity",
            max_sentence_length=1 << 20,  # bytes; longer lines would be left out
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(
            f"tokenizer.vocab_size={count + len(SPECIAL_TOKENS)}: sentencepiece cannot train on this text: {error}"
        ) from None
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    return [
        (model.id_to_piece(number), model.get_score(number))
        for number in range(1, model.get_piece_size())
    ]


TRAINERS: dict[str, Callable[[list[str], TokenizerConfig, int], Tokenizer]] = {
    "wordpiece": _train_wordpiece,
    "bpe": _train_bpe,
    "unigram": _train_unigram,
}


def _require_vocabulary(size: int, entries: int, what: str) -> None:
    needed = len(SPECIAL) + entries
    if size < needed:
        raise UserError(
            f"tokenizer.vocab_size={size} is too small: the special tokens and {what} alone need {needed}"
        )


def character_counts(sample: list[str], normalizer: Any) -> Counter[str]:
    """Return how often each character but white space occurs in the normalised sample."""
    counts = code_point_counts(sample)
    normalised = Counter[str]()
    for code in np.flatnonzero(counts).tolist():
        shown = normalizer.normalize_str(chr(code)) if normalizer else chr(code)
        for character in shown:
            if not character.isspace():
                normalised[character] += int(counts[code])
    return normalised


def code_point_counts(texts: Iterable[str]) -> np.ndarray:
    """Return how often each code point occurs: int64 [0x110000]."""
    counts = np.zeros(0x110000, dtype=np.int64)
    for text in texts:
        in_text = np.bincount(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32))
        counts[: len(in_text)] += in_text
    return counts


def _covering(counts: Counter[str]) -> int:
    """Return how many characters, the most frequent ones, cover 99.95 % of the text."""
    covered_C = np.cumsum(sorted(counts.values(), reverse=True))
    return 1 + int(np.searchsorted(covered_C, COVERAGE * counts.total()))


def _alphabet(counts: Counter[str], vocab_size: int, normalizer: Any) -> list[str]:
    """Return the most frequent characters, ties by code point, in order of code points.

    At least 1,000, or an eighth of the vocabulary; of scripts with more of them as many as cover 99.95 % of the text
    (as in sentencepiece, Kudo and Richardson 2018), at most in three quarters of the vocabulary.
    """
    least, room = (
        min(LARGEST_ALPHABET, max(SMALLEST_ALPHABET, vocab_size // 8)),
        vocab_size * 3 // 4,
    )
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    alphabet: list[str] = []
    for character in ranked[: max(least, _covering(counts))]:
        room -= len(_entries_of(character, normalizer))
        if room < 0 and len(alphabet) >= least:
            break
        alphabet.append(character)
    return sorted(alphabet)


def _entries_of(character: str, normalizer: Any) -> list[str]:
    """Return a character's entries in WordPiece: at the start of a word, and inside one if it does not stand alone."""
    stands_alone = normalizer.normalize_str(character).startswith(" ")  # as Han does in BERT
    return [character] if stands_alone else [character, f"##{character}"]
