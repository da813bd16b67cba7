"""Readers of files of records: JSON lines, CSV, TSV, parquet, and the extracted text of web crawls (WET).

Each is a generator of the records' texts, in bounded memory; every complaint names the file and the record.
"""

import csv
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from cramming.config import UserError, require
from data_prep.sources.compressed import COMPRESSIONS
from data_prep.sources.plain_text import TextFile

LONGEST_RECORD = 1 << 29  # bytes; a longer line cannot be meant
LONGEST_FIELD = 1 << 26  # characters; nor a longer field of CSV, which takes 4 bytes for each while it is read


def missing_field(place: str, field: str, present: Iterable[Any]) -> UserError:
    """The complaint about a record without `field`, naming the fields it has."""
    return UserError(f"{place}: no field {field!r}; there are: {', '.join(map(str, present))} (set data.text_field)")


def text_value(place: str, field: str, value: Any) -> str:
    """A record's text; null counts as empty text, which the filters remove and count."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{place}: field {field!r} holds {type(value).__name__}, expected text (set data.text_field)")
    return value


def _require_one(path: Path, field: str, columns: list[str]) -> None:
    if field not in columns:
        raise missing_field(str(path), field, columns)
    count = columns.count(field)
    require(count == 1, f"{path}: {count} columns are named {field!r}; rename all but the one with the text")


def read_jsonl(file: TextFile, field: str) -> Iterator[str]:
    """A JSON object per line."""
    for number, line in enumerate(file.lines(LONGEST_RECORD, records=True), 1):
        if not line.strip():
            continue
        place = f"{file.path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not a JSON object on one line ({error}){_as_lines(file.path, line)}") from None
        if not isinstance(record, dict):
            found = f"{type(record).__name__}{_as_lines(file.path, line)}"
            raise UserError(f"{place}: expected a JSON object, found {found}")
        if field not in record:
            raise missing_field(place, field, record)
        yield text_value(place, field, record[field])


def _as_lines(path: Path, line: str) -> str:
    """A hint where a file is JSON, but not one object per line: an array, or objects over many lines."""
    first = line.lstrip()
    if not first.startswith("[") and first.rstrip() != "{":
        return ""
    what, each = ("a JSON array", ".[]") if first.startswith("[") else ("JSON over many lines", ".")
    name = path.name if path.suffix.lower() not in COMPRESSIONS else path.stem
    return f"; {what} is turned into such lines by `jq -c '{each}' {name} > {Path(name).stem}.jsonl`"


def _read_delimited(file: TextFile, field: str, delimiter: str, quoting: Any) -> Iterator[str]:
    csv.field_size_limit(LONGEST_FIELD)
    lines = (line + "\n" for line in file.lines(LONGEST_RECORD, records=True))
    rows = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    begin = 1  # the line where the row begins that is being read
    try:
        header = next(rows)
        begin = rows.line_num + 1
        _require_one(file.path, field, header)
        column = header.index(field)
        for row in rows:
            if row:
                if len(row) != len(header):
                    raise UserError(f"{file.path}:{rows.line_num}: {len(row)} columns, the header has {len(header)}")
                yield row[column]
            begin = rows.line_num + 1
    except csv.Error as error:
        hint = f" (its row begins in line {begin}: is a quote left open there?)" if rows.line_num > begin else ""
        raise UserError(f"{file.path}:{rows.line_num}: {error}{hint}") from None


read_csv = partial(_read_delimited, delimiter=",", quoting=csv.QUOTE_MINIMAL)
read_tsv = partial(_read_delimited, delimiter="\t", quoting=csv.QUOTE_NONE)


def read_parquet(file: TextFile, field: str) -> Iterator[str]:
    """A column of a parquet file, in row groups' batches."""
    import pyarrow
    from pyarrow import parquet

    with file.decompressed() as handle, tempfile.TemporaryFile() as spool:
        seekable: Any = handle
        if handle is not file.raw:  # parquet needs to seek: unpack to an anonymous file that vanishes by itself
            shutil.copyfileobj(handle, spool)
            seekable = spool
        try:
            table = parquet.ParquetFile(seekable, page_checksum_verification=True)
            _require_one(file.path, field, table.schema_arrow.names)
            row = 0
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                for value in _column_values(file, batch.column(0), field, row):
                    row += 1
                    yield text_value(f"{file.path} row {row}", field, value)
        except pyarrow.ArrowException as error:
            words = str(error).splitlines()[0]
            raise UserError(f"{file.path}: not a readable parquet file: {words}; is it whole? get it anew") from None


def _column_values(file: TextFile, column: Any, field: str, before: int) -> list[Any]:
    """The column's values. Text in it need not be UTF-8: writers do not check. `before`: rows in front of them."""
    import pyarrow

    try:
        return cast(list[Any], column.to_pylist())
    except UnicodeDecodeError:
        values = column.cast(pyarrow.large_binary()).to_pylist()
    return [
        None if value is None else _decode(file, value, f"row {row}: field {field!r}")
        for row, value in enumerate(values, before + 1)
    ]


def _decode(file: TextFile, value: bytes, place: str) -> str:
    return file.decode(value, lambda start: f" {place} is not UTF-8 at byte {start}")


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
                    yield _decode(file, _wet_content(file, record, number), f"record {number}: its text")
        except ArchiveLoadFailed as error:
            raise UserError(f"{file.path}: not a readable WARC file: {' '.join(str(error).split())}") from None
    held = ", ".join(sorted(kinds)) or "nothing"
    require(
        "conversion" in kinds,
        f"{file.path}: no text records (it holds: {held}); take the crawl's WET files, which hold text",
    )


def _wet_content(file: TextFile, record: Any, number: int) -> bytes:
    content: bytes = record.content_stream().read()
    # Only a compressed file tells by itself that it was cut off.
    if record.length is not None and len(content) != record.length:
        place, found = f"{file.path} record {number}", f"{len(content)} bytes of the {record.length} in its header"
        raise UserError(f"{place}: has {found}; is the file whole? get it anew")
    return content
