"""The DuckDB catalog of all artifacts: one view per table, and tables about artifacts and runs; see `views`.

Summaries of the artifacts are read when the connection is opened; a table or view is created when a statement first names it. The
connection can read only the store's own files, and write only `output`."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from puna.storage.damage import compare
from puna.storage.errors import PunaError, errors_at
from puna.storage.schemas import KINDS
from puna.storage.store import Store
from puna.storage.tables import connect, literal, pattern
from puna.storage.views import DERIVED, FACTS, MACROS, NEWEST, Views, duck_type, facts

MOST_COMPARED = 4 << 30  # maximum bytes of files whose checksums are verified per statement, which takes about 3 s on one core


class Catalog:
    """An open connection to the tables of a store. The views' column `artifact` is the artifact's key.

    Before a statement reads files, their checksums are verified, up to `MOST_COMPARED` bytes. `uncompared`: bytes that were not verified.
    `output`: a file outside the store that the connection may write. `memory`: memory limit in DuckDB's notation (`1GB`); with a limit,
    statements do not spill to disk."""

    def __init__(self, store: Store, output: Path | None = None, memory: str | None = None) -> None:
        self.connection = connect()
        if memory is not None:
            self.connection.execute(f"set memory_limit = {literal(memory)}")
            self.connection.execute("set temp_directory = ''")
        self.connection.execute("set TimeZone='UTC'")
        # Only the store's own files can be read, whatever the statement; a view names them by pattern.
        before = store.files.sql(self.connection)
        allowed = ", ".join(literal(form) for form in sorted({f"{before}objects/", pattern(f"{before}objects/")}))
        self.connection.execute(f"set allowed_directories = [{allowed}]")
        if output is not None:
            self.connection.execute(f"set allowed_paths = [{literal(str(output))}]")
        self.connection.execute("set enable_external_access = false")
        self.connection.execute("set lock_configuration = true")
        self.connection.execute(f"create schema {NEWEST}")
        self._known: set[str] = set()
        self._store = store
        self.uncompared = 0
        self._read: list[str] = []
        self._views = Views(store, [one for one in store.entries() if one["sound"]], literal(pattern(before)), self._compare)
        self.aliases = sorted(store.aliases())
        self.names = [*FACTS, *self._views.names()]
        self._by_word = {name.lower(): name for name in self.names}
        words = sorted(self._by_word, key=len, reverse=True)
        self._words = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}(?![\w(])" for name in words))

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def view(self, *names: str) -> None:
        """Create these tables, views and macros, and everything they need, unless they exist. Skip unknown names."""
        for name in names:
            if name in self._known or name not in (*self.names, *MACROS):
                continue
            self._known.add(name)
            if name in MACROS:
                needed, definition, _ = MACROS[name]
                self.view(*needed)
                self.connection.execute(f"create macro {definition}")
            elif name in FACTS:
                create_facts(self.connection, name, facts(name, self._store, self._views.entries))
            else:
                self.view(*DERIVED[name][0] if name in DERIVED else ())
                create_view(self.connection, name, self._views)

    def _compare(self, names: list[str]) -> None:
        """Add the files that a view reads, and verify the checksums of all files added so far, the newest artifact's files first."""
        self._read += names
        self.uncompared = compare(self._store.files, reversed(self._read), MOST_COMPARED)

    def names_in(self, text: str) -> list[str]:
        """Return the names of tables, views and macros that occur in a text."""
        lower = text.lower()
        macros = [name for name in MACROS if re.search(rf"\b{name[:-2]}\s*\(", lower)]
        return [*dict.fromkeys(self._by_word[word] for word in self._words.findall(lower)), *macros]

    def key_of(self, name: str) -> str:
        """Return the key of the artifact with this name (`stage:NAME`: a stage's newest). Raise PunaError unless exactly one matches."""
        if name.startswith("stage:"):
            keys = [one["key"] for one in self._views.entries if one["stage"] == name.removeprefix("stage:")]
            if not keys:
                raise PunaError(f"{name}: the store has no artifact of this stage")
            return str(keys[-1])
        return self._store.resolve(name).key

    def _resolve(self, text: str) -> str:
        """Return a statement in which names of artifacts in macro calls, such as `lineage('NAME')`, are replaced by keys."""

        def keys(call: re.Match[str]) -> str:
            names = re.sub(r"'([^']+)'", lambda name: literal(self.key_of(name[1])), call[2])
            return f"{call[1]}({names})"

        return re.sub(r"(?i)\b(key_of|upstream|lineage|diff)\s*\((\s*'[^']+'(?:\s*,\s*'[^']+')?\s*)\)", keys, text)

    def several(self, text: str) -> dict[str, int]:
        """Return table → number of artifacts, for tables in `text` that several artifacts have; {} if `text` has the word `artifact`."""
        if re.search(r"(?i)\bartifact\b", text):
            return {}
        counts = {name: sum(name in one["tables"] for one in self._views.entries) for name in self.names_in(text) if name in KINDS}
        return {name: count for name, count in counts.items() if count > 1}

    def sql(self, text: str) -> duckdb.DuckDBPyRelation:
        """Return a statement's lazy relation (`.to_arrow_table()`, `.df()`, `.pl()`). Raise PunaError if it is invalid or writes."""
        with _named_errors():
            statements = self.connection.extract_statements(text)
            if len(statements) != 1:
                raise PunaError(f"give one SQL statement, not {len(statements)}")
            if not _reads(self.connection, statements[0]):
                raise PunaError("the catalog is read-only: it runs only SELECT, SHOW, DESCRIBE, SUMMARIZE and EXPLAIN of these")
            text = self._resolve(text)
            self.view(*(self.names if re.match(r"(?i)\s*show\b", text) else self.names_in(text)))
            self._compare([])
            return self.connection.sql(text)

    def write(self, text: str, file: Path) -> int:
        """Write a statement's result to a file (.parquet, .csv, .json, .jsonl); return the row count. An error may leave a partial file."""
        self.sql(text)
        how = format_of(file)
        with _named_errors():
            (one,) = self.connection.extract_statements(text)
            query = re.sub(r";[^;'\"*]*$", "", one.query)  # a comment may end it, hence the line break
            (rows,) = self.connection.execute(f"copy ({query}\n) to {literal(str(file))} ({how})").fetchone() or (0,)
        return int(rows)


