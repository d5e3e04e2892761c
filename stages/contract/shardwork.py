"""Jobs that workers run for `StageRun`: they read rows, call the stage's function, and write the tables that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from puna.stages.contract.signals import with_meanings
from puna.storage import PunaError
from puna.storage.exchange import Exchange, Partition, Scatter, Scattered, found_before, scatter
from puna.storage.parts import Beside, Follower, ShardRows, Stored
from puna.storage.schemas import table_schema
from puna.storage.staging import Damaged, Outputs, Staged, Staging

STREAMED = ("pages", "documents", "tokens")
"""Main tables that are written in order, row by row; other tables are written at the end of the shard."""


@dataclass(frozen=True)
class Job:
    """A job that transforms one shard of a table. `span`: the shard's range of ids. `facts`, `shift`: see `Work.refers`."""

    function: Callable[..., Any]
    kind: str
    name: str
    staging: Staging
    rows: ShardRows
    number: int
    cut: int
    span: tuple[str, str | None] | None
    part_rows: int | None
    columns: list[str] | None
    facts: tuple[Stored | None, ...] | None
    shift: int
    filtering: bool


def transform_shard(task: tuple[Job, list[Any]]) -> list[Staged]:
    job, args = task
    followers = {n: Follower(a, *(job.span or ("", None))) for n, a in enumerate(args) if isinstance(a, (Beside, Exchange))}
    placed = {n: _by_row(a) for n, a in enumerate(args) if isinstance(a, Partition)}
    with Outputs(job.staging, job.name, job.kind if job.kind in STREAMED else "", job.facts) as outputs:
        read, values = job.columns, []
        if job.filtering and job.columns is not None:
            read = None if job.facts is None else ["id", *(c for c in job.columns if c != "id")]
        for start, stop in job.rows.pieces(job.part_rows):
            rows = job.rows.read(start, stop, read)
            last = None if stop == job.rows.rows or not followers else rows["id"][-1].as_py()
            extras = [followers[n].upto(last) if n in followers else a for n, a in enumerate(args)]
            for n, (table, places) in placed.items():
                low, high = np.searchsorted(places, [start, stop])
                near = table.slice(low, high - low)
                extras[n] = near.set_column(near.schema.get_field_index("row"), "row", pa.array(near["row"].to_numpy() - start))
            view = rows.select(job.columns) if job.columns is not None else rows
            result, *value = made_of(job.function(view, *extras))
            values += value
            tables = dict(result) if isinstance(result, dict) else {"keep" if job.filtering else job.kind: result}
            if job.filtering:
                _keep(outputs, job, rows, start, stop, tables.pop("keep"))
            for table, content in tables.items():
                if table == job.kind and job.facts is not None:
                    _compare(outputs, job, rows, start, stop, table_schema(table).conform(content))
                else:
                    outputs.add(table, with_meanings(table, content))
        return _finish_shard(outputs, job.number, job.cut, job.span, values or None)


def made_of(result: Any) -> tuple[Any, ...]:
    """Return the result of a stage's function as a tuple: (tables,) or (tables, JSON value)."""
    return result if isinstance(result, tuple) else (result,)


def _by_row(partition: Partition) -> tuple[pa.Table, Any]:
    table = partition.read()
    row = table["row"].to_numpy()
    order = np.argsort(row, kind="stable")
    return table.take(pa.array(order)), row[order]


def _finish_shard(outputs: Outputs, number: int, cut: int, span: tuple[str, str | None] | None, info: Any = None) -> list[Staged]:
    """Finish a shard's tables and return them. A table without ids, or with ids outside the shard's range, gets no shard number."""
    if not cut or span is None:
        return outputs.finish(info=info)
    staged = outputs.finish(number=number, cut=cut, info=info)
    low, high = span
    inside = [
        table_schema(one.table).key[0] == "id"
        and (not one.shard.rows or (str(one.shard.low[0]) >= low and (high is None or str(one.shard.high[0]) < high)))
        for one in staged
    ]
    return [one if fits else replace(one, number=None, cut=0) for one, fits in zip(staged, inside, strict=True)]


def _places(job: Job, start: int, stop: int) -> tuple[Any, Any]:
    """Return each row's source number (see `Work.refers`) and its row number in that source, for the rows start:stop."""
    source, row = job.rows.place(start, stop)
    return source + job.shift, row


