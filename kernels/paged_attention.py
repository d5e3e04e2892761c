"""Attention of new tokens over keys and values in pages: prefill, decoding and shared prefixes in one ragged step.

Shapes: N queries, H query heads, G key-value heads, R = H / G, K width of queries and keys, V width of values;
P pages of S tokens, B sequences, W pages of the longest.

A query stands at a position of its sequence and sees every token before it and itself. A sequence is a list of
pages in the order of its path, so that page j holds the positions from j S on. Neighbouring queries that have the
same page at the same place read it once (cascade inference): answers to one prompt, the tokens of one chunk, the
branches of a tree. On a CPU the loop goes through all of a query's pages in order, so a query's result has the same
bits however its pages lie, whoever shares them and whatever else is in the step. On a GPU long stretches are cut,
every piece gives a partial softmax, and a query's pieces are merged by their log-sum-exps (FlashDecoding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from puna.kernels import paged_attention_triton as blocks
from puna.kernels.lazy import has_numba, numba_jit
from puna.kernels.loops import run_rows
from puna.kernels.operators import uses_triton, wide

if has_numba():
    from puna.kernels.vector_products import TILE as PRODUCT_TILE
    from puna.kernels.vector_products import weighted_1, weighted_2, weighted_4, weighted_8
    from puna.kernels.vectors import (
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
        over,
        peak,
        store,
        store_first,
        times,
        total,
    )

    TALL = 8 if PRODUCT_TILE[0] > 2 else 4  # rows whose sums registers hold at once
    weighted_tall = weighted_8 if TALL > 4 else weighted_4

PAGE = 16  # tokens of a page: one wide vector of scores
TILE = 16  # neighbouring queries that are computed together
AHEAD = 4  # queries whose page is asked for before it is multiplied
SPLIT = 1024  # tokens of one piece on a GPU


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """Which pages a step's queries see, on CPU.

    tables    [B, W] int32   each sequence's pages, in order
    sequence  [N] int32      each query's sequence; neighbours share what they can where sequences that share pages stand side by side
    position  [N] int32      how many tokens of its path stand before a query
    """

    tables: Tensor
    sequence: Tensor
    position: Tensor
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        given = (self.tables, self.sequence, self.position)
        if any(t.dtype != torch.int32 or t.device.type != "cpu" for t in given) or self.sequence.shape != self.position.shape:
            raise ValueError("a plan has int32 tensors on CPU, with one sequence and one position per query")
        if len(self.sequence) and not (int(self.position.min()) >= 0 and int(self.position.max()) < PAGE * self.tables.shape[1]):
            raise ValueError(f"positions lie in 0 to {PAGE * self.tables.shape[1] - 1}, where the tables have pages of {PAGE}")

    @cached_property
    def arrays(self) -> tuple[Any, Any, Any]:
        """The tables, sequences and positions as arrays."""
        return self.tables.numpy(), self.sequence.numpy(), self.position.numpy()

    def scratch(self, R: int, width: int) -> tuple[Any, Any]:
        """Room for a tile's queries and scores on each thread; the layers of a step share it."""
        if (R, width) not in self._scratch:
            threads, tokens = torch.get_num_threads(), PAGE * self.tables.shape[1]
            queries, scores = (np.empty((threads, TILE * R, size), np.float32) for size in (width, tokens))
            self._scratch[R, width] = queries, scores
        return self._scratch[R, width]

    @cached_property
    def _scratch(self) -> dict[tuple[int, int], tuple[Any, Any]]:
        return {}

    @cached_property
    def items(self) -> tuple[Tensor, Tensor]:
        """Work of a GPU: [items, 6] int32 of (first query, queries, sequence, first position, end, first partial result), and
        [N, most] int32 of each query's partial results, -1 where it has fewer."""
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
        found = (torch.tensor(items).view(-1, 6), torch.tensor(padded).view(len(parts), most))
        return found[0].to(self.device, torch.int32), found[1].to(self.device, torch.int32)


