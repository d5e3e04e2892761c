"""Rows of files: JSON lines, JSON arrays, Parquet, CSV and TSV, saved Hugging Face data sets.

Each reader yields a `Row` or, where a record is none, a `Fault` with its number and reason. Rows stream: memory is bounded by
`max_row_bytes` and a batch, whatever the size of the file.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from puna.stages.reading.files import DAMAGE, suffix, unpacked
from puna.storage import PunaError

BATCH_ROWS = 1024
CHUNK_CHARACTERS = 1 << 18
FORMATS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv", ".arrow": "dataset",
}  # fmt: skip
COLUMNAR = ("parquet", "dataset", "hub")
"""Formats that give every row every field, absent ones as null."""
SIDECARS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")


class Row(NamedTuple):
    """A record: its number in the file (of the line in JSON lines), from 1, and its fields."""

    number: int
    fields: dict[str, Any]


class Fault(NamedTuple):
    """A record that is no row: its number, the field that is wrong (empty: the record), the rule, and words for a reader."""

    number: int
    field: str
    rule: str
    reason: str


class Unread(NamedTuple):
    """In place of a value that Python cannot hold: the rule, and words for a reader."""

    rule: str
    reason: str


UNREADABLE = (ValueError, OverflowError, KeyError)
"""Of bytes that are no text; of a date that is out of range; of a time zone that nobody knows."""


def format_of(name: str, head: bytes) -> str | None:
    """The format that a file's name tells, or else its first bytes; None where neither does."""
    known = FORMATS.get(suffix(name))
    if known is not None:
        return known
    if head.startswith(b"PAR1"):
        return "parquet"
    return "json" if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") else None


def read_rows(handle: BinaryIO, name: str, kind: str, max_row_bytes: int) -> Iterator[Row | Fault]:
    """The records of a file of the format `kind`, in order."""
    if kind == "parquet":
        yield from _parquet(handle, name)
    elif kind == "dataset":
        yield from _arrow(handle, name)
    elif kind in ("csv", "tsv"):
        yield from _checked(_csv(unpacked(handle, name), name, "\t" if kind == "tsv" else "", max_row_bytes))
    else:
        source = unpacked(handle, name)
        try:
            array = is_array(source)
        except DAMAGE as error:
            yield Fault(1, "", "truncated_file", f"the file cannot be unpacked: {error}")
            return
        yield from array_rows(source, max_row_bytes) if array else _checked(_lines(source, max_row_bytes))


def is_array(source: io.BufferedReader) -> bool:
    """Whether a file of JSON is one array, not an object a line."""
    return source.peek(1 << 12)[: 1 << 12].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def array_rows(source: io.BufferedReader, max_row_bytes: int) -> Iterator[Row | Fault]:
    """The objects of one JSON array, one after the other."""
    return _checked(_array(source, max_row_bytes))


def _checked(rows: Iterator[Row | Fault]) -> Iterator[Row | Fault]:
    """Rows whose text is Unicode; bytes that are none stand in the text as halves of surrogate pairs."""
    for row in rows:
        wrong = _broken(row.fields) if isinstance(row, Row) else None
        if wrong is None:
            yield row
        else:
            yield Fault(row.number, wrong, "invalid_utf8", "holds bytes or halves of surrogate pairs that are no Unicode text")


def _broken(fields: dict[str, Any]) -> str | None:
    """The first field whose text cannot be written as UTF-8."""
    return next((str(name).encode("utf-8", "replace").decode() for name, value in fields.items() if not _is_text(name, value)), None)


def _is_text(*values: Any) -> bool:
    for value in values:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                return False
        elif isinstance(value, dict):
            if not all(_is_text(k, v) for k, v in value.items()):
                return False
        elif isinstance(value, list) and not _is_text(*value):
            return False
    return True


def _object(number: int, value: Any) -> Row | Fault:
    if isinstance(value, dict):
        return Row(number, value)
    return Fault(number, "", "not_an_object", f"is a {type(value).__name__}, not an object with fields")


def next_line(source: io.BufferedReader, max_bytes: int) -> tuple[bytes, bool]:
    """The next line, and whether it is longer than `max_bytes`: then its beginning, and the rest is passed over."""
    line = rest = source.readline(max_bytes + 1)
    too_long = len(line) > max_bytes and not line.endswith(b"\n")
    while too_long and rest and not rest.endswith(b"\n"):
        rest = source.readline(max_bytes)
    return line, too_long


def _lines(source: io.BufferedReader, max_row_bytes: int) -> Iterator[Row | Fault]:
    """One object per line; blank lines do not count as rows."""
    number = 0
    while True:
        number += 1
        try:
            line, too_long = next_line(source, max_row_bytes)
        except DAMAGE as error:
            yield Fault(number, "", "truncated_file", f"the file cannot be read on from here: {error}")
            return
        if not line:
            return
        if too_long:
            yield Fault(number, "", "row_too_large", f"is longer than {max_row_bytes} bytes")
        elif line.strip():
            yield _parsed(number, line)


