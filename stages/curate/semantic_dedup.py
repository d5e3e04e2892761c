"""`semantic_dedup`: removal of documents with similar TF-IDF or encoder vectors (SemDeDup)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, External, Model, SeededConfig, StageRun, stage
from puna.stages.curate.classifiers.encoder import Place, embed, place_of
from puna.stages.curate.removal import DECIDED, remove
from puna.storage import Part
from puna.storage.exchange import Exchange, Partition, partitions

JOB_ROWS = 1 << 17  # documents per job, fixed because sums of vectors must not depend on settings of the run
TOGETHER = 64  # documents whose cosines with the kept ones are computed together


class SemanticDedupConfig(SeededConfig):
    threshold: float = Field(0.95, gt=0, le=1, description="Minimum cosine similarity between a removed and a kept document")
    dimensions: Literal[128, 256, 512, 1024] = Field(512, description="Number of dimensions that TF-IDF vectors are projected to")
    buckets: Literal[65_536, 1_048_576, 16_777_216] = Field(1_048_576, description="Number of hash buckets for the TF-IDF vocabulary")
    max_tokens: int = Field(512, ge=8, le=32_768, description="Maximum tokens that an encoder reads, from a document's beginning")
    cluster_documents: int = Field(1000, ge=2, description="Average documents per cluster; only documents in one cluster are compared")
    iterations: int = Field(10, ge=1, le=100, description="Number of spherical k-means iterations")
    min_words: int = Field(20, ge=1, description="Minimum length of documents that may be removed, in words")
    survivor: Literal["longest", "latest"] = Field("longest", description="Document to keep among duplicates")


@stage(kind="documents", filters="documents")
def semantic_dedup(documents: Documents, model: Model | None, encoder: External | None, config: SemanticDedupConfig, run: StageRun) -> None:
    """Remove documents whose vector is close to that of a kept document (SemDeDup, Abbas et al. 2023).

    The default vectors are random projections of TF-IDF over normalized words; they match reordered and lightly edited text, not
    paraphrases. With a `model` of this pipeline or the folder of a Hugging Face `encoder`, vectors are mean hidden states minus the corpus
    mean (Mu and Viswanath 2018). Documents are clustered by spherical k-means, and within a cluster visited in the order of `survivor`. A
    document of at least `min_words` words is removed if its cosine with a kept one reaches `threshold`. `duplicates` has the cosines."""
    if not documents.rows():
        return
    parts = list(enumerate(documents.parts(columns=["id", "fetched_at", "text"])))
    common: NDArray[np.float64] | None = None
    if model is None and encoder is None:
        method = f"cosine of TF-IDF vectors projected to {config.dimensions} dimensions"
        counts = run.exchange(_frequency, documents.parts(columns=["text"], rows=JOB_ROWS), config, by="all", partitions=1)
        weights = run.exchange(_weights, counts.parts, documents.rows(), config, by="all", partitions=1).parts[0]
        vectors = run.exchange(_project, parts, weights, config, by="part", partitions=len(parts))
    else:
        method = "cosine of an encoder's mean hidden states"
        place = place_of("semantic_dedup", "encoder", model, encoder)
        vectors = run.exchange(_encode, parts, place, config, by="part", partitions=len(parts))
        if vectors.rows:
            common = sum(run.map(_sum, vectors.nonempty_parts)) / vectors.rows
    centers = _centers(vectors, common, config, run)
    size = partitions(vectors.rows * (8 * config.dimensions if common is None else 8 * len(common)))
    clustered = run.exchange(_cluster, vectors.nonempty_parts, common, centers, size, by="place", partitions=size)
    rule: dict[str, Any] = {"method": method, "rule": "semantic_duplicate", "threshold": config.threshold}
    run.metric("clusters", max(remove(run, documents, _decide, clustered.nonempty_parts, config, **rule), default=0))


def _words(texts: pa.ChunkedArray) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    from puna.kernels.text.normal_words import shingle_hashes
    from puna.kernels.text.shingles import normal
    from puna.kernels.text.strings import buffers

    return shingle_hashes(normal(*buffers(texts)), 1)


def _frequency(part: Part, config: SemanticDedupConfig) -> pa.Table:
    from puna.kernels.text.hashing import document_frequency

    frequency = np.zeros(config.buckets, np.int64)
    for block in part.split():
        frequency += document_frequency(*_words(block.read()["text"]), config.buckets)
    bucket = np.flatnonzero(frequency)
    return pa.table({"all": np.zeros(len(bucket), np.int32), "bucket": bucket, "documents": frequency[bucket]})


def _weights(counts: Partition, documents: int, config: SemanticDedupConfig) -> pa.Table:
    frequency = np.zeros(config.buckets, np.int64)
    for table in counts.tables():
        frequency[table["bucket"].to_numpy()] += table["documents"].to_numpy()
    return pa.table({"all": np.zeros(config.buckets, np.int32), "weight": np.log((1 + documents) / (1 + frequency))})


@lru_cache(maxsize=1)
def _weight(weights: Partition) -> NDArray[np.float64]:
    return weights.read()["weight"].to_numpy()  # type: ignore[no-any-return]


def _project(job: tuple[int, Part], weights: Partition, config: SemanticDedupConfig) -> pa.Table:
    from puna.kernels.text.hashing import project

    table = job[1].read()
    hashes, offsets = _words(table["text"])
    results = project(hashes, offsets, _weight(weights), config.dimensions)
    compared = np.flatnonzero(np.diff(offsets) >= config.min_words)
    return _vectors(job[0], table.take(pa.array(compared)), np.diff(offsets)[compared], results[compared])


def _encode(job: tuple[int, Part], place: Place, config: SemanticDedupConfig) -> pa.Table:
    table = job[1].read()
    counts = np.diff(_words(table["text"])[1])
    compared = np.flatnonzero(counts >= config.min_words)
    table = table.take(pa.array(compared))
    return _vectors(job[0], table, counts[compared], embed(table["text"].to_pylist(), place, config.max_tokens))


def _vectors(number: int, table: pa.Table, words: NDArray[np.int64], vectors: NDArray[np.float32]) -> pa.Table:
    values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel(), pa.float32()), vectors.shape[1])
    part = np.full(len(words), number, np.int32)
    return pa.table({"part": part, "id": table["id"], "words": words, "fetched": table["fetched_at"].cast(pa.int64()), "vector": values})


def _read(table: pa.Table, common: NDArray[np.float64] | None) -> NDArray[np.float32]:
    """Return the documents' vectors [n, D] as stored or, if `common` is given, minus `common` and scaled to unit length."""
    column = table["vector"].combine_chunks()
    vectors = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    if common is None:
        return vectors  # type: ignore[no-any-return]
    rest = vectors - common
    return np.asarray(rest / np.maximum(np.linalg.norm(rest, axis=1, keepdims=True), 1e-12), np.float32)


