"""`minhash_dedup`: near-duplicate documents, found by MinHash and verified word run by word run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from puna.stages.contract import Documents, Signals, StageRun, stage
from puna.stages.curate.minhash.config import MinhashDedupConfig
from puna.stages.curate.minhash.decide import Found, Job, company, preference, resolved
from puna.stages.curate.minhash.index import INDEX, write_index
from puna.stages.curate.minhash.sketch import Place, Sketches, band_edges, sketch, store_shingles
from puna.stages.curate.rows.removal import without, write_removed
from puna.storage import Artifact, PunaError

__all__ = ["MinhashDedupConfig", "minhash_dedup"]

JOB_DOCUMENTS = 2000
EVIDENCE_ROWS = 65_536


@stage(kind="documents", filters="documents")
def minhash_dedup(documents: Documents, signals: Signals | None, config: MinhashDedupConfig, run: StageRun) -> None:
    """Remove near-duplicates (Broder 1997; Llama 3, section 3.1.1).

    Documents that agree in one of `bands` bands of their MinHash signatures are candidates. They are taken in order of
    preference (preferred sources; then the longest, latest or best; then by id); a document goes when a document kept before
    it is verified to be its near-duplicate: enough shared word runs, and no long passage of its own. Each removed document is
    so compared with its survivor itself, never along a chain. `duplicates` holds the evidence.

    Memory: some 50 bytes per document and the shingles of one job of candidates; all else lies in files.
    """
    parts = run.parts(documents, columns=["fetched_at", "source", "text"])
    sketches = list(run.map(sketch, list(enumerate(parts)), config, config.chosen_device(), str(run.scratch), rows=len(parts)))
    if not sketches:
        return
    rows = Rows.of(sketches, scores(documents, signals, config))
    members, bounds = _candidates(run, rows, config)
    found = _found(run, rows, members, bounds, documents, config)
    removed = _write(run, documents, found, config)
    run.transform(without, documents, write_removed(run.scratch, removed))
    if config.keep_index:
        write_index(run.folder / INDEX, documents, sketches, rows.score, config)
    run.metric("candidates", len(members))
    run.metric("removed", len(found.removed))
    run.metric("clusters", len(np.unique(found.kept)))
    run.metric("kept_for_a_passage", found.saved)


class Rows(NamedTuple):
    """All documents by row number (they are sorted by id, so rows are too); arrays have one element per document.

    `starts`: the first row of each part, and the end. `sketches`: the parts' files.
    """

    starts: NDArray[np.int64]
    fetched: NDArray[np.int64]
    preferred: NDArray[np.bool_]
    words: NDArray[np.int64]
    shingles: NDArray[np.int64]
    score: NDArray[np.float64] | None
    sketches: list[Sketches]

    @classmethod
    def of(cls, sketches: list[Sketches], score: NDArray[np.float64] | None) -> Rows:
        """The rows of all parts."""
        starts = np.cumsum([0, *(s.documents for s in sketches)])
        return cls(
            starts,
            np.concatenate([s.fetched for s in sketches]),
            np.concatenate([s.preferred for s in sketches]),
            np.concatenate([s.words for s in sketches]),
            np.concatenate([s.shingles for s in sketches]),
            score,
            sketches,
        )

    def preference(self, rows: NDArray[np.int64], config: MinhashDedupConfig) -> tuple[NDArray[Any], ...]:
        """Sort keys for lexsort, the last one first; rows follow ids, which break ties."""
        score = None if self.score is None else self.score[rows]
        return preference(config, rows, self.words[rows], self.fetched[rows], self.preferred[rows], score)


def scores(documents: Artifact, signals: Artifact | None, config: MinhashDedupConfig) -> NDArray[np.float64] | None:
    """The score of each document, in the order of ids; the missing ones are worst."""
    if config.survivor != "best_score":
        return None
    if signals is None:
        raise PunaError("minhash_dedup.survivor is best_score: give the signals that hold the score")
    known = signals.read(columns=None)
    if config.score not in known.schema.names:
        names = ", ".join(name for name in known.schema.names if name != "id")
        raise PunaError(f"minhash_dedup.score: {signals.id} has no signal {config.score!r}; it has {names}")
    place = pc.index_in(documents.read(columns=["id"])["id"], value_set=known["id"])
    values = known[config.score].cast(pa.float64()).take(place).fill_null(-np.inf)
    return np.nan_to_num(np.asarray(values, dtype=np.float64), nan=-np.inf)


def _candidates(run: StageRun, rows: Rows, config: MinhashDedupConfig) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents that share a band with another one: rows by component and preference, and the bounds of the components."""
    from puna.kernels import near_duplicates

    total = int(rows.starts[-1])
    parent = np.arange(total, dtype=np.int64)
    files = [s.keys for s in rows.sketches]
    empty = rows.shingles == 0  # without a shingle a document is nobody's duplicate
    for found in run.map(band_edges, range(config.bands), files, total):
        near_duplicates.unite(parent, found[~(empty[found[:, 0]] | empty[found[:, 1]])])
    root = near_duplicates.roots(parent)
    large = np.bincount(root, minlength=total) > 1
    members = np.flatnonzero(large[root])
    members = members[np.lexsort((*rows.preference(members, config), root[members]))]
    return members, np.append(np.flatnonzero(np.diff(root[members], prepend=-1)), len(members))


