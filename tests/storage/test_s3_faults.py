"""A failing object store: each fault alone, damage, lost leases, a small cache, and credentials that must stay hidden."""

from __future__ import annotations

import io
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa
import pytest

from puna.storage import PunaError, Store, blocks, cache, catalog, lease, s3
from puna.storage.bucket import _connect
from puna.storage.files import DamagedFile
from puna.storage.s3 import S3Files
from tests.storage.conftest import KEY, SECRET
from tests.storage.fault_proxy import FAULTS, FaultProxy


def signals(number: int) -> pa.Table:
    return pa.table({"id": ["a", "b"], "words": [number, number + 1]})


@pytest.fixture
def files(bucket: str) -> S3Files:
    """Return the files of an empty store."""
    return S3Files.at(bucket)


class Once:
    """A fault for the first request with a given method and name."""

    def __init__(self, fault: str, method: str, name: str) -> None:
        self.fault, self.method, self.name, self.left = fault, method, name, 1

    def __call__(self, method: str, target: str) -> str | None:
        if method == self.method and target.split("?")[0].endswith(self.name) and self.left:
            self.left -= 1
            return self.fault
        return None


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_borne(files: S3Files, proxy: FaultProxy, fault: str) -> None:
    data = os.urandom(200_000)
    proxy.chosen = Once(fault, "PUT", "/one")
    assert files.create("refs/one", data)
    proxy.chosen = Once(fault, "GET", "/one")
    assert files.read("refs/one") == data
    proxy.chosen = Once(fault, "GET", "/one")
    with files.open("refs/one") as file:
        assert file.read() == data
    assert proxy.met[fault] == (2 if fault in ("cut", "flip") else 3) or fault == "cut"


