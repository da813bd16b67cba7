"""Wikipedia's XML dumps and WET files, made here: pages come out as plain text, everything else does not."""

import bz2
import gzip
import io
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cramming.config import UserError
from cramming.data.corpus import Corpus
from data_prep.readers.files import TextConfig, TextSource
from data_prep.readers.wikipedia import TABLES, plain_text, templates_of

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
    assert plain_text(wikitext, "en", Counter()) == text


BORN = "'''Jeanne Roy''', née le {{date de naissance|1|janvier|1900}} à [[Lyon]] (prononcé {{API|ʒan}}), est peintre."
CENTURIES = "au {{s|XIX}}, au {{s-|XVIII|e}} et au {{IVe siècle}}; {{sp|XV|e|au|XVI|e}}, {{-s|II}}"
RUSSIAN = "{{s|в 1900 году}}, {{на|29|4|2020}} {{не переведено 5|Ада|Аде|en|Ada}}"


INNERMOST = re.compile(r"\{\{([^{}]*)\}\}")


def lost_in_sentences(text: str) -> int:
    """Return by the definition how many templates without text have words in front of them on their line."""
    lost = 0
    while True:
        for template in INNERMOST.finditer(text):
            before = text[: template.start()].rpartition("\n")[2]
            before = INNERMOST.sub("", before)
            in_other = before.count("{{") > before.count("}}")
            lost += not in_other and before[:1] not in "|!{" and any(map(str.isalpha, before))
        text, count = INNERMOST.subn("", text)
        if not count:
            return lost


def test_templates_of_a_line_are_in_a_sentence_by_what_stands_in_front() -> None:
    draw = random.Random(1)
    totals = set[int]()
    for _ in range(3000):
        text = "".join(draw.choices(["{{", "}}", "{", "}", "{{x}}", "a", " ", "|", "\n"], k=30))
        lost = Counter[str]()
        templates_of("en").expand(text, lost)
        assert lost.total() == lost_in_sentences(text), text
        totals.add(lost.total())
    assert totals > {0, 1, 2, 3}


def test_a_long_line_of_templates_is_read_in_linear_time() -> None:
    """Reading the line up to each template would take minutes."""
    count, lost = 100_000, Counter[str]()
    started = time.process_time()
    templates_of("en").expand("a{{unknown}}" * count, lost)
    assert lost == {"unknown": count}
    assert time.process_time() - started < 30


@pytest.mark.parametrize(
    ("language", "wikitext", "text"),
    [
        ("fr", BORN, "Jeanne Roy, née le 1er janvier 1900 à Lyon, est peintre."),
        ("fr", "le {{date|14 juillet 1789}}, {{date-||mai|1968}}", "le 14 juillet 1789, mai 1968"),
        (
            "fr",
            CENTURIES,
            "au XIXe siècle, au XVIIIe siècle et au IVe siècle; XVe siècle au XVIe siècle, IIe siècle av. J.-C.",
        ),
        (
            "fr",
            "{{Unité|100|km}}, {{1er}} à {{heure|20|30}}, {{citation|Oui}}",
            "100 km, 1er à 20 h 30, « Oui »",
        ),
        (
            "fr",
            "{{nombre|3000|soldats}} de {{souverain-|Louis XIV}}, {{numéro|5}}",
            "3000 soldats de Louis XIV, n° 5",
        ),
        ("fr", "{{lien|Ada Roy|lang=en|trad=A|texte=Ada}} et {{langue|en|law}}", "Ada et law"),
        (
            "fr",
            "fait{{référence nécessaire|date=mai 2010}} et{{sfn|Roy|1990|p=3}} vu",
            "fait et vu",
        ),
        ("de", '{{enS|Rome}}, {{Höhe|1234|DE-NHN}}, {{"|Ja}}', "Rome, 1234 m, „Ja“"),
        ("de", "nach {{§|12|stgb}} sind {{Formatnum:1234}} da", "nach § 12 sind 1234 da"),
        (
            "de",
            "Bad ({{IPA|baːt}}) und Au (Aussprache: {{Lautschrift|aʊ}}) sind",
            "Bad und Au sind",
        ),
        ("de", "Bad ({{IPA|baːt}}, geboren 1900) und Au", "Bad (geboren 1900) und Au"),
        (
            "es",
            "el {{fecha|1900|1|5}}, {{siglo|XVI||s}} y {{siglo|I|a|s}}",
            "el 5 de enero de 1900, siglo XVI y siglo I a. C.",
        ),
        ("it", "nel {{Data|1|5|1900}} per {{M|12|ul=km}}", "nel 1º maggio 1900 per 12 km"),
        ("nl", "op {{unité|3|km}} in {{lang|en|Leeds}}", "op 3 km in Leeds"),
        ("pt", "em {{dtlink|5|1|1900}}, {{séc|XIX}}", "em 5 de janeiro de 1900, século XIX"),
        ("ru", RUSSIAN, "в 1900 году, на 29 апреля 2020 года Аде"),
        (
            "ru",
            "род. {{ДатаРождения|5|3|1950}}, {{Флагификация|Франция}}: {{цитата|Да}}",
            "род. 5 марта 1950, Франция: Да",
        ),
        ("ja", "{{仮リンク|艾達|en|Ada|label=エイダ}}は{{要出典|}}。", "エイダは。"),
        (
            "en",
            "born {{birth date|1900|01|05}} ({{dob|1900|1|5|df=y}}), {{bda|1900}}",
            "born January 5, 1900 (5 January 1900), 1900",
        ),
        (
            "en",
            "{{OldStyleDate|12 June|1700|1 June}} aboard {{HMS|Hood|51}}",
            "12 June 1700 (O.S. 1 June) aboard HMS Hood (51)",
        ),
        ("xx", "{{lang|fr|la ville}} {{convert|5|km}}", "la ville 5 km"),
    ],
)
def test_templates_of_each_language_are_text_and_none_is_lost(
    language: str, wikitext: str, text: str
) -> None:
    pytest.importorskip("mwparserfromhell")
    lost = Counter[str]()
    assert plain_text(wikitext, language, lost) == text
    assert not lost


