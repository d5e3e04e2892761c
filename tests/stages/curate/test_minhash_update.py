"""Adding documents gives the same result as deduplicating all of them at once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

from puna.stages.contract import StageConfig, execute
from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
from puna.stages.curate.minhash_update import minhash_update, verdicts
from puna.storage import PunaError, Store

START = datetime(2024, 1, 1, tzinfo=UTC)


def corpus(seed):
    """Return 60 documents in families of near-duplicates of different lengths and ages, with unordered ids; one has no words."""
    generator = np.random.default_rng(seed)
    bases = [[f"w{n}" for n in generator.integers(0, 5000, generator.integers(60, 200))] for _ in range(14)]
    rows = []
    for number in range(59):
        words = list(bases[generator.integers(14)])
        for _ in range(generator.integers(0, 3)):
            words[generator.integers(len(words))] = f"new{generator.integers(10**6)}"
        words += [f"end{generator.integers(10**6)}" for _ in range(generator.integers(0, 6))]
        when = START + timedelta(days=int(generator.integers(30)))
        rows.append((f"{generator.integers(10**9):09d}{number}", when, ("web", "web", "code")[generator.integers(3)], " ".join(words)))
    return [*rows, ("5empty", START, "web", "...")]


def documents(store, rows):
    made = [{"id": i, "url": f"https://x.org/{i}", "fetched_at": w, "source": s, "title": None, "text": t} for i, w, s, t in rows]
    return store.import_table("documents", pa.Table.from_pylist(made))


def kept(artifact):
    return set(artifact.read(columns=["id"])["id"].to_pylist())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("survivor", ["longest", "latest"])
def test_updates_equal_the_full_run(tmp_path, seed, survivor):
    rows = corpus(seed)
    config = MinhashDedupConfig(survivor=survivor, keep_index=True, verify=seed < 5)
    store = Store.open(tmp_path)
    whole = execute(minhash_dedup, config, {"documents": documents(store, rows)}, store)
    expected = verdicts([whole])
    assert 5 < len(expected) < 55
    chain = [execute(minhash_dedup, config, {"documents": documents(store, rows[:40])}, store)]
    for some in (rows[40:52], rows[52:]):
        given = {"documents": documents(store, some), "previous": list(chain)}
        chain.append(execute(minhash_update, StageConfig(), given, store, part_rows=5))
    assert verdicts(chain) == expected
    # the artifacts' contents, joined by hand
    present = kept(chain[0])
    for artifact in chain[1:]:
        present |= kept(artifact)
        if "revisions" in artifact.tables:
            for row in artifact.read("revisions").to_pylist():
                (present.add if row["kept_id"] is None else present.discard)(row["id"])
    assert present == kept(whole)


def test_an_earlier_survivor_is_revised(tmp_path):
    store = Store.open(tmp_path)
    base = [f"w{n}" for n in range(200)]
    config = MinhashDedupConfig(keep_index=True)
    first = [("b", START, "web", " ".join(base[:196])), ("c", START, "web", " ".join(base[:190]))]
    chain = [execute(minhash_dedup, config, {"documents": documents(store, first)}, store)]
    assert {i: k for i, (k, _) in verdicts(chain).items()} == {"c": "b"}
    given = {"documents": documents(store, [("a", START, "web", " ".join(base))]), "previous": list(chain)}
    chain.append(execute(minhash_update, StageConfig(), given, store))
    assert kept(chain[1]) == {"a"}
    assert {r["id"]: r["kept_id"] for r in chain[1].read("revisions").to_pylist()} == {"b": "a", "c": "a"}
    assert verdicts(chain)["b"] == ("a", pytest.approx(192 / 196))


def test_a_chain_goes_on_over_no_documents(tmp_path):
    store, rows = Store.open(tmp_path), corpus(2)
    config = MinhashDedupConfig(keep_index=True)
    whole = execute(minhash_dedup, config, {"documents": documents(store, rows)}, store)
    chain = [execute(minhash_dedup, config, {"documents": store.import_table("documents", documents(store, rows).read().slice(0, 0))}, store)]
    for some in (rows[:30], [], rows[30:]):
        new = documents(store, some) if some else store.import_table("documents", documents(store, rows[:1]).read().slice(0, 0))
        chain.append(execute(minhash_update, StageConfig(), {"documents": new, "previous": list(chain)}, store))
    assert verdicts(chain) == verdicts([whole])


def test_part_sizes_do_not_matter(tmp_path):
    rows = corpus(9)
    digests = []
    for part_rows in (3, 1024):
        store = Store.open(tmp_path / str(part_rows))
        base = execute(
            minhash_dedup, MinhashDedupConfig(keep_index=True), {"documents": documents(store, rows[:50])}, store, part_rows=part_rows
        )
        given = {"documents": documents(store, rows[50:]), "previous": [base]}
        made = execute(minhash_update, StageConfig(), given, store, part_rows=part_rows)
        digests.append((base.data_digest, made.data_digest))
    assert digests[0] == digests[1]


def test_what_cannot_be_continued_is_refused(tmp_path):
    store = Store.open(tmp_path)
    rows = corpus(1)
    old, new = documents(store, rows[:20]), documents(store, rows[20:30])
    bare = execute(minhash_dedup, MinhashDedupConfig(), {"documents": old}, store)
    base = execute(minhash_dedup, MinhashDedupConfig(keep_index=True), {"documents": old}, store)
    one = execute(minhash_update, StageConfig(), {"documents": new, "previous": [base]}, store)
    for previous, message in (([bare], "keep_index"), ([one], "must be a minhash_dedup and then its updates"), ([base], "same id")):
        given = {"documents": old if previous == [base] else documents(store, rows[30:]), "previous": previous}
        with pytest.raises(PunaError, match=message):
            execute(minhash_update, StageConfig(), given, store)
