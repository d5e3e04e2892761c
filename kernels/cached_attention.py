"""One new token per sequence against a cache of keys and values, with grouped queries.

Shapes: B sequences, H query heads, G key-value heads, R = H / G, W cached columns, K head width.

On a GPU the columns are cut into pieces that programs of their own work on; the pieces' outputs are merged by their
log-sum-exps (FlashDecoding).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from puna.kernels.lazy import triton_jit
from puna.kernels.operators import operator
from puna.kernels.paged_attention import LOG2_E, merge_kernel

if TYPE_CHECKING:
    import triton.language as tl

PIECE = 512  # columns of one piece
ROWS, COLUMNS = 16, 64  # queries and keys that a program multiplies at once


def cached_attention_reference(q_BHK: Tensor, k_BGWK: Tensor, v_BGWK: Tensor, bias_BW: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias) v over the W columns. Returns [B, H, K]."""
    R = q_BHK.shape[1] // k_BGWK.shape[1]
    k_BHWK, v_BHWK = (x.repeat_interleave(R, dim=1) for x in (k_BGWK, v_BGWK))
    scores_BHW = torch.einsum("bhk,bhwk->bhw", q_BHK, k_BHWK) / math.sqrt(q_BHK.shape[-1])
    return torch.einsum("bhw,bhwk->bhk", (scores_BHW + bias_BW[:, None]).softmax(-1), v_BHWK)


# --- portable --------------------------------------------------------------------------------------------


def _attend(q_BHK: Tensor, k_BGWK: Tensor, v_BGWK: Tensor, bias_BW: Tensor) -> Tensor:
    B, H, K = q_BHK.shape
    G = k_BGWK.shape[1]
    q = (q_BHK * K**-0.5).view(B * G, H // G, K)
    scores = torch.bmm(q, k_BGWK.flatten(0, 1).transpose(1, 2))
    scores.view(B, H, -1).add_(bias_BW[:, None])
    return torch.bmm(torch.softmax(scores, -1, out=scores), v_BGWK.flatten(0, 1)).view(B, H, -1)


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _piece_kernel(  # type: ignore[no-untyped-def]
    q, k, v, bias, partial, logs, columns, scale, q_b, q_h, k_b, k_g, k_w, v_b, v_g, v_w, bias_b,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One sequence, one key-value head, one piece of its columns; the R heads of the group are the rows."""
    sequence = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    piece = tl.program_id(2)
    row = tl.arange(0, M)
    head = group * R + row
    column = tl.arange(0, BLOCK)
    inside = (row < R)[:, None] & (column < K)[None, :]
    q_MK = tl.load(q + sequence * q_b + head[:, None] * q_h + column[None, :], inside, 0.0)
    k += sequence * k_b + group.to(tl.int64) * k_g
    v += sequence * v_b + group.to(tl.int64) * v_g
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK], tl.float32)
    for begin in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, columns), N):
        w = begin + tl.arange(0, N)
        seen = (w < columns)[:, None] & (column < K)[None, :]
        k_NK = tl.load(k + w.to(tl.int64)[:, None] * k_w + column[None, :], seen, 0.0)
        shift = tl.load(bias + sequence * bias_b + w, w < columns, float("-inf")).to(tl.float32) * 1.4426950408889634
        s = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * scale + shift[None, :]
        higher = tl.maximum(peak, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # where no column so far may be looked at
        p = tl.exp2(s - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(p, 1)
        v_NK = tl.load(v + w.to(tl.int64)[:, None] * v_w + column[None, :], seen, 0.0)
        acc = tl.dot(p.to(v_NK.dtype), v_NK, acc * decay[:, None], input_precision=PRECISION)
        peak = higher
    place = (sequence * tl.num_programs(2) + piece) * H + head
    whole = tl.where(total == 0.0, 1.0, total)
    tl.store(partial + place[:, None] * K + column[None, :], acc / whole[:, None], inside)
    # A piece that is not looked at weighs nothing, but its logarithm stays finite: differences with it are defined.
    tl.store(logs + place, tl.where(total == 0.0, -1e30, peak + tl.log2(whole)), row < R)


def _attend_triton(q_BHK: Tensor, k_BGWK: Tensor, v_BGWK: Tensor, bias_BW: Tensor) -> Tensor:
    q, k, v, bias = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHK, k_BGWK, v_BGWK, bias_BW))
    (B, H, K), (G, W) = q.shape, k.shape[1:3]
    R, pieces = H // G, -(-W // PIECE)
    partial = torch.empty(B * pieces, H, K, dtype=torch.float32, device=q.device)
    logs = torch.empty(B * pieces, H, dtype=torch.float32, device=q.device)
    out = torch.empty(B, H, K, dtype=q.dtype, device=q.device)
    block = max(16, 1 << (K - 1).bit_length())
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    _piece_kernel[(B, G, pieces)](
        q, k, v, bias, partial, logs, W, K**-0.5 * LOG2_E, *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], bias.stride(0),
        H=H, R=R, K=K, BLOCK=block, PIECE=PIECE, M=max(ROWS, 1 << (R - 1).bit_length()), N=COLUMNS,
        PRECISION="ieee" if exact else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    parts = torch.arange(B * pieces, dtype=torch.int32, device=q.device)
    merge_kernel[(B, H)](partial, logs, parts, out, pieces, H=H, K=K, BLOCK=block, num_warps=1)
    return out


# --- façade ----------------------------------------------------------------------------------------------


_cached_attention = operator(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor bias) -> Tensor",
    _attend, _attend_triton, lambda q, k, v, bias: q.new_empty(q.shape),
)  # fmt: skip


def cached_attention(q_BHK: Tensor, k_BGWK: Tensor, v_BGWK: Tensor, bias_BW: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias) v over the W columns, without autograd. Returns [B, H, K].

    The keys and values may be slices of a longer cache. `bias_BW` is 0 where sequence b may look and -inf
    where not; each sequence must see at least one column.
    """
    return _cached_attention(q_BHK, k_BGWK, v_BGWK, bias_BW)  # type: ignore[no-any-return]
