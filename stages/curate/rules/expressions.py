"""Rules as SQL expressions over signals: `link_density > 0.5 and words < 200`, in DuckDB's dialect.

An expression is checked before anything runs: its columns exist, it is a condition on one document (no aggregate, window or
subquery), and gives the same answer each time. It sees no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.stages.contract import did_you_mean
from puna.storage import PunaError

REFUSED = {"SUBQUERY": "a subquery", "WINDOW": "a window function", "STAR": "*", "PARAMETER": "a parameter"}


@dataclass(frozen=True)
class SqlRule:
    """A document goes when `expression` is true of it; `columns`: what it reads, signals or `source`."""

    name: str
    expression: str
    columns: tuple[str, ...]

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals that the rule reads."""
        return tuple(name for name in self.columns if name != "source")


def parsed(name: str, expression: str) -> SqlRule:
    """Return the rule `sql.name` of an expression; PunaError says what is wrong with it."""
    where = f"select.sql.{name}: {expression!r}"
    with _connection() as connection:
        row = connection.execute("select json_serialize_sql(?)", [f"select ({expression}\n)"]).fetchone()
        tree = json.loads(row[0] if row else "{}")
        if tree.get("error"):
            raise PunaError(f"{where} is no SQL expression: {tree['error_message']}")
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
    """Raise PunaError where a rule reads what no input carries, or is no condition on it. `kinds`: signal → type, None where unknown."""
    for rule in rules:
        for name in rule.signals:
            if name not in kinds:
                raise PunaError(f"select.{rule.name} reads {name!r}, which no input carries{did_you_mean(name, sorted(kinds))}")
        types = [kinds.get(name, pa.string()) if name != "source" else pa.string() for name in rule.columns]
        if all(kind is not None for kind in types):
            empty = pa.schema(list(zip(rule.columns, types, strict=True))).empty_table()
            with _connection() as connection:
                connection.register("documents", empty)
                try:
                    results = connection.sql(f"select ({rule.expression}\n) from documents").to_arrow_table().schema.types[0]
                except duckdb.Error as error:
                    raise PunaError(f"select.{rule.name}: {rule.expression!r}: {error}") from error
            if not pa.types.is_boolean(results):
                raise PunaError(f"select.{rule.name}: {rule.expression!r} gives {results}; a rule is true or false, for example words < 50")


def sql_fires(rule: SqlRule, table: pa.Table) -> NDArray[np.bool_]:
    """Return a mask of the documents that the rule drops, bool[n]; a condition that is null drops none."""
    with _connection() as connection:
        connection.register("documents", table.select(list(rule.columns)))
        try:
            results = connection.sql(f"select coalesce(({rule.expression}\n), false) from documents").to_arrow_table()
        except duckdb.Error as error:
            raise PunaError(f"select.{rule.name}: {rule.expression!r}: {error}") from error
    return np.array(results.column(0).to_pylist(), np.bool_)


def sql_row(rule: SqlRule, identity: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the row of `dropped` of a document: the condition and what it read; `value` where that is one number."""
    numbers = [values[name] for name in rule.signals if isinstance(values[name], int | float)]
    values_text = ", ".join(f"{name} = {values[name]}" for name in rule.columns)
    value = float(numbers[0]) if len(rule.columns) == len(numbers) == 1 else None
    return {"id": identity, "rule": rule.name, "value": value, "threshold": None, "detail": f"{rule.expression}: {values_text}"}


def _connection() -> duckdb.DuckDBPyConnection:
    return duckdb.connect(config={"enable_external_access": "false", "threads": "1"})


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _nodes(inner)


def _check_function(connection: duckdb.DuckDBPyConnection, name: str, where: str) -> None:
    """Raise PunaError where a function does not exist, is of several rows, or does not give the same value each time."""
    results = connection.execute("select function_type, stability from duckdb_functions() where function_name = ?", [name]).fetchall()
    if not results:
        raise PunaError(f"{where}: there is no function {name}")
    if any(kind not in ("scalar", "macro") for kind, _ in results):
        raise PunaError(f"{where}: {name} is a function of many rows; a rule is a condition on the signals of one document")
    if any(stability is not None and stability != "CONSISTENT" for _, stability in results):
        raise PunaError(f"{where}: {name} gives another value each time")
