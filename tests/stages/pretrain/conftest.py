"""Small corpora as artifacts."""

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

WORDS = ["puna", "llama", "grass", "wind", "stone", "river", "high", "cold", "wool", "herd", "path", "night", "star", "snow", "sun"]
WORDS += ["salt", "lake", "bird"]


def sentences(seed: int, count: int) -> str:
    """Return text with something to learn: each word is followed by one of two."""
    draw = random.Random(seed)
    word, found = draw.choice(WORDS), []
    for _ in range(count):
        found.append(word)
        word = WORDS[(3 * WORDS.index(word) + draw.choice([1, 2])) % len(WORDS)]
    return " ".join(found) + "."


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@pytest.fixture
def documents(store: Store) -> Callable[..., Artifact]:
    """Return a function that makes documents with the given texts; ids are their numbers."""

    def make(texts: list[str], into: Store | None = None) -> Artifact:
        n = len(texts)
        return (into or store).import_table("documents", pa.table({
            "id": [f"{i:032x}" for i in range(n)], "url": [f"https://x.org/{i}" for i in range(n)],
            "fetched_at": [datetime(2026, 1, 1, tzinfo=UTC)] * n, "source": ["web"] * n,
            "title": pa.array([None] * n, pa.string()), "text": texts,
        }))  # fmt: skip

    return make


@pytest.fixture
def mixture(store: Store) -> Callable[..., Artifact]:
    """Return a function that makes a mixture from rows (document number, category, split, repeats)."""

    def make(rows: list[tuple[int, str, str, int]], into: Store | None = None) -> Artifact:
        return (into or store).import_table("mixture", pa.table({
            "id": [f"{r[0]:032x}" for r in rows], "category": [r[1] for r in rows], "split": [r[2] for r in rows],
            "repeats": pa.array([r[3] for r in rows], pa.int32()), "weight": [1.0 / len(rows)] * len(rows),
        }))  # fmt: skip

    return make


@pytest.fixture
def small_tokenizer(store: Store, documents: Callable[..., Artifact]) -> Artifact:
    return execute(tokenizer, TokenizerConfig(vocab_size=300), {"documents": documents([sentences(i, 60) for i in range(30)])}, store)
