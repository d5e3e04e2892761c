"""Row batches from Parquet files and from the Arrow streams of saved data sets: reading, values and decompressed bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from puna.stages.reading.declared import page_bytes, stream_bytes
from puna.stages.reading.files import Unpacking
from puna.storage import PunaError, errors_at

BATCH_ROWS, BATCH_BYTES = 1024, 64 << 20
VALUE_BYTES = 8  # approximate bytes of a value without its text
UNREADABLE = (ValueError, OverflowError, KeyError)  # errors for invalid UTF-8, a date out of range, an unknown time zone


class Unread(NamedTuple):
    """A value that Python cannot represent: the violated rule's name, and a message."""

    rule: str
    reason: str


def find_repeated(names: Iterable[str]) -> str:
    """Return the first name that occurs more than once; "" if there is none."""
    return next((name for name, count in Counter(names).items() if count > 1), "")


TEXTS = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
SHARED = ("string_view", "binary_view", "list_view", "large_list_view", "run_end_encoded", "sparse_union", "dense_union")


def check_fields(fields: Iterable[pa.Field], where: str) -> None:
    """Raise PunaError if two sibling Arrow fields have the same name, or if a field has a type whose values may share bytes."""
    fields = list(fields)
    if name := find_repeated(field.name for field in fields):
        raise PunaError(f"{where}: several columns have the name {name!r}, but a row can contain only one; rename them")
    for field in fields:
        kind = field.type
        if str(kind).partition("<")[0] in SHARED or (pa.types.is_dictionary(kind) and kind.value_type.num_fields):
            raise PunaError(f"{where}: the column {field.name!r} has the type {kind}, which is not supported; write it as list or text")
        check_fields((kind.field(number) for number in range(kind.num_fields)), f"{where}, in {field.name}")


def open_parquet(handle: BinaryIO, name: str) -> tuple[Any, int]:
    """Return a Parquet file and the number of rows to read at once. Dictionary-encoded text stays encoded. Raise PunaError if the file is
    not Parquet, a column fails `check_fields`, or the pages decompress beyond `Unpacking`'s limit."""
    with errors_at(f"{name}: not a readable Parquet file", pa.ArrowException, OSError, ValueError, IndexError):
        file = pq.ParquetFile(handle)
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        unpacking, row_bytes, chunks = Unpacking(name, handle), 0, []
        for group in groups:  # the footer may declare fewer bytes than the pages contain
            several = [group.column(number) for number in range(group.num_columns)]
            sizes = [max(page_bytes(handle, one), one.total_uncompressed_size) for one in several]
            unpacking.add(sum(sizes))
            row_bytes = max(row_bytes, sum(sizes) // max(group.num_rows, 1))
            chunks += several
        views = "_view" in str(file.schema_arrow)  # text types that files written by pyarrow or Polars may declare
        shared = {one.path_in_schema for one in chunks if one.physical_type == "BYTE_ARRAY" and (views or one.has_dictionary_page)}
        file = pq.ParquetFile(handle, read_dictionary=sorted(shared))
        check_fields(file.schema_arrow, name)
        return file, min(BATCH_ROWS, max(1, BATCH_BYTES // max(row_bytes, 1)))


def batches(handle: BinaryIO, name: str, kind: str) -> Iterator[Any]:
    """Yield record batches of at most `BATCH_ROWS` rows from a Parquet file or a data set's Arrow stream. Raise PunaError if unreadable."""
    number = 0
    try:
        if kind == "parquet":
            file, rows = open_parquet(handle, name)
            several = file.iter_batches(batch_size=rows)
        else:
            Unpacking(name, handle).add(stream_bytes(handle))
            several = pa.ipc.open_stream(handle)
            check_fields(several.schema, name)
        for batch in several:
            for column in batch.columns if kind != "parquet" else ():
                # Offsets in an untrusted file may point anywhere. Text is viewed as bytes, so that invalid UTF-8 loses only its own rows.
                (column.view(pa.binary()) if column.type == pa.string() else column).validate(full=True)
            yield from (batch.slice(at, BATCH_ROWS) for at in range(0, batch.num_rows, BATCH_ROWS))
            number += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        what = "Parquet file" if kind == "parquet" else "Arrow file of a saved data set"
        raise PunaError(f"{name}, after row {number}: not a readable {what} ({error})") from error


def unpacked_bytes(column: Any, most: int | None = None) -> int:
    """Return the approximate bytes of an Arrow array's values, repeats included. `most`: longer texts in a dictionary count as 0 bytes."""
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    kind, size = column.type, 0
    if pa.types.is_dictionary(kind) and kind.value_type in TEXTS:
        sizes = pc.binary_length(column.dictionary)
        size = pc.sum((sizes if most is None else pc.if_else(pc.greater(sizes, most), 0, sizes)).take(column.indices)).as_py()
    elif kind.num_fields:
        pairs = pa.struct([("key", kind.key_type), ("value", kind.item_type)]) if pa.types.is_map(kind) else None
        parts = (column.cast(pa.list_(pairs)) if pairs else column).flatten()
        size = sum(unpacked_bytes(part) for part in (parts if isinstance(parts, list) else [parts]))
    elif kind in TEXTS:
        size = pc.sum(pc.binary_length(column)).as_py()
    return VALUE_BYTES * len(column) + (size or 0)


def records(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow batch as dicts. A value that Python cannot represent becomes `Unread`."""
    columns = [values(column) for column in batch.columns]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def values(column: Any) -> list[Any]:
    """Return the values of an Arrow array, with nanoseconds cut to microseconds; a value that Python cannot represent becomes `Unread`."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":  # pandas writes ns, Python has microseconds
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    try:
        items: list[Any] = column.to_pylist()
    except UNREADABLE:
        items = [_value(one) for one in column]
    return items


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return Unread("invalid_utf8", f"holds bytes that are not UTF-8: {error}")
    except UNREADABLE as error:
        return Unread("wrong_type", f"holds a value that cannot be read: {error}")
