"""Readers of files of records: JSON lines, CSV, TSV, parquet, Arrow, and the extracted text of web crawls (WET).

Each is a generator of the records' texts, in bounded memory; every complaint names the file and the record. In TSV
quote characters are text, as in GLUE's files, so a field holds neither a tab nor a line break.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

from cramming.config import UserError
from data_prep.readers.plain_text import TextFile

LONGEST_RECORD = 1 << 29  # bytes; a longer line cannot be meant
BY_LINES = "turn other JSON into lines by `jq -c '.[]'`"
CHECKED_RECORDS = 100  # at the beginning of a file, one of which must have each field
_MISSING, _NO_OBJECT = object(), object()
BATCH_ROWS = 256
LONGEST_FIELD = (
    1 << 26
)  # characters; nor a longer field of CSV, which takes 4 bytes for each while it is read


def record_texts(
    records: Iterable[tuple[str, Any]], fields: Sequence[str], begins: bool = True
) -> Iterator[str | None]:
    """Yield the text of each of these records, which come with their places; None where all fields are null.

    `begins`: whether the first is the file's first. UserError: a value is no text, or the first records lack a field.
    """
    sought = list(fields) if begins else []
    lacking = dict[str, Any]()  # fields that no record has so far, with one that lacks it
    number, place = 0, ""
    for number, (place, record) in enumerate(records, 1):
        yield _text_of(place, fields, record)
        for name in tuple(sought):
            value = _value_of(record, name)
            if value is _MISSING:
                lacking[name] = record
            elif value is not _NO_OBJECT:
                sought.remove(name)
                lacking.pop(name, None)
        if number == CHECKED_RECORDS:
            _require_none(lacking, place, number)
    _require_none(lacking, place, number)


def _text_of(place: str, fields: Sequence[str], record: Any) -> str | None:
    """Return the fields' texts with a blank line between; a record that is no object is a text itself."""
    texts: list[str] = []
    for name in fields if isinstance(record, dict) else fields[:1]:
        value = _value_of(record, name)
        if value is None or value is _MISSING or value is _NO_OBJECT:
            continue
        if not isinstance(value, str):
            kind = type(value).__name__
            shown = f"fields {_shown(_names_in(value))}" if isinstance(value, dict) else kind
            cure = "set data.text_field"
            if isinstance(value, list):
                cure = BY_LINES if isinstance(record, list) else "make it one text"
            raise UserError(f"{place}: no text in field {name!r} of a record, but {shown} ({cure})")
        texts.append(value)
    return "\n\n".join(texts) if texts else None


def _value_of(record: Any, name: str) -> Any:
    """Return the value of a field; a name with dots that no field has leads into objects.

    `_MISSING` where there is no such field, `_NO_OBJECT` where the object that may have it is null.
    """
    if not isinstance(record, dict):
        return record
    if name in record:
        return record[name]
    outer, _, inner = name.partition(".")
    if not inner or outer not in record:
        return _MISSING
    if record[outer] is None:
        return _NO_OBJECT
    return _value_of(record[outer], inner) if isinstance(record[outer], dict) else _MISSING


def _names_in(record: Any, outer: str = "") -> Iterator[str]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _names_in(value, f"{outer}{name}.")
        else:
            yield f"{outer}{name} (list)" if isinstance(value, list) else f"{outer}{name}"


def _require_none(lacking: Mapping[str, Any], place: str, number: int) -> None:
    for name, record in lacking.items():
        raise UserError(
            f"{place}: no text in field {name!r} of the first records ({number}), but fields"
            f" {_shown(_names_in(record))} (set data.text_field)"
        )


def _shown(columns: Iterable[Any]) -> str:
    """Return names of fields for a message: of a file without a header they are a whole record."""
    names = ", ".join(map(str, columns))
    return names if len(names) <= 200 else f"{names[:200]} ..."


def _column(place: object, field: str, columns: Iterable[str], hint: str = "") -> int:
    """Return the place of the only column of this name."""
    columns = list(columns)
    if columns.count(field) != 1:
        raise UserError(
            f"{place}: not one column {field!r} among {_shown(columns)} (set data.text_field{hint})"
        )
    return columns.index(field)


