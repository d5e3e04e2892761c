"""Readers of rows from files: JSON documents, arrays and lines, Parquet, CSV and TSV, saved Hugging Face data sets.

Each reader yields a `Row` per valid record, else a `Fault` with the record's number and the reason. Rows are streamed: memory is bounded by
`max_row_bytes` and a batch, whatever the size of the file."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from itertools import starmap
from typing import Any, BinaryIO, NamedTuple

from puna.stages.reading.columns import Unread, batches, find_repeated, records, unpacked_bytes
from puna.stages.reading.files import DAMAGE, Unpacking, decompress, suffix
from puna.storage import PunaError, errors_at

CHUNK_CHARACTERS = 1 << 18
BLANK = re.compile(r"[\s\ufeff]*")
BYTE_ORDER_MARKS = ("\udcff", "\udcfe")  # first bytes of UTF-16 (BOM, escaped), which never occur in UTF-8
LINE_OF_VALUE = re.compile(r"\n(?=[{\[])")
BROKEN_RECORDS = 10  # a broken record counts as this many records: a line of brackets takes as much time
REPEATED_CHARACTERS = 4  # this many characters that are decoded a second time, from a later line, count as one record
DEPTH = 500  # levels to skip at once in a value nested too deeply for the decoder, which can read more
NESTING = re.compile(r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+|[\[{]|[\]}]|(?<![0-9])[0-9]{4301,}')  # Python's limit on digits of an integer
LONGEST_TOKEN = 16  # maximum characters of a number, name or escape after the position where the decoder stops
FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv", ".arrow": "dataset"}
COLUMNAR = ("parquet", "dataset", "hub")  # formats in which every row has every field; missing values are null
SIDECARS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")


class Row(NamedTuple):
    """A record: its unique number in the file, starting at 1 (in JSON Lines, the line number), and its fields."""

    number: int
    fields: dict[str, Any]


class Fault(NamedTuple):
    """A record that is not a row: its number (0: the rest of the file), the faulty field ("": the whole record), the rule, a message."""

    number: int
    field: str
    rule: str
    reason: str


def format_of(name: str, head: bytes) -> str | None:
    """Return a file's format, one of `FORMATS`, by its name or else by its first bytes `head`; None if neither determines it."""
    kind = FORMATS.get(suffix(name))
    if kind is not None:
        return kind
    if head.startswith(b"PAR1"):
        return "parquet"
    return "json" if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") else None


def read_rows(handle: BinaryIO, name: str, kind: str, max_row_bytes: int) -> Iterator[Row | Fault]:
    """Yield a row or fault for each record of a file of format `kind`, in order. Raise PunaError for a bad columnar file or CSV header."""
    unpacking = Unpacking(name, handle)
    if kind in COLUMNAR:
        number = 0
        for batch in batches(handle, name, kind):
            yield from _batch(batch, number, max_row_bytes, unpacking)
            number += batch.num_rows
    elif kind in ("csv", "tsv"):
        yield from _check_unicode(_csv(decompress(handle, name, unpacking), name, "\t" if kind == "tsv" else "", max_row_bytes, unpacking))
    else:
        yield from _check_unicode(_json(decompress(handle, name, unpacking), max_row_bytes, unpacking))


def _check_unicode(rows: Iterator[Row | Fault]) -> Iterator[Row | Fault]:
    """Yield rows and faults. A row that is nested too deeply, or whose text contains surrogates (invalid in UTF-8), becomes a fault."""
    for row in rows:
        try:
            fields = row.fields.items() if isinstance(row, Row) else ()
            wrong = next((str(name).encode("utf-8", "replace").decode() for name, value in fields if not is_text(name, value)), None)
        except RecursionError:
            yield Fault(row.number, "", "invalid_json", "is nested too deeply")
            continue
        if wrong is None:
            yield row
        else:
            yield Fault(row.number, wrong, "invalid_utf8", "holds bytes or lone surrogates that are not valid Unicode text")


def is_text(*values: Any) -> bool:
    """True if all text in the values can be written as UTF-8. Lone surrogates, which JSON may contain, cannot."""
    for value in values:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                return False
        elif isinstance(value, dict):
            if not all(is_text(k, v) for k, v in value.items()):
                return False
        elif isinstance(value, list) and not is_text(*value):
            return False
    return True


def _object(number: int, value: Any) -> Row | Fault:
    if isinstance(value, dict):
        return Row(number, value)
    return Fault(number, "", "not_an_object", f"is a {type(value).__name__}, not an object with fields")


class _Broken(Exception):
    """An error for a JSON value that is invalid, truncated or too long.

    Its arguments are the rule, a message, and the number of characters that had already been decoded for an earlier broken value."""


class _Text(str):
    """Text that reports no line numbers: json's errors count lines from the start of the text, which is slow in a large buffer."""

    def count(self, *place: object) -> int:
        return 0


