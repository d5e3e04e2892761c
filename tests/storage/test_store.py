"""The store: commits, reuse, races, aliases, damage, garbage collection."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.storage import Artifact, Identity, InputRecord, Manifest, PunaError, Store, catalog, digest, index, maintenance, runs
from puna.storage.explain import changes, explain
from puna.storage.files import LocalFiles
from puna.storage.manifest import code_version


def signals(ids: list[str], words: list[int]) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.string()), "words": pa.array(words, pa.int64())})


def test_tables_are_sorted_and_typed(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    made = store.import_table("signals", signals(["c", "a", "b"], [3, 1, 2]))
    assert made.read().to_pylist() == [{"id": "a", "words": 1}, {"id": "b", "words": 2}, {"id": "c", "words": 3}]
    assert made.read().schema.field("words").type == pa.int64()
    assert [p.read()["words"].to_pylist() for p in made.parts(rows=2)] == [[1, 2], [3]]
    assert made.damage() == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"id": ["a"], "words": [[1]]}), "column 'words' is list<.*; it must hold numbers or words"),
        (pa.table({"words": [1]}), "column 'id' is missing"),
        (pa.table({"id": pa.array([None], pa.string()), "words": [1]}), "column 'id' must not be null"),
        (signals(["a", "a"], [1, 2]), "two rows have the key {'id': 'a'}"),
    ],
)
def test_wrong_tables_are_refused_by_name(tmp_path: Path, table: pa.Table, message: str) -> None:
    store = Store.open(tmp_path)
    with pytest.raises(PunaError, match=message):
        store.import_table("signals", table)
    assert store.artifacts() == []


VALUES = st.lists(
    st.tuples(st.text(max_size=5), st.none() | st.integers(-(2**62), 2**62), st.none() | st.lists(st.none() | st.floats(allow_nan=False), max_size=3)),
    max_size=20,
)  # fmt: skip
SCHEMA = pa.schema({"s": pa.string(), "i": pa.int64(), "l": pa.list_(pa.float64())})


@settings(deadline=None, max_examples=60)
@given(VALUES, st.lists(st.integers(1, 7), max_size=6))
def test_a_digest_depends_on_values_alone(rows: list, cuts: list[int]) -> None:
    table = pa.table({n: pa.array([r[i] for r in rows], SCHEMA.field(n).type) for i, n in enumerate("sil")}, schema=SCHEMA)
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(table.slice(start, cut))
        start += cut
    pieces.append(table.slice(start))
    assert digest.of_table(pa.concat_tables(pieces)) == digest.of_table(table.combine_chunks())


def test_digests_tell_tables_apart() -> None:
    tables = [
        pa.table({"s": ["ab", "c"]}), pa.table({"s": ["a", "bc"]}), pa.table({"t": ["ab", "c"]}), pa.table({"s": ["ab", None]}),
        pa.table({"s": [None, "ab"]}), pa.table({"s": [["a"], ["b"]]}), pa.table({"s": [["a", "b"], []]}), pa.table({"s": [["a", "b"], None]}),
        pa.table({"s": pa.array([1, 2])}), pa.table({"s": pa.array([1.0, 2.0])}),
    ]  # fmt: skip
    assert len({digest.of_table(t) for t in tables}) == len(tables)


def test_unstable_values_have_no_identity() -> None:
    for value in (float("nan"), {1: 2}, {"a": {3}}, object()):
        with pytest.raises(PunaError):
            digest.canonical(value)
    assert digest.canonical({"b": 1, "a": [True, None, 1.5]}) == '{"a":[true,null,1.5],"b":1}'


def _commit(root: str, number: int) -> str:
    store = Store.open(root)
    identity = Identity("racing")
    with store.work(identity.key) as work:
        found = store.find("signals", identity.key)
        if found is None:
            work.add("signals", signals(["a"], [number]), "only")
            found = work.commit("signals", identity.key, identity)
        else:
            work.discard()
    return found.data_digest


def test_of_racing_writers_one_wins(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        digests = pool.starmap(_commit, [(str(tmp_path), n) for n in range(12)])
    assert len(set(digests)) == 1
    assert len(Store.open(tmp_path).artifacts()) == 1
    assert list((tmp_path / "work").iterdir()) == []


def test_work_without_a_manifest_is_no_artifact(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with pytest.raises(RuntimeError), store.work("ab" * 32) as work:
        work.add("signals", signals(["a"], [1]), "part")
        raise RuntimeError
    assert store.artifacts() == []
    with store.work("ab" * 32) as work:
        (staged,) = work.earlier("signals-part") or []
        assert staged.shard.rows == 1 and work.earlier("signals-other") is None


def test_what_an_attempt_did_not_write_is_not_committed(tmp_path: Path) -> None:
    store, identity = Store.open(tmp_path), Identity("stage")
    with pytest.raises(RuntimeError), store.work(identity.key) as work:
        work.add("signals", signals(["a"], [1]), "part")
        work.add("dropped", pa.table({"id": ["b"], "rule": ["r"], "value": [1.0], "threshold": [1.0], "detail": ["d"]}), "part")
        (work.output / "model").mkdir()
        (work.output / "model" / "weights.bin").write_bytes(b"half")
        (work.output / "dropped.parquet").write_bytes(b"half")
        raise RuntimeError
    with store.work(identity.key) as work:
        assert work.rows("signals") == 0
        work.add("signals", signals(["a"], [2]), "other")
        made = work.commit("signals", identity.key, identity)
    assert made.read()["words"].to_pylist() == [2]
    assert made.tables == ("signals",) and set(made.manifest.files) == {"signals.parquet"}
    assert sorted(f.name for f in made.folder.iterdir() if not f.name.startswith(".")) == ["manifest.json", "signals.parquet"]


def test_resolving_names(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    made = store.import_table("signals", signals(["a"], [1]))
    assert store.resolve(made.id) == store.resolve(made.key) == store.resolve(made.key[:8]) == made
    for wrong, message in (
        ("ffff0000", "no such artifact"),
        ("cats/abcd", "not a kind of artifact"),
        ("ab", "at least 4"),
        ("x@y", "no such alias"),
    ):
        with pytest.raises(PunaError, match=message):
            store.resolve(wrong)


def test_aliases_change_by_compare_and_swap(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    one, two = (store.import_table("signals", signals(["a"], [n])) for n in (1, 2))
    store.set_alias("best@latest", one, expected="")
    assert store.resolve("best@latest") == one
    with pytest.raises(PunaError, match="changed meanwhile"):
        store.set_alias("best@latest", two, expected="")
    store.set_alias("best@latest", two, expected=one.key)
    assert store.aliases() == {"best@latest": two.key}


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "manifest"])
def test_damage_is_found_and_set_aside(tmp_path: Path, harm: str) -> None:
    store = Store.open(tmp_path)
    made = store.import_table("signals", signals(["a"], [1]))
    file = made.path("signals.parquet")
    if harm == "flip":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "remove":
        file.unlink()
    else:
        made.path("manifest.json").write_text("{")
    (finding,) = maintenance.verify(store)
    assert finding.damage
    store.quarantine(finding.artifact)
    assert store.artifacts() == [] and maintenance.verify(store) == []


def made(step: str, artifact: Artifact) -> dict:
    return runs.Made(step, artifact.manifest.stage, artifact.kind, artifact.key, False, 1.0).event()


def test_what_a_run_at_work_has_is_no_garbage(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    artifact = store.import_table("signals", signals(["a"], [1]))
    with store.at_work("run"):
        store.record("run", runs.event("started", flow="curate"))
        store.record("run", made("one", artifact))
        assert store.log("run").state == "at work"
        assert maintenance.collect(store, keep_runs=0, work_days=0, remove=True) == [] and store.artifacts() == [artifact]
    assert store.log("run").state == "crashed"
    files = store.files
    files.write(f"work/{artifact.key}/part", b"some bytes")
    freed = maintenance.collect(store, keep_runs=0, work_days=0, remove=True)
    assert {g.place for g in freed} == {artifact.place, f"work/{artifact.key}"} and sum(g.bytes for g in freed) > 10
    assert not store.artifacts() and not files.folders("work")
    store.import_table("signals", signals(["a"], [1]))
    assert [g.place for g in maintenance.collect(store, keep_runs=0, work_days=0, remove=True)] == [artifact.place]


@pytest.mark.parametrize(("events", "state", "error"), [
    ([], "crashed", runs.CRASHED), ([runs.event("stopped")], "stopped", ""), ([runs.event("finished")], "finished", ""),
    ([runs.event("failed", error="field: wrong")], "failed", "field: wrong"),
])  # fmt: skip
def test_a_log_tells_how_a_run_ended(tmp_path: Path, events: list[dict], state: str, error: str) -> None:
    store = Store.open(tmp_path)
    artifact = store.import_table("signals", signals(["a"], [1]))
    for event in (runs.event("started", flow="curate"), made("one", artifact), {"note": "of another version"}, *events):
        store.record("run", event)
    log = store.log("run")
    assert (log.flow, log.state, log.error) == ("curate", state, error)
    assert log.made == (runs.Made("one", "import", "signals", artifact.key, False, 1.0),)
    assert log.opened is not None and log.closed is not None and log.opened <= log.closed


def test_garbage_is_what_no_alias_and_no_recent_run_needs(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    one, two, three = (store.import_table("signals", signals(["a"], [n])) for n in (1, 2, 3))
    store.set_alias("kept@latest", one)
    store.record("run", made("two", two))
    # A run that made nothing does not replace another one.
    store.record("vain", runs.event("started", flow="curate"))
    store.record("vain", runs.event("failed", error="no such file"))
    found = maintenance.collect(store, keep_runs=1, work_days=1, remove=True)
    assert [g.place for g in found] == [three.place]
    assert {a.key for a in store.artifacts()} == {one.key, two.key}


def altered(artifact: Artifact, **changed: object) -> None:
    file = artifact.path("manifest.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changed, indent=1))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": {"most": 2}}, "key does not match its stage, code, config and inputs"),
        ({"data_digest": "0" * 64}, "data_digest does not match its tables and files"),
        ({"code": {"puna.stages.work.work": "1"}}, "code_version does not match its code"),
        ({"stage": "other"}, "key does not match"),
        ({"inputs": []}, "key does not match"),
        ({"key": "0" * 64}, "key does not match its stage"),
        ({"kind": "documents"}, "its checksum does not match"),
        ({"metrics": {"kept": 2}}, "its checksum does not match"),
        ({"seed": 3}, "its checksum does not match"),
        ({"tables": {}}, "data_digest does not match"),
        ({"files": {}}, "its checksum does not match"),
    ],
)
def test_a_manifest_changed_by_hand_is_named(tmp_path: Path, changed: dict, message: str) -> None:
    store = Store.open(tmp_path)
    symbols = {"puna.stages.work.work": "0"}
    record = InputRecord("signals", "signals", "1" * 64, "2" * 64, "import")
    identity = Identity("stage", code_version(symbols), symbols, {"most": 1, "share": 0.5}, [record])
    with store.work(identity.key) as work:
        work.add("signals", signals(["a"], [1]), "p")
        made = work.commit("signals", identity.key, identity, metrics={"kept": 1, "share": 0.1}, seed=1)
    assert maintenance.verify(store)[0].damage == []
    altered(made, **changed)
    (finding,) = maintenance.verify(store)
    assert message in "; ".join(finding.damage)
    with pytest.raises(PunaError, match="is damaged"):
        store.check(store.find("signals", identity.key))


def aged(folder: Path, days: float) -> None:
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (time.time() - days * 86_400,) * 2)


def test_abandoned_work_is_what_nobody_holds_or_wrote_to_lately(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    keys = {name: name[0] * 64 for name in ("abandoned", "busy", "deep")}
    for key in keys.values():
        with store.work(key) as work:
            (work.scratch / "training" / "steps").mkdir(parents=True)
            aged(store.root / work.place, 30)
    # A checkpoint deep in a folder does not change the times of the folders above it.
    deep = store.root / "work" / keys["deep"]
    (deep / "scratch" / "training" / "steps" / "100.bin").write_bytes(b"x")
    for folder in (deep, deep / "scratch", deep / "scratch" / "training"):
        os.utime(folder, (0, 0))
    with store.lock(keys["busy"]):
        found = maintenance.collect(store, keep_runs=1, work_days=7, remove=True)
    assert [g.place for g in found] == [f"work/{keys['abandoned']}"]
    assert {f.name for f in (store.root / "work").iterdir()} == {keys["busy"], keys["deep"]}


def test_what_was_accepted_or_is_being_read_is_no_garbage(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    accepted, read, unused = (store.import_table("signals", signals(["a"], [n])) for n in (1, 2, 3))
    store.accept(accepted, "f" * 64)
    with store.work("e" * 64) as work:
        work.uses([InputRecord("signals", "signals", read.key, read.data_digest)])
        found = maintenance.collect(store, keep_runs=0, work_days=7, remove=True)
    assert [g.place for g in found] == [unused.place]


def test_garbage_that_is_made_anew_while_it_is_judged_stays(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    made = store.import_table("signals", signals(["a"], [1]))
    with store.lock(made.key):
        assert maintenance.collect(store, keep_runs=0, work_days=0, remove=True) == []
    assert store.artifacts() == [made]
    assert [g.place for g in maintenance.collect(store, keep_runs=0, work_days=0, remove=True)] == [made.place]
    assert [lock.name for lock in (store.root / "locks").iterdir()] == [f"held-{store.holding.name}"]



def test_gc_leaves_what_another_live_process_has_and_what_that_was_made_from(tmp_path: Path) -> None:
    script, store = Store.open(tmp_path), Store.open(tmp_path)
    source = script.import_table("signals", signals(["a"], [1]))
    with script.work("f" * 64) as work:
        work.add("signals", signals(["a"], [2]), "x")
        made = work.commit("signals", "f" * 64, Identity("stage", inputs=[InputRecord("signals", "signals", source.key, source.data_digest)]))
    script.holding.release()  # as a script that started later and used only the second artifact
    script.holding.add(made.key)
    assert maintenance.collect(store, keep_runs=0, work_days=0, remove=True) == [] and script.find("signals", made.key) == made
    assert len(list((tmp_path / "runs").glob("held-*"))) == 1
    del script, work
    found = maintenance.collect(store, keep_runs=0, work_days=0, remove=True)
    assert {g.place for g in found} == {made.place, source.place} and not list((tmp_path / "runs").glob("held-*"))


def test_gc_leaves_the_sources_of_what_a_process_begins_to_use_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, store = Store.open(tmp_path), Store.open(tmp_path)
    source = script.import_table("signals", signals(["a"], [1]))
    with script.work("f" * 64) as work:
        work.add("signals", signals(["a"], [2]), "x")
        made = work.commit("signals", "f" * 64, Identity("stage", inputs=[InputRecord("signals", "signals", source.key, source.data_digest)]))
    script.holding.release()
    lock = store.lock

    def late(key: str, *, wait: bool = True) -> object:
        script.holding.add(made.key)  # after the garbage was listed, before the first folder goes
        return lock(key, wait=wait)

    monkeypatch.setattr(store, "lock", late)
    assert maintenance.collect(store, keep_runs=0, work_days=0, remove=True) == []
    assert store.artifacts() == [source, made]


def test_what_a_killed_process_had_holds_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    made = store.import_table("signals", signals(["a"], [1]))
    script = "import os, sys\nfrom puna.storage import Store\nstore = Store.open(sys.argv[1])\nstore.holding.add(sys.argv[2])\nos._exit(9)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path), made.key], check=False)
    assert len(list((tmp_path / "runs").glob("held-*"))) == len(list((tmp_path / "locks").glob("held-*"))) == 2
    assert [g.place for g in maintenance.collect(store, keep_runs=0, work_days=0, remove=True)] == [made.place]
    assert len(list((tmp_path / "runs").glob("held-*"))) == len(list((tmp_path / "locks").glob("held-*"))) == 1


def test_two_processes_may_remove_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc` empties the quarantine, even of a folder that a run is removing at the same time."""
    store, rmtree = Store.open(tmp_path), shutil.rmtree
    (store.files.scratch("work/abc") / "part").write_text("x")

    def late(folder: Path) -> None:
        monkeypatch.setattr("puna.storage.files.shutil.rmtree", rmtree)
        found = maintenance.collect(Store.open(tmp_path), keep_runs=0, work_days=7, remove=True)
        assert [one.reason for one in found] == ["quarantined"]
        rmtree(folder)

    monkeypatch.setattr("puna.storage.files.shutil.rmtree", late)
    store.files.remove("work/abc")
    assert not list((tmp_path / "quarantine").iterdir()) and not list((tmp_path / "work").iterdir())


