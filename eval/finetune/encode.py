"""Texts to token ids, once per task: every seed and epoch reads the same arrays.

Folders of this suite and stock BERT and ModernBERT folders get BERT's layout, `[CLS] a [SEP]` or `[CLS] a [SEP] b
[SEP]`, with the special tokens that their tokenizer names; any other folder gets what its own tokenizer does (RoBERTa's
`<s> a </s></s> b </s>`), and the token types of its template. Too long sequences lose tokens from the longer of the two
texts.
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
Stretch = tuple[int, int]
WordEncoder = Callable[[list[str]], tuple[list[Sequence[int]], list[Sequence[Stretch]]]]


@dataclass(frozen=True)
class Encoded:
    """N examples without padding: ids int32 [T], types uint8 [T], starts int64 [N + 1], labels [N] or none.

    Where words are labelled, `words_T` (int64) has the number of the word whose first token this is, -1 for others, and
    there is a label for each word of the split.
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
    """A task's splits as token ids, under the entries' names."""

    train: Encoded
    scored: dict[str, Encoded]
    blind: dict[str, Encoded]


def encode_tasks(
    tasks: Sequence[TaskData], source: ModelSource, max_length: int, cache: dict[str, EncodedTask]
) -> None:
    """Put the tasks into `cache`, by name, as the model's tokenizer encodes them, where they are not in it yet with all
    their test sets."""
    every = {d.task.name: d for d in tasks}
    data = [
        d for name, d in every.items() if name not in cache or len(cache[name].blind) < len(d.blind)
    ]
    if not data:
        return
    encode = load_encoder(source.folder, source.own, max_length, source.vocab_size)
    with Progress("encode", sum(len(split) for d in data for split in d.splits), "examples") as bar:
        for task_data in data:
            bar.note(task_data.task.name)
            cache[task_data.task.name] = encode_task(task_data, encode, bar.advance)
    refuse_changed(source.folder, source.settings)


def encode_task(
    data: TaskData, encode: Encoder, on_examples: Callable[[int], None] = lambda count: None
) -> EncodedTask:
    """All splits of a task as ids. `on_examples` hears of every batch of examples that is done."""

    def encoded(split: Split) -> Encoded:
        ids, types, lengths = [], [], []
        for first in range(
            0, len(split), BATCH
        ):  # so that the tokenizer's own objects never pile up
            batch_ids, batch_types = encode(
                tuple(column[first : first + BATCH] for column in split.texts)
            )
            lengths += [len(sequence) for sequence in batch_ids]
            ids.append(np.fromiter(chain.from_iterable(batch_ids), np.int32))
            types.append(np.fromiter(chain.from_iterable(batch_types), np.uint8))
            on_examples(len(batch_ids))
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Encoded(np.concatenate(ids), np.concatenate(types), starts, split.labels)

    scored, blind = (
        {s.source.entry: encoded(s) for s in splits} for splits in (data.scored, data.blind)
    )
    return EncodedTask(encoded(data.train), scored, blind)


