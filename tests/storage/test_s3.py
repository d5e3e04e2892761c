"""The guarantees of a store, on a disk and on an object store with occasional failures."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from puna.storage import Identity, PunaError, Store, catalog, database, maintenance
from puna.storage.files import Files
from puna.storage.store import files_of


@pytest.fixture(params=["disk", "s3", "s3 with faults"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of an empty store."""
    if request.param == "disk":
        return str(tmp_path / "store")
    uri = request.getfixturevalue("bucket")
    if request.param == "s3 with faults":
        request.getfixturevalue("proxy").rate = 0.1
    return str(uri)


@pytest.fixture
def files(place: str) -> Files:
    """Return the files of the store at `place`."""
    return Store.open(place).files


def signals(ids: list[str], words: list[int]) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.string()), "words": pa.array(words, pa.int64())})


def make(store: Store, identity: Identity, weights: bytes = b"whole") -> None:
    with store.work(identity.key) as work:
        work.add("signals", signals(["b", "a"], [2, 1]), "one")
        (work.output / "model").mkdir(exist_ok=True)
        (work.output / "model" / "weights.bin").write_bytes(weights)
        work.commit("signals", identity.key, identity)


# --- files -----------------------------------------------------------------------------------------


def test_small_files_are_made_and_swapped(files: Files) -> None:
    assert files.stat("refs/x") is None
    with pytest.raises(FileNotFoundError):
        files.read("refs/x")
    assert files.create("refs/x", b"one") and not files.create("refs/x", b"two") and files.read("refs/x") == b"one"
    before = files.stat("refs/x")
    assert before is not None and before.bytes == 3
    assert files.swap("refs/x", b"two", before.version) and not files.swap("refs/x", b"three", before.version)
    assert not files.swap("refs/x", b"three", None) and not files.swap("refs/none", b"three", before.version)
    assert files.read("refs/x") == b"two" and files.read("refs/x", 1, 2) == b"w" and files.read("refs/x", 1) == b"wo"
    files.write("refs/x", b"")
    assert files.read("refs/x") == b""


def test_of_racing_creators_one_wins(files: Files) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: files.create("refs/one", b"%d" % n), range(8)))
    assert won.count(True) == 1 and files.read("refs/one") == b"%d" % won.index(True)


def test_lines_of_racing_writers_are_all_in_a_log(files: Files) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: files.append("runs/log", b"%d\n" % n), range(12)))
    assert sorted(map(int, files.read("runs/log").split())) == list(range(12))


def test_names_are_listed_in_order_and_folders_removed(files: Files, tmp_path: Path) -> None:
    for name in ("work/b/2", "work/a/1", "work/a/c/3", "workshop/x"):
        files.write(name, name.encode())
    assert list(files.list("work")) == ["work/a/1", "work/a/c/3", "work/b/2"] and files.folders("work") == ["a", "b"]
    assert list(files.list("nothing")) == []
    assert {name: stat.bytes for name, stat in files.stats("work/a").items()} == {"1": 8, "c/3": 10}
    files.move("work/a", "quarantine/a")
    assert files.folders("work") == ["b"] and files.read("quarantine/a/c/3") == b"work/a/c/3"
    for name in ("quarantine/a", "work/b/2", "work/b/2"):
        files.remove(name)
    assert list(files.list("quarantine")) == [] and list(files.list("work")) == [] and files.read("workshop/x") == b"workshop/x"


