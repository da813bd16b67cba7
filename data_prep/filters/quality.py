"""Quality filters: which documents are no text to learn from. Each removes whole documents, counted by its name.

To add one: a function `(text, limit) -> Violation | None` here (its name is what is counted, its `Violation` explains
the removal in the corpus card), its setting in `FilterConfig`, and that setting's line in conf/data/filters/none.yaml.
Filters on lines judge by the share of the lines, in texts of `LEAST_LINES` or more: of fewer, it is all or nothing.

Sources: C4 (Raffel et al. 2020, section 2.2), Gopher (Rae et al. 2021, section A.1.1 and table A1), Cramming (Geiping
and Goldstein 2022, section 4.4). Not taken over: C4's list of bad words, and its removal of single lines.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple, get_origin, get_type_hints

import numpy as np

from cramming.config import UserError
from data_prep.excerpt import Span
from data_prep.filters.normalise import CleanConfig
from data_prep.filters.repetition import (
    DUPLICATE_NGRAMS,
    TOP_NGRAMS,
    duplicate_line_characters,
    duplicate_lines,
    duplicate_ngrams,
    top_ngrams,
)
from data_prep.filters.text import SPACES, Text, Violation, above, below

LONG_WORD_BYTES = 100
LANGUAGE_CHARACTERS = 1000  # judged by the language model; from the middle: titles and names stand at the beginning
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
BOILERPLATE = ("javascript", "terms of use", "privacy policy", "cookie policy", "use cookies", "uses cookies")
BULLETS = ("•", "‣", "▪", "●", "○", "■", "·", "*", "- ", "– ")
_BOILERPLATE_BYTES = [phrase.encode() for phrase in BOILERPLATE]
_BOILERPLATE = re.compile("|".join(BOILERPLATE), re.IGNORECASE)
_HASH, _ELLIPSIS, _BRACE = re.compile("#"), re.compile(r"\.\.\.|…"), re.compile("[{}]")
_LOREM_IPSUM = re.compile("lorem ipsum", re.IGNORECASE)
_LETTER = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"[^ \n\t\r\v\f]+")
_WORD_WITHOUT_LETTER = re.compile(r"(?<!\S)[!-@\[-`{-~]+(?!\S)")
_IS_LETTER = bytes(byte >= 0x80 or chr(byte).isalpha() for byte in range(256))
# Only from the first sign of a run: tried from each, a run of n that no space follows would take n * n steps.
_SENTENCE_END = re.compile(r"[.!?…。！？](?<![.!?…。！？].)[.!?…。！？]*[\"'”’)\]]*(?:\s|$)")
_SYMBOL = re.compile(r"[!-/:-@\[-`{-~\u0080-\u00bf\u2000-\u2fff]")
_CONTROLS = bytes(byte for byte in range(0x20) if byte not in SPACES) + b"\x7f"
# "Â" or "Ã" behind a capital may end a word; otherwise a non-breaking space, or its like, stood behind it.
_BROKEN_BEYOND_ASCII = re.compile(
    "[\ufffd\ue000-\uf8ff]|[ÂÃ][\u0080-\u00bf]|â€|[\u0080-\u0084\u0086-\u009f]|(?<![A-ZÀ-Þ])[ÂÃ](?=[ \n]|$)"
)
_BROKEN = re.compile(f"{_BROKEN_BEYOND_ASCII.pattern}|[{re.escape(_CONTROLS.decode())}]")
_BROKEN_SIGNS = (b"\xef", b"\xee", b"\xc3\x83", b"\xc3\x82", b"\xc3\xa2\xe2")  # what it begins with, in UTF-8
_LATIN_CONTROLS = re.compile(rb"\xc2[\x80-\x84\x86-\x9f]")  # the same; their first byte alone is frequent
_MARKUP = re.compile(r"</?[A-Za-z!][^<>\n]{0,300}>|&(?:[A-Za-z]{2,8}|#\d{1,6});|\{[{|]|[|}]\}|\[\[|\]\]|'''?|={2,}")
_MARKUP_SIGNS = ("<", "&", "{{", "{|", "[[", "''", "==")
_LONGEST_MARKUP = {"<": 304, "&": 10, "=": 1, "'": 1} | dict.fromkeys(("{{", "{|", "|}", "}}", "[[", "]]"), 2)


def _all_bytes_but(members: Iterable[int]) -> bytes:
    return bytes(sorted(set(range(256)).difference(members)))


_NOT_SYMBOLS = _all_bytes_but([byte for byte in range(0x80) if _SYMBOL.match(chr(byte))] + [0xC2, 0xE2])  # lead bytes
_NOT_CONTROLS, _BEYOND_ASCII = _all_bytes_but(_CONTROLS), bytes(range(0x80, 0x100))


def too_short(text: Text, limit: int) -> Violation | None:
    """Always on, with `data.clean.min_characters`."""
    return below(len(text), limit)


def no_letters(text: Text, limit: int) -> Violation | None:
    """Always on."""
    return None if _LETTER.search(text.text) else Violation(0, limit)


def too_few_words(text: Text, limit: int) -> Violation | None:
    """Gopher: at least 50 words."""
    return below(text.words, limit)


def broken_characters(text: Text, limit: float) -> Violation | None:
    """Ours: share of replacement, private-use and control characters and of UTF-8 that was read as Latin-1."""
    broken = len(text.utf8.translate(None, _NOT_CONTROLS))
    if any(sign in text.utf8 for sign in _BROKEN_SIGNS) or _LATIN_CONTROLS.search(text.utf8):
        broken += sum(len(found) for found in _BROKEN_BEYOND_ASCII.findall(text.text))
    return above(broken / max(1, len(text)), limit, _BROKEN)


def unbroken_runs(text: Text, limit: float) -> Violation | None:
    """Ours: share of the bytes in words of over 100 bytes; encoded data and minified code, even beside prose.

    Scripts that do not space their words are not judged.
    """
    starts_W, ends_W = text.word_bounds
    lengths_W = ends_W - starts_W
    long = int(lengths_W[lengths_W > LONG_WORD_BYTES].sum())
    if not long or len(text.utf8.translate(None, _BEYOND_ASCII)) < len(text.utf8) / 2:
        return None

    def where() -> list[Span]:
        words = _WORD.finditer(text.text)
        return [word.span() for word in words if len(word[0].encode("utf-8", "replace")) > LONG_WORD_BYTES]

    return above(long / len(text.utf8), limit, where)


def markup(text: Text, limit: float) -> Violation | None:
    """Ours: share of characters in HTML tags and entities and in the brackets of wikitext."""
    if not any(sign in text.text for sign in _MARKUP_SIGNS):
        return None
    most = sum(longest * text.text.count(sign) for sign, longest in _LONGEST_MARKUP.items())
    if most / len(text) <= limit:  # reading the text by the pattern takes far longer
        return None
    return above(sum(len(found) for found in _MARKUP.findall(text.text)) / len(text), limit, _MARKUP)


def symbols(text: Text, limit: float) -> Violation | None:
    """Ours: share of characters that are neither letter, digit nor white space; tables, code, ASCII art."""
    return above(len(text.utf8.translate(None, _NOT_SYMBOLS)) / max(1, len(text)), limit, _SYMBOL)


def words_too_short(text: Text, limit: float) -> Violation | None:
    """Gopher: mean word length at least 3 characters."""
    return below(text.mean_word_length, limit)


def words_too_long(text: Text, limit: float) -> Violation | None:
    """Gopher: mean word length at most 10 characters."""
    return above(text.mean_word_length, limit)


def lorem_ipsum(text: Text, limit: bool) -> Violation | None:
    """C4: no page with the phrase "lorem ipsum"."""
    return Violation("lorem ipsum", "none", _LOREM_IPSUM) if b"lorem ipsum" in text.lower else None


def curly_braces(text: Text, limit: float) -> Violation | None:
    """C4 removes every page with a curly brace, as code; here their share of the characters counts."""
    return above((text.text.count("{") + text.text.count("}")) / max(1, len(text)), limit, _BRACE)


def hashes(text: Text, limit: float) -> Violation | None:
    """Gopher: at most 0.1 signs `#` per word."""
    return above(text.text.count("#") / max(1, text.words), limit, _HASH)


def ellipses(text: Text, limit: float) -> Violation | None:
    """Gopher: at most 0.1 ellipses per word."""
    return above((text.text.count("...") + text.text.count("…")) / max(1, text.words), limit, _ELLIPSIS)


def bullets(text: Text, limit: float) -> Violation | None:
    """Gopher: at most 90 % of the lines begin with a bullet."""
    return text.lines_above(lambda line: line.startswith(BULLETS), limit)


def cut_lines(text: Text, limit: float) -> Violation | None:
    """Gopher: at most 30 % of the lines end with an ellipsis."""
    return text.lines_above(lambda line: line.endswith(("...", "…")), limit)


def boilerplate(text: Text, limit: float) -> Violation | None:
    """C4 removes lines that speak of Javascript, cookies and terms of use; here a text made of such lines goes."""
    found = any(phrase in text.lower for phrase in _BOILERPLATE_BYTES)
    return text.lines_above(_BOILERPLATE.search, limit) if found else None


def few_sentences(text: Text, limit: int) -> Violation | None:
    """C4: at least 3 sentences (here: ends of sentence, or lines)."""
    if len(text.lines) >= limit:
        return None
    return below(max(len(text.lines), sum(1 for _ in _SENTENCE_END.finditer(text.text))), limit)


def not_words(text: Text, limit: float) -> Violation | None:
    """Gopher: at least 80 % of the words contain a letter; what lies beyond ASCII counts as one."""
    starts_W, _ = text.word_bounds
    letters_B = np.frombuffer(text.utf8.translate(_IS_LETTER), np.uint8)
    share = float(np.maximum.reduceat(letters_B, starts_W).mean()) if len(starts_W) else 0.0
    return below(share, limit, _WORD_WITHOUT_LETTER)


def other_language(text: Text, limit: list[str]) -> Violation | None:
    """Ours: the most likely language is one of these, by `py3langid` (Lui and Baldwin 2012)."""
    middle = max(0, (len(text) - LANGUAGE_CHARACTERS) // 2)
    language = str(language_model().classify(text.text[middle : middle + LANGUAGE_CHARACTERS])[0])
    return None if language in limit else Violation(language, limit)


@cache
def language_model() -> Any:
    """The model of the optional package `py3langid`, which comes in its wheel. UserError when it is missing."""
    try:
        from py3langid import langid
    except ImportError:
        raise UserError(
            "data.filters.languages needs the package py3langid: pip install 'cramming[language]', or set it to null"
        ) from None
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)


def no_stop_words(text: Text, limit: int) -> Violation | None:
    """Gopher: at least two different words of the, be, to, of, and, that, have, with. For English only."""
    found = 0
    for word in STOP_WORDS:
        if found >= limit:
            break
        # The first test finds nearly all, fast.
        found += f" {word} " in text.text or re.search(rf"\b{word}\b", text.text, re.IGNORECASE) is not None
    return below(found, limit)


def too_many_tokens(characters: int, tokens: int, limit: float | None) -> Violation | None:
    """Cramming: text that its own tokenizer compresses badly goes, above 0.3 tokens per character (without [CLS] and
    [SEP]). It needs the tokenizer, so it comes after the other filters (data_prep/shard_writer.py)."""
    return None if limit is None else above(tokens / max(1, characters), limit)


@dataclass(frozen=True)
class FilterConfig:
    """Section `data.filters`: the table of filters, in the order in which they judge; the first that removes is named.

    Each setting is its filter's limit, in conf/data/filters with its published value. None (`no_`: false) switches the
    filter off; `min_` and `max_` values themselves are allowed; shares are between 0 and 1. Cheap filters come first.
    """

    min_words: Annotated[int | None, too_few_words] = None
    max_broken: Annotated[float | None, broken_characters] = None  # of the text before and after normalisation
    max_long_words: Annotated[float | None, unbroken_runs] = None
    max_markup: Annotated[float | None, markup] = None
    max_symbols: Annotated[float | None, symbols] = None
    min_mean_word_length: Annotated[float | None, words_too_short] = None
    max_mean_word_length: Annotated[float | None, words_too_long] = None
    no_lorem_ipsum: Annotated[bool, lorem_ipsum] = False
    max_curly_braces: Annotated[float | None, curly_braces] = None
    max_hashes_per_word: Annotated[float | None, hashes] = None
    max_ellipses_per_word: Annotated[float | None, ellipses] = None
    max_bullet_lines: Annotated[float | None, bullets] = None
    max_ellipsis_lines: Annotated[float | None, cut_lines] = None
    max_boilerplate_lines: Annotated[float | None, boilerplate] = None
    max_duplicate_lines: Annotated[float | None, duplicate_lines] = None
    max_duplicate_line_characters: Annotated[float | None, duplicate_line_characters] = None
    min_sentences: Annotated[int | None, few_sentences] = None
    min_alphabetic_words: Annotated[float | None, not_words] = None
    max_top_ngrams: Annotated[list[float] | None, top_ngrams] = None  # for n = 2, 3, 4
    max_duplicate_ngrams: Annotated[list[float] | None, duplicate_ngrams] = None  # for n = 5 to 10
    languages: Annotated[list[str] | None, other_language] = None  # codes of ISO 639-1, for example [en]
    min_stop_words: Annotated[int | None, no_stop_words] = None
    # These two are no filters of this table.
    max_words: int | None = None  # a longer document is no worse, so it is cut into parts (normalise.py)
    max_tokens_per_character: float | None = None  # judged when the text is tokenized: too_many_tokens

    def __post_init__(self) -> None:
        for name, size in (("max_top_ngrams", len(TOP_NGRAMS)), ("max_duplicate_ngrams", len(DUPLICATE_NGRAMS))):
            limits = getattr(self, name)
            if limits is not None and len(limits) != size:
                raise ValueError(f"{name}={limits} must have {size} numbers")
        for name, limit in vars(self).items():
            numbers = limit if isinstance(limit, list) else [limit]
            if any(isinstance(number, (int, float)) and number < 0 for number in numbers):
                raise ValueError(f"{name}={limit} must not be negative")
        if self.min_words is not None and self.max_words is not None and self.min_words > self.max_words:
            raise ValueError(f"min_words={self.min_words} is above max_words={self.max_words}")
        if self.languages == []:
            raise ValueError("languages=[] keeps nothing; null switches the filter off")


class Filter(NamedTuple):
    """A filter with its limit. `limit` is None or False where it is off."""

    setting: str
    limit: Any
    judge: Callable[[Text, Any], Violation | None]

    @property
    def reason(self) -> str:
        """The name under which removed documents are counted."""
        return self.judge.__name__

    def explain(self, text: str) -> str:
        """What it measures in a text that it removes, its limit, and the passage."""
        violation = self.judge(Text(text), self.limit)
        assert violation, f"{self.reason} does not remove this text"
        return violation.explain(text, self.setting)


def always_on(config: CleanConfig) -> list[Filter]:
    """The two filters that cannot be switched off; quick enough for the main process."""
    return [Filter("min_characters", config.min_characters, too_short), Filter("letters", 1, no_letters)]


def all_filters(config: FilterConfig) -> list[Filter]:
    """Every row of the table, with its limit."""
    rows = get_type_hints(FilterConfig, include_extras=True).items()
    return [
        Filter(name, getattr(config, name), kind.__metadata__[0])
        for name, kind in rows
        if get_origin(kind) is Annotated
    ]


def active_filters(config: FilterConfig) -> list[Filter]:
    """The filters that are switched on, in the order of the table."""
    return [filter for filter in all_filters(config) if filter.limit not in (None, False)]


def reason_to_remove(text: str, filters: Iterable[Filter]) -> str | None:
    """The name of the first of these filters that removes this normalised text, or None."""
    seen = Text(text)
    return next((filter.reason for filter in filters if filter.judge(seen, filter.limit)), None)


def is_broken(text: str, config: FilterConfig) -> bool:
    """Whether a text goes as `broken_characters` before it is normalised, which takes control characters away."""
    return config.max_broken is not None and broken_characters(Text(text), config.max_broken) is not None
