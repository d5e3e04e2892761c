"""SQL over a store's tables: for each table a view of all artifacts and a view of the newest one, a view per alias, and macros.

The same queries define views in memory (`catalog`), and in a file for any DuckDB client (`database`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from puna.storage.aliases import DEFAULT
from puna.storage.artifact import Artifact, place_of
from puna.storage.index import Entry
from puna.storage.parts import ShardRows
from puna.storage.schemas import KINDS, TABLES, column
from puna.storage.store import Store
from puna.storage.tables import literal, pattern

NEWEST = "newest"
"""Name of the SQL schema whose views have only one artifact's rows: the newest of the kind or, for side tables, with the table."""
ADDRESSES = "addresses"
"""Name of the view of all pages' and documents' addresses."""


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
        column("bytes", pa.int64(), "size of its files", "bytes"), column("seconds", pa.float64(), "time that making it took", "seconds"),
        column("created_at", pa.string(), "when it was made", "ISO 8601"), column("run", pa.string(), "run that made it"),
        column("project", pa.string(), "project of that run"), _DIGEST,
        column("code_version", pa.string(), "hash of the code that its stage reaches"),
        column("config", pa.string(), "the stage's configuration", "JSON"), column("seed", pa.int64(), "seed of its random numbers"),
        column("suspect", pa.string(), "why its content is not established; null: it is"),
    ),
    "lineage": _facts(
        _KEY, column("input", pa.string(), "key of an artifact that it was made of, or address of a file"),
        column("name", pa.string(), "name of the stage's input"), column("kind", pa.string(), "kind of the input; external: a file"),
        column("data_digest", pa.string(), "digest of the input's content"),
    ),
    "metrics": _facts(
        _KEY, _STAGE, column("name", pa.string(), "what was measured"), column("value", pa.float64(), "the number; null for a word"),
        column("text", pa.string(), "the value as text"),
    ),
    "aliases": _facts(
        column("alias", pa.string(), "[PROJECT/]NAME@VERSION, as inputs take it"), column("project", pa.string(), "its project"),
        _KEY, _KIND,
    ),
    "runs": _facts(
        _RUN, column("flow", pa.string(), "flow or stage that was run"), column("project", pa.string(), "whose aliases it read and set"),
        column("state", pa.string(), "finished, failed, stopped, crashed or at work"),
        column("error", pa.string(), "why it failed"), column("opened", pa.string(), "when it began", "ISO 8601"),
        column("closed", pa.string(), "when its last event was", "ISO 8601"), column("recipe", pa.string(), "recipe that was named"),
        column("changes", pa.string(), "what was changed in it", "JSON list"), column("command", pa.string(), "the command line"),
        column("commit", pa.string(), "commit of the program"),
    ),
    "steps": _facts(
        _RUN, column("step", pa.string(), "name of the step"), _STAGE, _KIND, _KEY,
        column("reused", pa.bool_(), "whether the artifact was there before"),
        column("seconds", pa.float64(), "time in this run", "seconds"),
    ),
}  # fmt: skip
"""Name → schema of the tables about artifacts and runs."""


