"""References to a table's shards, which workers read: parts, pieces, and rows of other tables with the same ids."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from puna.storage.files import Files
from puna.storage.shards import bounds

if TYPE_CHECKING:
    from puna.storage.exchange import Exchange

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stored:
    """A Parquet file of the store: its name, its checksum, and the number of rows of each row group."""

    files: Files
    name: str
    sha256: str
    groups: tuple[int, ...]

    @property
    def version(self) -> str:
        """Return the file's cache key: the checksum if the store verifies reads, else the version, which changes with a new file."""
        stat = None if self.files.checks_reads else self.files.stat(self.name)
        return self.sha256 if stat is None else stat.version

    def read(self, groups: Sequence[int], columns: Sequence[str] | None) -> pa.Table:
        with self.files.table(self.name) as handle:
            return self._open(handle).read_row_groups(list(groups), columns=list(columns) if columns is not None else None)

    def schema(self) -> pa.Schema:
        with self.files.table(self.name) as handle:
            return self._open(handle).schema_arrow

    def _open(self, handle: BinaryIO) -> pq.ParquetFile:
        # With pre-buffering, Arrow keeps all row groups that it has read until the file is closed.
        return pq.ParquetFile(handle, metadata=_footer(self.files, self.name, self.version), pre_buffer=False)

    def whole(self) -> pa.Table:
        with self.files.table(self.name) as handle:
            return pq.ParquetFile(handle, pre_buffer=False).read()

    def range(self, start: int, stop: int, columns: Sequence[str] | None) -> pa.Table:
        ends = list(accumulate(self.groups))
        first, last = bisect.bisect_right(ends, start), bisect.bisect_left(ends, stop)
        before = ends[first - 1] if first else 0
        return self.read(range(first, min(last, len(ends) - 1) + 1), columns).slice(start - before, stop - start)

    def take(self, rows: Ints, columns: Sequence[str] | None) -> pa.Table:
        """Return the rows with these ascending numbers (at least one). Only their row groups are read. If the last of these groups has
        further rows, it is cached for the next call."""
        ends = np.cumsum(self.groups)
        groups = np.unique(np.searchsorted(ends, rows, side="right")).tolist()
        key = (self, self.version, None if columns is None else tuple(columns))
        with _GUARD:
            cached = _BEGUN.pop(key, None)
        tables = [(groups[:1], cached[1])] if cached is not None and cached[0] == groups[0] else []
        rest = groups[len(tables) :]
        goes_on = bool(rows[-1] + 1 < ends[groups[-1]])
        # If the last group will be cached, read it separately, so that the cache does not hold the memory of other groups.
        for some in (rest[:-1], rest[-1:]) if goes_on else (rest,):
            if some:
                tables.append((some, self.read(some, columns)))
        if goes_on:
            with _GUARD:
                _BEGUN[key] = groups[-1], tables[-1][1]
                if len(_BEGUN) > MOST_BEGUN:
                    del _BEGUN[next(iter(_BEGUN))]
        return pa.concat_tables([self._of_groups(some, table, rows) for some, table in tables])

    def _of_groups(self, groups: list[int], table: pa.Table, rows: Ints) -> pa.Table:
        """Return the rows of `table`, the content of the row groups `groups`, whose numbers in the file are among `rows`."""
        ends = np.cumsum(self.groups)
        sizes = np.array(self.groups)[groups]
        low, high = np.searchsorted(rows, [ends[groups[0]] - sizes[0], ends[groups[-1]]])
        inside = rows[low:high]
        place = np.searchsorted(ends[groups], inside, side="right")
        places = inside - (ends[groups] - np.cumsum(sizes))[place]
        if len(places) == places[-1] - places[0] + 1:
            return table.slice(int(places[0]), len(places))
        return table.take(pa.array(places))


_GUARD = threading.Lock()
MOST_BEGUN = 4
_BEGUN: dict[tuple[Stored, str, tuple[str, ...] | None], tuple[int, pa.Table]] = {}
"""(file, version, columns) → number and rows of a row group that was only read in part. Rows kept by reference are read in pieces that end
within groups; the last `MOST_BEGUN` such groups stay in memory."""


