"""Frequent words of the text as entries of their own: a checkpoint with a longer vocabulary (`--add-words`).

Words are counted in the training split of the corpus that the checkpoint's own tokenizer has made. Those that would
save most tokens are added, and their rows are the means of their pieces' rows. WordPiece, BPE and Unigram have other
rules about which entries a text is split into, so each has its own way to add a word (`EXTENSIONS`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import Tensor

from cramming.config import file_sha256, require, settings_hash
from cramming.data.corpus import Corpus
from cramming.data.manifest import TOKENIZER
from cramming.files import overwrite_atomically
from cramming.model.load import WEIGHT_FILES, read_weights, weight_file
from cramming.progress import say
from eval.adapt.words import CONTINUES, is_word, word_beginnings
from eval.report.format import short_name

COUNTED_TOKENS = 20_000_000
MOST_PIECES = 16
FEWEST_OCCURRENCES = 20  # rows of rarer words would hardly be trained
CONFIG = "config.json"


class Word(NamedTuple):
    """Word of the text, the entries that it is split into, and its occurrences."""

    text: str
    pieces: tuple[int, ...]
    occurrences: int


class Entry(NamedTuple):
    """New entry, and the entries from whose rows its row is the mean."""

    token: str
    number: int
    pieces: tuple[int, ...]


def refuse_tokenizer(source: Path, count: int) -> None:
    """Raise UserError if words cannot be added to a checkpoint's tokenizer."""
    definition = _definition(source)
    kind = definition["model"]["type"]
    require(
        kind in EXTENSIONS,
        f"--add-words={count}: the checkpoint's tokenizer is {kind}, and words can be added to"
        f" {', '.join(EXTENSIONS)}. Leave it out.",
    )
    EXTENSIONS[kind](definition, [])


def extended_checkpoint(source: Path, corpus: Corpus, count: int, place: Path) -> tuple[Path, int]:
    """Return the folder of a checkpoint with up to `count` more words, written if it is not there, and their number.

    `corpus` is made by the checkpoint's tokenizer; `place` is the folder of corpora.
    """
    tokenizer = Tokenizer.from_file(str(source / TOKENIZER))
    made_from = settings_hash(corpus.manifest_sha256, file_sha256(weight_file(source)), count)
    name = short_name(source).replace("/", "--")
    folder = (place / f"{name}-{count}-words-{made_from}").absolute()
    words = split_words(corpus, tokenizer)[:count]
    require(
        bool(words),
        f"--add-words={count}: no word of the text is split and occurs {FEWEST_OCCURRENCES} times."
        " Leave it out.",
    )
    saved = sum(word.occurrences * (len(word.pieces) - 1) for word in words)
    shown = ", ".join(word.text for word in words[:5])
    share = saved / min(COUNTED_TOKENS, corpus.stream("train").num_tokens)
    say(f"{len(words)} words get an entry of their own ({shown}, ...): {share:.1%} fewer tokens")
    if not folder.is_dir():
        overwrite_atomically(folder, lambda path: _write(path, source, words))
    return folder, len(words)


