"""Candidate pairs from MinHash signatures (locality-sensitive hashing), and their exact verification.

Shapes: D documents, P signature values, B bands, E edges, M members of some components, S shingles in one flat array. The shingles of
member m, in text order, are `sequence_S[start_M[m] : start_M[m] + count_M[m]]`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.hashing import I64, U64, slice_hashes
from puna.kernels.text.normal_words import widen

GROWTH = 1.25


def band_keys(signatures_DP: NDArray[Any], bands: int, rows: int) -> U64:
    """Return one 64-bit key per document and band, [D, B]. A band has `rows` signature values; equal values give equal keys."""
    values = np.ascontiguousarray(signatures_DP[:, : bands * rows])
    data = values.view(np.uint8).reshape(-1)
    step = rows * values.dtype.itemsize
    offsets = np.arange(0, len(data) + 1, step, dtype=np.int64) if len(data) else np.zeros(1, dtype=np.int64)
    return slice_hashes(data, offsets).reshape(len(values), bands)  # type: ignore[no-any-return]


def edges(keys_D: U64) -> I64:
    """Return the edges between rows with equal keys, int64[E, 2]: each row with the next larger row that has its key."""
    order = np.argsort(keys_D)
    ranked = keys_D[order]
    equal = ranked[1:] == ranked[:-1]
    shared = np.flatnonzero(np.append(equal, False) | np.append(False, equal))
    # Sort only the few rows with an equal neighbour: a stable sort of all rows takes several times as long.
    rows, ranked = order[shared], ranked[shared]
    rows = rows[np.lexsort((rows, ranked))]
    same = np.flatnonzero(ranked[1:] == ranked[:-1])
    return np.stack([rows[same], rows[same + 1]], axis=1).astype(np.int64)


def components(keys_DB: U64) -> I64:
    """Return the smallest row of each document's component, [D]. Documents that share a band key are in the same component."""
    parent = np.arange(len(keys_DB), dtype=np.int64)
    for b in range(keys_DB.shape[1]):
        unite(parent, edges(keys_DB[:, b]))
    return roots(parent)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _find(parent: Any, i: Any) -> Any:
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


@njit(cache=True, nogil=True)
def unite(parent_D: Any, edges_E2: Any) -> None:
    """Merge in place the components that edges int64[E, 2] connect. `parent_D` int64 starts as 0 .. D - 1.

    The smaller row becomes the root, so the result does not depend on the order of the edges."""
    for e in range(len(edges_E2)):
        i, j = _find(parent_D, edges_E2[e, 0]), _find(parent_D, edges_E2[e, 1])
        if i < j:
            parent_D[j] = i
        elif j < i:
            parent_D[i] = j


@njit(cache=True, nogil=True)
def roots(parent_D: Any) -> Any:
    """Return `parent_D`, overwritten with the smallest row of each row's component."""
    for i in range(len(parent_D)):
        parent_D[i] = _find(parent_D, i)
    return parent_D


@njit(cache=True, nogil=True)
def distinct(sequence_S: Any) -> Any:
    """Return the sorted distinct values of an array."""
    if len(sequence_S) == 0:
        return sequence_S.copy()
    ranked = np.sort(sequence_S)
    count = 1
    for i in range(1, len(ranked)):
        ranked[count] = ranked[i]
        count += ranked[i] != ranked[count - 1]
    return ranked[:count]


@njit(cache=True, nogil=True)
def common(left_S: Any, right_S: Any) -> Any:
    """Return the number of values that two sorted arrays of distinct values share."""
    i = j = result = 0
    while i < len(left_S) and j < len(right_S):
        a, b = left_S[i], right_S[j]
        result += a == b
        i += a <= b
        j += b <= a
    return result


class Sets(NamedTuple):
    """The shingle sets of members, each built on first use.

    `values` uint64[S]: a member's distinct shingles in text order, starting at `start_M[m]`. `sizes` int64[M]: set sizes; 0: not yet built.
    `slots` int32: for each member an open-addressing hash table over its values. Member m has `first_M1[m + 1] - first_M1[m]` slots, a
    power of two; each slot contains 1 + a value's index, or 0. Probing starts at the slot given by the low bits of the value."""

    values: U64
    sizes: I64
    slots: NDArray[np.int32]
    start_M: I64
    first_M1: I64


