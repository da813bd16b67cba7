"""Readers of files of records: JSON lines, CSV, TSV, parquet, and the extracted text of web crawls (WET).

Each is a generator of the records' texts, in bounded memory; every complaint names the file and the record. In TSV
quote characters are text, as in GLUE's files, so a field holds neither a tab nor a line break.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from cramming.config import UserError
from data_prep.readers.plain_text import TextFile

LONGEST_RECORD = 1 << 29  # bytes; a longer line cannot be meant
BY_LINES = "turn other JSON into lines by `jq -c '.[]'`"
LONGEST_FIELD = (
    1 << 26
)  # characters; nor a longer field of CSV, which takes 4 bytes for each while it is read


def record_text(place: str, field: str, record: Any) -> str:
    """The text of a record; null is empty text, which the filters remove and count. UserError: no text there."""
    value = record.get(field, record) if isinstance(record, dict) else record
    if value is None:
        return ""
    if not isinstance(value, str):
        found = f"fields {_shown(value)}" if isinstance(value, dict) else type(value).__name__
        cure = BY_LINES if isinstance(record, list) else "set data.text_field"
        raise UserError(f"{place}: no text in field {field!r} of a record, but {found} ({cure})")
    return value


def _shown(columns: Iterable[Any]) -> str:
    """Names of fields for a message: of a file without a header they are a whole record."""
    names = ", ".join(map(str, columns))
    return names if len(names) <= 200 else f"{names[:200]} ..."


def _column(place: object, field: str, columns: Iterable[str], hint: str = "") -> int:
    """The place of the only column of this name."""
    columns = list(columns)
    if columns.count(field) != 1:
        raise UserError(
            f"{place}: not one column {field!r} among {_shown(columns)} (set data.text_field{hint})"
        )
    return columns.index(field)


def read_jsonl(file: TextFile, field: str) -> Iterator[str]:
    """A JSON object per line."""
    for number, line in enumerate(file.lines(LONGEST_RECORD), 1):
        if line.strip():
            place = f"{file.path}:{number}"
            try:
                record = json.loads(line, strict=not file.lenient)  # a NUL byte costs its record
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{place}: not a JSON object on one line ({error}); {BY_LINES}"
                ) from None
            yield record_text(place, field, record)


def _read_delimited(file: TextFile, field: str, delimiter: str, quoting: Any) -> Iterator[str]:
    csv.field_size_limit(LONGEST_FIELD)
    lines = (line + "\n" for line in file.lines(LONGEST_RECORD))
    rows = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    begin = 1  # the line where the row begins that is being read
    row = before = list[str]()
    try:
        header = next(rows)
        begin = rows.line_num + 1
        column = _column(
            file.path,
            field,
            header,
            "; join the parts of a file that was split: one has the header",
        )
        for row in filter(None, rows):
            if len(row) != len(header):
                raise csv.Error(f"{len(row)} columns, the header has {len(header)}")
            yield row[column]
            begin, before = rows.line_num + 1, row
    except csv.Error as error:
        hint = (
            f" (its row begins in line {begin}: is a quote left open there?)"
            if rows.line_num > begin
            else ""
        )
        if quoting == csv.QUOTE_NONE and any(
            text[:1] == '"' and text.count('"') % 2 for text in (*before, *row)
        ):
            hint = " (a quoted field with a line break? in TSV quotes are text and a line is a row: write it as CSV)"
        raise UserError(f"{file.path}:{rows.line_num}: {error}{hint}") from None


read_csv = partial(_read_delimited, delimiter=",", quoting=csv.QUOTE_MINIMAL)
read_tsv = partial(_read_delimited, delimiter="\t", quoting=csv.QUOTE_NONE)


def read_parquet(file: TextFile, field: str) -> Iterator[str]:
    """A column of a parquet file, in row groups' batches. A compressed file is unpacked in memory: parquet seeks."""
    import pyarrow
    from pyarrow import parquet

    with file.decompressed() as handle:
        seekable: Any = handle if handle is file.raw else io.BytesIO(handle.read())
        try:
            table = parquet.ParquetFile(seekable, page_checksum_verification=True)
            _column(file.path, field, table.schema_arrow.names)
            row = 0
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield record_text(f"{file.path} row {row}", field, {field: value})
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            words = str(error).splitlines()[0]
            raise UserError(
                f"{file.path}: not a readable parquet file: {words}; is it whole? get it anew"
            ) from None


def read_wet(file: TextFile, field: str) -> Iterator[str]:
    """The text records of a WET file. UserError for one of web pages (HTML is not turned into text here), one that was
    cut off, text that is not UTF-8."""
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    kinds: set[str] = set()
    with file.decompressed() as handle:
        try:
            for number, record in enumerate(ArchiveIterator(handle), 1):
                kinds.add(record.rec_type)
                if record.rec_type == "conversion":
                    content: bytes = record.content_stream().read()
                    if record.length not in (
                        None,
                        len(content),
                    ):  # only gzip tells by itself that it was cut off
                        raise ArchiveLoadFailed(
                            f"record {number} has {len(content)} bytes of {record.length}"
                        )
                    where = f" record {number}: its text is not UTF-8 at byte "
                    yield file.decode(content, lambda start, where=where: f"{where}{start}")  # type: ignore[misc]
            if "conversion" not in kinds:
                held = ", ".join(sorted(kinds)) or "nothing"
                raise ArchiveLoadFailed(
                    f"no text records (it holds: {held}); take the crawl's WET files"
                )
        except ArchiveLoadFailed as error:
            raise UserError(
                f"{file.path}: not a readable WET file: {' '.join(str(error).split())}"
            ) from None
