"""Quality filters: which documents are no text to learn from. Each removes whole documents, counted by its name.

`FilterConfig` is the table. To add a filter: a field there with its rule (the name that is counted, the measure, where
to find what was measured), a line `<setting>: null` in conf/data/base.yaml, and examples in
tests/data_prep/test_filters.py; its limit stands in the presets of conf/data/filters that use it.

Sources: C4 (Raffel et al. 2020, section 2.2), Gopher (Rae et al. 2021, section A.1.1 and table A1), Cramming (Geiping
and Goldstein 2022, section 4.4). Not taken over: C4's list of bad words, and its removal of single lines.
"""

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Annotated, Any, NamedTuple, get_origin, get_type_hints

import numpy as np

from cramming.config import Count, Natural, NotNegative, Section, Share
from data_prep.filters.normalise import CleanConfig
from data_prep.filters.repetition import (
    duplicate_line_characters,
    duplicate_lines,
    duplicate_ngrams,
    repeated_lines,
    top_ngrams,
)
from data_prep.filters.text import SPACES, Text, Violation, Where
from data_prep.stats import Span

ORDINARY_RATE = 0.22  # tokens per character: Wikipedia with a WordPiece of 32,768 entries has 0.212
LONG_WORD_BYTES = 100
LANGUAGE_CHARACTERS = (
    1000  # judged by the language model; from the middle: titles and names stand at the beginning
)
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
BULLETS = ("•", "‣", "▪", "●", "○", "■", "·", "*", "- ", "– ")
BOILERPLATE = (
    "javascript",
    "terms of use",
    "privacy policy",
    "cookie policy",
    "use cookies",
    "uses cookies",
)
_BOILERPLATE_BYTES = [phrase.encode() for phrase in BOILERPLATE]
_BOILERPLATE = re.compile("|".join(BOILERPLATE), re.IGNORECASE)
_LOREM_IPSUM = re.compile("lorem ipsum", re.IGNORECASE)
_LETTER = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"[^ \n\t\r\v\f]+")
_WORD_WITHOUT_LETTER = re.compile(r"(?<!\S)[!-@\[-`{-~]+(?!\S)")
_IS_LETTER = bytes(byte >= 0x80 or chr(byte).isalpha() for byte in range(256))
# Only from the first sign of a run: tried from each, a run of n that no space follows would take n * n steps.
# Marks of scripts without capital letters end a sentence without a space behind them.
_SENTENCE_END = re.compile(r"[.!?…](?<![.!?…].)[.!?…]*[\"'”’)\]]*(?:\s|$)|[。！？।॥؟۔።]+")
_SYMBOL = re.compile(r"[!-/:-@\[-`{-~\u0080-\u00bf\u2000-\u2fff]")
_CONTROLS = bytes(byte for byte in range(0x20) if byte not in SPACES) + b"\x7f"
# "Â" or "Ã" behind a capital may end a word; otherwise a non-breaking space, or its like, stood behind it.
_BROKEN_BEYOND_ASCII = re.compile(
    "[\ufffd\ue000-\uf8ff]|[ÂÃ][\u0080-\u00bf]|â€|[\u0080-\u0084\u0086-\u009f]|(?<![A-ZÀ-Þ])[ÂÃ](?=[ \n]|$)"
)
_BROKEN = re.compile(f"{_BROKEN_BEYOND_ASCII.pattern}|[{re.escape(_CONTROLS.decode())}]")
_BROKEN_SIGNS = (
    b"\xef",
    b"\xee",
    b"\xc3\x83",
    b"\xc3\x82",
    b"\xc3\xa2\xe2",
)  # what it begins with, in UTF-8
_LATIN_CONTROLS = re.compile(
    rb"\xc2[\x80-\x84\x86-\x9f]"
)  # the same; their first byte alone is frequent
_MARKUP = re.compile(
    r"</?[A-Za-z!][^<>\n]{0,300}>|&(?:[A-Za-z]{2,8}|#\d{1,6});|\{[{|]|[|}]\}|\[\[|\]\]|'''?|={2,}"
)
_MARKUP_SIGNS = ("<", "&", "{{", "{|", "[[", "''", "==")
_LONGEST_MARKUP = {"<": 304, "&": 10, "=": 1, "'": 1} | dict.fromkeys(
    ("{{", "{|", "|}", "}}", "[[", "]]"), 2
)