@lru_cache(maxsize=256)
def _footer(files: Files, name: str, version: str) -> pq.FileMetaData:
    with files.table(name) as handle:
        return pq.ParquetFile(handle, pre_buffer=False).metadata


@lru_cache(maxsize=8)
def _order(files: Files, name: str, version: str) -> tuple[Ints, Ints]:
    with files.table(name) as handle:
        table = pq.ParquetFile(handle).read()
    source, row = (table.column(n).combine_chunks() for n in ("source", "row"))
    if source.null_count or row.null_count:  # numpy would turn nulls into wrong rows
        raise pa.ArrowInvalid(f"{name}: is damaged: an order file must have no nulls")
    return np.asarray(source, dtype=np.int64), np.asarray(row, dtype=np.int64)


@dataclass(frozen=True)
class ShardRows:
    """The rows of one shard by reference; small and picklable. `stored`: the artifact's own file, then its sources' files."""

    rows: int
    low: tuple[Any, ...]
    high: tuple[Any, ...]
    stored: tuple[Stored | None, ...]
    order: Stored | None = None

    def place(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return, for rows `start` to `stop` - 1, each row's source (an index of `stored`), and its row number in the source's file."""
        if self.order is None:
            return np.zeros(stop - start, np.int64), np.arange(start, stop)
        source, row = _order(self.order.files, self.order.name, self.order.version)
        return source[start:stop], row[start:stop]

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        own = self.stored[0]
        if self.order is None:
            assert own is not None
            return own.range(start, stop, columns)
        return self._collect(*self.place(start, stop), columns)

    def take(self, rows: Ints, columns: Sequence[str] | None = None) -> pa.Table:
        if self.order is None:
            return self._collect(np.zeros(len(rows), np.int64), rows, columns)
        source, row = self.place(0, self.rows)
        return self._collect(source[rows], row[rows], columns)

    def _collect(self, source: Ints, row: Ints, columns: Sequence[str] | None) -> pa.Table:
        def take(number: int, rows: Ints) -> pa.Table:
            file = self.stored[number]
            assert file is not None
            return file.take(rows, columns)

        return collect(source, row, take)

    def by_group(self, rows: Ints) -> Iterator[Ints]:
        """Yield the row numbers `rows`, split by the file and row group that contain them, because `take` reads whole groups."""
        source, row = self.place(0, self.rows)
        for number in np.unique(source[rows]).tolist():
            file, here = self.stored[number], rows[source[rows] == number]
            assert file is not None
            group = np.searchsorted(np.cumsum(file.groups), row[here], side="right")
            yield from (here[group == one] for one in np.unique(group))

    def pieces(self, rows: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of pieces of at most `rows` rows, cut between row groups where possible. None: one piece per row group; if
        rows are kept by reference, pieces as large as the largest group."""
        own = self.stored[0]
        if self.order is None and own is not None:
            edges = [0, *accumulate(own.groups)]
            if rows is None:
                yield from pairwise(edges)
                return
        else:
            edges = [0, self.rows]
            rows = rows or max((size for file in self.stored if file is not None for size in file.groups), default=1)
        at = 0
        while at < self.rows:
            # Take as many whole groups as fit, or a piece of a group that does not fit.
            place = bisect.bisect_right(edges, at + rows) - 1
            stop = edges[place] if edges[place] > at else min(at + rows, self.rows)
            yield at, stop
            at = stop


def collect(source: Ints, row: Ints, take: Callable[[int, Ints], pa.Table]) -> pa.Table:
    """Return the rows (source[i], row[i]), at least one, in the order of i. `take(number, rows)` reads rows of the source `number`."""
    numbers = np.unique(source).tolist()
    places = [np.flatnonzero(source == number) for number in numbers]
    pieces = [take(number, row[here]) for number, here in zip(numbers, places, strict=True)]
    return pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces).take(pa.array(np.argsort(np.concatenate(places))))


