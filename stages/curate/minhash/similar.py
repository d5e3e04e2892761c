"""Documents that resemble a text: candidates of an index where the documents have one, else all of them; always compared exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.stages.curate.minhash.config import MinhashDedupConfig
from puna.stages.curate.minhash.index import Index, configuration, indexed
from puna.stages.curate.minhash.sketch import Shingles, shingled, signed
from puna.storage import Artifact, PunaError

BLOCK_ROWS = 1024


class Resemblance(NamedTuple):
    """A document beside a text, by their sets of shingles: `similarity` shared by those of either (Jaccard), `of_text` by those of
    the text, `of_document` by those of the document."""

    id: str
    similarity: float
    of_text: float
    of_document: float


def resembling(text: str, documents: Artifact, least: float = 0.1) -> list[Resemblance]:
    """Return the documents of which `similarity` or one of the shares is at least `least`, the most similar first.

    With an index (`minhash_dedup.keep_index`) only documents that share a band are looked at: those of little similarity may be
    missed, as when deduplicating. PunaError: the text has no words.
    """
    at_hand = indexed(documents)
    config = configuration(documents) if at_hand else MinhashDedupConfig()
    own = shingled(pa.chunked_array([pa.array([text], pa.large_string())]), config)
    if not len(own.hashes):
        raise PunaError("near: the text has no words to compare")
    wanted = np.unique(own.hashes)
    results = _by_index(own, documents, config) if at_hand else _by_reading(documents, config)
    rows = [_beside(wanted, identity, hashes) for identity, hashes in results]
    rows = [row for row in rows if max(row.similarity, row.of_text, row.of_document) >= least]
    return sorted(rows, key=lambda row: (-row.similarity, -row.of_text, row.id))


def _beside(wanted: NDArray[np.uint64], identity: str, hashes: NDArray[np.uint64]) -> Resemblance:
    theirs = np.unique(hashes)
    both = len(np.intersect1d(wanted, theirs, assume_unique=True))
    return Resemblance(identity, both / (len(wanted) + len(theirs) - both), both / len(wanted), both / max(1, len(theirs)))


def _by_index(own: Shingles, documents: Artifact, config: MinhashDedupConfig) -> Iterator[tuple[str, NDArray[np.uint64]]]:
    index = Index.of(documents)
    rows = index.sharing(signed(own, config)[1])
    shingles = index.shingles(rows, config)
    for place, identity in enumerate(index.ids()[rows]):
        yield identity.decode(), shingles.hashes[shingles.offsets[place] : shingles.offsets[place + 1]]


def _by_reading(documents: Artifact, config: MinhashDedupConfig) -> Iterator[tuple[str, NDArray[np.uint64]]]:
    for batch in documents.batches(columns=["id", "text"], rows=BLOCK_ROWS):
        table = pa.Table.from_batches([batch])
        results = shingled(table["text"], config)
        for place, identity in enumerate(table["id"].to_pylist()):
            yield identity, results.hashes[results.offsets[place] : results.offsets[place + 1]]


def described(rows: list[Resemblance], documents: Artifact) -> list[dict[str, Any]]:
    """Return the same with `kept`, and address and title where that is so: an index knows removed documents too."""
    matches = []
    for row in rows:
        here = documents.between(row.id, row.id, columns=["url", "title"]).to_pylist()
        matches.append({**row._asdict(), "kept": bool(here), **(here[0] if here else {"url": None, "title": None})})
    return matches
