"""Decisions on which near-duplicates to remove, one component of candidates at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.stages.curate.minhash.config import MinhashDedupConfig
from puna.stages.curate.minhash.sketch import FACTS, Shingles, facts_of, shingle, sign
from puna.storage import Artifact

if TYPE_CHECKING:
    from puna.kernels.text.hashing import I64, U64

BLOCK_DOCUMENTS = 512


class Found(NamedTuple):
    """Removed near-duplicates. Per removal: rows of the `removed` and the `kept` document, their `similarity`, and `new_words`, the number
    of words in the longest passage that the kept document lacks. `saved`: number of documents kept only because of such a passage."""

    removed: I64
    kept: I64
    similarity: NDArray[np.float64]
    new_words: I64
    saved: int

    @classmethod
    def none(cls) -> Found:
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), 0)

    def of_rows(self, rows: I64) -> Found:
        """Return the decisions with each index i replaced by rows[i], sorted by removed row."""
        order = np.argsort(rows[self.removed])
        removed, kept = rows[self.removed[order]], rows[self.kept[order]]
        return Found(removed, kept, self.similarity[order], self.new_words[order], self.saved)


def preference(config: MinhashDedupConfig, rank: I64, facts: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return lexsort keys (primary key last) that put the preferred near-duplicate first. `rank` (the order of ids) breaks ties."""
    if config.survivor == "latest":
        return rank, -facts["words"], -facts["fetched"], ~facts["preferred"]
    score = (-facts["score"],) if config.survivor == "best_score" else ()
    return rank, -facts["fetched"], -facts["words"], *score, ~facts["preferred"]


def together(component: I64, *order: NDArray[Any]) -> tuple[I64, I64]:
    """Return the documents in components of two or more, sorted by component, then by the lexsort keys `order`; and component bounds."""
    members = np.flatnonzero(np.bincount(component, minlength=len(component))[component] > 1)
    members = members[np.lexsort((*(key[members] for key in order), component[members]))]
    return members, _bounds(component[members])


def _bounds(component: I64) -> I64:
    return np.append(np.flatnonzero(np.diff(component, prepend=-1)), len(component))


def groups_of(signatures: NDArray[Any], config: MinhashDedupConfig) -> I64:
    """Return each member's group number in each band, int64[M, B]. A group has equal keys in a band; no two bands share a number."""
    from puna.stages.curate.minhash.near_duplicates import band_keys

    keys = band_keys(signatures, config.bands, config.rows)
    groups = np.empty(keys.shape, np.int64)
    for band in range(config.bands):
        groups[:, band] = np.unique(keys[:, band], return_inverse=True)[1]
    numbers = groups.max(axis=0) + 1
    return groups + np.cumsum(numbers) - numbers  # type: ignore[no-any-return]


def find_removals(
    facts: NDArray[Any], signatures: NDArray[Any], bounds: I64, config: MinhashDedupConfig, shingles: Callable[[I64], tuple[U64, I64]]
) -> Found:
    """Return the removals, as indices, among the M members of complete components. `facts` FACTS[M] and `signatures` [M, P] are sorted by
    component, then preference. `shingles` returns the hashes and first indices of given members, only those with similar signatures.

    Without verification, only the preferred member of a component is kept, and signatures estimate the similarity."""
    from puna.stages.curate.minhash import near_duplicates as kernel

    if not len(facts):
        return Found.none()
    if not config.verify:
        first = np.repeat(bounds[:-1], np.diff(bounds))
        gone = np.flatnonzero(np.arange(len(first)) != first)
        estimate = (signatures[gone] == signatures[first[gone]]).mean(axis=1)
        return Found(gone, first[gone], estimate, np.zeros(len(gone), np.int64), 0)
    near = np.flatnonzero(kernel.near(signatures, groups_of(signatures, config), config.criteria().estimate))
    if not len(near):
        return Found.none()
    sequence, start = shingles(near)
    words, counts = (facts[name].astype(np.int64)[near] for name in ("words", "shingles"))
    groups = groups_of(signatures[near], config)
    results = kernel.resolve(signatures[near], groups, words, start, counts, sequence, config.criteria())
    gone = np.flatnonzero(results.survivor >= 0)
    return Found(near[gone], near[results.survivor[gone]], results.similarity[gone], results.new_words[gone], int(results.saved.sum()))


def flat(pieces: list[U64]) -> tuple[U64, I64]:
    """Return the concatenated shingles of the pieces, and the index of each piece's first shingle."""
    ends = np.cumsum([0, *map(len, pieces)])
    return np.concatenate([np.zeros(0, np.uint64), *pieces]), ends[:-1].astype(np.int64)


