"""Curation on an object store with failing requests gives the same result as on a local disk."""

from __future__ import annotations

from pathlib import Path

from puna.storage import Store, maintenance
from tests.benchmarks.store_corpus import chain, made_up
from tests.storage.conftest import bucket, proxy, s3_server  # noqa: F401
from tests.storage.fault_proxy import FaultProxy


def test_same_keys_and_digests_as_on_a_disk(tmp_path: Path, bucket: str, proxy: FaultProxy) -> None:  # noqa: F811
    local, remote = Store.open(tmp_path / "store"), Store.open(bucket)
    expected = chain(local, made_up(local, 300), None)
    proxy.rate = 0.02
    made = chain(remote, made_up(remote, 300), None)
    assert [(a.key, a.data_digest, a.manifest.files) for a in made] == [(a.key, a.data_digest, a.manifest.files) for a in expected]
    assert proxy.met["requests"] > 200 and len(proxy.met) > 2
    assert [f.damage for f in maintenance.verify(remote)] == [[]] * len(expected)
