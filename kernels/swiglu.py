"""SwiGLU (Shazeer 2020): silu(gate) * up, elementwise. Shapes: T rows, F width.

With s = sigmoid(gate): d_up = dy gate s and d_gate = dy up s (1 + gate (1 - s)). Only the inputs are saved for
the backward pass. Low precision is computed in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from puna.kernels.cpu.lazy_jit import Address, has_numba, numba_jit, strict_jit, triton_jit
from puna.kernels.cpu.loops import by_rows, exp32, run_rows
from puna.kernels.operators import differentiable, fused_on_cpu, operator, wide

if TYPE_CHECKING:
    import triton.language as tl
if has_numba():
    from puna.kernels.cpu.vectors import LANES, add, exp, fill, load_first, minus, over, store_first, times

NUMERICS = {"swiglu": 2}
BLOCK = 2048  # elements of one Triton program


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up by the definition, in the inputs' dtype."""
    return gate / (1 + torch.exp(-gate)) * up


# --- CPU -------------------------------------------------------------------------------------------------


@strict_jit
def _silu_times(gate: Any, up: Any) -> Any:
    return times(over(gate, add(fill(np.float32(1)), exp(minus(fill(np.float32(0)), gate)))), up)


@strict_jit
def swiglu_row(width: int, gate: Address, up: Address, y: Address) -> None:
    for i in range(0, width, LANES):
        store_first(y + 4 * i, _silu_times(load_first(gate + 4 * i, width - i), load_first(up + 4 * i, width - i)), width - i)


@strict_jit
def _forward_loop(part: int, start: int, stop: int, width: int, gate: Address, gate_row: int, up: Address, up_row: int, y: Address) -> None:
    """Compute rows `start` to `stop` - 1; gate_row and up_row are the row strides of gate and up in bytes."""
    for t in range(start, stop):
        swiglu_row(width, gate + t * gate_row, up + t * up_row, y + 4 * t * width)


@numba_jit
def _backward_loop(part: int, start: int, stop: int, dy: Any, gate: Any, up: Any, strides: Any, dgate: Any, dup: Any) -> None:
    """Write the gradients to `dgate` and `dup`. gate and up are flat, with rows `strides` elements apart. Each row is sliced first:
    the loop over the slice needs no index checks, so it is vectorized."""
    width = dy.shape[1]
    for t in range(start, stop):
        d, to_gate, to_up = dy[t], dgate[t], dup[t]
        g, u = gate[t * strides[0] : t * strides[0] + width], up[t * strides[1] : t * strides[1] + width]
        for i in range(width):
            s = np.float32(1) / (np.float32(1) + exp32(-g[i]))
            to_up[i] = d[i] * g[i] * s
            to_gate[i] = d[i] * u[i] * s * (np.float32(1) + g[i] * (np.float32(1) - s))


def _flat(x_TF: Tensor) -> Tensor:
    """Return x as a flat view from its first to its last element, including gaps between rows."""
    T, width = x_TF.shape
    return x_TF.as_strided(((T - 1) * x_TF.stride(0) + width,), (1,))


def _can_fuse(*tensors: Tensor) -> bool:
    if not all(x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.numel() for x in tensors):
        return False
    return fused_on_cpu(*(x if x.is_contiguous() else _flat(x) for x in tensors))


