"""Small corpora for the tests of curation, as fixtures that give functions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from puna.storage import Artifact, Store

WHEN = datetime(2024, 1, 1, tzinfo=UTC)
THEMES = {
    "sports": "the team won a match and the league title after goals by players of the club in the stadium this season coach",
    "science": "the electron and the atom form a molecule and energy of the particle follows quantum theory of physics species",
    "health": "the patient has a disease and doctors of the hospital gave treatment with vaccine against infection symptoms",
}


def _documents(store: Store, rows: Iterable[tuple[str, str, str]]) -> Artifact:
    """A documents artifact of rows (id, source, text)."""
    made = [{"id": i, "url": f"https://x.org/{i}", "fetched_at": WHEN, "source": s, "title": None, "text": t} for i, s, t in rows]
    schema = pa.schema(
        [("id", pa.string()), ("url", pa.string()), ("fetched_at", pa.timestamp("us", tz="UTC")), ("source", pa.string()),
         ("title", pa.string()), ("text", pa.string())]
    )  # fmt: skip
    return store.import_table("documents", pa.Table.from_pylist(made, schema=schema))


def _themed(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Documents of shuffled words of one theme each; "wikipedia" has full stops, "web" shouts, "code" is code."""
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


@pytest.fixture
def make_documents():
    """`make_documents(store, rows)`: a documents artifact of rows (id, source, text)."""
    return _documents


@pytest.fixture(scope="session")
def themed():
    """`themed(count)`: rows of documents of three themes and three sources."""
    return _themed
