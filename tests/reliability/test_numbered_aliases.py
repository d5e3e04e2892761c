"""Aliases with a number keep their artifact."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from puna.storage import Store


def artifacts(store: Store, count: int):
    return [store.import_table("signals", pa.table({"id": [f"{i:032x}"], "words": [3]})) for i in range(count)]


def test_a_number_is_never_reused(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    first, second, third = artifacts(store, 3)
    assert store.set_alias("policy@round-1", first) == "policy@round-1"
    assert store.set_alias("policy@round-1", second) == "policy@round-2"
    assert store.set_alias("policy@round-1", first) == "policy@round-1"  # doing it twice has the effect of once
    assert store.set_alias("policy@round-1", second) == "policy@round-2"
    store.files.remove("refs/policy/round-2.json")
    assert store.set_alias("policy@round-2", third) == "policy@round-3"  # no other artifact takes a deleted number
    assert store.set_alias("policy@round-2", second) == "policy@round-2"
    assert [store.alias(f"policy@round-{n}") for n in (1, 2, 3)] == [first, second, third]


def test_runs_at_the_same_moment_take_different_numbers(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given = artifacts(store, 8)
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda one: store.set_alias("policy@round-1", one), given))
    assert sorted(taken) == [f"policy@round-{n}" for n in range(1, 9)]
    assert [store.alias(name) for name in taken] == given


def test_each_flipped_bit_of_the_journal_is_named(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    first, second = artifacts(store, 2)
    for name, artifact in (("policy@round-1", first), ("policy@round-2", second), ("tokenizer@latest", first)):
        store.set_alias(name, artifact)
    assert store.lost_aliases() == []
    journal = tmp_path / "refs" / ".journal"
    whole = journal.read_bytes()
    for bit in random.Random(7).sample(range(8 * len(whole)), 200):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        journal.write_bytes(flipped)
        line = whole[: bit // 8].count(b"\n") + 1
        assert any(f"refs/.journal: line {line} is damaged" in message for message in store.lost_aliases()), bit
    journal.write_bytes(whole)
    assert store.lost_aliases() == []


def test_a_journal_without_checksums_is_read(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    first, second = artifacts(store, 2)
    old = [json.dumps({"time": "2026-01-01T00:00:00+00:00", "alias": f"policy@round-{n}", "artifact": first.id}) for n in (1, 2)]
    (tmp_path / "refs" / ".journal").write_text("\n".join(old) + "\n")
    assert store.set_alias("policy@round-1", second) == "policy@round-3"
    assert [line.partition(":")[0] for line in store.lost_aliases()] == ["policy@round-1", "policy@round-2"]
