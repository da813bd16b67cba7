"""Files of programs that people use: each program writes the same texts, and they are read as they were."""

import gzip
import importlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import datasets
import pandas
import pyarrow
import pytest

from data_prep.readers.files import TextConfig, TextSource

Text = str | None
TEXTS: list[Text] = [
    'A plain line, with "quotes" and a comma.',
    "Two lines:\nand Grüße, 東京 😀",
    None,
    "tab\tand 'apostrophe' \\n that is no line end; {braces} <tags>",
    "last",
]
WRITTEN = [text for text in TEXTS if text is not None]
Settings = dict[str, Any]
Produce = Callable[[Path], Settings]  # writes files into a folder, and says how they are read


def datatrove(writer: str, folder: Path) -> Settings:
    writers = pytest.importorskip("datatrove.pipeline.writers")
    data = importlib.import_module("datatrove.data")
    try:
        with getattr(writers, writer)(str(folder)) as opened:
            for number, text in enumerate(WRITTEN):
                metadata = {"url": "http://a", "nested": {"n": number}}
                document = data.Document(text=text, id=str(number), metadata=metadata)
                opened.write(document, rank=number % 2)
    except ImportError as error:
        pytest.skip(str(error))
    return {}


def dolma(folder: Path) -> Settings:
    with gzip.open(folder / "a.json.gz", "wt", encoding="utf-8") as file:
        for number, text in enumerate(WRITTEN):
            row = {"id": f"{number}", "text": text, "source": "s", "metadata": {"url": "http://a"}}
            file.write(json.dumps({**row, "added": "2024-01-01", "created": None}) + "\n")
    return {}


def wet(folder: Path) -> Settings:
    pytest.importorskip("warcio")
    from warcio.warcwriter import WARCWriter

    with (folder / "a.warc.wet.gz").open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        writer.write_record(writer.create_warcinfo_record("a", {"software": "test"}))
        for text in WRITTEN:
            content = io.BytesIO(text.encode())
            record = writer.create_warc_record(
                "http://a", "conversion", payload=content, warc_content_type="text/plain"
            )
            writer.write_record(record)
    return {}