def facts(name: str, store: Store, entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return the rows of the table `name` of `FACTS`."""
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
        """Return the names of all views as SQL writes them (aliases in double quotes); the views of tables come first."""
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
        """Return SQL for the ids and addresses of all pages and documents. Skip artifacts made from other such ones: they keep both."""
        texts = {one["key"]: one for one in self.entries if one["kind"] in ("pages", "documents")}
        first = [one for one in texts.values() if not any(source["input"] in texts for source in one["inputs"])]
        files = [f"{place_of(one['kind'], one['key'])}/{file}" for one in first for file in one["tables"][one["kind"]]["files"]]
        return f"select id, url from {self._parquet(files)}" if files else "select null::varchar as id, null::varchar as url where false"

    def _by_alias(self) -> dict[str, Entry]:
        artifacts = {one["key"]: one for one in self.entries if one["kind"] in one["tables"]}
        return {alias: artifacts[key] for alias, key in sorted(self.store.aliases().items()) if key in artifacts}

    def _rows(self, table: str, having: list[Entry]) -> str:
        """Return SQL for the rows of one table of the artifacts `having`, with the artifacts' keys in the column `artifact`."""
        queries = []
        own = [one for one in having if not one["tables"][table]["sources"]]
        plain = [f"{place_of(one['kind'], one['key'])}/{file}" for one in own for file in one["tables"][table]["files"]]
        if plain:
            key = r"regexp_extract(filename, '.*/([0-9a-f]{64})/[a-z_]+(/[0-9]+)?\.parquet$', 1)"
            queries.append(f"select {key} as artifact, * exclude (filename) from {self._parquet(plain, 'filename')}")
        for one in having:
            if one["tables"][table]["sources"]:
                queries += self._selection(one["key"], Artifact(one["kind"], one["key"], self.store.files).shards(table))
        columns = ", ".join(f'null::{duck_type(f.type)} as "{f.name}"' for f in TABLES[table].schema)
        return " union all by name ".join(queries) if queries else f"select null::varchar as artifact, {columns} where false"

    def _selection(self, key: str, shards: list[ShardRows]) -> list[str]:
        """Return SQL queries for a table with rows kept by reference: for shards with their own files, and for shards with order files."""
        whole = [s.stored[0].name for s in shards if s.rows and s.order is None and s.stored[0] is not None]
        links = [(s.order.name, n, file.name) for s in shards if s.rows and s.order for n, file in enumerate(s.stored) if file is not None]
        queries = [f"select {literal(key)} as artifact, * from {self._parquet(whole)}"] if whole else []
        if links:
            files = list(dict.fromkeys(file for _, _, file in links))
            orders = list(dict.fromkeys(order for order, _, _ in links))
            # The file and row number of each row of an order; files are numbers, because long names join slowly.
            meant = ", ".join(f"({orders.index(order) + 1}, {number}, {files.index(file) + 1})" for order, number, file in links)
            same = f"{_number('o', orders)} = n.ordering and n.source = o.source"
            order_rows = self._parquet(orders, "filename")
            places = f"select n.file, o.row from {order_rows} o join (values {meant}) n(ordering, source, file) on {same}"
            rows = self._parquet(files, "filename", "file_row_number")
            # A row is stored once, so this equals a semi join; as a join, it may begin at the few rows that a filter leaves.
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
    """Return SQL for the position in `names`, from 1, of the file that a row of `table` is from."""
    name = rf"regexp_extract({table}.filename, '.*(objects/[a-z]+/[0-9a-f]{{2}}/[0-9a-f]{{64}}/.*)$', 1)"
    return f"list_position([{', '.join(map(literal, names))}], {name})"


DERIVED = {
    "leaderboard": (
        ("task_scores", "scores", "artifacts", "lineage", "aliases"),
        """with newest as (
    select t.*, l.input as model_key, coalesce((select min(alias) from aliases n where n.artifact = l.input), left(l.input, 12)) as model,
      t.metric in ('word_perplexity', 'byte_perplexity', 'bits_per_byte') as lower
    from (select * from task_scores union all by name  -- evaluations of earlier releases lack these columns
      select null::double as calibration_error, null::double as contaminated, null::double as clean where false) t
    join lineage l on l.artifact = t.artifact and l.name = 'model' join artifacts a on a.artifact = t.artifact
    qualify row_number() over (
      partition by l.input, t.task, t.metric, t.content, t.shots, t.format, t.seed, t.n order by a.created_at desc, t.artifact) = 1),
  ranked as (
    select *, rank() over same as rank, first(artifact) over same as best from newest
    window same as (partition by task, metric, content, shots, format order by case when lower then -value else value end desc)),
  behind as (
    select r.artifact, r.task, r.metric, avg(x.value - y.value) as behind, stddev_samp(x.value - y.value) / sqrt(count(*)) as error
    from ranked r join scores x on x.artifact = r.artifact and x.name = r.task || '/' || r.metric
    join scores y on y.artifact = r.best and y.name = x.name and y.id = x.id where not r.lower group by all)
  select task, metric, rank, model, value, low, high, b.behind, b.error, calibration_error, contaminated,
    clean, n, shots, format, version, seed, seconds, model_key, artifact
  from ranked left join behind b using (artifact, task, metric) order by task, metric, content, shots, format, rank, model""",
        "models by task and metric, best first; `behind`: mean difference from the best on the same questions, `error` its standard error",
    ),
    "forecasts": (
        ("artifacts", "lineage", "metrics"),
        # A training run belongs to a forecast if it took the size as an input; or if it read the ladder's tokens, and the logarithms of its
        # FLOPs and tokens differ by less than 0.1.
        """with numbers as (pivot (select artifact, name, value from metrics where stage in ('choose_size', 'pretrain'))
    on name in ('predicted_loss', 'predicted_loss_low', 'predicted_loss_high', 'flops', 'tokens', 'trained_tokens', 'validation_loss',
      'measured_loss')
    using first(value) group by artifact),
  sized as (
    select a.created_at, n.*, (
      select any_value(t.data_digest) from lineage l join lineage p on p.artifact = l.input and p.name = 'ladders'
      join lineage t on t.artifact = p.input and t.name = 'tokens' where l.artifact = a.artifact and l.name = 'law') as read
    from artifacts a join numbers n using (artifact) where a.stage = 'choose_size'),
  trained as (
    select n.*, t.data_digest as read, s.input as size from artifacts a join numbers n using (artifact)
    join lineage t on t.artifact = a.artifact and t.name = 'tokens' left join lineage s on s.artifact = a.artifact and s.name = 'size'
    where a.stage = 'pretrain')
  select s.artifact as forecast, s.predicted_loss as predicted, s.predicted_loss_low as low, s.predicted_loss_high as high, s.flops,
    s.tokens, t.artifact as model, coalesce(t.measured_loss, t.validation_loss) as measured, measured between low and high as inside
  from sized s left join trained t on t.size = s.artifact
    or (t.read = s.read and abs(ln(t.flops / s.flops)) < 0.1 and abs(ln(t.trained_tokens / s.tokens)) < 0.1)
  order by s.created_at, s.artifact, t.artifact""",
        "each forecast of a loss beside that of the model which was trained in its size, if any; `inside`: it lies in the 95 % interval",
    ),
}
"""View → (tables that it needs, its query, what it shows)."""
MACROS = {
    "key_of()": (
        ("artifacts", "aliases"),
        # A whole key stays as it is: DuckDB folds it to a constant, and then skips the files of other artifacts.
        """key_of(name) as (
  case when regexp_full_match(name, '[0-9a-f]{64}') then name else (
    select case when count(*) = 1 then first(artifact) else error(name || ': fits ' || count(*) || ' artifacts') end from (
      select artifact from aliases where name in (alias, project || '/' || split_part(alias, '/', -1))
      union (select artifact from artifacts where name = 'stage:' || stage order by created_at desc, artifact desc limit 1)
      union select artifact from artifacts
      where starts_with(artifact, split_part(name, '/', -1)) and (not contains(name, '/') or kind = split_part(name, '/', 1)))) end)""",
        "the key of the artifact that a name means: an alias, `kind/prefix`, first digits of a key, or `stage:NAME`, the newest of a stage",
    ),
    "upstream()": (
        ("key_of()", "artifacts", "lineage"),
        """upstream(name) as table
  with recursive up(artifact, depth) as (
    select key_of(name), 0 union select l.input, depth + 1 from up join lineage l using (artifact) where l.kind != 'external')
  select artifact, min(depth) as depth, any_value(kind) as kind, any_value(stage) as stage, any_value(rows) as rows
  from up left join artifacts using (artifact) group by artifact order by depth, artifact""",
        "the artifact and all that it was made from, with the steps in between",
    ),
    "lineage()": (
        ("upstream()", "lineage"),
        """lineage(name) as table
  select u.depth, u.stage, l.name, l.kind, u.artifact, l.input from upstream(name) u join lineage l using (artifact)
  order by u.depth, u.artifact, l.name, l.input""",
        "every input of the artifact and of all that it was made from, back to the files from outside",
    ),
    "diff()": (
        ("key_of()", "documents"),
        """diff(before, after) as table
  select coalesce(a.id, b.id) as id,
    case when b.id is null then 'only before' when a.id is null then 'only after' else 'changed' end as what,
    coalesce(a.url, b.url) as url, a.text as text_before, b.text as text_after
  from (select * from documents where artifact = key_of(before)) a
  full join (select * from documents where artifact = key_of(after)) b using (id)
  where a.id is null or b.id is null or a.text != b.text""",
        "the documents that only one of two artifacts has, and those whose text differs",
    ),
    "fate()": (
        ("artifacts", "addresses", "pages", "documents", "signals", "dropped", "duplicates", "removed_lines", "mixture"),
        """fate(document) as table
  with ids as materialized (
    select id from addresses where id >= document and id < document || 'g' union select id from addresses where url = document),
  found as (
    select artifact, id, 'page' as what, url as detail from pages where id in (from ids)
    union all select artifact, id, 'kept', length(text) || ' characters' from documents where id in (from ids)
    union all select artifact, id, 'scored', json_merge_patch('{}', to_json(s), '{"artifact": null, "id": null}')::varchar
      from signals s where id in (from ids)
    union all select artifact, id, 'dropped', concat(rule, ': ', value, ' against ', threshold, ' ', detail)
      from dropped where id in (from ids)
    union all select artifact, id, 'duplicate', concat(method, ', ', similarity, ', of ', kept_id) from duplicates where id in (from ids)
    union all select artifact, id, 'line removed', concat(rule, ': ', text) from removed_lines where id in (from ids)
    union all select artifact, id, 'mixed', concat(split, ', ', category, ', read ', repeats, ' times') from mixture where id in (from ids))
  select a.stage, f.what, f.detail, f.artifact, f.id from found f left join artifacts a using (artifact)
  order by a.created_at, f.artifact""",
        "what became of a document, named by its id, the first digits of it, or its address: a row for each stage that has it",
    ),
}
"""Macro → (views and macros that it needs, its definition after `create macro`, what it returns)."""


def duck_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"{duck_type(kind.value_type)}[]"
    names = {
        "string": "varchar", "binary": "blob", "double": "double", "float": "float", "int32": "integer", "int64": "bigint",
        "bool": "boolean",
    }  # fmt: skip
    return names.get(str(kind), "timestamptz")