class _Values:
    """A reader of JSON values with a buffer of text. `_at`: position in the buffer; `line`: line number of this position."""

    def __init__(self, source: io.BufferedReader) -> None:
        self._source, self._decode = source, codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._raw_decode = json.JSONDecoder(object_pairs_hook=self._fields).raw_decode
        self._text, self._at, self._ended = _Text(), 0, False
        self._decoded = 0  # characters of the file up to the last one that was decoded for a broken value
        self._end_of_text = 0  # length of `_text` without the white space at its end
        self._passed, self._line_start = 0, 0  # characters of the file before `_text`, and before the line of `_at`
        self.line, self.damage, self.repeated = 1, "", ""

    def head(self) -> str:
        """Move to the next character that is not white space and return it; empty at the end of the file."""
        while True:
            blank = BLANK.match(self._text, self._at)
            assert blank is not None
            self._go(blank.end())
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read_on()

    def go(self) -> None:
        self._go(self._at + 1)

    def next(self, most: int) -> Any:
        """Return the value at `_at` and move past it. Raise _Broken if it is not valid JSON, or is longer than `most` bytes."""
        while True:
            error: Exception | None = None
            self.repeated = ""
            try:
                value, end = self._raw_decode(self._text, self._at)
            except json.JSONDecodeError as failure:
                error, end = failure, failure.pos
                left = self._end_of_text - end
                more = failure.msg.startswith("Unterminated string") or left < (1 if self._ended else LONGEST_TOKEN)
            except (ValueError, RecursionError) as failure:
                broken = self._error("invalid_json", f"is not JSON: {failure}, at {self._place(self._at)}", end := self._limit())
                self._go(end)  # the lines before it are equally broken
                raise broken from failure
            else:
                more = end == len(self._text)  # a number may continue
            if more and not self._ended and len(self._text) - self._at <= most:
                self._read_on()
            elif len(self._text[self._at : None if more else end].encode("utf-8", "surrogateescape")) > most:
                raise self._error("row_too_large", f"is longer than {most} bytes", len(self._text))
            elif error is None:
                self._go(end)
                return value
            else:
                rule = "truncated_file" if more and self._ended else "invalid_json"
                raise self._error(rule, f"is not JSON: {error.msg}, at {self._place(end)}", end) from error  # type: ignore[attr-defined]

    def _error(self, rule: str, message: str, end: int) -> _Broken:
        start, end = self._passed + self._at, self._passed + end
        again, self._decoded = min(end, self._decoded) - start, max(end, self._decoded)
        return _Broken(rule, message, max(0, again))

    def _limit(self) -> int:
        """Return a position in the value at `_at` where it is nested `DEPTH` deep or has too long an integer; `_at` if there is none."""
        depth = 0
        for token in NESTING.finditer(self._text, self._at):
            depth += (token[0] in "[{") - (token[0] in "]}")
            if depth == DEPTH or token[0].isdigit():
                return token.start()
        return self._at

    def skip(self) -> None:
        """Skip to the next line that begins with { or [, or to the end of the file."""
        while (start := LINE_OF_VALUE.search(self._text, self._at)) is None and not self._ended:
            self._go(max(self._at, len(self._text) - 1))
            self._read_on()
        self._go(start.end() if start else len(self._text))

    def _fields(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            self.repeated = find_repeated(name for name, _ in pairs)
        return fields

    def _go(self, at: int) -> None:
        self.line += str.count(self._text, "\n", self._at, at)
        if (last := self._text.rfind("\n", self._at, at)) >= 0:
            self._line_start = self._passed + last + 1
        self._at = at

    def _place(self, at: int) -> str:
        last = self._text.rfind("\n", self._at, at)
        start = self._passed + last + 1 if last >= 0 else self._line_start
        return f"line {self.line + str.count(self._text, chr(10), self._at, at)}, column {self._passed + at - start + 1}"

    def _read_on(self) -> None:
        """Drop consumed text and read until the rest has at least doubled, so that a long value is scanned only a few times."""
        self._passed += self._at
        pieces, size, self._text, self._at = [self._text[self._at :]], 0, _Text(), 0
        least = max(CHUNK_CHARACTERS, len(pieces[0]))
        while size < least and not self._ended:
            try:
                data = self._source.read1(CHUNK_CHARACTERS)
            except DAMAGE as failure:
                data, self.damage = b"", str(failure) or type(failure).__name__
            self._ended = not data
            pieces.append(self._decode(data, self._ended))
            size += len(pieces[-1])
        self._text = _Text("".join(pieces))
        self._end_of_text = len(self._text.rstrip())


def _json(source: io.BufferedReader, max_row_bytes: int, unpacking: Unpacking) -> Iterator[Row | Fault]:
    """Yield the values of a JSON file: one value, one per line, or several in sequence. If the file starts with an array, yield its items.

    Commas between values may be missing. After a broken value, reading continues at the next line that begins with { or [."""
    values = _Values(source)
    first = values.head()
    if first in BYTE_ORDER_MARKS:
        yield Fault(1, "", "invalid_utf8", "is UTF-16, but JSON must be UTF-8: convert the file, for example with iconv -f UTF-16 -t UTF-8")
        return
    arrays, inside, whole, number = first == "[", False, True, 0
    while head := values.head():
        unpacking.add(0, records=1)
        if arrays and head == ("]" if inside else "["):
            inside = not inside
            values.go()
            continue
        if head == ",":
            values.go()
            continue
        number, line = number + 1 if arrays else max(number + 1, values.line), values.line
        try:
            value = values.next(max_row_bytes)
            twice = Fault(number, values.repeated, "repeated_name", "occurs more than once") if values.repeated else None
            yield twice or _object(number, value)
        except _Broken as error:
            unpacking.add(0, records=BROKEN_RECORDS + error.args[2] // REPEATED_CHARACTERS)
            values.skip()
            lines, whole = values.line - line, False
            at_end = not values.head()
            if at_end and values.damage:
                number -= 1  # the fault for the damaged file, below, reports this record
                break
            rest = "; the rest of the file is not read" if at_end else f"; {lines} lines are skipped" if lines > 1 else ""
            yield Fault(number, "", error.args[0], error.args[1] + rest)
    if values.damage:
        yield Fault(number + 1, "", "truncated_file", f"the rest of the file cannot be read: {values.damage}")
    elif inside and whole:
        yield Fault(number + 1, "", "truncated_file", "the array does not end")


class _Lines:
    """An iterator over the lines of a text. It raises csv.Error if the lines read since `size` was set to 0 exceed `most` bytes."""

    def __init__(self, text: io.TextIOWrapper, most: int, unpacking: Unpacking) -> None:
        self._text, self._most, self._unpacking, self.size = text, most, unpacking, 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._next, "")

    def _next(self) -> str:
        self._unpacking.add(0, records=1)
        line = rest = self._text.readline(self._most + 1)
        self.size += len(line.encode("utf-8", "surrogateescape"))
        while self.size > self._most and rest and rest[-1] not in "\r\n":
            rest = self._text.readline(self._most + 1)
        if self.size > self._most:
            raise csv.Error(f"is longer than {self._most} bytes")
        return line


def _csv(source: io.BufferedReader, name: str, delimiter: str, max_row_bytes: int, unpacking: Unpacking) -> Iterator[Row | Fault]:
    """Yield one row or fault per record after the header; cells are text. `delimiter`: "" detects it. Raise PunaError for a bad header."""
    csv.field_size_limit(max_row_bytes)
    with errors_at(f"{name}: its header line, the names of the columns, cannot be read", csv.Error, *DAMAGE):
        delimiter = delimiter or delimiter_of(source.peek(1 << 16))
        lines = _Lines(io.TextIOWrapper(source, "utf-8-sig", "surrogateescape", newline=""), max_row_bytes, unpacking)
        records = csv.reader(lines, delimiter=delimiter, strict=True)
        names = next(records, [])
    if find_repeated(names) or (names and not all(names)):
        raise PunaError(f"{name}: its header line must name every column, each once; it has {', '.join(map(repr, names))}")
    number = 0
    while True:
        number, lines.size, before = number + 1, 0, records.line_num
        try:
            cells = next(records, None)
        except csv.Error as error:
            many = records.line_num - before
            over = f"; {many} lines from line {before + 1} on are passed over: a quote is not closed" if many > 1 else ""
            yield Fault(number, "", "invalid_csv", f"cannot be read: {error}{over}")
            continue
        except DAMAGE as error:
            yield Fault(number, "", "truncated_file", f"the rest of the file cannot be read: {error}")
            return
        if cells is None:
            return
        if not cells:
            number -= 1
        elif len(cells) != len(names):
            yield Fault(number, "", "invalid_csv", f"has {len(cells)} cells, but the header line has {len(names)}")
        else:
            yield Row(number, dict(zip(names, cells, strict=True)))


def delimiter_of(head: bytes) -> str:
    """Return the delimiter of a CSV file: comma, semicolon, tab or vertical bar, whichever splits the header into the most names."""
    lines = io.StringIO(head.decode("utf-8-sig", "replace"), newline="")

    def names(delimiter: str) -> int:
        lines.seek(0)
        try:
            return len(next(csv.reader(lines, delimiter=delimiter), []))
        except csv.Error:
            return 0

    return max(",;\t|", key=names)


def _batch(batch: Any, before: int, most: int, unpacking: Unpacking) -> Iterator[Row | Fault]:
    size = sum(map(unpacked_bytes, batch.columns))
    if size > most:
        if batch.num_rows == 1:
            yield Fault(before + 1, "", "row_too_large", f"is longer than {most} bytes")
        else:
            for at in range(batch.num_rows):
                yield from _batch(batch.slice(at, 1), before + at, most, unpacking)
        return
    unpacking.add(size, records=batch.num_rows)
    for number, fields in enumerate(records(batch), before + 1):
        wrong = next(((name, value) for name, value in fields.items() if isinstance(value, Unread)), None)
        yield Row(number, fields) if wrong is None else Fault(number, wrong[0], *wrong[1])


def stream_rows(rows: Any) -> Iterator[Row | Fault]:
    """Yield the rows of a streaming Hugging Face data set, or of any iterable of dicts; a fault for an item that is not a dict."""
    return starmap(_object, enumerate(rows, 1))
