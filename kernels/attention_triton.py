"""Attention under the forest mask on a GPU; `attention.py` explains the names.

A block of queries visits the blocks of keys that it sees, with a running softmax (FlashAttention-2, Dao 2023); first the
key blocks that need no mask. The backward pass has two kernels: by blocks of queries for dq, by blocks of keys for dk and dv.
Both kernels compute each pair's scores (seven products, not five), so that programs share no sum: gradients have the same
bits in every run, and no program waits. On an H200 this takes half the time of summing dq in memory.

From compute capability 9.0 on, blocks are read through tensor descriptors, by the tensor memory accelerator (TMA). On older
GPUs, and for widths that are not powers of two, the same kernels read by pointers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puna.kernels.configurations import Configuration, capability, configuration, in_full
from puna.kernels.cpu.lazy_jit import triton_jit
from puna.kernels.forest_mask import ForestMask

if TYPE_CHECKING:
    import triton.language as tl

LOG2_E = math.log2(math.e)  # scores are scaled by log2(e), because the GPU has an instruction for exp2


@triton_jit
def _rows(x, head, first, token, head_stride, T, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return rows first .. first + COUNT - 1 of one head of x, [COUNT, BLOCK]; zero beyond WIDTH and from row T on."""
    if DESCRIPTORS:
        return x.load([first, head * BLOCK])
    else:
        local = tl.arange(0, COUNT)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        at = x + head.to(tl.int64) * head_stride + first.to(tl.int64) * token + local * token + column
        return tl.load(at, (first + local < T) & (column < WIDTH), 0.0)


@triton_jit
def _store(x, head, first, token, block, T, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store `block` [COUNT, BLOCK] to one head of x [T, heads, WIDTH], from row `first` on, in x's dtype."""
    local = tl.arange(0, COUNT)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = x + first.to(tl.int64) * token + local * token + head * WIDTH + column
    tl.store(at, block.to(x.dtype.element_ty), (first + local < T) & (column < WIDTH))


@triton_jit
def _visible(first_q, first_k, end, depths, T, window, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, KEYS_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a mask [M, N] (KEYS_FIRST: [N, M]), True where one of M queries from `first_q` on sees one of N keys from `first_k` on."""
    q = tl.expand_dims(first_q + tl.arange(0, M), 0 if KEYS_FIRST else 1)
    k = tl.expand_dims(first_k + tl.arange(0, N), 1 if KEYS_FIRST else 0)
    seen = (k <= q) & (q < tl.load(end + k, k < T, 0))
    if WINDOW:
        seen = seen & (tl.load(depths + q, q < T, 0) - tl.load(depths + k, k < T, 0) < window)
    return seen


@triton_jit
def _forward_steps(  # type: ignore[no-untyped-def]
    q_MK, m, total, acc, k, v, group, first_q, order, start, stop, end, depths, T, scale, window, k_token, k_head, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Process key blocks start .. stop - 1 of the order; return the running maximum, sum and output of M queries."""
    for i in tl.range(start, stop, warp_specialize=SPECIALIZE):
        first_k = tl.load(order + i) * N
        k_NK = _rows(k, group, first_k, k_token, k_head, T, N, K, BLOCK_K, DESCRIPTORS)
        s = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION)
        if MASKED:
            s = tl.where(_visible(first_q, first_k, end, depths, T, window, M, N, WINDOW, False), s, float("-inf"))
        higher = tl.maximum(m, tl.max(s, 1) * scale)
        # A query that has seen no key yet has the maximum -inf, and differences with it are not defined.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        p = tl.exp2(s * scale - base[:, None])  # one instruction multiplies and subtracts
        decay = tl.exp2(m - base)
        total = total * decay + tl.sum(p, 1)
        v_NV = _rows(v, group, first_k, v_token, v_head, T, N, V, BLOCK_V, DESCRIPTORS)
        acc = tl.dot(p.to(v_NV.dtype), v_NV, acc * decay[:, None], input_precision=PRECISION)
        m = higher
    return m, total, acc


@triton_jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, end, depths, order, counts, out, lse, T, scale, window, width,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last blocks see most keys: they start first
    head = tl.program_id(1)
    first_q = block * M
    q_MK = _rows(q, head, first_q, q_token, q_head, T, M, K, BLOCK_K, DESCRIPTORS)
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_V], tl.float32)
    order += block.to(tl.int64) * width
    whole = tl.load(counts + 2 * block)
    stop = tl.load(counts + 2 * block + 1)
    m, total, acc = _forward_steps(
        q_MK, m, total, acc, k, v, head // R, first_q, order, 0, whole, end, depths, T, scale, window, k_token, k_head, v_token, v_head,
        K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, False, PRECISION, DESCRIPTORS, SPECIALIZE,
    )  # fmt: skip
    m, total, acc = _forward_steps(
        q_MK, m, total, acc, k, v, head // R, first_q, order, whole, stop, end, depths, T, scale, window, k_token, k_head, v_token, v_head,
        K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, True, PRECISION, DESCRIPTORS, SPECIALIZE,
    )  # fmt: skip
    rows = first_q + tl.arange(0, M)
    total = tl.where(total == 0.0, 1.0, total)  # rows beyond T
    _store(out, head, first_q, out_token, acc / total[:, None], T, M, V, BLOCK_V)
    tl.store(lse + head.to(tl.int64) * T + rows, m + tl.log2(total), rows < T)


