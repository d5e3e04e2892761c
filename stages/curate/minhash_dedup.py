"""`minhash_dedup`: near-duplicate documents, found by MinHash and verified word run by word run."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, StageConfig, StageRun, stage
from puna.stages.curate.removal import without, write_removed
from puna.stages.curate.shingles import normalized, packed
from puna.storage import Part

JOB_DOCUMENTS = 2000
SLACK = 4.0
GROWTH = 1.25
MARGIN = 1.4


class MinhashDedupConfig(StageConfig):
    """How candidates are found, what counts as a duplicate, and which document survives."""

    words: int = Field(5, ge=1, le=50, description="Words per shingle")
    bands: int = Field(14, ge=1, le=1000, description="Bands of the index; documents that agree in one are candidates")
    rows: int = Field(8, ge=1, le=64, description="Signature values per band")
    seed: int = Field(1, ge=0, le=2**32 - 1, description="Seed of the permutations, as in datasketch")
    scheme: Literal["affine32", "affine64", "legacy"] = Field("affine32", description="Permutations, as in datasketch 2 (legacy: 1)")
    hash: Literal["xxh64", "sha1"] = Field(
        "xxh64", description="Hash of a shingle before permutation; sha1 is datasketch's default and much slower"
    )
    similarity: Literal["jaccard", "containment"] = Field(
        "jaccard", description="Verified similarity: shared shingles by those of either document, or by those of the removed one"
    )
    threshold: float = Field(0.8, gt=0, le=1, description="Candidates below this verified similarity are kept, fraction")
    max_new_words: int = Field(
        50, ge=0, description="A document with a longer passage that its survivor lacks is kept (shared templates), words"
    )
    max_new_fraction: float = Field(
        0.05, ge=0, le=1, description="The same bound as a share of the document's words; the larger bound counts, fraction"
    )
    survivor: Literal["longest", "latest"] = Field("longest", description="Which of several near-duplicates is kept")
    prefer_sources: tuple[str, ...] = Field(
        ("code",), description="Sources whose documents survive those of others: a source file rather than a page that shows it"
    )


class Sketches(NamedTuple):
    """What one part of the documents was reduced to; its shingle hashes in text order lie in `file`."""

    ids: list[str]
    fetched: NDArray[np.int64]
    preferred: NDArray[np.bool_]
    words: NDArray[np.int64]
    signatures: NDArray[Any]
    file: str
    offsets: NDArray[np.int64]


class Candidate(NamedTuple):
    """A document that shares a band with another one."""

    row: int
    words: int
    file: str
    start: int
    stop: int


class Verdict(NamedTuple):
    """A removed document: rows of it and of its survivor, verified similarity, longest passage the survivor lacks."""

    removed: int
    kept: int
    similarity: float
    new_words: int


@stage(kind="documents", filters="documents")
def minhash_dedup(documents: Documents, config: MinhashDedupConfig, run: StageRun) -> None:
    """Remove near-duplicates (Broder 1997; Llama 3, section 3.1.1).

    Documents that agree in one of `bands` bands of their MinHash signatures are candidates. They are taken in order
    of preference (preferred sources, longest or latest first, then by id); a document goes when a document kept before it is verified to
    be its near-duplicate: enough shared word runs, and no long passage of its own. Each removed document is so
    compared with its survivor itself, never along a chain. `duplicates` holds the evidence.
    """
    parts = run.parts(documents, columns=["id", "fetched_at", "source", "text"])
    sketches = list(run.map(_sketch, list(enumerate(parts)), config, str(run.scratch), rows=len(parts)))
    rows = _Rows(sketches)
    jobs = list(_jobs(rows, config))
    verdicts = sorted(v for found in run.map(_resolve, jobs, config) for v in found)
    ids = rows.ids
    _write(run, ids, verdicts, config)
    run.transform(without, documents, write_removed(run.scratch, (ids[v.removed] for v in verdicts)))
    run.metric("candidates", sum(len(members) for job in jobs for members, _, _ in job))
    run.metric("removed", len(verdicts))
    run.metric("clusters", len({v.kept for v in verdicts}))


def _write(run: StageRun, ids: list[str], verdicts: list[Verdict], config: MinhashDedupConfig) -> None:
    method = f"minhash, {config.similarity} of {config.words}-word runs"
    duplicates = [
        {"id": ids[v.removed], "kept_id": ids[v.kept], "cluster": ids[v.kept], "method": method, "similarity": v.similarity}
        for v in verdicts
    ]
    dropped = [
        {
            "id": ids[v.removed],
            "rule": "near_duplicate",
            "value": v.similarity,
            "threshold": config.threshold,
            "detail": f"of {ids[v.kept]}, longest passage of its own: {v.new_words} words",
        }
        for v in verdicts
    ]
    run.write_rows(duplicates, "duplicates")
    run.write_rows(dropped, "dropped")


# --- signatures, in workers ------------------------------------------------------------------------------


def _sketch(job: tuple[int, Part], config: MinhashDedupConfig, scratch: str) -> Sketches:
    """Signatures of one part; its shingle hashes go to a file, because verification needs few of them at a time."""
    from puna.kernels import minhash

    number, part = job
    table = part.read()
    texts = [normalized(text) for text in table.column("text").to_pylist()]
    hashes, offsets, words = minhash.shingle_hashes(*packed(texts), config.words)
    values = hashes if config.hash == "xxh64" else _sha1(texts, config)
    if config.scheme != "affine64":
        values = values & np.uint64(0xFFFFFFFF)
    signatures = minhash.signatures(values, offsets, config.bands * config.rows, config.seed, config.scheme)
    file = Path(scratch) / f"shingles-{number:06d}.npy"
    np.save(file, hashes)
    fetched = np.asarray(table.column("fetched_at").cast(pa.int64()))
    preferred = np.array([source in config.prefer_sources for source in table.column("source").to_pylist()], dtype=bool)
    return Sketches(table.column("id").to_pylist(), fetched, preferred, words, signatures, str(file), offsets)


def _sha1(texts: list[str], config: MinhashDedupConfig) -> NDArray[np.uint64]:
    """datasketch's default hash of each shingle: the first 4 or 8 bytes of its SHA-1, little-endian."""
    size = 8 if config.scheme == "affine64" else 4
    found = []
    for text in texts:
        words = text.split(" ") if text else []
        for start in range(max(1, len(words) - config.words + 1) if words else 0):
            shingle = " ".join(words[start : start + config.words])
            found.append(int.from_bytes(hashlib.sha1(shingle.encode()).digest()[:size], "little"))
    return np.array(found, dtype=np.uint64)


