"""`semantic_dedup`: documents that say the same, by the words they use or by an encoder's vectors (SemDeDup)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, External, Model, SeededConfig, StageRun, stage
from puna.stages.curate.learned.encoder import embedded
from puna.stages.curate.learned.place import Place, place_of
from puna.stages.curate.rows.removal import without, write_removed
from puna.storage import Artifact, Part
from puna.storage.work import write_array

BLOCK = 4096


class SemanticDedupConfig(SeededConfig):
    """How documents become vectors, and from which similarity on one of two goes."""

    threshold: float = Field(0.95, gt=0, le=1, description="Cosine from which on a document is a duplicate of a kept one")
    dimensions: Literal[128, 256, 512, 1024] = Field(512, description="Dimensions of the projected TF-IDF vectors")
    buckets: Literal[65_536, 1_048_576, 16_777_216] = Field(1_048_576, description="Hash buckets of the vocabulary of TF-IDF")
    max_tokens: int = Field(512, ge=8, le=32_768, description="Tokens of each document that an encoder reads, from its beginning")
    cluster_documents: int = Field(1000, ge=2, description="Documents per cluster on average; only those of one cluster are compared")
    iterations: int = Field(10, ge=1, le=100, description="Steps of spherical k-means")
    min_words: int = Field(20, ge=1, description="Shorter documents are kept, words")
    survivor: Literal["longest", "latest"] = Field("longest", description="Which of several duplicates is kept")


class Vectors(NamedTuple):
    """What one part was reduced to: unit vectors [D, dimensions] in a file, words and time of fetching of each document."""

    file: str
    words: NDArray[np.int64]
    fetched: NDArray[np.int64]


@stage(kind="documents", filters="documents")
def semantic_dedup(
    documents: Documents, model: Model | None, encoder: External | None, config: SemanticDedupConfig, run: StageRun
) -> None:
    """Remove documents whose vectors are nearly those of a kept one (Abbas et al. 2023, SemDeDup, with another choice of the kept).

    Without an encoder vectors are TF-IDF over normal words, projected at random: they see through reordered and lightly edited
    text, not through paraphrase in other words. With one, a model of this pipeline as `model` or the folder of any Hugging Face
    encoder as `encoder`, they are its mean hidden states less their mean over all documents, which all have in common
    (Mu and Viswanath 2018). Documents are clustered by spherical k-means; inside a cluster they are taken in order of
    preference, and one goes when a kept one is similar enough. `duplicates` holds the pair and its cosine.
    """
    parts = run.parts(documents, columns=["fetched_at", "text"])
    projected = model is None and encoder is None
    if projected:
        method = f"cosine of TF-IDF vectors projected to {config.dimensions} dimensions"
        made = _projected(documents, parts, config, run)
    else:
        method = "cosine of an encoder's mean hidden states"
        place = place_of("semantic_dedup", "encoder", model, encoder)
        made = list(run.map(_encoded, list(enumerate(parts)), place, config, str(run.scratch), rows=len(parts)))
    if not made:
        return
    vectors = np.concatenate([np.load(v.file, mmap_mode="r") for v in made])
    words, fetched = np.concatenate([v.words for v in made]), np.concatenate([v.fetched for v in made])
    compared = np.flatnonzero(words >= config.min_words)
    if not projected:
        vectors[compared] = _centred(vectors[compared])
    clusters = _clusters(vectors[compared], config, run)
    first, second = (fetched, words) if config.survivor == "latest" else (words, fetched)
    order = np.lexsort((compared, -second[compared], -first[compared], clusters))
    bounds = np.flatnonzero(np.diff(clusters[order], prepend=-1, append=-1))
    found_pairs = [
        pair
        for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        for pair in _greedy(vectors, compared[order[a:b]], config.threshold)
    ]
    removed = _write(run, documents, found_pairs, method, config.threshold)
    run.transform(without, documents, write_removed(run.scratch, removed))
    run.metric("removed", len(removed))
    run.metric("clusters", int(clusters.max() + 1) if len(clusters) else 0)


def _projected(documents: Artifact, parts: list[Part], config: SemanticDedupConfig, run: StageRun) -> list[Vectors]:
    """Projected TF-IDF vectors of all documents."""
    frequency = np.zeros(config.buckets, np.int64)
    for found in run.map(_frequency, parts, config, rows=len(parts)):
        frequency += found
    weights = np.log((1 + documents.rows()) / (1 + frequency))
    np.save(Path(run.scratch) / "weights.npy", weights)
    return list(run.map(_vectors, list(enumerate(parts)), config, str(run.scratch), rows=len(parts)))


def _words(texts: pa.ChunkedArray) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of the normal words of all texts, and the documents' offsets in them."""
    from puna.stages.curate.text.normal_words import normal_words, shingle_hashes
    from puna.stages.curate.text.shingles import bytes_of, table

    return shingle_hashes(normal_words(*bytes_of(texts), table()), 1)


