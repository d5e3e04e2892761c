"""Deciding which near-duplicates go: components of candidates, in workers or in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.stages.curate.minhash.config import MinhashDedupConfig
from puna.stages.curate.minhash.sketch import FACTS, Shingles, facts_of, shingled, signed
from puna.storage import Artifact

if TYPE_CHECKING:
    from puna.kernels.minhash import Device

BLOCK_DOCUMENTS = 512


class Found(NamedTuple):
    """Removed documents: rows of them and of their survivors, similarity, longest passage of their own in words; and how many
    documents nothing but such a passage saved."""

    removed: NDArray[np.int64]
    kept: NDArray[np.int64]
    similarity: NDArray[np.float64]
    new_words: NDArray[np.int64]
    saved: int

    @classmethod
    def of(cls, parts: list[Found]) -> Found:
        """What several jobs found, in the order of rows."""
        none = cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), 0)
        parts = [none, *parts]
        removed = np.concatenate([f.removed for f in parts])
        order = np.argsort(removed)
        return cls(
            removed[order],
            np.concatenate([f.kept for f in parts])[order],
            np.concatenate([f.similarity for f in parts])[order],
            np.concatenate([f.new_words for f in parts])[order],
            sum(f.saved for f in parts),
        )


class Job(NamedTuple):
    """Some whole components of candidates. `rows` int64[M]: the members, by component and then by preference; `bounds` of the
    components in them; `start`, `counts` int64[M]: where the members' shingles lie."""

    rows: NDArray[np.int64]
    bounds: NDArray[np.int64]
    words: NDArray[np.int64]
    start: NDArray[np.int64]
    counts: NDArray[np.int64]


def preference(
    config: MinhashDedupConfig,
    rank: NDArray[np.int64],
    words: NDArray[np.int64],
    fetched: NDArray[np.int64],
    preferred: NDArray[np.bool_],
    score: NDArray[np.float64] | None,
) -> tuple[NDArray[Any], ...]:
    """Sort keys of documents for lexsort, the last one first: which of several near-duplicates survives. `rank` by id decides
    between documents that are alike in all else."""
    if config.survivor == "latest":
        return rank, -words, -fetched, ~preferred
    if score is not None:
        return rank, -fetched, -words, -score, ~preferred
    return rank, -fetched, -words, ~preferred


def groups_of(signatures: NDArray[Any], config: MinhashDedupConfig) -> NDArray[np.int64]:
    """Bands with equal keys as numbers, counted from 0 over all bands, int64[M, B]."""
    from puna.stages.curate.minhash.near_duplicates import band_keys

    keys = band_keys(signatures, config.bands, config.rows)
    groups = np.empty(keys.shape, np.int64)
    for band in range(config.bands):
        groups[:, band] = np.unique(keys[:, band], return_inverse=True)[1]
    numbers = groups.max(axis=0) + 1
    return groups + np.cumsum(numbers) - numbers  # type: ignore[no-any-return]


def decide(job: Job, signatures: NDArray[Any], sequence: NDArray[np.uint64], config: MinhashDedupConfig) -> Found:
    """The documents of a job that go; `signatures` [M, P] are the members'."""
    from puna.stages.curate.minhash.near_duplicates import resolve

    groups = groups_of(signatures, config)
    found = resolve(signatures, groups, job.words, job.start, job.counts, sequence, config.criteria())
    gone = np.flatnonzero(found.survivor >= 0)
    kept = job.rows[found.survivor[gone]]
    return Found(job.rows[gone], kept, found.similarity[gone], found.new_words[gone], int(found.saved.sum()))


def collapse(job: Job, signatures: NDArray[Any]) -> Found:
    """Every component shrinks to its preferred member, without verification."""
    first = np.repeat(job.bounds[:-1], np.diff(job.bounds))
    gone = np.flatnonzero(np.arange(len(first)) != first)
    estimate = (signatures[gone] == signatures[first[gone]]).mean(axis=1)
    return Found(job.rows[gone], job.rows[first[gone]], estimate, np.zeros(len(gone), np.int64), 0)