@pytest.mark.parametrize("size", [0, 100, 3_000_000, 17_000_000])
def test_files_are_read_at_any_place(files: Files, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    files.put("objects/file", tmp_path / "file")
    assert not (tmp_path / "file").exists()
    with files.open("objects/file") as file:
        assert file.read(10) == data[:10] and file.seek(-min(7, size), os.SEEK_END) == size - min(7, size) and file.read() == data[-7:]
        file.seek(size // 3)
        assert file.read(2_000_000) == data[size // 3 : size // 3 + 2_000_000] and file.tell() == min(size, size // 3 + 2_000_000)
    with files.open("objects/file") as file:
        assert b"".join(iter(lambda: file.read(100_001), b"")) == data
    assert files.local("objects/file").read_bytes() == data


def test_a_folder_is_published_once(files: Files) -> None:
    for name in ("one", "two"):
        files.write(f"work/k/{name}", name.encode())
    files.write("objects/signals/aa/aak/left", b"by an attempt that was killed")
    content = {"a.bin": "work/k/one", "sub/b.bin": "work/k/two"}
    assert files.publish("objects/signals/aa/aak", content, ("manifest.json", b"{}"), "work/k/commit")
    files.write("work/l/one", b"other")
    assert not files.publish("objects/signals/aa/aak", {"a.bin": "work/l/one"}, ("manifest.json", b"[]"), "work/l/commit")
    assert sorted(files.stats("objects/signals/aa/aak")) == ["a.bin", "manifest.json", "sub/b.bin"]
    assert files.read("objects/signals/aa/aak/a.bin") == b"one" and files.read("objects/signals/aa/aak/manifest.json") == b"{}"


# --- the store -------------------------------------------------------------------------------------


def test_what_is_committed_is_found_read_and_queried(place: str, tmp_path: Path) -> None:
    store, identity = Store.open(place), Identity("stage")
    make(store, identity)
    (made,) = Store.existing(place).artifacts()
    assert made.read().to_pylist() == [{"id": "a", "words": 1}, {"id": "b", "words": 2}] and made.damage() == []
    assert made.path("model/weights.bin").read_bytes() == b"whole" and made.path("model").is_dir()
    assert store.resolve(made.key[:8]) == made and store.files.folders("work") == []
    query = "select s.words, a.kind from signals s join artifacts a using (artifact) order by id"
    assert catalog.query(store, query).to_pylist() == [{"words": 1, "kind": "signals"}, {"words": 2, "kind": "signals"}]
    assert database.write(store) and not database.write(store)
    (tmp_path / "copy.duckdb").write_bytes(store.files.read(database.FILE))
    with duckdb.connect(str(tmp_path / "copy.duckdb"), read_only=True) as client:
        # DuckDB's S3 extension cannot be installed offline: the same views are used, with another address before the names.
        client.execute(f"set variable store = '{store.files.sql(client)}'")
        assert client.sql("select words from newest.signals order by id").fetchall() == [(1,), (2,)]
        assert f"{place}/" in client.sql("select sql from duckdb_views() where view_name = 'signals'").fetchall()[0][0]
    store.record("run", {"event": "started", "flow": "f"})
    with store.at_work("run"):
        assert store.log("run").state == "at work"
    assert store.log("run").state == "crashed" and store.runs() == ["run"]


def test_of_racing_writers_of_a_key_one_wins(place: str) -> None:
    identity = Identity("racing")

    def commit(number: int) -> str:
        store = Store.open(place)
        with store.work(identity.key) as work:
            found = store.find("signals", identity.key)
            if found is None:
                work.add("signals", signals(["a"], [number]), "only")
                return work.commit("signals", identity.key, identity).data_digest
            work.discard()
            return found.data_digest

    with ThreadPoolExecutor(4) as pool:
        digests = set(pool.map(commit, range(6)))
    (made,) = Store.open(place).artifacts()
    assert digests == {made.data_digest} and made.damage() == [] and Store.open(place).files.folders("work") == []


@pytest.mark.parametrize("project", [None, "news"])
def test_aliases_change_by_compare_and_swap(place: str, project: str | None) -> None:
    store = Store.open(place, project)
    first, *others = (store.import_table("signals", signals(["a"], [n])) for n in range(5))
    store.set_alias("policy@latest", first, expected="")

    def swap(number: int) -> bool:
        try:
            store.set_alias("policy@latest", others[number], expected=first.key)
        except PunaError as error:
            assert "it was changed meanwhile" in str(error)
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(swap, range(4)))
    assert won.count(True) == 1 and store.alias("policy@latest") == others[won.index(True)]
    assert Store.existing(place, project).aliases() == {"policy@latest": others[won.index(True)].key}


def test_garbage_goes_and_what_is_needed_or_held_stays(place: str) -> None:
    store = Store.open(place)
    kept, gone, held = (store.import_table("signals", signals(["a"], [n])) for n in range(3))
    store.set_alias("best@latest", kept)
    store.files.write(f"work/{'ab' * 32}/inputs.json", b"[]")
    with store.lock(held.key):
        found = maintenance.collect(store, keep_runs=0, work_days=0, remove=True)
    assert {g.place for g in found} == {gone.place, f"work/{'ab' * 32}"}
    assert {a.key for a in store.artifacts()} == {kept.key, held.key} and store.unfinished_folders() == []


def test_damage_is_found_and_set_aside_and_made_again(place: str) -> None:
    store, identity = Store.open(place), Identity("stage")
    make(store, identity)
    (made,) = store.artifacts()
    data = store.files.read(f"{made.place}/signals.parquet")
    store.files.write(f"{made.place}/signals.parquet", data[:-1] + bytes([data[-1] ^ 1]))
    (finding,) = maintenance.verify(store)
    assert finding.damage == ["signals.parquet has a wrong checksum"]
    with pytest.raises(PunaError, match=r"signals.parquet has a wrong checksum\. It was moved to .*/quarantine/"):
        store.check(made)
    assert store.quarantine(made) is None and store.artifacts() == []
    make(store, identity)
    assert [f.damage for f in maintenance.verify(store)] == [[]]


class Killed(BaseException):
    """An error after which nothing runs."""


def test_a_kill_between_any_two_requests_leaves_a_whole_artifact_or_none(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    identity, steps, states = Identity("stage"), 0, []
    for step in range(100):
        store, left = Store.open(f"{bucket}/{step}"), step

        def counted(original):
            def call(*words, **named):
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return original(*words, **named)

            return call

        with monkeypatch.context() as patch:
            for name in ("put", "copy", "delete"):
                patch.setattr(obstore, name, counted(getattr(obstore, name)))
            try:
                make(store, identity)
                steps = step
            except Killed:
                pass
        found = store.find("signals", identity.key)
        states.append(found is not None)
        assert [f.damage for f in maintenance.verify(store)] in ([[]] * len(store.artifacts()), [["its manifest is missing; the next run makes it again"]])
        if found is None:
            make(store, identity, b"anew")
        (made,) = store.artifacts()
        assert made.damage() == [] and made.rows() == 2 and set(made.manifest.files) == {"signals.parquet", "model/weights.bin"}
        assert made.path("model/weights.bin").read_bytes() == (b"anew" if found is None else b"whole")
        if steps:
            break
    assert steps > 8 and states == sorted(states) and not states[0] and states[-1]


def test_parts_of_a_killed_attempt_are_used_by_another_machine(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Identity("stage").key
    store = Store.open(bucket)
    with pytest.raises(Killed), store.work(key) as work:
        work.add("signals", signals(["a"], [1]), "first")
        work.add("signals", signals(["b"], [2]), "second")
        raise Killed
    name = next(n for n in store.files.list(f"work/{key}") if "signals-second" in n and n.endswith(".parquet"))
    store.files.write(name, store.files.read(name)[:-1] + b"x")
    monkeypatch.setenv("PUNA_CACHE", str(tmp_path / "another machine"))
    with store.work(key) as work, pytest.warns(UserWarning, match="is damaged; its job runs again"):
        first, second = work.earlier("signals-first"), work.earlier("signals-second")
        assert first is not None and first[0].shard.rows == 1 and second is None


def test_stores_are_one_by_their_address(place: str) -> None:
    assert files_of(place) == files_of(place) and hash(files_of(place)) == hash(files_of(place))
    with pytest.raises(PunaError, match="not found; `puna run` creates one"):
        Store.existing(f"{place}/nothing")
    assert json.loads(Store.open(place).files.read("store.json")) == json.loads(Store.open(f"{place}2").files.read("store.json"))
