"""Tables in shards: the bytes do not depend on who wrote which piece; rows kept by reference read like copied rows; the exchange."""

from __future__ import annotations

import dataclasses
import hashlib
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.stages.contract import StageConfig, StageRun
from puna.storage import Artifact, Identity, PunaError, Store, Work, catalog, damage, digest, exchange, maintenance, parts, schemas, shards
from puna.storage.exchange import Exchange, Partition, Scatter, gather, scatter
from puna.storage.files import LocalFiles
from puna.storage.parts import Follower, span
from puna.storage.staging import Staging
from puna.storage.tables import LEAST_KEPT, Balance, imbalance

WORDS = {"meaning": "words", "unit": "words"}


def ids_of(count: int, seed: int = 0) -> list[str]:
    return sorted(hashlib.md5(f"{seed}-{n}".encode()).hexdigest() for n in range(count))


def documents(ids: list[str], texts: list[str]) -> pa.Table:
    n = len(ids)
    return pa.table({
        "id": pa.array(ids, pa.string()), "url": [f"https://x.org/{i}" for i in ids], "fetched_at": pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * n, schemas.TIME),
        "source": pa.array(["web"] * n, pa.string()), "title": pa.array([None] * n, pa.string()), "text": pa.array(texts, pa.string()),
    })  # fmt: skip


def small_shards(monkeypatch: pytest.MonkeyPatch, *names: str, size: int = 400, group: int = 7) -> None:
    for name in names:
        monkeypatch.setitem(schemas.TABLES, name, dataclasses.replace(schemas.TABLES[name], shard_bytes=size, group_rows=group))


def committed(store: Store, name: str, pieces: list[pa.Table], stage: str = "stage") -> Artifact:
    identity = Identity(stage)
    with store.work(identity.key) as work:
        for number, piece in enumerate(pieces):
            work.add(name, piece, f"{number:03d}")
        return work.commit(name if name in schemas.KINDS else "signals", identity.key, identity)


@pytest.mark.parametrize("seed", range(4))
def test_the_bytes_do_not_depend_on_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    generator = np.random.default_rng(seed)
    small_shards(monkeypatch, "documents")
    ids = ids_of(90, seed)
    whole = documents(ids, ["x" * int(n) for n in generator.integers(1, 300, 90)])
    found = set()
    for trial in range(4):
        order = generator.permutation(90) if trial % 2 else np.arange(90)
        cuts = sorted({0, 90, *generator.integers(0, 90, 6).tolist()})
        pieces = [whole.take(pa.array(order[a:b])) for a, b in pairwise(cuts)]
        made = committed(Store.open(tmp_path / str(trial)), "documents", [pieces[n] for n in generator.permutation(len(pieces))])
        assert made.read().equals(whole.cast(made.read().schema)) and made.damage() == []
        found.add((str(made.manifest.files), made.data_digest))
    assert len(found) == 1
    record = made.record()
    assert record.cut == len(record.shards) == shards.count(schemas.TABLES["documents"], int(shards.row_bytes(whole).sum())) > 2
    for number, shard in enumerate(record.shards):
        low, high = span(record.cut, number)
        if shard.rows:
            assert low <= shard.low[0] <= shard.high[0] and (high is None or shard.high[0] < high)
        assert all(rows <= 7 for rows in shard.groups)
    assert made.manifest.metrics["characters"] == sum(map(len, whole["text"].to_pylist()))


def test_a_shard_holds_ids_by_their_leading_bits() -> None:
    ids = ids_of(500)
    for count in (1, 2, 8, 64, 4096):
        assert shards.shard_of(pa.array(ids), count).tolist() == [int(i[:8], 16) * count >> 32 for i in ids]


@pytest.mark.parametrize("pieces", [["ab", "bc"], ["aab"], ["b", "ab"], ["ab", "ab"], ["ac", "cab"]])
def test_two_rows_with_one_key_are_refused_wherever_they_are(tmp_path: Path, pieces: list[str]) -> None:
    tables = [pa.table({"id": list(piece)}) for piece in pieces]
    with pytest.raises(PunaError, match="table signals: two rows have the key {'id': '[abc]'}"):
        committed(Store.open(tmp_path), "signals", tables)