def _sum(vectors: Partition) -> NDArray[np.float64]:
    return _read(vectors.read(), None).sum(axis=0, dtype=np.float64)  # type: ignore[no-any-return]


def _centers(
    vectors: Exchange, common: NDArray[np.float64] | None, config: SemanticDedupConfig, run: StageRun
) -> NDArray[np.float32] | None:
    """Return the cluster centers [C, D] of spherical k-means, started at random documents; None for a single cluster."""
    count = vectors.rows // config.cluster_documents
    if count <= 1:
        return None
    ends = np.cumsum(list(run.map(_size, vectors.nonempty_parts)))
    draws = np.sort(run.generator("centers").choice(vectors.rows, count, replace=False))
    part = np.searchsorted(ends, draws, side="right")
    begins = np.append(0, ends[:-1])
    jobs = [(vectors.nonempty_parts[n], draws[part == n] - begins[n]) for n in np.unique(part).tolist()]
    centers = np.concatenate(list(run.map(_draw, jobs, common)))
    for step in range(1, config.iterations):
        sums = sum(run.map(_sums, vectors.nonempty_parts, common, centers))
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        centers = np.where(norms > 0, sums / np.maximum(norms, 1e-12), centers).astype(np.float32)
        run.progress(step, config.iterations, "clusters")
    return centers