def _all_bytes_but(members: Iterable[int]) -> bytes:
    return bytes(sorted(set(range(256)).difference(members)))


_NOT_SYMBOLS = _all_bytes_but(
    [byte for byte in range(0x80) if _SYMBOL.match(chr(byte))] + [0xC2, 0xE2]
)  # lead bytes
_NOT_CONTROLS, _BEYOND_ASCII = _all_bytes_but(_CONTROLS), bytes(range(0x80, 0x100))


def _broken(text: Text, limit: object = None) -> float:
    """Return the share of replacement, private-use and control characters and of UTF-8 that was read as Latin-1."""
    broken = len(text.utf8.translate(None, _NOT_CONTROLS))
    if any(sign in text.utf8 for sign in _BROKEN_SIGNS) or _LATIN_CONTROLS.search(text.utf8):
        broken += sum(map(len, _BROKEN_BEYOND_ASCII.findall(text.text)))
    return broken / max(1, len(text))


def _in_long_words(text: Text, limit: float) -> float | None:
    """Return the share of the bytes in words of over 100 bytes; encoded data and minified code, even beside prose.

    Scripts that do not space their words are not judged.
    """
    starts_W, ends_W = text.word_bounds
    lengths_W = ends_W - starts_W
    long = int(lengths_W[lengths_W > LONG_WORD_BYTES].sum())
    if not long or len(text.utf8.translate(None, _BEYOND_ASCII)) < len(text.utf8) / 2:
        return None
    return long / len(text.utf8)


def _long_word_spans(text: Text) -> list[Span]:
    words = _WORD.finditer(text.text)
    return [
        word.span() for word in words if len(word[0].encode("utf-8", "replace")) > LONG_WORD_BYTES
    ]


def _markup(text: Text, limit: float) -> float | None:
    """Return the share of characters in HTML tags and entities and in the brackets of wikitext."""
    if not any(sign in text.text for sign in _MARKUP_SIGNS):
        return None
    upper_bound = sum(size * text.text.count(sign) for sign, size in _LONGEST_MARKUP.items())
    if upper_bound / len(text) <= limit:  # reading the text by the pattern takes far longer
        return None
    return sum(map(len, _MARKUP.findall(text.text))) / len(text)


def _symbols(text: Text, limit: float) -> float:
    """Return the share of characters that are neither letter, digit nor white space; tables, code, ASCII art."""
    return len(text.utf8.translate(None, _NOT_SYMBOLS)) / max(1, len(text))


def _lorem_ipsum(text: Text, limit: bool) -> Violation | None:
    return Violation("lorem ipsum", "none", _LOREM_IPSUM) if b"lorem ipsum" in text.lower else None


def _curly_braces(text: Text, limit: float) -> float:
    return (text.text.count("{") + text.text.count("}")) / max(1, len(text))


def _if_spaced(measure: Callable[[Text, Any], Any]) -> Callable[[Text, Any], Any]:
    """Return a measure of words; None for scripts without spaces between them."""
    return lambda text, limit: measure(text, limit) if text.is_spaced else None


def _sentences(text: Text, limit: int) -> int:
    """Return the number of lines, or of ends of sentence where these are more."""
    lines = len(text.lines)
    if lines >= limit:
        return lines
    return max(lines, sum(1 for _ in _SENTENCE_END.finditer(text.text)))


def _alphabetic(text: Text, limit: float) -> float:
    """Return the share of the words that contain a letter; what lies beyond ASCII counts as one."""
    starts_W, _ = text.word_bounds
    letters_B = np.frombuffer(text.utf8.translate(_IS_LETTER), np.uint8)
    return float(np.maximum.reduceat(letters_B, starts_W).mean()) if len(starts_W) else 0.0


@cache
def _language_model() -> Any:
    """Return the model of the optional package `py3langid` (Lui and Baldwin 2012), which comes in its wheel."""
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)