def candidates(table: pa.Table, rows: I64, component: I64, signals: Artifact | None, config: MinhashDedupConfig) -> pa.Table:
    """Return the candidates in `table` with FACTS, signature and shingles as bytes, and `hash`, by which they are partitioned."""
    results = shingle(table["text"], config)
    values, _ = sign(results, config)
    shingles = [None, pa.py_buffer(8 * results.offsets.astype(np.int64)), pa.py_buffer(results.hashes)]
    return pa.table(
        {
            "hash": component.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), "component": component, "row": rows, "id": table["id"],
            "facts": _binary(facts_of(table, results, signals, config)), "signature": _binary(values),
            "shingles": pa.Array.from_buffers(pa.large_binary(), len(rows), shingles),
        }
    )  # fmt: skip


class Candidates(NamedTuple):
    """Candidates sorted by component, then preference: ids, FACTS, signatures [M, P]; `bounds` of the components. `hashes`: shingles of all
    candidates, in the order they were read; `start`: index in `hashes` of each candidate's first shingle."""

    ids: pa.ChunkedArray
    facts: NDArray[Any]
    signatures: NDArray[Any]
    bounds: I64
    hashes: U64
    start: I64

    @classmethod
    def read(cls, table: pa.Table, config: MinhashDedupConfig) -> Candidates:
        table = table.combine_chunks()
        narrow = table.schema.field("signature").type.byte_width == 4 * config.bands * config.rows
        facts, values = _array(table["facts"], FACTS), _array(table["signature"], np.dtype(np.uint32 if narrow else np.uint64))
        component, rows = (table[name].to_numpy() for name in ("component", "row"))
        order = np.lexsort((*preference(config, rows, facts), component))
        hashes = _array(table["shingles"], np.dtype(np.uint64))
        start = np.cumsum(facts["shingles"]) - facts["shingles"]
        signatures = values.reshape(len(order), -1)[order]
        return cls(table["id"].take(pa.array(order)), facts[order], signatures, _bounds(component[order]), hashes, start[order])

    def find_removals(self, config: MinhashDedupConfig) -> Found:
        return find_removals(self.facts, self.signatures, self.bounds, config, lambda places: (self.hashes, self.start[places]))


def _binary(array: NDArray[Any]) -> pa.Array:
    data = np.ascontiguousarray(array)
    width = data.nbytes // max(1, len(data))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(data), [None, pa.py_buffer(data)])


def _array(column: pa.ChunkedArray, kind: np.dtype[Any]) -> NDArray[Any]:
    """Return the bytes of all rows as one new array of `kind`. It is writable, because numba loops are compiled for writable arrays."""
    results = [np.zeros(0, kind)]
    for chunk in column.chunks:
        data, size = chunk.buffers()[-1], kind.itemsize
        if pa.types.is_large_binary(chunk.type):
            offsets = np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
            first, last = int(offsets[0]), int(offsets[-1])
        else:
            width = chunk.type.byte_width
            first, last = chunk.offset * width, (chunk.offset + len(chunk)) * width
        if last > first:
            results.append(np.frombuffer(data, kind, (last - first) // size, first))
    return np.concatenate(results)


def at_once(table: pa.Table, signals: Artifact | None, config: MinhashDedupConfig) -> tuple[Found, int]:
    """Return the removals among the documents of `table` as row numbers, and the number of candidates."""
    from puna.stages.curate.minhash.near_duplicates import components

    slices = [table.slice(at, BLOCK_DOCUMENTS) for at in range(0, len(table), BLOCK_DOCUMENTS)]
    if not slices:
        return Found.none(), 0
    blocks = [shingle(rows["text"], config) for rows in slices]
    pairs = [sign(block, config) for block in blocks]
    signatures, keys = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
    facts = np.concatenate([facts_of(rows, block, signals, config) for rows, block in zip(slices, blocks, strict=True)])
    filled, rows = np.flatnonzero(facts["shingles"]), np.arange(len(table))
    root = rows.copy()
    root[filled] = filled[components(keys[filled])]
    members, bounds = together(root, *preference(config, rows, facts))
    shingles = lambda places: flat([_slice(blocks, int(row)) for row in members[places]])  # noqa: E731
    return find_removals(facts[members], signatures[members], bounds, config, shingles).of_rows(members), len(members)


def _slice(blocks: list[Shingles], row: int) -> U64:
    block, place = blocks[row // BLOCK_DOCUMENTS], row % BLOCK_DOCUMENTS
    return block.hashes[block.offsets[place] : block.offsets[place + 1]]