def _definition(source: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's tokenizer.json, with the kind of its model."""
    definition: dict[str, Any] = json.loads(Tokenizer.from_file(str(source / TOKENIZER)).to_str())
    return definition


def split_words(corpus: Corpus, tokenizer: Tokenizer) -> list[Word]:
    """Return the words of several entries in the training text, those first that would save most tokens."""
    stream = corpus.stream("train")
    ids_T = stream.gather(np.array([0]), min(COUNTED_TOKENS, stream.num_tokens))[0]
    begins_V = word_beginnings(tokenizer, corpus.vocab_size)
    begins_V[list(corpus.special_ids)] = True
    starts_W = np.flatnonzero(begins_V[ids_T])
    lengths_W = np.diff(starts_W)
    words = list[Word]()
    for length in range(2, MOST_PIECES + 1):
        places_N = starts_W[:-1][lengths_W == length]
        ids_NL = ids_T[places_N[:, None] + np.arange(length)]
        pieces_UL, counts_U = np.unique(ids_NL, axis=0, return_counts=True)
        is_frequent_U = counts_U >= FEWEST_OCCURRENCES
        for pieces_L, count in zip(pieces_UL[is_frequent_U], counts_U[is_frequent_U]):
            pieces = tuple(pieces_L.tolist())
            text = str(tokenizer.decode(list(pieces), skip_special_tokens=False)).strip()
            if is_word(text):
                words.append(Word(text, pieces, int(count)))
    return sorted(words, key=lambda word: (-word.occurrences * (len(word.pieces) - 1), word.pieces))


def _write(folder: Path, source: Path, words: Sequence[Word]) -> None:
    """Write the files of the longer checkpoint."""
    folder.mkdir()
    definition = _definition(source)
    entries = EXTENSIONS[definition["model"]["type"]](definition, words)
    (folder / TOKENIZER).write_text(json.dumps(definition, ensure_ascii=False), encoding="utf-8")
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    size_before = config["vocab_size"]
    config["vocab_size"] = max(size_before, 1 + max(entry.number for entry in entries))
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    weights = {
        name: _longer(tensor, size_before, config["vocab_size"], entries)
        for name, tensor in read_weights(weight_file(source)).items()
    }
    (folder / WEIGHT_FILES[0]).write_bytes(safetensors.torch.save(weights, {"format": "pt"}))


def _longer(tensor: Tensor, before: int, after: int, entries: Sequence[Entry]) -> Tensor:
    """Return a tensor of the vocabulary with the rows of the new entries; others as they are."""
    if tensor.dim() == 0 or tensor.shape[0] != before:
        return tensor.contiguous()
    longer = torch.zeros(after, *tensor.shape[1:], dtype=tensor.dtype)
    longer[:before] = tensor
    for entry in entries:
        longer[entry.number] = tensor[list(entry.pieces)].float().mean(0).to(tensor.dtype)
    return longer


Extension = Callable[[dict[str, Any], Sequence[Word]], list[Entry]]


def _extend_wordpiece(definition: dict[str, Any], words: Sequence[Word]) -> list[Entry]:
    """Add whole words, which WordPiece prefers because they are the longest."""
    vocabulary = definition["model"]["vocab"]
    tokens = _tokens_by_number(vocabulary)
    number = _fix_added_tokens(definition, vocabulary)
    entries = list[Entry]()
    for word in words:
        parts = [tokens[piece].removeprefix(CONTINUES) for piece in word.pieces]
        entries.append(Entry("".join(parts), number + len(entries), word.pieces))
    vocabulary.update({entry.token: entry.number for entry in entries})
    return entries


def _extend_bpe(definition: dict[str, Any], words: Sequence[Word]) -> list[Entry]:
    """Add merges behind all others, which join the pieces of a word from the left; each makes an entry.

    An entry of the vocabulary may have been made by a merge of other pieces, which does not join these.
    """
    vocabulary, merges = definition["model"]["vocab"], definition["model"]["merges"]
    tokens = _tokens_by_number(vocabulary)
    number = _fix_added_tokens(definition, vocabulary)
    in_pairs = bool(merges) and isinstance(merges[0], list)
    pairs = merges if in_pairs else [merge.split(" ") for merge in merges]
    known = set(map(tuple, pairs))
    entries = list[Entry]()
    for word in words:
        left = tokens[word.pieces[0]]
        for length in range(2, len(word.pieces) + 1):
            right = tokens[word.pieces[length - 1]]
            if (left, right) not in known:
                known.add((left, right))
                merges.append([left, right] if in_pairs else f"{left} {right}")
            if left + right not in vocabulary:
                entry = Entry(left + right, number + len(entries), word.pieces[:length])
                vocabulary[entry.token] = entry.number
                entries.append(entry)
            left += right
    return entries


def _extend_unigram(definition: dict[str, Any], words: Sequence[Word]) -> list[Entry]:
    """Add words that are a little likelier than their pieces, and than a shorter new word before the rest of them."""
    vocabulary = definition["model"]["vocab"]
    numbers = [token["id"] for token in definition["added_tokens"]]
    beyond = [number for number in numbers if number >= len(vocabulary)]
    require(
        not beyond,
        f"--add-words: the checkpoint's tokenizer has special entries behind its vocabulary {beyond}. Leave it out.",
    )
    entries = list[Entry]()
    for word in words:
        token = "".join(vocabulary[piece][0] for piece in word.pieces)
        score = sum(vocabulary[piece][1] for piece in word.pieces)
        entries.append(Entry(token, len(vocabulary), word.pieces))
        vocabulary.append([token, score + 0.01 * len(token)])
    return entries


EXTENSIONS: dict[str, Extension] = {
    "WordPiece": _extend_wordpiece,
    "BPE": _extend_bpe,
    "Unigram": _extend_unigram,
}


def _tokens_by_number(vocabulary: Mapping[str, int]) -> dict[int, str]:
    return {number: token for token, number in vocabulary.items()}


def _fix_added_tokens(definition: dict[str, Any], vocabulary: dict[str, int]) -> int:
    """Write special entries into the vocabulary, and return the first number behind all.

    `tokenizers` numbers those that are not in it by its size, which is about to change.
    """
    for token in definition["added_tokens"]:
        vocabulary.setdefault(token["content"], token["id"])
    return 1 + max(vocabulary.values())
