"""SQL over a store's tables: for each table a view of all artifacts and a view of the newest one, a view per alias, and macros.

The same queries define views in memory (`catalog`) and in a file for any DuckDB client (`database`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from puna.storage.aliases import DEFAULT
from puna.storage.artifact import Artifact, place_of
from puna.storage.index import Entry
from puna.storage.parts import ShardRows
from puna.storage.schemas import KINDS, TABLES, column
from puna.storage.store import Store
from puna.storage.tables import literal, pattern

NEWEST = "newest"  # SQL schema of the views of one artifact: the newest of its kind or, for side tables, with the table
ADDRESSES = "addresses"  # name of the view of all URLs of pages and documents


def _facts(*columns: pa.Field) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in columns])


_KEY = column("artifact", pa.string(), "key of the artifact, 64 hex digits")
_KIND = column("kind", pa.string(), "kind of the artifact")
_STAGE = column("stage", pa.string(), "stage that made it")
_DIGEST = column("data_digest", pa.string(), "digest of its logical content, 64 hex digits")
_RUN = column("run", pa.string(), "name of the run")
FACTS: dict[str, pa.Schema] = {
    "artifacts": _facts(
        _KEY, _KIND, _STAGE, column("rows", pa.int64(), "rows of its main table"),
        column("bytes", pa.int64(), "size of its files", "bytes"), column("seconds", pa.float64(), "time it took to make it", "seconds"),
        column("created_at", pa.string(), "when it was made", "ISO 8601"), column("run", pa.string(), "run that made it"),
        column("project", pa.string(), "project of that run"), _DIGEST,
        column("code_version", pa.string(), "hash of the code that its stage reaches"),
        column("config", pa.string(), "the stage's configuration", "JSON"), column("seed", pa.int64(), "seed of its random numbers"),
        column("suspect", pa.string(), "why the artifact is suspect; null: it is not"),
    ),
    "lineage": _facts(
        _KEY, column("input", pa.string(), "key of an artifact it was made from, or address of a file"),
        column("name", pa.string(), "name of the stage's input"), column("kind", pa.string(), "kind of the input; external: a file"),
        column("data_digest", pa.string(), "digest of the input's content"),
    ),
    "metrics": _facts(
        _KEY, _STAGE, column("name", pa.string(), "name of the metric"), column("value", pa.float64(), "numeric value; null for text"),
        column("text", pa.string(), "the value as text"),
    ),
    "aliases": _facts(
        column("alias", pa.string(), "[PROJECT/]NAME@VERSION, as used for inputs"), column("project", pa.string(), "its project"),
        _KEY, _KIND,
    ),
    "runs": _facts(
        _RUN, column("flow", pa.string(), "flow or stage that was run"), column("project", pa.string(), "project of its aliases"),
        column("state", pa.string(), "finished, failed, stopped, crashed or at work"),
        column("error", pa.string(), "error message"), column("opened", pa.string(), "when it began", "ISO 8601"),
        column("closed", pa.string(), "time of its last event", "ISO 8601"), column("recipe", pa.string(), "name of the recipe"),
        column("changes", pa.string(), "changes to the recipe", "JSON list"), column("command", pa.string(), "the command line"),
        column("commit", pa.string(), "commit of the program"),
    ),
    "steps": _facts(
        _RUN, column("step", pa.string(), "name of the step"), _STAGE, _KIND, _KEY,
        column("reused", pa.bool_(), "whether the artifact already existed"),
        column("seconds", pa.float64(), "time in this run", "seconds"),
    ),
}  # fmt: skip
"""Name → schema of the tables about artifacts and runs."""


def facts(name: str, store: Store, entries: Iterable[Entry]) -> list[dict[str, Any]]:
    rows: Iterable[dict[str, Any]]
    if name == "artifacts":
        suspects = store.suspects()
        rows = (
            {**one, "artifact": one["key"], "project": one.get("project") or DEFAULT, "suspect": suspects.get(one["key"])}
            for one in entries
        )  # fmt: skip
    elif name == "lineage":
        rows = ({"artifact": one["key"], **source} for one in entries for source in one["inputs"])
    elif name == "metrics":
        rows = (
            {
                "artifact": one["key"], "stage": one["stage"], "name": metric,
                "value": float(value) if isinstance(value, (int, float)) else None, "text": str(value),
            }
            for one in entries for metric, value in one["metrics"].items()
        )  # fmt: skip
    elif name == "aliases":
        kinds = {one["key"]: one["kind"] for one in entries}
        rows = (
            {"alias": alias, "project": store.project_of(alias), "artifact": key, "kind": kinds.get(key)}
            for alias, key in sorted(store.aliases().items())
        )
    else:
        logs = [store.log(run) for run in store.runs()]
        steps = ({"run": log.name, "artifact": step.key, **vars(step)} for log in logs for step in log.made)
        rows = (log.row() for log in logs) if name == "runs" else steps
    return [{field: row.get(field) for field in FACTS[name].names} for row in rows]


@dataclass(frozen=True)
class Views:
    """Definitions of views over `entries`. `before`: SQL for the prefix of file names. `use`: called with the files that a view reads."""

    store: Store
    entries: list[Entry]
    before: str
    use: Callable[[list[str]], object] = len

    def names(self) -> list[str]:
        """Return the names of all views, quoted as in SQL (aliases in double quotes); the views of tables come first."""
        newest, aliased = (f"{NEWEST}.{name}" for name in TABLES), (f'"{alias}"' for alias in self._by_alias())
        return [*TABLES, ADDRESSES, *newest, *aliased, *DERIVED]

    def query(self, name: str) -> str:
        if name == ADDRESSES:
            return self._addresses()
        if name in DERIVED:
            return DERIVED[name][1]
        if name in TABLES:
            return self._rows(name, [one for one in self.entries if name in one["tables"]])
        table = name.removeprefix(f"{NEWEST}.")
        if table != name:
            having = [one for one in self.entries if table in one["tables"] and (table == one["kind"] or table not in KINDS)]
            return self._rows(table, having[-1:])
        one = self._by_alias()[name.strip('"')]
        return self._rows(one["kind"], [one])

    def _addresses(self) -> str:
        """Return SQL for the ids and URLs of all pages and documents. Artifacts made from such artifacts add none and are skipped."""
        texts = {one["key"]: one for one in self.entries if one["kind"] in ("pages", "documents")}
        first = [one for one in texts.values() if not any(source["input"] in texts for source in one["inputs"])]
        files = [f"{place_of(one['kind'], one['key'])}/{file}" for one in first for file in one["tables"][one["kind"]]["files"]]
        return f"select id, url from {self._parquet(files)}" if files else "select null::varchar as id, null::varchar as url where false"

    def _by_alias(self) -> dict[str, Entry]:
        """Return alias → entry, except for aliases that differ only in case, which SQL cannot tell apart."""
        artifacts = {one["key"]: one for one in self.entries if one["kind"] in one["tables"]}
        aliases = {alias: artifacts[key] for alias, key in sorted(self.store.aliases().items()) if key in artifacts}
        several = Counter(alias.lower() for alias in aliases)
        return {alias: one for alias, one in aliases.items() if several[alias.lower()] == 1}

    def _rows(self, table: str, having: list[Entry]) -> str:
        """Return SQL for the rows of a table in the artifacts `having`, with the artifact's key in the column `artifact`."""
        queries = []
        own = [one for one in having if not one["tables"][table]["sources"]]
        plain = [f"{place_of(one['kind'], one['key'])}/{file}" for one in own for file in one["tables"][table]["files"]]
        if plain:
            key = r"regexp_extract(filename, '.*/([0-9a-f]{64})/[a-z0-9_]+(/[0-9]+)?\.parquet$', 1)"
            queries.append(f"select {key} as artifact, * exclude (filename) from {self._parquet(plain, 'filename')}")
        for one in having:
            if one["tables"][table]["sources"]:
                queries += self._selection(one["key"], Artifact(one["kind"], one["key"], self.store.files).shards(table))
        columns = ", ".join(f'null::{duck_type(f.type)} as "{f.name}"' for f in TABLES[table].schema)
        return " union all by name ".join(queries) if queries else f"select null::varchar as artifact, {columns} where false"

    def _selection(self, key: str, shards: list[ShardRows]) -> list[str]:
        """Return SQL queries for a table with rows kept by reference: for shards with only own files, and for shards with order files."""
        whole = [s.stored[0].name for s in shards if s.rows and s.order is None and s.stored[0] is not None]
        links = [(s.order.name, n, file.name) for s in shards if s.rows and s.order for n, file in enumerate(s.stored) if file is not None]
        queries = [f"select {literal(key)} as artifact, * from {self._parquet(whole)}"] if whole else []
        if links:
            files = list(dict.fromkeys(file for _, _, file in links))
            orders = list(dict.fromkeys(order for order, _, _ in links))
            # The file and row number of each row in an order; files are numbers, because long names join slowly.
            meant = ", ".join(f"({orders.index(order) + 1}, {number}, {files.index(file) + 1})" for order, number, file in links)
            same = f"{_number('o', orders)} = n.ordering and n.source = o.source"
            order_rows = self._parquet(orders, "filename")
            places = f"select n.file, o.row from {order_rows} o join (values {meant}) n(ordering, source, file) on {same}"
            rows = self._parquet(files, "filename", "file_row_number")
            # Each row is stored once, so this equals a semi join; as a join, it may start from the few rows that a filter leaves.
            queries.append(
                f"select {literal(key)} as artifact, t.* exclude (filename, file_row_number) from {rows} t "
                f"join ({places}) p on p.file = {_number('t', files)} and p.row = t.file_row_number"
            )
        return queries

    def _parquet(self, names: list[str], *more: str) -> str:
        """Return SQL for the rows of Parquet files, with columns matched by name. `more`: DuckDB's options to set to true."""
        self.use(names)
        listed = f"list_transform([{', '.join(literal(pattern(name)) for name in names)}], lambda name: {self.before} || name)"
        return f"read_parquet({listed}, union_by_name = true, hive_partitioning = false{''.join(f', {one} = true' for one in more)})"


