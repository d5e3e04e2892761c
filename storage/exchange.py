"""The exchange (shuffle): regrouping of jobs' rows by a key.

Each file that a job writes has one run per partition: the partition's rows as an Arrow stream with a checksum. To read a partition, its
runs are fetched from all files. The leading bits of a key select the partition (an int32 key is the partition's number), so a partition by
id is a range of ids. With more than `LEVEL` partitions, runs would be too short. Then a first level writes runs of several partitions each,
and a second level splits them."""

from __future__ import annotations

import bisect
import math
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as ipc

from puna.storage.errors import PunaError
from puna.storage.files import DamagedFile, Files
from puna.storage.parts import in_range
from puna.storage.shards import bounds, shard_of
from puna.storage.staging import Damaged, Staging

MAP_BYTES = 96 << 20  # approximate uncompressed bytes of one file of a job; the file has the runs of all partitions
PIECE_BYTES = 2 << 20  # average uncompressed bytes per run at which a job compresses the rows that it holds
HELD_BYTES, LEAST_PIECE = 16 << 20, 16 << 10  # maximum bytes that a job holds, unless pieces were smaller; compression copies them twice
PARTITION_BYTES = 48 << 20
LEVEL = 2048  # maximum number of partitions per level, so that a run in a job's file has about 48 kB
MOST_PARTITIONS = 1 << 20
READS = 3  # maximum number of reads of a run with a wrong checksum, since a bit may be flipped in transit from an object store
LZ4 = ipc.IpcWriteOptions(compression="lz4")