PAGE = """  <page>
    <title>Title</title>
    <ns>0</ns>
    <id>{number}</id>
    <revision>
      <id>1{number}</id>
      <text xml:space="preserve">{text}</text>
    </revision>
  </page>
"""
DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en">
  <siteinfo>
    <base>https://en.wikipedia.org/wiki/Main_Page</base>
    <namespaces>
      <namespace key="10" case="first-letter">Template</namespace>
    </namespaces>
  </siteinfo>
{pages}</mediawiki>
"""


def wikiextractor(options: list[str], settings: Settings, folder: Path) -> Settings:
    pytest.importorskip("wikiextractor")
    pages = [PAGE.format(number=n, text=escape(text)) for n, text in enumerate(WIKITEXTS)]
    dump = folder / "dump.xml"
    dump.write_text(DUMP.format(pages="".join(pages)), encoding="utf-8")
    command = [sys.executable, "-m", "wikiextractor.WikiExtractor", str(dump), "--no-templates"]
    command += ["--processes", "1", "-o", str(folder / "out"), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    dump.unlink()
    return settings


def wikiextractor_format(layout: str, settings: Settings, folder: Path) -> Settings:
    """Write what version 3 of the program writes."""
    (folder / "AA").mkdir()
    rows: list[str] = []
    for number, text in enumerate(WRITTEN):
        url = f"https://en.wikipedia.org/wiki?curid={number}"
        row = {"id": f"{number}", "revid": "1", "url": url, "title": "Title", "text": text}
        article = f'<doc id="{number}" url="{url}" title="Title">\nTitle\n\n{text}\n\n</doc>'
        rows.append(article if layout == "text" else json.dumps(row))
    (folder / "AA" / "wiki_00").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return settings


STRING_TYPES: dict[str, Any] = {
    "object": object,
    "str": "str",
    "string": "string",
    "string[python]": "string[python]",
    "string[pyarrow]": "string[pyarrow]",
    "category": "category",
    "large_string": pandas.ArrowDtype(pyarrow.large_string()),
    "string_view": pandas.ArrowDtype(pyarrow.string_view()),
}


def frame(string_type: str) -> pandas.DataFrame:
    texts = pandas.Series(TEXTS, dtype=STRING_TYPES[string_type])
    return pandas.DataFrame({"number": range(len(TEXTS)), "text": texts})


def pandas_parquet(string_type: str, folder: Path) -> Settings:
    frame(string_type).to_parquet(folder / "a.parquet")
    return {}


def pandas_feather(folder: Path) -> Settings:
    frame("string").to_feather(folder / "a.feather")
    return {}


def pandas_csv(options: Settings, name: str, folder: Path) -> Settings:
    frame("string").to_csv(folder / name, **options)
    return {}


def pandas_json(folder: Path) -> Settings:
    frame("string").to_json(folder / "a.jsonl.zst", orient="records", lines=True)
    return {}


def pandas_nested(folder: Path) -> Settings:
    table = frame("object").assign(document=[{"text": text, "n": 1} for text in TEXTS])
    table.drop(columns="text").to_parquet(folder / "a.parquet")
    return {"text_field": "document.text"}


def of_datasets(method: str, name: str, folder: Path) -> Settings:
    getattr(datasets.Dataset.from_dict({"text": TEXTS}), method)(folder / name)
    return {}


WIKI_SETTINGS: Settings = {"format": "jsonl"}
PRODUCERS: dict[str, Produce] = {
    "datatrove JSON lines": partial(datatrove, "JsonlWriter"),
    "datatrove parquet": partial(datatrove, "ParquetWriter"),
    "dolma": dolma,
    "WET of warcio": wet,
    "WikiExtractor's JSON as documented": partial(wikiextractor_format, "json", WIKI_SETTINGS),
    **{f"pandas parquet {name}": partial(pandas_parquet, name) for name in STRING_TYPES},
    "pandas parquet of objects": pandas_nested,
    "pandas feather": pandas_feather,
    "pandas CSV": partial(pandas_csv, {}, "a.csv"),
    "pandas CSV quoted": partial(pandas_csv, {"quoting": 1, "index": False}, "a.csv.gz"),
    "pandas JSON lines": pandas_json,
    "datasets JSON lines": partial(of_datasets, "to_json", "a.jsonl"),
    "datasets CSV": partial(of_datasets, "to_csv", "a.csv"),
    "datasets parquet": partial(of_datasets, "to_parquet", "a.parquet"),
    "datasets save_to_disk": partial(of_datasets, "save_to_disk", "a.arrow"),
}


def read(folder: Path, settings: Settings) -> list[Text]:
    """The texts of all tasks; None for a null."""
    pattern = "**/*.arrow" if list(folder.glob("**/*.arrow")) else "**/*.*"
    files = list(folder.glob("**/wiki_*"))
    paths = list(map(str, files)) or [str(folder / pattern)]
    source = TextSource(TextConfig(name="t", source="text", paths=paths, **settings))
    documents = [document for task in source.tasks() for document in task.documents()]
    assert {document.damage for document in documents} <= {None, ("null", 0)}
    return [None if document.damage else document.text.rstrip("\n") for document in documents]


@pytest.mark.parametrize("name", PRODUCERS)
def test_what_a_program_wrote_is_read_as_it_was(tmp_path: Path, name: str) -> None:
    texts = read(tmp_path, PRODUCERS[name](tmp_path))
    expected = TEXTS if name.startswith(("pandas", "datasets")) else WRITTEN
    assert sorted(map(str, texts)) == sorted(map(str, expected))


WIKITEXTS = ["A '''quay''' is a place.\n\nIt has \"stones\" & Grüße.", "A [[rope]] is yarn, 東京."]
ARTICLES = ['A quay is a place.\nIt has "stones" & Grüße.', "A rope is yarn, 東京."]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], {}),
        (["--json", "--html-safe", ""], {"format": "jsonl", "text_field": ["title", "text"]}),
    ],
)
def test_articles_of_wikiextractor_are_read_from_its_text_and_its_json(
    tmp_path: Path, options: list[str], settings: Settings
) -> None:
    texts = read(tmp_path, wikiextractor(options, settings, tmp_path))
    assert texts == [f"Title\n\n{article}" for article in ARTICLES]


@pytest.mark.parametrize("layout", ["text", "json"])
def test_articles_are_whole_in_the_documented_formats(tmp_path: Path, layout: str) -> None:
    fields = {"format": "jsonl", "text_field": ["title", "text"]} if layout == "json" else {}
    texts = read(tmp_path, wikiextractor_format(layout, fields, tmp_path))
    assert texts == [f"Title\n\n{text}" for text in WRITTEN]