@pytest.mark.parametrize("pieces", [["ac", "b"], ["ba"], ["c", "ab", ""], ["", ""]])
def test_pieces_that_overlap_or_are_not_sorted_or_empty(tmp_path: Path, pieces: list[str]) -> None:
    made = committed(Store.open(tmp_path), "signals", [pa.table({"id": pa.array(list(piece), pa.string())}) for piece in pieces])
    assert made.read()["id"].to_pylist() == sorted("".join(pieces))


def test_columns_that_some_pieces_lack_are_null(tmp_path: Path) -> None:
    field = pa.field("words", pa.int64(), metadata=WORDS)
    tables = [pa.table({"id": ["b", "a"]}), pa.table({"id": ["c"], "words": [1]}, schema=pa.schema([("id", pa.string()), field]))]
    made = committed(Store.open(tmp_path), "signals", tables)
    assert made.read().to_pylist() == [{"id": "a", "words": None}, {"id": "b", "words": None}, {"id": "c", "words": 1}]
    assert made.read().schema.field("words").metadata[b"unit"] == b"words"


ROWS = st.lists(st.tuples(st.text(max_size=4), st.none() | st.text(max_size=3), st.integers(-5, 5)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(ROWS, ROWS)
def test_a_row_has_one_digest_wherever_it_lies(first: list[Any], second: list[Any]) -> None:
    def table(rows: list[Any]) -> pa.Table:
        return pa.table({"a": pa.array([r[0] for r in rows]), "b": pa.array([r[1] for r in rows], pa.string()), "n": pa.array([r[2] for r in rows])})

    one, other, both = (digest.of_rows(table(rows)) for rows in (first, second, [*first, *second]))
    assert np.array_equal(np.concatenate([one, other]), both)
    for i, left in enumerate(first):
        for j, right in enumerate(second):
            assert (left == right) == np.array_equal(one[i], other[j])


def selected(store: Store, base: Artifact, keep: list[bool], changed: list[int], stage: str) -> Artifact:
    """Return the kept rows of `base`, some of them with a changed text, as a stage makes them."""
    from puna.stages.contract import Documents, StageConfig, execute
    from puna.stages.contract import stage as declare

    kept = dict(zip(base.read(columns=["id"])["id"].to_pylist(), keep, strict=True))
    ids = list(kept)

    def step(documents: Documents, config: StageConfig, run: Any) -> None:
        """Keep some rows and change some."""
        run.transform(chosen, documents)

    def chosen(rows: pa.Table) -> pa.Table:
        texts = [f"{t}!" if ids.index(i) in changed else t for i, t in zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True)]
        rows = rows.set_column(rows.schema.get_field_index("text"), "text", pa.array(texts))
        return rows.filter(pa.array([kept[i] for i in rows["id"].to_pylist()]))

    step.__name__ = stage
    step.__annotations__ = {"documents": Documents, "config": StageConfig, "run": Any, "return": None}
    return execute(declare(kind="documents", version=stage)(step), StageConfig(), {"documents": base}, store)


@pytest.mark.parametrize("seed", range(6))
def test_rows_kept_by_reference_are_those_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    generator = np.random.default_rng(seed)
    small_shards(monkeypatch, "documents", size=800)
    store, other = Store.open(tmp_path / "a"), Store.open(tmp_path / "b")
    ids = ids_of(60, seed)
    rows = documents(ids, ["x" * int(n) for n in generator.integers(1, 60, 60)])
    current, expected = store.import_table("documents", rows), rows
    for step in range(4):
        n = expected.num_rows
        keep = (generator.random(n) < 0.85).tolist()
        changed = generator.choice(n, 3, replace=False).tolist() if step % 2 else []
        current = selected(store, current, keep, changed, f"step{seed}{step}")
        texts = [f"{t}!" if at in changed else t for at, t in enumerate(expected["text"].to_pylist())]
        expected = expected.set_column(5, "text", pa.array(texts)).filter(pa.array(keep))
        plain = other.import_table("documents", expected)
        assert current.read().equals(plain.read()) and current.damage() == []
        assert current.record().sources and current.manifest.metrics["characters"] == plain.manifest.metrics["characters"]
        # Reuse depends on content, however the rows are stored; the cut into shards is part of it.
        again = selected(other, plain, [True] * plain.rows(), [], f"whole{seed}{step}")
        if plain.record().cut == current.record().cut:
            assert current.record().digest == plain.record().digest == again.record().digest
        for size in (3, 1000, None):
            parts = current.parts(columns=["id", "text"], rows=size)
            assert pa.concat_tables([p.read() for p in parts]).equals(plain.read(columns=["id", "text"]))
            assert pa.concat_tables([p.read() for part in parts for p in part.split()]).equals(plain.read(columns=["id", "text"]))
            assert max(p.rows for p in parts) <= (size or 7)
        for shard in (shard for shard in current.shards() if shard.rows):
            some = np.flatnonzero(generator.random(shard.rows) < 0.7)
            together = list(shard.by_group(some))
            assert sorted(np.concatenate([some[:0], *together]).tolist()) == some.tolist()
            source, row = shard.place(0, shard.rows)
            ends = [np.cumsum(file.groups) if file else None for file in shard.stored]
            groups = [{(n, int(np.searchsorted(ends[n], r, side="right"))) for n, r in zip(source[g], row[g], strict=True)} for g in together]
            assert all(len(one) == 1 for one in groups) and len(set.union(set(), *groups)) == len(groups)
        low, high = sorted(generator.choice(ids, 2, replace=False))
        assert current.between(low, high, columns=["id"])["id"].to_pylist() == [i for i in plain.read()["id"].to_pylist() if low <= i <= high]
    with catalog.Catalog(store) as opened:
        found = catalog.run(opened, f"select * exclude (artifact) from documents where artifact = '{current.key}' order by id")
    assert found["text"].to_pylist() == expected["text"].to_pylist() and found["id"].to_pylist() == expected["id"].to_pylist()


def test_a_shard_without_rows_has_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_shards(monkeypatch, "documents", size=800)
    base = Store.open(tmp_path).import_table("documents", documents([f"{n:032x}" for n in range(60)], ["x" * 40] * 60))
    assert not all(shard.rows for shard in base.shards())
    for size in (None, 5):
        assert pa.concat_tables([part.read() for part in base.parts(rows=size)]).equals(base.read())


def test_few_rows_are_written_anew(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    base = store.import_table("documents", documents(ids_of(40), ["text"] * 40))
    few = selected(store, base, [n < 40 * LEAST_KEPT - 1 for n in range(40)], [], "few")
    many = selected(store, base, [n < 40 * LEAST_KEPT for n in range(40)], [], "many")
    assert not few.record().sources and "documents.parquet" in few.manifest.files
    assert many.record().sources and "documents.parquet" not in many.manifest.files
    assert few.record().digest == store.import_table("documents", few.read()).record().digest


def test_what_is_kept_by_reference_is_needed_and_checked(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    base = store.import_table("documents", documents(ids_of(8), ["text"] * 8))
    kept = selected(store, base, [True] * 7 + [False], [], "referring")
    store.set_alias("kept@latest", kept)
    assert maintenance.collect(store, keep_runs=0, work_days=0, remove=True) == []
    file = base.path("documents.parquet")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    assert any("refers to rows of" in what and "wrong checksum" in what for what in kept.damage(quick=True))
    damage.set_aside(store.files, base.kind, base.key)
    assert any("not in the store" in what for what in Artifact(kept.kind, kept.key, store.files).damage())


@given(
    came=st.lists(st.sampled_from("abcdef"), max_size=9, unique=True),
    kept=st.lists(st.sampled_from("abcdef"), max_size=9, unique=True),
    dropped=st.lists(st.sampled_from("abcdef"), max_size=9, unique=True),
)
@settings(max_examples=40, deadline=None)
def test_ids_that_are_missing_or_too_many(tmp_path_factory: pytest.TempPathFactory, came: list[str], kept: list[str], dropped: list[str]) -> None:
    store = Store.open(tmp_path_factory.mktemp("s"))
    tables = [store.import_table("signals", pa.table({"id": pa.array(one, pa.string()), "words": pa.array([n] * len(one), pa.int64())}))
              for n, one in enumerate((came, kept, dropped))]  # fmt: skip
    balance = Balance(tables[0].shards(), tables[1].shards() + tables[2].shards())
    expected = [(i, n) for i in "abcdef" if (n := came.count(i) - kept.count(i) - dropped.count(i))]
    assert imbalance(balance, 1, map) == imbalance(balance, 4, map) == expected[:3]


@pytest.mark.parametrize("by", ["hash", "id", "place"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", [exchange.LEVEL, 7, 2])
@pytest.mark.parametrize(("piece", "file"), [(exchange.PIECE_BYTES, exchange.MAP_BYTES), (1, exchange.MAP_BYTES), (1, 1000), (1 << 20, 1)])
def test_an_exchange_gives_each_row_once_to_the_partition_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, seed: int, piece: int, file: int, level: int
) -> None:
    """Rows are in the order of jobs, for any number of rows packed together or in one file, and on one level or two (of 3, 3 and 2)."""
    monkeypatch.setattr(exchange, "PIECE_BYTES", piece)
    monkeypatch.setattr(exchange, "MAP_BYTES", file)
    monkeypatch.setattr(exchange, "LEVEL", level)
    generator = np.random.default_rng(seed)
    staging = Staging(Store.open(tmp_path).files, "work/x/parts")
    count, tables = 8, []
    for _ in range(4):
        n = int(generator.integers(0, 50))
        ids = [hashlib.md5(generator.bytes(8)).hexdigest() for _ in range(n)]
        columns = {"id": pa.array(ids, pa.string()), "hash": generator.integers(0, 1 << 64, n, np.uint64), "place": generator.integers(0, count, n).astype(np.int32)}
        tables.append(pa.table(columns))
    run = StageRun("test", "documents", StageConfig(), cast(Work, SimpleNamespace(staging=staging, files=staging.files)))
    made = run.exchange(lambda table: (table.slice(at, 7) for at in range(0, table.num_rows + 1, 7)), tables, by=by, partitions=count)
    whole = pa.concat_tables(tables)
    assert made.rows == whole.num_rows and [part.number for part in made.parts] == list(range(count))
    assert all(part.schema == whole.schema for part in made.parts)
    expected = {"hash": lambda r: r["hash"] >> 61, "id": lambda r: int(r["id"][0], 16) >> 1, "place": lambda r: r["place"]}[by]
    for number, part in enumerate(made.parts):
        assert part.read().to_pylist() == [r for r in whole.to_pylist() if expected(r) == number]
    if by == "id":
        follower, low = Follower(made, "", None), ""
        for edge in ("3", "77", "c", None):
            wanted = sorted(i for i in whole["id"].to_pylist() if i > low and (edge is None or i <= edge))
            assert follower.upto(edge)["id"].to_pylist() == wanted
            low = edge or low


@pytest.mark.parametrize(("partitions", "pieces"), [(2, 8), (64, 2), (1024, 1)])
def test_what_a_job_holds_does_not_grow_with_the_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: int, pieces: int) -> None:
    """64 kB of rows: packed by 8 kB, or by 32 kB if pieces of 8 kB would be shorter than 512 bytes, or all at once."""
    for name, value in {"PIECE_BYTES": 4 << 10, "HELD_BYTES": 8 << 10, "LEAST_PIECE": 512}.items():
        monkeypatch.setattr(exchange, name, value)
    staging = Staging(Store.open(tmp_path).files, "work/x/parts")
    tables = [pa.table({"place": np.arange(128, dtype=np.int32) % 2, "value": np.full((128,), n, np.int32)}) for n in range(64)]
    how = exchange.Scatter(staging, "job", "place", partitions, exchange.level(partitions))
    made = exchange.gather(staging.files, [exchange.scatter(how, iter(tables), lambda: None)], partitions, "place", how.runs)
    assert [[table.column(0).num_chunks for table in part.tables()] for part in made.nonempty_parts] == [[pieces], [pieces]]
    assert made.parts[1].read()["value"].to_pylist() == [n for n in range(64) for _ in range(64)]


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_file_are_the_same_however_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """In order, each row group is read once, even if pieces of it are requested; with more files than are kept open, more often."""
    random = np.random.default_rng(seed)
    groups = tuple(random.integers(1, 9, 6).tolist())
    table = pa.table({"id": [f"{n:04d}" for n in range(sum(groups))], "text": [f"text {n}" for n in range(sum(groups))]})
    files = []
    for name in "abcdef":
        with pq.ParquetWriter(tmp_path / name, table.schema) as writer:
            for start, size in zip(np.cumsum((0, *groups)), groups, strict=False):
                writer.write_table(table.slice(start, size))
        files.append(parts.Stored(LocalFiles(tmp_path), name, f"{seed}{name}", groups))
    read, whole = [], parts.Stored.read
    monkeypatch.setattr(parts.Stored, "read", lambda file, some, columns: read.extend(some) or whole(file, some, columns))
    for columns in (None, ["text"]):
        wanted = table if columns is None else table.select(columns)
        kept = np.flatnonzero(random.random(len(table)) < 0.7)
        cut = np.array_split(kept, 5)
        read.clear()
        found = [files[0].take(rows, columns) for rows in cut if len(rows)]
        assert pa.concat_tables(found).equals(wanted.take(kept))
        assert len(read) == len(set(read))
        for _ in range(40):
            rows = np.unique(random.choice(len(table), int(random.integers(1, len(table)))))
            assert files[int(random.integers(0, 6))].take(rows, columns).equals(wanted.take(rows))
    assert len(parts._BEGUN) <= parts.MOST_BEGUN


@pytest.mark.parametrize("place", [-1, 2, 1 << 16, None])
def test_a_row_of_a_partition_that_is_not_there_is_refused(tmp_path: Path, place: int | None) -> None:
    """Such a row used to be lost silently."""
    staging = Staging(Store.open(tmp_path).files, "work/x/parts")
    with pytest.raises(PunaError, match="outside 0 to 1"):
        scatter(Scatter(staging, "job", "place", 2, range(2)), pa.table({"place": pa.array([0, place, 1], pa.int32())}), lambda: None)


def test_a_damaged_run_is_refused(tmp_path: Path) -> None:
    staging = Staging(Store.open(tmp_path).files, "work/x/parts")
    found = scatter(Scatter(staging, "job", "place", 2, range(2)), pa.table({"place": pa.array([0, 1] * 9, pa.int32())}), lambda: None)
    file = tmp_path / found.files[0][0]
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 4
    file.write_bytes(bytes(data))
    with pytest.raises(PunaError, match="the stored data of partition 0 is damaged"):
        gather(staging.files, [found], 2, "id", range(2)).parts[0].read()


def test_files_are_plain_parquet(tmp_path: Path) -> None:
    made = Store.open(tmp_path).import_table("documents", documents(ids_of(5), ["text"] * 5))
    assert pq.read_table(made.path("documents.parquet")).equals(made.read())


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_a_range_of_ids_is_looked_for_where_it_may_lie(count: int) -> None:
    none = np.zeros(0, np.int64)
    exchange = Exchange(tuple(Partition(LocalFiles(Path()), pa.schema([]), n, (), none, none) for n in range(count)), pa.schema([]), count, "id")
    spans = [span(count, number) for number in range(count)]
    random = np.random.default_rng(count)
    edges = ["", *(low for low, _ in spans), *(f"{one:08x}" for one in random.integers(0, 1 << 32, 20))]
    for low in edges:
        for high in [None, *edges]:
            if high is None or high > low:
                expected = [n for n, (first, after) in enumerate(spans) if (after is None or after > low) and (high is None or first < high)]
                near = exchange.within(low, high)
                assert [part.number for part in near.parts] == [part.number for part in near.within(low, high).parts] == expected