@dataclass(frozen=True)
class Part:
    """A small, picklable reference to a range of rows of a stored table, which a worker reads itself. `start`: index of its first row."""

    shard: ShardRows
    first: int
    rows: int
    start: int
    columns: tuple[str, ...] | None = None

    @property
    def stop(self) -> int:
        return self.start + self.rows

    def read(self) -> pa.Table:
        return self.shard.read(self.first, self.first + self.rows, self.columns)

    def split(self) -> Iterator[Part]:
        for first, last in self.shard.pieces():
            low, high = max(first, self.first), min(last, self.first + self.rows)
            if low < high:
                yield replace(self, first=low, rows=high - low, start=self.start + low - self.first)

    def of(self, columns: Sequence[str]) -> Part:
        return replace(self, columns=tuple(columns))


def near(shards: Iterable[ShardRows], low: str, high: str | None) -> list[ShardRows]:
    """Return the shards that may have rows whose key is at least `low` and below `high` (None: no bound)."""
    return [s for s in shards if s.rows and s.high[0] >= low and (high is None or s.low[0] < high)]


def in_range(table: pa.Table, low: str, high: str | None, key: str = "id") -> pa.Table:
    """Return the rows whose key is at least `low` and below `high` (None: no bound)."""
    own = pc.greater_equal(table[key], low)
    own = own if high is None else pc.and_(own, pc.less(table[key], high))
    return table if pc.all(own, min_count=0).as_py() else table.filter(own)


def between(shards: Sequence[ShardRows], low: str, high: str | None, columns: Sequence[str] | None, key: str = "id") -> Iterator[pa.Table]:
    """Yield the rows whose key is at least `low` and below `high` (None: no bound), in order, piece by piece."""
    names = list(columns) if columns is not None else None
    read = names if names is None or key in names else [key, *names]
    for shard in near(shards, low, high):
        inside = shard.low[0] >= low and (high is None or shard.high[0] < high)
        for start, stop in shard.pieces():
            table = shard.read(start, stop, read)
            table = table if inside else in_range(table, low, high, key)
            if table.num_rows:
                yield table if names is None else table.select(names)


@dataclass(frozen=True)
class Beside:
    """A second table, from `Artifact.beside`. With each part of the first table, a worker gets this table's rows with the same ids."""

    shards: tuple[ShardRows, ...]
    schema: pa.Schema

    def within(self, low: str, high: str | None) -> Beside:
        """Return the table with only the shards that may have rows in a range of ids."""
        return Beside(tuple(near(self.shards, low, high)), self.schema)

    def pieces(self, low: str, high: str | None) -> Iterator[pa.Table]:
        """Return an iterator over the rows in a range of ids, in order; the tables also have the column `id`."""
        names = self.schema.names
        return between(self.shards, low, high, names if "id" in names else ["id", *names])


class Stream:
    """A reader of rows in key order: each call of `below` yields the next rows whose key is below a bound."""

    def __init__(self, pieces: Iterator[pa.Table], key: str) -> None:
        self._pieces = pieces
        self._key = key
        self._left: pa.Table | None = None

    def below(self, edge: str | None) -> Iterator[pa.Table]:
        """Yield the next rows whose key is below `edge` (None: all remaining rows)."""
        while (rows := self._left if self._left is not None else next(self._pieces, None)) is not None:
            self._left = None
            if edge is None or not rows.num_rows or rows[self._key][-1].as_py() < edge:
                yield rows
                continue
            number = int(np.searchsorted(np.array(rows[self._key].to_pylist(), dtype=object), edge, side="left"))
            self._left = rows.slice(number)
            if number:
                yield rows.slice(0, number)
            return


class Follower:
    """A reader of a table's rows by ascending ranges of ids, in step with another table. Each row is returned once."""

    def __init__(self, table: Beside | Exchange, low: str, high: str | None) -> None:
        self._rows, self._schema = Stream(table.pieces(low, high), "id"), table.schema

    def upto(self, last: str | None) -> pa.Table:
        """Return the rows with ids up to `last` (None: all) that no earlier call returned."""
        pieces = list(self._rows.below(None if last is None else f"{last}\0"))
        return (pa.concat_tables(pieces) if pieces else self._schema.empty_table()).select(self._schema.names)


def span(shards: int, number: int) -> tuple[str, str | None]:
    """Return the lowest id of shard `number` of `shards`, and that of the next shard (None if it is the last)."""
    edges = bounds(shards)
    return edges[number - 1] if number else "", edges[number] if number + 1 < shards else None
