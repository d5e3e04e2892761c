"""The file `puna.duckdb` of a store, with views of all artifacts for any DuckDB client that opens it read-only.

The file has views and small tables, but no rows of artifacts. If artifacts, aliases or runs have changed, `write` replaces the file. So
readers never wait, and an open file stays as it was. Views use the store's address; `set variable store = '/elsewhere/'` overrides it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb

from puna.storage import digest, index
from puna.storage.aliases import DEFAULT
from puna.storage.catalog import create_facts, create_view
from puna.storage.errors import PunaError
from puna.storage.index import Entry
from puna.storage.schemas import TABLES
from puna.storage.store import Store, explain_write_errors
from puna.storage.tables import connect, literal, pattern
from puna.storage.views import FACTS, MACROS, NEWEST, Views, facts

FILE = "puna.duckdb"
RUNS = ("runs", "steps")
VERSION = 6  # version of the views; increase it with every change, so that older files are rewritten


def write(store: Store) -> bool:
    """Bring `puna.duckdb` up to date; return False if it already is. A PunaError leaves the file unchanged."""
    store = store.within(DEFAULT)  # one file for all projects, with aliases as the default project names them
    scratch = store.files.scratch("work")
    with explain_write_errors(store.uri), store.files.lease(FILE), TemporaryDirectory(prefix="catalog-", dir=scratch) as folder:
        file, now = Path(folder, FILE), _state(store)
        before = _before(store, file)
        if before == now:
            return False
        if before is None or before[0] != now[0]:
            file.unlink(missing_ok=True)
            _build(store, file, now)
        else:
            with connect(str(file)) as connection:
                for name in RUNS:
                    connection.execute(f"drop table {name}")
                _tell(connection, store, [], RUNS, now)
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        # A client that opens a database for writing locks out all others, so the file is read-only for everyone except root.
        file.chmod(0o444)
        store.files.remove(f"{FILE}.wal")
        store.files.put(FILE, file)
    return True


def _state(store: Store) -> tuple[str, str]:
    """Return two digests: of the views' definitions, and of the run log."""
    runs = {run: stat.version for run in store.runs() if (stat := store.files.stat(f"runs/{run}.jsonl")) is not None}
    manifests = sorted([*place, version] for place, version in index.manifests(store.files).items())
    macros = [definition for _, definition, _ in MACROS.values()]
    views = {"version": VERSION, "tables": list(TABLES), "macros": macros, "uri": store.uri}
    views |= {"manifests": manifests, "aliases": store.aliases(), "suspects": store.suspects()}
    return digest.of_value(views), digest.of_value(runs)


def _before(store: Store, copy: Path) -> tuple[str, str] | None:
    """Copy the current file to `copy`, since clients may lock it, and return the digests in it; None if it cannot be read."""
    try:
        copy.write_bytes(store.files.read(FILE))
        with connect(str(copy), read_only=True) as connection:
            return connection.execute("select views, runs from about").fetchone()
    except (FileNotFoundError, PunaError, duckdb.Error):
        return None


def _build(store: Store, file: Path, state: tuple[str, str]) -> None:
    entries = [one for one in store.entries() if one["sound"]]
    with connect() as connection:
        place = store.files.sql(connection)
        connection.execute(f"attach {literal(str(file))} as puna (block_size 16384)")
        connection.execute("use puna")
        connection.execute(f"create schema {NEWEST}")
        _tell(connection, store, entries, FACTS, state)
        # This process creates views with the local paths that it reads; clients of an object store use the store's address.
        address = literal(pattern(store.uri.rstrip("/") + "/"))
        connection.execute(f"set variable store = {literal(pattern(place))}")
        views = Views(store, entries, f"coalesce(getvariable('store'), {address})")
        for name in views.names():
            create_view(connection, name, views)
        for _, definition, _ in MACROS.values():
            connection.execute(f"create macro {definition}")


def _tell(connection: duckdb.DuckDBPyConnection, store: Store, entries: list[Entry], names: Iterable[str], state: tuple[str, str]) -> None:
    for name in names:
        create_facts(connection, name, facts(name, store, entries))
    about = "create or replace table about as select ? as store, ? as views, ? as runs, now() as written_at"
    connection.execute(about, [store.uri, *state])