def _parsed(number: int, line: bytes) -> Row | Fault:
    try:
        return _object(number, json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")))
    except (ValueError, RecursionError) as error:
        return Fault(number, "", "invalid_json", f"is no JSON: {error}")


def _array(source: io.BufferedReader, max_row_bytes: int) -> Iterator[Row | Fault]:
    """The objects of one JSON array, one after the other. Nothing can be told apart behind a fault in it."""
    reader = codecs.getreader("utf-8-sig")(source, "surrogateescape")
    decoder, text, number, at_end = json.JSONDecoder(), "", 0, False
    opened = False
    while True:
        text = text.lstrip()
        if not opened and text:
            text, opened = text[1:].lstrip(), True
        elif number and text.startswith(","):
            text = text[1:].lstrip()
        if text.startswith("]"):
            rest = text[1:].strip()
            if rest:
                yield Fault(number + 1, "", "invalid_json", "text stands behind the end of the array")
            return
        value, length, error = None, 0, "the array does not end"
        if opened and text:
            try:
                value, length = decoder.raw_decode(text)
            except (ValueError, RecursionError) as failure:
                error = str(failure)
        # A number or name may go on in the next chunk: it is whole when something stands behind it.
        if length and (length < len(text) or at_end):
            number += 1
            yield _object(number, value)
            text = text[length:].lstrip()
            if text and text[0] not in ",]":
                yield Fault(number + 1, "", "invalid_json", "no comma stands between two rows; the rest of the file is not read")
                return
            if text:
                continue
        if at_end or len(text) > max_row_bytes:
            why = f"is longer than {max_row_bytes} bytes or no JSON" if not at_end else "is no JSON"
            yield Fault(number + 1, "", "invalid_json", f"{why} ({error}); the rest of the file is not read")
            return
        try:
            more = reader.read(max(CHUNK_CHARACTERS, len(text)))
        except DAMAGE as failure:
            yield Fault(number + 1, "", "truncated_file", f"the file cannot be read on from here: {failure}")
            return
        text, at_end = text + more, not more


def _csv(source: io.BufferedReader, name: str, delimiter: str, max_row_bytes: int) -> Iterator[Row | Fault]:
    """One row per record behind the line of names; every cell is text. `delimiter`: empty where the line of names tells it."""
    csv.field_size_limit(max_row_bytes)
    try:
        delimiter = delimiter or delimiter_of(source.peek(1 << 16))
    except DAMAGE as error:
        raise PunaError(f"{name}: its first line, the names of the columns, cannot be read ({error})") from error
    records = csv.reader(io.TextIOWrapper(source, "utf-8-sig", "surrogateescape", newline=""), delimiter=delimiter, strict=True)
    try:
        names = next(records, [])
    except (csv.Error, *DAMAGE) as error:
        raise PunaError(f"{name}: its first line, the names of the columns, cannot be read ({error})") from error
    if len(set(names)) < len(names) or (names and not all(names)):
        raise PunaError(f"{name}: its first line has to name every column, each once; it holds {', '.join(map(repr, names))}")
    number = 0
    while True:
        number += 1
        try:
            cells = next(records, None)
        except csv.Error as error:
            yield Fault(number, "", "invalid_csv", f"cannot be read: {error}")
            continue
        except DAMAGE as error:
            yield Fault(number, "", "truncated_file", f"the file cannot be read on from here: {error}")
            return
        if cells is None:
            return
        if not cells:
            number -= 1
        elif len(cells) != len(names):
            yield Fault(number, "", "invalid_csv", f"has {len(cells)} cells, the line of names has {len(names)}")
        else:
            yield Row(number, dict(zip(names, cells, strict=True)))


def delimiter_of(head: bytes) -> str:
    """What parts the names of columns in the beginning of a CSV file: the one of comma, semicolon, tab and bar that gives most names."""
    lines = io.StringIO(head.decode("utf-8-sig", "replace"), newline="")

    def names(delimiter: str) -> int:
        lines.seek(0)
        try:
            return len(next(csv.reader(lines, delimiter=delimiter), []))
        except csv.Error:
            return 0

    return max(",;\t|", key=names)


def _parquet(handle: BinaryIO, name: str) -> Iterator[Row | Fault]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(handle).iter_batches(batch_size=BATCH_ROWS):
            yield from _batch(batch, number)
            number += batch.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise PunaError(f"{name}, after row {number}: not a readable Parquet file ({error})") from error


def _arrow(handle: BinaryIO, name: str) -> Iterator[Row | Fault]:
    import pyarrow as pa

    number = 0
    try:
        for batch in pa.ipc.open_stream(handle):
            yield from _batch(batch, number)
            number += batch.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise PunaError(f"{name}, after row {number}: not a readable Arrow file of a saved data set ({error})") from error


def _batch(batch: Any, before: int) -> Iterator[Row | Fault]:
    for number, fields in enumerate(records(batch), before + 1):
        wrong = next(((name, value) for name, value in fields.items() if isinstance(value, Unread)), None)
        yield Row(number, fields) if wrong is None else Fault(number, wrong[0], *wrong[1])


def records(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch of Arrow's, of `values`."""
    columns = [values(column) for column in batch.columns]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def values(column: Any) -> list[Any]:
    """The values of an array of Arrow's; one that Python cannot hold is `Unread`."""
    import pyarrow as pa

    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":  # pandas writes such, Python has microseconds
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    try:
        found: list[Any] = column.to_pylist()
    except UNREADABLE:
        found = [_value(one) for one in column]
    return found


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return Unread("invalid_utf8", f"holds bytes that are not UTF-8: {error}")
    except UNREADABLE as error:
        return Unread("wrong_type", f"holds what cannot be read: {error}")


def stream_rows(rows: Any) -> Iterator[Row | Fault]:
    """The rows of a streaming Hugging Face data set, or of any iterable of dicts."""
    for number, row in enumerate(rows, 1):
        yield _object(number, row)
