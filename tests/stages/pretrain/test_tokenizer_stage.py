"""The tokenizer stage: its sample, its independence of order and shards, its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from puna.models.tokens.tokenizer import Tokenizer
from puna.stages.contract import execute
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.storage import PunaError, Store

from .conftest import sentences

TEXTS = [sentences(i, 40 + i) for i in range(40)]


def test_learns_from_training_documents_only(store, documents, mixture) -> None:
    # The held-out documents' word is frequent enough to become one token if it were seen.
    texts = [*TEXTS, *["zyzzyva " * 200] * 4]
    rows = [(i, "web", "train" if i < 40 else "heldout", 1) for i in range(44)]
    with_mixture = execute(tokenizer, TokenizerConfig(vocab_size=310), {"documents": documents(texts), "mixture": mixture(rows)}, store)
    without = execute(tokenizer, TokenizerConfig(vocab_size=310), {"documents": documents(texts)}, store)
    assert len(Tokenizer.load(without.path()).encode(" zyzzyva")) == 1
    assert len(Tokenizer.load(with_mixture.path()).encode(" zyzzyva")) > 3
    assert with_mixture.manifest.metrics["sample_documents"] == 40


def test_sample_stops_at_its_size_and_the_measure_is_right(store, documents) -> None:
    made = execute(tokenizer, TokenizerConfig(vocab_size=300, max_bytes=3000), {"documents": documents(TEXTS)}, store)
    found = made.manifest.metrics
    assert 2000 < found["sample_bytes"] <= 3000 and found["vocab_size"] == 300
    everything = execute(tokenizer, TokenizerConfig(vocab_size=300), {"documents": documents(TEXTS)}, store)
    loaded = Tokenizer.load(everything.path())
    tokens = sum(len(loaded.encode(text)) for text in TEXTS)
    assert everything.manifest.metrics["bytes_per_token"] == pytest.approx(sum(map(len, TEXTS)) / tokens)


def test_same_bytes_for_any_parts(tmp_path: Path, documents) -> None:
    found = set()
    for rows in (3, 1000):
        store = Store.open(tmp_path / f"s{rows}")
        made = execute(
            tokenizer, TokenizerConfig(vocab_size=300, max_bytes=5000), {"documents": documents(TEXTS, store)}, store, part_rows=rows
        )
        found.add((made.path("tokenizer.json").read_bytes(), made.data_digest))
    assert len(found) == 1


def test_refuses_a_vocabulary_that_the_text_cannot_fill(store, documents, mixture) -> None:
    with pytest.raises(PunaError, match="tokens, not 30000"):
        execute(tokenizer, TokenizerConfig(vocab_size=30000), {"documents": documents(TEXTS)}, store)
    with pytest.raises(PunaError, match="no training documents"):
        execute(tokenizer, TokenizerConfig(), {"documents": documents(TEXTS[:1]), "mixture": mixture([(0, "a", "heldout", 1)])}, store)
    with pytest.raises(PunaError, match="names 1 documents that .* does not have"):
        execute(tokenizer, TokenizerConfig(), {"documents": documents(TEXTS[:1]), "mixture": mixture([(7, "a", "train", 1)])}, store)
    with pytest.raises(PunaError, match="lacks 2 documents of documents/.*, for example 0+1; give the documents that the mixture was made from"):
        execute(tokenizer, TokenizerConfig(), {"documents": documents(TEXTS[:3]), "mixture": mixture([(0, "a", "train", 1)])}, store)
