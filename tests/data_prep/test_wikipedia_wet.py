"""Wikipedia's XML dumps and WET files, made here: pages come out as plain text, everything else does not."""

import bz2
import gzip
import io
from pathlib import Path

import pytest

from cramming.config import UserError
from data_prep.readers.files import TextConfig, TextSource
from data_prep.readers.wikipedia import plain_text

QUAY = """{{Infobox building|name=Quay|length={{convert|310|m}}}}
<!-- a comment -->'''The quay''' is an [[old]] [[harbour|part of the harbour]].<ref name="a">A book.</ref> It is
310 metres long&nbsp;<ref name="a" /> &amp; made of stone.
[[File:Quay.jpg|thumb|The quay in [[winter]]]]
{| class="wikitable"
| a || b
|}
== Use ==
The [http://example.org fishermen] use it.
== See also ==
* [[Ship]]
=== Ships of the town ===
* [[Boat]]
== History ==
It burned in 1312.
== References ==
{{reflist}}
[[Category:Harbours]]
"""
PAGE = "<page><title>{0}</title><ns>{1}</ns>{2}<revision><text xml:space='preserve'>{3}</text></revision></page>"


def dump(*pages: tuple[str, int, str, str]) -> bytes:
    """A MediaWiki export of (title, namespace, extra element, wikitext)."""
    escape = str.maketrans({"<": "&lt;", "&": "&amp;"})
    body = "".join(
        PAGE.format(title, ns, extra, text.translate(escape)) for title, ns, extra, text in pages
    )
    return (
        f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{body}</mediawiki>'.encode()
    )


def texts(path: Path) -> list[str]:
    config = TextConfig(name="test", source="text", paths=[str(path)])
    return [document.text for document in TextSource(config).documents()]


@pytest.fixture
def wikipedia(tmp_path: Path) -> Path:
    """Two articles, a redirect, a talk page and an empty page, in a dump of several bzip2 streams as the real ones."""
    pytest.importorskip("mwparserfromhell")
    data = dump(
        ("Quay", 0, "", QUAY),
        ("Wharf", 0, "<redirect title='Quay'/>", "#REDIRECT [[Quay]]"),
        ("Talk:Quay", 1, "", "I like it."),
        ("Empty", 0, "", ""),
        ("Boat", 0, "", "A ''boat'' is a small {{ship}} ship < 20 m."),
    )
    path = tmp_path / "testwiki-pages-articles.xml.bz2"
    path.write_bytes(bz2.compress(data[:500]) + bz2.compress(data[500:]))
    return path


PROSE = "The river has two sources in the mountains, the higher one of which is a small lake."


def test_articles_of_a_dump_as_plain_text(wikipedia: Path) -> None:
    quay, boat = texts(wikipedia)
    assert quay.split("\n") == [
        "The quay is an old part of the harbour. It is",
        "310 metres long\u00a0 & made of stone.",
        "Use",
        "The fishermen use it.",
        "History",
        "It burned in 1312.",
    ]
    assert boat == "A boat is a small  ship < 20 m."


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("of {{convert|5|km|mi|0}} in", "of 5 km in"),
        ("from {{lang|fr|[[Paris|la ville]]}} to {{lang-de|Wien}}", "from la ville to Wien"),
        ("{{transl|ru|ISO|Moskva}} {{Transliteration|ja|Kyōto}}", "Moskva Kyōto"),
        ("was {{formatnum:12345}}, {{Convert|12|to|20|m|abbr=on}}", "was 12345, 12 to 20 m"),
        ("{{nowrap|1=E = mc{{sup|2}}}}", "E = mc2"),
        (
            "({{circa|1300|1350}}; {{fl.|1320}}; {{reign|1300|1320}})",
            "(c. 1300 – 1350; fl. 1320; r. 1300 – 1320)",
        ),
        ("dogs{{'}} tails {{ndash}} Peter{{'s}}{{snd}}", "dogs' tails – Peter's –"),
        ("{{frac|1|2}} {{frac|3|1|2}} {{sfrac|4}}", "1/2 3 1/2 1/4"),
        ("{{As of|2010|5}}, {{as of|2012}}", "As of May 2010, As of 2012"),
        ("said:{{blockquote|text=To be.|author=W}}End.", "said:\nTo be.\nEnd."),
        (
            "Paris ({{IPA|pa}}; {{respell|x}}) is, Rome ({{IPA|r}}, born) was f(x)",
            "Paris is, Rome (born) was f(x)",
        ),
        ("Old.\n{{Infobox\n|name=x\n| pop = 3\nNew. {{cn|date=2010\nEnd.", "Old.\nNew.\nEnd."),
        (
            "A.\n== Notes ==\n" + PROSE + "\n* One.\n== Sources ==\n* B (1990)",
            "A.\nNotes\n" + PROSE + "\nOne.",
        ),
        ("a{{citation needed|date=May {{CURRENTYEAR}}}} b {{unknown {{lang|fr|c}}|d}}", "a b"),
    ],
)
def test_templates_within_sentences_are_text_and_others_go(wikitext: str, text: str) -> None:
    pytest.importorskip("mwparserfromhell")
    assert plain_text(wikitext) == text


