"""Rotary position embedding (Su et al. 2021), in the half-split layout of Llama checkpoints.

Shapes: T tokens, N heads, K head width. Pair i of a head is (x[i], x[i + K/2]); position p rotates it by
p * theta^(-2 i / K). A rotation's transpose is its inverse, so the backward pass needs only the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from puna.kernels.cpu.lazy_jit import Address, has_numba, strict_jit, triton_jit
from puna.kernels.cpu.loops import run_rows
from puna.kernels.exact import exact
from puna.kernels.operators import differentiable, fused_on_cpu, operator

if TYPE_CHECKING:
    import triton.language as tl
if has_numba():
    from puna.kernels.cpu.vectors import LANES, add, fill, load_first, minus, store_first, times

NUMERICS = {"rope": 2}
HEADS = 8  # heads that a Triton program rotates at once


def rope_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, K/2] of each position's angles, computed in fp64 and returned in `dtype`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64)[:, None] * theta**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope_reference(x_TNK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with every pair of every head rotated by the token's angles."""
    first, second = x_TNK.chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


# --- CPU -------------------------------------------------------------------------------------------------


@strict_jit
def rotate_head(half: int, x: Address, cos: Address, sin: Address, sign: float, out: Address) -> None:
    """Write one rotated head of one token to `out`, which may be x. `sign` -1: rotate back."""
    way = fill(np.float32(sign))
    for i in range(0, half, LANES):
        first, second = load_first(x + 4 * i, half - i), load_first(x + 4 * (half + i), half - i)
        c, s = load_first(cos + 4 * i, half - i), times(load_first(sin + 4 * i, half - i), way)
        store_first(out + 4 * i, minus(times(first, c), times(second, s)), half - i)
        store_first(out + 4 * (half + i), add(times(second, c), times(first, s)), half - i)


@strict_jit
def _rotate_loop(
    part: int, start: int, stop: int, heads: int, half: int, x: Address, cos: Address, sin: Address, sign: float, out: Address
) -> None:
    for t in range(start, stop):
        for n in range(t * heads, (t + 1) * heads):
            rotate_head(half, x + 8 * n * half, cos + 4 * t * half, sin + 4 * t * half, sign, out + 8 * n * half)


def _rotate(x_TNK: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    if exact():  # else the row count would choose the path: a slice of wider rows is contiguous only if it has one row
        x_TNK = x_TNK.contiguous()
    if fused_on_cpu(x_TNK, cos, sin):
        out = torch.empty_like(x_TNK)
        T, N, K = x_TNK.shape
        arguments = (x_TNK.data_ptr(), cos.data_ptr(), sin.data_ptr(), -1.0 if back else 1.0, out.data_ptr())
        run_rows(_rotate_loop, T, N * K, N, K // 2, *arguments)
        return out
    half, sign = x_TNK.shape[-1] // 2, -1.0 if back else 1.0
    c, s = cos[:, None], sin[:, None]
    out = torch.empty(x_TNK.shape, dtype=x_TNK.dtype, device=x_TNK.device)
    torch.mul(x_TNK[..., :half], c, out=out[..., :half]).addcmul_(x_TNK[..., half:], s, value=-sign)
    torch.mul(x_TNK[..., half:], c, out=out[..., half:]).addcmul_(x_TNK[..., :half], s, value=sign)
    return out


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x, cos, sin, out, heads, x_token, x_head,
    BACK: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    c = tl.load(cos + t * HALF + pair, pair < HALF, 0.0).to(tl.float32)[None, :]
    s = tl.load(sin + t * HALF + pair, pair < HALF, 0.0).to(tl.float32)[None, :]
    if BACK:
        s = -s
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (pair[None, :] < HALF)
        source = x + t * x_token + head * x_head + pair[None, :]
        target = out + (t * heads + head) * (2 * HALF) + pair[None, :]
        a = tl.load(source, inside, 0.0).to(tl.float32)
        b = tl.load(source + HALF, inside, 0.0).to(tl.float32)
        tl.store(target, (a * c - b * s).to(out.dtype.element_ty), inside)
        tl.store(target + HALF, (b * c + a * s).to(out.dtype.element_ty), inside)


def _rotate_triton(x_TNK: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    x_TNK = x_TNK if x_TNK.stride(2) == 1 else x_TNK.contiguous()
    T, N, K = x_TNK.shape
    out = torch.empty(x_TNK.shape, dtype=x_TNK.dtype, device=x_TNK.device)
    if out.numel():
        block = max(8, 1 << (K // 2 - 1).bit_length())
        _rotate_kernel[(T,)](
            x_TNK, cos.contiguous(), sin.contiguous(), out, N, x_TNK.stride(0), x_TNK.stride(1),
            BACK=back, HALF=K // 2, HEADS=HEADS, BLOCK=block, num_warps=2,
        )  # fmt: skip
    return out


# --- façade ----------------------------------------------------------------------------------------------


_rope = operator(
    "rope(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor",
    _rotate, _rotate_triton, lambda x, cos, sin, back: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)  # fmt: skip


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.back = inputs[3]


differentiable(_rope, lambda ctx, grad: (_rope(grad, *ctx.saved_tensors, not ctx.back), None, None, None), _setup)


def rope(x_TNK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, N, K] with rotary position embedding applied, from the tables cos and sin [T, K/2] of `rope_table`; K is even."""
    return _rope(x_TNK, cos, sin, False)  # type: ignore[no-any-return]