def encode_words(
    data: TaskData, encode: WordEncoder, on_examples: Callable[[int], None] = lambda count: None
) -> EncodedTask:
    """Return all splits of a task that labels words, which are those between single spaces of its texts.

    A word whose first token does not fit into the length has none.
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
        for text, ids_L, stretches in zip(texts, *encode(texts), strict=True):
            ids.append(np.array(ids_L, np.int32))
            numbers_L = first_tokens(text, stretches)
            words.append(np.where(numbers_L < 0, -1, numbers_L + first_word))
            first_word += text.count(" ") + 1
        on_examples(len(texts))
    starts = np.concatenate([[0], np.cumsum([len(each) for each in ids])]).astype(np.int64)
    ids_T = np.concatenate(ids)
    return Encoded(
        ids_T, np.zeros(len(ids_T), np.uint8), starts, split.labels, np.concatenate(words)
    )


def first_tokens(text: str, stretches: Sequence[Stretch]) -> np.ndarray:
    """Return for each token the number of the word that it is the first of, -1 for the others and for special tokens.

    A token is of the word that its last character is in: with byte-level tokenizers it begins at the space before.
    """
    spaces = np.array([place for place, sign in enumerate(text) if sign == " "])
    numbers_L = np.full(len(stretches), -1, np.int64)
    last = -1
    for token, (start, end) in enumerate(stretches):
        if start == end or text[end - 1] == " ":
            continue
        word = int(np.searchsorted(spaces, end - 1))
        if word > last:
            numbers_L[token] = word
            last = word
    return numbers_L


def load_encoder(folder: Path, bert_layout: bool, max_length: int, vocab_size: int) -> Encoder:
    """The text-to-ids function of a model folder; UserError where its tokenizer is missing or does not fit."""
    if not (bert_layout and (folder / "tokenizer.json").is_file()):
        return _stock_encoder(folder, max_length, vocab_size)
    tokenizer = _bert_tokenizer(folder, max_length, vocab_size)

    def encode(columns: Columns) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
        inputs = list(zip(*columns)) if len(columns) == 2 else columns[0]
        found = tokenizer.encode_batch_fast(inputs)  # without offsets into the text
        return [e.ids for e in found], [e.type_ids for e in found]

    return encode


def load_word_encoder(
    folder: Path, bert_layout: bool, max_length: int, vocab_size: int
) -> WordEncoder:
    """Return the function from texts to ids and to the stretch of text, [first, last + 1), of each token.

    UserError where the folder's tokenizer is missing, does not fit or cannot tell the stretches.
    """
    if bert_layout and (folder / "tokenizer.json").is_file():
        tokenizer = _bert_tokenizer(folder, max_length, vocab_size)

        def encode(texts: list[str]) -> tuple[list[Sequence[int]], list[Sequence[Stretch]]]:
            encodings = tokenizer.encode_batch(texts)
            return [each.ids for each in encodings], [each.offsets for each in encodings]

        return encode
    stock = _stock_tokenizer(folder)
    _check_size(folder, stock.get_vocab(), vocab_size)
    require(
        stock.is_fast,
        f"{folder}: its tokenizer does not tell which word a token is of. Labelling words needs a tokenizer.json.",
    )

    def encode_stock(texts: list[str]) -> tuple[list[Sequence[int]], list[Sequence[Stretch]]]:
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
        found = tokenizer(
            *columns,
            truncation="longest_first",
            max_length=max_length,
            padding=False,
            return_token_type_ids=True,
        )
        return found["input_ids"], found["token_type_ids"]

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
    # Without any file of a vocabulary transformers 5 makes one of special tokens alone.
    has_words = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    require(
        has_words, f"{folder}: no tokenizer; save the model's own there (tokenizer.save_pretrained)"
    )
    return tokenizer


def special_token(folder: Path, role: str) -> str | None:
    """The special token that tokenizer_config.json names for a role ("mask_token"), or None; UserError for damage."""
    config = folder / "tokenizer_config.json"
    try:
        named = (
            json.loads(config.read_text(encoding="utf-8")).get(role) if config.is_file() else None
        )
        return (
            named["content"] if isinstance(named, dict) else named
        ) or None  # as transformers writes added tokens
    except (ValueError, AttributeError) as error:
        raise UserError(f"{config}: not a JSON object ({error})") from None


def _special(folder: Path, tokenizer: Any, role: str) -> tuple[str, int]:
    """The special token of a role and its id; BERT's name for it where the folder does not say."""
    text = special_token(folder, role) or f"[{role.removesuffix('_token').upper()}]"
    number = tokenizer.token_to_id(text)
    if number is None:
        raise UserError(
            f"{folder / 'tokenizer.json'}: no token {text!r} ({role}); it does not fit the model"
        )
    return text, number


def _check_size(folder: Path, vocabulary: dict[str, int], vocab_size: int) -> None:
    entries = 1 + max(vocabulary.values(), default=-1)
    fit = f"{folder}: its tokenizer has {entries} entries, its model's embedding {vocab_size}: they do not fit"
    require(entries <= vocab_size, fit)


def mask_and_frame(folder: Path, bert_layout: bool) -> tuple[int, set[int]]:
    """The ids of the mask token and of the tokens that frame texts ([CLS], [SEP]); UserError without a mask token."""
    if bert_layout and (folder / "tokenizer.json").is_file():
        tokenizer = _fast_tokenizer(folder)
        mask, *frame = (
            _special(folder, tokenizer, role)[1]
            for role in ("mask_token", "cls_token", "sep_token")
        )
        return mask, set(frame)
    tokenizer = _stock_tokenizer(folder)
    lacks = f"{folder}: its tokenizer has no mask token; eval.minimal_pairs needs a masked language model"
    require(tokenizer.mask_token_id is not None, lacks)
    return int(tokenizer.mask_token_id), set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
