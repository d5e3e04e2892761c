"""`StageRun`, through which a stage distributes its work, writes its artifact, and reports metrics and progress."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from puna.stages.contract.config import StageConfig
from puna.stages.contract.shardwork import Job, Produce, Scattering, produce_tables, scatter_rows, transform_shard
from puna.stages.contract.signals import with_meanings
from puna.stages.executors import map_in_order, ranks
from puna.storage import Artifact, Part, PunaError, Work, errors_at
from puna.storage.exchange import Exchange, Partition, Scatter, Scattered, gather, level
from puna.storage.parts import Beside, span
from puna.storage.schemas import table_schema

MACHINE_ERRORS = (PunaError, ImportError, OSError)  # errors that are not the row's fault: they stop the stage


@dataclass(frozen=True)
class Figure:
    """A plot as data: named series of (x, y) points. In a bar plot, x may be a category name. `lines`: named horizontal lines."""

    title: str
    x: str
    y: str
    series: dict[str, list[tuple[Any, float]]]
    kind: Literal["line", "bar", "scatter"] = "line"
    note: str = ""
    lines: dict[str, float] = field(default_factory=dict)


class Listener(Protocol):
    """An observer of a stage's progress, such as a progress bar."""

    def progress(self, stage: str, done: float, total: float, note: str) -> None:
        """Report that `done` of `total` units of the stage are finished."""