def partitions(raw: int) -> int:
    """Return the number of partitions, a power of two up to `MOST_PARTITIONS`, for about `raw` uncompressed bytes. Each fits in memory."""
    return min(MOST_PARTITIONS, 1 << max(0, (-(-raw // PARTITION_BYTES) - 1).bit_length()))


def level(count: int) -> range:
    """Return the first partition of every run that the first level writes for `count` partitions."""
    return range(0, count, 1 if count <= LEVEL else math.isqrt(count - 1) + 1)


Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Partition:
    """One partition: in each file of `names`, the partition's run is bytes begins[i] to ends[i] - 1. Terabytes of rows have tens of
    millions of runs, so both are arrays, int64[files]."""

    files: Files
    schema: pa.Schema
    number: int
    names: tuple[str, ...]
    begins: Offsets
    ends: Offsets

    def __reduce__(self) -> tuple[Any, ...]:
        own = np.flatnonzero(self.ends > self.begins)
        names = tuple(self.names[n] for n in own)
        return Partition, (self.files, self.schema, self.number, names, self.begins[own], self.ends[own])

    @property
    def runs(self) -> list[tuple[str, int, int]]:
        own = np.flatnonzero(self.ends > self.begins).tolist()
        return [(self.names[n], int(self.begins[n]), int(self.ends[n])) for n in own]

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows of the partition's runs, in job order. Raise PunaError if a run is damaged."""
        for name, begin, end in self.runs:
            for _ in range(READS):
                data = self.files.read(name, begin, end)
                if _right(data):
                    break
            else:
                raise PunaError(f"{name}: the stored data of partition {self.number} is damaged; run again to write it again")
            yield ipc.open_stream(pa.py_buffer(data)[4:]).read_all()

    def read(self) -> pa.Table:
        return pa.concat_tables([self.schema.empty_table(), *self.tables()])


@dataclass(frozen=True)
class Exchange:
    """Rows regrouped by the column `by` into `count` partitions. `infos`: the extra results that jobs returned, in order."""

    parts: tuple[Partition, ...]
    schema: pa.Schema
    count: int
    by: str
    rows: int = 0
    infos: tuple[Any, ...] = ()

    @property
    def nonempty_parts(self) -> list[Partition]:
        """Return the partitions that have rows. If jobs wrote no rows, return the first, so that derived tables get their columns."""
        return [part for part in self.parts if (part.ends > part.begins).any()] or list(self.parts[:1] if self.infos else ())

    def within(self, low: str, high: str | None) -> Exchange:
        """Return the exchange with only the partitions that may have ids from `low` to below `high` (None: all), if `id` is the key."""
        edges, base = bounds(self.count), self.parts[0].number if self.parts else 0
        first = bisect.bisect_right(edges, low) - base
        last = (self.count if high is None else bisect.bisect_left(edges, high)) - base
        near = self.parts[max(0, first) : max(0, last + 1)]
        return Exchange(near, self.schema, self.count, self.by)

    def pieces(self, low: str, high: str | None) -> Iterator[pa.Table]:
        """Yield the rows with ids from `low` to below `high` (None: all) in order, if `id` is the key; the last table may have no rows."""
        for part in self.parts:
            rows = in_range(part.read(), low, high).sort_by("id")
            if rows.num_rows or part is self.parts[-1]:
                yield rows
            del rows  # free the memory for the next partition


@dataclass(frozen=True)
class Scatter:
    """The partitioning of a job's rows: by the leading bits of the column `by` (uint64 or an id), or by its value (int32). `runs`: number
    of the first partition in each run of the job's files."""

    staging: Staging
    job: str
    by: str
    partitions: int
    runs: range


@dataclass(frozen=True)
class Scattered:
    """The result of a job: its files, each with the ends of its runs of equal partitions; the number of rows; and the job's JSON value."""

    schema: str
    files: list[tuple[str, Offsets]]
    rows: int
    info: Any


def scatter(how: Scatter, tables: pa.Table | Iterable[pa.Table], info: Callable[[], Any]) -> Scattered:
    """Write a job's rows by partition and the job's record; return the result. `info` is called after all rows, for the extra result."""
    files: list[tuple[str, Offsets]] = []
    rows, schema = 0, None
    runs = _Runs(how)
    for table in [tables] if isinstance(tables, pa.Table) else tables:
        schema = table.schema if schema is None else schema
        rows += table.num_rows
        runs.add(table)
        if runs.bytes >= MAP_BYTES:
            files.append(runs.write(len(files)))
            runs = _Runs(how)
    if runs.rows:
        files.append(runs.write(len(files)))
    result = Scattered("" if schema is None else schema.serialize().to_pybytes().hex(), files, rows, info())
    how.staging.note(how.job, vars(result) | {"files": [[name, ends.tolist()] for name, ends in files]})
    return result


class _Runs:
    """A buffer of one output file's rows, compressed in memory piece by piece, in one Arrow stream per run of partitions."""

    def __init__(self, how: Scatter) -> None:
        self._how = how
        self._held: list[pa.Table] = []
        self._left = 0
        self._packed: dict[int, tuple[pa.BufferOutputStream, Any]] = {}
        self.bytes = self.rows = 0

    def add(self, table: pa.Table) -> None:
        self._held.append(table)
        self.rows, self.bytes, self._left = self.rows + table.num_rows, self.bytes + table.nbytes, self._left + table.nbytes
        count = len(self._how.runs)
        if self._left >= min(PIECE_BYTES * count, max(HELD_BYTES, LEAST_PIECE * count)):
            self._pack()

    def _pack(self) -> None:
        table, self._held, self._left = pa.concat_tables(self._held).combine_chunks(), [], 0
        runs, count = self._how.runs, len(self._how.runs)
        place = (_places(table[self._how.by], self._how.partitions) - runs.start) // runs.step
        place = place.astype(np.uint16 if count <= 1 << 16 else np.int64)  # short integers sort faster
        if count > 1:
            table = table.take(pa.array(np.argsort(place, kind="stable")))
        sizes = np.bincount(place, minlength=count)
        for number, end in zip(np.flatnonzero(sizes).tolist(), np.cumsum(sizes)[sizes > 0].tolist(), strict=True):
            if number not in self._packed:
                buffer = pa.BufferOutputStream()
                self._packed[number] = buffer, ipc.new_stream(buffer, table.schema, options=LZ4)
            size = int(sizes[number])
            self._packed[number][1].write_table(table.slice(end - size, size))

    def write(self, number: int) -> tuple[str, Offsets]:
        """Write the job's file `number`; return its name and the ends of its runs."""
        if self._held:
            self._pack()
        staging = self._how.staging
        name = f"{staging.folder}/{self._how.job}-{number:03d}-{uuid.uuid4().hex[:8]}.runs"
        ends = []
        with staging.file() as path:
            with path.open("wb") as file:
                for one in range(len(self._how.runs)):
                    if one in self._packed:
                        buffer, stream = self._packed.pop(one)
                        stream.close()
                        data = buffer.getvalue()
                        file.write(zlib.crc32(data).to_bytes(4, "little"))
                        file.write(data)
                    ends.append(file.tell())
            staging.files.put(name, path)
        return name, np.array(ends, np.int64)


def _right(run: bytes) -> bool:
    return zlib.crc32(memoryview(run)[4:]) == int.from_bytes(run[:4], "little")


def _places(column: pa.ChunkedArray, count: int) -> Any:
    if pa.types.is_string(column.type):
        return shard_of(column, count)
    values = column.combine_chunks().to_numpy(zero_copy_only=False)
    if pa.types.is_uint64(column.type):
        return (values >> np.uint64(64 - (count.bit_length() - 1))).astype(np.int64) if count > 1 else np.zeros(len(values), np.int64)
    if len(values) and not 0 <= values.min() <= values.max() < count:
        raise PunaError(f"rows of an exchange name partitions {values.min()} to {values.max()}, outside 0 to {count - 1}")
    return values


def found_before(how: Scatter) -> Scattered | None:
    """Return the job's result from an earlier attempt; None if there is none, or if its number of runs differs. Raise `Damaged` if one of
    its files is damaged."""
    if (record := how.staging.job_record(how.job)) is None:
        return None
    files = [(name, np.array(ends, np.int64)) for name, ends in record["files"]]
    if any(len(ends) != len(how.runs) for _, ends in files):
        return None
    if (damaged := next((name for name, ends in files if not _whole(how.staging.files, name, ends)), None)) is not None:
        raise Damaged(damaged)
    return Scattered(record["schema"], files, record["rows"], record["info"])


def _whole(files: Files, name: str, ends: Offsets) -> bool:
    """True if a file has the right size and all its runs have the right checksums."""
    stat = files.stat(name)
    if stat is None or stat.bytes != ends[-1]:
        return False
    try:
        return all(_right(files.read(name, begin, end)) for begin, end in pairwise([0, *ends.tolist()]) if end > begin)
    except DamagedFile:
        return False


def gather(files: Files, results: list[Scattered], count: int, by: str, runs: range) -> Exchange:
    """Return the exchange of all jobs' results. `runs`: number of the first partition in each run. Raise PunaError if the jobs' tables have
    different columns."""
    schemas = list(dict.fromkeys(one.schema for one in results if one.schema))
    if len(schemas) > 1:
        raise PunaError("the jobs of an exchange returned tables with different columns")
    schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(schemas[0]))) if schemas else pa.schema([])
    names_and_ends = [file for one in results for file in one.files]
    names = tuple(name for name, _ in names_and_ends)
    edges = np.zeros((len(runs) + 1, len(names)), np.int64)
    for number, (_, ends) in enumerate(names_and_ends):
        edges[1:, number] = ends
    parts = tuple(Partition(files, schema, number, names, edges[at], edges[at + 1]) for at, number in enumerate(runs))
    return Exchange(parts, schema, count, by, sum(one.rows for one in results), tuple(one.info for one in results))