def _frequency(part: Part, config: SemanticDedupConfig) -> NDArray[np.int64]:
    from puna.stages.curate.text.projection import document_frequency

    return document_frequency(*_words(part.read().column("text")), config.buckets)


def _vectors(job: tuple[int, Part], config: SemanticDedupConfig, scratch: str) -> Vectors:
    from puna.stages.curate.text.projection import project

    number, part = job
    table = part.read()
    hashes, offsets = _words(table.column("text"))
    file = Path(scratch) / f"vectors-{number:06d}.npy"
    np.save(file, project(hashes, offsets, np.load(Path(scratch) / "weights.npy", mmap_mode="r"), config.dimensions))
    return Vectors(str(file), np.diff(offsets), np.asarray(table.column("fetched_at").cast(pa.int64())))


def _encoded(job: tuple[int, Part], place: Place, config: SemanticDedupConfig, scratch: str) -> Vectors:
    """In a worker: mean hidden states of the documents that are compared, zeros of the others; made once, should the run end early."""
    number, part = job
    table = part.read()
    counts = np.diff(_words(table.column("text"))[1])
    file = Path(scratch) / f"encoded-{number:06d}-{part.start}-{part.stop}.npy"
    if not file.exists():
        compared = np.flatnonzero(counts >= config.min_words)
        found = embedded(table.column("text").take(pa.array(compared)).to_pylist(), place, config.max_tokens)
        vectors = np.zeros((len(counts), found.shape[1]), np.float32)
        vectors[compared] = found
        write_array(file, vectors)
    return Vectors(str(file), counts, np.asarray(table.column("fetched_at").cast(pa.int64())))


def _centred(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Unit vectors [n, D] without what all have in common."""
    rest = vectors - vectors.mean(axis=0, dtype=np.float64)
    return np.asarray(rest / np.maximum(np.linalg.norm(rest, axis=1, keepdims=True), 1e-12), np.float32)


def _clusters(vectors: NDArray[np.float32], config: SemanticDedupConfig, run: StageRun) -> NDArray[np.int64]:
    """The cluster of each document, int64[D], by spherical k-means from documents drawn at random."""
    count = max(1, len(vectors) // config.cluster_documents)
    if count == 1:
        return np.zeros(len(vectors), np.int64)
    centers = vectors[np.sort(run.generator("centers").choice(len(vectors), count, replace=False))].astype(np.float32)
    nearest = np.zeros(len(vectors), np.int64)
    for step in range(config.iterations):
        for at in range(0, len(vectors), BLOCK):
            nearest[at : at + BLOCK] = np.argmax(vectors[at : at + BLOCK] @ centers.T, axis=1)
        sums = np.zeros(centers.shape, np.float64)
        np.add.at(sums, nearest, vectors)
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        centers = np.where(norms > 0, sums / np.maximum(norms, 1e-12), centers).astype(np.float32)
        run.progress(step + 1, config.iterations, "clusters")
    return nearest


def _greedy(vectors: NDArray[np.float32], rows: NDArray[np.int64], threshold: float) -> list[tuple[int, int, float]]:
    """Removed row, kept row and cosine, for the documents of a cluster in order of preference."""
    own = vectors[rows].astype(np.float64)
    kept: list[int] = []
    pairs = []
    for place in range(len(rows)):
        if kept:
            cosine = own[kept] @ own[place]
            best = int(np.argmax(cosine))
            if cosine[best] >= threshold:
                pairs.append((int(rows[place]), int(rows[kept[best]]), min(1.0, float(cosine[best]))))
                continue
        kept.append(place)
    return pairs


def _write(run: StageRun, documents: Artifact, pairs: list[tuple[int, int, float]], method: str, threshold: float) -> list[str]:
    """Write the evidence; returns the ids of the removed documents."""
    ids = documents.read(columns=["id"]).column("id")
    gone, kept = (ids.take(pa.array([pair[k] for pair in pairs], pa.int64())).to_pylist() for k in (0, 1))
    duplicates: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    for identity, survivor, (_, _, cosine) in zip(gone, kept, pairs, strict=True):
        value = round(cosine, 6)  # the last digits depend on the machine's arithmetic
        duplicates.append({"id": identity, "kept_id": survivor, "cluster": survivor, "method": method, "similarity": value})
        detail = f"of {survivor}"
        dropped.append({"id": identity, "rule": "semantic_duplicate", "value": value, "threshold": threshold, "detail": detail})
    run.write_rows(duplicates, "duplicates")
    run.write_rows(dropped, "dropped")
    return gone  # type: ignore[no-any-return]
