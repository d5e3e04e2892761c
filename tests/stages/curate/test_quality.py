"""The quality classifier: metrics by brute force, out-of-fold scores, and one model for one input."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.stages.contract import execute
from puna.stages.curate.classifiers.classifier import GOLDEN, _Job, _quota, _training_lines, auc, calibration, score_counts, write_table
from puna.stages.curate.classifiers.fold_models import load_classifier
from puna.stages.curate.quality import QualityConfig, quality, ranks_within
from puna.stages.curate.train_classifier import TrainClassifierConfig, train_classifier
from puna.stages.draws import folds, uniform
from puna.storage import PunaError, Store

SMALL = TrainClassifierConfig(dimension=8, buckets=10_000, epochs=20, learning_rate=0.5)


def trained_and_applied(store, documents, language=None, **how):
    """Return a classifier of good sources, and its signals on the documents that it learned from."""
    made = execute(train_classifier, SMALL, {"documents": documents}, store, **how)
    inputs = {"documents": documents, "classifier": made} | ({"language": language} if language else {})
    return made, execute(quality, QualityConfig(), inputs, store, **how)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30).filter(lambda x: len({p for _, p in x}) == 2))
def test_auc_is_the_share_of_pairs_in_order(pairs):
    scores, positive = np.array([s / 5 for s, _ in pairs]), np.array([p for _, p in pairs])
    wins = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert auc(score_counts(scores, positive)) == pytest.approx(np.mean(wins))


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("ab")), max_size=20))
def test_ranks_by_definition(rows):
    values, groups = np.array([v for v, _ in rows], float), np.array([g for _, g in rows], dtype="U1")
    for rank, (value, group) in zip(ranks_within(values, groups), rows, strict=True):
        peers = [v for v, g in rows if g == group]
        assert rank == sum(v < value for v in peers) / len(peers)
    sizes = np.array([sum(g == group for _, g in rows) for group in groups], int)
    assert np.isnan(ranks_within(values, groups, 4)).tolist() == (sizes < 4).tolist()


def test_calibration_by_hand():
    points = calibration(score_counts(np.array([0.05, 0.07, 0.95, 1.0]), np.array([False, True, True, True])))
    assert points == [(pytest.approx(0.06), 0.5), (pytest.approx(0.975), 1.0)]


def test_draws_belong_to_ids():
    ids = [f"{n:x}" for n in range(4000)]
    draw = uniform(ids, 0, "a")
    assert draw[17] == uniform([ids[17]], 0, "a")[0]
    assert abs(draw.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(draw, uniform(ids, 0, "b"))[0, 1]) < 0.05
    counts = np.bincount(folds(ids, 0, 4))
    assert counts.min() > 900


def test_large_classes_are_cut_and_small_ones_repeated():
    # The median class has 30: at most 60 of a class are used, at least 15, and no document more than ten times.
    config = TrainClassifierConfig(class_ratio=2)
    assert _quota({"a": 90, "b": 30, "c": 2}, config) == {"a": (60, 1), "b": (30, 1), "c": (2, 8)}
    assert _quota({"a": 90, "b": 30, "c": 1}, config)["c"] == (1, 10)
    assert _quota({"a": 90, "b": 30}, config.model_copy(update={"max_class_documents": 20})) == {"a": (20, 1), "b": (20, 1)}


@pytest.mark.parametrize("seed", range(3))
def test_what_is_trained_on_is_drawn_by_ids_from_all_files(tmp_path, seed):
    generator = np.random.default_rng(seed)
    rows = [(f"{n:03}", int(generator.integers(2)), float(generator.random()), f"line {n}", "ab"[n % 2]) for n in range(60)]
    files = []
    for at in range(0, 60, 7):
        columns = zip(("id", "fold", "draw", "line", "class"), zip(*rows[at : at + 7], strict=True), strict=True)
        write_table(pa.table({name: list(values) for name, values in columns}), tmp_path / f"{at}.arrow")
        files.append(str(tmp_path / f"{at}.arrow"))
    job = _Job(1, "class", ("a", "b"), {"a": (5, 1), "b": (3, 2)}, "", "", "")
    lines, classes = _training_lines(job, files)
    expected = []
    for name, (count, copies) in job.quota.items():
        for draw, line in sorted((row[2], row[3]) for row in rows if row[4] == name and row[1] != 1)[:count]:
            expected += [((draw + copy * GOLDEN) % 1, (line, "ab".index(name))) for copy in range(copies)]
    assert list(zip(lines.to_pylist(), classes.tolist(), strict=True)) == [line for _, line in sorted(expected)]


def test_scores_tell_the_sources_apart(tmp_path, make_documents, themed):
    store = Store.open(tmp_path)
    docs = make_documents(store, themed(240))
    classifier, made = trained_and_applied(store, docs)
    rows = {r["id"]: r for r in made.read().to_pylist()}
    sources = {r["id"]: r["source"] for r in docs.read().to_pylist()}
    assert classifier.manifest.metrics["auc"] > 0.99
    assert all((rows[i]["quality"] is None) == (s == "code") for i, s in sources.items())
    good = [rows[i]["quality"] for i, s in sources.items() if s == "wikipedia"]
    assert min(good) > max(rows[i]["quality"] for i, s in sources.items() if s == "web")
    # A text on which no model was trained, in every fold.
    ids = [f"new {n}" for n in range(20)]
    found = load_classifier(classifier, "quality")
    assert {found.classes[at] for at in found.probabilities(ids, pa.array(["click here buy now ! ! !"] * 20)).argmax(axis=1)} == {"other"}


def test_scores_are_out_of_fold(tmp_path, make_documents):
    # Noise: every document has a unique word, so a model that was trained on it would know its source.
    store = Store.open(tmp_path)
    generator = np.random.default_rng(0)
    rows = [
        (f"{n:04d}", str(generator.choice(["wikipedia", "web"])), " ".join(["own" + "abcdefghij"[n % 10] * (n + 3)] * 20))
        for n in range(200)
    ]
    classifier, made = trained_and_applied(store, make_documents(store, rows))
    assert 0.3 < classifier.manifest.metrics["auc"] < 0.7
    scores, positive = np.array(made.read()["quality"].to_pylist()), np.array([source == "wikipedia" for _, source, _ in rows])
    assert auc(score_counts(scores, positive)) == classifier.manifest.metrics["auc"]


def test_one_input_one_result(tmp_path, make_documents, themed):
    digests, models = set(), set()
    for name in ("a", "b", "c"):
        store = Store.open(tmp_path / name)
        junk = [np.full(1 << 18, np.nan, np.float32) for _ in range(8)]  # freed memory that a later allocation may reuse
        del junk
        classifier, made = trained_and_applied(store, make_documents(store, themed(120)), part_rows=7 if name == "b" else 1024)
        digests.add(made.data_digest)
        models.add((classifier.data_digest, *(classifier.path(f"fold-{fold}.bin").read_bytes() for fold in range(SMALL.folds))))
    assert len(digests) == 1
    assert len(models) == 1


def test_ranks_are_within_the_language(tmp_path, make_documents, themed):
    store = Store.open(tmp_path)
    docs = make_documents(store, themed(120))
    ids = docs.read()["id"].to_pylist()
    table = pa.table({"id": ids, "language": ["en" if n % 2 else "fr" for n in range(len(ids))]})
    _, made = trained_and_applied(store, docs, store.import_table("signals", table))
    scored = [r for r, n in zip(made.read().to_pylist(), range(len(ids)), strict=True) if r["quality"] is not None and n % 2]
    for r in scored:
        assert r["quality_rank"] == pytest.approx(sum(p["quality"] < r["quality"] for p in scored) / len(scored))


def test_without_examples_it_says_so(tmp_path, make_documents, themed):
    store = Store.open(tmp_path)
    few = make_documents(store, themed(3))
    with pytest.raises(PunaError, match="needs two classes with labelled documents in every fold; there are good: 1, other: 2"):
        execute(train_classifier, SMALL, {"documents": few}, store)
