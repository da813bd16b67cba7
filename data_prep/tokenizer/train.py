"""Training a tokenizer on a sample of the text.

Training is deterministic. The WordPiece trainer of `tokenizers` is not: it numbers the inner `##x` forms, and drops
rare characters of equal count, in the order of a randomly seeded hash map. So both are fixed beforehand: we choose the
alphabet, and pass the inner forms in sorted order. Its Unigram trainer sums in the order of such a map, which cannot be
fixed from outside, so Unigram models are trained by `sentencepiece` in one thread.
"""

import hashlib
import heapq
import io
from collections import Counter
from collections.abc import Callable, Iterable
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
from data_prep.tokenizer.encode import split_at_whitespace
from data_prep.tokenizer.load import SPECIAL_TOKENS, TokenizerConfig, add_template

SPECIAL = list(SPECIAL_TOKENS.values())
LARGEST_ALPHABET = 1000  # of scripts that have few characters
SMALLEST_ALPHABET = 64
COVERAGE = 0.9995  # of the characters
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


def train(sample: list[str], config: TokenizerConfig) -> Tokenizer:
    """A tokenizer of `config.kind`, of the sample. UserError: too little text, too small a vocabulary."""
    characters = sum(map(len, sample))
    if characters < LEAST_SAMPLE_CHARACTERS:
        raise UserError(
            f"too little text to train a tokenizer: {characters} characters, at least {LEAST_SAMPLE_CHARACTERS} are"
            " needed; name more text or set tokenizer.path to an existing tokenizer.json"
        )
    tokenizer = TRAINERS[config.kind](sample, config)
    add_template(tokenizer, SPECIAL_TOKENS)
    return tokenizer


def _train_wordpiece(sample: list[str], config: TokenizerConfig) -> Tokenizer:
    """WordPiece with BERT's normaliser and word splitting (Devlin et al. 2019)."""
    normalizer, unk = (
        normalizers.BertNormalizer(lowercase=config.lowercase, strip_accents=config.strip_accents),
        SPECIAL_TOKENS["unk"],
    )
    alphabet = _alphabet(character_counts(sample, normalizer), config.vocab_size, normalizer)
    entries = [entry for character in alphabet for entry in _entries_of(character, normalizer)]
    _require_vocabulary(config, len(entries), "each character of the text at two places")
    draft = Tokenizer(models.WordPiece(unk_token=unk))
    draft.normalizer, draft.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.vocab_size,
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


def _train_bpe(sample: list[str], config: TokenizerConfig) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019): no unknown tokens, spaces kept in front of their word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    _require_vocabulary(config, len(alphabet), "each of the 256 bytes")
    tokenizer = Tokenizer(models.BPE())
    if config.lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=SPECIAL[:-1]
        + [AddedToken(SPECIAL_TOKENS["mask"], lstrip=True, special=True)],  # with its space
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _train_unigram(sample: list[str], config: TokenizerConfig) -> Tokenizer:
    """Unigram language model (Kudo 2018) over words in NFKC; rare characters, 0.05 % of the text, become unknown."""
    normalizer = normalizers.Sequence(
        [normalizers.NFKC(), *[normalizers.Lowercase()] * config.lowercase]
    )
    alphabet = _alphabet(character_counts(sample, normalizer), config.vocab_size, normalizer)
    _require_vocabulary(config, 1 + len(alphabet), "each character of the text")
    lines = (normalizer.normalize_str(line) for text in sample for line in text.splitlines())
    vocabulary = [(token, 0.0) for token in SPECIAL] + _unigram_pieces(
        lines, config.vocab_size - len(SPECIAL)
    )
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
    """At most `count` pieces with their log-probabilities."""
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


TRAINERS: dict[str, Callable[[list[str], TokenizerConfig], Tokenizer]] = {
    "wordpiece": _train_wordpiece,
    "bpe": _train_bpe,
    "unigram": _train_unigram,
}


def _require_vocabulary(config: TokenizerConfig, entries: int, what: str) -> None:
    needed = len(SPECIAL) + entries
    if config.vocab_size < needed:
        raise UserError(
            f"tokenizer.vocab_size={config.vocab_size} is too small: the special tokens and {what} alone need {needed}"
        )


def character_counts(sample: list[str], normalizer: Any) -> Counter[str]:
    """Return how often each character but white space occurs in the normalised sample."""
    counts = code_point_counts(sample)
    normalised = Counter[str]()
    for code in np.flatnonzero(counts).tolist():
        for character in normalizer.normalize_str(chr(code)):
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


def _alphabet(counts: Counter[str], vocab_size: int, normalizer: Any) -> list[str]:
    """Return the most frequent characters, ties by code point, in order of code points.

    At least 1,000, or an eighth of the vocabulary; of scripts with more of them as many as cover 99.95 % of the text
    (as in sentencepiece, Kudo and Richardson 2018), at most in three quarters of the vocabulary.
    """
    limit = min(LARGEST_ALPHABET, max(SMALLEST_ALPHABET, vocab_size // 8))
    room, missing = vocab_size * 3 // 4, (1 - COVERAGE) * counts.total()
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    uncovered = counts.total()
    for rank, character in enumerate(ranked):
        room -= len(_entries_of(character, normalizer))
        if rank >= limit and (room < 0 or uncovered <= missing):
            return sorted(ranked[:rank])
        uncovered -= counts[character]
    return sorted(ranked)


def _entries_of(character: str, normalizer: Any) -> list[str]:
    """Return a character's entries in WordPiece: at the start of a word, and inside one if it does not stand alone."""
    stands_alone = normalizer.normalize_str(character).startswith(" ")  # as Han does in BERT
    return [character] if stands_alone else [character, f"##{character}"]