def _size(vectors: Partition) -> int:
    return sum(table.num_rows for table in vectors.tables())


def _draw(job: tuple[Partition, NDArray[np.int64]], common: NDArray[np.float64] | None) -> NDArray[np.float32]:
    return _read(job[0].read(), common)[job[1]]


def _sums(vectors: Partition, common: NDArray[np.float64] | None, centers: NDArray[np.float32]) -> NDArray[np.float64]:
    own = _read(vectors.read(), common)
    sums = np.zeros(centers.shape, np.float64)
    np.add.at(sums, np.argmax(own @ centers.T, axis=1), own)
    return sums


def _cluster(vectors: Partition, common: NDArray[np.float64] | None, centers: NDArray[np.float32] | None, size: int) -> pa.Table:
    """Return the documents with their `cluster` number and with `place`, the number of the cluster's partition (0 to `size` - 1)."""
    table = vectors.read()
    own = _read(table, common)
    cluster = np.zeros(len(own), np.int64) if centers is None else np.argmax(own @ centers.T, axis=1)
    place = cluster * size // (1 if centers is None else len(centers))
    rows = _vectors(0, table.rename_columns({"fetched": "fetched_at"}), table["words"].to_numpy(), own)
    return rows.append_column("cluster", pa.array(cluster)).append_column("place", pa.array(place.astype(np.int32)))


def _decide(clusters: Partition, config: SemanticDedupConfig) -> tuple[pa.Table, int]:
    """Return the documents to remove from a partition of complete clusters, and the largest cluster number plus one."""
    table = clusters.read()
    vectors = _read(table, None)
    cluster, words, fetched = (table[name].to_numpy() for name in ("cluster", "words", "fetched"))
    first, second = (fetched, words) if config.survivor == "latest" else (words, fetched)
    order = np.lexsort((-second, -first, cluster))  # rows are sorted by id, which breaks ties
    bounds = np.flatnonzero(np.diff(cluster[order], prepend=-1, append=-1))
    ids = table["id"].to_pylist()
    results = []
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        for gone, survivor, cosine in _greedy(vectors, order[low:high], config.threshold):
            # The last digits of a cosine depend on the machine's arithmetic.
            results.append({"id": ids[gone], "kept_id": ids[survivor], "similarity": round(cosine, 6), "detail": f"of {ids[survivor]}"})
    return pa.Table.from_pylist(results, schema=DECIDED), int(cluster.max(initial=-1)) + 1


def _greedy(vectors: NDArray[np.float32], rows: NDArray[np.int64], threshold: float) -> list[tuple[int, int, float]]:
    """Return (removed row, kept row, cosine) for each duplicate in a cluster, whose `rows` are in order of preference."""
    own = vectors[rows].astype(np.float64)  # the first rows become those of the survivors
    survivors: list[int] = []
    pairs = []
    for low in range(0, len(rows), TOGETHER):
        block, count = own[low : low + TOGETHER], len(survivors)
        inside = block @ block.T
        cosines = np.hstack((block @ own[:count].T, np.full_like(inside, -np.inf)))  # a column per survivor
        for place, cosine in enumerate(cosines, low):
            best = int(np.argmax(cosine))
            if cosine[best] >= threshold:
                pairs.append((int(rows[place]), int(rows[survivors[best]]), min(1.0, float(cosine[best]))))
            else:
                cosines[:, len(survivors)] = inside[:, place - low]
                survivors.append(place)
        own[count : len(survivors)] = own[survivors[count:]]
    return pairs