@njit(cache=True, nogil=True)
def empty_sets(start_M: Any, count_M: Any) -> Any:
    """Return `Sets` in which each member m has an empty set with room for `count_M[m]` shingles."""
    first = np.zeros(len(count_M) + 1, dtype=np.int64)
    shingles = 0
    for m in range(len(count_M)):
        size = 1
        while size < 2 * count_M[m]:
            size *= 2
        first[m + 1] = first[m] + size
        shingles = max(shingles, start_M[m] + count_M[m])
    sizes = np.zeros(len(count_M), dtype=np.int64)
    return Sets(np.empty(shingles, dtype=np.uint64), sizes, np.zeros(first[-1], dtype=np.int32), start_M, first)


@njit(cache=True, nogil=True, inline="always")
def _slot(slots: Any, values: Any, value: Any) -> Any:
    """Return the slot of a value in a table of `Sets`, or the empty slot where it can be inserted."""
    mask = np.uint64(len(slots) - 1)
    at = value & mask
    while slots[at] != 0 and values[slots[at] - 1] != value:
        at = (at + np.uint64(1)) & mask
    return at


@njit(cache=True, nogil=True)
def make_set(sets: Any, m: Any, sequence_S: Any) -> None:
    """Build the set of member m in `sets` from its shingles `sequence_S`, unless it exists."""
    if sets.sizes[m]:
        return
    slots = sets.slots[sets.first_M1[m] : sets.first_M1[m + 1]]
    values = sets.values[sets.start_M[m] : sets.start_M[m] + len(sequence_S)]
    size = 0
    for value in sequence_S:
        at = _slot(slots, values, value)
        if slots[at] == 0:
            values[size] = value
            size += 1
            slots[at] = size
    sets.sizes[m] = size


@njit(cache=True, nogil=True)
def count_shared(sets: Any, m: Any, k: Any) -> Any:
    """Return the number of shingles that the sets of two members share."""
    slots = sets.slots[sets.first_M1[k] : sets.first_M1[k + 1]]
    values = sets.values[sets.start_M[k] : sets.start_M[k] + sets.sizes[k]]
    result = 0
    for value in sets.values[sets.start_M[m] : sets.start_M[m] + sets.sizes[m]]:
        result += slots[_slot(slots, values, value)] != 0
    return result


@njit(cache=True, nogil=True)
def longest_absent_run(sequence_S: Any, sets: Any, k: Any) -> Any:
    """Return the length of the longest run of values in `sequence_S` that are not in the set of member k."""
    slots = sets.slots[sets.first_M1[k] : sets.first_M1[k + 1]]
    values = sets.values[sets.start_M[k] : sets.start_M[k] + sets.sizes[k]]
    longest, run = 0, 0
    for value in sequence_S:
        run = run + 1 if slots[_slot(slots, values, value)] == 0 else 0
        longest = max(longest, run)
    return longest


class Criteria(NamedTuple):
    """Bounds for verifying that a document is a near-duplicate of another.

    `words` per shingle. `containment`: divide the number of shared shingles by the removed document's, not by the union's. `similarity` and
    `distinct` float64[levels]: for each doubling of the shingle width, the minimum similarity, and the minimum share of distinct shingles
    in a non-repetitive text. `estimate`: pairs whose signatures agree in a smaller share are not compared. `new_words`, `new_share`:
    maximum passage that the survivor may lack, in words and as a share of the removed document's words; the larger bound applies."""

    words: int
    containment: bool
    similarity: NDArray[np.float64]
    distinct: NDArray[np.float64]
    estimate: float
    new_words: int
    new_share: float


class Verdicts(NamedTuple):
    """Decisions on each member m: the index of its `survivor` (-1: m is kept), their `similarity`, the length of the longest passage of m
    that the survivor lacks (`new_words`), and whether m is kept only because of such a passage (`saved`)."""

    survivor: I64
    similarity: NDArray[np.float64]
    new_words: I64
    saved: NDArray[np.bool_]


@njit(cache=True, nogil=True)
def near(signatures_MP: Any, groups_MB: Any, estimate: Any) -> Any:
    """Return a mask bool[M] of the members that need shingles: those that agree in at least the share `estimate` of signature values with
    another member of one of their groups, `groups_MB`. A group has equal keys in one band; no two bands share a group number."""
    members, bands = groups_MB.shape
    needed = estimate * signatures_MP.shape[1]
    out = np.zeros(members, dtype=np.bool_)
    newest, before, seen = _lists(groups_MB)
    for m in range(members):
        for b in range(bands):
            k = newest[groups_MB[m, b]]
            while k >= 0:
                if seen[k] != m and not (out[k] and out[m]):
                    seen[k] = m
                    if _agreeing(signatures_MP, m, k) >= needed:
                        out[m] = out[k] = True
                k = before[k, b]
            before[m, b] = newest[groups_MB[m, b]]
            newest[groups_MB[m, b]] = m
    return out