FORMATS = {".parquet": "format parquet", ".csv": "format csv", ".json": "format json, array true", ".jsonl": "format json"}


def format_of(file: Path) -> str:
    """Return DuckDB's options for writing a file with this suffix. Raise PunaError for an unknown suffix."""
    if file.suffix not in FORMATS:
        raise PunaError(f"{file}: the suffix must name the format: {', '.join(FORMATS)}")
    return FORMATS[file.suffix]


def create_facts(connection: duckdb.DuckDBPyConnection, name: str, rows: list[dict[str, Any]]) -> None:
    # Use JSON: for an Arrow table, DuckDB would first import pandas, which takes half a second.
    shape = json.dumps([{field.name: duck_type(field.type) for field in FACTS[name]}])
    query = f"create table {name} as select unnest(from_json(?::json, {literal(shape)}), recursive := true)"
    connection.execute(query, [json.dumps(rows)])


def create_view(connection: duckdb.DuckDBPyConnection, name: str, views: Views) -> None:
    try:
        connection.execute(f"create view {name} as {views.query(name)}")
    except duckdb.Error as error:
        raise PunaError(
            f"the table {name} of an artifact cannot be read ({_reason(error)}); "
            "`puna verify` names the damaged one; with --quarantine it is set aside"
        ) from error


def query(store: Store, text: str) -> pa.Table:
    """Return the result of one SQL statement. Raise PunaError with DuckDB's message if it fails or would write."""
    with Catalog(store) as opened:
        return run(opened, text)


def run(opened: Catalog, text: str, rows: int | None = None) -> pa.Table:
    """Return the result of one read-only SQL statement, at most `rows` rows (None: all). A repeated column name `n` becomes `n_1`, …"""
    with _named_errors():
        relation = opened.sql(text)
        if relation is not None and rows is not None:
            relation = relation.limit(rows)
        table = relation.to_arrow_table() if relation is not None else pa.table({})
        return table.rename_columns(_distinct(table.schema.names))


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a result. Raise PunaError for a value that Python cannot hold, such as a date after the year 9999."""
    with errors_at("a value cannot be shown; cast its column to varchar", OverflowError, ValueError):
        rows: list[dict[str, Any]] = table.to_pylist()
    return rows


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Raise DuckDB errors inside the `with` block as PunaError."""
    try:
        yield
    except (duckdb.Error, RuntimeError) as error:  # Ctrl-C ends a query with a RuntimeError
        raise PunaError(_reason(error) if "Traceback (most recent" in str(error) else str(error)) from error


def _reason(error: Exception) -> str:
    """Return the reason in DuckDB's message: its first line, or the error at the end of the traceback for an unreadable file."""
    raised: list[str] = re.findall(r"(?m)^[\w.]+: (.+)$", str(error)) if "Traceback (most recent call last)" in str(error) else []
    return raised[-1] if raised else str(error).partition("\n")[0]


def _distinct(names: list[str]) -> list[str]:
    distinct: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        distinct.append(name if name not in distinct else next(new for new in numbered if new not in (*distinct, *names)))
    return distinct


def statements(opened: Catalog, text: str) -> list[str]:
    with errors_at("", duckdb.Error):
        return [statement.query for statement in opened.connection.extract_statements(text)]


EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+|\([^)]*\)\s*)?", re.IGNORECASE)


def _reads(connection: duckdb.DuckDBPyConnection, statement: duckdb.Statement) -> bool:
    """True if a statement only reads. EXPLAIN must be followed by a SELECT, because EXPLAIN ANALYZE runs the statement."""
    if statement.type == duckdb.StatementType.EXPLAIN:
        inner = connection.extract_statements(EXPLAIN.sub("", statement.query, count=1))
        return len(inner) == 1 and inner[0].type == duckdb.StatementType.SELECT
    return statement.type == duckdb.StatementType.SELECT
