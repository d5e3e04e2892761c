"""Attention under the forest mask on a GPU; `attention.py` explains the names.

Blocks of queries visit the blocks of keys that they see with a running softmax (FlashAttention-2, Dao 2023), first
those that need no mask. The backward visits by blocks of keys, whose dk and dv it sums itself, and computes each
pair's scores once for all three gradients: five products. Its parts of dq are added up in fp32 in memory, in the order
in which programs come; under torch.use_deterministic_algorithms each waits for its turn, so that sums are the same in
every run (FlashAttention-3, Shah et al. 2024, does both).

From compute capability 9.0 on blocks are read through tensor descriptors, by the memory's own engine. Older GPUs have
none, and a descriptor's blocks are powers of two wide: there and for other widths the same kernels read by pointers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puna.kernels.configurations import Configuration, capability, configuration
from puna.kernels.cpu.lazy import triton_jit
from puna.kernels.forest_mask import ForestMask

if TYPE_CHECKING:
    import triton.language as tl

LOG2_E = math.log2(math.e)  # exp2 is the GPU's own instruction: scores are kept in units of ln 2
DELTA_ROWS = 32  # with 64 the compiler for sm_100 needs a stack


@triton_jit
def _rows(x, head, first, token, head_stride, T, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load [COUNT, BLOCK] of one head from row `first`; zero beyond the width and beyond row T."""
    if DESCRIPTORS:
        return x.load([first, head * BLOCK])
    else:
        local = tl.arange(0, COUNT)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        at = x + head.to(tl.int64) * head_stride + first.to(tl.int64) * token + local * token + column
        return tl.load(at, (first + local < T) & (column < WIDTH), 0.0)