def read_jsonl(file: TextFile, fields: Sequence[str]) -> Iterator[str | None]:
    """Yield the texts of a JSON object per line."""
    return record_texts(_json_records(file), fields, file.begins)


def _json_records(file: TextFile) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file.lines(LONGEST_RECORD), 1):
        if line.strip():
            place = f"{file.path}:{number}"
            try:
                record = json.loads(line, strict=not file.lenient)  # a NUL byte costs its record
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{place}: not a JSON object on one line ({error}); {BY_LINES}"
                ) from None
            yield place, record


def _read_delimited(
    file: TextFile, fields: Sequence[str], delimiter: str, quoting: Any
) -> Iterator[str | None]:
    """Yield the rows' texts; an empty cell is null."""
    return record_texts(_rows(file, fields, delimiter, quoting), fields)


def _rows(
    file: TextFile, fields: Sequence[str], delimiter: str, quoting: Any
) -> Iterator[tuple[str, dict[str, str | None]]]:
    csv.field_size_limit(LONGEST_FIELD)
    lines = (line + "\n" for line in file.lines(LONGEST_RECORD))
    rows = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    begin = 1  # the line where the row begins that is being read
    row = before = list[str]()
    try:
        header = next(rows)
        begin = rows.line_num + 1
        hint = "; join the parts of a file that was split: one has the header"
        if len(header) == 1 and ";" in header[0]:
            hint = "; write it with commas, not with semicolons"
        columns = [(name, _column(file.path, name, header, hint)) for name in fields]
        for row in filter(None, rows):
            if len(row) != len(header):
                raise csv.Error(f"{len(row)} columns, the header has {len(header)}")
            yield (
                f"{file.path}:{rows.line_num}",
                {name: row[column] or None for name, column in columns},
            )
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


def read_parquet(file: TextFile, fields: Sequence[str]) -> Iterator[str | None]:
    """Yield the texts of a parquet file, in row groups' batches.

    A compressed file is unpacked in memory: parquet seeks.
    """
    from pyarrow import parquet

    with file.decompressed() as handle, _names_arrow_errors(file, "parquet"):
        table = parquet.ParquetFile(_seekable(handle, file), page_checksum_verification=True)
        columns = _columns(file, fields, table.schema_arrow.names)
        batches = table.iter_batches(batch_size=BATCH_ROWS, columns=columns)
        yield from record_texts(_batch_records(file, batches), fields)


def read_arrow(file: TextFile, fields: Sequence[str]) -> Iterator[str | None]:
    """Yield the texts of an Arrow file (Feather) or an Arrow stream, as `save_to_disk` of `datasets` writes it."""
    from pyarrow import ipc

    with file.decompressed() as handle, _names_arrow_errors(file, "Arrow"):
        if handle.peek(6).startswith(b"ARROW1"):  # type: ignore[attr-defined]
            table = ipc.open_file(_seekable(handle, file))
            batches = map(table.get_batch, range(table.num_record_batches))
        else:
            batches = table = ipc.open_stream(handle)
        columns = _columns(file, fields, table.schema.names)
        chosen = (batch.select(columns) for batch in batches)
        yield from record_texts(_batch_records(file, chosen), fields)


def _seekable(handle: BinaryIO, file: TextFile) -> Any:
    return handle if handle is file.raw else io.BytesIO(handle.read())


def _columns(file: TextFile, fields: Sequence[str], names: list[str]) -> list[str]:
    """Return the columns that hold the fields."""
    columns: list[str] = []
    for name in fields:
        outer = name.partition(".")[0]
        column = outer if outer in names and name not in names else name
        _column(file.path, column, names)
        columns.append(column)
    return list(dict.fromkeys(columns))


def _batch_records(file: TextFile, batches: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    row = 0
    for batch in batches:
        for record in batch.to_pylist():
            row += 1
            yield f"{file.path} row {row}", record


@contextmanager
def _names_arrow_errors(file: TextFile, kind: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        words = str(error).splitlines()[0]
        raise UserError(
            f"{file.path}: not a readable {kind} file: {words}; is it whole? get it anew"
        ) from None


def read_wet(file: TextFile, fields: Sequence[str]) -> Iterator[str]:
    """Yield the text records of a WET file.

    UserError for a file of web pages (HTML is not turned into text here) or one that was cut off, and for text that is
    not UTF-8.
    """
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
