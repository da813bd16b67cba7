"""Wikipedia's XML dumps (`*.xml.bz2`) as plain text, streamed page by page in bounded memory, by `mwparserfromhell`.

Stripping wikitext is slow, below 1 MB of it a second: for all of Wikipedia there is ready-made text (data=wikipedia).
"""

import re
from collections.abc import Iterator
from typing import Any, BinaryIO
from xml.etree import ElementTree

from cramming.config import UserError
from data_prep.sources.plain_text import TextFile
from data_prep.sources.wikipedia_templates import expand_templates

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
    r"<!--.*?-->|<ref\b[^>]*/>|<ref\b[^>]*>[^<]*(?:<(?!/?ref\b)[^<]*)*</ref\s*>", re.IGNORECASE | re.DOTALL
)
_BEGINS_EMPTY = re.compile(r"\(\s*[,;][\s,;]*")  # "Paris (; )", "(; born 1950)": a pronunciation stood there
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
        raise ElementTree.ParseError(f"the outermost element is <{_name(root)}>, expected <mediawiki>")
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
    """What a reader sees of an article's running text."""
    import mwparserfromhell

    code = mwparserfromhell.parse(_TAIL_SECTION.sub(_prose, expand_templates(_NO_TEXT.sub("", wikitext))))
    for link in code.filter_wikilinks(matches=lambda link: _is_media(str(link.title))):
        _remove(code, link)
    for tag in code.filter_tags(matches=lambda tag: str(tag.tag).strip().lower() in _TAGS_WITHOUT_TEXT):
        _remove(code, tag)
    text = _EMPTY_BRACKETS.sub("", _BEGINS_EMPTY.sub("(", code.strip_code()))
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


def _prose(section: re.Match[str]) -> str:
    """The section if it may be the article's own text, as "Sources" is of a river: most of it in sentences."""
    lines = [line for line in map(str.strip, section[2].split("\n")) if not line.lower().startswith("[[category:")]
    prose = (line for line in lines if not line.startswith(_NO_PROSE) and line.count(" ") >= _SENTENCE_SPACES)
    keep = section[1] and 2 * sum(map(len, prose)) > sum(map(len, lines))
    return section[0] if keep else ""


def _is_media(title: str) -> bool:
    return title.strip().lower().startswith(_MEDIA)


def _remove(code: Any, node: Any) -> None:
    try:
        code.remove(node)
    except ValueError:  # it stood inside a node that is gone already
        return
