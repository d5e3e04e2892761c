"""Knowledge types: the lexicon by hand, the classifier on themes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from puna.stages.contract import StageConfig, execute
from puna.stages.curate.classifiers.fold_models import load_classifier
from puna.stages.curate.domains import (
    TrainDomainsConfig,
    domains,
    lexicon,
    looked_at,
    seed_counts,
    seed_label,
    seed_words,
    train_domains,
)
from puna.storage import PunaError, Store

SMALL = {"buckets": 10_000, "dimension": 8, "min_labels": 5}


def trained_and_applied(store, documents, **settings):
    """Return a classifier of knowledge types, and the types of the documents that it learned from."""
    made = execute(train_domains, TrainDomainsConfig(**SMALL, **settings), {"documents": documents}, store)
    return made, execute(domains, StageConfig(), {"documents": documents, "classifier": made}, store)


def count(text):
    # Texts are counted separately, and only as far as they are read.
    twice, once, none = seed_counts(pa.array([f"{text} {text}", text, f"{' ' * len(text)}{text}"]), len(text)).tolist()
    assert twice == once == looked_at(text).tolist() and not any(none)
    return {name: n for name, n in zip(lexicon().types, once, strict=True) if n}


def test_seed_words_of_several_languages():
    assert count("The striker scored two goals; the GOALS came late.") == {"sports": 3}
    assert count("Le gardien de but a arrêté le ballon pendant le match.") == {"sports": 4}
    assert count("El paciente tiene una enfermedad del corazón.") == {"health": 3}
    # "capital" is listed for business and for geography, so it counts for neither.
    assert count("capital") == {}
    assert lexicon().words.size == len(seed_words()[1]) > 100


def test_a_label_needs_words_and_a_margin():
    types = lexicon().types
    counts = np.zeros(len(types), np.int64)
    counts[types.index("health")], counts[types.index("sports")] = 4, 2
    assert seed_label(counts, 4, 0.5) == "health"
    assert seed_label(counts, 5, 0.5) is None
    assert seed_label(counts, 4, 0.49) is None


def test_lexicon_is_well_formed():
    found = lexicon()
    assert len(found.types) == 11
    assert np.count_nonzero(found.words.keys) == found.words.size == len(found.type_of)
    assert np.bincount(found.type_of).min() > 150


def test_themes_are_found(tmp_path, make_documents, themed):
    store = Store.open(tmp_path)
    rows = themed(240)
    docs = make_documents(store, rows)
    classifier, made = trained_and_applied(store, docs)
    for (identity, source, _), found in zip(sorted(rows), made.read().to_pylist(), strict=True):
        assert found["id"] == identity
        assert found["domain"] == ("code" if source == "code" else identity[4:])
        assert (found["domain_seed"] is None) == (source == "code")
    assert classifier.manifest.metrics["agreement"] > 0.95


def test_a_document_without_seed_words_is_typed_by_its_company(tmp_path, make_documents, themed):
    store = Store.open(tmp_path)
    rows = [
        (i, "web", f"{t} {'zamboni' if i.endswith('sports') else 'quark' if i.endswith('science') else 'ward'} " * 2)
        for i, _, t in themed(120)
        if "=" not in t
    ]
    rows.append(("zz", "web", "zamboni " * 30))
    _, made = trained_and_applied(store, make_documents(store, rows), learning_rate=0.3)
    last = made.read().to_pylist()[-1]
    assert last["id"] == "zz"
    assert last["domain"] == "sports"
    assert last["domain_seed"] is None


def test_too_few_labels(tmp_path, make_documents):
    store = Store.open(tmp_path)
    docs = make_documents(store, [(f"{n}", "web", "nothing to see in these lines of words") for n in range(9)])
    with pytest.raises(PunaError, match="the seed words label 0 documents of no type"):
        trained_and_applied(store, docs)
    code = make_documents(store, [(f"{n}", "code", "x = 1") for n in range(3)])
    classifier, made = trained_and_applied(store, code)
    assert made.read()["domain"].to_pylist() == ["code"] * 3
    with pytest.raises(PunaError, match="has no types, because it was trained without documents"):
        execute(domains, StageConfig(), {"documents": docs, "classifier": classifier}, store)


def test_the_types_are_the_product_of_classifier_and_seed_words(tmp_path, make_documents, themed):
    store = Store.open(tmp_path)
    rows = [(f"{n}-{i}", "web", f"{a} {b}") for n, seed in enumerate((1, 2)) for (i, _, a), (_, _, b) in zip(themed(90, seed), themed(90, 3), strict=True)]
    docs = make_documents(store, rows)
    classifier, made = trained_and_applied(store, docs, epochs=5)
    model = load_classifier(classifier, "domains")
    found = {row["id"]: row for row in made.read().to_pylist()}
    for identity, _, text in rows:
        (alone,) = model.probabilities([identity], pa.array([text]))
        counts = np.array([count(text[:1500]).get(name, 0) for name in model.classes])
        joint = alone * (1 + counts) ** 2
        assert found[identity]["domain"] == model.classes[int(joint.argmax())]
        assert found[identity]["domain_score"] == pytest.approx(joint.max() / joint.sum(), abs=1e-6)
