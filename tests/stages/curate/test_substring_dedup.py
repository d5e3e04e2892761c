"""Repeated passages, compared with brute force over word tuples."""

from __future__ import annotations

from itertools import accumulate
from string import ascii_letters

import numpy as np
import pyarrow as pa
import pytest

from puna.stages.contract import execute
from puna.stages.curate.substring_dedup import SubstringDedupConfig, _cut, substring_dedup
from puna.storage import Store
from tests.linear import stopped_if_quadratic


def corpus(seed, count=30):
    generator = np.random.default_rng(seed)
    passages = [[f"p{n}x{k}é" for k in range(generator.integers(3, 14))] for n in range(6)]
    rows = []
    for number in range(count):
        words = []
        for _ in range(generator.integers(0, 5)):
            words += passages[generator.integers(6)] if generator.random() < 0.6 else [f"u{generator.integers(10**9)}"] * 3
        rows.append((f"{number:03d}", "code" if number % 11 == 0 else "web", (" ", "\n", " \t ")[number % 3].join(words)))
    return rows


def brute_force(rows, k):
    """Return the remaining words of each document, and the number of removed words."""
    seen, out = set(), {}
    for identity, source, text in rows:
        words = text.split()
        gone = [False] * len(words)
        if source != "code":
            for i in range(len(words) - k + 1):
                window = tuple(words[i : i + k])
                if window in seen:
                    gone[i : i + k] = [True] * k
                seen.add(window)
        out[identity] = [word for word, cut in zip(words, gone, strict=True) if not cut], sum(gone)
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [3, 6])
def test_equals_brute_force(tmp_path, make_documents, seed, k):
    rows = corpus(seed)
    expected = brute_force(rows, k)
    digests = set()
    for part_rows in (1024, 4):
        store = Store.open(tmp_path / str(part_rows))
        config = SubstringDedupConfig(words=k, min_words=2)
        made = execute(substring_dedup, config, {"documents": make_documents(store, rows)}, store, part_rows=part_rows)
        digests.add(tuple(record.digest for _, record in sorted(made.manifest.tables.items())))
    assert len(digests) == 1
    kept = {row["id"]: row["text"].split() for row in made.read().to_pylist()}
    dropped = {row["id"]: row["value"] for row in made.read("dropped").to_pylist()}
    for identity, (words, removed) in expected.items():
        if removed and len(words) < 2:
            assert dropped.pop(identity) == len(words)
        else:
            assert kept[identity] == words
    assert not dropped
    texts = {identity: text for identity, _, text in rows}
    spans = made.read("removed_spans").to_pylist()
    assert sum(len(row["text"].split()) for row in spans) == sum(removed for _, removed in expected.values()) > 0
    for row in spans:
        assert texts[row["id"]][row["start"] : row["start"] + len(row["text"])] == row["text"]
        beginning = row["text"].split()[:k]
        holder = texts[row["kept_id"]].split()
        assert any(holder[i : i + k] == beginning for i in range(len(holder)))


def test_nothing_repeated_leaves_documents_as_they_are(tmp_path, make_documents):
    store = Store.open(tmp_path)
    rows = [("a", "web", "  One  two\nthree "), ("b", "web", ""), ("c", "web", "four five")]
    made = execute(substring_dedup, SubstringDedupConfig(words=2), {"documents": make_documents(store, rows)}, store)
    assert [r["text"] for r in made.read().to_pylist()] == [t for _, _, t in rows]
    assert made.rows("removed_spans") == made.rows("dropped") == 0


def test_a_passage_without_spaces_is_found_word_by_word(tmp_path, make_documents):
    passage = "สิทธิมนุษยชนและเสรีภาพขั้นพื้นฐานของคนทุกคนในประเทศนี้"
    texts = [f"เมื่อวานนี้{passage}", passage, "川にかかる古い橋を修理する予定です。"]
    rows = [(str(number), "web", text) for number, text in enumerate(texts)]
    config = SubstringDedupConfig(words=5, min_words=0)
    made = execute(substring_dedup, config, {"documents": make_documents(Store.open(tmp_path), rows)}, Store.open(tmp_path))
    assert [row["text"] for row in made.read("removed_spans").to_pylist()] == [passage]
    assert [row["text"] for row in made.read().to_pylist()] == [texts[0], texts[2]]


def test_the_text_before_each_of_many_passages_is_counted_once():
    passage = " ".join(f"é{letter}" for letter in ascii_letters[:50])
    pieces = [f"{passage} ü{number} " for number in range(20_000)]
    documents = pa.table({"id": ["a"], "source": ["web"], "text": ["".join(pieces)]})
    window = np.arange(51, 51 * len(pieces), 51, np.int32)
    repeated = pa.table({"row": np.zeros(len(window), np.int64), "window": window, "kept_id": ["a"] * len(window)})
    with stopped_if_quadratic():  # decoding the text before each passage took half a minute
        made = _cut(documents, repeated, SubstringDedupConfig())
    assert made["removed_spans"]["start"].to_pylist() == list(accumulate(map(len, pieces)))[:-1]
    assert made["documents"]["text"][0].as_py().split() == [*pieces[0].split(), *(f"ü{number}" for number in range(1, len(pieces)))]
