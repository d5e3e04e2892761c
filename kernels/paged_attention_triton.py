"""Attention over a paged KV cache on a GPU; `paged_attention.py` explains the names.

A program computes a partial softmax for one item of a plan, one key-value head and some of the item's queries. A query's partial results
are merged by their log-sum-exps (FlashDecoding)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from puna.kernels.cpu.lazy_jit import triton_jit

if TYPE_CHECKING:
    import triton.language as tl

ROWS, TOKENS = 16, 64  # rows (pairs of query and head) and keys that a program multiplies at once
LOG2_E = math.log2(math.e)


@triton_jit
def _rows(x, column, inside, width):  # type: ignore[no-untyped-def]
    """Return the rows of `width` elements at addresses x; zero where `inside` is false and in columns beyond `width`."""
    return tl.load(x[:, None] + column[None, :], inside[:, None] & (column[None, :] < width), 0.0)


@triton_jit
def softmax_step(s, peak, total):  # type: ignore[no-untyped-def]
    """Add scores (base 2) of more keys to a running softmax; return (scores' exponentials, the old sum's decay, new sum, new peak)."""
    higher = tl.maximum(peak, tl.max(s, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # 0 where a query has seen no token so far
    p = tl.exp2(s - base[:, None])
    decay = tl.exp2(peak - base)
    return p, decay, total * decay + tl.sum(p, 1), higher


@triton_jit
def _piece_kernel(  # type: ignore[no-untyped-def]
    q, k, v, items, tables, positions, partial, logs, scale, window, width,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head,
    S: tl.constexpr, H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the partial results of M rows, (query, query head) pairs of one item and key-value head. With a TAIL, the first V elements of
    a key are also its value, and are read once; TAIL is the block size of the other K - V elements."""
    item = items + 6 * tl.program_id(0)
    group = tl.program_id(1)
    first = tl.load(item)
    count = tl.load(item + 1)
    tables += tl.load(item + 2).to(tl.int64) * width
    start = tl.load(item + 3)
    row = tl.program_id(2) * M + tl.arange(0, M)
    inside = row < count * R
    stop = tl.where(tl.program_id(2) * M < count * R, tl.load(item + 4), start)
    slot = tl.load(item + 5)
    query = row // R
    head = group * R + row % R
    column = tl.arange(0, BLOCK)
    wide = tl.arange(0, BLOCK_V)
    q += (first + query).to(tl.int64) * q_token + head * q_head
    FIRST: tl.constexpr = V if TAIL else K
    q_MK = _rows(q, column, inside, FIRST)
    if TAIL:
        tail = tl.arange(0, TAIL)
        q_MT = _rows(q + V, tail, inside, K - V)
    position = tl.load(positions + first + query, inside, 0)
    k += group * k_head
    v += group * v_head
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_V], tl.float32)
    for begin in range(start, stop, N):
        n = begin + tl.arange(0, N)
        page = tl.load(tables + n // S, n < stop, 0).to(tl.int64)
        key = k + page * k_page + (n % S) * k_token
        k_NK = _rows(key, column, n < stop, FIRST)
        s = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION)
        if TAIL:
            s = tl.dot(q_MT, tl.trans(_rows(key + V, tail, n < stop, K - V)), s, input_precision=PRECISION)
        s *= scale
        seen = (n[None, :] <= position[:, None]) & (n[None, :] > position[:, None] - window) & (n < stop)[None, :]
        s = tl.where(seen, s, float("-inf"))
        p, decay, total, peak = softmax_step(s, peak, total)
        if TAIL:  # noqa: SIM108 - the branch that is not taken is not compiled
            v_NV = k_NK
        else:
            v_NV = _rows(v + page * v_page + (n % S) * v_token, wide, n < stop, V)
        acc = tl.dot(p.to(v_NV.dtype), v_NV, acc * decay[:, None], input_precision=PRECISION)
    place = (slot + query).to(tl.int64) * H + head
    whole = tl.where(total == 0.0, 1.0, total)
    tl.store(partial + place[:, None] * V + wide[None, :], acc / whole[:, None], inside[:, None] & (wide[None, :] < V))
    # If a query sees no token of a piece, the piece gets no weight but a finite logarithm, so that differences are defined.
    tl.store(logs + place, tl.where(total == 0.0, -1e30, peak + tl.log2(whole)), inside)


@triton_jit
def merge_kernel(partial, logs, parts, out, most, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Merge the partial results of one query and head, weighted by their shares of the softmax."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(most):
        slot = tl.load(parts + query * most + i).to(tl.int64)
        log = tl.load(logs + slot * H + head, slot >= 0, float("-inf"))
        piece = tl.load(partial + (slot * H + head) * K + column, (slot >= 0) & (column < K), 0.0)
        higher = tl.maximum(peak, log)  # finite, since every query has a first piece
        share = tl.exp2(log - higher)
        decay = tl.exp2(peak - higher)
        total = total * decay + share
        acc = acc * decay + piece * share
        peak = higher
    tl.store(out + (query * H + head) * K + column, (acc / total).to(out.dtype.element_ty), column < K)


def tokens(block: int, size: int) -> int:
    """Return the number of keys that a program multiplies at once (16 to `TOKENS`), such that two blocks of keys fit into shared memory."""
    return max(16, min(TOKENS, (64 << 10) // (block * size)))


def attend(
    q_NHK: Tensor, k_PSGK: Tensor, v_PSGV: Tensor, tables: Tensor, positions: Tensor, items: Tensor, parts: Tensor, most: int, window: int,
    scale: float,
) -> Tensor:
    """Return attention [N, H, V] in q's dtype. `items`, `parts`: `PagedPlan.items`; `most`: maximum number of queries of an item."""
    q = q_NHK.contiguous()
    (N, H, K), (S, G, V) = q.shape, v_PSGV.shape[1:]
    R = H // G
    k, v = (x.to(q.dtype) if x.stride(3) == 1 else x.to(q.dtype).contiguous() for x in (k_PSGK, v_PSGV))
    slots = N * parts.shape[1]  # an upper bound on the number of partial results, known without waiting for the device
    partial = torch.empty(slots, H, V, dtype=torch.float32, device=q.device)
    logs = torch.empty(slots, H, dtype=torch.float32, device=q.device)
    out = torch.empty(N, H, V, dtype=q.dtype, device=q.device)
    latent = V < K and v.data_ptr() == k.data_ptr() and v.stride() == k.stride()
    block, block_v, tail = (max(16, 1 << (width - 1).bit_length()) for width in (V if latent else K, V, K - V if latent else 1))
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    _piece_kernel[(len(items), G, -(-min(N, most) * R // ROWS))](
        q, k, v, items, tables, positions, partial, logs, scale * LOG2_E, window or 1 << 30, tables.shape[1],
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        S=S, H=H, R=R, K=K, V=V, BLOCK=block, BLOCK_V=block_v, TAIL=tail if latent else 0, M=ROWS,
        N=tokens(block, q.element_size()), PRECISION="ieee" if exact else "tf32",
        num_warps=4 if block <= 256 else 8, num_stages=3 if block <= 256 else 2,
    )  # fmt: skip
    merge_kernel[(N, H)](partial, logs, parts, out, parts.shape[1], H=H, K=V, BLOCK=block_v, num_warps=1)
    return out
