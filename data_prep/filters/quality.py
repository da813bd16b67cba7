"""Quality filters: what the rules of C4, Gopher and the cramming paper call no text to learn from.

Each filter is a limit (a field of `FilterConfig`; null switches it off) and a pure function from a text's measures to a
verdict: a `Breach`, or None. All work on normalised text (data_prep/filters/normalise.py) and remove whole documents,
counted by the filter's name; `broken_characters` also judges the text as it came. Those on lines judge texts of three
lines or more: of one line, each share is all or nothing. By default all are off; `data/filters=strict` sets the
published limits.

Sources: C4 (Raffel et al. 2020, section 2.2), Gopher (Rae et al. 2021, section A.1.1 and table A1), Cramming (Geiping
and Goldstein 2022, section 4.4). Not taken over: C4's list of bad words, and its removal of single lines.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

from data_prep.dedup.passages import Breach, above, below, spans
from data_prep.filters.language import language_of
from data_prep.filters.measures import BROKEN, MARKUP, NO_LETTER_WORD, SYMBOL, Measures

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
BOILERPLATE = (b"javascript", b"terms of use", b"privacy policy", b"cookie policy", b"use cookies", b"uses cookies")
BOILERPLATE_LINE = re.compile("|".join(phrase.decode() for phrase in BOILERPLATE), re.IGNORECASE)
BULLETS = ("•", "‣", "▪", "●", "○", "■", "·", "*", "- ", "– ")
HASH, ELLIPSIS, BRACE = re.compile("#"), re.compile(r"\.\.\.|…"), re.compile("[{}]")
LOREM_IPSUM = re.compile("lorem ipsum", re.IGNORECASE)
TOP_NGRAMS = (2, 3, 4)
DUPLICATE_NGRAMS = (5, 6, 7, 8, 9, 10)


@dataclass(frozen=True)
class FilterConfig:
    """Section `data.filters`. A limit of null (for the yes-or-no filters: false) means that the filter is off.

    `min_` and `max_` values themselves are allowed. Shares are between 0 and 1.
    """

    min_words: int | None = None
    max_words: int | None = None  # Gopher: 100,000; a longer document is no worse, so it is cut into parts, not removed
    min_mean_word_length: float | None = None
    max_mean_word_length: float | None = None
    max_long_words: float | None = None
    max_hashes_per_word: float | None = None
    max_ellipses_per_word: float | None = None
    max_bullet_lines: float | None = None
    max_ellipsis_lines: float | None = None
    max_boilerplate_lines: float | None = None
    min_alphabetic_words: float | None = None
    min_stop_words: int | None = None
    min_sentences: int | None = None
    max_symbols: float | None = None
    max_broken: float | None = None
    max_markup: float | None = None
    max_curly_braces: float | None = None
    no_lorem_ipsum: bool = False
    max_duplicate_lines: float | None = None
    max_duplicate_line_characters: float | None = None
    max_top_ngrams: list[float] | None = None  # for n = 2, 3, 4
    max_duplicate_ngrams: list[float] | None = None  # for n = 5 to 10
    max_tokens_per_character: float | None = None
    languages: list[str] | None = None  # codes of ISO 639-1, for example [en]

    def __post_init__(self) -> None:
        for name, size in (("max_top_ngrams", len(TOP_NGRAMS)), ("max_duplicate_ngrams", len(DUPLICATE_NGRAMS))):
            limits = getattr(self, name)
            if limits is not None and len(limits) != size:
                raise ValueError(f"{name}={limits} must have {size} numbers")
        for field in fields(self):
            limit = getattr(self, field.name)
            numbers = limit if isinstance(limit, list) else [limit]
            if any(isinstance(number, (int, float)) and number < 0 for number in numbers):
                raise ValueError(f"{field.name}={limit} must not be negative")
        if self.min_words is not None and self.max_words is not None and self.min_words > self.max_words:
            raise ValueError(
                f"min_words={self.min_words} is above max_words={self.max_words}: no text has so many words"
            )
        if self.languages == []:
            raise ValueError("languages=[] keeps nothing; null switches the filter off")


def _lines_above(text: Measures, test: Callable[[str], object], limit: float) -> Breach | None:
    return above(text.lines_share(test), limit, partial(text.line_spans, test))


def too_few_words(text: Measures, limit: int) -> Breach | None:
    """Gopher: at least 50 words."""
    return below(text.words, limit)


def words_too_short(text: Measures, limit: float) -> Breach | None:
    """Gopher: mean word length at least 3 characters."""
    return below(text.mean_word_length, limit)


def words_too_long(text: Measures, limit: float) -> Breach | None:
    """Gopher: mean word length at most 10 characters."""
    return above(text.mean_word_length, limit)


def unbroken_runs(text: Measures, limit: float) -> Breach | None:
    """Ours: share of the bytes in words of over 100 bytes; encoded data and minified code, even beside prose."""
    return above(text.long_word_share, limit, text.long_word_spans)


def hashes(text: Measures, limit: float) -> Breach | None:
    """Gopher: at most 0.1 signs `#` per word."""
    return above(text.text.count("#") / max(1, text.words), limit, partial(spans, HASH, text.text))


def ellipses(text: Measures, limit: float) -> Breach | None:
    """Gopher: at most 0.1 ellipses per word."""
    count = text.text.count("...") + text.text.count("…")
    return above(count / max(1, text.words), limit, partial(spans, ELLIPSIS, text.text))


def bullets(text: Measures, limit: float) -> Breach | None:
    """Gopher: at most 90 % of the lines begin with a bullet."""
    return _lines_above(text, lambda line: line.startswith(BULLETS), limit)


def cut_lines(text: Measures, limit: float) -> Breach | None:
    """Gopher: at most 30 % of the lines end with an ellipsis."""
    return _lines_above(text, lambda line: line.endswith(("...", "…")), limit)


def boilerplate(text: Measures, limit: float) -> Breach | None:
    """C4 removes lines that speak of Javascript, cookies and terms of use; here a text made of such lines goes."""
    return _lines_above(text, BOILERPLATE_LINE.search, limit) if text.contains(*BOILERPLATE) else None


def not_words(text: Measures, limit: float) -> Breach | None:
    """Gopher: at least 80 % of the words contain a letter."""
    return below(text.alphabetic_word_share, limit, partial(spans, NO_LETTER_WORD, text.text))


def no_stop_words(text: Measures, limit: int) -> Breach | None:
    """Gopher: at least two different words of the, be, to, of, and, that, have, with. For English only."""
    return below(text.count_present(STOP_WORDS, limit), limit)


def few_sentences(text: Measures, limit: int) -> Breach | None:
    """C4: at least 3 sentences (here: ends of sentence, or lines)."""
    return below(max(len(text.lines), text.sentences), limit) if len(text.lines) < limit else None


def symbols(text: Measures, limit: float) -> Breach | None:
    """Ours: share of characters that are neither letter, digit nor white space; tables, code, ASCII art."""
    return above(text.symbol_share, limit, partial(spans, SYMBOL, text.text))


def broken_characters(text: Measures, limit: float) -> Breach | None:
    """Ours: share of replacement, private-use and control characters and of UTF-8 that was read as Latin-1."""
    return above(text.broken_share, limit, partial(spans, BROKEN, text.text))


def markup(text: Measures, limit: float) -> Breach | None:
    """Ours: share of characters in HTML tags and entities and in the brackets of wikitext."""
    return above(text.markup_share(limit), limit, partial(spans, MARKUP, text.text))


def curly_braces(text: Measures, limit: float) -> Breach | None:
    """C4 removes every page with a curly brace, as code; here their share of the characters counts."""
    count = text.text.count("{") + text.text.count("}")
    return above(count / max(1, len(text.text)), limit, partial(spans, BRACE, text.text))


def lorem_ipsum(text: Measures, limit: bool) -> Breach | None:
    """C4: no page with the phrase "lorem ipsum"."""
    found = limit and text.contains(b"lorem ipsum")
    return Breach("lorem ipsum", "none", partial(spans, LOREM_IPSUM, text.text)) if found else None


def duplicate_lines(text: Measures, limit: float) -> Breach | None:
    """Gopher: at most 30 % of the lines have stood there before (a normalised text's paragraphs are its lines)."""
    return above(text.duplicate_lines[0], limit, text.duplicate_line_spans)


def duplicate_line_characters(text: Measures, limit: float) -> Breach | None:
    """Gopher: at most 20 % of the characters in lines that have stood there before."""
    return above(text.duplicate_lines[1], limit, text.duplicate_line_spans)


def top_ngrams(text: Measures, limits: list[float]) -> Breach | None:
    """Gopher: the most frequent run of 2, 3, 4 words makes up at most 20, 18, 16 % of the characters."""
    for n, limit in zip(TOP_NGRAMS, limits):
        if (share := text.top_ngram_share(n, limit)) > limit:
            return Breach(f"{share:.4g} in a run of {n} words", limit, partial(text.top_ngram_spans, n))
    return None


def duplicate_ngrams(text: Measures, limits: list[float]) -> Breach | None:
    """Gopher: at most 15, 14 ... 10 % of the characters in runs of 5, 6 ... 10 words that occur more than once."""
    for n, limit in zip(DUPLICATE_NGRAMS, limits):
        share = text.duplicate_ngram_share(n)
        if share > limit:
            return Breach(f"{share:.4g} in runs of {n} words", limit, partial(text.duplicate_ngram_spans, n))
        if share <= min(limits):  # what a repeated longer run covers, repeated shorter runs cover too
            break
    return None


def other_language(text: Measures, limit: list[str]) -> Breach | None:
    """Ours: the language that py3langid finds most likely is one of these."""
    language = language_of(text.text)
    return None if language in limit else Breach(language, limit)


# The name that is counted -> the limit's field and the function. Cheap ones first: the first that removes is named.
FILTERS: dict[str, tuple[str, Callable[..., Breach | None]]] = {
    "too_few_words": ("min_words", too_few_words),
    "broken_characters": ("max_broken", broken_characters),
    "unbroken_runs": ("max_long_words", unbroken_runs),
    "markup": ("max_markup", markup),
    "symbols": ("max_symbols", symbols),
    "words_too_short": ("min_mean_word_length", words_too_short),
    "words_too_long": ("max_mean_word_length", words_too_long),
    "lorem_ipsum": ("no_lorem_ipsum", lorem_ipsum),
    "curly_braces": ("max_curly_braces", curly_braces),
    "hashes": ("max_hashes_per_word", hashes),
    "ellipses": ("max_ellipses_per_word", ellipses),
    "bullets": ("max_bullet_lines", bullets),
    "cut_lines": ("max_ellipsis_lines", cut_lines),
    "boilerplate": ("max_boilerplate_lines", boilerplate),
    "duplicate_lines": ("max_duplicate_lines", duplicate_lines),
    "duplicate_line_characters": ("max_duplicate_line_characters", duplicate_line_characters),
    "few_sentences": ("min_sentences", few_sentences),
    "not_words": ("min_alphabetic_words", not_words),
    "top_ngrams": ("max_top_ngrams", top_ngrams),
    "duplicate_ngrams": ("max_duplicate_ngrams", duplicate_ngrams),
    "other_language": ("languages", other_language),
    "no_stop_words": ("min_stop_words", no_stop_words),
}
TOO_MANY_TOKENS = "too_many_tokens"


def any_on(config: FilterConfig) -> bool:
    """Whether `reason_to_remove` has anything to ask."""
    return any(getattr(config, field) not in (None, False) for field, _ in FILTERS.values())


def reason_to_remove(text: str, config: FilterConfig) -> str | None:
    """The name of the first filter that removes this normalised text, or None."""
    measures = Measures(text)
    for name, (field, judge) in FILTERS.items():
        limit = getattr(config, field)
        if limit is not None and judge(measures, limit):
            return name
    return None


def is_broken(text: str, config: FilterConfig) -> bool:
    """Whether a text goes as `broken_characters` before it is normalised, which takes control characters away."""
    return config.max_broken is not None and broken_characters(Measures(text), config.max_broken) is not None


def shown(text: str, reason: str, config: FilterConfig) -> str:
    """What the filter that `reason_to_remove` named measured in this text, its limit, and the passage."""
    field, judge = FILTERS[reason]
    breach = judge(Measures(text), getattr(config, field))
    assert breach, f"{reason} does not remove this text"
    return breach.shown(text, field)


def too_many_tokens(characters: int, tokens: int, config: FilterConfig) -> Breach | None:
    """Cramming: text that its own tokenizer compresses badly goes, above 0.3 tokens per character (without [CLS] and
    [SEP]). Counted as `TOO_MANY_TOKENS`; it needs the tokenizer, so it comes after the other filters."""
    limit = config.max_tokens_per_character
    return None if limit is None else above(tokens / max(1, characters), limit)
