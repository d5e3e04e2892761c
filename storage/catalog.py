"""DuckDB over every artifact: one view per table, and the tables `artifacts`, `lineage` and `metrics`.

Everything is derived from the manifests when the connection is made: nothing to keep in step, nothing
that can go stale. A view is made when a statement first names it. The connection reads the store's own files only and cannot
write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import duckdb
import pyarrow as pa

from puna.storage.artifact import Artifact, place_of
from puna.storage.errors import PunaError
from puna.storage.index import Entry
from puna.storage.parts import Stored
from puna.storage.schemas import TABLES
from puna.storage.store import Store
from puna.storage.tables import literal, parquet, pattern

ARTIFACTS = pa.schema(
    {
        "artifact": pa.string(), "kind": pa.string(), "stage": pa.string(), "rows": pa.int64(), "bytes": pa.int64(),
        "seconds": pa.float64(), "created_at": pa.string(), "run": pa.string(), "data_digest": pa.string(),
        "code_version": pa.string(), "config": pa.string(), "seed": pa.int64(),
    }
)  # fmt: skip
LINEAGE = pa.schema({"artifact": pa.string(), "input": pa.string(), "name": pa.string(), "kind": pa.string(), "data_digest": pa.string()})
METRICS = pa.schema({"artifact": pa.string(), "stage": pa.string(), "name": pa.string(), "value": pa.float64(), "text": pa.string()})
META = {"artifacts": ARTIFACTS, "lineage": LINEAGE, "metrics": METRICS}


class Catalog:
    """An open connection to the tables of a store; `artifact` is a column of each table's view (the artifact's key)."""

    def __init__(self, store: Store) -> None:
        self._entries = [one for one in store.entries() if one["sound"]]
        self._store = store
        self._known: set[str] = set()
        self.connection = duckdb.connect()
        self.connection.execute("set TimeZone='UTC'")
        # Only the store's own files can be read, whatever a statement says; a view names them by pattern.
        self._objects = f"{store.files.sql(self.connection)}objects/"
        allowed = ", ".join(literal(form) for form in sorted({self._objects, pattern(self._objects)}))
        self.connection.execute(f"set allowed_directories = [{allowed}]")
        self.connection.execute("set enable_external_access = false")
        self.connection.execute("set lock_configuration = true")

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def view(self, *names: str) -> None:
        """Make the views of these tables, and the tables `artifacts`, `lineage` and `metrics`."""
        for name in set(names) - self._known:
            self._known.add(name)
            if name in META:
                self.connection.register(f"_{name}", _meta(name, self._entries))
                self.connection.execute(f"create table {name} as select * from _{name}")
                self.connection.unregister(f"_{name}")
            elif name in TABLES:
                self._make(name)

    def _make(self, name: str) -> None:
        having = [s for s in self._entries if name in s["tables"]]
        plain = [self._file(s, file) for s in having if not s["tables"][name]["sources"] for file in s["tables"][name]["files"]]
        queries = []
        if plain:
            # The key is the name of the folder: <kind>/<k[:2]>/<key>/<table>.parquet, or …/<key>/<table>/<number>.parquet
            key = f"split_part(split_part(filename, {literal(self._objects)}, 2), '/', 3)"
            queries.append(f"select {key} as artifact, * exclude (filename) from {parquet(plain, filename=True)}")
        queries += [self._selection(s, name) for s in having if s["tables"][name]["sources"]]
        columns = ", ".join(f'null::{_duck(f.type)} as "{f.name}"' for f in TABLES[name].schema)
        nothing = f"select null::varchar as artifact, {columns} where false"
        try:
            self.connection.execute(f'create view "{name}" as {" union all by name ".join(queries) if queries else nothing}')
        except duckdb.Error as error:
            raise PunaError(
                f"the table {name} of an artifact cannot be read ({_said(error)}); "
                "`puna verify` names the damaged one, with --quarantine it is set aside"
            ) from error

    def _file(self, entry: Entry, file: str) -> str:
        return f"{self._objects}{place_of(entry['kind'], entry['key']).removeprefix('objects/')}/{file}"

    def _named(self, stored: Stored) -> str:
        return self._objects + stored.name.removeprefix("objects/")

    def _selection(self, entry: Entry, name: str) -> str:
        """The rows of a table of which some lie in other artifacts: those that its order files name."""
        artifact = Artifact(entry["kind"], entry["key"], self._store.files)
        pieces = []
        for shard in artifact.shards(name):
            if not shard.rows:
                continue
            order = None if shard.order is None else parquet([self._named(shard.order)])
            for number, stored in enumerate(shard.stored):
                if stored is None:
                    continue
                rows = parquet([self._named(stored)], more=", file_row_number = true")
                named = f"(select row from {order} where source = {number}) o on o.row = t.file_row_number"
                chosen = "" if order is None else f" semi join {named}"
                if order is not None or number == 0:
                    pieces.append(f"select {literal(artifact.key)} as artifact, * exclude (file_row_number) from {rows} t{chosen}")
        return " union all by name ".join(pieces)


def connect(store: Store) -> Catalog:
    """A connection with all tables."""
    return Catalog(store)


def query(store: Store, text: str) -> pa.Table:
    """The result of one SQL statement; PunaError with DuckDB's message when it fails or would write."""
    with connect(store) as opened:
        return run(opened, text)


