"""Attention under the forest mask, with grouped queries: query q sees key k iff k <= q < end[k].

Shapes: T tokens, H query heads, G key-value heads, R = H / G query heads to each, K width of queries and
keys, V width of values; of one tile: n queries, m keys.

On CPU, queries are cut into tiles of consecutive rows; a tile's keys are those any of its rows sees. Keys that
no row sees (another document, a sibling's answer) are never touched, and the keys of a shared prompt stand in
memory once. The keys of one tile have one softmax, so tiles are independent, and the backward computes a
tile's softmax again instead of keeping it.

On a GPU, blocks of queries visit the blocks of keys that they see with a running softmax (FlashAttention-2, Dao
2023), first those that need no mask. The backward computes dq by blocks of queries, dk and dv by blocks of
keys: each is written once, so that the sum's order is fixed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puna.kernels.configurations import Configuration, capability, configuration
from puna.kernels.forest_mask import ForestMask, Tile, unpack_tiles
from puna.kernels.lazy import triton_jit
from puna.kernels.operators import differentiable, operator, uses_triton, wide

if TYPE_CHECKING:
    import triton.language as tl

__all__ = ["ForestMask", "Tile", "attention", "attention_reference"]

LOG2_E = math.log2(math.e)  # exp2 is the GPU's own instruction: scores are kept in units of ln 2


def attention_reference(q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, mask: ForestMask) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask) v with a dense mask, in the inputs' dtype. Returns [T, H, V]."""
    R = q_THK.shape[1] // k_TGK.shape[1]
    k_THK, v_THV = (x.repeat_interleave(R, dim=1) for x in (k_TGK, v_TGV))
    scores_HTT = torch.einsum("qhk,shk->hqs", q_THK, k_THK) / math.sqrt(q_THK.shape[-1])
    scores_HTT = scores_HTT.masked_fill(~mask.dense(), -math.inf)
    return torch.einsum("hqs,shv->qhv", scores_HTT.softmax(-1), v_THV)


# --- portable: tiles -------------------------------------------------------------------------------------


