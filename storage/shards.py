"""Tables in shards: an ordered list of Parquet files, cut by ranges of the primary key.

Ids of pages and documents are uniform hashes, so fixed id bounds give shards of similar size. The number of shards is set when rows are
first imported. Derived documents and large tables with ids keep it, so they match shard by shard; other tables may have one shard. A row
group is one `write_table` call on combined chunks, so equal rows give equal bytes, whichever job wrote them.

A shard of documents may keep rows by reference: an order file then gives for each row its source (0: the shard's own file; n: the shard's
file in the table's n-th source) and its row number there."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from puna.storage import digest
from puna.storage.errors import PunaError
from puna.storage.schemas import TableSchema, table_schema

GROUP_BYTES = 8 << 20  # uncompressed bytes at which a row group ends, regardless of its number of rows
LEVEL = 1  # zstd compression level: level 3 would save a seventh of the space and take 1.5 times as long
UNLIKE = frozenset({"id", "url", "title", "text", "body", "detail"})
"""Columns whose values rarely repeat, for which dictionary encoding saves nothing and makes reading take more memory."""
GROWTH = 0.6  # exponent by which the number of shards grows with a table's size: larger tables have more shards, which are also larger
ORDER = pa.schema({"source": pa.int32(), "row": pa.int32()})
FACTS = pa.schema({"digest": pa.binary(digest.ROW_BYTES), "characters": pa.int32()})


@dataclass(frozen=True)
class FileRecord:
    """The size and checksum of a stored file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """One shard of a table. `low`, `high`: first and last key; `groups`: rows of each row group in `file`; `bytes`: uncompressed. Names of
    files, empty if missing: `file` has own rows, `order` the order of own and referenced rows, `facts` digests and lengths of own rows."""

    rows: int
    digest: str
    low: list[str | int]
    high: list[str | int]
    file: str = ""
    order: str = ""
    facts: str = ""
    groups: tuple[int, ...] = ()
    bytes: int = 0
    characters: int | None = None

    @classmethod
    def of(cls, value: dict[str, Any]) -> Shard:
        return cls(**value | {"groups": tuple(value["groups"])})

    @property
    def own(self) -> int:
        return sum(self.groups)


NOTHING = Shard(0, "", [], [])


def count(table: TableSchema, raw: int) -> int:
    """Return the number of shards, a power of two, for a table of `raw` uncompressed bytes."""
    return 1 if raw <= table.shard_bytes else 1 << math.ceil(GROWTH * math.log2(raw / table.shard_bytes))


@lru_cache(maxsize=16)
def bounds(shards: int) -> tuple[str, ...]:
    """Return the lowest id of each shard except the first, for a table in `shards` shards (a power of two)."""
    return tuple(f"{(number << 32) // shards:08x}" for number in range(1, shards))


def shard_of(ids: pa.Array | pa.ChunkedArray, shards: int) -> npt.NDArray[np.int64]:
    if shards == 1:
        return np.zeros(len(ids), np.int64)
    values = np.array([i.encode() for i in ids.to_pylist()], dtype=object)
    return np.searchsorted(np.array([b.encode() for b in bounds(shards)], dtype=object), values, side="right").astype(np.int64)


