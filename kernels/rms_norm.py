"""RMSNorm (Zhang and Sennrich 2019), alone or fused with the residual addition before it.

    total = x + residual;  y = total / sqrt(mean(total^2) + eps) * weight   over the last axis

With r = 1 / sqrt(mean(total^2) + eps), n = total r and g = dy * weight, the backward pass
returns dx = dtotal + r (g - n mean(g n)) and dweight = sum over rows of dy n. Statistics are in fp32 at least.
Shapes: T rows, D width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from puna.kernels.cpu.lazy_jit import Address, has_numba, numba_jit, strict_jit, triton_jit
from puna.kernels.cpu.loops import by_rows, parts, run_rows
from puna.kernels.operators import differentiable, fused_on_cpu, operator, wide

if TYPE_CHECKING:
    import triton.language as tl
if has_numba():
    from puna.kernels.cpu.vectors import LANES, add, carray, fill, fma, lane, load_first, over, pointer, root, store_first, times
    from puna.kernels.cpu.vectors import total as total_of

NUMERICS = {"rms_norm": 2, "add_rms_norm": 2}
ELEMENTS = 2048  # elements per program, in several rows if rows are short (qk-norm): one short row would leave threads idle
PROGRAMS = 264  # maximum programs of the backward pass, each with its own partial dweight: two per multiprocessor of a large GPU


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return y by the definition, in the inputs' dtype."""
    return x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps) * weight_D


def add_rms_norm_reference(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, total) by the definition, in the inputs' dtype."""
    total_TD = x_TD + residual_TD
    return rms_norm_reference(total_TD, weight_D, eps), total_TD


# --- CPU -------------------------------------------------------------------------------------------------


@strict_jit
def norm_row(width: int, x: Address, residual: Address, weight: Address, eps: float, total: Address, y: Address) -> np.float32:
    """Write one normalized row to y; return r (see the module). If `residual` is not 0, write x + residual to `total` and normalize it."""
    squares = fill(np.float32(0))
    for i in range(0, width, LANES):
        z = load_first(x + 4 * i, width - i)
        if residual:
            z = add(z, load_first(residual + 4 * i, width - i))
            store_first(total + 4 * i, z, width - i)
        squares = fma(z, z, squares)
    row = total if residual else x
    mean = over(fill(total_of(squares)), fill(np.float32(width)))
    r = over(fill(np.float32(1)), root(add(mean, fill(np.float32(eps)))))
    for i in range(0, width, LANES):
        z = times(times(load_first(row + 4 * i, width - i), r), load_first(weight + 4 * i, width - i))
        store_first(y + 4 * i, z, width - i)
    return lane(r, 0)  # type: ignore[no-any-return]


@strict_jit
def _forward_loop(
    part: int, start: int, stop: int, width: int, x: Address, residual: Address, weight: Address, eps: float, y: Address, total: Address,
    r: Address,
) -> None:  # fmt: skip
    """Normalize rows given by address: in a generation step, passing arrays would cost more than the arithmetic."""
    r_T = carray(pointer(r), (stop,))
    for t in range(start, stop):
        at = 4 * t * width
        r_T[t] = norm_row(width, x + at, residual + at if residual else 0, weight, eps, total + at, y + at)


@numba_jit
def _backward_loop(part: int, start: int, stop: int, dy: Any, dtotal: Any, total: Any, weight: Any, r: Any, dx: Any, dweight: Any) -> None:
    width = dy.shape[1]
    block = np.zeros(width, np.float32)  # fp32 sums of at most 64 rows, for precision; these are summed in fp64
    for t in range(start, stop):
        dot = np.float32(0)
        for d in range(width):
            gn = dy[t, d] * total[t, d] * r[t]
            block[d] += gn
            dot += gn * weight[d]
        slope = dot / np.float32(width) * r[t]
        if dtotal.shape[0]:
            for d in range(width):
                dx[t, d] = dtotal[t, d] + r[t] * (dy[t, d] * weight[d] - total[t, d] * slope)
        else:
            for d in range(width):
                dx[t, d] = r[t] * (dy[t, d] * weight[d] - total[t, d] * slope)
        if (t - start) % 64 == 63 or t == stop - 1:
            for d in range(width):
                dweight[part, d] += block[d]
                block[d] = 0