def _stack(x_nHK: Tensor, G: int) -> Tensor:
    """[n, H, K] -> [G, n R, K]: the R heads of a group become rows of one matrix."""
    n, H, K = x_nHK.shape
    return x_nHK.reshape(n, G, H // G, K).transpose(0, 1).reshape(G, n * (H // G), K)


def _unstack(x_GmK: Tensor, n: int) -> Tensor:
    """The inverse of `_stack`: [G, n R, K] -> [n, H, K]."""
    G, _, K = x_GmK.shape
    return x_GmK.view(G, n, -1, K).transpose(0, 1).reshape(n, -1, K)


def _probabilities(q_GnK: Tensor, k_GmK: Tensor, bias: Tensor | None, n: int) -> Tensor:
    """Softmax of one tile, [G, n R, m], from queries already scaled."""
    scores = torch.bmm(q_GnK, k_GmK.transpose(1, 2))
    if bias is not None:
        scores.view(len(scores), n, -1, scores.shape[-1])[..., -bias.shape[1] :] += bias[:, None, :]
    return torch.softmax(scores, -1, out=scores)


def _accumulate(total_TGK: Tensor, keys: slice | Tensor, part_GmK: Tensor) -> None:
    part = part_GmK.transpose(0, 1)
    if isinstance(keys, slice):
        total_TGK[keys] += part
    else:
        total_TGK.index_add_(0, keys, part)


def _forward(q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, layout: list[Tensor], window: int) -> tuple[Tensor, Tensor]:
    dtype = q_THK.dtype
    q_THK, k_TGK, v_TGV = (x.to(wide(dtype)) for x in (q_THK, k_TGK, v_TGV))
    T, H, K = q_THK.shape
    G = k_TGK.shape[1]
    out_THV = q_THK.new_empty(T, H, v_TGV.shape[2])
    for tile in unpack_tiles(layout):
        n = tile.rows.stop - tile.rows.start
        k, v = k_TGK[tile.keys].transpose(0, 1), v_TGV[tile.keys].transpose(0, 1)
        p = _probabilities(_stack(q_THK[tile.rows] * K**-0.5, G), k, tile.bias, n)
        out_THV[tile.rows] = _unstack(torch.bmm(p, v), n)
    return out_THV.to(dtype), q_THK.new_empty(0)


def _backward(
    grad_THV: Tensor, q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, out_THV: Tensor, lse: Tensor, layout: list[Tensor], window: int
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = q_THK.dtype
    grad_THV, q_THK, k_TGK, v_TGV, out_THV = (x.to(wide(dtype)) for x in (grad_THV, q_THK, k_TGK, v_TGV, out_THV))
    G, scale = k_TGK.shape[1], q_THK.shape[-1] ** -0.5
    dq_THK = q_THK.new_empty(q_THK.shape)
    dk_TGK, dv_TGV = (x.new_zeros(x.shape) for x in (k_TGK, v_TGV))
    for tile in unpack_tiles(layout):
        rows, n = tile.rows, tile.rows.stop - tile.rows.start
        k, v = k_TGK[tile.keys].transpose(0, 1), v_TGV[tile.keys].transpose(0, 1)
        q, g = _stack(q_THK[rows] * scale, G), _stack(grad_THV[rows], G)
        p = _probabilities(q, k, tile.bias, n)
        _accumulate(dv_TGV, tile.keys, torch.bmm(p.transpose(1, 2), g))
        # d scores = p (dp - sum(p dp)), and sum(p dp) over keys is grad . out (FlashAttention, 3.1).
        delta = _stack((grad_THV[rows] * out_THV[rows]).sum(-1, keepdim=True), G)
        ds = torch.bmm(g, v.transpose(1, 2)).sub_(delta).mul_(p)
        dq_THK[rows] = _unstack(torch.bmm(ds, k).mul_(scale), n)
        _accumulate(dk_TGK, tile.keys, torch.bmm(ds.transpose(1, 2), q))
    return dq_THK.to(dtype), dk_TGK.to(dtype), dv_TGV.to(dtype)


# --- Triton: blocks --------------------------------------------------------------------------------------


@triton_jit
def _rows(pointer, first, stride, T, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INSIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[COUNT, BLOCK] of one head from row `first`; zero beyond the width, and unless INSIDE beyond row T."""
    local = tl.arange(0, COUNT)
    column = tl.arange(0, BLOCK)
    at = pointer + first.to(tl.int64) * stride + local[:, None] * stride + column[None, :]
    if INSIDE:
        if WIDTH == BLOCK:
            return tl.load(at)
        else:
            return tl.load(at, column[None, :] < WIDTH, 0.0)
    else:
        return tl.load(at, (first + local[:, None] < T) & (column[None, :] < WIDTH), 0.0)


@triton_jit
def _visible(first_q, first_k, end, depths, T, window, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """[M, N]: which queries from `first_q` see which keys from `first_k`."""
    q = first_q + tl.arange(0, M)
    k = first_k + tl.arange(0, N)
    last = tl.load(end + k, k < T, 0)
    seen = (k[None, :] <= q[:, None]) & (q[:, None] < last[None, :])
    if WINDOW:
        far = tl.load(depths + q, q < T, 0)[:, None] - tl.load(depths + k, k < T, 0)[None, :]
        seen = seen & (far < window)
    return seen


@triton_jit
def _forward_step(
    q_MK, m, total, acc, k, v, first_q, first_k, end, depths, T, scale, window, k_token, v_token,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One block of keys: the running maximum m, sum and output of the M queries."""
    k_NK = _rows(k, first_k, k_token, T, N, K, BLOCK_K, not MASKED)
    s = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * scale
    if MASKED:
        s = tl.where(_visible(first_q, first_k, end, depths, T, window, M, N, WINDOW), s, float("-inf"))
    higher = tl.maximum(m, tl.max(s, 1))
    # A query that has seen no key yet has the maximum -inf, and differences with it are not defined.
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    p = tl.exp2(s - base[:, None])
    decay = tl.exp2(m - base)
    total = total * decay + tl.sum(p, 1)
    v_NV = _rows(v, first_k, v_token, T, N, V, BLOCK_V, not MASKED)
    acc = tl.dot(p.to(v_NV.dtype), v_NV, acc * decay[:, None], input_precision=PRECISION)
    return higher, total, acc


@triton_jit
def _forward_kernel(
    q, k, v, end, depths, order, counts, out, lse, T, scale, window, width,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last blocks see most keys: they start first
    head = tl.program_id(1)
    first_q = block * M
    k += (head // R).to(tl.int64) * k_head
    v += (head // R).to(tl.int64) * v_head
    q_MK = _rows(q + head.to(tl.int64) * q_head, first_q, q_token, T, M, K, BLOCK_K, False)
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_V], tl.float32)
    order += block.to(tl.int64) * width
    whole = tl.load(counts + 2 * block)
    stop = tl.load(counts + 2 * block + 1)
    for i in range(whole):
        first_k = tl.load(order + i) * N
        m, total, acc = _forward_step(
            q_MK, m, total, acc, k, v, first_q, first_k, end, depths, T, scale, window, k_token, v_token,
            K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, False, PRECISION,
        )  # fmt: skip
    for i in range(whole, stop):
        first_k = tl.load(order + i) * N
        m, total, acc = _forward_step(
            q_MK, m, total, acc, k, v, first_q, first_k, end, depths, T, scale, window, k_token, v_token,
            K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, True, PRECISION,
        )  # fmt: skip
    rows = first_q + tl.arange(0, M)
    column = tl.arange(0, BLOCK_V)
    total = tl.where(total == 0.0, 1.0, total)  # rows beyond T
    at = out + first_q.to(tl.int64) * out_token + tl.arange(0, M)[:, None] * out_token + head * V + column[None, :]
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), (rows[:, None] < T) & (column[None, :] < V))
    tl.store(lse + head.to(tl.int64) * T + rows, m + tl.log2(total), rows < T)


@triton_jit
def _delta_kernel(grad, out, delta, T, token, grad_token, grad_head, V: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """sum over keys of p dp, which is grad . out; [H, T]."""
    head = tl.program_id(1)
    first = tl.program_id(0) * M
    g = _rows(grad + head.to(tl.int64) * grad_head, first, grad_token, T, M, V, BLOCK_V, False).to(tl.float32)
    o = _rows(out + head.to(tl.int64) * V, first, token, T, M, V, BLOCK_V, False).to(tl.float32)
    rows = first + tl.arange(0, M)
    tl.store(delta + head.to(tl.int64) * T + rows, tl.sum(g * o, 1), rows < T)


@triton_jit
def _query_step(
    q_MK, g_MV, logs, delta, dq, k, v, first_q, first_k, end, depths, T, scale, window, k_token, v_token,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    k_NK = _rows(k, first_k, k_token, T, N, K, BLOCK_K, not MASKED)
    v_NV = _rows(v, first_k, v_token, T, N, V, BLOCK_V, not MASKED)
    p = tl.exp2(tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * scale - logs[:, None])
    if MASKED:
        p = tl.where(_visible(first_q, first_k, end, depths, T, window, M, N, WINDOW), p, 0.0)
    dp = tl.dot(g_MV, tl.trans(v_NV), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k_NK.dtype), k_NK, dq, input_precision=PRECISION)


@triton_jit
def _query_gradient_kernel(
    q, k, v, grad, end, depths, order, counts, lse, delta, dq, T, scale, factor, window, width,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, dq_token,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    first_q = block * M
    rows = first_q + tl.arange(0, M)
    k += (head // R).to(tl.int64) * k_head
    v += (head // R).to(tl.int64) * v_head
    q_MK = _rows(q + head.to(tl.int64) * q_head, first_q, q_token, T, M, K, BLOCK_K, False)
    g_MV = _rows(grad + head.to(tl.int64) * grad_head, first_q, grad_token, T, M, V, BLOCK_V, False)
    logs = tl.load(lse + head.to(tl.int64) * T + rows, rows < T, 0.0)
    sums = tl.load(delta + head.to(tl.int64) * T + rows, rows < T, 0.0)
    acc = tl.zeros([M, BLOCK_K], tl.float32)
    order += block.to(tl.int64) * width
    whole = tl.load(counts + 2 * block)
    stop = tl.load(counts + 2 * block + 1)
    for i in range(whole):
        first_k = tl.load(order + i) * N
        acc = _query_step(
            q_MK, g_MV, logs, sums, acc, k, v, first_q, first_k, end, depths, T, scale, window, k_token, v_token,
            K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, False, PRECISION,
        )  # fmt: skip
    for i in range(whole, stop):
        first_k = tl.load(order + i) * N
        acc = _query_step(
            q_MK, g_MV, logs, sums, acc, k, v, first_q, first_k, end, depths, T, scale, window, k_token, v_token,
            K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, True, PRECISION,
        )  # fmt: skip
    column = tl.arange(0, BLOCK_K)
    at = dq + first_q.to(tl.int64) * dq_token + tl.arange(0, M)[:, None] * dq_token + head * K + column[None, :]
    tl.store(at, (acc * factor).to(dq.dtype.element_ty), (rows[:, None] < T) & (column[None, :] < K))


@triton_jit
def _key_step(
    k_NK, v_NV, dk, dv, q, grad, lse, delta, first_q, first_k, end, depths, T, scale, window, q_token, grad_token,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    rows = first_q + tl.arange(0, M)
    q_MK = _rows(q, first_q, q_token, T, M, K, BLOCK_K, False)  # the last block's rows beyond T are zero, and add nothing
    g_MV = _rows(grad, first_q, grad_token, T, M, V, BLOCK_V, False)
    logs = tl.load(lse + rows, rows < T, 0.0)
    sums = tl.load(delta + rows, rows < T, 0.0)
    p_NM = tl.exp2(tl.dot(k_NK, tl.trans(q_MK), input_precision=PRECISION) * scale - logs[None, :])
    if MASKED:
        p_NM = tl.where(tl.trans(_visible(first_q, first_k, end, depths, T, window, M, N, WINDOW)), p_NM, 0.0)
    dv = tl.dot(p_NM.to(g_MV.dtype), g_MV, dv, input_precision=PRECISION)
    dp_NM = tl.dot(v_NV, tl.trans(g_MV), input_precision=PRECISION)
    ds_NM = p_NM * (dp_NM - sums[None, :])
    dk = tl.dot(ds_NM.to(q_MK.dtype), q_MK, dk, input_precision=PRECISION)
    return dk, dv


@triton_jit
def _key_gradient_kernel(
    q, k, v, grad, end, depths, order, counts, lse, delta, dk, dv, T, scale, factor, window, width,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, dk_token, dv_token,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    block = tl.program_id(0)  # the first keys are seen by most queries: they start first
    group = tl.program_id(1)
    first_k = block * N
    k_NK = _rows(k + group.to(tl.int64) * k_head, first_k, k_token, T, N, K, BLOCK_K, False)
    v_NV = _rows(v + group.to(tl.int64) * v_head, first_k, v_token, T, N, V, BLOCK_V, False)
    dk_NK = tl.zeros([N, BLOCK_K], tl.float32)
    dv_NV = tl.zeros([N, BLOCK_V], tl.float32)
    order += block.to(tl.int64) * width
    whole = tl.load(counts + 2 * block)
    partial = tl.load(counts + 2 * block + 1) - whole
    for i in range(whole * R):  # the query blocks of one head after the other
        head = (group * R + i // whole).to(tl.int64)
        first_q = tl.load(order + i % whole) * M
        dk_NK, dv_NV = _key_step(
            k_NK, v_NV, dk_NK, dv_NV, q + head * q_head, grad + head * grad_head, lse + head * T, delta + head * T,
            first_q, first_k, end, depths, T, scale, window, q_token, grad_token,
            K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, False, PRECISION,
        )  # fmt: skip
    for i in range(partial * R):
        head = (group * R + i // partial).to(tl.int64)
        first_q = tl.load(order + whole + i % partial) * M
        dk_NK, dv_NV = _key_step(
            k_NK, v_NV, dk_NK, dv_NV, q + head * q_head, grad + head * grad_head, lse + head * T, delta + head * T,
            first_q, first_k, end, depths, T, scale, window, q_token, grad_token,
            K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, True, PRECISION,
        )  # fmt: skip
    local = tl.arange(0, N)[:, None]
    column_K = tl.arange(0, BLOCK_K)[None, :]
    column_V = tl.arange(0, BLOCK_V)[None, :]
    inside = first_k + local < T
    to_k = dk + first_k.to(tl.int64) * dk_token + local * dk_token + group * K + column_K
    to_v = dv + first_k.to(tl.int64) * dv_token + local * dv_token + group * V + column_V
    tl.store(to_k, (dk_NK * factor).to(dk.dtype.element_ty), inside & (column_K < K))
    tl.store(to_v, dv_NV.to(dv.dtype.element_ty), inside & (column_V < V))


def _power(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _tuned(kernel: str, q_THK: Tensor, V: int, window: int) -> Configuration:
    return configuration(kernel, capability(q_THK.device), max(q_THK.shape[2], V), window > 0)


def _constants(q: Tensor, k: Tensor, v: Tensor, tuned: Configuration, window: int, transposed: bool = False) -> dict[str, Any]:
    """The constants that all three kernels take."""
    low = q.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"
    return {
        "R": q.shape[1] // k.shape[1], "K": q.shape[2], "V": v.shape[2], "BLOCK_K": _power(q.shape[2]), "BLOCK_V": _power(v.shape[2]),
        "M": tuned.rows, "N": tuned.columns, "WINDOW": window > 0, "PRECISION": "tf32" if low else "ieee",
        "num_warps": tuned.warps, "num_stages": tuned.stages,
    }  # fmt: skip


def _forward_triton(q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], window: int) -> tuple[Tensor, Tensor]:
    q, k, v = _dense(q), _dense(k), _dense(v)
    (T, H, K), V = q.shape, v.shape[2]
    end, depths, order, counts = layout[:4]
    out = torch.empty(T, H, V, dtype=q.dtype, device=q.device)
    lse = torch.empty(H, T, dtype=torch.float32, device=q.device)
    tuned = _tuned("attention_forward", q, V, window)
    if T:
        _forward_kernel[(-(-T // tuned.rows), H)](
            q, k, v, end, depths, order, counts, out, lse, T, K**-0.5 * LOG2_E, window, order.shape[1],
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], out.stride(0), **_constants(q, k, v, tuned, window),
        )  # fmt: skip
    return out, lse


def _backward_triton(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: list[Tensor], window: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v = _dense(grad), _dense(q), _dense(k), _dense(v)
    (T, H, K), (_, G, V) = q.shape, v.shape
    end, depths, _, _, order_q, counts_q, order_k, counts_k = layout
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not T:
        return dq, dk, dv
    delta = torch.empty_like(lse)
    _delta_kernel[(-(-T // 64), H)](grad, out, delta, T, out.stride(0), *grad.stride()[:2], V=V, BLOCK_V=_power(V), M=64)
    shared = (q, k, v, grad, end, depths)
    scales = (T, K**-0.5 * LOG2_E, K**-0.5, window)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *grad.stride()[:2])
    tuned = _tuned("attention_query_gradient", q, V, window)
    _query_gradient_kernel[(-(-T // tuned.rows), H)](
        *shared, order_q, counts_q, lse, delta, dq, *scales, order_q.shape[1], *strides, dq.stride(0), **_constants(q, k, v, tuned, window)
    )
    tuned = _tuned("attention_key_gradient", q, V, window)
    _key_gradient_kernel[(-(-T // tuned.columns), G)](
        *shared, order_k, counts_k, lse, delta, dk, dv, *scales, order_k.shape[1], *strides, dk.stride(0), dv.stride(0),
        **_constants(q, k, v, tuned, window),
    )  # fmt: skip
    return dq, dk, dv


# --- façade ----------------------------------------------------------------------------------------------


def _layout(mask: ForestMask, q_THK: Tensor, V: int) -> list[Tensor]:
    """What the version for q's device needs to know of the mask."""
    if not uses_triton(q_THK):
        return mask.tile_layout
    layout = [mask.end.to(torch.int32), mask.depths]
    for kernel, part in (("forward", slice(0, 2)), ("query_gradient", slice(0, 2)), ("key_gradient", slice(2, 4))):
        tuned = _tuned(f"attention_{kernel}", q_THK, V, mask.window or 0)
        layout += mask.blocks(tuned.rows, tuned.columns)[part]
    return layout


def _fake(q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], window: int) -> tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    lse = q.new_empty((H, T) if uses_triton(q) else (0,), dtype=wide(q.dtype))
    return q.new_empty(T, H, v.shape[2]), lse


_attention = operator(
    "forest_attention(Tensor q, Tensor k, Tensor v, Tensor[] layout, int window) -> (Tensor, Tensor)", _forward, _forward_triton, _fake
)
_attention_backward = operator(
    "forest_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] layout, int window)"
    " -> (Tensor, Tensor, Tensor)",
    _backward, _backward_triton, lambda grad, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
)  # fmt: skip


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, layout, ctx.window = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *layout)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *layout = ctx.saved_tensors
    return *_attention_backward(grad, q, k, v, out, lse, layout, ctx.window), [None] * len(layout), None


differentiable("forest_attention", _gradients, _setup)


def attention(q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, mask: ForestMask) -> Tensor:
    """Attention under the forest mask, scaled by 1/sqrt(K). Returns [T, H, V] in the inputs' dtype.

    `k` [T, G, K] and `v` [T, G, V], G a divisor of H. Softmax and sums are in fp32 at least; on CPU low precision
    is computed in fp32 altogether.
    """
    T, H, K = q_THK.shape
    if k_TGK.shape[::2] != (T, K) or v_TGV.shape[:2] != k_TGK.shape[:2] or H % k_TGK.shape[1] or len(mask.end) != T:
        raise ValueError(
            f"q {list(q_THK.shape)}, k {list(k_TGK.shape)}, v {list(v_TGV.shape)} and a mask of {len(mask.end)} tokens do not fit: "
            "all need as many tokens, k and v as many heads, a divisor of q's, q and k one width"
        )
    out, _ = _attention(q_THK, k_TGK, v_TGV, _layout(mask, q_THK, v_TGV.shape[2]), mask.window or 0)
    return out  # type: ignore[no-any-return]
