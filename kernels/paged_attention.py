"""Attention of new tokens over a paged KV cache: prefill, decoding and shared prefixes in one ragged step.

Shapes: N queries, H query heads, G key-value heads, R = H / G, K width of queries and keys, V width of values;
P pages of S tokens, B sequences, W pages of the longest sequence.

A query has a position in its sequence. It sees itself and the tokens before it, with a `window` only the last ones. A sequence is a list
of pages in the order of its tokens: its page j holds the S positions from j S on. Neighbouring queries that share their first pages read
these once (cascade inference): answers to one prompt, the tokens of one chunk, the branches of a tree. On a CPU the numba loop goes through
a query's pages in order. So the bits of a query's result depend neither on where its pages are, nor on other queries in the step. On a GPU
long runs of pages are cut into pieces, whose partial softmaxes are merged by their log-sum-exps (FlashDecoding)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from puna.kernels import paged_attention_triton as blocks
from puna.kernels.cpu.lazy_jit import Address, has_numba, strict_jit
from puna.kernels.cpu.loops import run_rows
from puna.kernels.operators import uses_triton, wide

if has_numba():
    from puna.kernels.cpu import vector_products as tiles
    from puna.kernels.cpu.vectors import (
        LANES,
        add,
        between,
        exp,
        fill,
        fma,
        higher,
        load,
        load_first,
        minus,
        peak,
        store,
        store_first,
        times,
        total,
    )

NUMERICS = {"PAGE": 1, "PagedPlan": 1, "new_pages": 2, "paged_attention": 1}
PAGE = 16  # tokens per page: their scores for one query fill a 512-bit vector
TILE = 16  # neighbouring queries that are computed together
KEPT = 8  # pages of values that stay in the L1 cache while a tile's queries read them in turn
SPARE = 8  # spare entries after a list of pages, which the prefetch may read
SPLIT = 1024  # maximum number of tokens of one piece on a GPU
Shape = tuple[int, int, int, int]  # (G, R, K, V)
Arrays = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """The pages that a step's queries see, as CPU tensors; `items` are copied to `device`. The constructor raises ValueError for tensors
    that do not fit.

    tables    [B, W] int32   each sequence's pages, in order; not checked against P
    sequence  [N] int32      each query's sequence; only neighbouring queries, at most TILE, share page reads
    position  [N] int32      number of tokens before each query in its sequence"""

    tables: Tensor
    sequence: Tensor
    position: Tensor
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        tensors = (self.tables, self.sequence, self.position)
        if any(t.dtype != torch.int32 or t.device.type != "cpu" for t in tensors) or self.sequence.shape != self.position.shape:
            raise ValueError("a plan has int32 tensors on CPU, with one sequence and one position per query")
        positions = self.position.numpy()
        if len(positions) and not (positions.min() >= 0 and positions.max() < PAGE * self.tables.shape[1]):
            raise ValueError(f"positions lie in 0 to {PAGE * self.tables.shape[1] - 1}, the positions in the tables' pages of {PAGE}")

    @cached_property
    def arrays(self) -> Arrays:
        """Return (tables [B W], W, sequences, positions, stretches, each tile's first stretch) for the numba loops. A stretch (first query,
        end query, first page, end page) is a run of pages that neighbouring queries share. A tile's stretches follow the tree of its
        sequences: first the pages that all its queries share, then those that fewer neighbours share."""
        tables, sequence, position = (t.numpy() for t in (self.tables, self.sequence, self.position))
        flat = np.ascontiguousarray(tables).ravel()
        tile_count = -(-len(sequence) // TILE)
        stretches, begins = np.empty((2 * TILE * tile_count, 4), np.int32), np.empty(tile_count + 1, np.int32)
        _stretches(flat, tables.shape[1], sequence, position, stretches, begins)
        return flat, tables.shape[1], sequence, position, stretches, begins

    def scratch(self, R: int, width: int) -> tuple[Any, Any, Any]:
        """Return buffers per thread, reused by a step's layers: a tile's pages, its queries or sums of values, and its rows of scores."""
        if (R, width) not in self._scratch:
            threads, W = torch.get_num_threads(), self.tables.shape[1]
            queries, scores = (np.empty((threads, TILE * R, size), np.float32) for size in (width, PAGE * (W + 1)))
            self._scratch[R, width] = np.empty((threads, TILE * W + SPARE), np.int32), queries, scores
        return self._scratch[R, width]

    @cached_property
    def _scratch(self) -> dict[tuple[int, int], tuple[Any, Any, Any]]:
        return {}

    @cached_property
    def items(self) -> tuple[Tensor, Tensor]:
        """Return a GPU's work: [items, 6] int32 of (first query, number of queries, sequence, first position, end position, index of the
        first partial result), and [N, maximum count] int32 with the indices of each query's partial results, padded with -1."""
        tables, sequence, position = (t.numpy() for t in (self.tables, self.sequence, self.position))
        items: list[tuple[int, ...]] = []
        parts: list[list[int]] = [[] for _ in range(len(sequence))]
        slot = 0
        for first in range(0, len(sequence), TILE):
            rows = np.arange(first, min(first + TILE, len(sequence)))
            pages = tables[sequence[rows]]
            alike = (pages == pages[0]).all(0) & (np.arange(pages.shape[1]) * PAGE <= position[rows].min())
            shared = int(len(alike) if alike.all() else alike.argmin()) * PAGE
            alone = len(set(sequence[rows].tolist())) == 1
            stretches = [(first, len(rows), 0, int(position[rows].max()) + 1 if alone else shared)]
            if not alone:
                stretches += [(int(n), 1, shared, int(position[n]) + 1) for n in rows if position[n] >= shared]
            for start, count, begin, end in stretches:
                for cut in range(begin, end, SPLIT):
                    items.append((start, count, int(sequence[start]), cut, min(cut + SPLIT, end), slot))
                    for n in range(start, start + count):
                        parts[n].append(slot + n - start)
                    slot += count
        most = max(map(len, parts), default=0)
        padded = [row + [-1] * (most - len(row)) for row in parts]
        tensors = (torch.tensor(items).view(-1, 6), torch.tensor(padded).view(len(parts), most))
        return tensors[0].to(self.device, torch.int32), tensors[1].to(self.device, torch.int32)


