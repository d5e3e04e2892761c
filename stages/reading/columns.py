"""Batches of rows of Parquet files and of saved data sets' Arrow streams, bounded in what they unpack to, and their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from puna.stages.reading.files import Unpacking
from puna.storage import PunaError

BATCH_ROWS, BATCH_BYTES = 1024, 64 << 20
VALUE_BYTES = 8  # of a value beside its text, about
UNREADABLE = (ValueError, OverflowError, KeyError)  # bytes that are no text; a date out of range; an unknown time zone


class Unread(NamedTuple):
    """A value that Python cannot hold: the rule, and a message."""

    rule: str
    reason: str


def repeated(names: Iterable[str]) -> str:
    """Return the first name that occurs twice; empty if none does."""
    return next((name for name, count in Counter(names).items() if count > 1), "")


def check_names(fields: Iterable[Any], where: str) -> None:
    """Raise PunaError if two Arrow fields side by side have one name, or a type whose values share their bytes."""
    import pyarrow as pa

    fields, shared = list(fields), (pa.types.is_list_view, pa.types.is_large_list_view, pa.types.is_union, pa.types.is_run_end_encoded)
    if name := repeated(field.name for field in fields):
        raise PunaError(f"{where}: several columns have the name {name!r}; rename them, for a row holds one of that name")
    for field in fields:
        if any(of(field.type) for of in shared):
            raise PunaError(f"{where}: the column {field.name!r} is of the type {field.type}, which is not read; write it as list or text")
        check_names((field.type.field(number) for number in range(field.type.num_fields)), f"{where}, in {field.name}")


def open_parquet(handle: BinaryIO, name: str) -> tuple[Any, int]:
    """Return a Parquet file and the rows to read at once. Text that its dictionaries hold once stays so.

    PunaError: it is no Parquet file, two columns have one name, or its footer declares more bytes than a file of its size holds.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(handle)
        check_names(file.schema_arrow, name)
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        Unpacking(name, handle).add(sum(group.total_byte_size for group in groups))
        row_bytes = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
        shared = {one.path_in_schema for one in chunks if one.physical_type == "BYTE_ARRAY" and one.has_dictionary_page}
        return pq.ParquetFile(handle, read_dictionary=sorted(shared)), min(BATCH_ROWS, max(1, BATCH_BYTES // max(row_bytes, 1)))
    except (pa.ArrowException, OSError) as error:
        raise PunaError(f"{name}: not a readable Parquet file ({error})") from error


def batches(handle: BinaryIO, name: str, kind: str) -> Iterator[Any]:
    """Yield the rows of a Parquet file, or of a saved data set's Arrow stream, as record batches of at most `BATCH_ROWS`."""
    import pyarrow as pa

    number = 0
    try:
        if kind == "parquet":
            file, rows = open_parquet(handle, name)
            several = file.iter_batches(batch_size=rows)
        else:
            several = pa.ipc.open_stream(handle)
            check_names(several.schema, name)
        for batch in several:
            for column in batch.columns if kind != "parquet" else ():
                # A stranger's offsets may point anywhere; bytes that are no text cost their rows alone.
                (column.view(pa.binary()) if column.type == pa.string() else column).validate(full=True)
            yield from (batch.slice(at, BATCH_ROWS) for at in range(0, batch.num_rows, BATCH_ROWS))
            number += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        what = "Parquet file" if kind == "parquet" else "Arrow file of a saved data set"
        raise PunaError(f"{name}, after row {number}: not a readable {what} ({error})") from error


def unpacked_bytes(column: Any, most: int | None = None) -> int:
    """Return the bytes of an Arrow array's values, each as often as it occurs. `most`: a dictionary's longer values count nothing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    kind = column.type
    if pa.types.is_dictionary(kind):
        texts = column.dictionary
        nested = kind.value_type.num_fields
        sizes = pa.array([unpacked_bytes(texts.slice(at, 1)) for at in range(len(texts))], pa.int64()) if nested else _lengths(texts)
        column, sizes = column.indices, sizes if most is None else pc.if_else(pc.greater(sizes, most), 0, sizes)
        size = pc.sum(sizes.take(column)).as_py()
    elif kind.num_fields:
        pairs = pa.struct([("key", kind.key_type), ("value", kind.item_type)]) if pa.types.is_map(kind) else None
        parts = (column.cast(pa.list_(pairs)) if pairs else column).flatten()
        size = sum(unpacked_bytes(part, most) for part in (parts if isinstance(parts, list) else [parts]))
    else:
        size = pc.sum(_lengths(column)).as_py()
    return VALUE_BYTES * len(column) + (size or 0)


def _lengths(column: Any) -> Any:
    """Return the length of each text; 0 for values of a fixed size."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_string_view(column.type) or pa.types.is_binary_view(column.type):
        lengths = np.frombuffer(column.buffers()[1], np.int32)[::4]
        return pa.array(lengths[column.offset : column.offset + len(column)])
    texts = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
    return pc.binary_length(column) if any(of(column.type) for of in texts) else pa.array(np.zeros(len(column), np.int32))


def records(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow batch, as `values` gives them."""
    columns = [values(column) for column in batch.columns]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def values(column: Any) -> list[Any]:
    """Return the values of an Arrow array; `Unread` for one that Python cannot hold."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":  # pandas writes such, Python has microseconds
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
        return Unread("wrong_type", f"holds what cannot be read: {error}")
