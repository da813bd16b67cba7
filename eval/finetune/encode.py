"""Encoding of texts as token ids, once per task: every seed and epoch reads the same arrays.

Folders of this suite and stock BERT and ModernBERT folders get BERT's layout, `[CLS] a [SEP]` or `[CLS] a [SEP] b
[SEP]`, with the special tokens that their tokenizer names. Any other folder gets the layout of its tokenizer
(RoBERTa's `<s> a </s></s> b </s>`), and the token types of its template. Sequences that are too long lose tokens from
the longer of the two texts.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from cramming.config import UserError, require
from cramming.progress import Progress
from eval.finetune.models import ModelSource, refuse_changed
from eval.tasks.datasets import Split, TaskData

BATCH = 4096

Columns = tuple[list[str], ...]
Encoder = Callable[[Columns], tuple[list[Sequence[int]], list[Sequence[int]]]]
Offsets = tuple[int, int]  # first and last + 1 character of a token
WordEncoder = Callable[[list[str]], tuple[list[Sequence[int]], list[Sequence[Offsets]]]]


@dataclass(frozen=True)
class Encoded:
    """N examples without padding: ids int32 [T], types uint8 [T], starts int64 [N + 1], labels [N] or None.

    For tasks that label words, `words_T` (int64) holds at a word's first token the number of the word, and -1
    elsewhere. The labels are then those of the words of the split.
    """

    ids_T: np.ndarray
    types_T: np.ndarray
    starts_N: np.ndarray
    labels_N: np.ndarray | None
    words_T: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts_N) - 1


@dataclass(frozen=True)
class EncodedTask:
    """Splits of a task as token ids, under the names of their entries."""

    train: Encoded
    scored: dict[str, Encoded]
    blind: dict[str, Encoded]


def encode_tasks(
    tasks: Sequence[TaskData], source: ModelSource, max_length: int, cache: dict[str, EncodedTask]
) -> None:
    """Put the tasks into `cache`, by name, encoded by the model's tokenizer.

    Tasks that are in it with all their test sets already are skipped.
    """
    todo = {}
    for data in tasks:
        name = data.task.name
        if name not in cache or len(cache[name].blind) < len(data.blind):
            todo[name] = data
    if not todo:
        return
    encode = load_encoder(source.folder, source.is_native, max_length, source.vocab_size)
    splits = chain.from_iterable(data.splits for data in todo.values())
    with Progress("encode", sum(map(len, splits)), "examples") as bar:
        for name, data in todo.items():
            bar.note(name)
            cache[name] = encode_task(data, encode, bar.advance)
    refuse_changed(source.folder, source.settings)


def encode_task(
    data: TaskData, encode: Encoder, on_examples: Callable[[int], None] = lambda count: None
) -> EncodedTask:
    """Return all splits of a task as ids. `on_examples` is called with the size of every batch that is encoded."""

    def encoded(split: Split) -> Encoded:
        ids, types, lengths = [], [], []
        # in batches, so that the objects of the tokenizer do not accumulate
        for first in range(0, len(split), BATCH):
            columns = tuple(column[first : first + BATCH] for column in split.texts)
            batch_ids, batch_types = encode(columns)
            lengths += [len(sequence) for sequence in batch_ids]
            ids.append(np.fromiter(chain.from_iterable(batch_ids), np.int32))
            types.append(np.fromiter(chain.from_iterable(batch_types), np.uint8))
            on_examples(len(batch_ids))
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Encoded(np.concatenate(ids), np.concatenate(types), starts, split.labels)

    return EncodedTask(
        train=encoded(data.train),
        scored={split.source.entry: encoded(split) for split in data.scored},
        blind={split.source.entry: encoded(split) for split in data.blind},
    )


def encode_words(
    data: TaskData, encode: WordEncoder, on_examples: Callable[[int], None] = lambda count: None
) -> EncodedTask:
    """Return all splits of a task that labels the words between single spaces of its texts.

    A word whose first token is beyond the maximum length has no token.
    """
    train = _encode_words(data.train, encode, on_examples)
    scored = {
        split.source.entry: _encode_words(split, encode, on_examples) for split in data.scored
    }
    return EncodedTask(train, scored, {})


def _encode_words(split: Split, encode: WordEncoder, on_examples: Callable[[int], None]) -> Encoded:
    ids: list[np.ndarray] = []
    words: list[np.ndarray] = []
    first_word = 0
    for first in range(0, len(split), BATCH):
        texts = split.texts[0][first : first + BATCH]
        for text, ids_L, offsets_L in zip(texts, *encode(texts), strict=True):
            ids.append(np.array(ids_L, np.int32))
            numbers_L = number_first_tokens(text, offsets_L)
            words.append(np.where(numbers_L < 0, -1, numbers_L + first_word))
            first_word += text.count(" ") + 1
        on_examples(len(texts))
    starts = np.concatenate([[0], np.cumsum([len(sequence) for sequence in ids])]).astype(np.int64)
    ids_T = np.concatenate(ids)
    return Encoded(
        ids_T, np.zeros(len(ids_T), np.uint8), starts, split.labels, np.concatenate(words)
    )


def number_first_tokens(text: str, offsets_L: Sequence[Offsets]) -> np.ndarray:
    """Return the number of the word for the first token of each word, and -1 for other and special tokens.

    A token belongs to the word of its last character: with byte-level tokenizers it starts at the space before.
    """
    spaces = np.array([index for index, character in enumerate(text) if character == " "])
    numbers_L = np.full(len(offsets_L), -1, np.int64)
    last = -1
    for token, (start, end) in enumerate(offsets_L):
        if start == end or text[end - 1] == " ":
            continue
        word = int(np.searchsorted(spaces, end - 1))
        if word > last:
            numbers_L[token] = word
            last = word
    return numbers_L


def load_encoder(folder: Path, bert_layout: bool, max_length: int, vocab_size: int) -> Encoder:
    """Return the text-to-ids function of a model folder.

    Raises UserError if its tokenizer is missing or does not fit.
    """
    if not (bert_layout and (folder / "tokenizer.json").is_file()):
        return _stock_encoder(folder, max_length, vocab_size)
    tokenizer = _bert_tokenizer(folder, max_length, vocab_size)

    def encode(columns: Columns) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
        inputs = list(zip(*columns)) if len(columns) == 2 else columns[0]
        encodings = tokenizer.encode_batch_fast(inputs)  # without offsets into the text
        ids = [encoding.ids for encoding in encodings]
        types = [encoding.type_ids for encoding in encodings]
        return ids, types

    return encode


def load_word_encoder(
    folder: Path, bert_layout: bool, max_length: int, vocab_size: int
) -> WordEncoder:
    """Return the function from texts to the ids and the offsets into the text of their tokens.

    Raises UserError if the folder's tokenizer is missing, does not fit or has no offsets.
    """
    if bert_layout and (folder / "tokenizer.json").is_file():
        tokenizer = _bert_tokenizer(folder, max_length, vocab_size)

        def encode(texts: list[str]) -> tuple[list[Sequence[int]], list[Sequence[Offsets]]]:
            encodings = tokenizer.encode_batch(texts)
            ids = [encoding.ids for encoding in encodings]
            return ids, [encoding.offsets for encoding in encodings]

        return encode
    stock = _stock_tokenizer(folder)
    _check_size(folder, stock.get_vocab(), vocab_size)
    require(
        stock.is_fast,
        f"{folder}: its tokenizer has no offsets of tokens. Words need a tokenizer.json.",
    )

    def encode_stock(texts: list[str]) -> tuple[list[Sequence[int]], list[Sequence[Offsets]]]:
        encodings = stock(
            texts,
            truncation=True,
            max_length=max_length,
            padding=False,
            return_offsets_mapping=True,
        )
        return encodings["input_ids"], encodings["offset_mapping"]

    return encode_stock


def _bert_tokenizer(folder: Path, max_length: int, vocab_size: int) -> Any:
    from tokenizers.processors import TemplateProcessing

    tokenizer = _fast_tokenizer(folder)
    _check_size(folder, tokenizer.get_vocab(with_added_tokens=True), vocab_size)
    cls, sep = (_special(folder, tokenizer, role) for role in ("cls_token", "sep_token"))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{cls[0]} $A {sep[0]}",
        pair=f"{cls[0]} $A {sep[0]} $B:1 {sep[0]}:1",
        special_tokens=[cls, sep],
    )
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    return tokenizer


def _stock_encoder(folder: Path, max_length: int, vocab_size: int) -> Encoder:
    tokenizer = _stock_tokenizer(folder)
    _check_size(folder, tokenizer.get_vocab(), vocab_size)

    def encode(columns: Columns) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
        encodings = tokenizer(
            *columns,
            truncation="longest_first",
            max_length=max_length,
            padding=False,
            return_token_type_ids=True,
        )
        return encodings["input_ids"], encodings["token_type_ids"]

    return encode


def _fast_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
    except Exception as error:  # the library raises this bare type
        raise UserError(f"{folder / 'tokenizer.json'}: not a usable tokenizer ({error})") from None


def _stock_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder}: no usable tokenizer ({' '.join(str(error).split())[:150]})"
        ) from None
    # Without a vocabulary file transformers 5 makes a tokenizer of special tokens alone.
    has_words = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    require(
        has_words, f"{folder}: no tokenizer. Save the model's there with tokenizer.save_pretrained."
    )
    return tokenizer


def special_token(folder: Path, role: str) -> str | None:
    """Return the special token that tokenizer_config.json names for a role ("mask_token"), or None.

    Raises UserError for a damaged file.
    """
    config = folder / "tokenizer_config.json"
    try:
        if not config.is_file():
            return None
        token = json.loads(config.read_text(encoding="utf-8")).get(role)
    except (ValueError, AttributeError) as error:
        raise UserError(f"{config}: not a JSON object ({error})") from None
    if isinstance(token, dict):  # transformers writes added tokens so
        token = token["content"]
    return token or None


def _special(folder: Path, tokenizer: Any, role: str) -> tuple[str, int]:
    """Return the special token of a role and its id; the default is BERT's token of that role."""
    text = special_token(folder, role) or f"[{role.removesuffix('_token').upper()}]"
    number = tokenizer.token_to_id(text)
    if number is None:
        raise UserError(
            f"{folder / 'tokenizer.json'}: no token {text!r} ({role}), so the tokenizer does not fit the model."
        )
    return text, number


def _check_size(folder: Path, vocabulary: dict[str, int], vocab_size: int) -> None:
    entries = 1 + max(vocabulary.values(), default=-1)
    fit = f"{folder}: its tokenizer has {entries} entries, its model's embedding {vocab_size}: they do not fit"
    require(entries <= vocab_size, fit)


def mask_and_frame(folder: Path, bert_layout: bool) -> tuple[int, set[int]]:
    """Return the id of the mask token, and the ids of the tokens that frame texts ([CLS], [SEP]).

    Raises UserError without a mask token.
    """
    if bert_layout and (folder / "tokenizer.json").is_file():
        tokenizer = _fast_tokenizer(folder)
        roles = ("mask_token", "cls_token", "sep_token")
        mask, cls, sep = (_special(folder, tokenizer, role)[1] for role in roles)
        return mask, {cls, sep}
    tokenizer = _stock_tokenizer(folder)
    lacks = f"{folder}: its tokenizer has no mask token; eval.minimal_pairs needs a masked language model"
    require(tokenizer.mask_token_id is not None, lacks)
    return int(tokenizer.mask_token_id), set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
