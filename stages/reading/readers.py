"""Readers of inputs other than web archives: folders of pages, Parquet, JSON, CSV, saved and remote Hugging Face data sets.

Each reader yields a `Page` per record, or a `Rejected` with the rule that rejected the record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from puna.stages.reading.bodies import SNIFF_BYTES, gunzip, sniff, unzstd
from puna.stages.reading.columns import TEXTS, Unread, batches, open_parquet, records, unpacked_bytes, values
from puna.stages.reading.dates import moment
from puna.stages.reading.files import DAMAGE, GZIP_MAGIC, ZSTD_MAGIC, Unpacking, address, address_of, decompress, field_at, suffix
from puna.stages.reading.pages import Page, Rejected
from puna.stages.reading.rows import Row, is_text, read_rows
from puna.storage import PunaError

MEDIA_TYPES = {
    ".html": "text/html", ".htm": "text/html", ".xhtml": "application/xhtml+xml", ".txt": "text/plain", ".text": "text/plain",
    ".md": "text/markdown", ".rst": "text/x-rst", ".tex": "text/x-tex", ".py": "text/x-python", ".pyx": "text/x-cython",
    ".c": "text/x-c", ".h": "text/x-c", ".cc": "text/x-c++", ".cpp": "text/x-c++", ".hpp": "text/x-c++", ".cu": "text/x-cuda",
    ".java": "text/x-java", ".js": "text/x-javascript", ".ts": "text/x-typescript", ".go": "text/x-go", ".rs": "text/x-rust",
    ".rb": "text/x-ruby", ".php": "text/x-php", ".cs": "text/x-csharp", ".swift": "text/x-swift", ".kt": "text/x-kotlin",
    ".scala": "text/x-scala", ".pl": "text/x-perl", ".lua": "text/x-lua", ".r": "text/x-r", ".jl": "text/x-julia",
    ".hs": "text/x-haskell", ".sh": "text/x-shellscript", ".sql": "text/x-sql", ".f90": "text/x-fortran", ".m": "text/x-matlab",
    ".asm": "text/x-asm", ".s": "text/x-asm", ".proto": "text/x-protobuf", ".cmake": "text/x-cmake", ".toml": "text/x-toml",
    ".yaml": "text/x-yaml", ".yml": "text/x-yaml", ".ini": "text/x-ini", ".css": "text/css", ".xml": "text/xml",
}  # fmt: skip
DATE_COLUMNS = (
    "fetched_at", "fetch_time", "crawled_at", "crawl_date", "crawl_time", "crawl_timestamp", "crawl_ts", "date", "datetime", "timestamp",
    "published_at", "publish_date", "date_published", "added", "created", "created_at",
)  # fmt: skip
"""Usual names of the field that holds a row's time, in order of preference. The first with a date counts."""
PACKED_ROOM = 1 << 16  # compressed bytes of a page that are read in addition to 2 * max_bytes
FAULTS = {"row_too_large": "record_too_large", "truncated_file": "truncated_record", "not_an_object": "not_a_page"}
"""Rule of a `Fault` → rule of the `Rejected`. All other rules become malformed_record."""
FIELDS_SHOWN = 8  # maximum number of fields that a message lists for a record without a page


class Columns:
    """The fields with a row's page, URL and date; see `IngestConfig` for their names."""

    def __init__(self, text: str, html: str | None, url: str | None, date: str | None) -> None:
        self.body = html or text
        self.content_type = "text/html" if html else "text/plain"
        self.url = url
        self.date = date
        self.option = "html_column" if html else "text_column"

    def check(self, names: list[str], where: str) -> None:
        """Raise PunaError if a named column is missing from `names`, the columns of the file `where`."""
        options = [(self.body, self.option), (self.url, "url_column"), (self.date, "date_column")]
        for column, option in options:
            if column is not None and column.split(".")[0] not in names:
                there = ", ".join(names) or "none"
                raise PunaError(f"{where}: no column {column!r}; it has {there}. Name another one with ingest.{option}")


