"""Small corpora for the tests of curation, as fixtures that return functions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from puna.storage import Artifact, Identity, Store

WHEN = datetime(2024, 1, 1, tzinfo=UTC)
THEMES = {
    "sports": "the team won a match and the league title after goals by players of the club in the stadium this season coach",
    "science": "the electron and the atom form a molecule and energy of the particle follows quantum theory of physics species",
    "health": "the patient has a disease and doctors of the hospital gave treatment with vaccine against infection symptoms",
}


def _documents(store: Store, rows: Iterable[tuple[str, str, str]]) -> Artifact:
    """Return a documents artifact with rows (id, source, text)."""
    made = [{"id": i, "url": f"https://x.org/{i}", "fetched_at": WHEN, "source": s, "title": None, "text": t} for i, s, t in rows]
    schema = pa.schema(
        [("id", pa.string()), ("url", pa.string()), ("fetched_at", pa.timestamp("us", tz="UTC")), ("source", pa.string()),
         ("title", pa.string()), ("text", pa.string())]
    )  # fmt: skip
    return store.import_table("documents", pa.Table.from_pylist(made, schema=schema))


def _themed(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Return documents of shuffled words from one theme each; "wikipedia" has full stops, "web" is in capitals, "code" is code."""
    generator = np.random.default_rng(seed)
    rows = []
    for n in range(count):
        name = sorted(THEMES)[n % 3]
        words = generator.permutation(THEMES[name].split()).tolist() * 4
        source = ("wikipedia", "web", "web", "code")[n % 4]
        text = {"wikipedia": " ".join(words) + ".", "web": "click here buy now !!! " + " ".join(words).upper(), "code": "x = [1]\n" * 12}[
            source
        ]
        rows.append((f"{n:04d}{name}", source, text))
    return rows


def _small_model(store: Store, texts: list[str]) -> Artifact:
    """Return a small untrained model as an artifact."""

    from puna.models.config import ModelConfig
    from puna.models.formats.checkpoint import save
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

    tokenizer = Tokenizer.train(texts, 400)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    model = Transformer(config)
    model.initialize(0)
    with store.work("e" * 64) as work:
        save(model, work.output, tokenizer)
        return work.commit("model", "e" * 64, Identity(stage="import"))


@pytest.fixture
def make_documents():
    """Return `make_documents(store, rows)`, which makes a documents artifact with rows (id, source, text)."""
    return _documents


@pytest.fixture(scope="session")
def themed():
    """Return `themed(count)`, which makes rows of documents with three themes and three sources."""
    return _themed


@pytest.fixture(scope="session")
def small_model():
    """Return `small_model(store, texts)`, which makes an untrained model, with a tokenizer trained on the texts, as an artifact."""
    return _small_model
