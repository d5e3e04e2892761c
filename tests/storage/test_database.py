"""`puna.duckdb`, the views and the macros, on a store whose rows can be counted by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from puna.storage import Artifact, Identity, InputRecord, PunaError, Store, catalog, database, runs, tables
from tests.storage.test_tables import documents, ids_of, selected, small_shards

IDS = sorted(ids_of(40))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Artifact, Artifact]:
    """Return forty documents in shards; a stage that drops the first ten and changes the last by reference; signals, an alias, a run."""
    patch = pytest.MonkeyPatch()
    small_shards(patch, "documents", size=400)
    store = Store.open(tmp_path_factory.mktemp("database") / "a [store] of 'mine'")
    first = store.import_table("documents", documents(IDS, [f"text {n}" for n in range(40)]))
    second = selected(store, first, [n >= 10 for n in range(40)], [39], "shorten")
    patch.undo()
    record = InputRecord("documents", "documents", second.key, second.data_digest, "shorten")
    identity = Identity("measure", inputs=[record])
    with store.work(identity.key) as work:
        work.add("signals", pa.table({"id": IDS[10:], "words": list(range(30))}), "all")
        work.commit("signals", identity.key, identity, metrics={"longest": 29})
    store.set_alias("documents@latest", second)
    store.set_alias("documents@first", first)
    store.record("a-run", runs.event("started", flow="curate", command="puna run curate", recipe="demo", changes=["x=1"]))
    store.record("a-run", runs.Made("shorten", "shorten", "documents", second.key, False, 2.0).event())
    store.record("a-run", runs.event("finished"))
    database.write(store)
    return store, first, second


def asked(store: Store, query: str) -> list[tuple]:
    """Return the rows of a query, which must be the same from `catalog` and from a client of the file."""
    with catalog.Catalog(store) as opened, duckdb.connect(f"{store.uri}/{database.FILE}", read_only=True) as client:
        found = client.sql(query).fetchall()
        assert [tuple(row.values()) for row in catalog.run(opened, query).to_pylist()] == found
        return found


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("select count(*), count(distinct artifact) from documents", [(70, 2)]),
        ("select count(*), min(id) from newest.documents", [(30, IDS[10])]),
        ('select count(*) from "documents@first"', [(40,)]),
        ('select text from "documents@latest" order by id desc limit 2', [("text 39!",), ("text 38",)]),
        ("select sum(words) from newest.signals join newest.documents using (id)", [(sum(range(30)),)]),
        ("select what, count(*) from diff('documents@first', 'documents@latest') group by 1 order by 1", [("changed", 1), ("only before", 10)]),
        ("select text_before, text_after from diff('documents@first', 'stage:shorten') where what = 'changed'", [("text 39", "text 39!")]),
        ("select depth, stage from upstream('stage:measure')", [(0, "measure"), (1, "shorten"), (2, "import")]),
        ("select depth, stage, name from lineage('stage:measure')", [(0, "measure", "documents"), (1, "shorten", "documents")]),
        (f"select stage, what, detail from fate('{IDS[10]}') where what != 'scored'", [("import", "kept", "7 characters"), ("shorten", "kept", "7 characters")]),
        (f"select what, detail from fate('{IDS[39][:20]}') where stage = 'measure'", [("scored", '{"words":29}')]),
        ("select alias from aliases order by all", [("documents@first",), ("documents@latest",)]),
        ("select flow, state, recipe, changes, command from runs", [("curate", "finished", "demo", '["x=1"]', "puna run curate")]),
        ("select step, kind, reused, seconds from steps", [("shorten", "documents", False, 2.0)]),
        ("select value from metrics where name = 'longest'", [(29.0,)]),
        ("select count(*) from newest.pages", [(0,)]),
    ],
)
def test_what_is_asked(filled: tuple[Store, Artifact, Artifact], query: str, expected: list[tuple]) -> None:
    assert asked(filled[0], query) == expected


def test_a_key_is_named_in_every_way(filled: tuple[Store, Artifact, Artifact]) -> None:
    store, first, second = filled
    for name in ("documents@latest", "stage:shorten", second.key, second.key[:9], f"documents/{second.key[:6]}"):
        assert asked(store, f"select key_of('{name}')") == [(second.key,)]
    with duckdb.connect(f"{store.uri}/{database.FILE}", read_only=True) as client, pytest.raises(duckdb.Error, match="nobody@latest: fits 0 artifacts"):
        client.sql("select key_of('nobody@latest')").fetchall()
    with catalog.Catalog(store) as opened, pytest.raises(PunaError, match="nobody@latest: no such alias"):
        opened.sql("from upstream('nobody@latest')")
    assert first.key != second.key


def test_a_key_leaves_other_artifacts_unread(filled: tuple[Store, Artifact, Artifact]) -> None:
    store, first, _ = filled
    with catalog.Catalog(store) as opened:
        opened.view("documents", "key_of()")
        plan = opened.connection.sql(f"explain analyze select count(text) from documents where artifact = key_of('{first.key}')").fetchall()[0][1]
    # Only one of two artifacts is read, without the files that select the other one's rows.
    assert "Row Groups" in plan and ".order" not in plan


def test_the_file_is_written_when_something_changed(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    assert database.write(store) and not database.write(store)
    store.import_table("signals", pa.table({"id": [IDS[0]], "words": [5]}))
    file = store.root / database.FILE
    with duckdb.connect(str(file), read_only=True) as reader:
        assert database.write(store) and not database.write(store)
        # A client with the old file open keeps it; a client that opens the file now gets the new one.
        assert reader.sql("select count(*) from signals").fetchall() == [(0,)]
    with duckdb.connect(str(file), read_only=True) as reader:
        assert reader.sql("select words from signals").fetchall() == [(5,)]
    store.record("a-run", runs.event("started", flow="curate"))
    assert database.write(store)
    assert asked(store, "select run from runs") == [("a-run",)]
    file.unlink()
    file.write_bytes(b"no database")
    assert database.write(store) and asked(store, "select words from signals") == [(5,)]
    assert not file.stat().st_mode & 0o222 and not list((store.root / "work").iterdir())


def test_a_store_that_moved(filled: tuple[Store, Artifact, Artifact], tmp_path: Path) -> None:
    moved = Path(shutil.copytree(filled[0].root, tmp_path / "moved"))
    elsewhere = tmp_path / "elsewhere"
    moved.rename(elsewhere)
    with duckdb.connect(str(elsewhere / database.FILE), read_only=True) as client:
        client.execute(f"set variable store = '{elsewhere}/'")
        shutil.move(filled[0].root / "objects", tmp_path / "objects")
        try:
            assert client.sql("select count(*) from documents").fetchall() == [(70,)]
        finally:
            shutil.move(tmp_path / "objects", filled[0].root / "objects")
    store = Store.existing(elsewhere)
    assert database.write(store) and asked(store, "select count(*) from documents") == [(70,)]


def test_results_for_python(filled: tuple[Store, Artifact, Artifact]) -> None:
    with catalog.Catalog(filled[0]) as opened:
        found = opened.sql("select id, words from newest.signals order by words")
        assert found.to_arrow_table()["words"].to_pylist() == list(range(30))
        assert found.df()["id"].tolist() == IDS[10:]
        for statement, said in (("drop view documents", "read-only"), ("select 1; select 2", "one SQL statement"), ("copy signals to 'x.csv'", "read-only")):
            with pytest.raises(PunaError, match=said):
                opened.sql(statement)


def test_no_connection_draws_a_progress_bar(tmp_path: Path) -> None:
    """A query of more than two seconds would draw a progress bar into a server's log."""
    with catalog.Catalog(Store.open(tmp_path)) as opened, tables.connect() as other:
        for connection in (opened.connection, other):
            assert connection.execute("select current_setting('enable_progress_bar')").fetchone() == (False,)
    root = Path(tables.__file__).parents[1]
    sources = [file for room in ("flows", "stages", "storage") for file in (root / room).rglob("*.py")]
    assert [file.name for file in sources if "duckdb.connect(" in file.read_text()] == ["tables.py"]
