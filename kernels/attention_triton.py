"""Attention under the forest mask on a GPU: see `attention.py`, which says what the names mean.

Blocks of queries visit the blocks of keys that they see with a running softmax (FlashAttention-2, Dao 2023), first
those that need no mask. The backward computes dq by blocks of queries, dk and dv by blocks of keys: each is written
once, so that the sum's order is fixed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puna.kernels.configurations import Configuration, capability, configuration
from puna.kernels.forest_mask import ForestMask
from puna.kernels.lazy import triton_jit

if TYPE_CHECKING:
    import triton.language as tl

LOG2_E = math.log2(math.e)  # exp2 is the GPU's own instruction: scores are kept in units of ln 2
DELTA_ROWS = 32  # with 64 the compiler for sm_100 needs a stack


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
def _forward_step(  # type: ignore[no-untyped-def]
    q_MK, m, total, acc, k, v, first_q, first_k, end, depths, T, scale, window, k_token, v_token,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
def _forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, end, depths, order, counts, out, lse, T, scale, window, width,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
def _query_step(  # type: ignore[no-untyped-def]
    q_MK, g_MV, logs, delta, dq, k, v, first_q, first_k, end, depths, T, scale, window, k_token, v_token,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k_NK = _rows(k, first_k, k_token, T, N, K, BLOCK_K, not MASKED)
    v_NV = _rows(v, first_k, v_token, T, N, V, BLOCK_V, not MASKED)
    p = tl.exp2(tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * scale - logs[:, None])
    if MASKED:
        p = tl.where(_visible(first_q, first_k, end, depths, T, window, M, N, WINDOW), p, 0.0)
    dp = tl.dot(g_MV, tl.trans(v_NV), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k_NK.dtype), k_NK, dq, input_precision=PRECISION)


@triton_jit
def _query_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, end, depths, order, counts, lse, delta, dq, T, scale, factor, window, width,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, dq_token,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
def _key_step(  # type: ignore[no-untyped-def]
    k_NK, v_NV, dk, dv, q, grad, lse, delta, first_q, first_k, end, depths, T, scale, window, q_token, grad_token,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
def _key_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, end, depths, order, counts, lse, delta, dk, dv, T, scale, factor, window, width,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, dk_token, dv_token,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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


def tuned(kernel: str, q_THK: Tensor, V: int, window: int) -> Configuration:
    return configuration(kernel, capability(q_THK.device), max(q_THK.shape[2], V), window > 0)


def _constants(q: Tensor, k: Tensor, v: Tensor, sizes: Configuration, window: int) -> dict[str, Any]:
    """The constants that all three kernels take."""
    low = q.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"
    return {
        "R": q.shape[1] // k.shape[1], "K": q.shape[2], "V": v.shape[2], "BLOCK_K": _power(q.shape[2]), "BLOCK_V": _power(v.shape[2]),
        "M": sizes.rows, "N": sizes.columns, "WINDOW": window > 0, "PRECISION": "tf32" if low else "ieee",
        "num_warps": sizes.warps, "num_stages": sizes.stages,
    }  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], window: int) -> tuple[Tensor, Tensor]:
    q, k, v = _dense(q), _dense(k), _dense(v)
    (T, H, K), V = q.shape, v.shape[2]
    end, depths, order, counts = layout[:4]
    out = torch.empty(T, H, V, dtype=q.dtype, device=q.device)
    lse = torch.empty(H, T, dtype=torch.float32, device=q.device)
    sizes = tuned("attention_forward", q, V, window)
    if T:
        _forward_kernel[(-(-T // sizes.rows), H)](
            q, k, v, end, depths, order, counts, out, lse, T, K**-0.5 * LOG2_E, window, order.shape[1],
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], out.stride(0), **_constants(q, k, v, sizes, window),
        )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: list[Tensor], window: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v = _dense(grad), _dense(q), _dense(k), _dense(v)
    (T, H, K), (_, G, V) = q.shape, v.shape
    end, depths, _, _, order_q, counts_q, order_k, counts_k = layout
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not T:
        return dq, dk, dv
    delta = torch.empty_like(lse)
    _delta_kernel[(-(-T // DELTA_ROWS), H)](grad, out, delta, T, out.stride(0), *grad.stride()[:2], V=V, BLOCK_V=_power(V), M=DELTA_ROWS)
    shared = (q, k, v, grad, end, depths)
    scales = (T, K**-0.5 * LOG2_E, K**-0.5, window)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *grad.stride()[:2])
    sizes = tuned("attention_query_gradient", q, V, window)
    _query_gradient_kernel[(-(-T // sizes.rows), H)](
        *shared, order_q, counts_q, lse, delta, dq, *scales, order_q.shape[1], *strides, dq.stride(0), **_constants(q, k, v, sizes, window)
    )
    sizes = tuned("attention_key_gradient", q, V, window)
    _key_gradient_kernel[(-(-T // sizes.columns), G)](
        *shared, order_k, counts_k, lse, delta, dk, dv, *scales, order_k.shape[1], *strides, dk.stride(0), dv.stride(0),
        **_constants(q, k, v, sizes, window),
    )  # fmt: skip
    return dq, dk, dv


def layout(mask: ForestMask, q_THK: Tensor, V: int) -> list[Tensor]:
    """What the kernels need to know of the mask: ends, depths, and for each the blocks to visit with their counts."""
    made = [mask.end.to(torch.int32), mask.depths]
    for kernel, part in (("forward", slice(0, 2)), ("query_gradient", slice(0, 2)), ("key_gradient", slice(2, 4))):
        sizes = tuned(f"attention_{kernel}", q_THK, V, mask.window or 0)
        made += mask.blocks(sizes.rows, sizes.columns)[part]
    return made
