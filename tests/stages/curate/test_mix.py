"""The mixture: weights and epochs by derivation, the split by properties."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.stages.contract import execute
from puna.stages.curate.cluster_weights import FINEWEB_2, cluster_sizes, weights_of
from puna.stages.curate.mix import MixConfig, mix, plan
from puna.storage import Artifact, PunaError, Store


def corpus(store: Store, sizes: dict[str, list[int]]) -> dict[str, Artifact]:
    rows = [(f"{c}{i:04d}", c, n) for c, all_sizes in sizes.items() for i, n in enumerate(all_sizes)]
    documents = store.import_table("documents", pa.table({
        "id": [r[0] for r in rows], "url": ["u"] * len(rows), "fetched_at": [datetime(2024, 1, 1, tzinfo=UTC)] * len(rows),
        "source": ["web"] * len(rows), "title": pa.array([None] * len(rows), pa.string()), "text": ["x" * r[2] for r in rows],
    }))  # fmt: skip
    signals = store.import_table("signals", pa.table({"id": [r[0] for r in rows], "domain": [r[1] for r in rows]}))
    return {"documents": documents, "signals": signals}


def test_plan_by_hand() -> None:
    # 100 and 300 bytes; half each: 200/100 = 2 epochs and 200/300.
    found = plan({"a": 100, "b": 300}, {"a": 0.5, "b": 0.5}, 4)
    assert found["a"].epochs == pytest.approx(2) and found["b"].epochs == pytest.approx(2 / 3)
    # a wants 0.9: 0.9 * 400 / 100 = 3.6 epochs, more than 2; it gets 2 (weight 0.5), b the rest.
    found = plan({"a": 100, "b": 300}, {"a": 0.9}, 2)
    assert found["a"].weight == pytest.approx(0.5) and found["b"].epochs == pytest.approx(2 / 3)
    # No weights: one epoch of everything.
    assert [s.epochs for s in plan({"a": 7, "b": 5, "c": 3}, {}, 4).values()] == pytest.approx([1, 1, 1])
    with pytest.raises(PunaError, match="nothing to mix"):
        plan({"a": 5}, {"a": 0.0}, 4)


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 10**6), min_size=1),
    st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 0.2)),
    st.floats(1, 9),
)
def test_plan_keeps_the_amount_and_the_ceiling(sizes: dict[str, int], wanted: dict[str, float], most: float) -> None:
    found = plan(sizes, wanted, most)
    assert sum(s.weight for s in found.values()) == pytest.approx(1)
    assert all(s.epochs <= most + 1e-9 for s in found.values())
    assert sum(s.epochs * s.bytes for s in found.values()) == pytest.approx(sum(sizes.values()))


def test_split_and_repeats(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given_ = corpus(store, {"a": [10] * 1000, "b": [10] * 500, "c": [10] * 5})
    made = execute(mix, MixConfig(weights={"b": 0.6}, heldout_fraction=0.1), given_, store)
    rows = made.read().to_pylist()
    assert Counter(r["category"] for r in rows if r["split"] == "heldout") == {"a": 100, "b": 50, "c": 1}
    # Training text: 900 + 450 + 4 documents; b is read 0.6 * 1354 / 450 = 1.805 times.
    mean = sum(r["repeats"] for r in rows if r["category"] == "b" and r["split"] == "train") / 450
    assert mean == pytest.approx(1.805, abs=0.08)
    assert {r["repeats"] for r in rows if r["category"] == "b" and r["split"] == "train"} == {1, 2}


def test_the_split_of_a_document_does_not_depend_on_the_weights(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given_ = corpus(store, {"a": [10] * 50, "b": [30] * 50})
    splits = [execute(mix, MixConfig(weights=w), given_, store).read()["split"].to_pylist() for w in ({}, {"a": 0.9})]
    assert splits[0] == splits[1]


def test_weights_come_from_the_experiment_unless_set(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given_ = corpus(store, {"a": [10] * 60, "b": [10] * 60})
    table = pa.table(
        {
            "task": ["x"],
            "metric": ["m"],
            "value": [0.0],
            "low": pa.array([None], pa.float64()),
            "high": pa.array([None], pa.float64()),
            "n": [1],
        }
    )
    experiment = store.import_table("evaluation", table, weights=pa.table({"category": ["a", "b"], "weight": [0.7, 0.3]}))
    made = execute(mix, MixConfig(), {**given_, "weights": experiment}, store)
    assert made.manifest.metrics["epochs_a"] == pytest.approx(1.4)
    with pytest.raises(PunaError, match="no table `weights`"):
        execute(mix, MixConfig(), {**given_, "weights": store.import_table("evaluation", table)}, store)
    with pytest.raises(PunaError, match=r"mix\.weights\.c: no document has this category; they have a, b"):
        execute(mix, MixConfig(weights={"c": 0.5}), given_, store)
    with pytest.raises(PunaError, match="no signal 'topic'"):
        execute(mix, MixConfig(category="topic"), given_, store)


def test_natural_shares_are_capped(tmp_path: Path) -> None:
    # 0.8 of the text is a's: cut to 0.5, the excess goes to b and c, who are 3 : 1.
    found = plan({"a": 800, "b": 150, "c": 50}, {}, 100, 0.5)
    assert [s.weight for s in found.values()] == pytest.approx([0.5, 0.375, 0.125])
    # Two categories cannot both stay below 0.4 of the whole.
    assert [s.weight for s in plan({"a": 900, "b": 100}, {}, 100, 0.4).values()] == pytest.approx([0.5, 0.5])
    # The ceilings of repeats and of the share bind together: b gives all it can, a what is left of its half.
    found = plan({"a": 900, "b": 100}, {}, 2, 0.5)
    assert found["b"].epochs == pytest.approx(2) and found["a"].epochs == pytest.approx(5 / 9)
    store = Store.open(tmp_path)
    made = execute(mix, MixConfig(), corpus(store, {"a": [10] * 90, "b": [10] * 30}), store)
    assert set(made.read()["weight"].to_pylist()) == {0.5}


def test_weights_of_clusters_are_those_of_fineweb_2() -> None:
    sizes = [1, 2, 3, 4, 5, 99, 100, 999, 1000, 50_000]
    assert weights_of(np.array(sizes), FINEWEB_2).tolist() == [1, 2, 3, 3, 5, 5, 8, 8, 1, 1]
    assert weights_of(np.array([1, 2, 3]), {3: 2.5}).tolist() == [1, 1, 2.5]


def test_documents_that_stand_for_several_are_read_more_often(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given_ = corpus(store, {"a": [10] * 400, "b": [10] * 100})
    documents = given_["documents"].read()
    # The first 200 of a stand for two; one of b stands for four by way of a chain over two artifacts.
    pairs = [(f"gone{n}", f"a{n:04d}") for n in range(200)]
    chains = [[("x1", "x2"), ("x3", "x2"), *pairs], [("x2", "b0000")]]
    removed = [
        store.import_table("documents", documents.slice(n), duplicates=pa.table({
            "id": [a for a, _ in chain], "kept_id": [b for _, b in chain], "method": ["m"] * len(chain),
            "similarity": [1.0] * len(chain), "cluster": [b for _, b in chain],
        }))
        for n, chain in enumerate(chains)
    ]  # fmt: skip
    ids = documents["id"].to_pylist()
    assert dict(zip(ids, cluster_sizes(ids, removed).tolist(), strict=True))["b0000"] == 4
    config = MixConfig(weights={"a": 0.8, "b": 0.2}, heldout_fraction=0, heldout_least=0)
    plain = {r["id"]: r["repeats"] for r in execute(mix, config, given_, store).read().to_pylist()}
    made = execute(mix, config, {**given_, "deduplicated": removed}, store)
    repeats = {r["id"]: r["repeats"] for r in made.read().to_pylist()}
    assert set(plain.values()) == {1}
    # In a: 200 documents of weight 2 and 200 of weight 1, mean 1.5: 4/3 and 2/3 epochs.
    double, single = ([repeats[f"a{n:04d}"] for n in some] for some in (range(200), range(200, 400)))
    assert sum(double) / 200 == pytest.approx(4 / 3, abs=0.1) and sum(single) / 200 == pytest.approx(2 / 3, abs=0.1)
    # In b: one of weight 3 among 99 of weight 1, mean 1.02.
    assert repeats["b0000"] in (2, 3) and sum(v for i, v in repeats.items() if i[0] == "b") == pytest.approx(100, abs=6)
    with pytest.raises(PunaError, match="no table `duplicates`"):
        execute(mix, config, {**given_, "deduplicated": [given_["documents"]]}, store)