@triton_jit
def _query_steps(  # type: ignore[no-untyped-def]
    q_MK, g_MV, logs, sums, dq, k, v, group, first_q, order, start, stop, end, depths, T, scale, window, k_token, k_head, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Return `dq` of M queries, not yet scaled, plus the contributions of the key blocks order[start:stop]."""
    for i in range(start, stop):
        first_k = tl.load(order + i) * N
        k_NK = _rows(k, group, first_k, k_token, k_head, T, N, K, BLOCK_K, DESCRIPTORS)
        p = tl.exp2(tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * scale - logs[:, None])
        if MASKED:
            p = tl.where(_visible(first_q, first_k, end, depths, T, window, M, N, WINDOW, False), p, 0.0)
        v_NV = _rows(v, group, first_k, v_token, v_head, T, N, V, BLOCK_V, DESCRIPTORS)
        dp = tl.dot(g_MV, tl.trans(v_NV), input_precision=PRECISION)
        ds = (p * (dp - sums[:, None])).to(k_NK.dtype)
        dq = tl.dot(ds, k_NK, dq, input_precision=PRECISION)
    return dq


@triton_jit
def _query_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, out, dq, end, depths, order, counts, lse, delta, T, scale, factor, window, width,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, out_token, dq_token,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last blocks see most keys: they start first
    head = tl.program_id(1)
    first_q = block * M
    rows = first_q + tl.arange(0, M)
    q_MK = _rows(q, head, first_q, q_token, q_head, T, M, K, BLOCK_K, DESCRIPTORS)
    g_MV = _rows(grad, head, first_q, grad_token, grad_head, T, M, V, BLOCK_V, DESCRIPTORS)
    o_MV = _rows(out, head, first_q, out_token, V, T, M, V, BLOCK_V, False)
    # The sum over keys of p dp is grad . out (FlashAttention, 3.1).
    sums = tl.sum(g_MV.to(tl.float32) * o_MV.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * T + rows, sums, rows < T)
    logs = tl.load(lse + head.to(tl.int64) * T + rows, rows < T, 0.0)
    dq_MK = tl.zeros([M, BLOCK_K], tl.float32)
    order += block.to(tl.int64) * width
    whole = tl.load(counts + 2 * block)
    stop = tl.load(counts + 2 * block + 1)
    dq_MK = _query_steps(
        q_MK, g_MV, logs, sums, dq_MK, k, v, head // R, first_q, order, 0, whole, end, depths, T, scale, window, k_token, k_head,
        v_token, v_head, K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, False, PRECISION, DESCRIPTORS,
    )  # fmt: skip
    dq_MK = _query_steps(
        q_MK, g_MV, logs, sums, dq_MK, k, v, head // R, first_q, order, whole, stop, end, depths, T, scale, window, k_token, k_head,
        v_token, v_head, K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, True, PRECISION, DESCRIPTORS,
    )  # fmt: skip
    _store(dq, head, first_q, dq_token, dq_MK * factor, T, M, K, BLOCK_K)


@triton_jit
def _key_steps(  # type: ignore[no-untyped-def]
    k_NK, v_NV, dk, dv, q, grad, lse, delta, group, first_k, order, count, end, depths, T, scale, window,
    q_token, q_head, grad_token, grad_head,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Return dk and dv of N keys with the contributions of the order's first `count` query blocks of each of R heads."""
    for i in range(count * R):
        head = group * R + i // count
        first_q = tl.load(order + i % count) * M
        rows = first_q + tl.arange(0, M)
        q_MK = _rows(q, head, first_q, q_token, q_head, T, M, K, BLOCK_K, DESCRIPTORS)  # rows beyond T are zero, and add nothing
        logs = tl.load(lse + head.to(tl.int64) * T + rows, rows < T, 0.0)
        # Keys first: p and ds are then read where they were computed, in registers.
        p_NM = tl.exp2(tl.dot(k_NK, tl.trans(q_MK), input_precision=PRECISION) * scale - logs[None, :])
        if MASKED:
            p_NM = tl.where(_visible(first_q, first_k, end, depths, T, window, M, N, WINDOW, True), p_NM, 0.0)
        g_MV = _rows(grad, head, first_q, grad_token, grad_head, T, M, V, BLOCK_V, DESCRIPTORS)
        dv = tl.dot(p_NM.to(g_MV.dtype), g_MV, dv, input_precision=PRECISION)
        dp_NM = tl.dot(v_NV, tl.trans(g_MV), input_precision=PRECISION)
        sums = tl.load(delta + head.to(tl.int64) * T + rows, rows < T, 0.0)
        ds_NM = (p_NM * (dp_NM - sums[None, :])).to(q_MK.dtype)
        dk = tl.dot(ds_NM, q_MK, dk, input_precision=PRECISION)
    return dk, dv


@triton_jit
def _key_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, dk, dv, end, depths, order, counts, lse, delta, T, scale, factor, window, width,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, dk_token, dv_token,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)  # the first keys are seen by most queries: they start first
    group = tl.program_id(1)
    first_k = block * N
    k_NK = _rows(k, group, first_k, k_token, k_head, T, N, K, BLOCK_K, DESCRIPTORS)
    v_NV = _rows(v, group, first_k, v_token, v_head, T, N, V, BLOCK_V, DESCRIPTORS)
    dk_NK = tl.zeros([N, BLOCK_K], tl.float32)
    dv_NV = tl.zeros([N, BLOCK_V], tl.float32)
    order += block.to(tl.int64) * width
    whole = tl.load(counts + 2 * block)
    stop = tl.load(counts + 2 * block + 1)
    dk_NK, dv_NV = _key_steps(
        k_NK, v_NV, dk_NK, dv_NV, q, grad, lse, delta, group, first_k, order, whole, end, depths, T, scale, window,
        q_token, q_head, grad_token, grad_head, R, K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, False, PRECISION, DESCRIPTORS,
    )  # fmt: skip
    dk_NK, dv_NV = _key_steps(
        k_NK, v_NV, dk_NK, dv_NV, q, grad, lse, delta, group, first_k, order + whole, stop - whole, end, depths, T, scale, window,
        q_token, q_head, grad_token, grad_head, R, K, V, BLOCK_K, BLOCK_V, M, N, WINDOW, True, PRECISION, DESCRIPTORS,
    )  # fmt: skip
    _store(dk, group, first_k, dk_token, dk_NK * factor, T, N, K, BLOCK_K)
    _store(dv, group, first_k, dv_token, dv_NV, T, N, V, BLOCK_V)