# --- candidates, in the driver ---------------------------------------------------------------------------


class _Rows:
    """The sketches of all parts by row number (documents are sorted by id, so rows are too)."""

    def __init__(self, sketches: list[Sketches]) -> None:
        self._sketches = sketches
        self._starts = np.cumsum([0, *(len(s.ids) for s in sketches)])
        self.ids = [identity for s in sketches for identity in s.ids]
        self.fetched = np.concatenate([s.fetched for s in sketches] or [np.zeros(0, np.int64)])
        self.preferred = np.concatenate([s.preferred for s in sketches] or [np.zeros(0, bool)])
        self.words = np.concatenate([s.words for s in sketches] or [np.zeros(0, np.int64)])
        self.signatures = np.concatenate([s.signatures for s in sketches] or [np.zeros((0, 0), np.uint32)])

    def candidate(self, row: int) -> Candidate:
        """Where the shingles of a row lie."""
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        sketch, place = self._sketches[part], row - int(self._starts[part])
        return Candidate(row, int(self.words[row]), sketch.file, int(sketch.offsets[place]), int(sketch.offsets[place + 1]))


Component = tuple[list[Candidate], NDArray[Any], NDArray[np.uint64]]
"""Documents in order of preference, their signatures and their band keys."""


def _jobs(rows: _Rows, config: MinhashDedupConfig) -> Iterator[list[Component]]:
    """Connected components of the candidate graph, several to a job."""
    from puna.kernels import minhash

    filled = np.flatnonzero(rows.words > 0)  # a document without words has no shingle and is nobody's duplicate
    if not len(filled):
        return
    keys = minhash.band_keys(rows.signatures[filled], config.bands, config.rows)
    roots = minhash.components(keys)
    order = np.argsort(roots, kind="stable")
    bounds = np.flatnonzero(np.diff(roots[order], prepend=-1, append=-1))
    job: list[Component] = []
    size = 0
    for start, stop in pairwise(bounds):
        if stop - start < 2:
            continue
        members = order[start:stop]
        found = filled[members]
        ranks = np.lexsort(_preference(rows, found, config))
        chosen = found[ranks]
        job.append(([rows.candidate(int(row)) for row in chosen], rows.signatures[chosen], keys[members[ranks]]))
        size += len(chosen)
        if size >= JOB_DOCUMENTS:
            yield job
            job, size = [], 0
    if job:
        yield job


def _preference(rows: _Rows, found: NDArray[np.int64], config: MinhashDedupConfig) -> tuple[NDArray[np.int64], ...]:
    """Sort keys, the last one first: rows follow ids, so documents that are alike in all else are ordered by id."""
    words, fetched = -rows.words[found], -rows.fetched[found]
    first, second = (fetched, words) if config.survivor == "latest" else (words, fetched)
    return found, second, first, -rows.preferred[found].astype(np.int64)


# --- verification, in workers ----------------------------------------------------------------------------


def _resolve(job: list[Component], config: MinhashDedupConfig) -> list[Verdict]:
    """The removed documents of some components."""
    files: dict[str, NDArray[np.uint64]] = {}
    return [verdict for component in job for verdict in _component(component, config, files)]


