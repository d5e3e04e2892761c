"""Assembly of an artifact's tables from its jobs' pieces, which either are shards in final form or are merged by a worker.

Merging sorts rows by primary key and cuts them into shards, out of core. Equal rows give equal bytes, whichever job computed them."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from puna.storage import shards
from puna.storage.errors import PunaError
from puna.storage.files import Files
from puna.storage.manifest import Source, TableRecord, table_digest
from puna.storage.parts import ShardRows, Stored, Stream, between, near, span
from puna.storage.schemas import TableSchema, table_schema
from puna.storage.shards import NOTHING, FileRecord, ShardWriter
from puna.storage.staging import Outputs, Staged, Staging, fill, unite

Mapper = Callable[[Callable[..., Any], Sequence[Any]], Iterable[Any]]  # applies its first argument to all jobs in workers, in order

LEAST_KEPT = 0.25  # minimum share of the sources' rows to keep by reference; fewer are copied, which is cheaper to read
MERGED_ROWS = 4096  # maximum rows per batch that DuckDB's sort returns
MOST_SOURCES = 4  # maximum number of artifacts whose rows a table may keep by reference. With more, all rows are copied.


@dataclass(frozen=True)
class Pieces:
    """The jobs' pieces of one table. `cut`: number of shards of the corpus that the table belongs to; 0: no corpus."""

    table: str
    staged: list[Staged]
    cut: int = 0
    sources: tuple[Source, ...] = ()
    source_shards: tuple[tuple[Stored | None, ...], ...] = ()  # for each source, its own files by shard
    ranges: bool = False  # true if the pieces have disjoint key ranges, so that they can be shards


class Made(NamedTuple):
    """A finished table, the files of its shards (name in the artifact → name in the store and record), and its staged shards by number."""

    record: TableRecord
    content: dict[str, tuple[str, FileRecord]]
    staged: dict[int | None, Staged]


def finish(pieces: Pieces, staging: Staging, mapper: Mapper) -> Made:
    """Return the table made from `pieces`. They become its shards unchanged, if they can; otherwise jobs that `mapper` runs merge them, or
    copy the rows that they keep by reference. Raise PunaError if merging would be needed for rows kept by reference."""
    schema = table_schema(pieces.table)
    staged = [one for one in pieces.staged if one.shard.rows]
    raw = sum(one.shard.bytes for one in staged)
    same = len({tuple(one.columns.items()) for one in staged}) <= 1
    numbers = [one.number for one in staged]
    whole = bool(staged) and same and None not in numbers and len(set(numbers)) == len(numbers) and len({one.cut for one in staged}) == 1
    small, refers = raw <= schema.shard_bytes, any("order" in one.files for one in staged)
    if whole and (schema.selectable or not small):
        sources = pieces.sources if refers else ()
        if refers and _write_anew(pieces, staged):
            jobs = [(pieces.table, one, tuple(s[one.number or 0] for s in pieces.source_shards), staging) for one in staged]
            staged, sources = list(mapper(_written_anew, jobs)), ()
        return _record(schema, staged, staged[0].cut, sources)
    if refers:
        raise PunaError(f"table {pieces.table}: rows kept by reference were mixed with others; write it in one transform")
    if same and (len(staged) == 1 and (small or pieces.ranges)):
        return _record(schema, [replace(staged[0], number=0, cut=1)], 1, ())
    if same and pieces.ranges and not small and (sequence := _in_order(staged)) is not None:
        return _record(schema, [replace(one, number=n) for n, one in enumerate(sequence)], 0, ())
    by_id = schema.key[0] == "id"
    cut = 1 if small or not by_id else pieces.cut or shards.count(schema, raw)
    (merged,) = mapper(_merge, [(pieces.table, staged, cut, staging)])
    return _record(schema, merged, cut, ())


def _write_anew(pieces: Pieces, staged: list[Staged]) -> bool:
    """True if rows kept by reference must be copied: they are too few, or from too many artifacts."""
    referred = sum(one.shard.rows - one.shard.own for one in staged)
    source_rows = sum(sum(file.groups) for source in pieces.source_shards for file in source if file is not None)
    return referred < LEAST_KEPT * source_rows or len(pieces.sources) > MOST_SOURCES


def _record(schema: TableSchema, staged: Sequence[Staged], cut: int, sources: tuple[Source, ...]) -> Made:
    """Return the finished table of these shards, with the names of its files in the artifact."""
    count = cut or len(staged)
    by_number = {one.number: one for one in staged}
    columns = staged[0].columns if staged else {f.name: str(f.type) for f in schema.schema}
    records, content = [], {}
    for number in range(count):
        one = by_number.get(number)
        if one is None:
            records.append(NOTHING)
            continue
        names = {}
        for what, file in one.files.items():
            end = "" if what == "table" else f".{what}"
            names[what] = f"{schema.name}{end}.parquet" if count == 1 else f"{schema.name}{end}/{number:05d}.parquet"
            content[names[what]] = file
        records.append(replace(one.shard, file=names.get("table", ""), order=names.get("order", ""), facts=names.get("facts", "")))
    rows = sum(s.rows for s in records)
    return Made(TableRecord(rows, table_digest(columns, records), columns, records, cut, list(sources)), content, by_number)


def _in_order(staged: list[Staged]) -> list[Staged] | None:
    sequence = sorted(staged, key=lambda one: one.shard.low)
    return sequence if all(a.shard.high < b.shard.low for a, b in pairwise(sequence)) else None