def read_file(handle: BinaryIO, source: str, name: str, max_bytes: int) -> Iterator[Page | Rejected]:
    """Yield a file as one page or rejection. The media type is text/html if the file starts like HTML, else derived from its name; the date
    is 1970-01-01. The body is truncated to `max_bytes` + 1 decompressed bytes."""
    packed = name.lower().endswith((".zst", ".xz"))
    media = MEDIA_TYPES.get(suffix(name))
    head = b"" if media or packed else handle.read(SNIFF_BYTES)
    if not media and not sniff(head):
        yield Rejected("not_a_page", name, f"{name}: {suffix(name) or 'a file without an ending'} is not a known type of page")
        return
    try:
        if packed:
            body = decompress(handle, name).read(max_bytes + 1)
        elif (body := head + handle.read(max_bytes + 1 - len(head))).startswith(GZIP_MAGIC) or name.lower().endswith(".gz"):
            body = gunzip(body + handle.read(max_bytes + PACKED_ROOM), max_bytes)
        elif body.startswith(ZSTD_MAGIC):
            body = unzstd(body + handle.read(max_bytes + PACKED_ROOM), max_bytes)
    except DAMAGE as error:
        yield Rejected("truncated_record", name, f"{name}: {error}")
        return
    yield Page(address(source, name), 0, sniff(body) or media or "text/html", None, body, name)


def read_table(handle: BinaryIO, source: str, name: str, kind: str, columns: Columns, max_bytes: int) -> Iterator[Page | Rejected]:
    """Yield one page or rejection per record of a JSON, CSV or TSV file. Raise PunaError for a bad CSV header."""
    for record in read_rows(handle, name, kind, max_bytes):
        if isinstance(record, Row):
            yield _row(record.fields, source, name, record.number - 1, columns)
        else:
            rule = FAULTS.get(record.rule, "malformed_record")
            where = f"row {record.number}{f', field {record.field}' if record.field else ''}"
            yield Rejected(rule, f"{name}#{record.number - 1}", f"{name}, {where}: {record.reason}")


def read_parquet(handle: BinaryIO, source: str, name: str, columns: Columns, max_bytes: int) -> Iterator[Page | Rejected]:
    """Yield one page or rejection per row of a Parquet file, read in batches. Raise PunaError for an unreadable file or a missing column.
    Dictionary text is decoded once per batch, or rejected undecoded above `max_bytes`. The rest of a damaged row group is one rejection."""
    (file, rows), unpacking, end = open_parquet(handle, name), Unpacking(name, handle), 0
    column_names = _existing(file.schema_arrow.names, name, columns)
    for group in range(file.num_row_groups):
        number, end = end, end + file.metadata.row_group(group).num_rows
        try:
            for batch in file.iter_batches(batch_size=rows, columns=column_names, row_groups=[group]):
                sizes = [unpacked_bytes(batch[column], max_bytes if column == columns.body else None) for column in batch.schema.names]
                unpacking.add(sum(sizes), records=batch.num_rows)
                yield from _of_batch(batch, source, name, number, columns, max_bytes)
                number += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            detail = f"{name}, rows {number} to {end - 1}: the Parquet file is damaged ({error})"
            yield Rejected("truncated_record", f"{name}#{number}", detail)


