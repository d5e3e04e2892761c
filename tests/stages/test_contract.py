"""The stage contract: identity, reuse, resumption, refusal."""

from __future__ import annotations

import dataclasses
import hashlib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pytest
from pydantic import Field

from puna.stages.contract import Documents, Reads, StageConfig, StageRun, declare_signal, execute, identify, perform, stage
from puna.storage import Artifact, PunaError, Store, maintenance, schemas
from puna.storage.explain import against
from puna.storage.runs import Made

CALLS: list[str] = []


class ShorteningConfig(StageConfig):
    most: int = Field(3, ge=1, description="Longest text kept, characters")


def shorten(rows: pa.Table, most: int) -> dict[str, pa.Table]:
    CALLS.append("part")
    kept = [len(t) <= most for t in rows["text"].to_pylist()]
    dropped = [{"id": r["id"], "rule": "too_long", "value": float(len(r["text"])), "threshold": float(most), "detail": None}
               for r, k in zip(rows.to_pylist(), kept, strict=True) if not k]  # fmt: skip
    columns = ("id", "rule", "value", "threshold", "detail")
    types = (pa.string(), pa.string(), pa.float64(), pa.float64(), pa.string())
    table = pa.Table.from_pylist(dropped, schema=pa.schema(list(zip(columns, types, strict=True))))
    return {"documents": rows.filter(pa.array(kept)), "dropped": table}


@stage(kind="documents", filters="documents")
def shortening(documents: Documents, config: ShorteningConfig, run: StageRun) -> None:
    """Keep short documents."""
    run.transform(shorten, documents, config.most)
    run.metric("most", config.most)


@stage(kind="documents", filters="documents")
def losing(documents: Documents, config: ShorteningConfig, run: StageRun) -> None:
    """Lose a row, which the commit must detect."""
    run.write(documents.read().slice(1))


@stage(kind="documents", filters="documents")
def confusing(documents: Documents, config: ShorteningConfig, run: StageRun) -> None:
    """Keep the first row and also drop it, in place of the second: the counts agree, the rows do not."""
    rows = documents.read()
    run.write(rows.slice(0, 1))
    run.write_rows([{"id": rows["id"][0].as_py(), "rule": "any", "value": None, "threshold": None, "detail": None}], "dropped")
    run.write(rows.slice(2))


declare_signal("shortened_characters", int, "characters", "A number of this test")


@stage(kind="signals")
def counting(documents: Annotated[Documents, Reads(("dropped.parquet",))], config: ShorteningConfig, run: StageRun) -> None:
    """Read only the dropped rows."""
    run.write(pa.table({"id": documents.read("dropped")["id"], "shortened_characters": pa.array([1] * documents.rows("dropped"), pa.int64())}))


@stage(kind="documents", filters="documents")
def keeping(documents: Documents, config: ShorteningConfig, run: StageRun) -> None:
    """Keep everything."""
    run.write(documents.read())


@stage(kind="documents")
def uniting(sets: list[Documents], config: ShorteningConfig, run: StageRun) -> None:
    """Return all rows of several sets."""
    for one in sets:
        run.write(one.read())


def documents(store: Store, texts: list[str]):
    n = len(texts)
    return store.import_table("documents", pa.table({
        "id": [f"{i:032x}" for i in range(n)], "url": [f"https://x.org/{i}" for i in range(n)],
        "fetched_at": [datetime(2026, 1, 1, tzinfo=UTC)] * n, "source": ["web"] * n,
        "title": pa.array([None] * n, pa.string()), "text": texts,
    }))  # fmt: skip