def _found(
    run: StageRun, rows: Rows, members: NDArray[np.int64], bounds: NDArray[np.int64], documents: Artifact, config: MinhashDedupConfig
) -> Found:
    """Decide all components."""
    signatures = [s.signatures for s in rows.sketches]
    file = str(Path(run.scratch) / "sequence.npy")
    if config.verify and len(members):
        pieces = (members[bounds[i] : bounds[j]] for i, j in _cut(bounds))
        near = np.concatenate(list(run.map(company, pieces, config, rows.starts, signatures)))
        component = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[near]
        members, bounds = members[near], np.append(np.flatnonzero(np.diff(component, prepend=-1)), near.sum())
    counts = rows.shingles[members]
    start = np.cumsum(counts) - counts
    if config.verify and len(members):
        np.lib.format.open_memmap(file, "w+", np.uint64, (int(counts.sum()),))
        by_row = np.argsort(members)
        cuts = pairwise(np.searchsorted(members[by_row], rows.starts))
        chosen = [(part, by_row[a:b]) for part, (a, b) in enumerate(cuts) if b > a]
        parts = run.parts(documents, columns=["text"])
        places = [Place(parts[part], members[at] - rows.starts[part], start[at]) for part, at in chosen]
        for _ in run.map(store_shingles, places, config, file):
            pass
    jobs = (
        Job(members[a:b], bounds[i : j + 1] - a, rows.words[members[a:b]], start[a:b], counts[a:b])
        for i, j in _cut(bounds)
        for a, b in [(int(bounds[i]), int(bounds[j]))]
    )
    return Found.of(list(run.map(resolved, jobs, config, file, rows.starts, signatures)))


def _cut(bounds: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of components of about JOB_DOCUMENTS documents: the first component, and the first of the next run."""
    first = 0
    while first < len(bounds) - 1:
        last = max(first + 1, int(np.searchsorted(bounds, bounds[first] + JOB_DOCUMENTS, side="right")) - 1)
        yield first, last
        first = last


def _write(run: StageRun, documents: Artifact, found: Found, config: MinhashDedupConfig) -> list[str]:
    """Write the evidence; returns the ids of the removed documents."""
    needed = np.unique(np.concatenate([found.removed, found.kept]))
    names = _ids(documents, needed)
    gone, kept = (names.take(pa.array(np.searchsorted(needed, rows))) for rows in (found.removed, found.kept))
    for at in range(0, len(gone), EVIDENCE_ROWS):
        rows = slice(at, at + EVIDENCE_ROWS)
        ids, survivors, similarity = gone[rows], kept[rows], pa.array(found.similarity[rows])
        method, rule = pa.repeat(config.method, len(ids)), pa.repeat("near_duplicate", len(ids))
        duplicates = {"id": ids, "kept_id": survivors, "method": method, "similarity": similarity, "cluster": survivors}
        run.write(pa.table(duplicates), "duplicates")
        detail = [config.detail(*pair) for pair in zip(survivors.to_pylist(), found.new_words[rows].tolist(), strict=True)]
        threshold = pa.array(np.full(len(ids), config.threshold) if config.verify else [None] * len(ids), pa.float64())
        run.write(pa.table({"id": ids, "rule": rule, "value": similarity, "threshold": threshold, "detail": detail}), "dropped")
    return gone.to_pylist()  # type: ignore[no-any-return]


def _ids(documents: Artifact, rows: NDArray[np.int64]) -> pa.Array:
    """The ids of some rows, given in order, within bounded memory."""
    found, first = [], 0
    for batch in documents.batches(columns=["id"], rows=EVIDENCE_ROWS):
        low, high = np.searchsorted(rows, [first, first + batch.num_rows])
        found.append(batch.column(0).take(pa.array(rows[low:high] - first)))
        first += batch.num_rows
    return pa.concat_arrays(found) if found else pa.array([], pa.string())
