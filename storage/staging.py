"""The staging area of unfinished work: jobs' shards in final form, and a record per job with the checksums of its files.

A record is written after its files. Files of an earlier attempt are checked against their record before use; if one is damaged, the job
runs again. So records and regrouped rows need not survive a power failure; committed shards must."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from puna.storage import digest
from puna.storage.files import Files
from puna.storage.parts import Ints, ShardRows, Stored, collect
from puna.storage.schemas import table_schema
from puna.storage.shards import FACTS, FileRecord, Shard, ShardWriter, Written, facts_of, in_order


@dataclass(frozen=True)
class Staged:
    """One table's rows that a job wrote, in key order. `files`: table, order, facts → name and record. `number`: shard; None: to merge."""

    table: str
    shard: Shard
    columns: dict[str, str]
    files: dict[str, tuple[str, FileRecord]]
    number: int | None = None
    cut: int = 0
    info: Any = None  # the JSON value that the job returned with its tables
    values: dict[str, int] = field(default_factory=dict)  # column → number of non-null values, for an open table

    def stored_file(self, files: Files, what: str = "table") -> Stored | None:
        if what not in self.files:
            return None
        name, record = self.files[what]
        return Stored(files, name, record.sha256, self.shard.groups if what == "table" else ())

    def rows(self, files: Files, sources: tuple[Stored | None, ...] = ()) -> ShardRows:
        """Return references to the rows. `sources`: the files whose rows are kept by reference."""
        low, high = tuple(self.shard.low), tuple(self.shard.high)
        return ShardRows(self.shard.rows, low, high, (self.stored_file(files), *sources), self.stored_file(files, "order"))


