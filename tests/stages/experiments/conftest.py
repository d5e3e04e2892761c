"""Corpora whose categories share no words, as artifacts."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from puna.stages.contract import execute
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.storage import Artifact, Store

WORDS = {
    "high": ["puna", "llama", "grass", "wind", "stone", "river", "cold", "wool"],
    "low": ["coast", "wave", "fish", "net", "salt", "boat", "sand", "warm"],
    "code": ["def", "return", "import", "class", "self", "None", "True", "while"],
}


def text(category: str, seed: int, count: int) -> str:
    """Return words of one category, each followed by one of two."""
    draw, words = random.Random(f"{category}{seed}"), WORDS[category]
    word, found = draw.choice(words), []
    for _ in range(count):
        found.append(word)
        word = words[(3 * words.index(word) + draw.choice([1, 2])) % len(words)]
    return " ".join(found) + "."


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@pytest.fixture
def corpus(store: Store) -> Callable[..., dict[str, Artifact]]:
    """Return a function that makes documents, their split (nothing held out) and a tokenizer from (category, words) rows."""

    def make(rows: list[tuple[str, int]], into: Store | None = None) -> dict[str, Artifact]:
        n, home = len(rows), into or store
        ids = [f"{i:032x}" for i in range(n)]
        documents = home.import_table("documents", pa.table({
            "id": ids, "url": [f"https://x.org/{i}" for i in range(n)], "fetched_at": [datetime(2026, 1, 1, tzinfo=UTC)] * n,
            "source": ["web"] * n, "title": pa.array([None] * n, pa.string()),
            "text": [text(category, i, words) for i, (category, words) in enumerate(rows)],
        }))  # fmt: skip
        split = home.import_table("mixture", pa.table({
            "id": ids, "category": [category for category, _ in rows], "split": ["train"] * n,
            "repeats": pa.array([1] * n, pa.int32()), "weight": [1.0] * n,
        }))  # fmt: skip
        vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=290), {"documents": documents}, home)
        return {"documents": documents, "split": split, "tokenizer": vocabulary}

    return make
