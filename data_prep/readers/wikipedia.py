"""Wikipedia's XML dumps (`*.xml.bz2`) as plain text, streamed page by page in bounded memory, by `mwparserfromhell`.

Stripping wikitext is slow, below 1 MB of it a second: for all of Wikipedia there is ready-made text (data=wikipedia).
A dump names templates and does not hold what they expand to. Those of wikipedia_templates.yaml are part of sentences,
which would have a hole without them ("a road of  in length"); all others (infoboxes, citations, navigation) go.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

import yaml

from cramming.config import UserError
from data_prep.readers.plain_text import TextFile

# Sections of lists and links, to the next heading of the second level. Their names in English; others stay.
_TAIL_SECTION = re.compile(
    r"^==\s*(?:references|external links|see also|further reading|(notes|bibliography|sources|footnotes))\s*==\s*$"
    r"(.*?)(?=^==[^=]|\Z)",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
_NO_PROSE = tuple("*#:;|!{}^=<")  # what lines of lists, tables, footnotes and headings begin with
_SENTENCE_SPACES = 10
# A footnote that is never closed ends at the next one at the latest: it must not swallow the text up to there.
_NO_TEXT = re.compile(
    r"<!--.*?-->|<ref\b[^>]*/>|<ref\b[^>]*>[^<]*(?:<(?!/?ref\b)[^<]*)*</ref\s*>",
    re.IGNORECASE | re.DOTALL,
)
_NEVER_CLOSED = re.compile(
    r"\{\{.*(?:\n\s*\|.*)*|\}\}"
)  # a template with its lines of parameters, or a stray end
_BEGINS_EMPTY = re.compile(
    r"\(\s*[,;][\s,;]*"
)  # "Paris (; )", "(; born 1950)": a pronunciation stood there
_EMPTY_BRACKETS = re.compile(r" \(\s*\)")
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
_MEDIA = ("file:", "image:", "category:")
_TAGS_WITHOUT_TEXT = ("table", "gallery", "math", "ref", "timeline", "score", "syntaxhighlight")


def read_wikipedia(file: TextFile, fields: Sequence[str]) -> Iterator[str]:
    """Yield the articles of a MediaWiki XML dump as plain text.

    Redirects, other namespaces and tables go; of templates those within sentences stay, and `file.lost` counts those
    without text.
    """
    with file.decompressed() as handle:
        try:
            for wikitext, language in _articles(handle):
                yield plain_text(wikitext, language, file.lost)
        except ElementTree.ParseError as error:
            raise UserError(f"{file.path}: not a readable MediaWiki XML dump: {error}") from None


def _articles(handle: BinaryIO) -> Iterator[tuple[str, str]]:
    """Yield the wikitext of every article, and the language of the wiki."""
    events = iter(ElementTree.iterparse(handle, events=("start", "end")))
    _, root = next(events)
    if _name(root) != "mediawiki":
        raise ElementTree.ParseError(
            f"the outermost element is <{_name(root)}>, expected <mediawiki>"
        )
    language = root.get(_LANGUAGE, "en").partition("-")[0]
    for event, element in events:
        if event != "end" or _name(element) != "page":
            continue
        parts = {_name(part): part for part in element.iter()}
        text = parts["text"].text if "text" in parts else None
        if text and "redirect" not in parts and "ns" in parts and parts["ns"].text == "0":
            yield text, language
        root.clear()  # or the whole dump would stay in memory


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def plain_text(wikitext: str, language: str, lost: Counter[str]) -> str:
    """Return the running text of an article as a reader sees it; `lost` counts templates in sentences without text."""
    import mwparserfromhell

    code = mwparserfromhell.parse(
        _TAIL_SECTION.sub(_prose, templates_of(language).expand(_NO_TEXT.sub("", wikitext), lost))
    )
    for link in code.filter_wikilinks(
        matches=lambda link: str(link.title).strip().lower().startswith(_MEDIA)
    ):
        _remove(code, link)
    for tag in code.filter_tags(
        matches=lambda tag: str(tag.tag).strip().lower() in _TAGS_WITHOUT_TEXT
    ):
        _remove(code, tag)
    text = _EMPTY_BRACKETS.sub("", _BEGINS_EMPTY.sub("(", _NEVER_CLOSED.sub("", code.strip_code())))
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


def _prose(section: re.Match[str]) -> str:
    """Return the section if it may be text of the article, as "Sources" is of a river: most of it in sentences."""
    lines = [
        line
        for line in map(str.strip, section[2].split("\n"))
        if not line.lower().startswith("[[category:")
    ]
    prose = (
        line
        for line in lines
        if not line.startswith(_NO_PROSE) and line.count(" ") >= _SENTENCE_SPACES
    )
    keep = section[1] and 2 * sum(map(len, prose)) > sum(map(len, lines))
    return section[0] if keep else ""


def _remove(code: Any, node: Any) -> None:
    try:
        code.remove(node)
    except ValueError:  # it stood inside a node that is gone already
        return


# --- templates --------------------------------------------------------------------------------------------------------

TABLES = Path(__file__).with_name("wikipedia_templates.yaml")  # it has the language of patterns
_FORMATNUM = re.compile(r"^\s*formatnum:", re.IGNORECASE)
_INNERMOST = re.compile(r"\{\{([^{}]*)\}\}")
_SEGMENT = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")  # of a pattern: in brackets, or not
_FIELD = re.compile(r"\{([^{}]+)\}")  # the same
_BETWEEN_PARAMETERS = re.compile(r"\|(?![^\[\]]*\]\])")  # not in [[link|text]]
_NAMED = re.compile(r"\s*([^\W\d][\w -]*)=(.*)", re.DOTALL)
_NUMBERED = re.compile(r"^\s*(?:\d+|text|quote)\s*=")
_RANGE = {"-": "–", "–": "–", "x": " × ", "×": " × "} | {
    word: f" {word} " for word in ("to", "and", "or", "by")
}


def _fraction(listed: list[str]) -> str:
    """Return a fraction, with what stands in front of it: "3 1/2"."""
    parts = listed[-2:] if len(listed) > 1 else ["1", *listed]
    return " ".join([*listed[:-2], "/".join(parts)])


def _quantity(listed: list[str]) -> str:
    """Return a quantity, without the unit that it is converted to: "5 to 10 km"."""
    text, *values = [*listed, ""]
    while len(values) > 1 and values[0] in _RANGE:
        text += _RANGE[values[0]] + values[1]
        values = values[2:]
    return " ".join([text, *values[:1]]).strip()


_COMPUTED: dict[str, Callable[[list[str]], str]] = {
    "-1": lambda listed: listed[-1],
    "*": lambda listed: " – ".join(filter(None, listed)),
    "quantity": _quantity,
    "fraction": _fraction,
}


class Templates:
    """Patterns of the text that templates of one language's wiki show."""

    def __init__(self, language: str) -> None:
        tables = yaml.safe_load(TABLES.read_text(encoding="utf-8"))
        self._patterns: dict[str, str] = {}
        for group in ("any", language):
            for names, pattern in tables["templates"].get(group, {}).items():
                self._patterns |= dict.fromkeys(names.split(" / "), pattern)
        self._pattern = lru_cache(1 << 12)(self._find_pattern)
        self._wild = [name for name in self._patterns if "*" in name or "[" in name]
        self._values: dict[str, dict[str, str]] = {}
        for kind, by_language in tables["values"].items():
            values = by_language.get(language, {})
            if isinstance(values, list):
                values = {str(number): value for number, value in enumerate(values, 1)}
            self._values[kind] = values
        word = r"[^\W\d_]{1,20}\.?[ :：\xa0]*"
        names = "|".join(tables["pronunciation"])
        self._pronunciation = re.compile(
            rf"\s{{0,3}}[(（](?:{word}){{0,3}}\{{\{{\s*(?:{names})\s*(?:\|[^{{}}]*)?\}}\}}\s*[)）]",
            re.IGNORECASE,
        )

    def expand(self, wikitext: str, lost: Counter[str]) -> str:
        """Return the wikitext with inline templates as their text and without others, from the innermost on.

        Templates that hold other braces, such as a table's, are left to the parser. `lost` counts those within
        sentences that have no text here, by name.
        """
        wikitext = self._pronunciation.sub("", wikitext)
        count = 1
        while count:
            text_of = partial(self._text_of, line=_Line(), lost=lost)
            wikitext, count = _INNERMOST.subn(text_of, wikitext)
        return wikitext

    def _text_of(self, template: re.Match[str], line: "_Line", lost: Counter[str]) -> str:
        """Return the shown text of a template; parameters with a number for a name count as those without one."""
        name, _, rest = _FORMATNUM.sub("formatnum|", template[1]).partition("|")
        name = " ".join(name.replace("_", " ").split())
        parameters, listed = {"name": name}, list[str]()
        for part in _BETWEEN_PARAMETERS.split(rest):
            named = _NAMED.match(part)
            if named and named[1].strip() not in ("text", "quote"):
                parameters[named[1].strip()] = named[2].strip()
            else:
                listed.append(_NUMBERED.sub("", part).strip())
        day_first = " df" if parameters.get("df", "").startswith(("y", "1", "t")) else ""
        pattern = self._pattern(name.lower() + day_first, len(listed) if rest else 0)
        text = None if pattern is None else self._render(pattern, parameters, listed)
        if text is None and line.is_in_sentence(template):
            lost[name.lower()] += 1
        return text or ""

    def _find_pattern(self, name: str, count: int) -> str | None:
        names = [f"{name}#{count}", name, name.removesuffix(" df")]
        names += (wild for wild in self._wild if fnmatchcase(name, wild))
        return next((self._patterns[each] for each in names if each in self._patterns), None)

    def _render(self, pattern: str, parameters: dict[str, str], listed: list[str]) -> str | None:
        """Return the text of a pattern; None if a parameter that it needs is not there."""
        parameters |= {str(number): value for number, value in enumerate(listed, 1)}
        for name, compute in _COMPUTED.items():
            if name in pattern and any(listed):
                parameters[name] = compute(listed)
        shown = ""
        for optional, needed in _SEGMENT.findall(pattern):
            segment = optional or needed
            values = [self._value(field, parameters) for field in _FIELD.findall(segment)]
            if all(values):
                shown += _FIELD.sub("{}", segment).format(*values)
            elif needed:
                return None
        return shown.strip(" ") if "{" in pattern else shown

    def _value(self, field: str, parameters: Mapping[str, str]) -> str:
        kind, _, names = field.rpartition(":")
        value = next(filter(None, map(parameters.get, names.split("|"))), None) or ""
        if not kind:
            return value
        plain = value.lstrip("0")
        return self._values[kind].get(plain, plain)


@cache
def templates_of(language: str) -> Templates:
    """Return the templates of a language, read once."""
    return Templates(language)


class _Line:
    """Line in front of a template, outside of other templates: read once, for templates in their order."""

    def __init__(self) -> None:
        self._position = 0
        self._start_line()

    def is_in_sentence(self, template: re.Match[str]) -> bool:
        """Return whether words stand in front of a template on its line, outside of other templates and of tables."""
        line = template.string.rfind("\n", self._position, template.start()) + 1
        if line:
            self._position = line
            self._start_line()
        self._read(_INNERMOST.sub("", template.string[self._position : template.start()]))
        self._position = template.start()
        return self._depth <= 0 and self._first not in "|!{" and self._has_letters

    def _start_line(self) -> None:
        self._first = ""
        self._odd = ""  # the last character, if it occurs an odd number of times at the end
        self._depth = 0
        self._has_letters = False

    def _read(self, text: str) -> None:
        text = self._odd + text
        self._first = self._first or text[:1]
        self._depth += text.count("{{") - text.count("}}")
        self._has_letters = self._has_letters or any(map(str.isalpha, text))
        last = text[-1:]
        length = len(text) - len(text.rstrip(last))
        self._odd = last if length % 2 else ""