def _written_anew(job: tuple[str, Staged, tuple[Stored | None, ...], Staging]) -> Staged:
    table, one, sources, staging = job
    rows = one.rows(staging.files, sources)
    with Outputs(staging, f"anew-{one.number:05d}", table) as outputs:
        for start, stop in rows.pieces():
            outputs.add(table, rows.read(start, stop))
        (new,) = outputs.finish(number=one.number, cut=one.cut)
    return new


def _merge(job: tuple[str, list[Staged], int, Staging]) -> list[Staged]:
    """Write the rows of all pieces, sorted by the primary key, as `cut` shards; return the shards that have rows."""
    table, staged, cut, staging = job
    schema = table_schema(table)
    files = [file for one in staged if (file := one.stored_file(staging.files)) is not None]
    whole = schema.schema_for(unite(file.schema() for file in files))
    merged: list[Staged] = []
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(staging.temporary())
        batches = _sort(stack, staged, schema, staging.files, temporary)
        edges = [*shards.bounds(cut), None]
        for number, edge in enumerate(edges):
            with ShardWriter(table, temporary / f"{table}.parquet") as writer:
                writer.open(whole)
                for rows in batches.below(edge):
                    writer.add(fill(rows, whole))
                shard = writer.close()
            if shard.shard.rows:
                merged += staging.keep(f"{table}-merged-{number:05d}", {table: shard}, temporary, number=number, cut=cut)
    return merged


def _sort(stack: contextlib.ExitStack, staged: list[Staged], schema: TableSchema, files: Files, temporary: Path) -> Stream:
    """Return the rows of all pieces in key order: piece after piece if their key ranges are disjoint, else sorted by DuckDB."""
    sequence = _in_order(staged)
    if sequence is not None:
        pieces = (rows for one in sequence for shard in [one.rows(files)] for a, b in shard.pieces() for rows in [shard.read(a, b)])
        return Stream(pieces, schema.key[0])
    paths = [str(files.local(one.files["table"][0])) for one in staged]
    connection = stack.enter_context(connect(memory_limit="2GB", temp_directory=str(temporary / ".sort")))
    connection.execute("set TimeZone='UTC'")
    connection.execute("set preserve_insertion_order=false")
    query = f"select * from {parquet(paths)} order by {', '.join(schema.key)}"
    reader = connection.sql(query).to_arrow_reader(MERGED_ROWS)
    return Stream((pa.Table.from_batches([batch]) for batch in reader), schema.key[0])


class Balance(NamedTuple):
    """The shards of a filter's input (`came`), and those of its outputs, kept and dropped rows (`went`)."""

    came: list[ShardRows]
    went: list[ShardRows]


def imbalance(balance: Balance, cut: int, mapper: Mapper, most: int = 3) -> list[tuple[str, int]]:
    """Return the first `most` ids whose numbers of rows in input and output differ, each with the number missing (negative: too many)."""
    jobs = [(Balance(near(balance.came, *span(cut, n)), near(balance.went, *span(cut, n))), span(cut, n), most) for n in range(cut)]
    return sorted(one for ids in mapper(_imbalance, jobs) for one in ids)[:most]


def _imbalance(job: tuple[Balance, tuple[str, str | None], int]) -> list[tuple[str, int]]:
    balance, (low, high), most = job
    columns = []
    for side in balance:
        ids = [table["id"] for table in between(side, low, high, ["id"])]
        column = pa.concat_arrays([c for one in ids for c in one.chunks]) if ids else pa.array([], pa.string())
        columns.append(column.take(pc.sort_indices(column)))
    input_ids, output_ids = columns
    if input_ids.equals(output_ids):
        return []
    counts = Counter(input_ids.to_pylist())
    counts.subtract(output_ids.to_pylist())
    return sorted((i, n) for i, n in counts.items() if n)[:most]


def shard_rows(pieces: Pieces, made: Made, staging: Staging) -> list[ShardRows]:
    """Return the shards of a finished table whose files are still in the staging folder."""
    columns = pieces.source_shards if made.record.sources else ()
    empty = Staged(pieces.table, NOTHING, {}, {})
    shards = (made.staged.get(number, empty) for number in range(len(made.record.shards)))
    return [one.rows(staging.files, tuple(column[number] for column in columns)) for number, one in enumerate(shards)]


@cache
def empty(name: str) -> bytes:
    """Return the bytes of the Parquet file for a table without rows, with the columns of the table's schema."""
    buffer = pa.BufferOutputStream()
    shards.write_rows(buffer, table_schema(name).schema.empty_table())
    return bytes(buffer.getvalue())


def parquet(files: Sequence[str]) -> str:
    """Return SQL for the rows of Parquet files, with columns matched by name. Paths are not read as glob patterns or Hive partitions."""
    paths = ", ".join(literal(pattern(file)) for file in files)
    return f"read_parquet([{paths}], union_by_name = true, hive_partitioning = false)"


def pattern(file: str) -> str:
    """Return a glob pattern that matches only this path."""
    return re.sub(r"[\[*?]", r"[\g<0>]", file)


def connect(file: str = ":memory:", read_only: bool = False, **config: str | bool | int | float | list[str]) -> duckdb.DuckDBPyConnection:
    """Return a connection to a DuckDB database without a progress bar, which would fill server logs."""
    return duckdb.connect(file, read_only=read_only, config=config).execute("set enable_progress_bar = false")


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
