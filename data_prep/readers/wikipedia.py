"""Wikipedia's XML dumps (`*.xml.bz2`) as plain text, streamed page by page in bounded memory, by `mwparserfromhell`.

Stripping wikitext is slow, below 1 MB of it a second: for all of Wikipedia there is ready-made text (data=wikipedia).
A dump names templates and does not hold what they expand to. Those of the table below are part of sentences, which
would have a hole without them ("a road of  in length"); all others (infoboxes, citations, navigation) go.
"""

import re
from calendar import month_name
from collections.abc import Iterator
from typing import Any, BinaryIO
from xml.etree import ElementTree

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
_MEDIA = ("file:", "image:", "category:")
_TAGS_WITHOUT_TEXT = ("table", "gallery", "math", "ref", "timeline", "score", "syntaxhighlight")


def read_wikipedia(file: TextFile, field: str) -> Iterator[str]:
    """The articles of a MediaWiki XML dump as plain text: no redirects, no other namespaces, no tables, of templates
    those within sentences."""
    with file.decompressed() as handle:
        try:
            for wikitext in _articles(handle):
                yield plain_text(wikitext)
        except ElementTree.ParseError as error:
            raise UserError(f"{file.path}: not a readable MediaWiki XML dump: {error}") from None


def _articles(handle: BinaryIO) -> Iterator[str]:
    """The wikitext of every article."""
    events = iter(ElementTree.iterparse(handle, events=("start", "end")))
    _, root = next(events)
    if _name(root) != "mediawiki":
        raise ElementTree.ParseError(
            f"the outermost element is <{_name(root)}>, expected <mediawiki>"
        )
    for event, element in events:
        if event != "end" or _name(element) != "page":
            continue
        parts = {_name(part): part for part in element.iter()}
        text = parts["text"].text if "text" in parts else None
        if text and "redirect" not in parts and "ns" in parts and parts["ns"].text == "0":
            yield text
        root.clear()  # or the whole dump would stay in memory


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def plain_text(wikitext: str) -> str:
    """Return the running text of an article as a reader sees it."""
    import mwparserfromhell

    code = mwparserfromhell.parse(
        _TAIL_SECTION.sub(_prose, _expand_templates(_NO_TEXT.sub("", wikitext)))
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
    """The section if it may be the article's own text, as "Sources" is of a river: most of it in sentences."""
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

_INNERMOST = re.compile(r"\{\{([^{}]*)\}\}")
_BETWEEN_PARAMETERS = re.compile(r"\|(?![^\[\]]*\]\])")  # not in [[link|text]]
_NAMED = re.compile(r"\s*([^\W\d][\w -]*)=")
_RANGE = {"-": "–", "–": "–", "x": " × ", "×": " × "} | {
    word: f" {word} " for word in ("to", "and", "or", "by")
}
_FIRST = "nowrap nobr small big smallcaps em strong sub sup math mvar abbr tooltip ill flag linktext sic formatnum"
_YEARS = {"circa": "c.", "c.": "c.", "floruit": "fl.", "fl.": "fl.", "reign": "r.", "r.": "r."}
_MONTHS = [str(number) for number in range(1, 13)]
_SIGNS = {  # what a template without parameters stands for
    "'": "'",
    "'s": "'s",
    "ndash": "–",
    "–": "–",
    "en dash": "–",
    "mdash": "—",
    "—": "—",
    "em dash": "—",
    "snd": " – ",
    "spnd": " – ",
    "spaced ndash": " – ",
    "nbsp": " ",
    "space": " ",
    "thinsp": " ",
    "·": " · ",
    "dot": " · ",
    "×": "×",
    "times": "×",
    "deg": "°",
    "!": "|",
    "=": "=",
}


def _expand_templates(wikitext: str) -> str:
    """The wikitext with inline templates as their text and without others, from the innermost on.

    Templates that hold other braces, such as a table's, are left to the parser.
    """
    count = 1
    while count:
        wikitext, count = _INNERMOST.subn(lambda template: _text_of(template[1]), wikitext)
    return wikitext


def _text_of(template: str) -> str:
    """Return the shown text of a template: parameters, of which those without a name or with a number for one count."""
    name, _, rest = template.replace("formatnum:", "formatnum|", 1).partition("|")
    name = " ".join(name.replace("_", " ").split()).lower()
    parts = [part.strip() for part in _BETWEEN_PARAMETERS.split(rest)]
    plain = [re.sub(r"^(?:\d+|text|quote)\s*=\s*", "", part) for part in parts]
    listed = [text for part, text in zip(parts, plain) if text != part or not _NAMED.match(part)]
    if name in _SIGNS:
        return _SIGNS[name]
    if not any(listed):
        return ""
    if name in _FIRST.split() or name.startswith("lang-"):
        return listed[0]
    if name in ("lang", "langx", "transl", "transliteration"):
        return listed[-1]
    if name in ("convert", "cvt"):
        return _quantity(listed)
    if name in _YEARS:
        return f"{_YEARS[name]} {' – '.join(listed)}"
    if name in ("frac", "sfrac", "fraction"):
        return " ".join(
            [*listed[:-2], "/".join(listed[-2:] if len(listed) > 1 else ["1", *listed])]
        )
    if name in ("quote", "blockquote", "quotation", "bquote", "cquote"):
        return f"\n{listed[0]}\n"
    if name == "as of":
        months = [month_name[int(part)] if part in _MONTHS else part for part in listed[1:2]]
        return " ".join(["As of", *months, listed[0]])
    return ""


def _quantity(listed: list[str]) -> str:
    """A quantity, without the unit that it is converted to: "5 to 10 km"."""
    text, *values = [*listed, ""]
    while len(values) > 1 and values[0] in _RANGE:
        text += _RANGE[values[0]] + values[1]
        values = values[2:]
    return f"{text} {values[0]}".strip()