@njit(cache=True, nogil=True)
def _lists(groups_MB: Any) -> Any:
    """Return empty linked lists per group: newest member [G] and previous member [M, B]; and the last member compared with each [M]."""
    members, bands = groups_MB.shape
    newest = np.full(groups_MB.max() + 1 if members else 0, -1, dtype=np.int64)
    return newest, np.full((members, bands), -1, dtype=np.int64), np.full(members, -1, dtype=np.int64)


@njit(cache=True, nogil=True)
def _agreeing(signatures_MP: Any, m: Any, k: Any) -> Any:
    equal = 0
    for p in range(signatures_MP.shape[1]):
        equal += signatures_MP[m, p] == signatures_MP[k, p]
    return equal


@njit(cache=True, nogil=True)
def resolve(signatures_MP: Any, groups_MB: Any, words_M: Any, start_M: Any, count_M: Any, sequence_S: Any, criteria: Any) -> Any:
    """Return `Verdicts` on the members, which are decided in order of preference.

    A member is removed if it is verified as a near-duplicate of an earlier, kept member of one of its groups (see `near`). The survivor is
    the most similar such member; ties go to the first."""
    members, bands = groups_MB.shape
    survivor, similarity = np.full(members, -1, dtype=np.int64), np.zeros(members)
    passage, saved = np.zeros(members, dtype=np.int64), np.zeros(members, dtype=np.bool_)
    newest, before, seen = _lists(groups_MB)
    needed = criteria.estimate * signatures_MP.shape[1]
    sets = empty_sets(start_M, count_M)
    for m in range(members):
        sequence = sequence_S[start_M[m] : start_M[m] + count_M[m]]
        bound = max(float(criteria.new_words), criteria.new_share * words_M[m])
        for b in range(bands):
            k = newest[groups_MB[m, b]]
            while k >= 0:
                if seen[k] != m:
                    seen[k] = m
                    if _agreeing(signatures_MP, m, k) >= needed:
                        rest = sequence_S[start_M[k] : start_M[k] + count_M[k]]
                        make_set(sets, m, sequence)
                        make_set(sets, k, rest)
                        own, other = sets.sizes[m], sets.sizes[k]
                        similar = _similarity(count_shared(sets, m, k), own, other, criteria.containment)
                        better = similar > similarity[m] or (similar == similarity[m] and k < survivor[m])
                        candidate = similar >= criteria.similarity[0] and (survivor[m] < 0 or better)
                        if candidate and _same_order(sequence, own, rest, other, criteria):
                            run = max(0, longest_absent_run(sequence, sets, k) - criteria.words + 1)
                            if run <= bound:
                                survivor[m], similarity[m], passage[m] = k, similar, run
                            else:
                                saved[m] = True
                k = before[k, b]
        if survivor[m] >= 0:
            saved[m] = False
            continue
        for b in range(bands):
            before[m, b] = newest[groups_MB[m, b]]
            newest[groups_MB[m, b]] = m
    return Verdicts(survivor, similarity, passage, saved)


@njit(cache=True, nogil=True, inline="always")
def _similarity(both: Any, own: Any, other: Any, containment: Any) -> Any:
    return both / (own if containment else own + other - both)


@njit(cache=True, nogil=True)
def _same_order(first: Any, own: Any, second: Any, other: Any, criteria: Any) -> Any:
    """True unless two texts with similar shingle sets only repeat the same few words in different orders. `own`, `other`: sizes of the
    sets.

    Tables with a small vocabulary share all short runs of words, so they must also share runs that are too long to agree by chance."""
    level, similarity, width, shares = 0, 1.0, criteria.words, criteria.distinct
    while _repetitive(first, own, width, shares[level]) or _repetitive(second, other, width, shares[level]):
        first, second = widen(first, width), widen(second, width)
        one, two = distinct(first), distinct(second)
        own, other = len(one), len(two)
        similarity = _similarity(common(one, two), own, other, criteria.containment)
        width *= 2
        level += 1
    return level == 0 or similarity >= criteria.similarity[level]


@njit(cache=True, nogil=True)
def _repetitive(sequence: Any, own: Any, width: Any, share: Any) -> Any:
    """True if a text is a few words in varying order: less than `share` of its shingles are distinct, far more of those twice as wide."""
    if own >= share * len(sequence) or len(sequence) <= width:
        return False
    return len(distinct(widen(sequence, width))) > GROWTH * own
