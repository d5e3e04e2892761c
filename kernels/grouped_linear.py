"""Grouped linear layer: a separate weight matrix for each group of rows, such as the tokens of one expert in a mixture of experts.

Rows are sorted by group; group e has rows offsets[e] : offsets[e + 1]. On a GPU the offsets are not copied to the host. So the grid has
spare tiles, which return at once. For aligned bf16 tensors, torch's `grouped_mm` is used where `configurations.json` says so.

Shapes: N rows, E groups, D inputs, F outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puna.kernels.configurations import capability, configuration, in_full
from puna.kernels.cpu.lazy_jit import triton_jit
from puna.kernels.linear import product
from puna.kernels.operators import differentiable, operator

if TYPE_CHECKING:
    import triton.language as tl

NUMERICS = {"grouped_linear": 1}


def grouped_linear_reference(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    """Return [N, F]: each row of x times the transposed matrix of its group."""
    cuts = offsets_E1.tolist()
    return torch.cat([x_ND[cuts[e] : cuts[e + 1]] @ w_EFD[e].T for e in range(len(w_EFD))])


def _grouped_product(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    y_NF = x_ND.new_empty(len(x_ND), w_EFD.shape[1])
    cuts = offsets_E1.tolist()
    for e, w_FD in enumerate(w_EFD):
        rows = slice(cuts[e], cuts[e + 1])
        if rows.start < rows.stop:
            y_NF[rows] = product(x_ND[rows], w_FD)
    return y_NF


def _grouped_weights(dy_NF: Tensor, x_ND: Tensor, offsets_E1: Tensor) -> Tensor:
    dw_EFD = dy_NF.new_zeros(len(offsets_E1) - 1, dy_NF.shape[1], x_ND.shape[1])
    cuts = offsets_E1.tolist()
    for e, dw_FD in enumerate(dw_EFD):
        rows = slice(cuts[e], cuts[e + 1])
        if rows.start < rows.stop:
            torch.mm(dy_NF[rows].T, x_ND[rows], out=dw_FD)
    return dw_EFD


@triton_jit
def _grouped_kernel(  # type: ignore[no-untyped-def]
    x, w, offsets, firsts, owners, y, F, D, x_n, w_e, w_f, w_d,
    M: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute one [M, C] tile of one expert's product. `owners`: the expert of each row tile (-1: none); `firsts`: the tile's first row."""
    expert = tl.load(owners + tl.program_id(1))
    if expert < 0:
        return
    begin = tl.load(firsts + tl.program_id(1))
    end = tl.load(offsets + expert + 1)
    n = begin + tl.arange(0, M)
    f = tl.program_id(0) * C + tl.arange(0, C)
    k = tl.arange(0, K)
    rows = x + tl.minimum(n, end - 1)[:, None] * x_n + k[None, :]
    columns = w + expert * w_e + tl.minimum(f, F - 1).to(tl.int64)[None, :] * w_f + k[:, None].to(tl.int64) * w_d
    acc = tl.zeros([M, C], tl.float32)
    for first in range(0, D, K):
        if EVEN:
            acc = tl.dot(tl.load(rows), tl.load(columns), acc, input_precision=PRECISION)
        else:
            x_MK = tl.load(rows, (first + k < D)[None, :], 0.0)
            acc = tl.dot(x_MK, tl.load(columns, (first + k < D)[:, None], 0.0), acc, input_precision=PRECISION)
        rows += K
        columns += K * w_d
    tl.store(y + n[:, None] * F + f[None, :], acc.to(y.dtype.element_ty), (n[:, None] < end) & (f[None, :] < F))