def test_a_footnote_takes_no_text_with_it() -> None:
    pytest.importorskip("mwparserfromhell")
    named = ('<ref name="BBC/2005" />', "<ref name=a/b/>")
    for note in (*named, "<ref>b</ref >", "<ref name='x'>See <i>a</i> / b.</ref>"):
        text = f"A river.{note}\n== History ==\nOld.<ref name='y'>Smith</ref> Very."
        assert plain_text(text) == "A river.\nHistory\nOld. Very.", note
    assert "Old." in plain_text("A river.<ref>open\n== History ==\nOld.<ref>Smith</ref> Very.")


def test_a_dump_is_streamed(wikipedia: Path, tmp_path: Path) -> None:
    """Pages come before the file has been read; a file that breaks off gives what it has, then names itself."""
    path = tmp_path / "cut.xml"
    path.write_bytes(dump(*[("Quay", 0, "", QUAY)] * 200)[:-30_000])
    source = TextSource(TextConfig(name="test", source="text", paths=[str(path)])).documents()
    assert next(source).text.startswith("The quay")
    with pytest.raises(UserError, match=r"cut.xml: not a readable MediaWiki XML dump"):
        assert sum(1 for _ in source) > 100


def test_other_xml_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mwparserfromhell")
    (tmp_path / "a.xml").write_text("<rss><page/></rss>")
    with pytest.raises(
        UserError, match=r"a.xml: .*outermost element is <rss>, expected <mediawiki>"
    ):
        texts(tmp_path / "a.xml")


def warc(*contents: tuple[str, bytes]) -> bytes:
    """A WARC file of records of these kinds, each its own gzip member."""
    warcio = pytest.importorskip("warcio")
    buffer = io.BytesIO()
    writer = warcio.warcwriter.WARCWriter(buffer, gzip=True)
    for kind, content in contents:
        headers = (
            warcio.StatusAndHeaders("200 OK", [], protocol="HTTP/1.0")
            if kind == "response"
            else None
        )
        record = writer.create_warc_record(
            f"http://a/{kind}", kind, payload=io.BytesIO(content), http_headers=headers
        )
        writer.write_record(record)
    return buffer.getvalue()


def test_text_records_of_a_wet_file(tmp_path: Path) -> None:
    path = tmp_path / "crawl.warc.wet.gz"
    path.write_bytes(
        warc(("warcinfo", b"x"), ("conversion", "Grüße\nzwei".encode()), ("conversion", b"drei"))
    )
    assert texts(path) == ["Grüße\nzwei", "drei"]


def test_a_wet_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    """Without compression nothing else tells; behind a record's text stand two line ends."""
    (tmp_path / "crawl.wet").write_bytes(gzip.decompress(warc(("conversion", b"some text")))[:-8])
    with pytest.raises(
        UserError, match=r"crawl.wet: not a readable WET file: record 1 has 5 bytes of 9"
    ):
        texts(tmp_path / "crawl.wet")


def test_text_of_a_wet_file_that_is_not_utf8_is_named_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "crawl.wet.gz"
    path.write_bytes(
        warc(*(("conversion", content) for content in (b"one", "café".encode("latin-1"), b"three")))
    )
    with pytest.raises(
        UserError,
        match=r"crawl.wet.gz record 2: its text is not UTF-8 at byte 3; data.damaged=drop",
    ):
        texts(path)
    config = TextConfig(name="test", source="text", paths=[str(path)], damaged="drop")
    documents = list(TextSource(config).documents())
    assert [document.text for document in documents if not document.damage] == ["one", "three"]
    assert [document.damage for document in documents if document.damage] == [("not_utf8", 4)]


def test_web_pages_and_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pages.warc.gz").write_bytes(warc(("response", b"<p>")))
    with pytest.raises(
        UserError, match=r"pages.warc.gz: .*no text records \(it holds: response\); take .*WET"
    ):
        texts(tmp_path / "pages.warc.gz")
    (tmp_path / "other.wet.gz").write_bytes(gzip.compress(b"this is no such archive\n" * 10))
    with pytest.raises(UserError, match=r"other.wet.gz: not a readable WET"):
        texts(tmp_path / "other.wet.gz")