def test_runs_once_and_splits_rows(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given = {"documents": documents(store, ["a", "bbbb", "cc"])}
    first = perform(shortening, ShorteningConfig(), given, store)
    assert not first.reused
    assert first.artifact.read()["text"].to_pylist() == ["a", "cc"]
    assert first.artifact.read("dropped").to_pylist() == [
        {"id": f"{1:032x}", "rule": "too_long", "value": 4.0, "threshold": 3.0, "detail": None}
    ]
    again = perform(shortening, ShorteningConfig(), given, store)
    assert again.reused and again.artifact == first.artifact
    assert not list((store.root / "work").iterdir())


def test_bytes_do_not_depend_on_parts_or_workers(tmp_path: Path) -> None:
    texts = [chr(97 + i % 26) * (1 + i % 5) for i in range(100)]
    found = set()
    for index, (rows, workers) in enumerate([(7, None), (100, None), (33, 3)]):
        store = Store.open(tmp_path / str(index))
        executor = ThreadPoolExecutor(workers) if workers else None
        made = execute(shortening, ShorteningConfig(), {"documents": documents(store, texts)}, store, part_rows=rows, executor=executor)
        assert made.read()["text"].to_pylist() == [t for t in texts if len(t) <= 3]
        found.add((str(made.manifest.files), made.data_digest, made.key))
    assert len(found) == 1


def test_a_lost_row_is_an_error_and_nothing_is_committed(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    before = len(store.artifacts())
    given = {"documents": documents(store, ["a", "b"])}
    with pytest.raises(PunaError, match="2 rows came in, but 1 were kept and 0 dropped; 1 are lost"):
        execute(losing, ShorteningConfig(), given, store)
    assert len(store.artifacts()) == before + 1


def test_a_row_counted_twice_in_place_of_another_is_an_error(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given = {"documents": documents(store, ["a", "b", "c"])}
    with pytest.raises(PunaError, match=f"{0:032x} occurs 1 times too often; {1:032x} is lost"):
        execute(confusing, ShorteningConfig(), given, store)


@pytest.mark.parametrize("texts", [["a", "b"], []])
def test_what_filters_always_has_dropped(tmp_path: Path, texts: list[str]) -> None:
    store = Store.open(tmp_path)
    for declared in (shortening, keeping):
        made = execute(declared, ShorteningConfig(), {"documents": documents(store, texts)}, store)
        assert made.tables == ("documents", "dropped")
        assert made.read("dropped").schema.names == ["id", "rule", "value", "threshold", "detail"] and made.rows("dropped") == 0


def sharded(store: Store, count: int, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """Return documents in several shards, with texts of one to five characters."""
    schema = dataclasses.replace(schemas.TABLES["documents"], shard_bytes=300)
    monkeypatch.setitem(schemas.TABLES, "documents", schema)
    ids = sorted(hashlib.md5(str(n).encode()).hexdigest() for n in range(count))
    made = store.import_table("documents", pa.table({
        "id": ids, "url": [f"https://x.org/{i}" for i in ids], "fetched_at": [datetime(2026, 1, 1, tzinfo=UTC)] * count,
        "source": ["web"] * count, "title": pa.array([None] * count, pa.string()), "text": ["x" * (1 + n % 5) for n in range(count)],
    }))  # fmt: skip
    assert made.record().cut == len(made.shards()) > 3
    return made


def stopped_after(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a stage end after `shards` shards as if it were killed."""
    from puna.stages.contract import run as run_module

    original, left = run_module.transform_shard, iter(range(shards))

    def failing(task):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return original(task)

    monkeypatch.setattr(run_module, "transform_shard", failing)


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_resumes_after_a_crash_without_repeating_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    store, other = Store.open(tmp_path / "a"), Store.open(tmp_path / "b")
    given = {"documents": sharded(store, 60, monkeypatch)}
    CALLS.clear()
    untouched = execute(shortening, ShorteningConfig(), {"documents": sharded(other, 60, monkeypatch)}, other, part_rows=1000)
    assert len(CALLS) == len(untouched.shards())
    CALLS.clear()
    with monkeypatch.context() as patch:
        stopped_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            execute(shortening, ShorteningConfig(), given, store, part_rows=1000)
    assert len(CALLS) == 2
    made = execute(shortening, ShorteningConfig(), given, store, part_rows=1000)
    assert len(CALLS) == len(untouched.shards())
    assert (made.manifest.files, made.data_digest) == (untouched.manifest.files, untouched.data_digest)
    again = execute(shortening, ShorteningConfig(), given, Store.open(tmp_path / "a"), part_rows=rows)
    assert again == made and made.read().equals(untouched.read()) and not made.damage()


@pytest.mark.parametrize("seed", range(3))
def test_flips_in_what_a_killed_run_left_are_never_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    generator = np.random.default_rng(seed)
    store = Store.open(tmp_path)
    given = {"documents": sharded(store, 60, monkeypatch)}
    expected = execute(shortening, ShorteningConfig(), given, store)
    for trial in range(20):
        store.files.remove(expected.place)
        with monkeypatch.context() as patch:
            stopped_after(3, patch)
            with pytest.raises(KeyboardInterrupt):
                execute(shortening, ShorteningConfig(), given, store)
        left = sorted(f for f in (tmp_path / "work").rglob("*") if f.is_file() and "parts" in f.parts)
        file = left[int(generator.integers(len(left)))]
        data = bytearray(file.read_bytes())
        if trial % 4:
            data[int(generator.integers(len(data)))] ^= 1 << int(generator.integers(8))
        else:
            del data[int(generator.integers(len(data))) :]
        file.write_bytes(bytes(data))
        with pytest.warns(UserWarning, match="is damaged; its job runs again"):
            made = execute(shortening, ShorteningConfig(), given, store)
        assert (made.manifest.files, made.data_digest) == (expected.manifest.files, expected.data_digest) and not made.damage()


def test_wrong_inputs_are_refused_by_name(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    docs = documents(store, ["a"])
    with pytest.raises(PunaError, match="needs the input 'documents'"):
        execute(shortening, ShorteningConfig(), {}, store)
    with pytest.raises(PunaError, match="no input 'pages'"):
        execute(shortening, ShorteningConfig(), {"pages": docs}, store)
    other = store.import_table("signals", pa.table({"id": ["a"], "words": [3]}))
    with pytest.raises(PunaError, match="takes documents, but signals/.* is of kind signals"):
        execute(shortening, ShorteningConfig(), {"documents": other}, store)


def test_only_what_a_stage_reads_is_compared(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    made = execute(shortening, ShorteningConfig(), {"documents": documents(store, ["a", "long text"])}, store)
    for name in ("documents.order.parquet", "dropped.parquet"):
        file = made.path(name)
        content = file.read_bytes()
        file.chmod(0o644)
        file.write_bytes(content[:-5] + b"x" + content[-4:])
        if name == "documents.order.parquet":
            assert execute(counting, ShorteningConfig(), {"documents": made}, store).rows() == 1
            file.write_bytes(content)
        else:
            with pytest.raises(PunaError, match="is damaged: dropped.parquet has a wrong checksum"):
                execute(counting, ShorteningConfig(most=4), {"documents": made}, store)
            made = execute(shortening, ShorteningConfig(), {"documents": documents(store, ["a", "long text"])}, store)
    # A value that is not compared must still exist if it existed before.
    made.path("documents.order.parquet").write_bytes(b"short")
    with pytest.raises(PunaError, match="is damaged: documents.order.parquet has 5 bytes instead of"):
        execute(counting, ShorteningConfig(most=5), {"documents": made}, store)


def test_a_damaged_input_is_refused_and_a_damaged_hit_is_made_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    docs = documents(store, ["a", "bbbb"])
    made = execute(shortening, ShorteningConfig(), {"documents": docs}, store)
    file = made.path("documents.order.parquet")
    data = bytearray(file.read_bytes())
    data[10] ^= 1
    file.write_bytes(bytes(data))
    again = perform(shortening, ShorteningConfig(), {"documents": docs}, store)
    assert not again.reused and again.artifact.data_digest == made.data_digest and not again.artifact.damage()
    store.record("run", Made("shortening", "shortening", made.kind, made.key, False, 1.0).event())
    told = against(store, identify(shortening, ShorteningConfig(), {"documents": docs}), "shortening")
    assert [str(c) for c in told or ()] == [f"artifact {made.key[:12]}: made before → damaged or removed since"]
    docs.path("documents.parquet").write_bytes(b"short")
    with pytest.raises(PunaError, match="is damaged: documents.parquet has 5 bytes instead of"):
        execute(shortening, ShorteningConfig(most=2), {"documents": docs}, store)


def test_one_artifact_is_not_given_twice(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    one, other = documents(store, ["a"]), documents(store, ["b"])
    with pytest.raises(PunaError, match=f"stage uniting: {one.id} is given twice as 'sets'; give each artifact once"):
        execute(uniting, ShorteningConfig(), {"sets": [one, other, one]}, store)


def test_gc_leaves_what_a_live_process_made_and_read_without_a_run(tmp_path: Path) -> None:
    script, other = Store.open(tmp_path), Store.open(tmp_path)
    source = documents(script, ["a", "bbbb"])
    made = execute(shortening, ShorteningConfig(), {"documents": source}, script)
    again = Store.open(tmp_path)  # a second notebook finds the artifact
    script.holding.release()
    assert perform(shortening, ShorteningConfig(), {"documents": source}, again).reused
    assert maintenance.collect(other, keep_runs=0, work_days=0, remove=True) == []
    again.holding.release()
    assert {one.place for one in maintenance.collect(other, keep_runs=0, work_days=0, remove=True)} == {source.place, made.place}
