"""The mixture: weights and epochs by derivation, the split by properties."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.stages.contract import execute
from puna.stages.curate.mix import MixConfig, mix, plan
from puna.storage import Artifact, PunaError, Store


def corpus(store: Store, sizes: dict[str, list[int]], heldout: int = 0) -> dict[str, Artifact]:
    """Documents of these sizes by category, and a split in which the first `heldout` of each category are held out."""
    rows = [(f"{c}{i:04d}", c, n, "heldout" if i < heldout else "train") for c, own in sizes.items() for i, n in enumerate(own)]
    count = len(rows)
    documents = store.import_table("documents", pa.table({
        "id": [r[0] for r in rows], "url": [f"https://x.org/{r[0]}" for r in rows], "fetched_at": [datetime(2024, 1, 1, tzinfo=UTC)] * count,
        "source": ["web"] * count, "title": pa.array([None] * count, pa.string()), "text": ["x" * r[2] for r in rows],
    }))  # fmt: skip
    split = store.import_table("mixture", pa.table({
        "id": [r[0] for r in rows], "category": [r[1] for r in rows], "split": [r[3] for r in rows],
        "repeats": np.ones(count, np.int32), "weight": [0.0] * count,
    }))  # fmt: skip
    return {"documents": documents, "split": split}


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


def test_repeats_follow_from_the_weights(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given_ = corpus(store, {"a": [10] * 1000, "b": [10] * 500, "c": [10] * 5}, heldout=1)
    made = execute(mix, MixConfig(weights={"b": 0.6}), given_, store)
    rows = made.read().to_pylist()
    # Training text: 999 + 499 + 4 documents; b is read 0.6 * 1502 / 499 = 1.806 times.
    repeats = [r["repeats"] for r in rows if r["category"] == "b" and r["split"] == "train"]
    assert sum(repeats) / 499 == pytest.approx(1.806, abs=0.08) and set(repeats) == {1, 2}


def test_the_split_and_the_categories_are_those_that_came_in(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given_ = corpus(store, {"a": [10] * 50, "b": [30] * 50}, heldout=7)
    came = given_["split"].read(columns=["id", "category", "split"])
    for weights in ({}, {"a": 0.9}):
        made = execute(mix, MixConfig(weights=weights), given_, store)
        assert made.read(columns=["id", "category", "split"]).equals(came)
        assert {r["repeats"] for r in made.read().to_pylist() if r["split"] == "heldout"} == {1}
    other = corpus(store, {"a": [10] * 51})
    with pytest.raises(PunaError, match="give the documents that the mixture was made of"):
        execute(mix, MixConfig(), {**given_, "documents": other["documents"]}, store)


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