def new_pages(count: int, G: int, K: int, V: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Pages of zeros for keys [P, S, G, K] and values [P, S, G, V], laid out as the device's version reads them.

    On a CPU they take memory as they are first written, and are fp32 at least. A head's pages lie together: sequences take their
    next page at about the same time, so that what a step reads of one head is nearly one stretch.
    """
    if torch.device(device).type != "cpu":
        return tuple(torch.zeros(count, PAGE, G, width, dtype=dtype, device=device) for width in (K, V))  # type: ignore[return-value]
    kind = np.float64 if dtype == torch.float64 else np.float32
    keys = torch.from_numpy(np.zeros((G, count, K, PAGE), kind)).permute(1, 3, 0, 2)
    return keys, torch.from_numpy(np.zeros((G, count, PAGE, -(-V // PAGE) * PAGE), kind)).permute(1, 2, 0, 3)[..., :V]


def paged_attention_reference(q_NHK: Tensor, k_PSGK: Tensor, v_PSGV: Tensor, plan: PagedPlan, window: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(K)) v over the tokens of its sequence that a query sees, one query at a time. Returns [N, H, V]."""
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


@numba_jit
def _weigh(M: Any, C: Any, a: Any, a_row: Any, b: Any, b_row: Any, out: Any, out_row: Any, more: Any, ahead: Any) -> None:
    """out[m, 0:16] = sum over c of a[m, c] b[c, 0:16], or with `more` added to what is there: by address and stride in bytes."""
    m = 0
    while m <= M - TALL:
        weighted_tall(C, a + m * a_row, a_row, b, b_row, out + m * out_row, out_row, more, ahead)
        m += TALL
    if m <= M - 4:
        weighted_4(C, a + m * a_row, a_row, b, b_row, out + m * out_row, out_row, more, ahead)
        m += 4
    if m <= M - 2:
        weighted_2(C, a + m * a_row, a_row, b, b_row, out + m * out_row, out_row, more, ahead)
        m += 2
    if m < M:
        weighted_1(C, a + m * a_row, a_row, b, b_row, out + m * out_row, out_row, more, ahead)


@numba_jit
def _softmax(row: Any, low: Any, begin: Any, length: Any, scale: Any) -> None:
    """Softmax of the scores begin .. length - 1 at address `row`; zeros in the rest of their pages, from `low` on."""
    none = np.float32(-np.inf)
    high = (length + PAGE - 1) // PAGE * PAGE
    tops = fill(none)
    for t in range(low, high, PAGE):
        tops = higher(between(load(row + 4 * t), begin - t, length - t, none), tops)
    steep = fill(np.float32(scale))
    base, sums = minus(fill(np.float32(0)), times(fill(peak(tops)), steep)), fill(np.float32(0))
    for t in range(low, high, PAGE):
        e = between(exp(fma(load(row + 4 * t), steep, base)), begin - t, length - t, np.float32(0))
        store(row + 4 * t, e)
        sums = add(sums, e)
    share = over(fill(np.float32(1)), fill(total(sums)))
    for t in range(low, high, PAGE):
        store(row + 4 * t, times(load(row + 4 * t), share))


@numba_jit
def attend_head(
    g: Any, first: Any, last: Any, G: Any, R: Any, K: Any, V: Any, q: Any, k: Any, v: Any,
    tables: Any, sequence: Any, position: Any, window: Any, scale: Any, packed: Any, scores: Any, wide: Any, out: Any,
) -> None:  # fmt: skip
    """Key-value head g, queries first .. last - 1 (at most TILE): scores by page, softmax by row, sums of values by page. By address;
    `k`, `v` are where the head's own pages begin, rows of `scores` are `wide` bytes, `packed` has room for a tile's queries and for
    its sums of values.

    Every page is multiplied whole and in one way; what a query does not see then counts as an exact zero. So the order of
    operations for a query depends on its position and its path alone.
    """
    heads, lanes, most = R * K, (V + LANES - 1) // LANES * LANES, 0
    for n in range(first, last):
        most = max(most, position[n] // PAGE + 1)
        for c in range(0, heads, LANES):
            store_first(packed + 4 * ((n - first) * heads + c), load_first(q + 4 * ((n * G + g) * heads + c), heads - c), heads - c)
    for turn in range(2):
        for j in range(most):
            n = first
            while n < last:
                if j * PAGE > position[n] or (j + 1) * PAGE <= position[n] + 1 - window:
                    n += 1
                    continue
                page, end = np.int64(tables[sequence[n], j]), n + 1
                while (
                    end < last and tables[sequence[end], j] == page
                    and j * PAGE <= position[end] and (j + 1) * PAGE > position[end] + 1 - window
                ):  # fmt: skip
                    end += 1
                row = scores + (n - first) * R * wide + 4 * PAGE * j
                later, at = (n + AHEAD, j) if n + AHEAD < last else (first + n + AHEAD - last, j + 1)  # unless it is shared
                pages = np.int64(tables[sequence[later], at]) - page if later < last and at * PAGE <= position[later] else 0
                if turn == 0:
                    keys, size = k + 4 * page * K * PAGE, 4 * K * PAGE
                    _weigh((end - n) * R, K, packed + 4 * (n - first) * heads, 4 * K, keys, 4 * PAGE, row, wide, False, pages * size)
                else:
                    values, size = v + 4 * page * PAGE * lanes, 4 * PAGE * lanes
                    for d in range(0, V, LANES):
                        to = packed + 4 * ((n - first) * R * lanes + d)
                        _weigh((end - n) * R, PAGE, row, wide, values + 4 * d, 4 * lanes, to, 4 * lanes, True, pages * size)
                n = end
        for m in range((last - first) * R):
            if turn == 0:
                n = first + m // R
                begin = max(0, position[n] + 1 - window)
                _softmax(scores + m * wide, begin // PAGE * PAGE, begin, position[n] + 1, scale)
                for d in range(0, V, LANES):  # the queries have served: their place is for the sums
                    store(packed + 4 * (m * lanes + d), fill(np.float32(0)))
            else:
                to = out + 4 * (((first + m // R) * G + g) * R + m % R) * V
                for d in range(0, V, LANES):
                    store_first(to + 4 * d, load(packed + 4 * (m * lanes + d)), V - d)


@numba_jit
def _attend_loop(
    part: Any, start: Any, stop: Any, queries: Any, G: Any, R: Any, K: Any, V: Any, q: Any, k: Any, v: Any, k_head: Any, v_head: Any,
    tables: Any, sequence: Any, position: Any, window: Any, scale: Any, packed: Any, scores: Any, out: Any,
) -> None:  # fmt: skip
    """Items start .. stop - 1: of each tile of queries each key-value head."""
    wide = 4 * scores.shape[2]
    rows, table = scores[part].ctypes.data, packed[part].ctypes.data
    for item in range(start, stop):
        first, g = item // G * TILE, item % G
        last, keys, values = min(first + TILE, queries), k + g * k_head, v + g * v_head
        attend_head(g, first, last, G, R, K, V, q, keys, values, tables, sequence, position, window, scale, table, rows, wide, out)


def paged_for_loops(k_PSGK: Tensor, v_PSGV: Tensor) -> bool:
    """Whether the loops can read these pages: fp32 of `new_pages`, in which rows of values have a multiple of 16 places."""
    (P, S, _, K), lanes = k_PSGK.shape, v_PSGV.stride(1)
    ours = k_PSGK.stride() == (K * S, 1, P * K * S, S) and v_PSGV.stride() == (S * lanes, lanes, P * S * lanes, 1)
    ours &= lanes == -(-v_PSGV.shape[3] // PAGE) * PAGE
    return ours and k_PSGK.dtype == v_PSGV.dtype == torch.float32 and k_PSGK.is_cpu and has_numba()


def places(k_PSGK: Tensor, v_PSGV: Tensor) -> tuple[int, int, int, int]:
    """Where the loops find pages: addresses of keys and values, and how many bytes the heads of each lie apart."""
    return k_PSGK.data_ptr(), v_PSGV.data_ptr(), 4 * k_PSGK.stride(2), 4 * v_PSGV.stride(2)


def _attend(q_NHK: Tensor, k_PSGK: Tensor, v_PSGV: Tensor, plan: PagedPlan, window: int) -> Tensor:
    N, H, K = q_NHK.shape
    G, V = v_PSGV.shape[2:]
    if not paged_for_loops(k_PSGK, v_PSGV):
        return _attend_portable(q_NHK, k_PSGK, v_PSGV, plan, window)
    q, out = q_NHK.to(torch.float32).contiguous(), torch.empty(N, H, V)
    given = (N, G, H // G, K, V, q.data_ptr(), *places(k_PSGK, v_PSGV), *plan.arrays, window or 1 << 30, K**-0.5)
    scratch = plan.scratch(H // G, max(K, v_PSGV.stride(1)))
    run_rows(_attend_loop, -(-N // TILE) * G, TILE * H // G * K * PAGE * plan.tables.shape[1], *given, *scratch, out.data_ptr())
    return out.to(q_NHK.dtype)


def _attend_portable(q_NHK: Tensor, k_PSGK: Tensor, v_PSGV: Tensor, plan: PagedPlan, window: int) -> Tensor:
    """Torch operators, one sequence at a time."""
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
        q_GmK = (q_NHK[rows].to(high) * K**-0.5).view(len(rows), G, -1, K).transpose(0, 1).reshape(G, -1, K)
        scores = torch.bmm(q_GmK, k_GKL).view(G, len(rows), -1, k_GKL.shape[2])
        key = torch.arange(k_GKL.shape[2], device=rows.device)
        hidden = key > position[:, None]
        if window:
            hidden |= key <= position[:, None] - window
        p = scores.masked_fill_(hidden[:, None], -math.inf).softmax(-1).flatten(1, 2)
        out_NHV[rows] = torch.bmm(p, v_GLV).view(G, len(rows), -1, V).transpose(0, 1).reshape(len(rows), H, V).to(out_NHV.dtype)
    return out_NHV


# --- façade ----------------------------------------------------------------------------------------------


def paged_attention(q_NHK: Tensor, k_PSGK: Tensor, v_PSGV: Tensor, plan: PagedPlan, window: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(K)) v over what each query sees, without autograd. Returns [N, H, V] in q's dtype.

    Pages are those of `new_pages`. With a `window` a query sees the last `window` tokens of its path, itself included. On a
    CPU all that lies in the pages of a plan must be finite, also where nobody looks.
    """
    (N, H, K), (S, G) = q_NHK.shape, k_PSGK.shape[1:3]
    if k_PSGK.shape[:3] != v_PSGV.shape[:3] or k_PSGK.shape[3] != K or H % G or len(plan.sequence) != N or S != PAGE:
        raise ValueError(
            f"q {list(q_NHK.shape)}, pages {list(k_PSGK.shape)}, {list(v_PSGV.shape)}, a plan of {len(plan.sequence)}: they do not fit"
        )
    if not N:
        return q_NHK.new_empty(0, H, v_PSGV.shape[3])
    with torch.cuda.device_of(q_NHK):
        if not uses_triton(q_NHK):
            return _attend(q_NHK, k_PSGK, v_PSGV, plan, window or 0)
        tables, positions = plan.tables.to(q_NHK.device), plan.position.to(q_NHK.device)
        return blocks.attend(q_NHK, k_PSGK, v_PSGV, tables, positions, *plan.items, TILE, window or 0)
