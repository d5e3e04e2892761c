"""`StageRun`: the interface between a stage and its surroundings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from puna.stages.contract.config import StageConfig
from puna.stages.contract.shardwork import Job, Produce, Scattering, produced, scattered, transformed
from puna.stages.contract.signals import described
from puna.stages.executors import ordered, ranks
from puna.storage import Artifact, Part, PunaError, Work
from puna.storage.exchange import Exchange, Partition, Scatter, Scattered, gathered, level
from puna.storage.parts import Beside, span
from puna.storage.schemas import table_schema

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Figure:
    """A plot as data: named series of (x, y) points; x may be a category's name in a bar plot. `lines`: named horizontal lines."""

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
    """The argument through which a stage reads its surroundings and writes its artifact."""

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
        self._work.mapper = lambda function, jobs: ordered(executor, function, jobs, ())

    def map(self, function: Callable[..., Any], items: Iterable[Any], *args: Any, rows: int | None = None) -> Iterator[Any]:
        """Yield `function(item, *args)` for each item, in order; `function` must be module-level. `rows`: number of items."""
        for number, result in enumerate(ordered(self._executor, function, items, args), 1):
            if rows:
                self.progress(number, rows)
            yield result

    def parts(self, artifact: Artifact, table: str | None = None, columns: list[str] | None = None) -> list[Part]:
        """Return the artifact's table cut into parts, for `map`."""
        return artifact.parts(table, columns, self._part_rows)

    def transform(
        self, function: Callable[..., Any], artifact: Artifact, *args: Any, table: str | None = None, columns: list[str] | None = None
    ) -> list[Any]:
        """Write `function(rows, *args)` for every part of a table of `artifact`, shard by shard. Return the values.

        The function returns the main table, or tables by name; or a tuple of these and a JSON value. An argument for rows of another table
        (`artifact.beside`, an exchange by id) is passed as the rows with the same ids. An exchange by `shard` number is passed as the rows
        whose column `row` lies in the part, counted from its first row. Each shard is written by its worker, and survives a crash.
        Unchanged documents are kept by reference.
        """
        return self._shards(function, artifact, args, table, columns, filtering=False)

    def filter(self, function: Callable[..., Any], artifact: Artifact, *args: Any, columns: list[str] | None = None) -> list[Any]:
        """Keep the rows of the main table of `artifact` that `function(rows, *args)` selects. Return the values.

        The function returns booleans, or a dictionary with these as `keep` and side tables by name; or a tuple of either and a JSON value.
        Only `columns` are read, and no text is written.
        """
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
        infos = self._claimed(transformed, jobs, [job.name for job, _ in jobs], [job.rows.rows for job, _ in jobs])
        self._work.declare(self.kind)
        return [value for values in infos for value in values or ()]

    def _next(self, what: str) -> str:
        """Return the name of the next call; a stage makes the same calls in every attempt."""
        self._calls += 1
        return f"{what}{self._calls - 1}"

    def _claimed(self, function: Callable[..., Any], jobs: list[Any], names: list[str], sizes: list[int]) -> list[Any]:
        """Run jobs that write tables, except jobs that an earlier attempt finished. Claim their output and return their infos."""
        before = [self._work.earlier(name) for name in names]
        todo = [job for job, earlier in zip(jobs, before, strict=True) if earlier is None]
        results = ordered(self._executor, function, todo, ())
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
        """Write `function(item, *args)` for every item, as `transform` does for shards. The rows never pass through this process.

        A stage must give the same items in every attempt. An item's rows are a shard if no other item's keys lie between theirs.
        """
        call = self._next("produce")
        jobs = [Produce(function, item, args, self.kind, f"{call}-{n:06d}", self._work.staging) for n, item in enumerate(items)]
        self._work.ranges.add(self.kind)
        self._claimed(produced, jobs, [job.name for job in jobs], [1] * len(jobs))

    def produce_shards(self, function: Callable[..., Any], exchange: Exchange, cut: int, *args: Any) -> list[Any]:
        """Write `function(rows, *args)`, tables by name or these and a JSON value, per shard of an exchange by id.

        The rows of a shard come partition by partition, so that none is ever in memory as a whole. Return the values of all calls.
        """
        call = self._next("shards")
        self._work.cut = cut
        jobs = []
        for number in range(cut):
            around = span(cut, number)
            part, name = exchange.within(*around), f"{call}-{number:05d}"
            jobs.append(Produce(function, part, args, self.kind, name, self._work.staging, (number, cut, around)))
        infos = self._claimed(produced, jobs, [job.name for job in jobs], [1] * len(jobs))
        return [value for values in infos for value in values]

    def exchange(
        self, function: Callable[..., Any], items: Sequence[Any], *args: Any, by: str, partitions: int, rows: int | None = None
    ) -> Exchange:
        """Regroup the rows that `function(item, *args)` makes by their column `by`, out of core; finished jobs survive a crash.

        The function returns a table, an iterator of tables, or a tuple of either and a JSON value for `infos`. `by` is uint64 or an id,
        whose leading bits count, or the partition's number (int32).
        """
        call, runs = self._next("exchange"), level(partitions)
        exchange = gathered(self._work.files, self._regrouped(call, function, items, args, by, partitions, [runs]), partitions, by, runs)
        if runs.step == 1:
            return exchange
        groups = [range(first, min(first + runs.step, partitions)) for first in runs]
        results = self._regrouped(f"{call}-group", Partition.tables, exchange.parts, (), by, partitions, groups)
        parts = [gathered(self._work.files, [one], partitions, by, own).parts for one, own in zip(results, groups, strict=True)]
        return replace(exchange, parts=tuple(replace(part, schema=exchange.schema) for part in chain.from_iterable(parts)))

    def _regrouped(
        self, call: str, function: Callable[..., Any], items: Sequence[Any], args: tuple[Any, ...], by: str, count: int, runs: list[range]
    ) -> list[Scattered]:
        """Write the rows of items by partition. `runs`: the partitions of each item, or of all items; see `Scatter`."""
        names = [Scatter(self._work.staging, f"{call}-{n:05d}", by, count, runs[n % len(runs)]) for n in range(len(items))]
        jobs = [Scattering(function, item, args, how) for item, how in zip(items, names, strict=True)]
        results = []
        for number, (one, warning) in enumerate(ordered(self._executor, scattered, jobs, ()), 1):
            if warning:
                self._work.say(warning)
            results.append(one)
            self.progress(number, len(jobs))
        return results

    def write(self, table: pa.Table, name: str | None = None) -> None:
        """Append rows to the main table (None) or a side table."""
        self._work.add(name or self.kind, described(name or self.kind, table), f"driver-{self._written:06d}")
        self._written += 1

    def write_rows(self, rows: list[dict[str, Any]], name: str | None = None) -> None:
        """Append rows given as dicts; columns that no row names are null."""
        if rows:
            self.write(_table(rows, name or self.kind), name)
        else:
            self._work.declare(name or self.kind)

    def once(self, name: str, make: Callable[[], list[dict[str, Any]]], columns: list[str]) -> pa.Table:
        """Write the rows that `make` returns to the main table, in this process, and return these columns of them.

        After a crash they are read back. The rows of one name must be the same in every attempt.
        """
        job = f"{self.kind}-once-{name}"
        ranks.agree(self._work.earlier(job) is None)  # where they are missing, the other ranks help to make them
        self.rows_once(name, make)
        staged = self._work.earlier(job)
        tables = [rows.read(0, rows.rows, columns) for one in staged or () for rows in [one.rows(self._work.files)] if rows.rows]
        return pa.concat_tables(tables) if tables else table_schema(self.kind).schema.empty_table().select(columns)

    def rows_once(self, name: str, make: Callable[[], list[dict[str, Any]]], table: str | None = None) -> None:
        """Write the rows that `make` returns to a table; after a crash reuse the written rows."""
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
        """Report that `done` of `total` units are finished."""
        if self._listener is not None:
            self._listener.progress(self.stage, done, total, note)

    def metric(self, name: str, value: float | int | str) -> None:
        if isinstance(value, float) and not (value == value and abs(value) != float("inf")):
            raise PunaError(f"stage {self.stage}: metric {name} is {value}")
        self.metrics[name] = value

    def figure(self, name: str, figure: Figure) -> None:
        self.figures[name] = figure

    def count_input(self, rows: int) -> None:
        """Count `rows` input rows of an input that is no artifact: they must all be kept or dropped."""
        self.input_rows = (self.input_rows or 0) + rows

    def seed(self, *names: Any) -> int:
        """Return a 63-bit seed derived from the configuration's seed and the names, from nothing else."""
        base = getattr(self.config, "seed", None)
        if base is None:
            raise PunaError(f"stage {self.stage}: its configuration has no seed; derive it from SeededConfig")
        text = "\0".join([str(base), *map(str, names)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def generator(self, *names: Any) -> np.random.Generator:
        """Return a random generator seeded with `seed(*names)`."""
        import numpy as np

        return np.random.default_rng(self.seed(*names))


def _table(rows: list[dict[str, Any]], name: str) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    metric = {"meaning": "metric of the objective", "unit": ""}
    schema = table_schema(name).schema_for(pa.schema([pa.field(n, pa.float64(), metadata=metric) for n in names]))
    if missing := [f.name for f in schema if not f.nullable and f.name not in names]:
        raise PunaError(f"table {name}: column {missing[0]!r} is missing")
    # Nullability is checked when the part is written, with a message that names the column.
    loose = pa.schema([f.with_nullable(True) for f in schema])
    try:
        return pa.Table.from_pylist(rows, schema=loose)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise PunaError(f"table {name}: {error}") from error


def _of_shard(value: Any, number: int, around: tuple[str, str | None] | None) -> Any:
    if isinstance(value, Exchange) and value.by == "shard":
        return value.parts[number]
    return value.within(*around) if around and isinstance(value, (Beside, Exchange)) else value