@dataclass(eq=False)
class StageRun:
    """The last argument of a stage's function: distributes work over workers, writes the artifact, and records metrics and figures."""

    stage: str
    kind: str
    config: StageConfig
    _work: Work
    _executor: Executor | None = None
    _listener: Listener | None = None
    _part_rows: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    input_rows: int | None = None
    _written: int = 0
    _calls: int = 0

    def __post_init__(self) -> None:
        executor = self._executor
        self._work.mapper = lambda function, jobs: map_in_order(executor, function, jobs, ())

    def map(self, function: Callable[..., Any], items: Iterable[Any], *args: Any, rows: int | None = None) -> Iterator[Any]:
        """Yield `function(item, *args)` for each item, in order; `function` must be module-level. `rows`: item count, for progress."""
        for number, result in enumerate(map_in_order(self._executor, function, items, args), 1):
            if rows:
                self.progress(number, rows)
            yield result

    def parts(self, artifact: Artifact, table: str | None = None, columns: list[str] | None = None) -> list[Part]:
        """Return the parts of a table (None: the main table) of the artifact, to pass to `map`."""
        return artifact.parts(table, columns, self._part_rows)

    def transform(
        self, function: Callable[..., Any], artifact: Artifact, *args: Any, table: str | None = None, columns: list[str] | None = None
    ) -> list[Any]:
        """Apply `function(rows, *args)` to each part of a table of `artifact`; write the results by shard; return the JSON values.

        The function returns the main table, or a dictionary of tables, or a tuple of either and a JSON value. In place of an argument that
        is another table (`artifact.beside`, or an exchange by id), it gets that table's rows with the part's ids. In place of an exchange
        by `shard`, it gets the rows whose column `row` lies in the part, with `row` counted from the part's start. Finished shards survive
        a crash. Unchanged documents are stored by reference."""
        return self._shards(function, artifact, args, table, columns, filtering=False)

    def filter(self, function: Callable[..., Any], artifact: Artifact, *args: Any, columns: list[str] | None = None) -> list[Any]:
        """Write the rows of the main table of `artifact` that `function(rows, *args)` selects. Return the JSON values of all calls.

        The function returns booleans, or a dictionary with booleans under `keep` and side tables by name, or a tuple of either and a JSON
        value. It gets only `columns`. If rows can be stored by reference, other columns are not read and no text is written."""
        return self._shards(function, artifact, args, None, columns, filtering=True)

    def _shards(
        self, function: Callable[..., Any], artifact: Artifact, args: tuple[Any, ...], table: str | None, columns: list[str] | None, *,
        filtering: bool,
    ) -> list[Any]:  # fmt: skip
        shards, cut = artifact.shards(table), artifact.record(table).cut
        whole = (table or artifact.kind) == self.kind and (columns is None or filtering)
        facts = self._work.refers(artifact) if whole else None
        call = self._next("transform")
        jobs = []
        for number, rows in enumerate(shards):
            if rows.rows:
                around = span(cut, number) if cut else None
                job = Job(
                    function, self.kind, f"{call}-{number:05d}", self._work.staging, rows, number, cut, around,
                    self._part_rows, columns, None if facts is None else facts[number], self._work.shift, filtering,
                )  # fmt: skip
                jobs.append((job, [_of_shard(a, number, around) for a in args]))
        if not cut:
            self._work.ranges.add(self.kind)
        infos = self._run_and_claim(transform_shard, jobs, [job.name for job, _ in jobs], [job.rows.rows for job, _ in jobs])
        self._work.declare(self.kind)
        return [value for values in infos for value in values or ()]

    def _next(self, what: str) -> str:
        """Return a numbered name for the next call, by which a later attempt finds its results: every attempt must make the same calls."""
        self._calls += 1
        return f"{what}{self._calls - 1}"

    def _run_and_claim(self, function: Callable[..., Any], jobs: list[Any], names: list[str], sizes: list[int]) -> list[Any]:
        """Run the jobs that no earlier attempt finished. Add the tables of all jobs to the artifact; return their JSON values."""
        before = [self._work.earlier(name) for name in names]
        todo = [job for job, earlier in zip(jobs, before, strict=True) if earlier is None]
        results = map_in_order(self._executor, function, todo, ())
        done, total = 0, sum(sizes)
        infos = []
        for size, earlier in zip(sizes, before, strict=True):
            staged = next(results) if earlier is None else earlier
            self._work.claim(staged)
            infos.append(staged[0].info if staged else None)
            done += size
            self.progress(done, total)
        return infos

    def produce(self, function: Callable[..., pa.Table | dict[str, pa.Table]], items: Sequence[Any], *args: Any) -> None:
        """Write the tables that `function(item, *args)` returns for each item. Workers write them; no rows pass through this process. A
        stage must pass the same items in every attempt. An item's rows form one shard if no other item has keys in their range."""
        call = self._next("produce")
        jobs = [Produce(function, item, args, self.kind, f"{call}-{n:06d}", self._work.staging) for n, item in enumerate(items)]
        self._work.ranges.add(self.kind)
        self._run_and_claim(produce_tables, jobs, [job.name for job in jobs], [1] * len(jobs))

    def produce_shards(self, function: Callable[..., Any], exchange: Exchange, cut: int, *args: Any) -> list[Any]:
        """Write the tables of `function(rows, *args)` for each of `cut` shards of an exchange by id. Return the JSON values of all calls.
        The function returns a dictionary of tables, or that with a JSON value. To save memory, a call gets one partition's rows."""
        call = self._next("shards")
        self._work.cut = cut
        jobs = []
        for number in range(cut):
            around = span(cut, number)
            part, name = exchange.within(*around), f"{call}-{number:05d}"
            jobs.append(Produce(function, part, args, self.kind, name, self._work.staging, (number, cut, around)))
        infos = self._run_and_claim(produce_tables, jobs, [job.name for job in jobs], [1] * len(jobs))
        return [value for values in infos for value in values]

    def exchange(
        self, function: Callable[..., Any], items: Sequence[Any], *args: Any, by: str, partitions: int, rows: int | None = None
    ) -> Exchange:
        """Compute rows with `function(item, *args)` and partition them on disk by the column `by`. Finished jobs survive a crash.

        The function returns a table, an iterator of tables, or a tuple of either and a JSON value for `infos`. The leading bits of `by`
        (uint64 or an id) determine the partition, or `by` is the partition number (int32)."""
        call, runs = self._next("exchange"), level(partitions)
        exchange = gather(self._work.files, self._regroup(call, function, items, args, by, partitions, [runs]), partitions, by, runs)
        if runs.step == 1:
            return exchange
        groups = [range(first, min(first + runs.step, partitions)) for first in runs]
        results = self._regroup(f"{call}-group", Partition.tables, exchange.parts, (), by, partitions, groups)
        parts = [gather(self._work.files, [one], partitions, by, own).parts for one, own in zip(results, groups, strict=True)]
        return replace(exchange, parts=tuple(replace(part, schema=exchange.schema) for part in chain.from_iterable(parts)))

    def _regroup(
        self, call: str, function: Callable[..., Any], items: Sequence[Any], args: tuple[Any, ...], by: str, count: int, runs: list[range]
    ) -> list[Scattered]:
        """Write the items' rows by partition. `runs`: see `Scatter`; one range of partitions per item, or the same ranges in turn."""
        names = [Scatter(self._work.staging, f"{call}-{n:05d}", by, count, runs[n % len(runs)]) for n in range(len(items))]
        jobs = [Scattering(function, item, args, how) for item, how in zip(items, names, strict=True)]
        results = []
        for number, (one, warning) in enumerate(map_in_order(self._executor, scatter_rows, jobs, ()), 1):
            if warning:
                self._work.say(warning)
            results.append(one)
            self.progress(number, len(jobs))
        return results

    def write(self, table: pa.Table, name: str | None = None) -> None:
        """Append rows to the main table (None) or a side table."""
        self._work.add(name or self.kind, with_meanings(name or self.kind, table), f"driver-{self._written:06d}")
        self._written += 1

    def write_rows(self, rows: list[dict[str, Any]], name: str | None = None) -> None:
        """Append rows given as dictionaries. A column that all rows lack becomes null; raise PunaError if the table requires it."""
        if rows:
            self.write(_table(rows, name or self.kind), name)
        else:
            self._work.declare(name or self.kind)

    def once(self, name: str, make: Callable[[], list[dict[str, Any]]], columns: list[str]) -> pa.Table:
        """Write the rows that `make` returns to the main table; return their `columns`. Rows written before a crash are read back without
        calling `make`. Each `name` must stand for the same rows in every attempt."""
        job = f"{self.kind}-once-{name}"
        ranks.agree(self._work.earlier(job) is None)  # if the rows are missing, the other ranks call `make`, too
        self.rows_once(name, make)
        staged = self._work.earlier(job)
        tables = [rows.read(0, rows.rows, columns) for one in staged or () for rows in [one.rows(self._work.files)] if rows.rows]
        return pa.concat_tables(tables) if tables else table_schema(self.kind).schema.empty_table().select(columns)

    def rows_once(self, name: str, make: Callable[[], list[dict[str, Any]]], table: str | None = None) -> None:
        """Write the rows that `make` returns to `table` (None: the main one). Rows written before a crash are reused."""
        staged = self._work.earlier(f"{(table := table or self.kind)}-once-{name}")
        if staged is None:
            self._work.add(table, _table(make(), table), f"once-{name}")
        else:
            self._work.claim(staged)

    @property
    def folder(self) -> Path:
        """Return the folder whose files become part of the artifact."""
        return self._work.output

    @property
    def scratch(self) -> Path:
        """Return a folder that survives a crash and is deleted after the commit."""
        return self._work.scratch

    def progress(self, done: float, total: float, note: str = "") -> None:
        if self._listener is not None:
            self._listener.progress(self.stage, done, total, note)

    def metric(self, name: str, value: float | int | str) -> None:
        if isinstance(value, float) and not (value == value and abs(value) != float("inf")):
            raise PunaError(f"stage {self.stage}: metric {name} is {value}; the inputs or settings give no finite value")
        self.metrics[name] = value

    def figure(self, name: str, figure: Figure) -> None:
        self.figures[name] = figure

    def count_input(self, rows: int) -> None:
        """Add to the number of input rows. At commit, the output and `dropped` together must have as many rows."""
        self.input_rows = (self.input_rows or 0) + rows

    def seed(self, *names: Any) -> int:
        """Return a 63-bit seed that depends only on the configuration's seed and `names`. Raise PunaError if there is no seed."""
        base = getattr(self.config, "seed", None)
        if base is None:
            raise PunaError(f"stage {self.stage}: its configuration has no seed; derive the configuration class from SeededConfig")
        text = "\0".join([str(base), *map(str, names)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def generator(self, *names: Any) -> np.random.Generator:
        """Return a random generator seeded with `seed(*names)`."""
        return np.random.default_rng(self.seed(*names))


def _table(rows: list[dict[str, Any]], name: str) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    metric = {"meaning": "metric of the objective", "unit": ""}
    schema = table_schema(name).schema_for(pa.schema([pa.field(n, pa.float64(), metadata=metric) for n in names]))
    if missing := [f.name for f in schema if not f.nullable and f.name not in names]:
        raise PunaError(f"table {name}: column {missing[0]!r} is missing")
    # Nullability is checked when the part is written, with a message that names the column.
    loose = pa.schema([f.with_nullable(True) for f in schema])
    with errors_at(f"table {name}", pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.Table.from_pylist(rows, schema=loose)


def _of_shard(value: Any, number: int, around: tuple[str, str | None] | None) -> Any:
    if isinstance(value, Exchange) and value.by == "shard":
        return value.parts[number]
    return value.within(*around) if around and isinstance(value, (Beside, Exchange)) else value