def _number(table: str, names: list[str]) -> str:
    """Return SQL for the position in `names`, from 1, of the file that contains a row of `table`."""
    name = rf"regexp_extract({table}.filename, '.*(objects/[a-z]+/[0-9a-f]{{2}}/[0-9a-f]{{64}}/.*)$', 1)"
    return f"list_position([{', '.join(map(literal, names))}], {name})"


def _query(name: str) -> tuple[tuple[str, ...], str, str]:
    """Return a file of the folder `sql`: the views and macros that it needs, the SQL, and what it shows."""
    shows, needs, text = (Path(__file__).with_name("sql") / f"{name}.sql").read_text(encoding="utf-8").split("\n", 2)
    return tuple(needs.removeprefix("-- needs: ").split(", ")), text.strip(), shows.removeprefix("-- ")


DERIVED = {name: _query(name) for name in ("leaderboard", "forecasts")}  # view → (tables that it needs, its query, what it shows)
MACROS = {f"{name}()": _query(name) for name in ("key_of", "upstream", "lineage", "diff", "fate")}
"""Macro → (views and macros that it needs, its definition after `create macro`, what it returns)."""


def duck_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"{duck_type(kind.value_type)}[]"
    names = {
        "string": "varchar", "binary": "blob", "double": "double", "float": "float", "int32": "integer", "int64": "bigint",
        "bool": "boolean",
    }  # fmt: skip
    return names.get(str(kind), "timestamptz")