def run(opened: Catalog, text: str) -> pa.Table:
    """The result of one read-only SQL statement on an open connection; columns of one name become `n`, `n_1`, …"""
    connection = opened.connection
    try:
        statements = connection.extract_statements(text)
        if len(statements) != 1:
            raise PunaError(f"give one SQL statement, not {len(statements)}")
        if not _reads(connection, statements[0]):
            raise PunaError("the catalog is read-only: only SELECT, SHOW, DESCRIBE, SUMMARIZE and EXPLAIN of these are run")
        opened.view(*(name for name in (*META, *TABLES) if re.search(rf"(?i)\b{name}\b", text)))
        if re.match(r"(?i)\s*show\b", text):
            opened.view(*META, *TABLES)
        relation = connection.sql(text)
        table = relation.to_arrow_table() if relation is not None else pa.table({})
        return table.rename_columns(_distinct(table.schema.names))
    except (duckdb.Error, RuntimeError) as error:  # Ctrl-C ends a query with a RuntimeError
        traced = "Traceback (most recent" in str(error)
        raise PunaError(_said(error) if traced else str(error)) from error


def _said(error: Exception) -> str:
    """What is wrong, of DuckDB's message: its first line, or the error at the end of the traceback of a file that cannot be read."""
    raised: list[str] = re.findall(r"(?m)^[\w.]+: (.+)$", str(error)) if "Traceback (most recent call last)" in str(error) else []
    return raised[-1] if raised else str(error).partition("\n")[0]


def _distinct(names: list[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        new, number = name, 0
        while new in found or (number and new in names):
            number += 1
            new = f"{name}_{number}"
        found.append(new)
    return found


def statements(opened: Catalog, text: str) -> list[str]:
    """The SQL statements in a text, one by one."""
    try:
        return [statement.query for statement in opened.connection.extract_statements(text)]
    except duckdb.Error as error:
        raise PunaError(str(error)) from error


EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+|\([^)]*\)\s*)?", re.IGNORECASE)


def _reads(connection: duckdb.DuckDBPyConnection, statement: duckdb.Statement) -> bool:
    """Whether a statement writes nothing: EXPLAIN ANALYZE runs what it explains."""
    if statement.type == duckdb.StatementType.EXPLAIN:
        inner = connection.extract_statements(EXPLAIN.sub("", statement.query, count=1))
        return len(inner) == 1 and inner[0].type == duckdb.StatementType.SELECT
    return statement.type == duckdb.StatementType.SELECT


def _duck(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"{_duck(kind.value_type)}[]"
    names = {
        "string": "varchar",
        "binary": "blob",
        "double": "double",
        "float": "float",
        "int32": "integer",
        "int64": "bigint",
        "bool": "boolean",
    }
    return names.get(str(kind), "timestamptz")


def _meta(name: str, entries: list[Entry]) -> pa.Table:
    """The table `artifacts`, `lineage` or `metrics`."""
    rows: Iterable[Entry] = ({**one, "artifact": one["key"]} for one in entries)
    if name == "lineage":
        rows = ({"artifact": one["key"], **given} for one in entries for given in one["inputs"])
    if name == "metrics":
        rows = (
            {
                "artifact": one["key"], "stage": one["stage"], "name": metric,
                "value": float(value) if isinstance(value, (int, float)) else None, "text": str(value),
            }
            for one in entries for metric, value in one["metrics"].items()
        )  # fmt: skip
    return pa.Table.from_pylist(list(rows), schema=META[name])
