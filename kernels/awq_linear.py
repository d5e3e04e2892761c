"""A linear layer whose weights are 4-bit integers in groups (AWQ, Lin et al. 2023), spelled out on the fly.

    w[d, n] = (q[d, n] - z[g, n]) s[g, n] with g = d // size of a group;  y = x w

The layout is that of AWQ checkpoints: an int32 holds eight neighbouring columns, column j in the four bits from
`4 SHIFT[j]`. For few rows (decoding) the Triton version multiplies as it unpacks, so that the weights are read in 4
bits; for many rows it writes them once in x's type, which the library's product then uses as often as it needs.

Shapes: T rows, D inputs, N outputs, P = N / 8 packed columns, G groups of D / G inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from puna.kernels.lazy import triton_jit
from puna.kernels.linear import product
from puna.kernels.operators import differentiable, operator, wide

if TYPE_CHECKING:
    import triton.language as tl

SHIFT = (0, 4, 1, 5, 2, 6, 3, 7)
FEW = 64  # rows up to which unpacking and multiplying are one
ROWS, COLUMNS, DEPTH = 16, 64, 64  # tile of that product, and inputs summed at once
SPLITS = 8  # parts of the inputs that programs of their own sum, at most


def pack_awq(levels_DN: Tensor) -> Tensor:
    """[D, N / 8] int32 from integers 0 to 15; N is a multiple of 8. Zeros are packed alike."""
    if levels_DN.shape[1] % 8 or bool((levels_DN < 0).any()) or bool((levels_DN > 15).any()):
        raise ValueError(f"levels {list(levels_DN.shape)} must lie in 0..15, in a multiple of 8 columns")
    shifts = 4 * torch.tensor(SHIFT, device=levels_DN.device)
    words = (levels_DN.long().view(len(levels_DN), -1, 8) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_awq(packed_DP: Tensor) -> Tensor:
    """The inverse of `pack_awq`: [D, 8 P] int32."""
    shifts = 4 * torch.tensor(SHIFT, dtype=torch.int32, device=packed_DP.device)
    return ((packed_DP[..., None] >> shifts) & 15).flatten(1)


def quantize_awq(w_ND: Tensor, group: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """(packed weights [D, N / 8], packed zeros [G, N / 8], scales [G, N] in w's type) by rounding, range by range.

    Each group's range, zero included, is cut into 15 steps. AWQ's search for scales of the inputs comes before this.
    """
    N, D = w_ND.shape
    if D % group:
        raise ValueError(f"{D} inputs are no multiple of the group size {group}")
    w_GSN = w_ND.T.to(wide(w_ND.dtype)).reshape(D // group, group, N)
    low_GN, high_GN = w_GSN.amin(1).clamp_max(0), w_GSN.amax(1).clamp_min(0)
    scale_GN = ((high_GN - low_GN) / 15).clamp_min(1e-5).to(w_ND.dtype)
    step_GN = scale_GN.to(w_GSN.dtype)
    zero_GN = (-low_GN / step_GN).round().clamp(0, 15)
    levels = ((w_GSN / step_GN[:, None]).round() + zero_GN[:, None]).clamp(0, 15)
    return pack_awq(levels.view(D, N)), pack_awq(zero_GN), scale_GN


def awq_linear_reference(x_TD: Tensor, packed_DP: Tensor, zeros_GP: Tensor, scales_GN: Tensor) -> Tensor:
    """The definition, in x's dtype."""
    return x_TD @ _weights(packed_DP, zeros_GP, scales_GN, x_TD.dtype)


# --- portable --------------------------------------------------------------------------------------------


def _weights(packed_DP: Tensor, zeros_GP: Tensor, scales_GN: Tensor, dtype: torch.dtype) -> Tensor:
    size = len(packed_DP) // len(zeros_GP)
    levels_GSN = unpack_awq(packed_DP).view(len(zeros_GP), size, -1)
    scaled = (levels_GSN - unpack_awq(zeros_GP)[:, None]).to(wide(dtype)) * scales_GN[:, None].to(wide(dtype))
    return scaled.flatten(0, 1).to(dtype)


def _linear(x_TD: Tensor, packed_DP: Tensor, zeros_GP: Tensor, scales_GN: Tensor) -> Tensor:
    return product(x_TD, _weights(packed_DP, zeros_GP, scales_GN, x_TD.dtype).T)


def _backward(dy_TN: Tensor, packed_DP: Tensor, zeros_GP: Tensor, scales_GN: Tensor) -> Tensor:
    return product(dy_TN, _weights(packed_DP, zeros_GP, scales_GN, dy_TN.dtype))


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _unpack(words, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """[K, C / 8] words to their [K, C] levels."""
    eight = tl.interleave(words, words)
    eight = tl.interleave(eight, eight)
    eight = tl.interleave(eight, eight)
    j = tl.arange(0, C) % 8
    return (eight >> (4 * (j // 2 + 4 * (j % 2)))[None, :]) & 15


@triton_jit
def _spelled_out(packed, zeros, scales, d, column, D, N, size, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """[K, C] weights in fp32 of the inputs d, columns from `column`, a multiple of 8; zero beyond the last input."""
    word = column // 8 + tl.arange(0, C // 8)
    inside = (d < D)[:, None] & (word < N // 8)[None, :]
    levels = _unpack(tl.load(packed + d.to(tl.int64)[:, None] * (N // 8) + word[None, :], inside, 0), C)
    group = d // size
    middle = _unpack(tl.load(zeros + group[:, None] * (N // 8) + word[None, :], inside, 0), C)
    n = column + tl.arange(0, C)
    steps = tl.load(scales + group[:, None] * N + n[None, :], (d < D)[:, None] & (n < N)[None, :], 0.0)
    return (levels - middle).to(tl.float32) * steps.to(tl.float32)


@triton_jit
def _weights_kernel(packed, zeros, scales, w, D, N, size, K: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.program_id(0) * K + tl.arange(0, K)
    column = tl.program_id(1) * C
    n = column + tl.arange(0, C)
    values = _spelled_out(packed, zeros, scales, d, column, D, N, size, C)
    tl.store(w + d.to(tl.int64)[:, None] * N + n[None, :], values.to(w.dtype.element_ty), (d[:, None] < D) & (n[None, :] < N))


@triton_jit
def _few_rows_kernel(
    x, packed, zeros, scales, parts, T, D, N, size, share, x_t,
    M: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """[M, C] of the product over the inputs from `share` times the program's number, `share` of them."""
    part = tl.program_id(2)
    t = tl.program_id(1) * M + tl.arange(0, M)
    column = tl.program_id(0) * C
    acc = tl.zeros([M, C], tl.float32)
    for first in range(part * share, tl.minimum((part + 1) * share, D), K):
        d = first + tl.arange(0, K)
        x_MK = tl.load(x + t.to(tl.int64)[:, None] * x_t + d[None, :], (t < T)[:, None] & (d < D)[None, :], 0.0)
        w_KC = _spelled_out(packed, zeros, scales, d, column, D, N, size, C).to(x_MK.dtype)
        acc = tl.dot(x_MK, w_KC, acc, input_precision=PRECISION)
    n = column + tl.arange(0, C)
    at = parts + (part.to(tl.int64) * T + t[:, None]) * N + n[None, :]
    tl.store(at, acc, (t[:, None] < T) & (n[None, :] < N))


def _weights_triton(packed_DP: Tensor, zeros_GP: Tensor, scales_GN: Tensor, dtype: torch.dtype) -> Tensor:
    (D, P), size = packed_DP.shape, len(packed_DP) // len(zeros_GP)
    w_DN = torch.empty(D, 8 * P, dtype=dtype, device=packed_DP.device)
    grid = (-(-D // DEPTH), -(-8 * P // COLUMNS))
    _weights_kernel[grid](
        packed_DP.contiguous(), zeros_GP.contiguous(), scales_GN.contiguous(), w_DN, D, 8 * P, size, K=DEPTH, C=COLUMNS, num_warps=4
    )
    return w_DN


def _linear_triton(x_TD: Tensor, packed_DP: Tensor, zeros_GP: Tensor, scales_GN: Tensor) -> Tensor:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    (T, D), N = x_TD.shape, scales_GN.shape[1]
    if not 0 < T <= FEW:
        return x_TD @ _weights_triton(packed_DP, zeros_GP, scales_GN, x_TD.dtype)
    share = DEPTH * -(-D // (DEPTH * SPLITS))
    splits = -(-D // share)
    exact = x_TD.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    parts = torch.empty(splits, T, N, dtype=torch.float32, device=x_TD.device)
    _few_rows_kernel[(-(-N // COLUMNS), -(-T // ROWS), splits)](
        x_TD, packed_DP.contiguous(), zeros_GP.contiguous(), scales_GN.contiguous(), parts, T, D, N, D // len(zeros_GP), share,
        x_TD.stride(0), M=ROWS, C=COLUMNS, K=DEPTH, PRECISION="ieee" if exact else "tf32", num_warps=4, num_stages=2,
    )  # fmt: skip
    return parts.sum(0).to(x_TD.dtype)


def _backward_triton(dy_TN: Tensor, packed_DP: Tensor, zeros_GP: Tensor, scales_GN: Tensor) -> Tensor:
    return dy_TN @ _weights_triton(packed_DP, zeros_GP, scales_GN, dy_TN.dtype).T


# --- façade ----------------------------------------------------------------------------------------------


_awq_linear = operator(
    "awq_linear(Tensor x, Tensor packed, Tensor zeros, Tensor scales) -> Tensor",
    _linear, _linear_triton, lambda x, packed, zeros, scales: x.new_empty(len(x), scales.shape[1]),
)  # fmt: skip
_awq_backward = operator(
    "awq_linear_backward(Tensor dy, Tensor packed, Tensor zeros, Tensor scales) -> Tensor",
    _backward, _backward_triton, lambda dy, packed, zeros, scales: dy.new_empty(len(dy), len(packed)),
)  # fmt: skip
differentiable(
    "awq_linear",
    lambda ctx, dy: (_awq_backward(dy, *ctx.saved_tensors), None, None, None),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)


def awq_linear(x: Tensor, packed_DP: Tensor, zeros_GP: Tensor, scales_GN: Tensor) -> Tensor:
    """x times the 4-bit weights: [..., D] to [..., N] in x's dtype; differentiable in x, for adapters on top.

    `packed` [D, N / 8] and `zeros` [G, N / 8] int32 are a checkpoint's qweight and qzeros, `scales` [G, N] its scales.
    """
    (D, P), G = packed_DP.shape, len(zeros_GP)
    if x.shape[-1] != D or zeros_GP.shape[1] != P or scales_GN.shape != (G, 8 * P) or not G or D % G:
        raise ValueError(
            f"x {list(x.shape)}, packed {[D, P]}, zeros {list(zeros_GP.shape)}, scales {list(scales_GN.shape)} do not fit: "
            "a checkpoint has qweight [D, N / 8], qzeros [G, N / 8] and scales [G, N], G a divisor of D"
        )
    return _awq_linear(x.reshape(-1, D), packed_DP, zeros_GP, scales_GN).view(*x.shape[:-1], 8 * P)  # type: ignore[no-any-return]