@triton_jit
def _grouped_weights_kernel(  # type: ignore[no-untyped-def]
    dy, x, offsets, dw, F, D, dy_n, x_n, M: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one [M, C] tile of dw[e] = dy^T x over the rows of expert e. Rows are added in order: sums do not depend on the schedule."""
    expert = tl.program_id(2).to(tl.int64)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    f = tl.program_id(1) * M + tl.arange(0, M)
    d = tl.program_id(0) * C + tl.arange(0, C)
    k = tl.arange(0, K)
    acc = tl.zeros([M, C], tl.float32)
    for first in range(begin, end, K):
        n = (first + k).to(tl.int64)
        dy_MK = tl.load(dy + n[None, :] * dy_n + f[:, None], (n[None, :] < end) & (f[:, None] < F), 0.0)
        x_KC = tl.load(x + n[:, None] * x_n + d[None, :], (n[:, None] < end) & (d[None, :] < D), 0.0)
        acc = tl.dot(dy_MK, x_KC, acc, input_precision=PRECISION)
    at = dw + expert * F * D + f.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, acc.to(dw.dtype.element_ty), (f[:, None] < F) & (d[None, :] < D))


def _tiles(rows: int, offsets_E1: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return ([tiles] int64 first rows, [tiles] int64 experts) of enough `size`-row tiles for any offsets; spare tiles have expert -1."""
    E = len(offsets_E1) - 1
    last_E = ((offsets_E1.diff() + size - 1) // size).cumsum(0)
    tile = torch.arange(-(-rows // size) + min(E, rows), device=offsets_E1.device)
    expert = torch.searchsorted(last_E, tile, right=True)
    near = expert.clamp_max(E - 1)
    before = torch.cat([last_E.new_zeros(1), last_E])[near]
    return offsets_E1[near] + (tile - before) * size, torch.where(expert < E, expert, -1)


def _library(left: Tensor, right: Tensor, offsets_E1: Tensor) -> Tensor:
    """Return torch's grouped product: [N, D] times [E, D, F] gives [N, F]; [F, N] times [N, D] gives [E, F, D]. Groups may have any number
    of rows: torch's alignment rule is for contiguous axes, and the grouped axis N is contiguous in neither factor."""
    return torch.nn.functional.grouped_mm(left, right, offs=offsets_E1[1:].to(torch.int32))


def _library_takes(*factors: Tensor) -> bool:
    """True if torch's grouped product accepts the factors' device, dtype and address: bf16 on a GPU, aligned to 16 bytes."""
    return all(x.is_cuda and x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in factors)


def _grouped_triton(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    (N, D), F = x_ND.shape, w_EFD.shape[1]
    tile = configuration("grouped_linear", capability(x_ND.device))
    if tile.library and N and D % 8 == F % 8 == 0 and _library_takes(x_ND, w_EFD):
        return _library(x_ND.contiguous(), w_EFD.transpose(1, 2), offsets_E1)
    y_NF = torch.empty(N, F, dtype=x_ND.dtype, device=x_ND.device)
    if y_NF.numel():
        firsts, owners = _tiles(N, offsets_E1, tile.rows)
        _grouped_kernel[(-(-F // tile.columns), len(owners))](
            x_ND, w_EFD, offsets_E1, firsts, owners, y_NF, F, D, x_ND.stride(0), *w_EFD.stride(),
            M=tile.rows, C=tile.columns, K=tile.depth, PRECISION="ieee" if in_full(x_ND) else "tf32", EVEN=D % tile.depth == 0,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y_NF


def _grouped_weights_triton(dy_NF: Tensor, x_ND: Tensor, offsets_E1: Tensor) -> Tensor:
    dy_NF, x_ND = (z if z.stride(1) == 1 else z.contiguous() for z in (dy_NF, x_ND))
    E, F, D = len(offsets_E1) - 1, dy_NF.shape[1], x_ND.shape[1]
    tile = configuration("grouped_weights", capability(x_ND.device))
    if tile.library and len(x_ND) and D % 8 == F % 8 == 0 and _library_takes(dy_NF, x_ND):
        return _library(dy_NF.contiguous().T, x_ND.contiguous(), offsets_E1)
    dw_EFD = torch.empty(E, F, D, dtype=dy_NF.dtype, device=dy_NF.device)
    _grouped_weights_kernel[(-(-D // tile.columns), -(-F // tile.rows), E)](
        dy_NF, x_ND, offsets_E1, dw_EFD, F, D, dy_NF.stride(0), x_ND.stride(0),
        M=tile.rows, C=tile.columns, K=tile.depth, PRECISION="ieee" if in_full(x_ND) else "tf32",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dw_EFD


_grouped_linear = operator(
    "grouped_linear(Tensor x, Tensor w, Tensor offsets) -> Tensor",
    _grouped_product, _grouped_triton, lambda x, w, offsets: x.new_empty(x.shape[0], w.shape[1]),
)  # fmt: skip
_grouped_weight_gradient = operator(
    "grouped_linear_weights(Tensor dy, Tensor x, Tensor offsets) -> Tensor",
    _grouped_weights, _grouped_weights_triton, lambda dy, x, offsets: dy.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1]),
)  # fmt: skip


def _backward_grouped(ctx: Any, dy_NF: Tensor) -> tuple[Any, ...]:
    x_ND, w_EFD, offsets_E1 = ctx.saved_tensors
    dx = _grouped_linear(dy_NF, w_EFD.transpose(1, 2), offsets_E1) if ctx.needs_input_grad[0] else None
    dw = _grouped_weight_gradient(dy_NF, x_ND, offsets_E1).to(w_EFD.dtype) if ctx.needs_input_grad[1] else None
    return dx, dw, None


differentiable(_grouped_linear, _backward_grouped, lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def grouped_linear(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    """Return [N, F]: rows offsets[e] : offsets[e + 1] of x times the transposed matrix of expert e. `offsets` [E + 1] int64, ascending from
    0 to N, on x's device. Differentiable in x and w. Raise ValueError if x's or w's width or the number of offsets does not fit."""
    if x_ND.shape[1] != w_EFD.shape[2] or len(offsets_E1) != len(w_EFD) + 1:
        raise ValueError(f"x {list(x_ND.shape)}, w {list(w_EFD.shape)} and {len(offsets_E1)} offsets do not fit")
    return _grouped_linear(x_ND, w_EFD, offsets_E1)  # type: ignore[no-any-return]