def _keep(outputs: Outputs, job: Job, rows: pa.Table, start: int, stop: int, keep: Any) -> None:
    mask = np.asarray(keep, dtype=bool)
    if len(mask) != rows.num_rows:
        raise PunaError(f"a filter returned {len(mask)} values for {rows.num_rows} rows")
    selection = rows if mask.all() else rows.filter(pa.array(mask))
    if job.facts is None:
        outputs.add(job.kind, selection)
    elif selection.num_rows:
        source, row = _places(job, start, stop)
        outputs.keep(selection["id"], source[mask], row[mask])


def _compare(outputs: Outputs, job: Job, rows: pa.Table, start: int, stop: int, new_rows: pa.Table) -> None:
    """Keep unchanged documents by reference and write the others. Raise PunaError for ids that are not in `rows`."""
    if _share_memory(new_rows["id"], rows["id"]):
        at = np.arange(rows.num_rows)
    else:
        place = pc.index_in(new_rows["id"], value_set=rows["id"].combine_chunks())
        if place.null_count:
            raise PunaError("a stage's function returned documents whose ids are not among its input rows")
        at = np.asarray(place.combine_chunks() if isinstance(place, pa.ChunkedArray) else place)
    if len(at) > 1 and not (np.diff(at) > 0).all():
        order = np.argsort(at)
        new_rows, at = new_rows.take(pa.array(order)), at[order]
    before = rows if len(at) == rows.num_rows else rows.take(pa.array(at))
    same = np.ones(len(at), bool)
    for name in new_rows.schema.names:
        new, old = new_rows[name], before[name].cast(new_rows[name].type)
        if _share_memory(new, old):
            continue
        equal = pc.fill_null(pc.equal(new, old), False)
        if new.null_count or old.null_count:
            equal = pc.or_(equal, pc.and_(pc.is_null(new), pc.is_null(old)))
        same &= np.asarray(equal.combine_chunks() if isinstance(equal, pa.ChunkedArray) else equal, dtype=bool)
    source, row = _places(job, start, stop)
    outputs.add_mixed(new_rows, pa.array(~same), source[at], row[at])


def _share_memory(one: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    """True if two columns share their memory and are therefore equal."""
    if one.num_chunks != other.num_chunks:
        return False
    places = (
        [(len(c), c.offset, *(None if buffer is None else buffer.address for buffer in c.buffers())) for c in column.chunks]
        for column in (one, other)
    )
    return next(places) == next(places)


@dataclass(frozen=True)
class Produce:
    """A job that writes the tables of one item. `shard`: (shard number, number of shards, id range) if the tables form one shard."""

    function: Callable[..., Any]
    item: Any
    args: tuple[Any, ...]
    kind: str
    name: str
    staging: Staging
    shard: tuple[int, int, tuple[str, str | None]] | None = None


def produce_tables(job: Produce) -> list[Staged]:
    streamed = job.kind if job.shard is not None and job.kind in STREAMED else ""
    with Outputs(job.staging, job.name, streamed) as outputs:
        infos: list[Any] = []
        for item in [job.item] if job.shard is None else job.item.pieces(*job.shard[2]):
            infos += _add(outputs, job, item)
            del item  # frees memory before the next rows
        return outputs.finish() if job.shard is None else _finish_shard(outputs, *job.shard, infos)


def _add(outputs: Outputs, job: Produce, item: Any) -> list[Any]:
    """Write the tables that the function returns for an item; return the JSON values that come with them."""
    tables, *info = made_of(job.function(item, *job.args))
    for table, rows in (tables if isinstance(tables, dict) else {job.kind: tables}).items():
        outputs.add(table, with_meanings(table, rows))
    return info


@dataclass(frozen=True)
class Scattering:
    """A job that computes the rows of one item and writes them by partition."""

    function: Callable[..., Any]
    item: Any
    args: tuple[Any, ...]
    how: Scatter


def scatter_rows(job: Scattering) -> tuple[Scattered, str]:
    """Write an item's rows by partition, unless an earlier attempt did. Return the result, and a warning if earlier files are damaged."""
    warning = ""
    try:
        before = found_before(job.how)
        if before is not None:
            return before, ""
    except Damaged as damaged:
        warning = str(damaged)
    result = job.function(job.item, *job.args)
    tables, info = result if isinstance(result, tuple) else (result, None)
    if isinstance(tables, Iterator):
        values: list[Any] = []
        return scatter(job.how, _tables(tables, values), lambda: values[0] if values else None), warning
    return scatter(job.how, tables, lambda: info), warning


def _tables(items: Iterator[Any], values: list[Any]) -> Iterator[pa.Table]:
    for one in items:
        if isinstance(one, pa.Table):
            yield one
        else:
            values.append(one)