def row_bytes(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the rows' uncompressed sizes in bytes, int64[n]: lengths of strings and bytes, and 8 for any other value or list element."""
    total = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            total += np.asarray(pc.fill_null(pc.binary_length(column), 0), dtype=np.int64)
        elif pa.types.is_list(column.type):
            total += 8 * np.asarray(pc.fill_null(pc.list_value_length(column), 0), dtype=np.int64)
        else:
            total += 8
    return total


class Sink:
    """A file object that computes the sha256 of what is written to it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._state = hashlib.sha256()
        self.bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        self._state.update(data)
        self.bytes += self._file.write(data)
        return len(data)

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if not self.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self.closed = True

    @property
    def record(self) -> FileRecord:
        return FileRecord(self.bytes, self._state.hexdigest())


def write_table(path: Path, table: pa.Table, **how: Any) -> FileRecord:
    """Write rows that belong to no artifact table (such as an order) to a new file, as one synced row group; return the file's record."""
    with contextlib.closing(Sink(path)) as sink:
        write_rows(sink, table, **how)
    return sink.record


def write_rows(file: Any, table: pa.Table, **how: Any) -> None:
    rows = max(1, table.num_rows)
    pq.write_table(table.combine_chunks(), file, compression="zstd", compression_level=LEVEL, row_group_size=rows, **how)


@dataclass(frozen=True)
class Written:
    """A finished shard: its columns and its files (table, order, facts). `values`: column → number of non-null values."""

    shard: Shard
    columns: dict[str, str]
    files: dict[str, FileRecord]
    values: dict[str, int]


class ShardWriter:
    """A writer of one shard, whose rows must come in key order. `path`: the file of the rows; files of order and facts lie beside it."""

    def __init__(self, name: str, path: Path) -> None:
        self._table = table_schema(name)
        self._path = path
        self._file: tuple[Sink, pq.ParquetWriter] | None = None
        self._held: list[pa.Table] = []
        self._held_sizes: list[npt.NDArray[np.int64]] = []
        self._groups: list[int] = []
        self._facts: list[pa.Table] = []
        self._keys: list[list[Any]] = []
        self._values: dict[str, int] = {}
        self._raw = 0
        self.rows = 0

    def open(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._rolling = digest.Rolling(schema)
        sink = Sink(self._path)
        alike = [f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in schema if f.name not in UNLIKE]
        self._file = sink, pq.ParquetWriter(sink, schema, compression="zstd", compression_level=LEVEL, use_dictionary=alike)

    def add(self, rows: pa.Table, facts: pa.Table | None = None) -> None:
        """Add the next rows, with their facts if known. Raise PunaError if keys do not ascend or two rows have the same key."""
        rows = self._table.conform(rows)
        if self._file is None:
            self.open(rows.schema)
        if not rows.num_rows:
            return
        self._check(rows)
        if self._table.selectable:
            self._facts.append(facts_of(rows) if facts is None else facts)
        else:
            self._rolling.update(rows)
        for name in rows.schema.names if self._table.open else ():
            self._values[name] = self._values.get(name, 0) + len(rows) - rows[name].null_count
        self._held.append(rows)
        self._held_sizes.append(row_bytes(rows))
        self.rows += rows.num_rows
        self._flush(last=False)

    def _check(self, rows: pa.Table) -> None:
        keys = [rows.column(k) for k in self._table.key]
        first, last = ([column[at].as_py() for column in keys] for at in (0, rows.num_rows - 1))
        before = self._keys[-1] if self._keys else None
        if (before is not None and before >= first) or not grows(rows, self._table.key):
            twice = first if before == first else _twice(rows, self._table.key)
            if twice is not None:
                raise PunaError(f"table {self._table.name}: two rows have the key {dict(zip(self._table.key, twice, strict=True))}")
            raise PunaError(f"table {self._table.name}: rows are not in the order of {', '.join(self._table.key)}")
        self._keys = [self._keys[0] if self._keys else first, last]

    def _flush(self, *, last: bool) -> None:
        """Write the full row groups; with `last`, all rows. Groups end at fixed numbers of rows or bytes: equal rows give equal groups."""
        while self._held:
            sizes = np.cumsum(np.concatenate(self._held_sizes))
            full = int(np.searchsorted(sizes, GROUP_BYTES)) + 1
            if not last and len(sizes) < min(full, self._table.group_rows):
                return
            rows = min(full, self._table.group_rows, len(sizes))
            whole = pa.concat_tables(self._held)
            assert self._file is not None
            self._file[1].write_table(whole.slice(0, rows).combine_chunks(), row_group_size=rows)
            self._groups.append(rows)
            self._raw += int(sizes[rows - 1])
            rest = whole.slice(rows)
            flat = np.concatenate(self._held_sizes)[rows:]
            self._held, self._held_sizes = ([rest], [flat]) if rest.num_rows else ([], [])

    def close(self, order: pa.Table | None = None, facts: pa.Table | None = None, span: tuple[str, str] | None = None) -> Written:
        """Close the files; return the shard. If rows are kept by reference, `order`, `facts`, `span` (first, last key) cover all rows."""
        files: dict[str, FileRecord] = {}
        rows = self.rows
        if self._file is not None:
            self._flush(last=True)
            for file in reversed(self._file):
                file.close()
            if rows:
                files["table"] = self._file[0].record
            else:
                self._path.unlink()
        schema = self.schema if self._file is not None else self._table.schema
        if self._table.selectable:
            mine = pa.concat_tables(self._facts).combine_chunks() if self._facts else FACTS.empty_table()
            if rows:
                files["facts"] = write_table(beside(self._path, "facts"), mine)
            of_all = mine if facts is None else facts
            value = hashlib.sha256(b"".join(of_all.column("digest").to_pylist())).hexdigest()
            characters = pc.sum(of_all.column("characters").cast(pa.int64())).as_py() or 0
        else:
            value, characters = self._rolling.hexdigest() if self._file is not None else "", None
        low, high = self._keys or ([], [])
        if order is not None and span is not None:
            low, high = [span[0]], [span[1]]
            place = beside(self._path, "order")
            # There are few sources, and row numbers mostly increase.
            files["order"] = write_table(
                place, order.cast(ORDER), use_dictionary=["source"], column_encoding={"row": "DELTA_BINARY_PACKED"}
            )
            rows = order.num_rows
        shard = Shard(rows, value if rows else "", low, high, groups=tuple(self._groups), bytes=self._raw, characters=characters)
        return Written(shard, {f.name: str(f.type) for f in schema}, files, self._values)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None and not self._file[0].closed:
            with contextlib.suppress(Exception):  # the error that interrupted the writing is being raised
                self._file[1].close()
            with contextlib.suppress(OSError):
                self._file[0].close()
            self._path.unlink(missing_ok=True)


def beside(path: Path, what: str) -> Path:
    """Return the path of a shard's file `what` (order or facts), next to the file of its rows."""
    return path.with_name(f"{path.name.removesuffix('.parquet')}.{what}.parquet")


def facts_of(rows: pa.Table) -> pa.Table:
    """Return a table with the `digest` and number of `characters` of each document."""
    values = digest.of_rows(rows)
    digests = pa.FixedSizeBinaryArray.from_buffers(FACTS.field("digest").type, len(values), [None, pa.py_buffer(values.tobytes())])
    return pa.table([digests, pc.utf8_length(rows["text"]).combine_chunks().cast(pa.int32())], schema=FACTS)


def grows(table: pa.Table, key: tuple[str, ...]) -> bool:
    """True if keys strictly ascend from row to row and none is null. They are compared by `key`'s first column, then by the next."""
    larger = None
    for name in reversed(key):
        column = table.column(name).combine_chunks()
        column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        if column.null_count:
            return False
        before, after = column[:-1], column[1:]
        more = pc.less(before, after)
        larger = more if larger is None else pc.or_(more, pc.and_(pc.equal(before, after), larger))
    return pc.all(larger, min_count=0).as_py() is True


def in_order(table: pa.Table, key: tuple[str, ...]) -> pa.Table:
    return table if table.num_rows < 2 or grows(table, key) else table.sort_by([(name, "ascending") for name in key])


def _twice(table: pa.Table, key: tuple[str, ...]) -> list[Any] | None:
    return next((list(b.values()) for a, b in pairwise(table.select(list(key)).to_pylist()) if a == b), None)
