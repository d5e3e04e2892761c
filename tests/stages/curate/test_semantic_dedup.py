"""Semantic duplicates: vectors compared with exact TF-IDF, greedy choice, reproducibility."""

from __future__ import annotations

import math
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import torch

from puna.kernels.text.hashing import document_frequency, project, slice_hashes
from puna.stages.contract import External, execute
from puna.stages.curate.semantic_dedup import TOGETHER, SemanticDedupConfig, _greedy, semantic_dedup
from puna.storage import PunaError, Store


def hashed(texts):
    words = [w.encode() for t in texts for w in t.split()]
    offsets = np.cumsum([0, *map(len, words)]).astype(np.int64)
    counts = np.cumsum([0, *(len(t.split()) for t in texts)]).astype(np.int64)
    return slice_hashes(np.frombuffer(b"".join(words), np.uint8), offsets), counts


def texts(seed, count=40):
    generator = np.random.default_rng(seed)
    bases = [[f"w{n}" for n in generator.integers(0, 3000, 80)] for _ in range(count // 2)]
    found = []
    for base in bases:
        other = generator.permutation(base).tolist()
        other[:2] = ["replaced", "words"]
        found += [" ".join(base), " ".join(other)]
    return found


def test_cosines_estimate_those_of_exact_tf_idf():
    documents = texts(0)
    hashes, offsets = hashed(documents)
    buckets = 1 << 20
    frequency = document_frequency(hashes, offsets, buckets)
    exact_frequency = Counter(w for t in documents for w in set(t.split()))
    assert sorted(frequency[frequency > 0].tolist()) == sorted(exact_frequency.values())  # here no two words share a bucket
    vectors = project(hashes, offsets, np.log((1 + len(documents)) / (1 + frequency)), 1024)
    exact = []
    for text in documents:
        count = Counter(text.split())
        exact.append({w: (1 + math.log(n)) * math.log((1 + len(documents)) / (1 + exact_frequency[w])) for w, n in count.items()})
    for i in range(12):
        for j in range(i):
            dot = sum(v * exact[j].get(w, 0) for w, v in exact[i].items())
            cosine = dot / math.sqrt(sum(v * v for v in exact[i].values()) * sum(v * v for v in exact[j].values()))
            assert abs(float(vectors[i] @ vectors[j]) - cosine) < 5 * (1 - cosine**2) / 32 + 1e-6  # five standard errors


def test_the_greedy_choice_is_that_of_one_document_after_another():
    generator = np.random.default_rng(3)
    vectors = generator.normal(size=(60, 16))[generator.integers(0, 60, 300)] + 0.1 * generator.normal(size=(300, 16))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    order, kept, expected = generator.permutation(300), [], []
    for row in order.tolist():
        cosines = [float(vectors[other].astype(float) @ vectors[row].astype(float)) for other in kept]
        if max(cosines, default=0) >= 0.95:
            expected.append((row, kept[int(np.argmax(cosines))]))
        else:
            kept.append(row)
    assert [pair[:2] for pair in _greedy(vectors, order, 0.95)] == expected and TOGETHER < len(expected) < 300


def test_reordered_texts_go_and_others_stay(tmp_path, make_documents):
    documents = texts(1)
    store = Store.open(tmp_path)
    rows = [(f"{n:03d}", "web", text) for n, text in enumerate(documents)]
    made = execute(
        semantic_dedup, SemanticDedupConfig(threshold=0.9), {"documents": make_documents(store, [*rows, ("x", "web", "short")])}, store
    )
    pairs = {(int(r["id"]), int(r["kept_id"])) for r in made.read("duplicates").to_pylist()}
    assert pairs == {(n + 1, n) for n in range(0, len(documents), 2)}
    assert "x" in made.read()["id"].to_pylist()


@pytest.mark.parametrize("case", ["small parts", "two processes", "other order"])
def test_same_result(tmp_path, make_documents, case):
    rows = [(f"{n:03d}", "web", text) for n, text in enumerate(texts(2, 60))]
    config = SemanticDedupConfig(threshold=0.9, cluster_documents=12)
    one, two = Store.open(tmp_path / "one"), Store.open(tmp_path / "two")
    expected = execute(semantic_dedup, config, {"documents": make_documents(one, rows)}, one)
    assert expected.rows("dropped") > 5
    given = {"documents": make_documents(two, rows[::-1] if case == "other order" else rows)}
    if case == "two processes":
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
            made = execute(semantic_dedup, config, given, two, executor=executor, part_rows=7)
    else:
        made = execute(semantic_dedup, config, given, two, part_rows=4 if case == "small parts" else 1024)
    for name in ("documents", "dropped", "duplicates"):
        assert made.read(name).equals(expected.read(name))
    assert isinstance(made.read(), pa.Table)


def test_vectors_of_an_encoder(tmp_path, make_documents, small_model):
    """Compared with centred mean hidden states and a greedy choice implemented here."""
    from puna.models.forest import Forest
    from puna.models.formats.checkpoint import load
    from puna.models.tokens.tokenizer import Tokenizer

    base = texts(3, 60)
    # Every fifth text begins like the previous one, and continues with its own words beyond the part that is read.
    found = [base[n - 1][:90] + " " + base[n][90:] if n % 5 == 4 else text for n, text in enumerate(base)]
    store = Store.open(tmp_path)
    model = small_model(store, found)
    rows = [(f"{n:03d}", "web", text) for n, text in enumerate(found)]
    config = SemanticDedupConfig(threshold=0.9, max_tokens=24, cluster_documents=1000)
    made = execute(semantic_dedup, config, {"documents": make_documents(store, [*rows, ("x", "web", "too short")]), "model": model}, store)
    network, tokenizer = load(model.path(), "lm").eval(), Tokenizer.load(model.path())
    with torch.no_grad():
        vectors = np.array([network.hidden(Forest.pack([torch.tensor(tokenizer.document(t)[:24])])).mean(0).numpy() for t in found], float)
    vectors -= vectors.mean(0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs, kept = set(), []
    for n in sorted(range(60), key=lambda n: (-len(found[n].split()), f"{n:03d}")):
        nearest = max(kept, key=lambda k: vectors[k] @ vectors[n], default=None)
        if nearest is not None and vectors[nearest] @ vectors[n] >= 0.9:
            pairs.add((n, nearest))
        else:
            kept.append(n)
    assert {(int(r["id"]), int(r["kept_id"])) for r in made.read("duplicates").to_pylist()} == pairs
    assert len(pairs) >= 10 and "x" in made.read()["id"].to_pylist()
    plain = execute(semantic_dedup, SemanticDedupConfig(threshold=0.9), {"documents": make_documents(store, rows)}, store)
    assert plain.rows("duplicates") != len(pairs)


def test_two_encoders_are_refused(tmp_path, make_documents, small_model):
    store = Store.open(tmp_path)
    given = {"documents": make_documents(store, [("a", "web", "some text")]), "model": small_model(store, ["some text"] * 200)}
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    with pytest.raises(PunaError, match="semantic_dedup: give exactly one encoder"):
        execute(semantic_dedup, SemanticDedupConfig(), {**given, "encoder": External.resolve(f"bert={tmp_path / 'bert'}")[0]}, store)