def _other_language(text: Text, limit: list[str]) -> Violation | None:
    middle = max(0, (len(text) - LANGUAGE_CHARACTERS) // 2)
    language = str(_language_model().classify(text.text[middle : middle + LANGUAGE_CHARACTERS])[0])
    return None if language in limit else Violation(language, limit)


def _stop_words(text: Text, limit: int) -> int:
    """Return how many of `STOP_WORDS` occur, counted no further than the limit."""
    occurring = 0
    for word in STOP_WORDS:
        if occurring >= limit:
            break
        # The first test finds nearly all, fast.
        occurring += (
            f" {word} " in text.text
            or re.search(rf"\b{word}\b", text.text, re.IGNORECASE) is not None
        )
    return occurring


ShareLimit = Share | None
Limit = NotNegative | None
Six = tuple[Share, Share, Share, Share, Share, Share]


class Rule(NamedTuple):
    """A filter: the name under which removed documents are counted, and what it measures, given text and limit.

    A text goes if the measure is below the limit of a setting `min_...`, above that of another. A measure gives None
    where it cannot judge, or the whole `Violation`. `where` finds in the text what was counted.
    """

    reason: str
    measure: Callable[[Text, Any], Any]
    where: Where = None


def _per_word(reason: str, *signs: str) -> Rule:
    """Return the rule on signs per word."""
    return Rule(
        reason,
        _if_spaced(lambda text, _: sum(map(text.text.count, signs)) / max(1, text.words)),
        re.compile("|".join(map(re.escape, signs))),
    )


def _lines(reason: str, test: Callable[[str], object], only_with: Iterable[bytes] = (b"",)) -> Rule:
    """Return the rule on the share of the lines that pass a test. `only_with`: without any of these no line does."""
    return Rule(
        reason,
        lambda text, _: (
            text.share_of_lines(test) if any(sign in text.lower for sign in only_with) else None
        ),
        lambda text: text.line_spans(test),
    )


class FilterConfig(Section):
    """Section `data.filters`: the filters in the order in which they judge; the first that removes is named.

    Each setting is its filter's limit, in conf/data/filters with its published value. None (`no_`: false) switches the
    filter off; `min_` and `max_` values themselves are allowed. Cheap filters come first.
    """

    # Gopher: at least 50 words.
    min_words: Annotated[
        Natural | None, Rule("too_few_words", _if_spaced(lambda text, _: text.words))
    ] = None
    # Ours, four: those on broken characters read the text before and after normalisation.
    max_broken: Annotated[ShareLimit, Rule("broken_characters", _broken, _BROKEN)] = None
    max_long_words: Annotated[
        ShareLimit, Rule("unbroken_runs", _in_long_words, _long_word_spans)
    ] = None
    max_markup: Annotated[ShareLimit, Rule("markup", _markup, _MARKUP)] = None
    max_symbols: Annotated[ShareLimit, Rule("symbols", _symbols, _SYMBOL)] = None
    # Gopher: mean word length at least 3 and at most 10 characters.
    min_mean_word_length: Annotated[
        Limit, Rule("words_too_short", _if_spaced(lambda text, _: text.mean_word_length))
    ] = None
    max_mean_word_length: Annotated[
        Limit, Rule("words_too_long", _if_spaced(lambda text, _: text.mean_word_length))
    ] = None
    # C4: no page with the phrase "lorem ipsum".
    no_lorem_ipsum: Annotated[bool, Rule("lorem_ipsum", _lorem_ipsum)] = False
    # C4 removes every page with a curly brace, as code; here their share of the characters counts.
    max_curly_braces: Annotated[
        ShareLimit, Rule("curly_braces", _curly_braces, re.compile("[{}]"))
    ] = None
    # Gopher: at most 0.1 signs `#` per word, and 0.1 ellipses.
    max_hashes_per_word: Annotated[Limit, _per_word("hashes", "#")] = None
    max_ellipses_per_word: Annotated[Limit, _per_word("ellipses", "...", "…")] = None
    # Gopher: at most 90 % of the lines begin with a bullet, 30 % end with an ellipsis.
    max_bullet_lines: Annotated[
        ShareLimit, _lines("bullets", lambda line: line.startswith(BULLETS))
    ] = None
    max_ellipsis_lines: Annotated[
        ShareLimit, _lines("cut_lines", lambda line: line.endswith(("...", "…")))
    ] = None
    # C4 removes lines that speak of Javascript, cookies and terms of use; here a text made of such lines goes.
    max_boilerplate_lines: Annotated[
        ShareLimit, _lines("boilerplate", _BOILERPLATE.search, _BOILERPLATE_BYTES)
    ] = None
    # Gopher: at most 30 % of the lines repeat an earlier one, and 20 % of the characters stand in such lines.
    max_duplicate_lines: Annotated[
        ShareLimit, Rule("duplicate_lines", duplicate_lines, repeated_lines)
    ] = None
    max_duplicate_line_characters: Annotated[
        ShareLimit, Rule("duplicate_line_characters", duplicate_line_characters, repeated_lines)
    ] = None
    # C4: at least 3 sentences.
    min_sentences: Annotated[Natural | None, Rule("few_sentences", _sentences)] = None
    # Gopher: at least 80 % of the words contain a letter.
    min_alphabetic_words: Annotated[
        ShareLimit, Rule("not_words", _if_spaced(_alphabetic), _WORD_WITHOUT_LETTER)
    ] = None
    # Gopher: at most 20, 18, 16 % of the characters in the top n-gram of 2, 3, 4 words; at most 15, 14 ... 10 % in
    # repeated n-grams of 5 to 10 words.
    max_top_ngrams: Annotated[
        tuple[Share, Share, Share] | None, Rule("top_ngrams", _if_spaced(top_ngrams))
    ] = None
    max_duplicate_ngrams: Annotated[
        Six | None, Rule("duplicate_ngrams", _if_spaced(duplicate_ngrams))
    ] = None
    # Ours: codes of ISO 639-1, for example [en].
    languages: Annotated[list[str] | None, Rule("other_language", _other_language)] = None
    # Gopher: at least two different ones. For English only.
    min_stop_words: Annotated[Natural | None, Rule("no_stop_words", _stop_words)] = None
    # These two are no filters of this table.
    max_words: Count | None = (
        None  # a longer document is no worse, so it is cut into parts (normalise.py)
    )
    max_tokens_per_character: Limit = (
        None  # too_many_tokens, when the text is tokenized: `tokens_limit`
    )


RULES: dict[str, Rule] = {
    setting: kind.__metadata__[0]
    for setting, kind in get_type_hints(FilterConfig, include_extras=True).items()
    if get_origin(kind) is Annotated
}


class Filter(NamedTuple):
    """A rule with its limit."""

    setting: str
    limit: Any
    rule: Rule

    def judge(self, text: Text) -> Violation | None:
        """Return the violation of the limit by this text, or None."""
        value = self.rule.measure(text, self.limit)
        if value is None or isinstance(value, Violation):
            return value
        beyond = value < self.limit if self.setting.startswith("min_") else value > self.limit
        return Violation(value, self.limit, self.rule.where) if beyond else None


def always_on(config: CleanConfig) -> list[Filter]:
    """Return the two filters that cannot be switched off; quick enough for the main process."""
    return [
        Filter(
            "min_characters", config.min_characters, Rule("too_short", lambda text, _: len(text))
        ),
        Filter(
            "min_letters",
            1,
            Rule("no_letters", lambda text, _: int(_LETTER.search(text.text) is not None)),
        ),
    ]


def active_filters(config: FilterConfig) -> list[Filter]:
    """Return the filters that are switched on, in the order of the table."""
    filters = [Filter(setting, getattr(config, setting), rule) for setting, rule in RULES.items()]
    return [filter for filter in filters if filter.limit is not None and filter.limit is not False]


def first_violated(text: str, filters: Iterable[Filter]) -> Filter | None:
    """Return the first of these filters that removes this normalised text, or None."""
    seen = Text(text)
    return next((filter for filter in filters if filter.judge(seen)), None)


def is_broken(text: str, config: FilterConfig) -> bool:
    """Return whether a text goes as `broken_characters` before normalising takes control characters away."""
    return config.max_broken is not None and _broken(Text(text)) > config.max_broken


def tokens_limit(limit: float, median_rate: float) -> float:
    """Return the limit of tokens per character for a tokenizer with this median over the documents.

    Cramming: text that its own tokenizer compresses badly goes, above 0.3 tokens per character (without [CLS] and
    [SEP]). That is with 32,768 entries; a smaller vocabulary makes more tokens of any text.
    """
    return limit * max(1.0, median_rate / ORDINARY_RATE)