def test_a_line_whose_answer_was_lost_is_in_the_log_once(files: S3Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another writer's line already follows it when the request is retried."""
    swap, lost = S3Files.swap, ["own"]

    def answer_lost(self: S3Files, name: str, data: bytes, version: str | None) -> bool:
        done = swap(self, name, data, version)
        if lost:
            lost.pop()
            self.append(name, b"of another\n")
            return False
        return done

    monkeypatch.setattr(S3Files, "swap", answer_lost)
    files.append("runs/log", b"own\n")
    assert files.read("runs/log") == b"own\nof another\n"


def test_a_put_whose_answer_was_lost_has_won(files: S3Files, proxy: FaultProxy) -> None:
    proxy.chosen = Once("lost", "PUT", "/one")
    assert files.create("refs/one", b"same") and proxy.met["lost"] == 1
    assert not files.create("refs/one", b"same")
    before = files.stat("refs/one")
    assert before is not None
    proxy.chosen = Once("lost", "PUT", "/one")
    assert files.swap("refs/one", b"other", before.version) and proxy.met["lost"] == 2
    assert not files.swap("refs/one", b"other", before.version) and files.read("refs/one") == b"other"


def test_a_large_file_is_sent_and_read_in_pieces(files: S3Files, proxy: FaultProxy, tmp_path: Path) -> None:
    data = os.urandom(40 << 20)
    (tmp_path / "file").write_bytes(data)
    proxy.rate, proxy.faults = 0.1, ("429", "500", "503", "reset", "cut", "flip")
    files.put("big", tmp_path / "file")
    assert sum(b"partNumber=" in head for head in proxy.seen) >= 3
    assert files.local("big").read_bytes() == data


def test_what_is_damaged_for_good_is_refused(files: S3Files, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "pause", lambda attempt: None)
    store = Store(files)
    made = store.import_table("signals", signals(1))
    proxy.chosen = lambda method, target: "flip" if target.split("?")[0].endswith(".parquet") else None
    for use in (made.read, lambda: files.read(f"{made.place}/signals.parquet"), lambda: made.path("signals.parquet")):
        with pytest.raises(DamagedFile, match=r"signals.parquet: is damaged: its bytes are not those that were written"):
            use()
    with pytest.raises(PunaError, match="is damaged"):
        catalog.query(store, "select * from signals")
    assert made.damage() == ["signals.parquet has a wrong checksum"]
    proxy.chosen = lambda method, target: None
    assert made.damage() == [] and made.read()["words"].to_pylist() == [1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_every_flipped_bit_is_found(seed: int) -> None:
    import random

    rng = random.Random(seed)
    data = bytearray(rng.randbytes(rng.choice([1, 1000, 65_536, 65_537, 500_000])))
    sums, size = blocks.of_bytes(bytes(data)), len(data)
    start, stop = blocks.whole_blocks(at := rng.randrange(size), at + 1, size)
    assert blocks.right(bytes(data[start:stop]), start, size, sums) and start <= at < stop
    data[at] ^= 1 << rng.randrange(8)
    assert not blocks.right(bytes(data[start:stop]), start, size, sums) and not blocks.right(bytes(data), 0, size, sums)


@pytest.mark.parametrize("size", [0, 1, 1 << 16, 300 << 20, 5 << 30, 100 << 30])
def test_checksums_fit_into_an_objects_metadata(size: int) -> None:
    number = -(-size // blocks.block_bytes(size))
    assert number <= blocks.MOST and number * 4 * 4 / 3 + 100 < 2048


# --- leases ----------------------------------------------------------------------------------------


def as_machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(lease, "_machine", lambda: name)


def test_a_lease_that_stands_still_is_taken_over_and_the_late_holder_commits_nothing(
    bucket: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = S3Files.at(bucket)
    files = S3Files(place.bucket, place.prefix, term=1.0)
    files.write("work/k/one", b"one")
    as_machine(monkeypatch, "one")
    with files.lease("aak"):
        # The holder's renewals no longer reach the server.
        proxy.chosen = lambda method, target: "403" if method == "PUT" and target.endswith("/aak") else None
        as_machine(monkeypatch, "other")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lease, "_held", {})
            assert not files.is_held("aak")
        with pytest.raises(PunaError, match="was suspended for so long that another one may have continued"):
            files.publish("objects/signals/aa/aak", {"a": "work/k/one"}, ("manifest.json", b"{}"), "work/k/commit")
        assert files.stats("objects") == {}


def test_a_lease_that_is_renewed_is_not_taken_over(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = S3Files.at(bucket)
    files, other = (S3Files(place.bucket, place.prefix, term=term) for term in (1.0, 1.5))
    as_machine(monkeypatch, "one")
    with files.lease("aak"):
        as_machine(monkeypatch, "other")
        for _ in range(3):
            with other.lease("aak", wait=False) as mine:
                assert not mine
        as_machine(monkeypatch, "one")
    with other.lease("aak", wait=False) as mine:
        assert mine


def test_a_killed_process_of_this_machine_holds_nothing(files: S3Files) -> None:
    code = f"""
import time
from puna.storage.s3 import S3Files
with S3Files.at({files.uri!r}).lease("aak"):
    print("held", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ".pkg"})
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    assert files.is_held("aak")
    process.kill()
    process.wait()
    begun = time.monotonic()
    with files.lease("aak") as mine:
        assert mine and time.monotonic() - begun < files.term


def test_threads_hold_a_name_one_after_another(files: S3Files) -> None:
    inside, most = 0, 0

    def hold() -> None:
        nonlocal inside, most
        with files.lease("aak"):
            inside += 1
            most = max(most, inside)
            time.sleep(0.05)
            inside -= 1

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


# --- the cache -------------------------------------------------------------------------------------


def test_the_longest_unused_copies_go_first_and_those_in_use_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUNA_CACHE_GB", "0.00025")
    monkeypatch.setattr(cache, "_pinned", OrderedDict())
    place, fetched = cache.Cache(tmp_path), []

    def fetch(name: str, path: Path) -> None:
        fetched.append(name)
        path.write_bytes(b"x" * 100_000)

    names = [f"objects/model/aa/{n}/model.safetensors" for n in range(4)]
    for number, name in enumerate(names):
        # Only the last two are in use.
        monkeypatch.setattr(cache, "PINNED", 2)
        place.have({name: "1"}, fetch)
        os.utime(place._lock(f"objects/model/aa/{number}"), (number, number))
    assert [place.path(name).exists() for name in names] == [False, False, True, True]
    place.have({names[3]: "1"}, fetch)
    place.have({names[3]: "2"}, fetch)
    assert fetched == [*names, names[3]]


# --- credentials -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "uri", [f"s3://{KEY}:{SECRET}@bucket/store", f"s3://{KEY}@bucket/store", f"s3://bucket/store?X-Amz-Signature={SECRET}"]
)
def test_credentials_in_an_address_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(PunaError, match="credentials do not belong in the address") as error:
        Store.open(uri)
    assert KEY not in str(error.value) and SECRET not in str(error.value)


@pytest.mark.parametrize("uri", ["s3://", "s3://BUCKET/x", "s3://bucket/a//b", "s3://bucket/../b", "s3://bucket/a#b"])
def test_wrong_addresses_are_refused(uri: str) -> None:
    with pytest.raises(PunaError, match="store s3://"):
        Store.open(uri)


def test_credentials_show_nowhere(
    bucket: str, proxy: FaultProxy, s3_server: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    store = Store.open(bucket)
    made = store.import_table("signals", signals(1))
    store.set_alias("a@b", made)
    said = [repr(store.files), str(store.files), repr(made), repr(store.files._client())]
    held = [pickle.dumps(made), *(store.files.read(name) for name in store.files.list(""))]
    held += [path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    proxy.chosen = lambda method, target: "403"
    with pytest.raises(PunaError, match="access was denied; the AWS_… environment variables") as error:
        store.artifacts()
    said += [str(error.value), caplog.text, *capfd.readouterr()]
    assert len(held) > 4
    for secret in (SECRET, KEY):
        assert not any(secret in text for text in said) and not any(secret.encode() in data for data in held)


def test_what_is_missing_is_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PunaError, match="the bucket puna-nobody does not exist; create it"):
        Store.open("s3://puna-nobody/store")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    _connect.cache_clear()
    with pytest.raises(PunaError, match="no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        Store.open(bucket)


def test_a_reader_is_a_file(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    asked: list[tuple[int, int]] = []

    def fetch(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return data[start:stop]

    with io.BufferedReader(blocks.Reader(len(data), fetch)) as reader:
        assert reader.read() == data
    assert all(start % blocks.block_bytes(len(data)) == 0 for start, _ in asked) and len(asked) <= 4