def test_patterns_name_what_a_template_may_have() -> None:
    """Every field of the table can be filled by some parameter, and no name stands twice in a language."""
    tables = yaml.safe_load(TABLES.read_text(encoding="utf-8"))
    known = re.compile(r"-?\d|\*|name|quantity|fraction|lt|texte|fr|u|ul|um|label|текст|надо")
    for patterns in tables["templates"].values():
        names = [name for names in patterns for name in names.split(" / ")]
        assert len(names) == len(set(names)) and all(name == name.lower() for name in names)
        for pattern in patterns.values():
            for field in re.findall(r"\{([^{}]+)\}", pattern):
                kind, _, parameters = field.rpartition(":")
                assert kind in ("", *tables["values"]), field
                assert all(map(known.fullmatch, parameters.split("|"))), field
    months = tables["values"]["month"]
    assert {len(names) for names in months.values()} == {12}
    assert set(months) == set(tables["templates"]) - {"any"}


@pytest.mark.parametrize(
    "rest", ["", "|", "||", "|x=y", "|1=|2=", "|df=y", "|{{c.}}|to", "|[[a|b]]"]
)
def test_templates_may_lack_any_parameter(rest: str) -> None:
    pytest.importorskip("mwparserfromhell")
    for patterns in yaml.safe_load(TABLES.read_text(encoding="utf-8"))["templates"].values():
        for name in " / ".join(patterns).split(" / "):
            assert "{{" not in plain_text(f"A {{{{{name}{rest}}}}}.", "en", Counter())


LOST = """{{Infobox|born={{age|1900}}}}
{| class="x"
| {{cell}}
|}
She was {{age|1900}} when {{Age|1900|2}} ended,{{cn}} at {{height|m=1.7}}.<ref>{{cite book|x}}</ref>
{{Navbox}}
"""


def test_templates_without_text_are_counted_on_the_card(
    tmp_path: Path, text_config: Callable[..., Any], run: Callable[..., Corpus], made_up: Any
) -> None:
    pytest.importorskip("mwparserfromhell")
    pages = [("A", 0, "", f"{LOST}\n{text}") for text in made_up(6)]
    (tmp_path / "a.xml").write_bytes(dump(*pages))
    after_template = "{{Flag|x}} Of {{age|1}} years.\n"
    (tmp_path / "b.xml").write_bytes(dump(("B", 0, "", after_template + made_up(1, 1)[0])))
    corpus = run(text_config(tmp_path / "*.xml"))
    source = corpus.manifest.stages[0]
    assert source.notes["templates_without_text"] == {"age": 13, "height": 6}
    card = (corpus.folder / "corpus_card.md").read_text(encoding="utf-8")
    assert "templates_without_text 13 age, 6 height" in card


def test_a_footnote_takes_no_text_with_it() -> None:
    pytest.importorskip("mwparserfromhell")
    named = ('<ref name="BBC/2005" />', "<ref name=a/b/>")
    for note in (*named, "<ref>b</ref >", "<ref name='x'>See <i>a</i> / b.</ref>"):
        text = f"A river.{note}\n== History ==\nOld.<ref name='y'>Smith</ref> Very."
        assert plain_text(text, "en", Counter()) == "A river.\nHistory\nOld. Very.", note
    opened = "A river.<ref>open\n== History ==\nOld.<ref>Smith</ref> Very."
    assert "Old." in plain_text(opened, "en", Counter())


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
