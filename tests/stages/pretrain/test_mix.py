"""The mixture: weights and epochs derived by hand, the split by its properties."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from puna.stages.contract import execute
from puna.stages.pretrain.mix import MixConfig, down_sampled, mix, plan
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.stages.training.vocabulary import tokenizer_of
from puna.storage import Artifact, PunaError, Store


def corpus(store: Store, sizes: dict[str, list[int]], heldout: int = 0) -> dict[str, Artifact]:
    """Return documents of these sizes by category, and a split that holds out the first `heldout` documents of each category."""
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
    # a wants 0.9: 0.9 * 400 / 100 = 3.6 epochs, more than 2; it gets 2 (weight 0.5), and b the rest.
    found = plan({"a": 100, "b": 300}, {"a": 0.9, "b": 0.1}, 2)
    assert found["a"].weight == pytest.approx(0.5) and found["b"].epochs == pytest.approx(2 / 3)
    # A weight of 0 stays 0: the text that a cannot supply is not read at all.
    found = plan({"a": 100, "b": 300}, {"a": 1.0, "b": 0.0}, 2)
    assert found["a"].epochs == pytest.approx(2) and found["b"].epochs == 0
    # No weights: one epoch of everything.
    assert [s.epochs for s in plan({"a": 7, "b": 5, "c": 3}, {}, 4).values()] == pytest.approx([1, 1, 1])
    with pytest.raises(PunaError, match="no training document with text"):
        plan({"a": 0}, {}, 4)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 10**6), st.floats(0.01, 1)), min_size=1),
    st.booleans(),
    st.floats(1, 9),
)
def test_plan_keeps_the_amount_and_the_ceiling(rows: dict[str, tuple[int, float]], weighted: bool, most: float) -> None:
    sizes, whole = {c: size for c, (size, _) in rows.items()}, sum(weight for _, weight in rows.values())
    wanted = {c: weight / whole for c, (_, weight) in rows.items()} if weighted else {}
    found = plan(sizes, wanted, most)
    assert sum(s.weight for s in found.values()) == pytest.approx(1)
    assert all(s.epochs <= most + 1e-9 for s in found.values())
    assert sum(s.epochs * s.size for s in found.values()) == pytest.approx(sum(sizes.values()))
    # Categories below their ceiling keep their weights relative to each other.
    free = [c for c, s in found.items() if s.epochs < most - 1e-6]
    ratios = [found[c].weight / (wanted[c] if wanted else sizes[c]) for c in free]
    assert ratios == pytest.approx([ratios[0]] * len(ratios)) if ratios else True


def test_repeats_follow_from_the_weights(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given_ = corpus(store, {"a": [10] * 1000, "b": [10] * 500, "c": [10] * 5}, heldout=1)
    made = execute(mix, MixConfig(weights={"a": 0.398, "b": 0.6, "c": 0.002}), given_, store)
    rows = made.read().to_pylist()
    # Training text: 999 + 499 + 4 documents; b is read 0.6 * 1502 / 499 = 1.806 times.
    repeats = [r["repeats"] for r in rows if r["category"] == "b" and r["split"] == "train"]
    assert sum(repeats) == pytest.approx(0.6 * 1502, abs=1) and set(repeats) == {1, 2}


def test_a_part_of_an_epoch_is_exact_in_documents_and_near_in_bytes(tmp_path: Path) -> None:
    """Ten seeds: each document is read once or twice, and within its category as often as the others, whatever its length."""
    store, sizes = Store.open(tmp_path), [2 ** (i % 12) for i in range(200)]
    given_ = corpus(store, {"a": sizes, "b": sizes[:50]}, heldout=2)
    drawn = np.zeros(198)
    for seed in range(10):
        made = execute(mix, MixConfig(weights={"a": 0.7, "b": 0.3}, seed=seed), given_, store)
        weights = plan({"a": sum(sizes[2:]), "b": sum(sizes[2:50])}, {"a": 0.7, "b": 0.3}, 4)
        for category, own in (("a", sizes), ("b", sizes[:50])):
            rows = [row for row in made.read().to_pylist() if row["category"] == category and row["split"] == "train"]
            read = np.array([row["repeats"] for row in rows])
            epochs = weights[category].epochs
            assert abs(read.sum() - epochs * len(own[2:])) < 1 and set(read.tolist()) <= {int(epochs), int(epochs) + 1}
            # The longest documents have 2,048 bytes; in order of length, at most one more or fewer of each length is read.
            assert abs((read * own[2:]).sum() - epochs * sum(own[2:])) < sum(2**i for i in range(12))
            if category == "a":
                drawn += read - int(epochs)
    part = plan({"a": sum(sizes[2:]), "b": sum(sizes[2:50])}, {"a": 0.7, "b": 0.3}, 4)["a"].epochs % 1
    for length in range(12):  # some 160 draws of each length
        assert drawn[[i for i in range(198) if sizes[2 + i] == 2**length]].mean() / 10 == pytest.approx(part, abs=0.07)


def test_shares_are_of_tokens_with_a_tokenizer_else_of_bytes(tmp_path: Path) -> None:
    """Half of each: of two categories with equal bytes but unlike bytes per token, training then reads equal numbers of tokens."""
    store = Store.open(tmp_path)
    given_ = corpus(store, {"code": [600] * 300, "words": [600] * 300, "empty": [0] * 3}, heldout=1)
    table = given_["documents"].read()
    draw = np.random.default_rng(0)
    texts = {"c": lambda: " ".join(["harbour"] * 75), "w": lambda: "".join(map(chr, draw.integers(33, 127, 600))), "e": str}
    table = table.set_column(table.column_names.index("text"), "text", pa.array([texts[id_[0]]() for id_ in table["id"].to_pylist()]))
    documents = store.import_table("documents", table)
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=300), {"documents": documents}, store)
    own, config = {**given_, "documents": documents}, MixConfig(weights={"code": 0.5, "words": 0.5, "empty": 0.0}, max_repeats=100)
    for inputs, unit, equal in (({}, "bytes", False), ({"tokenizer": vocabulary}, "tokens", True)):
        made = execute(mix, config, {**own, **inputs}, store)
        rows = execute(tokenize, TokenizeConfig(), {"documents": documents, "mixture": made, "tokenizer": vocabulary}, store)
        read = dict(rows.manifest.figures["tokens"]["series"]["tokens"])
        assert made.manifest.metrics["share_unit"] == unit
        assert (abs(read["code"] / (read["code"] + read["words"]) - 0.5) < 0.01) is equal
        assert read["words"] + read["code"] == pytest.approx(sum(read.values())) and ("bytes_per_token_code" in made.manifest.metrics) is equal
    assert execute(mix, MixConfig(max_share=1), {**own, "tokenizer": vocabulary}, store).manifest.metrics["epochs_words"] == 1


def test_tokens_are_estimated_from_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the documents, cut at 40 characters, gives the bytes per token of all to 5 %, for any parts."""
    monkeypatch.setattr("puna.stages.training.corpus.SAMPLE", 400)
    monkeypatch.setattr("puna.stages.training.corpus.BEGINNING", 40)
    found = set()
    for part_rows in (7, 10**6):
        store = Store.open(tmp_path / str(part_rows))
        given_ = corpus(store, {"a": [30 + 7 * (i % 13) for i in range(2000)]})
        texts = given_["documents"].read()["text"].to_pylist()
        own = {**given_, "tokenizer": execute(tokenizer, TokenizerConfig(vocab_size=264), {"documents": given_["documents"]}, store)}
        exact = sum(map(len, texts)) / sum(len(ids) + 2 for ids in tokenizer_of(own["tokenizer"]).encode_batch(texts))
        found.add(execute(mix, MixConfig(), own, store, part_rows=part_rows).manifest.metrics["bytes_per_token_a"])
    (estimate,) = found
    assert estimate == pytest.approx(exact, rel=0.05) and estimate != round(exact, 4)