@dataclass(frozen=True)
class Staging:
    """The folder of the store where the jobs of one unfinished artifact write their output."""

    files: Files
    folder: str

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Path]:
        """Yield a new local folder for writing; remove it afterwards."""
        path = self.files.scratch(f"{self.folder}/.{os.getpid()}-{uuid.uuid4().hex}")
        try:
            yield path
        finally:
            try:
                path.rmdir()  # usually empty by now, since the files were moved
            except OSError:
                shutil.rmtree(path)

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        """Yield a path for a temporary local file, which may be moved elsewhere; remove it afterwards if it is still there."""
        path = self.files.scratch(self.folder) / f".{os.getpid()}-{uuid.uuid4().hex}"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def keep(self, job: str, tables: dict[str, Written], temporary: Path, **more: Any) -> list[Staged]:
        """Move a job's files (`TABLE.parquet`, `TABLE.order.parquet`, …) from the folder `temporary` to the staging folder; write the job's
        record; return the tables. `more`: further fields of `Staged`."""
        staged = []
        # Attempts at a job may overlap: each writes separate files, and the record names the files of one attempt.
        attempt = uuid.uuid4().hex[:8]
        for table, shard in tables.items():
            files = {}
            for what, record in shard.files.items():
                end = "" if what == "table" else f".{what}"
                name = f"{self.folder}/{table}/{job}-{attempt}{end}.parquet"
                self.files.put(name, temporary / f"{table}{end}.parquet")
                files[what] = (name, record)
            staged.append(Staged(table, shard.shard, shard.columns, files, values=shard.values, **more))
        self.note(job, staged)
        return staged

    def note(self, job: str, value: Any) -> None:
        text = json.dumps(value, default=vars)
        self.files.write(f"{self.folder}/{job}.json", f'{{"made": {text}, "checksum": "{_checksum(text)}"}}'.encode(), lasting=False)

    def job_record(self, job: str) -> Any:
        """Return the record of a job, or None. Remove a damaged record and raise `Damaged`."""
        try:
            data = json.loads(self.files.read(f"{self.folder}/{job}.json"))
            if data["checksum"] == _checksum(json.dumps(data["made"])):
                return data["made"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            pass
        self.files.remove(f"{self.folder}/{job}.json")
        raise Damaged(f"the record of {job}")

    def earlier(self, job: str) -> list[Staged] | None:
        """Return the tables that an earlier attempt of a job wrote, or None. If a file is damaged, remove the record; raise `Damaged`."""
        if (tables := self.job_record(job)) is None:
            return None
        staged = [_staged_of(one) for one in tables]
        for name, record in (file for one in staged for file in one.files.values()):
            if not self.whole(name, record):
                self.files.remove(f"{self.folder}/{job}.json")
                raise Damaged(name)
        return staged

    def whole(self, name: str, record: FileRecord) -> bool:
        """True if a file has the size and checksum in its record."""
        stat = self.files.stat(name)
        return stat is not None and stat.bytes == record.bytes and digest.of_stored(self.files, name) == record.sha256


class Damaged(Exception):
    """The error for a damaged file or record of an earlier attempt, whose job must run again."""


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _staged_of(data: dict[str, Any]) -> Staged:
    files = {what: (name, FileRecord(**record)) for what, (name, record) in data["files"].items()}
    return Staged(**data | {"shard": Shard.of(data["shard"]), "files": files})


@dataclass
class Outputs:
    """The tables that one job makes. Rows of the table `streamed` are written immediately, those of other tables at the end, sorted."""

    staging: Staging
    job: str
    streamed: str = ""
    facts: tuple[Stored | None, ...] | None = None
    """Files with digests and characters of rows that may be kept by reference: item n - 1 is for source n; None: no rows may be kept."""
    _held: dict[str, list[pa.Table]] = field(default_factory=dict)
    _order: list[tuple[Ints, Ints]] = field(default_factory=list)
    _facts: list[pa.Table] = field(default_factory=list)
    _span: list[str] = field(default_factory=list)
    _known: dict[int, pa.Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(self.staging.temporary())
        writer = ShardWriter(self.streamed, self._folder / f"{self.streamed}.parquet") if self.streamed else None
        self._main = writer and self._stack.enter_context(writer)

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(self, table: str, rows: pa.Table) -> None:
        """Add rows of a table. For the table `streamed`, each call's keys must be greater than those of earlier calls."""
        if table != self.streamed:
            self._held.setdefault(table, []).append(table_schema(table).conform(rows))
            return
        assert self._main is not None
        rows = in_order(table_schema(table).conform(rows), table_schema(table).key)
        facts = None if self.facts is None else facts_of(rows)
        if facts is not None:
            self._refer(rows["id"], np.zeros(len(rows), np.int64), np.arange(self._main.rows, self._main.rows + len(rows)), facts)
        self._main.add(rows, facts)

    def keep(self, ids: pa.ChunkedArray, source: Ints, row: Ints) -> None:
        """Keep rows of other artifacts by reference, given by ids, source numbers, and row numbers in the sources."""
        self._refer(ids, source, row, self._known_facts(source, row))

    def add_mixed(self, rows: pa.Table, changed: pa.Array, source: Ints, row: Ints) -> None:
        """Write the `changed` rows (a mask), and keep the others by reference. For the other parameters, see `keep`."""
        assert self._main is not None
        own = np.asarray(changed)
        mine = rows.filter(changed)
        source, row = source.copy(), row.copy()
        source[own], row[own] = 0, np.arange(self._main.rows, self._main.rows + mine.num_rows)
        facts = facts_of(mine)
        old = self._known_facts(source[~own], row[~own])
        place = np.empty(len(own), np.int64)
        place[own], place[~own] = np.arange(len(mine)), len(mine) + np.arange(len(old))
        self._refer(rows["id"], source, row, pa.concat_tables([facts, old]).take(pa.array(place)))
        if mine.num_rows:
            self._main.add(mine, facts)

    def _refer(self, ids: pa.ChunkedArray, source: Ints, row: Ints, facts: pa.Table) -> None:
        if len(ids):
            first, last = ids[0].as_py(), ids[-1].as_py()
            self._span = [self._span[0] if self._span else first, last]
            self._order.append((source, row))
            self._facts.append(facts)

    def _known_facts(self, source: Ints, row: Ints) -> pa.Table:
        assert self.facts is not None
        for number in set(np.unique(source).tolist()) - self._known.keys():
            file = self.facts[number - 1]
            assert file is not None
            self._known[number] = file.whole()
        if not len(source):
            return FACTS.empty_table()
        return collect(source, row, lambda number, rows: self._known[number].take(pa.array(rows)))

    def finish(self, *, number: int | None = None, cut: int = 0, info: Any = None) -> list[Staged]:
        """Finish all tables, move their files to the staging folder, and return the staged tables."""
        tables: dict[str, Written] = {}
        if self._main is not None:
            tables[self.streamed] = self._main.close(*self._references())
        for table, pieces in self._held.items():
            tables[table] = write_sorted(table, pieces, self._folder / f"{table}.parquet")
        return self.staging.keep(self.job, tables, self._folder, number=number, cut=cut, info=info)

    def _references(self) -> tuple[Any, ...]:
        """Return (order, facts, span) for `ShardWriter.close` if some rows are kept by reference, else ()."""
        if self.facts is None or not self._order:
            return ()
        source, row = (np.concatenate([pair[k] for pair in self._order]) for k in (0, 1))
        if not source.any():
            return ()
        facts = pa.concat_tables(self._facts).combine_chunks()
        return pa.table({"source": source, "row": row}), facts, (self._span[0], self._span[1])


def write_sorted(table: str, pieces: list[pa.Table], path: Path) -> Written:
    """Write in-memory pieces to `path`, sorted by the table's key. A column that a piece lacks is null in its rows. Return the shard."""
    schema = table_schema(table)
    whole = schema.schema_for(unite(piece.schema for piece in pieces))
    rows = in_order(pa.concat_tables([fill(piece, whole) for piece in pieces]), schema.key)
    with ShardWriter(table, path) as writer:
        writer.open(whole)
        writer.add(rows)
        return writer.close()


def unite(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Return a schema with the columns of all schemas; each column has the type of its first occurrence."""
    fields: dict[str, pa.Field] = {}
    for schema in schemas:
        for one in schema:
            fields.setdefault(one.name, one)
    return pa.schema(fields.values())


def fill(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return `table` with this schema; columns that `table` lacks are null."""
    for one in schema:
        if one.name not in table.schema.names:
            table = table.append_column(one, pa.nulls(table.num_rows, one.type))
    return table.select(schema.names).cast(schema)