def _component(component: Component, config: MinhashDedupConfig, files: dict[str, NDArray[np.uint64]]) -> Iterator[Verdict]:
    members, signatures, keys = component
    holders: dict[tuple[int, int], list[int]] = defaultdict(list)  # (band, key) → kept members
    shingles: dict[int, _Shingles] = {}
    least = 0.0
    if config.similarity == "jaccard":  # a signature estimates it: pairs far below need no exact comparison
        least = config.threshold - SLACK * (config.threshold * (1 - config.threshold) / signatures.shape[1]) ** 0.5 - 1e-9
    for place, member in enumerate(members):
        own = [(band, int(key)) for band, key in enumerate(keys[place])]
        others = sorted({kept for key in own for kept in holders.get(key, ())})
        near = [kept for kept in others if not least or float((signatures[place] == signatures[kept]).mean()) >= least]
        best: Verdict | None = None
        for kept in near:
            for index in (place, kept):
                if index not in shingles:
                    shingles[index] = _Shingles(_stored(members[index], files), config.words)
            verdict = _verified(member, members[kept], shingles[place], shingles[kept], config)
            if verdict is not None and (best is None or verdict.similarity > best.similarity):
                best = verdict
        if best is not None:
            shingles.pop(place, None)
            yield best
            continue
        for key in own:
            holders[key].append(place)


def _stored(member: Candidate, files: dict[str, NDArray[np.uint64]]) -> NDArray[np.uint64]:
    if member.file not in files:
        files[member.file] = np.load(member.file, mmap_mode="r")
    return np.array(files[member.file][member.start : member.stop])


class _Shingles:
    """A document's shingles in text order, and as sorted sets of growing width."""

    def __init__(self, sequence: NDArray[np.uint64], words: int) -> None:
        self._widths = [(words, sequence, np.unique(sequence))]

    def at(self, level: int) -> tuple[int, NDArray[np.uint64], NDArray[np.uint64]]:
        """Words per shingle, shingles in order and their set, after the width was doubled `level` times."""
        from puna.kernels import minhash

        while len(self._widths) <= level:
            words, sequence, _ = self._widths[-1]
            wider = minhash.widened(sequence, words)
            self._widths.append((2 * words, wider, np.unique(wider)))
        return self._widths[level]

    def repetitive(self, level: int, share: float) -> bool:
        """Whether texts with these shingles may differ in nothing but their order.

        Fewer than `share` of the shingles are distinct, and longer ones are far more varied: a few words in any order. (A text
        that repeats its own passages has hardly more distinct long shingles than short ones.)
        """
        words, sequence, distinct = self.at(level)
        if len(distinct) >= share * len(sequence) or len(sequence) <= words:
            return False
        return len(self.at(level + 1)[2]) > GROWTH * len(distinct)


def least_similarity(config: MinhashDedupConfig, level: int) -> float:
    """The threshold for shingles `2 ** level` times as wide, where each edit breaks as many times more of them.

    Of equally long documents with a share k of whole shingles, k is the containment and k / (2 - k) the Jaccard similarity.
    """
    t = config.threshold
    kept = float((t if config.similarity == "containment" else 2 * t / (1 + t)) ** (2**level))
    return kept if config.similarity == "containment" else kept / (2 - kept)


def least_distinct(config: MinhashDedupConfig, level: int) -> float:
    """The share of distinct shingles below which texts could be as similar as the threshold by chance.

    n words drawn at random show a share p = 1 - exp(-n / k) of the k shingles there are: two such texts have the containment
    p and the similarity p / (2 - p), and a share p / (n / k) = p / -log(1 - p) of their shingles is distinct.
    """
    t = least_similarity(config, level)
    p = min(t if config.similarity == "containment" else 2 * t / (1 + t), 0.99)
    return MARGIN * -p / math.log1p(-p)  # the margin covers the scatter of short texts


def _verified(member: Candidate, survivor: Candidate, own: _Shingles, other: _Shingles, config: MinhashDedupConfig) -> Verdict | None:
    """The verdict that `member` goes because of `survivor`, or None.

    Documents with few words of vocabulary (tables) share all short runs whatever their order: they must also agree in
    runs so long that they could not by chance.
    """
    from puna.kernels import minhash

    similarity = _similarity(own, other, 0, config)
    if similarity < config.threshold:
        return None
    level = 0
    while own.repetitive(level, least_distinct(config, level)) or other.repetitive(level, least_distinct(config, level)):
        level += 1
    if level and _similarity(own, other, level, config) < least_similarity(config, level):
        return None
    width, sequence, _ = own.at(0)
    run = minhash.longest_absent_run(sequence, other.at(0)[2])
    new_words = max(0, run - width + 1)
    if new_words > max(config.max_new_words, config.max_new_fraction * member.words):
        return None
    return Verdict(member.row, survivor.row, similarity, new_words)


def _similarity(own: _Shingles, other: _Shingles, level: int, config: MinhashDedupConfig) -> float:
    from puna.kernels import minhash

    mine, theirs = own.at(level)[2], other.at(level)[2]
    shared: int = minhash.common(mine, theirs)
    return shared / (len(mine) if config.similarity == "containment" else len(mine) + len(theirs) - shared)