def test_a_hidden_file_of_a_stage_is_kept_like_the_others(tmp_path: Path) -> None:
    store, identity = Store.open(tmp_path), Identity("stage")
    with store.work(identity.key) as work:
        for name in (".gitattributes", "config.json"):
            (work.output / name).write_text("{}")
        made = work.commit("model", identity.key, identity)
    assert made.damage() == [] and store.check(made).path(".gitattributes").read_text() == "{}"
    made.path(".gitattributes").write_text("[]")
    assert made.damage() == [".gitattributes has a wrong checksum"]


def test_every_table_names_the_artifact_of_its_rows(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    lines = pa.table({"id": ["a"], "line": pa.array([0], pa.int32()), "words": pa.array([3], pa.int32()), "final_punctuation": [True]})
    made = store.import_table("signals", signals(["a"], [1]), c4_lines=lines)
    for table in made.tables:
        assert catalog.query(store, f"select artifact from {table}").to_pylist() == [{"artifact": made.key}]


def test_the_catalog_reads_every_table_and_writes_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.import_table("signals", signals(["a", "b"], [1, 2]))
    store.import_table("signals", pa.table({"id": ["c"], "quality": [0.5]}))
    rows = catalog.query(store, "select id, words, quality from signals order by id").to_pylist()
    assert rows == [
        {"id": "a", "words": 1, "quality": None},
        {"id": "b", "words": 2, "quality": None},
        {"id": "c", "words": None, "quality": 0.5},
    ]
    assert catalog.query(store, "select rule, count(*) from dropped group by 1").num_rows == 0
    assert catalog.query(store, "select count(*) as n from artifacts").to_pylist() == [{"n": 2}]
    for writing in (
        "create table t (a int)",
        "copy (select 1) to '/tmp/never.csv'",
        "insert into artifacts values (1)",
        "attach '/tmp/x.db'",
    ):
        with pytest.raises(PunaError):
            catalog.query(store, writing)


@pytest.mark.parametrize("left", [None, b"", b"PAR1 cut short"])
def test_a_table_that_is_gone_is_named(tmp_path: Path, left: bytes | None) -> None:
    store = Store.open(tmp_path)
    file = store.import_table("signals", signals(["a"], [1])).path("signals.parquet")
    file.unlink()
    if left is not None:
        file.write_bytes(left)
    said = "table signals of an artifact cannot be read.*signals.parquet.*puna verify" if left is None else "is damaged: signals.parquet has"
    with pytest.raises(PunaError, match=said):
        catalog.query(store, "select count(*) from signals")


@pytest.mark.parametrize("text", ["", "no json", "{}", "[]"])
def test_a_broken_alias_is_named(tmp_path: Path, text: str) -> None:
    store = Store.open(tmp_path)
    made = store.import_table("signals", signals(["a"], [1]))
    store.set_alias("best@latest", made)
    (tmp_path / "refs" / "best" / "latest.json").write_text(text)
    for use in (lambda: store.alias("best@latest"), store.names, lambda: maintenance.collect(store, keep_runs=0, work_days=0, remove=True)):
        with pytest.raises(PunaError, match="latest.json: is damaged"):
            use()
    store.set_alias("best@latest", made)
    assert store.alias("best@latest") == made


def manifest(**changed: object) -> Manifest:
    values: dict = {
        "kind": "signals", "key": "k", "stage": "s", "data_digest": "d", "code_version": "c", "code": {"f": "1"},
        "config": {"a": {"b": 1}}, "inputs": [], "tables": {}, "files": {},
    }  # fmt: skip
    return Manifest(**(values | changed))


def test_changes_are_named_field_by_field() -> None:
    found = changes(manifest(), manifest(config={"a": {"b": 2}}, code={"f": "2", "g": "1"}, code_version="e"))
    assert [str(c) for c in found] == ["config a.b: 1 → 2", "code f changed", "code g new"]
    assert changes(manifest(), manifest(key="other", created_at="later")) == []
    phases = [{"name": "initial", "text": "x" * 80, "steps": 40}, {"name": "last", "steps": 2}]
    before, longer = manifest(config={"phases": phases}), manifest(config={"phases": [phases[0] | {"steps": 60}, phases[1], {"steps": 3}]})
    assert [str(c) for c in changes(before, longer)] == ["config phases.0.steps: 40 → 60", "config phases.2: None → {'steps': 3}"]
    assert str(changes(longer, manifest(config={"phases": 3}))[0]).startswith("config phases: [{'name': 'initial'")


def test_a_changed_input_is_named_by_its_id() -> None:
    """Ids can be given to `puna show`; digests of contents cannot. Equal content under another key is no change."""
    before, same, now = (manifest(inputs=[InputRecord("pages", "pages", key * 32, digest)]) for key, digest in (("ab", "1"), ("ef", "1"), ("cd", "2")))
    assert [str(c) for c in changes(before, now)] == ["input pages: pages/abababababab → pages/cdcdcdcdcdcd"]
    assert changes(before, same) == []
    assert [str(c) for c in changes(manifest(), now)] == ["input pages: new, pages/cdcdcdcdcdcd"]


def test_what_only_moved_is_no_change_that_is_told() -> None:
    before = manifest(code={"a.f": "1", "a.g": "2", "a:words.txt": "3", "meaning": "m"})
    now = manifest(code={"b.f": "1", "b.g": "4", "b:../data/words.txt": "3", "meaning": "n"}, code_version="e")
    assert [str(c) for c in changes(before, now)] == ["code a.g no longer reached", "code b.g new"]
    assert changes(before, manifest(code={"b.f": "1", "meaning": "m"})) == []  # an equal version means equal meaning


def test_explain_compares_with_the_nearest_earlier(tmp_path: Path) -> None:
    store = Store.open(tmp_path)

    def make(**config: int):
        identity = Identity("stage", config=dict(config))
        with store.work(identity.key) as work:
            work.add("signals", signals(["a"], [1]), "p")
            return work.commit("signals", identity.key, identity)

    first, second, third = make(a=1, b=1), make(a=2, b=2), make(a=1, b=2)
    assert explain(store, first) == (None, [])
    before, found = explain(store, third)
    assert before == second and [str(c) for c in found] == ["config a: 2 → 1"]


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({"format": 99}))
    with pytest.raises(PunaError, match="format 99"):
        Manifest.read(LocalFiles(tmp_path), "manifest.json")