def _forward(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if fused_on_cpu(x_TD, residual_TD, weight_D):
        y_TD, r_T = torch.empty_like(x_TD), x_TD.new_empty(len(x_TD))
        total_TD = x_TD if residual_TD is None else torch.empty_like(x_TD)
        residual = 0 if residual_TD is None else residual_TD.data_ptr()
        arguments = (x_TD.shape[1], x_TD.data_ptr(), residual, weight_D.data_ptr(), eps)
        run_rows(_forward_loop, *x_TD.shape, *arguments, y_TD.data_ptr(), total_TD.data_ptr(), r_T.data_ptr())
        return y_TD, total_TD, r_T
    total_TD = x_TD if residual_TD is None else x_TD + residual_TD
    wide_TD = total_TD.to(wide(x_TD.dtype))
    r_T = torch.rsqrt(wide_TD.square().mean(-1) + eps)
    return (wide_TD * r_T[:, None] * weight_D).to(x_TD.dtype), total_TD, r_T


def _backward(dy_TD: Tensor, dtotal_TD: Tensor | None, total_TD: Tensor, weight_D: Tensor, r_T: Tensor) -> tuple[Tensor, Tensor]:
    dy_TD = dy_TD.contiguous()
    dtotal_TD = None if dtotal_TD is None else dtotal_TD.contiguous()
    if fused_on_cpu(dy_TD, dtotal_TD, total_TD, weight_D):
        dx_TD = torch.empty_like(dy_TD)
        dweight_PD = torch.zeros(parts(*dy_TD.shape), dy_TD.shape[1], dtype=torch.float64)
        by_rows(_backward_loop, *dy_TD.shape, dy_TD, dtotal_TD, total_TD, weight_D, r_T, dx_TD, dweight_PD)
        return dx_TD, dweight_PD.sum(0).float()
    n_TD = total_TD.to(r_T.dtype) * r_T[:, None]
    g_TD = dy_TD.to(r_T.dtype) * weight_D
    dx_TD = (g_TD - n_TD * (g_TD * n_TD).mean(-1, keepdim=True)) * r_T[:, None]
    if dtotal_TD is not None:
        dx_TD = dx_TD + dtotal_TD
    return dx_TD.to(dy_TD.dtype), (dy_TD * n_TD).sum(0).to(weight_D.dtype)


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, y, total, r, rows, width, eps,
    ADD: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    d = tl.arange(0, BLOCK)
    at = t[:, None] * width + d[None, :]
    inside = (t < rows)[:, None] & (d < width)[None, :]
    block = tl.load(x + at, inside, 0.0).to(tl.float32)
    if ADD:
        block += tl.load(residual + at, inside, 0.0).to(tl.float32)
        rounded = block.to(total.dtype.element_ty)
        tl.store(total + at, rounded, inside)
        block = rounded.to(tl.float32)  # normalize the rounded total, which the residual stream holds
    scale = 1.0 / tl.sqrt(tl.sum(block * block, 1) / width + eps)
    tl.store(r + t, scale, t < rows)
    gain = tl.load(weight + d, d < width, 0.0).to(tl.float32)
    tl.store(y + at, (block * scale[:, None] * gain[None, :]).to(y.dtype.element_ty), inside)


@triton_jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy, dtotal, total, weight, r, dx, dweight, rows, width,
    ADD: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx of every n-th block of M rows, for n programs, and these rows' part of dweight."""
    d = tl.arange(0, BLOCK)
    gain = tl.load(weight + d, d < width, 0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, rows, M * tl.num_programs(0)):
        t = (first + tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
        at = t[:, None] * width + d[None, :]
        here = (t < rows)[:, None] & (d < width)[None, :]
        g = tl.load(dy + at, here, 0.0).to(tl.float32)
        scale = tl.load(r + t, t < rows, 0.0)[:, None]
        n = tl.load(total + at, here, 0.0).to(tl.float32) * scale
        sums += tl.sum(g * n, 0)
        g *= gain[None, :]
        grad = scale * (g - n * (tl.sum(g * n, 1) / width)[:, None])
        if ADD:
            grad += tl.load(dtotal + at, here, 0.0).to(tl.float32)
        tl.store(dx + at, grad.to(dx.dtype.element_ty), here)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * width + d, sums, d < width)


def block(width: int) -> tuple[int, int, int]:
    """Return (rows per program, padded row width, warps); the first two are powers of two. A thread gets at least 16 elements."""
    size = max(16, 1 << (width - 1).bit_length())
    count = max(1, ELEMENTS // size)
    return count, size, max(1, min(16, count * size // 512))


def _forward_triton(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x_TD = x_TD.contiguous()
    rows, width = x_TD.shape
    residual = x_TD if residual_TD is None else residual_TD.contiguous()
    y_TD, r_T = torch.empty_like(x_TD), x_TD.new_empty(rows, dtype=torch.float32)
    total_TD = x_TD if residual_TD is None else torch.empty_like(x_TD)
    count, size, warps = block(width)
    if rows:
        _forward_kernel[(-(-rows // count),)](
            x_TD, residual, weight_D, y_TD, total_TD, r_T, rows, width, eps,
            ADD=residual_TD is not None, M=count, BLOCK=size, num_warps=warps,
        )  # fmt: skip
    return y_TD, total_TD, r_T


def _backward_triton(dy_TD: Tensor, dtotal_TD: Tensor | None, total_TD: Tensor, weight_D: Tensor, r_T: Tensor) -> tuple[Tensor, Tensor]:
    dy_TD = dy_TD.contiguous()
    rows, width = dy_TD.shape
    dtotal = dy_TD if dtotal_TD is None else dtotal_TD.contiguous()
    count, size, warps = block(width)
    programs = min(PROGRAMS, -(-rows // count))
    dx_TD, dweight_PD = torch.empty_like(dy_TD), dy_TD.new_empty(programs, width, dtype=torch.float32)
    if rows:
        _backward_kernel[(programs,)](
            dy_TD, dtotal, total_TD.contiguous(), weight_D, r_T, dx_TD, dweight_PD, rows, width,
            ADD=dtotal_TD is not None, M=count, BLOCK=size, num_warps=warps,
        )  # fmt: skip
    return dx_TD, dweight_PD.sum(0).to(weight_D.dtype)


# --- façade ----------------------------------------------------------------------------------------------


def _fake(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x_TD), torch.empty_like(x_TD), x_TD.new_empty(x_TD.shape[0], dtype=wide(x_TD.dtype))


def _without_total(forward: Any) -> Any:
    def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y_TD, _, r_T = forward(x_TD, None, weight_D, eps)
        return y_TD, r_T

    return rms_norm


_add_rms_norm = operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    _forward, _forward_triton, _fake,
)  # fmt: skip
_rms_norm = operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _without_total(_forward), _without_total(_forward_triton), lambda x, weight, eps: _fake(x, x, weight, eps)[::2],
)  # fmt: skip
_rms_norm_backward = operator(
    "rms_norm_backward(Tensor dy, Tensor? dtotal, Tensor total, Tensor weight, Tensor r) -> (Tensor, Tensor)",
    _backward, _backward_triton, lambda dy, dtotal, total, weight, r: (torch.empty_like(dy), torch.empty_like(weight)),
)  # fmt: skip


def _setup_add(ctx: Any, inputs: Any, output: Any) -> None:
    _, total_TD, r_T = output
    ctx.mark_non_differentiable(r_T)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total_TD, inputs[2], r_T)


def _backward_add(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, _: Any) -> tuple[Any, ...]:
    total_TD, weight_D, r_T = ctx.saved_tensors
    if dy is None:
        return dtotal, dtotal, None, None
    dx, dweight = _rms_norm_backward(dy, dtotal, total_TD, weight_D, r_T)
    return dx, dx, dweight, None


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _backward_alone(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    return *_rms_norm_backward(dy, None, *ctx.saved_tensors), None


differentiable(_add_rms_norm, _backward_add, _setup_add)
differentiable(_rms_norm, _backward_alone, _setup)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last axis, with x's shape and dtype; low precision is normalized in fp32."""
    return _rms_norm(x_TD.reshape(-1, x_TD.shape[-1]), weight_D, eps)[0].view(x_TD.shape)  # type: ignore[no-any-return]


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of total, total = x + residual) in one pass, with x's shape and dtype. Raise ValueError if residual's differ."""
    if x_TD.shape != residual_TD.shape or x_TD.dtype != residual_TD.dtype:
        raise ValueError(
            f"x is {x_TD.dtype} {list(x_TD.shape)}, residual {residual_TD.dtype} {list(residual_TD.shape)}: they must be alike"
        )
    width = x_TD.shape[-1]
    y_TD, total_TD, _ = _add_rms_norm(x_TD.reshape(-1, width), residual_TD.reshape(-1, width), weight_D, eps)
    return y_TD.view(x_TD.shape), total_TD.view(x_TD.shape)
