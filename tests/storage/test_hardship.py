"""Failures that a store survives: unusual paths, a full disk, a read-only store, kills between any two steps, truncated logs."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import SafetensorError

from puna.storage import Identity, PunaError, Store, catalog, maintenance, tables
from puna.storage import files as files_module


def signals(ids: list[str], words: list[int]) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.string()), "words": pa.array(words, pa.int64())})


@pytest.mark.parametrize("name", ["a b", "it's", "ünï ❄", "[old] *x* ?", "words=7", 'say "x"', "back\\slash"])
def test_a_store_may_lie_at_any_path(tmp_path: Path, name: str) -> None:
    store = Store.open(tmp_path / name)
    made = store.import_table("signals", signals(["b", "a"], [2, 1]))
    assert made.read().to_pylist() == [{"id": "a", "words": 1}, {"id": "b", "words": 2}]
    assert tables.imbalance(tables.Balance(made.shards(), made.shards()), 1, map) == []
    assert [f.damage for f in maintenance.verify(store)] == [[]]
    rows = catalog.query(store, "select * from signals order by id").to_pylist()
    assert rows == [{"artifact": made.key, "id": "a", "words": 1}, {"artifact": made.key, "id": "b", "words": 2}]


class Killed(BaseException):
    """An error after which nothing works: every later change of the disk fails too."""


@pytest.fixture
def no_finalizers() -> Iterator[None]:
    """Prevent stores of earlier tests from being collected, and so from removing their files, while calls of `os` fail."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make(store: Store, identity: Identity) -> None:
    with store.work(identity.key) as work:
        work.add("signals", signals(["b", "a"], [2, 1]), "one")
        (work.output / "model").mkdir(exist_ok=True)
        (work.output / "model" / "weights.bin").write_bytes(b"whole")
        work.commit("signals", identity.key, identity)


@pytest.mark.usefixtures("no_finalizers")
def test_a_kill_between_any_two_steps_leaves_a_whole_artifact_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity, steps, states = Identity("stage"), 0, []
    for step in range(200):
        store, left = Store.open(tmp_path / str(step)), step

        def counted(original):
            def call(*words, **named):
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return original(*words, **named)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "fsync", "mkdir", "rmdir", "unlink"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                make(store, identity)
                steps = step
            except Killed:
                pass
        found = store.find("signals", identity.key)
        states.append(found is not None)
        assert [f.damage for f in maintenance.verify(store)] == [[]] * len(store.artifacts())
        if found is None:
            make(store, identity)
        (made,) = store.artifacts()
        assert made.damage() == [] and made.path("model/weights.bin").read_bytes() == b"whole" and made.rows() == 2
        assert set(made.manifest.files) == {"signals.parquet", "model/weights.bin"}
        if steps:
            break
    assert steps > 15 and states == sorted(states) and not states[0] and states[-1]


@pytest.mark.parametrize("full", ["part", "table", "weights", "manifest"])
def test_a_full_disk_is_named_and_the_work_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    store, identity = Store.open(tmp_path), Identity("stage")

    def fails(*words, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(PunaError, match=f"store {tmp_path}: the disk is full"):
        if full == "weights":  # as safetensors and tokenizers raise it, which are no OSErrors
            error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
            patch.setattr(pq.ParquetWriter, "write_table", MagicMock(side_effect=error))
        elif full == "table":
            patch.setattr(pq.ParquetWriter, "write_table", fails)
        else:
            original = files_module.write_bytes
            written = {"part": "signals-one.json", "manifest": "manifest.json"}[full]
            patch.setattr(files_module, "write_bytes", lambda file, data, **how: (fails if file.name == written else original)(file, data, **how))
        make(store, identity)
    assert store.artifacts() == []
    make(store, identity)
    assert store.artifacts()[0].damage() == [] and list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_store_that_may_not_be_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    made = Store.open(tmp_path).import_table("signals", signals(["a"], [1]))
    original = Path.open

    def opened(path: Path, mode: str = "r", *words, **named):
        if set(mode) & set("wa+"):
            raise OSError(number, "no", str(path))
        return original(path, mode, *words, **named)

    def make_folder(path, *words, **named):
        raise OSError(errno.EEXIST if os.path.isdir(path) else number, "no", str(path))

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(os, "mkdir", make_folder)
    store = Store.open(tmp_path)
    assert store.check(store.resolve(made.key)) == made
    assert catalog.query(store, "select count(*) as n from signals").to_pylist() == [{"n": 1}]
    for write in (
        lambda: store.import_table("signals", signals(["b"], [1])), lambda: store.set_alias("a@b", made), lambda: store.record("r", {}),
        lambda: store.accept(made, "f" * 64), lambda: store.quarantine(made), lambda: Store.open(tmp_path / "new"),
    ):  # fmt: skip
        with pytest.raises(PunaError, match="cannot be written"):
            write()


def test_a_line_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.record("run", {"key": "one", "note": "ü \u2028 line"})
    file = tmp_path / "runs" / "run.jsonl"
    file.write_bytes(file.read_bytes() + '{"key": "two", "note": "ü'.encode()[:-1])
    store.record("run", {"key": "three"})
    assert [e["key"] for e in store.events("run")] == ["one", "three"]


@pytest.mark.parametrize("name", [".accepted@" + "f" * 64, "../x@y", "a@../b", "a@", "@b", "a b@c", "a@.b"])
def test_wrong_aliases_are_refused(tmp_path: Path, name: str) -> None:
    store = Store.open(tmp_path)
    made = store.import_table("signals", signals(["a"], [1]))
    for use in (lambda: store.set_alias(name, made), lambda: store.alias(name)):
        with pytest.raises(PunaError, match="no such alias"):
            use()
    with pytest.raises(PunaError, match="hex digits"):
        store.resolve("****")


@pytest.mark.parametrize(("name", "message"), [("manifest.json", "is reserved for the manifest"), ("signals.parquet", "name of one of its tables"), ("link", "is a link")])
def test_files_that_cannot_be_committed_are_refused(tmp_path: Path, name: str, message: str) -> None:
    store, identity = Store.open(tmp_path), Identity("stage")
    with pytest.raises(PunaError, match=message), store.work(identity.key) as work:
        if name == "link":
            (work.output / name).symlink_to(work.scratch)
        else:
            (work.output / name).write_text("{}")
        work.commit("signals", identity.key, identity)
    assert store.artifacts() == []