def test_timestamps_survive(tmp_path: Path) -> None:
    at = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    table = pa.table({"id": ["a"], "url": ["u"], "fetched_at": [at], "source": ["s"], "title": ["t"], "text": ["x"]})
    assert Store.open(tmp_path).import_table("documents", table).read()["fetched_at"].to_pylist() == [at]


def test_an_interrupted_removal_does_not_block_its_key(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    made = store.import_table("signals", signals(["a", "b", "c"], [0, 1, 2]))
    (made.folder / "manifest.json").unlink()
    again = store.import_table("signals", signals(["a", "b", "c"], [0, 1, 2]))
    assert again.key == made.key and again.rows() == 3


def test_a_broken_manifest_hides_no_other_artifact(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    broken, whole = store.import_table("signals", signals(["a", "b", "c"], [0, 1, 2])), store.import_table("signals", signals(["a", "b", "c", "d"], [0, 1, 2, 3]))
    (broken.folder / "manifest.json").write_text("{")
    assert [a.key for a in store.artifacts()] == [whole.key]
    assert {f.artifact.key for f in maintenance.verify(store) if f.damage} == {broken.key}


@pytest.mark.parametrize(
    "statement",
    ["explain analyze copy (select 1) to '{0}/x.csv'", "explain (analyze) copy (select 1) to '{0}/x.csv'", "pragma import_database('{0}')"],
)
def test_no_statement_writes(tmp_path: Path, statement: str) -> None:
    store = Store.open(tmp_path)
    store.import_table("signals", signals(["a", "b", "c"], [0, 1, 2]))
    with pytest.raises(PunaError, match="read-only"):
        catalog.query(store, statement.format(tmp_path))
    assert not (tmp_path / "x.csv").exists()


def test_files_outside_the_store_are_not_read(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    store.import_table("signals", signals(["a", "b", "c"], [0, 1, 2]))
    (tmp_path / "secret").write_text("x")
    with pytest.raises(PunaError, match="(?i)permission|disabled"):
        catalog.query(store, f"select * from read_text('{tmp_path}/secret')")
    assert catalog.query(store, "select count(*) as n from signals")["n"].to_pylist() == [3]


def test_a_store_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PunaError, match=f"store {tmp_path}/file: is a file"):
        Store.open(tmp_path / "file")
    with pytest.raises(PunaError, match=f"store {tmp_path}/file/below: cannot be created .*--store"):
        Store.open(tmp_path / "file" / "below")


@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: d[:-9], lambda d: d.replace(b"import", b"impost"), lambda d: d + b"\xff\n"])
def test_an_index_that_is_gone_old_or_damaged_costs_only_time(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    store = Store.open(tmp_path)
    made = [store.import_table("signals", signals([name], [1])) for name in "abc"]
    found = store.entries()
    assert {one["key"] for one in found} == {artifact.key for artifact in made} and {one["stage"] for one in found} == {"import"}
    file = tmp_path / index.FILE
    file.write_bytes(damage(file.read_bytes()))
    assert store.entries() == found == store.entries()
    file.unlink()
    assert store.entries() == found
    place = made[0].folder / "manifest.json"
    place.write_text(place.read_text().replace('"run": ""', '"run": "other"'))
    shutil.rmtree(made[1].folder)
    assert {one["key"]: one["sound"] for one in store.entries()} == {made[2].key: True}