def _forward(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    if _can_fuse(gate_TF, up_TF):
        y_TF = torch.empty(gate_TF.shape, dtype=gate_TF.dtype)
        arguments = [number for x in (gate_TF, up_TF) for number in (x.data_ptr(), 4 * x.stride(0))]
        run_rows(_forward_loop, *y_TF.shape, y_TF.shape[1], *arguments, y_TF.data_ptr())
        return y_TF
    return (F.silu(gate_TF.to(wide(gate_TF.dtype))) * up_TF).to(gate_TF.dtype)


def _backward(dy_TF: Tensor, gate_TF: Tensor, up_TF: Tensor) -> tuple[Tensor, Tensor]:
    dy_TF = dy_TF.contiguous()
    if _can_fuse(dy_TF, gate_TF, up_TF):
        dgate_TF, dup_TF = torch.empty_like(dy_TF), torch.empty_like(dy_TF)
        strides = torch.tensor([gate_TF.stride(0), up_TF.stride(0)])
        by_rows(_backward_loop, *dy_TF.shape, dy_TF, _flat(gate_TF), _flat(up_TF), strides, dgate_TF, dup_TF)
        return dgate_TF, dup_TF
    dy, gate = dy_TF.to(wide(dy_TF.dtype)), gate_TF.to(wide(dy_TF.dtype))
    s = torch.sigmoid(gate)
    return (dy * up_TF * s * (1 + gate * (1 - s))).to(dy_TF.dtype), (dy * gate * s).to(dy_TF.dtype)


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _forward_kernel(gate, up, y, width, gate_stride, up_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < width
    g = tl.load(gate + t * gate_stride + f, inside, 0.0).to(tl.float32)
    u = tl.load(up + t * up_stride + f, inside, 0.0).to(tl.float32)
    tl.store(y + t * width + f, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), inside)


@triton_jit
def _backward_kernel(dy, gate, up, dgate, dup, width, gate_stride, up_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < width
    d = tl.load(dy + t * width + f, inside, 0.0).to(tl.float32)
    g = tl.load(gate + t * gate_stride + f, inside, 0.0).to(tl.float32)
    u = tl.load(up + t * up_stride + f, inside, 0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dup + t * width + f, (d * g * s).to(dup.dtype.element_ty), inside)
    tl.store(dgate + t * width + f, (d * u * s * (1 + g * (1 - s))).to(dgate.dtype.element_ty), inside)


def _dense_rows(x_TF: Tensor) -> Tensor:
    """Return x, copied unless the elements of a row are contiguous; rows may be strided (such as halves of a joint projection)."""
    return x_TF if x_TF.stride(1) == 1 else x_TF.contiguous()


def _grid(x_TF: Tensor) -> tuple[int, int]:
    return x_TF.shape[0], -(-x_TF.shape[1] // BLOCK)


def _forward_triton(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    gate, up = _dense_rows(gate_TF), _dense_rows(up_TF)
    y_TF = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y_TF.numel():
        _forward_kernel[_grid(y_TF)](gate, up, y_TF, y_TF.shape[1], gate.stride(0), up.stride(0), BLOCK=BLOCK, num_warps=8)
    return y_TF


def _backward_triton(dy_TF: Tensor, gate_TF: Tensor, up_TF: Tensor) -> tuple[Tensor, Tensor]:
    dy, gate, up = dy_TF.contiguous(), _dense_rows(gate_TF), _dense_rows(up_TF)
    dgate_TF, dup_TF = torch.empty_like(dy), torch.empty_like(dy)
    if dy.numel():
        _backward_kernel[_grid(dy)](dy, gate, up, dgate_TF, dup_TF, dy.shape[1], gate.stride(0), up.stride(0), BLOCK=BLOCK, num_warps=8)
    return dgate_TF, dup_TF


# --- façade ----------------------------------------------------------------------------------------------


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_swiglu = operator("swiglu(Tensor gate, Tensor up) -> Tensor", _forward, _forward_triton, lambda gate, up: _like(gate))
_swiglu_backward = operator(
    "swiglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    _backward, _backward_triton, lambda dy, gate, up: (_like(dy), _like(dy)),
)  # fmt: skip
differentiable(
    _swiglu,
    lambda ctx, dy: _swiglu_backward(dy, *ctx.saved_tensors),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, in the inputs' shape and dtype; raise ValueError if these differ. Strided rows are read in place."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate is {gate.dtype} {list(gate.shape)}, up {up.dtype} {list(up.shape)}: they must be alike")
    width = gate.shape[-1]
    return _swiglu(gate.reshape(-1, width), up.reshape(-1, width)).view(gate.shape)  # type: ignore[no-any-return]