def new_pages(count: int, G: int, K: int, V: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return pages of zeros for keys [P, S, G, K] and values [P, S, G, V], laid out for the device's implementation.

    On a CPU, pages are at least fp32, and take memory only once they are written. There, a head's pages are contiguous: sequences take
    their next pages at about the same time, so a step reads nearly contiguous memory per head."""
    if torch.device(device).type != "cpu":
        return tuple(torch.zeros(count, PAGE, G, width, dtype=dtype, device=device) for width in (K, V))  # type: ignore[return-value]
    kind = np.float64 if dtype == torch.float64 else np.float32
    keys = torch.from_numpy(np.zeros((G, count, K, PAGE), kind)).permute(1, 3, 0, 2)
    return keys, torch.from_numpy(np.zeros((G, count, PAGE, -(-V // PAGE) * PAGE), kind)).permute(1, 2, 0, 3)[..., :V]


def paged_attention_reference(q_NHK: Tensor, k_PSGK: Tensor, v_PSGV: Tensor, plan: PagedPlan, window: int | None = None) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v over the tokens that each query sees, computed one query at a time: [N, H, V]."""
    R = q_NHK.shape[1] // k_PSGK.shape[2]
    out = []
    for q_HK, sequence, position in zip(q_NHK, plan.sequence.tolist(), plan.position.tolist(), strict=True):
        pages = plan.tables[sequence, : position // PAGE + 1].long().to(q_HK.device)
        seen = slice(max(0, position + 1 - (window or position + 1)), position + 1)
        k_nHK, v_nHV = (x[pages].flatten(0, 1)[seen].repeat_interleave(R, 1) for x in (k_PSGK, v_PSGV))
        p_Hn = (torch.einsum("hk,nhk->hn", q_HK, k_nHK) / math.sqrt(q_HK.shape[-1])).softmax(-1)
        out.append(torch.einsum("hn,nhv->hv", p_Hn, v_nHV))
    return torch.stack(out)


# --- CPU -------------------------------------------------------------------------------------------------


@strict_jit
def _stretches(tables: Any, W: int, sequence: Any, position: Any, stretches: Any, begins: Any) -> None:
    """Fill `stretches`, and `begins` with each tile's first stretch (see `PagedPlan.arrays`)."""
    common, stack, count = np.empty(TILE, np.int32), np.empty((2 * TILE, 3), np.int32), 0
    for tile in range(len(begins) - 1):
        begins[tile], first = count, tile * TILE
        last = min(first + TILE, len(sequence))
        for n in range(first, last - 1):  # count the first pages that two neighbouring queries share
            a, b, j = W * sequence[n], W * sequence[n + 1], 0
            most = min(position[n], position[n + 1]) // PAGE + 1
            while j < most and (a == b or tables[a + j] == tables[b + j]):
                j = j + 1 if a != b else most
            common[n - first] = j
        common[last - 1 - first] = position[last - 1] // PAGE + 1
        stack[0, 0], stack[0, 1], stack[0, 2], left = first, last, 0, 1
        while left:
            left -= 1
            a, b, begin = stack[left]
            end = position[a] // PAGE + 1
            for n in range(a, b - 1):
                end = min(end, common[n - first])
            if end > begin:
                stretches[count, 0], stretches[count, 1], stretches[count, 2], stretches[count, 3] = a, b, begin, end
                count += 1
            n = a
            for stop in range(a + 1, b + 1):
                if b > a + 1 and (stop == b or common[stop - 1 - first] == end):
                    stack[left, 0], stack[left, 1], stack[left, 2] = n, stop, end
                    n, left = stop, left + 1
    begins[len(begins) - 1] = count


@strict_jit
def _scores(M: int, K: int, a: Address, table: Address, length: int, pages: Address, out: Address, wide: int) -> None:
    """Write the dot products of M queries with the keys of a table's pages to `out`, whose rows are `wide` bytes apart."""
    size, j = 4 * K * PAGE, 0
    many = tiles.TALL_WIDTH if M >= tiles.TALL else tiles.FEW_WIDTH
    while j < length:
        at, to = table + 4 * j, out + 4 * PAGE * j
        if length - j < many:
            tiles.scores_one(M, K, a, 4 * K, at, pages, size, to, wide)
            j += 1
        elif M >= tiles.TALL:
            tiles.scores_tall(M, K, a, 4 * K, at, pages, size, to, wide)
            j += tiles.TALL_WIDTH
        else:
            tiles.scores_few(M, K, a, 4 * K, at, pages, size, to, wide)
            j += tiles.FEW_WIDTH


@strict_jit
def _values(M: int, lanes: int, p: Address, wide: int, table: Address, length: int, pages: Address, out: Address) -> None:
    """Add the values of a table's pages, weighted by M rows of p (`wide` bytes apart), to M sums at `out`."""
    size, many = 4 * PAGE * lanes, PAGE * (tiles.TALL_WIDTH if M >= tiles.TALL else tiles.FEW_WIDTH)
    for j in range(0, length, KEPT):
        at, some, row, d = table + 4 * j, min(KEPT, length - j), p + 4 * PAGE * j, 0
        while d < lanes:
            b, to = pages + 4 * d, out + 4 * d
            if lanes - d < many:
                tiles.values_one(M, some, row, wide, at, b, size, 4 * lanes, to, 4 * lanes)
                d += PAGE
            elif M >= tiles.TALL:
                tiles.values_tall(M, some, row, wide, at, b, size, 4 * lanes, to, 4 * lanes)
                d += PAGE * tiles.TALL_WIDTH
            else:
                tiles.values_few(M, some, row, wide, at, b, size, 4 * lanes, to, 4 * lanes)
                d += PAGE * tiles.FEW_WIDTH


@strict_jit
def _powers(row: Address, low: int, begin: int, length: int, scale: float) -> Any:
    """Replace scores `begin` to `length` - 1 at address `row` by e^((score - largest) scale), and the other scores from `low` to the last
    page's end by 0. Return the sum of the exponentials."""
    none, zero, whole = np.float32(-np.inf), np.float32(0), length // PAGE * PAGE
    inner, tops = (begin + PAGE - 1) // PAGE * PAGE, fill(none)  # a query may see only parts of the first and the last page
    for t in range(begin // PAGE * PAGE, inner, PAGE):
        tops = between(load(row + 4 * t), begin - t, length - t, none)
    for t in range(inner, whole, PAGE):
        tops = higher(load(row + 4 * t), tops)
    if whole >= inner and whole < length:
        tops = higher(between(load(row + 4 * whole), 0, length - whole, none), tops)
    steep, sums = fill(np.float32(scale)), fill(zero)
    base = minus(fill(zero), times(fill(peak(tops)), steep))
    for t in range(low, begin // PAGE * PAGE, PAGE):
        store(row + 4 * t, fill(zero))
    for t in range(begin // PAGE * PAGE, inner, PAGE):
        sums = between(exp(fma(load(row + 4 * t), steep, base)), begin - t, length - t, zero)
        store(row + 4 * t, sums)
    for t in range(inner, whole, PAGE):
        e = exp(fma(load(row + 4 * t), steep, base))
        store(row + 4 * t, e)
        sums = add(sums, e)
    if whole >= inner and whole < length:
        e = between(exp(fma(load(row + 4 * whole), steep, base)), 0, length - whole, zero)
        store(row + 4 * whole, e)
        sums = add(sums, e)
    return total(sums)


@strict_jit
def attend_head(
    g: int, tile: int, shape: Shape, q: Address, k: Address, v: Address, plan: Arrays, window: int, scale: float,
    walk: Any, packed: Address, scores: Address, wide: int, out: Address,
) -> None:  # fmt: skip
    """Compute attention for a tile of queries of key-value head g: scores by page, exponentials by row, sums of values by page.

    `plan`: `PagedPlan.arrays`. `k`, `v`: the head's pages; `packed`: buffer for the tile's queries, then for its sums of values; `scores`:
    rows of `wide` bytes. `walk` gets the tile's pages in reading order. Every page is multiplied whole; a token that a query does not see
    counts as an exact zero. So the order of operations for a query depends only on its position and its sequence."""
    (G, R, K, V), (tables, W, sequence, position, stretches, begins) = shape, plan
    first, last = tile * TILE, min(tile * TILE + TILE, len(sequence))
    heads, lanes, lowest = R * K, (V + LANES - 1) // LANES * LANES, position[first] + 1
    for n in range(first, last):
        lowest = min(lowest, max(0, position[n] + 1 - window))
        for c in range(0, heads, LANES):
            store_first(packed + 4 * ((n - first) * heads + c), load_first(q + 4 * ((n * G + g) * heads + c), heads - c), heads - c)
    lowest, count = lowest // PAGE, 0  # no query sees a page before page `lowest`
    for s in range(begins[tile], begins[tile + 1]):
        for j in range(max(stretches[s, 2], lowest), stretches[s, 3]):
            walk[count] = tables[W * sequence[stretches[s, 0]] + j]
            count += 1
    walk[count : count + SPARE] = walk[0]
    for turn in range(2):
        count = 0
        for s in range(begins[tile], begins[tile + 1]):
            a, b, begin = stretches[s, 0], stretches[s, 1], max(stretches[s, 2], lowest)
            M, length, table = (b - a) * R, stretches[s, 3] - begin, walk.ctypes.data + 4 * count
            row = scores + (a - first) * R * wide + 4 * PAGE * begin
            if length <= 0:
                continue
            if turn == 0:
                _scores(M, K, packed + 4 * (a - first) * heads, table, length, k, row, wide)
            else:
                _values(M, lanes, row, wide, table, length, v, packed + 4 * (a - first) * R * lanes)
            count += length
        for m in range((last - first) * R):
            n = first + m // R
            if turn == 0:
                begin = max(0, position[n] + 1 - window)
                whole = _powers(scores + m * wide, lowest * PAGE, begin, position[n] + 1, scale)
                store(scores + (m + 1) * wide - 4 * LANES, fill(np.float32(1) / whole))
                for d in range(0, V, LANES):  # the queries are no longer needed: their memory takes the sums
                    store(packed + 4 * (m * lanes + d), fill(np.float32(0)))
            else:
                to = out + 4 * ((n * G + g) * R + m % R) * V
                share = load(scores + (m + 1) * wide - 4 * LANES)
                for d in range(0, V, LANES):
                    store_first(to + 4 * d, times(load(packed + 4 * (m * lanes + d)), share), V - d)


@strict_jit
def _attend_loop(
    part: int, start: int, stop: int, shape: Shape, q: Address, pages: tuple[Address, Address, int, int], plan: Arrays, window: int,
    scale: float, room: Arrays, out: Address,
) -> None:  # fmt: skip
    """Compute items start .. stop - 1: an item is one key-value head for one tile of queries. `pages`: see `places`."""
    (walk, packed, scores), (k, v, k_head, v_head), G = room, pages, shape[0]
    wide, rows, queries = 4 * scores.shape[2], scores[part].ctypes.data, packed[part].ctypes.data
    for item in range(start, stop):
        g, keys, values = item % G, k + item % G * k_head, v + item % G * v_head
        attend_head(g, item // G, shape, q, keys, values, plan, window, scale, walk[part], queries, rows, wide, out)


def paged_for_loops(k_PSGK: Tensor, v_PSGV: Tensor) -> bool:
    """True if the numba loops can read these pages: fp32 on CPU, in the layout of `new_pages` (value rows padded to a multiple of 16)."""
    (P, S, _, K), lanes = k_PSGK.shape, v_PSGV.stride(1)
    ours = k_PSGK.stride() == (K * S, 1, P * K * S, S) and v_PSGV.stride() == (S * lanes, lanes, P * S * lanes, 1)
    ours &= lanes == -(-v_PSGV.shape[3] // PAGE) * PAGE
    return ours and k_PSGK.dtype == v_PSGV.dtype == torch.float32 and k_PSGK.is_cpu and has_numba()


def places(k_PSGK: Tensor, v_PSGV: Tensor) -> tuple[Address, Address, int, int]:
    """Return (address of the key pages, address of the value pages, bytes from head to head in the key pages, and in the value pages)."""
    return k_PSGK.data_ptr(), v_PSGV.data_ptr(), 4 * k_PSGK.stride(2), 4 * v_PSGV.stride(2)


def _attend(q_NHK: Tensor, k_PSGK: Tensor, v_PSGV: Tensor, plan: PagedPlan, window: int, scale: float) -> Tensor:
    N, H, K = q_NHK.shape
    G, V = v_PSGV.shape[2:]
    if not paged_for_loops(k_PSGK, v_PSGV):
        return _attend_portable(q_NHK, k_PSGK, v_PSGV, plan, window, scale)
    q, out = q_NHK.to(torch.float32).contiguous(), torch.empty(N, H, V)
    shape, room = (G, H // G, K, V), plan.scratch(H // G, max(K, v_PSGV.stride(1)))
    arguments = (shape, q.data_ptr(), places(k_PSGK, v_PSGV), plan.arrays, window or 1 << 30, scale, room, out.data_ptr())
    run_rows(_attend_loop, -(-N // TILE) * G, TILE * H // G * K * PAGE * plan.tables.shape[1], *arguments)
    return out.to(q_NHK.dtype)


def _attend_portable(q_NHK: Tensor, k_PSGK: Tensor, v_PSGV: Tensor, plan: PagedPlan, window: int, scale: float) -> Tensor:
    """Compute attention with torch operators, one sequence at a time."""
    _, H, K = q_NHK.shape
    G, V = v_PSGV.shape[2:]
    high = wide(q_NHK.dtype)
    out_NHV = q_NHK.new_empty(len(q_NHK), H, V)
    for number in plan.sequence.unique().tolist():
        rows = torch.nonzero(plan.sequence == number)[:, 0].to(q_NHK.device)
        position = plan.position[rows.cpu()].to(q_NHK.device)
        pages = plan.tables[number, : int(position.max()) // PAGE + 1].long().to(q_NHK.device)
        k_GKL = k_PSGK[pages].flatten(0, 1).permute(1, 2, 0).to(high)
        v_GLV = v_PSGV[pages].flatten(0, 1).transpose(0, 1).to(high)
        q_GmK = (q_NHK[rows].to(high) * scale).view(len(rows), G, -1, K).transpose(0, 1).reshape(G, -1, K)
        scores = torch.bmm(q_GmK, k_GKL).view(G, len(rows), -1, k_GKL.shape[2])
        key = torch.arange(k_GKL.shape[2], device=rows.device)
        hidden = key > position[:, None]
        if window:
            hidden |= key <= position[:, None] - window
        p = scores.masked_fill_(hidden[:, None], -math.inf).softmax(-1).flatten(1, 2)
        out_NHV[rows] = torch.bmm(p, v_GLV).view(G, len(rows), -1, V).transpose(0, 1).reshape(len(rows), H, V).to(out_NHV.dtype)
    return out_NHV


# --- façade ----------------------------------------------------------------------------------------------


def paged_attention(
    q_NHK: Tensor, k_PSGK: Tensor, v_PSGV: Tensor, plan: PagedPlan, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Return softmax(scale q k^T) v over each query's visible keys, [N, H, V] in q's dtype, without autograd. `scale` None: 1 / sqrt(K).

    Pages come from `new_pages`; on a CPU, slower torch operators read any other layout (such as values inside keys). With a `window` a
    query sees the last `window` tokens of its sequence up to and including itself. On a CPU, all values in a plan's pages must be finite.
    Raise ValueError if shapes or the plan do not fit."""
    (N, H, K), (S, G) = q_NHK.shape, k_PSGK.shape[1:3]
    if k_PSGK.shape[:3] != v_PSGV.shape[:3] or k_PSGK.shape[3] != K or H % G or len(plan.sequence) != N or S != PAGE:
        raise ValueError(
            f"q {list(q_NHK.shape)}, pages {list(k_PSGK.shape)}, {list(v_PSGV.shape)}, a plan of {len(plan.sequence)}: they do not fit"
        )
    if not N:
        return q_NHK.new_empty(0, H, v_PSGV.shape[3])
    scale = K**-0.5 if scale is None else scale
    with torch.cuda.device_of(q_NHK):
        if not uses_triton(q_NHK):
            return _attend(q_NHK, k_PSGK, v_PSGV, plan, window or 0, scale)
        tables, positions = plan.tables.to(q_NHK.device), plan.position.to(q_NHK.device)
        return blocks.attend(q_NHK, k_PSGK, v_PSGV, tables, positions, *plan.items, TILE, window or 0, scale)
