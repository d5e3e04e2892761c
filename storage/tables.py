"""Writing and reading the Parquet tables of an artifact.

Parts arrive in any order and any size; `merge` sorts them by primary key and writes fixed row groups, so that equal rows
give equal bytes whoever computed which part. Most stages write sorted parts that do not overlap, which are only put one after
another; all others are sorted by DuckDB, out of core.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from puna.storage.errors import PunaError
from puna.storage.schemas import TableSchema, table_schema


@dataclass(frozen=True)
class Part:
    """A range of rows of one stored table: small, picklable, read where the work is done."""

    file: str
    start: int
    stop: int
    columns: tuple[str, ...] | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the part."""
        return self.stop - self.start

    def read(self) -> pa.Table:
        """The rows as a table; reads only the row groups that hold them."""
        source = pq.ParquetFile(self.file)
        groups, first, offset = [], None, 0
        for group in range(source.num_row_groups):
            rows = source.metadata.row_group(group).num_rows
            if offset < self.stop and offset + rows > self.start:
                groups.append(group)
                first = offset if first is None else first
            offset += rows
        table = source.read_row_groups(groups, columns=list(self.columns) if self.columns else None)
        return table.slice(self.start - (first or 0), self.rows)


def batches_of(file: Path, rows: int = 8192, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file in batches of at most `rows`, within bounded memory."""
    # With its buffers on, Arrow keeps what it has read of every row group until the file is closed.
    with pq.ParquetFile(file, pre_buffer=False) as source:
        yield from source.iter_batches(batch_size=rows, columns=columns)


def write_part(table: pa.Table, file: Path) -> None:
    """Write rows to `file` so that it exists whole or not at all, a loss of power included."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        pq.write_table(table, temporary, compression="zstd")
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def merge(name: str, parts: Sequence[Path], target: Path, memory_limit: str = "2GB") -> tuple[int, pa.Schema]:
    """Sort the rows of `parts` by the primary key of table `name` into `target`; returns rows and schema.

    Raises PunaError where two rows have one key.
    """
    table = table_schema(name)
    names: dict[str, None] = {}
    for part in parts:
        names.update(dict.fromkeys(pq.read_schema(part).names))
    schema = table.schema_for(names)
    ordered = _in_order(parts, table.key)
    rows, last = 0, None
    with contextlib.ExitStack() as stack, pq.ParquetWriter(target, schema, compression="zstd", compression_level=3) as writer:
        if ordered is None:
            batches = _sorted(stack, parts, table, target.parent / ".sort", memory_limit)
        else:
            batches = (batch for part in ordered for batch in batches_of(part, table.group_rows))
        for group in _regroup(batches, schema, table.group_rows):
            if ordered is None:
                last = _check_unique(table, group, last)
            writer.write_table(group, row_group_size=table.group_rows)
            rows += group.num_rows
    return rows, schema


def _sorted(
    stack: contextlib.ExitStack, parts: Sequence[Path], table: TableSchema, scratch: Path, memory_limit: str
) -> Iterator[pa.RecordBatch]:
    """The rows of all parts in order of the key, by DuckDB."""
    connection = stack.enter_context(duckdb.connect(config={"memory_limit": memory_limit, "temp_directory": str(scratch)}))
    connection.execute("set TimeZone='UTC'")
    connection.execute("set preserve_insertion_order=false")
    query = f"select * from {parquet(parts)} order by {', '.join(_quote(k) for k in table.key)}"
    yield from connection.sql(query).to_arrow_reader(table.group_rows)


def _in_order(parts: Sequence[Path], key: tuple[str, ...]) -> list[Path] | None:
    """The parts that have rows, in order, where all their keys grow from row to row and from part to part; None where not."""
    found = []
    for part in parts:
        bounds = _bounds(part, key)
        if bounds is None:
            return None
        if bounds:
            found.append((*bounds, part))
    found.sort(key=lambda one: one[0])
    if any(before[1] >= after[0] for before, after in pairwise(found)):
        return None
    return [part for _, _, part in found]


def _bounds(part: Path, key: tuple[str, ...]) -> tuple[Any, ...] | None:
    """The first and the last key of a part; empty where it has no rows, None where its keys do not grow from row to row."""
    first: tuple[Any, ...] = ()
    last: tuple[Any, ...] = ()
    for batch in batches_of(part, columns=list(key)):
        columns = [batch.column(name) for name in key]
        if any(column.null_count for column in columns):
            return None
        if batch.num_rows:
            low, high = (tuple(column[at].as_py() for column in columns) for at in (0, batch.num_rows - 1))
            if not _grow(columns) or (last and last >= low):
                return None
            first, last = first or low, high
    return (first, last) if first else ()


def _grow(columns: list[pa.Array]) -> bool:
    """Whether each row of some columns is larger than the one before, by the first column, then the second, and so on."""
    larger = None
    for column in reversed(columns):
        before, after = column[:-1], column[1:]
        more = pc.less(before, after)
        larger = more if larger is None else pc.or_(more, pc.and_(pc.equal(before, after), larger))
    return pc.all(larger, min_count=0).as_py() is True


def empty(name: str, target: Path) -> None:
    """Write a table without rows."""
    table = table_schema(name)
    with pq.ParquetWriter(target, table.schema, compression="zstd"):
        pass


FEW = 10_000
"""Rows up to which counting ids takes less time than starting DuckDB."""


def _ids(files: Sequence[Path]) -> list[str]:
    return [i for file in files for i in pq.ParquetFile(file).read(columns=["id"])["id"].to_pylist()]


def imbalance(came: Sequence[Path], went: Sequence[Path], scratch: Path, most: int = 3) -> list[tuple[str, int]]:
    """Ids that are not as often in the files `went` as in `came`, with how many are missing there (negative: too many).

    At most `most` of them, in order. Two sums of hashes are compared first, in constant memory; their order is not needed.
    """
    if sum(pq.read_metadata(file).num_rows for file in (*came, *went)) <= FEW:
        counts = Counter(_ids(came))
        counts.subtract(_ids(went))
        return sorted((i, n) for i, n in counts.items() if n)[:most]
    with duckdb.connect(config={"memory_limit": "2GB", "temp_directory": str(scratch / ".sort")}) as connection:
        ids = [
            f"(select id from {parquet(files)})" if files else "(select ''::varchar as id where false)"
            for files in (came, went)
        ]
        sums = [connection.execute(f"select count(*), sum(hash(id)) from {one}").fetchall() for one in ids]
        if sums[0] == sums[1]:
            return []
        found = connection.execute(
            f"""select id, sum(n)::bigint as missing from (select id, 1 as n from {ids[0]} union all select id, -1 from {ids[1]})
            group by id having missing <> 0 order by id limit {most}"""
        )
        return [(str(i), int(n)) for i, n in found.fetchall()]


def parquet(files: Sequence[Path], *, filename: bool = False) -> str:
    """SQL for the rows of Parquet files, columns by name; whatever their paths hold, they are no patterns and no columns."""
    paths = ", ".join(literal(pattern(file)) for file in files)
    return f"read_parquet([{paths}], union_by_name = true, hive_partitioning = false, filename = {str(filename).lower()})"


def pattern(file: Path) -> str:
    """The glob pattern that matches this path alone."""
    return re.sub(r"[\[*?]", r"[\g<0>]", str(file))


def literal(text: str) -> str:
    """A text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _regroup(batches: Iterable[pa.RecordBatch], schema: pa.Schema, rows: int) -> Iterator[pa.Table]:
    """Tables of exactly `rows` rows (the last may have fewer) with `schema`."""
    held: list[pa.Table] = []
    count = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(_filled(pa.Table.from_batches([batch]), schema))
        count += batch.num_rows
        while count >= rows:
            whole = pa.concat_tables(held)
            yield whole.slice(0, rows).combine_chunks()
            held, count = [whole.slice(rows)], count - rows
    if count:
        yield pa.concat_tables(held).combine_chunks()


def _filled(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with this schema; a column that its part has not is null."""
    for field in schema:
        if field.name not in table.schema.names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(schema.names).cast(schema)


def _check_unique(table: TableSchema, group: pa.Table, last: tuple[object, ...] | None) -> tuple[object, ...]:
    keys = list(zip(*(group.column(k).to_pylist() for k in table.key), strict=True))
    for before, after in zip([last, *keys[:-1]], keys, strict=True):
        if before == after:
            raise PunaError(f"table {table.name}: two rows have the key {dict(zip(table.key, after, strict=True))}")
    return keys[-1]