def test_the_split_and_the_categories_are_those_that_came_in(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given_ = corpus(store, {"a": [10] * 50, "b": [30] * 50}, heldout=7)
    came = given_["split"].read(columns=["id", "category", "split"])
    for weights in ({}, {"a": 0.9, "b": 0.1}):
        made = execute(mix, MixConfig(weights=weights), given_, store)
        assert made.read(columns=["id", "category", "split"]).equals(came)
        assert {r["repeats"] for r in made.read().to_pylist() if r["split"] == "heldout"} == {1}
    other = corpus(store, {"a": [10] * 51})
    with pytest.raises(PunaError, match="give the documents that the mixture was made from"):
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
    # A category that the experiment left out of its mixture, and the corpus no longer has, changes nothing.
    gone = store.import_table("evaluation", table, weights=pa.table({"category": ["a", "b", "gone"], "weight": [0.7, 0.3, 0.0]}))
    assert execute(mix, MixConfig(), {**given_, "weights": gone}, store).manifest.metrics["epochs_a"] == pytest.approx(1.4)
    with pytest.raises(PunaError, match="no table `weights`"):
        execute(mix, MixConfig(), {**given_, "weights": store.import_table("evaluation", table)}, store)
    made = execute(mix, MixConfig(weights={"a": 0.6, "b": 0.4}), {**given_, "weights": experiment}, store)
    assert made.manifest.metrics["epochs_a"] == pytest.approx(1.2)


@pytest.mark.parametrize("weights", [{"a": 0.5, "b": 0.4}, {"a": 0.7, "b": 0.4}, {"a": 0.999998}])
def test_weights_that_do_not_add_up_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="the weights add up to .*, not to 1: give every category its share"):
        MixConfig(weights=weights)
    assert MixConfig(weights={"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}).weights and not MixConfig().weights


def test_weights_name_every_category_and_no_other(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given_ = corpus(store, {"a": [10] * 6, "b": [10] * 6, "c": [0] * 6})
    for weights, message in (
        ({"x": 0.5, "a": 0.3, "y": 0.2}, "mix.weights: no document is of 'x', 'y'; there is no weight for 'b'; .* are a, b$"),
        ({"a": 1.0}, "mix.weights: there is no weight for 'b'"),
        ({"a": 0.5, "b": 0.4, "c": 0.1}, "mix.weights: there is no training text of 'c'"),
    ):
        with pytest.raises(PunaError, match=message):
            execute(mix, MixConfig(weights=weights), given_, store)
    execute(mix, MixConfig(weights={"a": 0.5, "b": 0.5, "c": 0.0}), given_, store)
    rows = {"task": ["x"], "metric": ["m"], "value": [0.0], "low": [0.0], "high": [0.0], "n": [1]}
    for names, shares, message in ((["d", "e"], [0.5, 0.5], "no document is of 'd', 'e'"), (["a", "b"], [0.5, 0.3], "add up to 0.8, not to 1")):
        experiment = store.import_table("evaluation", pa.table(rows), weights=pa.table({"category": names, "weight": shares}))
        with pytest.raises(PunaError, match=f"{experiment.id}: .*{message}"):
            execute(mix, MixConfig(), {**given_, "weights": experiment}, store)


def test_an_older_mixture_serves_a_corpus_with_further_categories(tmp_path: Path) -> None:
    """The known categories' weights .56 and .24 keep their ratio of 7 to 3, without the category that is gone; the new one gets its share
    of the text."""
    store = Store.open(tmp_path)
    given_ = corpus(store, {"a": [10] * 60, "b": [10] * 60, "c": [10] * 30})
    rows = {"task": ["x"], "metric": ["m"], "value": [0.0], "low": [0.0], "high": [0.0], "n": [1]}
    older = store.import_table("evaluation", pa.table(rows), weights=pa.table({"category": ["a", "b", "gone"], "weight": [0.56, 0.24, 0.2]}))
    made = execute(mix, MixConfig(), {**given_, "weights": older}, store)
    metrics = made.manifest.metrics
    assert 0.1 < metrics["weight_c"] == metrics["share_c"] < 0.3
    assert [metrics["weight_a"], metrics["weight_b"]] == pytest.approx([0.7 * (1 - metrics["share_c"]), 0.3 * (1 - metrics["share_c"])], abs=2e-6)
    (figure,) = made.manifest.figures.values()
    assert f"{older.id} does not weigh c: their share is that of the text" in str(figure)


def test_natural_shares_are_capped(tmp_path: Path) -> None:
    # 0.8 of the text is a's: cut to 0.5; the excess goes to b and c in the ratio 3 : 1.
    found = plan({"a": 800, "b": 150, "c": 50}, {}, 100, 0.5)
    assert [s.weight for s in found.values()] == pytest.approx([0.5, 0.375, 0.125])
    # Two categories cannot both stay below 0.4 of the total.
    assert [s.weight for s in plan({"a": 900, "b": 100}, {}, 100, 0.4).values()] == pytest.approx([0.5, 0.5])
    # The ceilings of repeats and of the share apply together: b gives all it can, and a what is left of its half.
    found = plan({"a": 900, "b": 100}, {}, 2, 0.5)
    assert found["b"].epochs == pytest.approx(2) and found["a"].epochs == pytest.approx(5 / 9)
    store = Store.open(tmp_path)
    made = execute(mix, MixConfig(), corpus(store, {"a": [10] * 90, "b": [10] * 30}), store)
    assert set(made.read()["weight"].to_pylist()) == {0.5}


def test_what_the_web_has_too_much_of_is_read_less(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given_ = corpus(store, {"arts_entertainment": [10] * 400, "science": [10] * 300, "sports": [10] * 300})
    made = execute(mix, MixConfig(), given_, store)
    # 0.4 halved is 0.2 of 0.8: a quarter of the training text, 0.625 epochs; the others gain equally, 0.3 / 0.8 each.
    metrics = made.manifest.metrics
    assert metrics["weight_arts_entertainment"] == pytest.approx(0.25) and metrics["share_arts_entertainment"] == pytest.approx(0.4)
    assert metrics["epochs_arts_entertainment"] == pytest.approx(0.625)
    assert metrics["weight_science"] == metrics["weight_sports"] == pytest.approx(0.375)
    assert metrics["down_sample_arts_entertainment"] == 0.5 and "down_sample_science" not in metrics
    assert [r["weight"] for r in made.read().to_pylist()[:400]] == pytest.approx([0.25] * 400)
    assert made.manifest.figures["mixture"]["note"] == "arts_entertainment keeps 0.5 of its weight (down_sample)"
    # Given weights are final; without factors no category is capped.
    final = execute(mix, MixConfig(weights={"arts_entertainment": 0.5, "science": 0.5, "sports": 0.0}), given_, store)
    assert final.manifest.metrics["weight_arts_entertainment"] == pytest.approx(0.5)
    plain = execute(mix, MixConfig(down_sample={}), given_, store)
    assert plain.manifest.metrics["epochs_arts_entertainment"] == pytest.approx(1)
    with pytest.raises(PunaError, match="mix.down_sample: no document is of 'sport'; the categories are arts_entertainment, science, sports"):
        execute(mix, MixConfig(down_sample={"sport": 0.5}), given_, store)
    with pytest.raises(PunaError, match="leaves nothing"):
        execute(mix, MixConfig(down_sample={"arts_entertainment": 0, "science": 0, "sports": 0}), given_, store)
    with pytest.raises(ValidationError, match="must lie in 0..1"):
        MixConfig(down_sample={"sports": 1.5})


def test_bounds_that_hold_a_category_are_told(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    made = execute(mix, MixConfig(down_sample={}), corpus(store, {"a": [10] * 80, "b": [10] * 15, "c": [10] * 5}), store)
    assert made.manifest.figures["mixture"]["note"] == "a is held at 0.5 of the training text (max_share)"
    made = execute(mix, MixConfig(weights={"a": 0.5, "b": 0.1, "c": 0.4}), corpus(store, {"a": [10] * 80, "b": [10] * 15, "c": [10] * 5}), store)
    assert made.manifest.figures["mixture"]["note"] == "c is read 4 times, the maximum (max_repeats)"


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 1), min_size=2), st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 1)))
def test_down_sampling_keeps_the_ratios_of_the_others(weights: dict[str, float], factors: dict[str, float]) -> None:
    found = down_sampled(weights, factors)
    assert sum(found.values()) == pytest.approx(1)
    ratios = [found[c] / (weights[c] * factors.get(c, 1)) for c in weights]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
