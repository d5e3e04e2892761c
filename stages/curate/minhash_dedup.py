"""`minhash_dedup`: removal of near-duplicate documents, found by MinHash and verified by their shared shingles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.stages.contract import Documents, Signals, StageRun, stage
from puna.stages.curate.minhash.config import MinhashDedupConfig
from puna.stages.curate.minhash.decide import Candidates, Found, at_once, candidates
from puna.stages.curate.minhash.index import INDEX, write_index
from puna.stages.curate.minhash.sketch import shingle, sign, sketch
from puna.stages.curate.removal import DECIDED, remove
from puna.storage import Artifact, Part, PunaError
from puna.storage.exchange import Exchange, Partition, partitions

COLUMNS = ("id", "fetched_at", "source", "text")
SHARD_ROWS = 1 << 17  # maximum documents per job; a job writes one file per exchange
AT_ONCE = 1 << 25  # maximum characters of a corpus that one worker compares in memory (150 MB); this saves a fifth of the time
KEY_BYTES = 16
SHINGLE_BYTES = 2  # approximate bytes of shingles per character of text


@stage(kind="documents", filters="documents")
def minhash_dedup(documents: Documents, signals: Signals | None, config: MinhashDedupConfig, run: StageRun) -> None:
    """Remove near-duplicates (Broder 1997; Llama 3, section 3.1.1).

    Candidates agree in at least one of `bands` bands of their MinHash signatures. They are decided in order of preference: preferred
    sources first, then the longest, latest or best; length, time and id break ties. A document is removed if it shares enough shingles with
    an earlier, kept document and has no long passage that the kept one lacks. Without `verify`, one document of each component of
    candidates is kept. `duplicates` has the evidence. A small corpus is compared in memory. For a larger one, band keys are partitioned by
    value, and candidates by component; one worker holds all edges between candidates in memory, 16 bytes each."""
    if config.survivor == "best_score":
        check_score(signals, config)
    threshold = config.threshold if config.verify else None
    common: dict[str, Any] = {"method": config.method, "rule": "near_duplicate", "threshold": threshold}
    score = signals if config.survivor == "best_score" else None
    parts = documents.parts(columns=["text"], rows=SHARD_ROWS)
    if parts and documents.record().characters <= AT_ONCE:
        infos = remove(run, documents, _whole, [[part.of(COLUMNS) for part in parts]], score, config, **common)
        results = infos[0]["candidates"]
    else:
        members = _members(run, documents, parts, config)
        components = _gather(run, documents, parts, members, score, config)
        infos, results = remove(run, documents, _decide, components.nonempty_parts, config, **common), members.rows
    if config.keep_index:
        sketches = list(run.map(sketch, list(enumerate(run.parts(documents))), signals, config, str(run.scratch)))
        list(run.map(write_index, [run.folder / INDEX], sketches, config))
    run.metric("candidates", results)
    run.metric("clusters", sum(info["clusters"] for info in infos))
    run.metric("kept_for_a_passage", sum(info["saved"] for info in infos))


def _members(run: StageRun, documents: Artifact, parts: list[Part], config: MinhashDedupConfig) -> Exchange:
    size = KEY_BYTES * config.bands * documents.rows()
    keys = run.exchange(_keys, parts, config, by="key", partitions=partitions(size))
    edges = run.exchange(_edges, keys.nonempty_parts, by="all", partitions=1)
    starts = np.array([part.start for part in parts], np.int64)
    return run.exchange(_components, edges.nonempty_parts, starts, by="part", partitions=max(1, len(parts)))


def check_score(signals: Artifact | None, config: MinhashDedupConfig) -> None:
    """Raise PunaError if `signals` lack the signal `score`, which ranks near-duplicates."""
    if signals is None:
        raise PunaError("minhash_dedup.survivor is best_score: give signals that contain the score")
    if config.score not in signals.columns():
        names = ", ".join(name for name in signals.columns() if name != "id")
        raise PunaError(f"minhash_dedup.score: {signals.id} has no signal {config.score!r}; it has {names}")


def _keys(part: Part, config: MinhashDedupConfig) -> Iterator[pa.Table]:
    for block in part.split():
        results = shingle(block.read()["text"], config)
        _, keys = sign(results, config)
        filled = np.flatnonzero(np.diff(results.offsets))  # a document without shingles cannot be a duplicate
        # Equal values in two different bands must have different keys.
        own = keys[filled] ^ (np.arange(1, config.bands + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        yield pa.table({"key": own.T.ravel(), "row": np.tile(filled + block.start, config.bands).astype(np.int64)})


def _edges(keys: Partition) -> pa.Table:
    from puna.stages.curate.minhash.near_duplicates import edges

    rows = keys.read()
    place, key = (rows[name].combine_chunks().to_numpy() for name in ("row", "key"))
    order = np.argsort(place, kind="stable")
    results = place[order][edges(key[order])]
    first, second = np.unique(results, axis=0).T  # several bands may give the same edge
    return pa.table({"first": first, "second": second, "all": np.zeros(len(first), np.int32)})


def _components(edges: Partition, starts: NDArray[np.int64]) -> pa.Table:
    """Return `row`, `component` (its smallest row) and `part` number of each document with an edge."""
    from puna.stages.curate.minhash.near_duplicates import roots, unite

    rows = edges.read()
    pairs = np.stack([rows[name].combine_chunks().to_numpy() for name in ("first", "second")], axis=1)
    nodes, place = np.unique(pairs, return_inverse=True)
    parent = np.arange(len(nodes), dtype=np.int64)
    unite(parent, place.reshape(-1, 2).astype(np.int64))
    part = np.searchsorted(starts, nodes, side="right") - 1
    return pa.table({"row": nodes, "component": nodes[roots(parent)] if len(nodes) else nodes, "part": part.astype(np.int32)})


def _gather(
    run: StageRun, documents: Artifact, parts: list[Part], members: Exchange, signals: Artifact | None, config: MinhashDedupConfig
) -> Exchange:
    each = SHINGLE_BYTES * 8 * documents.record().characters // max(1, documents.rows()) // 6 + 8 * config.bands * config.rows
    items = [(part.of(COLUMNS), own) for part, own in zip(parts, members.parts, strict=False) if own.runs]
    return run.exchange(_candidates, items, signals, config, by="hash", partitions=partitions(members.rows * each))


def _candidates(item: tuple[Part, Partition], signals: Artifact | None, config: MinhashDedupConfig) -> Iterator[pa.Table]:
    """Yield the candidates of one part. Their texts are read again, to save the memory for the shingles of all documents."""
    part, members = item
    table = members.read()
    rows, component = (table[name].combine_chunks().to_numpy() for name in ("row", "component"))
    for block in part.split():
        low, high = np.searchsorted(rows, [block.start, block.stop])
        if high > low:
            results = block.read().take(pa.array(rows[low:high] - block.start))
            yield candidates(results, rows[low:high], component[low:high], signals, config)


def _decide(component: Partition, config: MinhashDedupConfig) -> tuple[pa.Table, dict[str, int]]:
    rows = component.read()
    if not rows.num_rows:
        return DECIDED.empty_table(), {"clusters": 0, "saved": 0}
    members = Candidates.read(rows, config)
    return _evidence(members.find_removals(config), members.ids, config)


def _whole(parts: list[Part], signals: Artifact | None, config: MinhashDedupConfig) -> tuple[pa.Table, dict[str, int]]:
    table = pa.concat_tables(part.read() for part in parts)
    results, candidates = at_once(table, signals, config)
    evidence, info = _evidence(results, table["id"], config)
    return evidence, {**info, "candidates": candidates}


def _evidence(found: Found, ids: pa.ChunkedArray, config: MinhashDedupConfig) -> tuple[pa.Table, dict[str, int]]:
    detail = [config.detail(ids[kept].as_py(), words) for kept, words in zip(found.kept.tolist(), found.new_words.tolist(), strict=True)]
    columns = {"id": ids.take(pa.array(found.removed)), "kept_id": ids.take(pa.array(found.kept)), "similarity": found.similarity}
    table = pa.table({**columns, "detail": pa.array(detail, pa.string())}, schema=DECIDED)
    return table, {"clusters": len(np.unique(found.kept)), "saved": found.saved}
