"""DuckDB over every artifact: one view per table, and the views `artifacts`, `lineage` and `metrics`.

Everything is derived from the manifests when the connection is made: nothing to keep in step, nothing
that can go stale. The connection holds views on Parquet files only; it cannot write to the store.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import duckdb
import pyarrow as pa

from puna.storage.artifact import Artifact
from puna.storage.errors import PunaError
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


def connect(store: Store) -> duckdb.DuckDBPyConnection:
    """A connection with all views; `artifact` is a column of each table's view (the artifact's key)."""
    connection = duckdb.connect()
    connection.execute("set TimeZone='UTC'")
    artifacts = store.artifacts()
    _meta(connection, artifacts)
    for name in TABLES:
        try:
            _view(connection, name, [a.folder.resolve() / f"{name}.parquet" for a in artifacts if name in a.manifest.tables])
        except duckdb.Error as error:
            connection.close()
            raise PunaError(
                f"the table {name} of an artifact cannot be read ({str(error).partition(chr(10))[0]}); "
                "`puna verify` names the damaged one, with --quarantine it is set aside"
            ) from error
    # Only the store's own files can be read, whatever a statement says; a view names them by pattern.
    objects = store.root.resolve() / "objects"
    allowed = ", ".join(literal(f"{form}/") for form in sorted({str(objects), pattern(objects)}))
    connection.execute(f"set allowed_directories = [{allowed}]")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
    return connection


def _view(connection: duckdb.DuckDBPyConnection, name: str, files: list[Path]) -> None:
    """The view of a table over its files; an empty table where there are none."""
    if files:
        # The key is the folder's name: …/<key>/<table>.parquet
        connection.execute(
            f"""create view "{name}" as select split_part(filename, '/', -2) as artifact, * exclude (filename)
            from {parquet(files, filename=True)}"""
        )
    else:
        columns = ", ".join(f'"{f.name}" {_duck(f.type)}' for f in TABLES[name].schema)
        connection.execute(f'create table "{name}" (artifact varchar, {columns})')


def query(store: Store, text: str) -> pa.Table:
    """The result of one SQL statement; PunaError with DuckDB's message when it fails or would write."""
    with connect(store) as connection:
        return run(connection, text)


def run(connection: duckdb.DuckDBPyConnection, text: str) -> pa.Table:
    """The result of one read-only SQL statement on an open connection; columns of one name become `n`, `n_1`, …"""
    try:
        statements = connection.extract_statements(text)
        if len(statements) != 1:
            raise PunaError(f"give one SQL statement, not {len(statements)}")
        if not _reads(connection, statements[0]):
            raise PunaError("the catalog is read-only: only SELECT, SHOW, DESCRIBE, SUMMARIZE and EXPLAIN of these are run")
        relation = connection.sql(text)
        table = relation.to_arrow_table() if relation is not None else pa.table({})
        return table.rename_columns(_distinct(table.schema.names))
    except (duckdb.Error, RuntimeError) as error:  # Ctrl-C ends a query with a RuntimeError
        raise PunaError(str(error)) from error


def _distinct(names: list[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        new, number = name, 0
        while new in found or (number and new in names):
            number += 1
            new = f"{name}_{number}"
        found.append(new)
    return found


def statements(connection: duckdb.DuckDBPyConnection, text: str) -> list[str]:
    """The SQL statements in a text, one by one."""
    try:
        return [statement.query for statement in connection.extract_statements(text)]
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


def _meta(connection: duckdb.DuckDBPyConnection, artifacts: list[Artifact]) -> None:
    rows, lineage, metrics = [], [], []
    for artifact in artifacts:
        m = artifact.manifest
        rows.append(
            {
                "artifact": m.key, "kind": m.kind, "stage": m.stage, "rows": m.tables[m.kind].rows if m.kind in m.tables else None,
                "bytes": sum(f.bytes for f in m.files.values()), "seconds": m.timings.get("seconds"), "created_at": m.created_at,
                "run": m.run, "data_digest": m.data_digest, "code_version": m.code_version, "config": json.dumps(m.config), "seed": m.seed,
            }
        )  # fmt: skip
        lineage += [{"artifact": m.key, "input": i.key, "name": i.name, "kind": i.kind, "data_digest": i.data_digest} for i in m.inputs]
        for name, value in m.metrics.items():
            number = float(value) if isinstance(value, (int, float)) else None
            metrics.append({"artifact": m.key, "stage": m.stage, "name": name, "value": number, "text": str(value)})
    for name, schema, found in (("artifacts", ARTIFACTS, rows), ("lineage", LINEAGE, lineage), ("metrics", METRICS, metrics)):
        connection.register(f"_{name}", pa.Table.from_pylist(found, schema=schema))
        connection.execute(f"create table {name} as select * from _{name}")
        connection.unregister(f"_{name}")
