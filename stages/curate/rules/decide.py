"""Decisions of rules on documents, from tables of signals: thresholds, and SQL expressions such as `link_density > 0.5 and words < 200`.

An expression, in DuckDB's dialect, is checked before anything runs: its columns must exist, it must be deterministic, and it must concern
one document only (no aggregate, window function or subquery). It cannot read files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from puna.models.languages.registry import FACTOR
from puna.stages.contract import did_you_mean
from puna.stages.curate.rules.groups import Rule
from puna.storage import PunaError, errors_at
from puna.storage.schemas import table_schema
from puna.storage.tables import connect

Factors = Mapping[str, NDArray[np.float64]]  # signal → factors on its thresholds, float64[n]; NaN: the rule skips the document

DROPPED = table_schema("dropped").schema
REFUSED = {"SUBQUERY": "a subquery", "WINDOW": "a window function", "STAR": "*", "PARAMETER": "a parameter"}


@dataclass(frozen=True)
class SqlRule:
    """A rule that drops a document if `expression` is true. `columns`: the signals, and possibly `source`, that the expression reads."""

    name: str
    expression: str
    columns: tuple[str, ...]

    @property
    def signals(self) -> tuple[str, ...]:
        return tuple(name for name in self.columns if name != "source")


def parse(name: str, expression: str) -> SqlRule:
    """Parse an SQL expression as rule `sql.NAME`. Raise PunaError if it is invalid, reads no column, or concerns more than one document."""
    where = f"select.sql.{name}: {expression!r}"
    with _connection() as connection:
        row = connection.execute("select json_serialize_sql(?)", [f"select ({expression}\n)"]).fetchone()
        tree = json.loads(row[0] if row else "{}")
        if tree.get("error"):
            raise PunaError(f"{where} is not a valid SQL expression: {tree['error_message']}")
        statements = tree["statements"]
        node = statements[0]["node"]
        if len(statements) != 1 or len(node.get("select_list", [])) != 1 or node["from_table"]["type"] != "EMPTY" or node["where_clause"]:
            raise PunaError(f"{where} is more than one expression")
        columns: dict[str, None] = {}
        for inner in _nodes(node["select_list"]):
            kind = inner.get("class")
            if kind in REFUSED:
                raise PunaError(f"{where} has {REFUSED[kind]}; a rule is a condition on the signals of one document")
            if kind == "COLUMN_REF":
                columns[".".join(inner["column_names"])] = None
            if kind == "FUNCTION":
                _check_function(connection, inner["function_name"], where)
    if not columns:
        raise PunaError(f"{where} reads no signal")
    return SqlRule(f"sql.{name}", expression, tuple(columns))


def check_columns(rules: Iterable[SqlRule], kinds: dict[str, pa.DataType | None]) -> None:
    """Raise PunaError if a rule reads a signal not in `kinds` (signal → type), or is not boolean (unchecked if a type is None)."""
    for rule in rules:
        for name in rule.signals:
            if name not in kinds:
                raise PunaError(f"select.{rule.name} reads {name!r}, which no input contains{did_you_mean(name, sorted(kinds))}")
        types = [kinds.get(name, pa.string()) if name != "source" else pa.string() for name in rule.columns]
        if all(kind is not None for kind in types):
            empty = pa.schema(list(zip(rule.columns, types, strict=True))).empty_table()
            with _connection() as connection:
                connection.register("documents", empty)
                with errors_at(f"select.{rule.name}: {rule.expression!r}", duckdb.Error):
                    results = connection.sql(f"select ({rule.expression}\n) from documents").to_arrow_table().schema.types[0]
            if not pa.types.is_boolean(results):
                raise PunaError(f"select.{rule.name}: {rule.expression!r} gives {results}; a rule is true or false, for example words < 50")


def sql_fires(rule: SqlRule, table: pa.Table) -> NDArray[np.bool_]:
    """Return a mask bool[n] of the rows of `table` that the rule drops. A null condition drops nothing. Raise PunaError if DuckDB fails."""
    with _connection() as connection:
        connection.register("documents", table.select(list(rule.columns)))
        with errors_at(f"select.{rule.name}: {rule.expression!r}", duckdb.Error):
            results = connection.sql(f"select coalesce(({rule.expression}\n), false) from documents").to_arrow_table()
    return np.array(results.column(0).to_pylist(), np.bool_)


def sql_row(rule: SqlRule, identity: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a document's row of `dropped`, with the condition and the values it reads. `value` is null unless it reads a single number."""
    numbers = [values[name] for name in rule.signals if isinstance(values[name], int | float)]
    values_text = ", ".join(f"{name} = {values[name]}" for name in rule.columns)
    value = float(numbers[0]) if len(rule.columns) == len(numbers) == 1 else None
    return {"id": identity, "rule": rule.name, "value": value, "threshold": None, "detail": f"{rule.expression}: {values_text}"}


def _connection() -> duckdb.DuckDBPyConnection:
    return connect(enable_external_access="false", threads=1)


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _nodes(inner)


def _check_function(connection: duckdb.DuckDBPyConnection, name: str, where: str) -> None:
    """Raise PunaError if a function does not exist, is not scalar (for example an aggregate), or is not deterministic."""
    results = connection.execute("select function_type, stability from duckdb_functions() where function_name = ?", [name]).fetchall()
    if not results:
        raise PunaError(f"{where}: there is no function {name}")
    if any(kind not in ("scalar", "macro") for kind, _ in results):
        raise PunaError(f"{where}: {name} is a function over many rows; a rule is a condition on the signals of one document")
    if any(stability is not None and stability != "CONSISTENT" for _, stability in results):
        raise PunaError(f"{where}: {name} is not deterministic")