def _power(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _dense(x: Tensor, descriptors: bool) -> Tensor:
    """Return `x`, or a contiguous copy if kernels cannot read it: descriptors need contiguous heads and rows at multiples of 16 bytes."""
    fits = x.stride(1) == x.shape[2] and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
    return x if x.stride(2) == 1 and (fits or not descriptors) else x.contiguous()


def _argument(x: Tensor, rows: int, descriptors: bool) -> Any:
    """Return the argument by which a kernel reads [rows, width] blocks of `x` [T, heads, width]: a tensor descriptor, or `x` itself."""
    if not descriptors:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, [len(x), x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, x.shape[2]])


def tile_config(kernel: str, q_THK: Tensor, V: int, window: int) -> Configuration:
    """Return the kernel's configuration. TF32 heads need the memory of 16-bit heads of twice the width, so they use that width's entry."""
    full, width = in_full(q_THK), max(q_THK.shape[2], V)
    return configuration(kernel, capability(q_THK.device), width if full else width * max(2, q_THK.itemsize) // 2, window > 0, full)


def _constants(q: Tensor, k: Tensor, v: Tensor, sizes: Configuration, window: int) -> dict[str, Any]:
    K, V = q.shape[2], v.shape[2]
    descriptors = sizes.descriptors and (_power(K), _power(V)) == (K, V)
    return {
        "R": q.shape[1] // k.shape[1], "K": K, "V": V, "BLOCK_K": _power(K), "BLOCK_V": _power(V), "M": sizes.rows, "N": sizes.columns,
        "WINDOW": window > 0, "PRECISION": "ieee" if in_full(q) else "tf32", "DESCRIPTORS": descriptors,
        "num_warps": sizes.warps, "num_stages": sizes.stages,
    }  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], window: int) -> tuple[Tensor, Tensor]:
    (T, H, K), V = q.shape, v.shape[2]
    sizes = tile_config("attention_forward", q, V, window)
    constants = _constants(q, k, v, sizes, window)
    how = constants["DESCRIPTORS"]
    q, k, v = (_dense(x, how) for x in (q, k, v))
    end, depths, order, counts = layout[:4]
    out = torch.empty(T, H, V, dtype=q.dtype, device=q.device)
    lse = torch.empty(H, T, dtype=torch.float32, device=q.device)
    if T:
        read = (_argument(x, rows, how) for x, rows in ((q, sizes.rows), (k, sizes.columns), (v, sizes.columns)))
        _forward_kernel[(-(-T // sizes.rows), H)](
            *read, end, depths, order, counts, out, lse, T, K**-0.5 * LOG2_E, window, order.shape[1],
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], out.stride(0), **constants, SPECIALIZE=sizes.specialize,
        )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: list[Tensor], window: int
) -> tuple[Tensor, Tensor, Tensor]:
    (T, _, K), V = q.shape, v.shape[2]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not T:
        return dq, dk, dv
    delta = torch.empty_like(lse)
    end, depths = layout[:2]
    numbers = (lse, delta, T, K**-0.5 * LOG2_E, K**-0.5, window)
    for kernel, launch, (order, counts), given in (
        ("attention_query_gradient", _query_gradient_kernel, layout[4:6], (out, dq)),
        ("attention_key_gradient", _key_gradient_kernel, layout[6:8], (dk, dv)),
    ):
        sizes = tile_config(kernel, q, V, window)
        constants = _constants(q, k, v, sizes, window)
        how = constants["DESCRIPTORS"]
        read = [_dense(x, how) for x in (q, k, v, grad)]
        described = (_argument(x, rows, how) for x, rows in zip(read, (sizes.rows, sizes.columns, sizes.columns, sizes.rows), strict=True))
        strides = [step for x in read for step in x.stride()[:2]] + [x.stride(0) for x in given]
        grid = (len(order), given[1].shape[1])  # one program per block and head of the gradients
        launch[grid](*described, *given, end, depths, order, counts, *numbers, order.shape[1], *strides, **constants)
    return dq, dk, dv


def layout(mask: ForestMask, q_THK: Tensor, V: int) -> list[Tensor]:
    """Return the mask for the kernels: ends, depths, and for each kernel the order of the blocks to visit, with their counts."""
    tiles = (tile_config(f"attention_{kernel}", q_THK, V, mask.window or 0) for kernel in ("forward", "query_gradient", "key_gradient"))
    forward, queries, keys = (mask.blocks(tile.rows, tile.columns) for tile in tiles)
    return [mask.end.to(torch.int32), mask.depths, *forward[:2], *queries[:2], *keys[2:]]