class Candidates(NamedTuple):
    """Documents that share a band with another one: ids, rows, FACTS, signatures [M, P]; `hashes` of their shingles, one after another."""

    ids: pa.Array
    rows: NDArray[np.int64]
    facts: NDArray[Any]
    signatures: NDArray[Any]
    hashes: NDArray[np.uint64]

    @classmethod
    def of(
        cls, table: pa.Table, rows: NDArray[np.int64], signals: Artifact | None, config: MinhashDedupConfig, device: Device
    ) -> Candidates:
        """The candidates in a table of documents."""
        found = shingled(table["text"], config)
        values, _ = signed(found, config, device)
        return cls(table["id"].combine_chunks(), rows, facts_of(table, found, signals, config), values, found.hashes)

    def table(self, component: NDArray[np.int64]) -> pa.Table:
        """The candidates as rows of an exchange by component."""
        offsets = 8 * np.concatenate([[0], np.cumsum(self.facts["shingles"])]).astype(np.int64)
        shingles = pa.Array.from_buffers(pa.large_binary(), len(self.rows), [None, pa.py_buffer(offsets), pa.py_buffer(self.hashes)])
        hashes = component.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return pa.table(
            {
                "hash": hashes, "component": component, "row": self.rows, "id": self.ids, "facts": _binary(self.facts),
                "signature": _binary(self.signatures), "shingles": shingles,
            }
        )  # fmt: skip

    @classmethod
    def read(cls, table: pa.Table, config: MinhashDedupConfig) -> tuple[Candidates, NDArray[np.int64]]:
        """Candidates by component and then by preference, and the bounds of the components."""
        facts = np.frombuffer(b"".join(table["facts"].to_pylist()), FACTS)
        component, rows = (table[name].combine_chunks().to_numpy() for name in ("component", "row"))
        score = facts["score"] if config.survivor == "best_score" else None
        order = np.lexsort((*preference(config, rows, facts["words"], facts["fetched"], facts["preferred"], score), component))
        sorted_ = table.take(pa.array(order))
        narrow = table.schema.field("signature").type.byte_width == 4 * config.bands * config.rows
        dtype = np.uint32 if narrow else np.uint64
        signatures = np.frombuffer(b"".join(sorted_["signature"].to_pylist()), dtype).reshape(len(order), -1)
        hashes = np.frombuffer(b"".join(sorted_["shingles"].to_pylist()), np.uint64)
        bounds = np.append(np.flatnonzero(np.diff(component[order], prepend=-1)), len(order))
        return cls(sorted_["id"].combine_chunks(), rows[order], facts[order], signatures, hashes), bounds


def decided(found: Candidates, bounds: NDArray[np.int64], config: MinhashDedupConfig) -> Found:
    """What happens to candidates, by their places."""
    from puna.stages.curate.minhash.near_duplicates import near

    place, counts = np.arange(len(found.rows)), found.facts["shingles"].astype(np.int64)
    start = np.cumsum(counts) - counts
    if not config.verify:
        return Found.of([collapse(Job(place, bounds, found.facts["words"], start, counts), found.signatures)])
    keep = near(found.signatures, groups_of(found.signatures, config), config.criteria().estimate)
    if not keep.any():
        return Found.of([])
    words = found.facts["words"].astype(np.int64)[keep]
    job = Job(place[keep], bounds[:0], words, start[keep], counts[keep])
    return Found.of([decide(job, found.signatures[keep], found.hashes, config)])


def _binary(array: NDArray[Any]) -> pa.Array:
    """Each row of an array as its bytes."""
    data = np.ascontiguousarray(array)
    width = data.nbytes // max(1, len(data))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(data), [None, pa.py_buffer(data)])


def near_duplicates(texts: list[str] | pa.Array | pa.ChunkedArray, config: MinhashDedupConfig | None = None) -> Found:
    """The near-duplicates among some texts in memory, as `minhash_dedup` finds them; the longest survive, then the first.

    Rows are positions in `texts`. Takes about twice the texts' size; the stage takes any size.
    """
    from puna.stages.curate.minhash import near_duplicates as kernel

    config = config or MinhashDedupConfig()
    column = texts if isinstance(texts, pa.ChunkedArray) else pa.chunked_array([pa.array(texts, pa.large_string())])
    blocks = [shingled(column.slice(at, BLOCK_DOCUMENTS), config) for at in range(0, len(column), BLOCK_DOCUMENTS)]
    if not blocks:
        return Found.of([])
    pairs = [signed(block, config) for block in blocks]
    signatures, keys = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
    words = np.concatenate([block.words for block in blocks])
    counts = np.concatenate([np.diff(block.offsets) for block in blocks])
    filled = np.flatnonzero(counts)
    root = np.arange(len(column))
    root[filled] = filled[kernel.components(keys[filled])]
    members = np.flatnonzero(np.bincount(root, minlength=len(root))[root] > 1)
    members = members[np.lexsort((members, -words[members], root[members]))]
    bounds = np.append(np.flatnonzero(np.diff(root[members], prepend=-1)), len(members))
    if not config.verify:
        return Found.of([collapse(Job(members, bounds, *(np.zeros(0, np.int64),) * 3), signatures[members])])
    if not len(members):
        return Found.of([])
    near = kernel.near(signatures[members], groups_of(signatures[members], config), config.criteria().estimate)
    members = members[near]
    lengths = counts[members]
    sequence = np.concatenate([np.zeros(0, np.uint64), *(_slice(blocks, int(row)) for row in members)])
    job = Job(members, np.zeros(0, np.int64), words[members], np.cumsum(lengths) - lengths, lengths)
    return Found.of([decide(job, signatures[members], sequence, config)] if len(members) else [])


def _slice(blocks: list[Shingles], row: int) -> NDArray[np.uint64]:
    """The shingles of a document, from the block that holds it."""
    block, place = blocks[row // BLOCK_DOCUMENTS], row % BLOCK_DOCUMENTS
    return block.hashes[block.offsets[place] : block.offsets[place + 1]]