def factors_of(languages: pa.Table, table: pa.Table) -> dict[str, NDArray[np.float64]]:
    """Return signal → factors on its thresholds, float64[n], one per row of `table`, from the columns SIGNAL_factor of `languages`. Rows
    are matched by `language` and `script`. A document whose language is not in `languages` has the factor 1. A null factor becomes NaN."""
    keys = pc.binary_join_element_wise(languages["language"], languages["script"], "-").combine_chunks()
    results = pc.index_in(pc.binary_join_element_wise(table["language"], table["script"], "-"), keys).fill_null(len(keys))
    rows = np.array(results, np.int64)
    names = [name for name in languages.column_names if name.endswith(FACTOR)]
    return {name.removesuffix(FACTOR): np.r_[numeric(languages[name]), 1.0][rows] for name in names}


def judges(rule: Rule, table: pa.Table, sources: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return a mask bool[n] of the documents that are of the rule's kinds and sources. `table`: the rule's signals."""
    judged = np.ones(len(sources), np.bool_)
    if rule.kinds:
        # NaN stands for a signal that was not measured; comparisons with it are false.
        judged = np.any([numeric(table[kind.signal]) >= kind.minimum for kind in rule.kinds], axis=0) == rule.of_kind
    if rule.sources:
        judged &= _among(sources, rule.sources)
    if rule.exempt_sources:
        judged &= ~_among(sources, rule.exempt_sources)
    return judged


def abstentions(rules: Iterable[Rule | SqlRule], table: pa.Table, languages: pa.Table) -> dict[str, int]:
    """Return rule → number of documents of its kinds and sources that it skips because their languages have no factor for its signal."""
    without = {signal: np.isnan(factor) for signal, factor in factors_of(languages, table).items()}
    judged = [(rule, judges(rule, table, table["source"])) for rule in rules if isinstance(rule, Rule) and rule.drop.signal in without]
    return {rule.name: count for rule, mask in judged if (count := int((mask & without[rule.drop.signal]).sum()))}


def fires(rule: Rule, table: pa.Table, sources: pa.ChunkedArray, factors: Factors | None = None) -> NDArray[np.bool_]:
    """Return a mask bool[n] of the documents that the rule drops. `table`: the rule's signals; `factors`: see `factors_of`."""
    values, judged = table[rule.drop.signal], judges(rule, table, sources)
    if isinstance(rule.threshold, tuple):
        words = np.array(["" if v is None else str(v) for v in values.to_pylist()])
        missing = np.array(values.is_null())
        out = np.isin(words, rule.threshold)
        out = out if rule.drop.when == "in" else ~out
    else:
        numbers = numeric(values)
        missing = np.isnan(numbers)
        factor = (factors or {}).get(rule.drop.signal, np.ones(1))
        judged &= ~np.isnan(factor)
        out = numbers < rule.threshold * factor if rule.drop.when == "<" else numbers > rule.threshold * factor
    return judged & np.where(missing, rule.drop.missing == "drop", out)


def _among(values: pa.ChunkedArray, names: Sequence[str]) -> NDArray[np.bool_]:
    return np.asarray(pc.is_in(values, pa.array(names, pa.string())), np.bool_)


def numeric(values: pa.ChunkedArray) -> NDArray[np.float64]:
    """Return a numeric column as float64[n], with NaN for null."""
    return np.array(values.cast(pa.float64()).fill_null(math.nan), np.float64)


def decide(table: pa.Table, rules: Sequence[Rule | SqlRule], languages: pa.Table | None = None) -> pa.Table:
    """Return rows of the table `dropped`: each document of `table` (id, source, rules' signals) that a rule drops, with the first such
    rule. With `languages`, `table` also has `language` and `script`, and a document's thresholds depend on its language (`factors_of`)."""
    factors = {} if languages is None else factors_of(languages, table)
    first = np.full(table.num_rows, len(rules), np.int64)
    for index, rule in enumerate(rules):
        gone = sql_fires(rule, table) if isinstance(rule, SqlRule) else fires(rule, table, table["source"], factors)
        first[gone & (first == len(rules))] = index
    results, places = [DROPPED.empty_table()], [np.zeros(0, np.int64)]
    for index in np.unique(first[first < len(rules)]).tolist():
        rule, at = rules[index], np.flatnonzero(first == index)
        columns = rule.columns if isinstance(rule, SqlRule) else (rule.drop.signal,)
        rows = table.select(["id", *columns]).take(pa.array(at))
        if isinstance(rule, SqlRule):
            results.append(pa.Table.from_pylist([sql_row(rule, row.pop("id"), row) for row in rows.to_pylist()], schema=DROPPED))
        else:
            results.append(_by_threshold(rule, rows, factors, at))
        places.append(at)
    return pa.concat_tables(results).take(pa.array(np.argsort(np.concatenate(places))))


def _by_threshold(rule: Rule, rows: pa.Table, factors: Factors, at: NDArray[np.int64]) -> pa.Table:
    values, count = rows[rule.drop.signal], rows.num_rows
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), None, values)  # NaN: not measured
    if isinstance(rule.threshold, tuple):
        value = pa.nulls(count, pa.float64())
        detail = pc.coalesce(values.cast(pa.string()), pa.scalar("not measured"))
    else:
        value = values.cast(pa.float64())
        detail = pc.if_else(pc.is_null(values), pa.scalar("not measured"), pa.scalar(None, pa.string()))
    factor = factors[rule.drop.signal][at] if rule.drop.signal in factors else np.ones(count)
    threshold = pa.nulls(count, pa.float64()) if rule.number is None else pa.array(rule.number * factor)
    return pa.table([rows["id"], pa.repeat(rule.name, count), value, threshold, detail], schema=DROPPED)