@triton_jit
def _visible(first_q, first_k, end, depths, T, window, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a mask [M, N]: the keys from `first_k` that each query from `first_q` sees."""
    q = first_q + tl.arange(0, M)
    k = first_k + tl.arange(0, N)
    last = tl.load(end + k, k < T, 0)
    seen = (k[None, :] <= q[:, None]) & (q[:, None] < last[None, :])
    if WINDOW:
        far = tl.load(depths + q, q < T, 0)[:, None] - tl.load(depths + k, k < T, 0)[None, :]
        seen = seen & (far < window)
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
        s = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * scale
        if MASKED:
            s = tl.where(_visible(first_q, first_k, end, depths, T, window, M, N, WINDOW), s, float("-inf"))
        higher = tl.maximum(m, tl.max(s, 1))
        # A query that has seen no key yet has the maximum -inf, and differences with it are not defined.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        p = tl.exp2(s - base[:, None])
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
    column = tl.arange(0, BLOCK_V)
    total = tl.where(total == 0.0, 1.0, total)  # rows beyond T
    at = out + first_q.to(tl.int64) * out_token + tl.arange(0, M)[:, None] * out_token + head * V + column[None, :]
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), (rows[:, None] < T) & (column[None, :] < V))
    tl.store(lse + head.to(tl.int64) * T + rows, m + tl.log2(total), rows < T)


@triton_jit
def _delta_kernel(grad, out, delta, T, token, grad_token, grad_head, V: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the sum over keys of p dp, which is grad . out; [H, T]."""
    head = tl.program_id(1)
    first = tl.program_id(0) * M
    g = _rows(grad, head, first, grad_token, grad_head, T, M, V, BLOCK_V, False).to(tl.float32)
    o = _rows(out, head, first, token, V, T, M, V, BLOCK_V, False).to(tl.float32)
    rows = first + tl.arange(0, M)
    tl.store(delta + head.to(tl.int64) * T + rows, tl.sum(g * o, 1), rows < T)


@triton_jit
def _gradients(  # type: ignore[no-untyped-def]
    q_MK, k_NK, v_NV, g_MV, logs, sums, dk, dv, masked, first_q, first_k, end, depths, T, scale, window,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dk and dv with the contribution of one block of queries, and that block's contribution to dq."""
    p = tl.exp2(tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * scale - logs[:, None])
    if masked:
        p = tl.where(_visible(first_q, first_k, end, depths, T, window, M, N, WINDOW), p, 0.0)
    dv = tl.dot(tl.trans(p.to(g_MV.dtype)), g_MV, dv, input_precision=PRECISION)
    dp = tl.dot(g_MV, tl.trans(v_NV), input_precision=PRECISION)
    ds = (p * (dp - sums[:, None])).to(q_MK.dtype)
    dk = tl.dot(tl.trans(ds), q_MK, dk, input_precision=PRECISION)
    return dk, dv, tl.dot(ds, k_NK, input_precision=PRECISION)


@triton_jit
def _add(  # type: ignore[no-untyped-def]
    part_MK, dq, head, first_q, T, token, counter, turn,
    K: tl.constexpr, BLOCK_K: tl.constexpr, M: tl.constexpr, DESCRIPTORS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Add a part of dq to the sum in memory; ORDERED: after all programs with an earlier turn."""
    if DESCRIPTORS and not ORDERED:
        dq.atomic_add([first_q, head * BLOCK_K], part_MK)
    else:
        local = tl.arange(0, M)[:, None]
        column = tl.arange(0, BLOCK_K)[None, :]
        at = dq + first_q.to(tl.int64) * token + local * token + head * K + column
        inside = (first_q + local < T) & (column < K)
        if ORDERED:
            # Programs start in the order of their turns, so that the one waited for is always under way.
            while tl.atomic_add(counter, 0, sem="acquire") != turn:
                pass
        tl.atomic_add(at, part_MK, inside, sem="relaxed")
        if ORDERED:
            tl.debug_barrier()  # all threads' parts are there before the next program is told
            tl.atomic_add(counter, 1, sem="release")


@triton_jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, dq, dk, dv, end, depths, order, counts, turns, finished, lse, delta, T, scale, factor, window, width,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, dq_token, dk_token, dv_token,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)  # the first keys are seen by most queries: they start first
    group = tl.program_id(1)
    first_k = block * N
    k_NK = _rows(k, group, first_k, k_token, k_head, T, N, K, BLOCK_K, DESCRIPTORS)
    v_NV = _rows(v, group, first_k, v_token, v_head, T, N, V, BLOCK_V, DESCRIPTORS)
    dk_NK = tl.zeros([N, BLOCK_K], tl.float32)
    dv_NV = tl.zeros([N, BLOCK_V], tl.float32)
    order += block.to(tl.int64) * width
    turns += block.to(tl.int64) * width
    whole = tl.load(counts + 2 * block)
    stop = tl.load(counts + 2 * block + 1)
    for i in range(stop * R):  # the query blocks of one head after the other
        head = group * R + i // stop
        visit = i % stop
        if ORDERED:  # from the last queries on, which all keys before them see: programs then wait for each other once
            visit = tl.where(visit < whole, whole - 1 - visit, stop - 1 - (visit - whole))
        number = tl.load(order + visit)
        first_q = number * M
        rows = first_q + tl.arange(0, M)
        q_MK = _rows(q, head, first_q, q_token, q_head, T, M, K, BLOCK_K, DESCRIPTORS)  # rows beyond T are zero, and add nothing
        g_MV = _rows(grad, head, first_q, grad_token, grad_head, T, M, V, BLOCK_V, DESCRIPTORS)
        logs = tl.load(lse + head.to(tl.int64) * T + rows, rows < T, 0.0)
        sums = tl.load(delta + head.to(tl.int64) * T + rows, rows < T, 0.0)
        dk_NK, dv_NV, part_MK = _gradients(
            q_MK, k_NK, v_NV, g_MV, logs, sums, dk_NK, dv_NV, visit >= whole, first_q, first_k, end, depths, T, scale, window,
            M, N, WINDOW, PRECISION,
        )  # fmt: skip
        counter = finished + head * tl.cdiv(T, M) + number
        _add(part_MK * factor, dq, head, first_q, T, dq_token, counter, tl.load(turns + visit), K, BLOCK_K, M, DESCRIPTORS, ORDERED)
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


def _dense(x: Tensor, descriptors: bool) -> Tensor:
    """Return `x`, or a copy if the kernels cannot read its layout: a descriptor needs contiguous heads at multiples of 16 bytes."""
    fits = x.stride(1) == x.shape[2] and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
    return x if x.stride(2) == 1 and (fits or not descriptors) else x.contiguous()


def _described(x: Tensor, rows: int, descriptors: bool) -> Any:
    """Return a kernel's arguments for reading [rows, width] blocks of `x` [T, heads, width]."""
    if not descriptors:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, [len(x), x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, x.shape[2]])


def tuned(kernel: str, q_THK: Tensor, V: int, window: int) -> Configuration:
    """Return the kernel's configuration; fp32 needs as much memory as 16-bit heads of twice the width."""
    return configuration(kernel, capability(q_THK.device), max(q_THK.shape[2], V) * max(2, q_THK.itemsize) // 2, window > 0)


def _constants(q: Tensor, k: Tensor, v: Tensor, sizes: Configuration, window: int) -> dict[str, Any]:
    """Return the constants that both kernels take."""
    low = q.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"
    K, V = q.shape[2], v.shape[2]
    descriptors = sizes.descriptors and (_power(K), _power(V)) == (K, V)
    return {
        "R": q.shape[1] // k.shape[1], "K": K, "V": V, "BLOCK_K": _power(K), "BLOCK_V": _power(V), "M": sizes.rows, "N": sizes.columns,
        "WINDOW": window > 0, "PRECISION": "tf32" if low else "ieee", "DESCRIPTORS": descriptors,
        "num_warps": sizes.warps, "num_stages": sizes.stages,
    }  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], window: int) -> tuple[Tensor, Tensor]:
    (T, H, K), V = q.shape, v.shape[2]
    sizes = tuned("attention_forward", q, V, window)
    constants = _constants(q, k, v, sizes, window)
    how = constants["DESCRIPTORS"]
    q, k, v = (_dense(x, how) for x in (q, k, v))
    end, depths, order, counts = layout[:4]
    out = torch.empty(T, H, V, dtype=q.dtype, device=q.device)
    lse = torch.empty(H, T, dtype=torch.float32, device=q.device)
    if T:
        read = (_described(x, rows, how) for x, rows in ((q, sizes.rows), (k, sizes.columns), (v, sizes.columns)))
        _forward_kernel[(-(-T // sizes.rows), H)](
            *read, end, depths, order, counts, out, lse, T, K**-0.5 * LOG2_E, window, order.shape[1],
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], out.stride(0), **constants, SPECIALIZE=sizes.specialize,
        )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: list[Tensor], window: int
) -> tuple[Tensor, Tensor, Tensor]:
    (T, H, K), (_, G, V) = q.shape, v.shape
    sizes = tuned("attention_backward", q, V, window)
    constants = _constants(q, k, v, sizes, window)
    how, ordered = constants["DESCRIPTORS"], torch.are_deterministic_algorithms_enabled()
    grad, q, k, v = (_dense(x, how) for x in (grad, q, k, v))
    end, depths, _, _, order, counts, turns = layout
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    if not T:
        return dq.to(q.dtype), dk, dv
    delta = torch.empty_like(lse)
    _delta_kernel[(-(-T // DELTA_ROWS), H)](grad, out, delta, T, out.stride(0), *grad.stride()[:2], V=V, BLOCK_V=_power(V), M=DELTA_ROWS)
    finished = torch.zeros(H * -(-T // sizes.rows) if ordered else 1, dtype=torch.int32, device=q.device)
    blocks = ((q, sizes.rows), (k, sizes.columns), (v, sizes.columns), (grad, sizes.rows))
    _backward_kernel[(-(-T // sizes.columns), G)](
        *(_described(x, rows, how) for x, rows in blocks), _described(dq, sizes.rows, how and not ordered), dk, dv,
        end, depths, order, counts, turns, finished, lse, delta, T, K**-0.5 * LOG2_E, K**-0.5, window, order.shape[1],
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *grad.stride()[:2], dq.stride(0), dk.stride(0), dv.stride(0),
        **constants, ORDERED=ordered,
    )  # fmt: skip
    return dq.to(q.dtype), dk, dv


def layout(mask: ForestMask, q_THK: Tensor, V: int) -> list[Tensor]:
    """Return the mask for the kernels: ends, depths, and for each kernel the blocks to visit with their counts, and the turns."""
    forward, backward = (tuned(f"attention_{kernel}", q_THK, V, mask.window or 0) for kernel in ("forward", "backward"))
    visits = mask.blocks(forward.rows, forward.columns)[:2] + mask.blocks(backward.rows, backward.columns)[2:]
    return [mask.end.to(torch.int32), mask.depths, *visits]