def _of_batch(batch: Any, source: str, name: str, number: int, columns: Columns, max_bytes: int) -> Iterator[Page | Rejected]:
    place = batch.schema.get_field_index(columns.body)
    kind = batch.schema.field(place).type if place >= 0 else pa.null()
    if not pa.types.is_dictionary(kind) or kind.value_type not in TEXTS:
        yield from (_row(row, source, name, at, columns) for at, row in enumerate(records(batch), number))
        return
    texts, others = batch.column(place), batch.drop_columns(columns.body)
    sizes = pc.binary_length(texts.dictionary)
    held = values(pc.if_else(pc.greater(sizes, max_bytes), None, texts.dictionary))
    rows = records(others) if others.num_columns else [{}] * len(texts)
    for at, (which, row) in enumerate(zip(texts.indices.to_pylist(), rows, strict=True), number):
        if which is not None and held[which] is None and (size := sizes[which].as_py()) is not None:
            yield Rejected("body_too_large", f"{name}#{at}", f"{name}, row {at + 1}", float(size), float(max_bytes))
        else:
            yield _row({**row, columns.body: None if which is None else held[which]}, source, name, at, columns)


def read_arrow(handle: BinaryIO, source: str, name: str, columns: Columns) -> Iterator[Page | Rejected]:
    """Yield one page or rejection per row of a file of a saved Hugging Face data set (Arrow stream). Raise PunaError for damage."""
    number, unpacking = 0, Unpacking(name, handle)
    for batch in batches(handle, name, "dataset"):
        batch = batch.select(_existing(batch.schema.names, name, columns))
        unpacking.add(sum(map(unpacked_bytes, batch.columns)), records=batch.num_rows)
        yield from (_row(row, source, name, at, columns) for at, row in enumerate(records(batch), number))
        number += batch.num_rows


def read_stream(rows: Any, source: str, name: str, columns: Columns) -> Iterator[Page | Rejected]:
    """Yield one page or rejection per row of a streaming Hugging Face data set (or any dicts). Raise PunaError for a missing column."""
    for number, row in enumerate(rows):
        if number == 0:
            columns.check(list(row), name)
        yield _row(row, source, name, number, columns)


def _existing(names: list[str], where: str, columns: Columns) -> list[str]:
    columns.check(names, where)
    fields = {c.split(".")[0] for c in (columns.body, columns.url or "url", columns.date) if c is not None}
    if columns.date is None:
        fields.update(DATE_COLUMNS)
    return [name for name in names if name in fields]


def _row(row: dict[str, Any], source: str, name: str, number: int, columns: Columns) -> Page | Rejected:
    where = f"{name}#{number}"
    body = field_at(row, columns.body)
    if body is None:
        fields = ", ".join(list(row)[:FIELDS_SHOWN]) + (", …" if len(row) > FIELDS_SHOWN else "")
        return Rejected("not_a_page", where, f"{name}, row {number + 1}: no text in a field {columns.body!r}; it has {fields or 'none'}")
    if isinstance(body, str):
        try:
            body = body.encode()
        except UnicodeEncodeError as error:  # JSON may contain lone surrogates
            return Rejected("malformed_record", where, f"{name}, row {number + 1}: {error}")
    if not isinstance(body, bytes):
        return Rejected("malformed_record", where, f"{name}, row {number + 1}: {columns.body} {_type_named(body)}")
    url = field_at(row, columns.url or "url")
    if not isinstance(url, str) or "://" not in url:
        if columns.url is not None and not isinstance(url, str) and (url is not None or columns.url.split(".")[0] not in row):
            return Rejected("malformed_record", where, f"{name}, row {number + 1}: {columns.url} {_type_named(url)}")
        url = address_of(url if isinstance(url, str) else "", source, name, number)
    if not is_text(url):
        return Rejected("malformed_record", where, f"{name}, row {number + 1}: the address {url!r} is not Unicode text")
    usual = (time for column in DATE_COLUMNS if (time := moment(row.get(column))))
    at = moment(given := field_at(row, columns.date)) if columns.date is not None else next(usual, 0)
    if at is None:
        return Rejected("malformed_record", where, f"{name}, row {number + 1}: {columns.date} holds {given!r}, not a date")
    return Page(url, at, columns.content_type, "utf-8", body, where)


def _type_named(value: Any) -> str:
    return value.reason if isinstance(value, Unread) else f"holds {type(value).__name__}, not text"
