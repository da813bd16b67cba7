"""Loading and describing the tokenizer: always one `tokenizer.json` with BERT's template.

Whatever its origin, it has five special tokens, the templates `[CLS] a [SEP]` and `[CLS] a [SEP] b [SEP]`, and neither
truncation nor padding, so that pretraining, fine-tuning and stock `transformers` all read text the same way, but for
text that spells a special token: pretraining reads `[MASK]` as text (data_prep/tokenizer/encode.py), the others do not.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from cramming.config import Count, Positive, Section, UserError, file_sha256
from cramming.data.manifest import TokenizerInfo
from cramming.tokenizer_config import tokenizer_config

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
# Spellings accepted in an existing tokenizer, those of BERT first; others are RoBERTa's, XLNet's and ESM's.
SPELLINGS = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "<eos>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}

TOKENIZER_CONFIG = "tokenizer_config.json"  # beside tokenizer.json, for transformers


class TokenizerConfig(Section):
    """Section `tokenizer`. With `path` nothing is trained and the other fields do not matter."""

    kind: Literal["wordpiece", "bpe", "unigram"] = "wordpiece"
    # An upper limit, or as many entries as the text has occurrences for.
    vocab_size: Annotated[int, Field(ge=6, le=1 << 20)] | Literal["auto"] = "auto"
    lowercase: bool = True
    strip_accents: bool | None = None  # of WordPiece; None: as lowercase
    min_frequency: Count = 2  # of a new entry; Unigram has a rule of its own
    sample_mb: Positive = 100.0  # trained on an even random sample of the text, at most this large
    path: str | None = None  # an existing tokenizer.json

    @model_validator(mode="after")
    def _strips_by_bert(self) -> Self:
        if self.strip_accents and self.kind != "wordpiece":
            raise ValueError(
                f"strip_accents=true: kind={self.kind} keeps accents. Set it to null, or use tokenizer=wordpiece."
            )
        return self


def load(path: Path) -> Tokenizer:
    """Return an existing `tokenizer.json`, without its truncation and padding, with our template.

    UserError: no such file, not a `tokenizers` file, or one without the five special tokens.
    """
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        what = f"{path}: {error.strerror}; give a tokenizer.json as `tokenizers` writes it"
        raise UserError(f"tokenizer.path: {what}") from None
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"tokenizer.path: {path} is not a tokenizer.json: {str(error).splitlines()[0]}"
        ) from None
    special = special_tokens(tokenizer, path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    add_template(tokenizer, special)
    return tokenizer


def special_tokens(tokenizer: Tokenizer, place: object = "tokenizer") -> dict[str, str]:
    """Return the spelling of pad, unk, cls, sep and mask in this tokenizer; UserError if it lacks one.

    Added tokens come before mere entries: MPNet's vocabulary still holds those of the BERT that it was made from.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    special, missing = dict[str, str](), list[str]()
    for role, spellings in SPELLINGS.items():
        present = [spelling for spelling in spellings if spelling in vocabulary]
        if present:
            special[role] = next((token for token in present if token in added), present[0])
        else:
            missing.append(f"{role} ({' or '.join(spellings)})")
    if not missing:
        return special
    has = sorted({*special.values(), *added[:10]})
    raise UserError(
        f"tokenizer.path={place}: no special token for {', '.join(missing)}, which a masked model needs; the file has"
        f" {' '.join(has) or 'none'}. Add them to the file, or train a tokenizer (tokenizer.path=null)."
    )


def add_template(tokenizer: Tokenizer, special: dict[str, str]) -> None:
    """Set BERT's layout, `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`, with these spellings.

    Tokenizers with `<s>` have two of [SEP] between the texts, and one token type (RoBERTa, XLM-R).
    """
    cls, sep = special["cls"], special["sep"]
    pair = f"{cls} $A {sep} $B:1 {sep}:1"
    if cls == "<s>":
        pair = f"{cls} $A {sep} {sep} $B {sep}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=pair,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (cls, sep)],
    )


def stripped_characters(tokenizer: Tokenizer, counts: Mapping[str, int]) -> dict[str, int]:
    """Return how many of these characters lose accents, voicing marks or vowel signs in the normaliser, by script.

    `counts` says how often each character occurs. A change of case does not count.
    """
    stripped = Counter[str]()
    for character, count in counts.items():
        if _has_mark(character) and not _has_mark(tokenizer.normalizer.normalize_str(character)):
            script = unicodedata.name(character, "other").split()[0].capitalize()
            stripped[script] += count
    return dict(sorted(stripped.items()))


def strips_accents(tokenizer: Tokenizer) -> bool:
    """Return whether the normaliser makes é an e."""
    normalizer = tokenizer.normalizer
    return normalizer is not None and normalizer.normalize_str("é") == "e"


@cache
def _has_mark(text: str) -> bool:
    decomposed = unicodedata.normalize("NFD", text)
    return any(unicodedata.category(character) == "Mn" for character in decomposed)


def characters_by_entry(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return how many characters of text, white space aside, each entry stands for, int64 [vocabulary].

    A special token stands for none. None for other kinds than WordPiece and byte-level BPE: Unigram's NFKC alters how
    many characters there are.
    """
    if (count := _characters(tokenizer)) is None:
        return None
    vocab, special = (
        tokenizer.get_vocab(with_added_tokens=True),
        set(special_tokens(tokenizer).values()),
    )
    characters_V = np.zeros(1 + max(vocab.values()), dtype=np.int64)
    for entry, number in vocab.items():
        characters_V[number] = 0 if entry in special else count(entry)
    return characters_V


def _characters(tokenizer: Tokenizer) -> Callable[[str], int] | None:
    """Return how many characters of text an entry of this tokenizer stands for, if its kind tells."""
    if isinstance(tokenizer.model, models.WordPiece):
        prefix = tokenizer.model.continuing_subword_prefix
        # BERT's normaliser takes syllables of Hangul apart.
        return lambda entry: len(unicodedata.normalize("NFC", entry.removeprefix(prefix)))
    if isinstance(tokenizer.model, models.BPE) and isinstance(
        tokenizer.decoder, decoders.ByteLevel
    ):
        in_bytes = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        ).pre_tokenize_str
        # A character is counted by its first byte, so not by later ones, 0x80 to 0xBF.
        others = {
            in_bytes(character)[0][0][-1] for character in (" ", "\n", *map(chr, range(0x80, 0xC0)))
        }
        return lambda entry: sum(sign not in others for sign in entry)
    return None


def describe_for_transformers(info: TokenizerInfo, path: Path) -> str:
    """Return the text of `TOKENIZER_CONFIG` for the tokenizer that was saved at `path`."""
    special = {f"{role}_token": token for role, token in info.special.items()}
    return json.dumps(tokenizer_config(path, special), indent=1) + "\n"


def describe(tokenizer: Tokenizer, path: Path) -> TokenizerInfo:
    """Return the manifest's description of the tokenizer that was saved at `path`."""
    vocab, special = tokenizer.get_vocab(with_added_tokens=True), special_tokens(tokenizer)
    return TokenizerInfo(
        kind=type(tokenizer.model).__name__.lower(),
        vocab_size=1 + max(vocab.values()),
        lowercase=tokenizer.normalizer is not None
        and tokenizer.normalizer.normalize_str("A") == "a",
        sha256=file_sha256(path),
        special=special,
        special_ids={name: vocab[token] for name, token in special.items()},
    )
