"""A fixed linear layer with a low-rank update (LoRA, Hu et al. 2021): y = x W^T + s (x A^T) B^T.

    h = x A^T;  g = dy B;  dx = dy W + s g A;  dA = s g^T x;  dB = s dy^T h

The low-rank term enters the large product's sum before its tile is written, forward and backward, so that no second
array as large as y or dx is ever made. Kept for the backward: x and h. W gets no gradient.

Shapes: T rows, D inputs, N outputs, R rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puna.kernels.configurations import capability, configuration
from puna.kernels.lazy import triton_jit
from puna.kernels.linear import product
from puna.kernels.operators import differentiable, operator

if TYPE_CHECKING:
    import triton.language as tl


def lora_linear_reference(x_TD: Tensor, w_ND: Tensor, a_RD: Tensor, b_NR: Tensor, scale: float) -> Tensor:
    """The definition, in the inputs' dtype."""
    return x_TD @ w_ND.T + scale * ((x_TD @ a_RD.T) @ b_NR.T)


# --- portable --------------------------------------------------------------------------------------------


def _updated(x_TD: Tensor, w_ND: Tensor, h_TR: Tensor, b_NR: Tensor, scale: float) -> Tensor:
    return product(x_TD, w_ND).addmm_(h_TR, b_NR.T, alpha=scale)


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _updated_kernel(
    x, w, h, b, out, T, N, D, rank, scale, x_t, w_n, w_d, h_t, b_n, b_r,
    M: tl.constexpr, C: tl.constexpr, K: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One [M, C] tile of x w^T + scale h b^T; programs walk down GROUP tiles before they go right."""
    program = tl.program_id(0)
    tiles = tl.cdiv(N, C)
    band = program // (GROUP * tiles)
    height = tl.minimum(tl.cdiv(T, M) - band * GROUP, GROUP)
    t = (band * GROUP + program % (GROUP * tiles) % height) * M + tl.arange(0, M)
    n = program % (GROUP * tiles) // height * C + tl.arange(0, C)
    near_t = tl.minimum(t, T - 1).to(tl.int64)[:, None]
    near_n = tl.minimum(n, N - 1).to(tl.int64)[None, :]
    r = tl.arange(0, R)
    left = tl.load(h + near_t * h_t + r[None, :], (r < rank)[None, :], 0.0)
    right = tl.load(b + near_n * b_n + r[:, None] * b_r, (r < rank)[:, None], 0.0)
    acc = tl.dot(left, right, input_precision=PRECISION) * scale
    k = tl.arange(0, K)
    rows = x + near_t * x_t + k[None, :]
    columns = w + near_n * w_n + k[:, None].to(tl.int64) * w_d
    for first in range(0, D, K):
        if EVEN:
            acc = tl.dot(tl.load(rows), tl.load(columns), acc, input_precision=PRECISION)
        else:
            x_MK = tl.load(rows, (first + k < D)[None, :], 0.0)
            acc = tl.dot(x_MK, tl.load(columns, (first + k < D)[:, None], 0.0), acc, input_precision=PRECISION)
        rows += K
        columns += K * w_d
    at = out + t.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), (t[:, None] < T) & (n[None, :] < N))


def _updated_triton(x_TD: Tensor, w_ND: Tensor, h_TR: Tensor, b_NR: Tensor, scale: float) -> Tensor:
    x_TD, h_TR = (x if x.stride(1) == 1 else x.contiguous() for x in (x_TD, h_TR))
    (T, D), (N, R) = x_TD.shape, b_NR.shape
    out_TN = torch.empty(T, N, dtype=x_TD.dtype, device=x_TD.device)
    tile = configuration("product", capability(x_TD.device), 0)
    exact = x_TD.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if out_TN.numel():
        _updated_kernel[(-(-T // tile.rows) * -(-N // tile.columns),)](
            x_TD, w_ND, h_TR, b_NR, out_TN, T, N, D, R, scale, x_TD.stride(0), *w_ND.stride(), h_TR.stride(0), *b_NR.stride(),
            M=tile.rows, C=tile.columns, K=tile.depth, R=max(16, 1 << (R - 1).bit_length()), GROUP=8,
            PRECISION="ieee" if exact else "tf32", EVEN=D % tile.depth == 0, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out_TN


# --- façade ----------------------------------------------------------------------------------------------


_product_with_update = operator(
    "lora_product(Tensor x, Tensor w, Tensor h, Tensor b, float scale) -> Tensor",
    _updated, _updated_triton, lambda x, w, h, b, scale: x.new_empty(len(x), len(w)),
)  # fmt: skip


def _forward(x_TD: Tensor, w_ND: Tensor, a_RD: Tensor, b_NR: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    h_TR = product(x_TD, a_RD)
    return _product_with_update(x_TD, w_ND, h_TR, b_NR, scale), h_TR


_lora_linear = operator(
    "lora_linear(Tensor x, Tensor w, Tensor a, Tensor b, float scale) -> (Tensor, Tensor)",
    _forward, _forward, lambda x, w, a, b, scale: (x.new_empty(len(x), len(w)), x.new_empty(len(x), len(a))),
)  # fmt: skip


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x_TD, w_ND, a_RD, b_NR, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_TD, w_ND, a_RD, b_NR, output[1])


def _backward(ctx: Any, dy_TN: Tensor | None, _: Any) -> tuple[Any, ...]:
    if dy_TN is None:
        return (None,) * 5
    x_TD, w_ND, a_RD, b_NR, h_TR = ctx.saved_tensors
    need_x, _, need_a, need_b, _ = ctx.needs_input_grad
    g_TR = product(dy_TN, b_NR.T) if need_x or need_a else None
    dx = _product_with_update(dy_TN, w_ND.T, g_TR, a_RD.T, ctx.scale) if need_x else None
    da = product(g_TR.T, x_TD.T).mul_(ctx.scale) if need_a and g_TR is not None else None
    db = product(dy_TN.T, h_TR.T).mul_(ctx.scale) if need_b else None
    return dx, None, da, db, None


differentiable("lora_linear", _backward, _setup)


def lora_linear(x: Tensor, w_ND: Tensor, a_RD: Tensor, b_NR: Tensor, scale: float) -> Tensor:
    """x W^T + scale (x A^T) B^T, [..., D] to [..., N] in x's dtype; differentiable in x, A and B. W is fixed.

    `scale` is alpha / rank in most settings, alpha / sqrt(rank) with rank stabilisation.
    """
    (N, D), R = w_ND.shape, len(a_RD)
    if x.shape[-1] != D or a_RD.shape != (R, D) or b_NR.shape != (N, R):
        raise ValueError(f"x {list(x.shape)}, w {[N, D]}, a {list(a_RD.shape)}, b {list(b_NR.shape)} do not fit: a is [R, {D}], b [{N}, R]")
    if w_ND.requires_grad:
        raise ValueError("lora_linear gives w no gradient: call requires_grad_(False) on it")
    y_TN, _ = _lora_linear(x.reshape(-1, D), w_ND, a_RD, b_NR, float(scale))
    return y_TN.view(*x.shape[:-1], N)  # type: ignore[no-any-return]
