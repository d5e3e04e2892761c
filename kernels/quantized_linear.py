"""Linear layers in INT8 or FP8 (e4m3), with one scale per row of each factor, from the row's absolute maximum.

    q[t] = round(x[t] / s[t]) with s[t] = max |x[t]| / 127 (INT8) or 448 (FP8);  y[t, n] = s[t] s'[n] sum_d q[t, d] q'[n, d]

INT8 products are summed exactly, as in int32; FP8 products in fp32, less exactly for bf16 on a GPU. Shapes: T rows, D inputs, N outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

from puna.kernels.configurations import capability, configuration
from puna.kernels.cpu.lazy_jit import Address, has_numba, strict_jit, triton_jit
from puna.kernels.cpu.loops import run_rows
from puna.kernels.operators import fused_on_cpu, operator, wide

if TYPE_CHECKING:
    import triton.language as tl
if has_numba():
    from puna.kernels.cpu.int8_products import AVAILABLE, products8, quantize_row, row_bytes
    from puna.kernels.cpu.vectors import LANES

NUMERICS = {"quantize_rows": 1, "quantized_linear": 1}

Kind = Literal["int8", "fp8"]
TYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LEAST = 1e-30  # lower bound of a row's absolute maximum, so that a row of zeros has a positive scale
BLOCK = 4096  # elements of a row that a program quantizes at once
EXACT_DEPTH = 1024  # number of int8 products whose sum has no rounding in fp32: 1024 * 128^2 = 2^24


def quantize_rows_reference(x_TD: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return (q [T, D] int8 or e4m3, scales [T] in x's dtype): x is about q times scale. A row that is not all finite has scale NaN."""
    top = TOP[TYPES[kind]]
    peak_T = x_TD.abs().amax(1).clamp_min(LEAST)
    scaled_TD = x_TD * (top / peak_T)[:, None]
    q_TD = scaled_TD.round() if kind == "int8" else scaled_TD.clamp(-top, top)
    return q_TD.nan_to_num(0.0).to(TYPES[kind]), torch.where(peak_T.isfinite(), peak_T / top, torch.nan)


def quantized_linear_reference(x_TD: Tensor, q_ND: Tensor, scale_N: Tensor) -> Tensor:
    """Return x w^T in x's dtype, with x quantized by row; `q_ND` and `scale_N`: w from `quantize_rows`."""
    q_TD, scale_T = quantize_rows_reference(x_TD, "fp8" if q_ND.dtype == torch.float8_e4m3fn else "int8")
    return (q_TD.to(x_TD.dtype) * scale_T[:, None]) @ (q_ND.to(x_TD.dtype) * scale_N[:, None]).T


# --- portable --------------------------------------------------------------------------------------------


@strict_jit
def _quantize_loop(part: int, start: int, stop: int, D: int, x: Address, rows: Address, size: int) -> None:
    for t in range(start, stop):
        quantize_row(D, x + 4 * t * D, rows + t * size)


def _quantize(x_TD: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    if not fp8 and fused_on_cpu(x_TD):
        (T, D), size = x_TD.shape, row_bytes(x_TD.shape[1])
        rows = torch.empty(T, size, dtype=torch.uint8)
        run_rows(_quantize_loop, T, D, D, x_TD.data_ptr(), rows.data_ptr(), size)
        # The bytes are q + 128: inverting the highest bit gives q. The row's scale follows them.
        return (rows[:, :D] ^ 128).view(torch.int8), rows.view(torch.float32)[:, -1].clone()
    return quantize_rows_reference(x_TD.to(wide(x_TD.dtype)), "fp8" if fp8 else "int8")


@strict_jit
def _product_loop(
    part: int, start: int, stop: int, N: int, D: int, x: Address, size: int, w: Address, scales: Address, sums: Address, y: Address
) -> None:
    products8(stop - start, N, D, x + start * size, w, scales, sums, y + 4 * start * N, 4 * N)


def _product_of_bytes(a_TD: Tensor, a_T: Tensor, b_ND: Tensor, b_N: Tensor) -> Tensor:
    """Return `_product` for INT8 factors, in fp32, by the loop `products8`. It reads a row of `a` as unsigned bytes, then its scale."""
    (T, D), N, size, b_ND = a_TD.shape, len(b_ND), row_bytes(a_TD.shape[1]), b_ND.contiguous()
    rows, sums_N, y_TN = torch.empty(T, size, dtype=torch.uint8), b_ND.sum(1, dtype=torch.int32), torch.empty(T, N)
    rows[:, :D], rows.view(torch.float32)[:, -LANES:] = a_TD.view(torch.uint8) ^ 128, a_T[:, None]
    operands = (rows.data_ptr(), size, b_ND.data_ptr(), b_N.data_ptr(), sums_N.data_ptr(), y_TN.data_ptr())
    run_rows(_product_loop, T, N * D // 16, N, D, *operands)
    return y_TN


def _product(a_TD: Tensor, a_T: Tensor, b_ND: Tensor, b_N: Tensor, dtype: torch.dtype) -> Tensor:
    high = wide(a_T.dtype)
    if a_TD.dtype == torch.int8 and fused_on_cpu(a_T, b_N) and AVAILABLE:
        return _product_of_bytes(a_TD, a_T, b_ND, b_N).to(dtype)
    depth = EXACT_DEPTH if a_TD.dtype == torch.int8 else a_TD.shape[1]
    pairs = zip(a_TD.split(depth, 1), b_ND.split(depth, 1), strict=True)
    sums_TN = torch.stack([a.to(high) @ b.to(high).T for a, b in pairs])
    sums_TN = sums_TN[0] if len(sums_TN) == 1 else sums_TN.long().sum(0).to(high)
    return sums_TN.mul_(a_T[:, None]).mul_(b_N).to(dtype)


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x, q, scales, width, x_row, TOP: tl.constexpr, LEAST: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize one row: find its largest magnitude, then convert its elements, which are still in the cache."""
    t = tl.program_id(0).to(tl.int64)
    peaks = tl.zeros([BLOCK], tl.float32)
    zeros = tl.zeros([BLOCK], tl.float32)  # NaN where an element is not finite
    for first in range(0, width, BLOCK):
        d = first + tl.arange(0, BLOCK)
        row = tl.load(x + t * x_row + d, d < width, 0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(row))
        zeros += row * 0.0
    peak = tl.maximum(tl.max(peaks, 0), LEAST) + tl.sum(zeros, 0)
    tl.store(scales + t, tl.div_rn(peak, TOP))
    inverse = tl.div_rn(TOP, peak)
    for first in range(0, width, BLOCK):
        d = first + tl.arange(0, BLOCK)
        row = tl.load(x + t * x_row + d, d < width, 0.0).to(tl.float32)
        row = tl.minimum(tl.maximum(row * inverse, -TOP), TOP)
        if ROUND:
            row = (row + 12582912.0) - 12582912.0  # adding and subtracting 1.5 * 2^23 rounds to a whole number
        tl.store(q + t * width + d, row.to(q.dtype.element_ty), d < width)


@triton_jit
def _product_kernel(  # type: ignore[no-untyped-def]
    a, b, a_scales, b_scales, out, T, N, D,
    M: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, SUM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute one [M, C] tile of a b^T, times both scales. Programs go down GROUP tiles before they go right, so b stays in the cache."""
    program = tl.program_id(0)
    tiles = tl.cdiv(N, C)
    band = program // (GROUP * tiles)
    height = tl.minimum(tl.cdiv(T, M) - band * GROUP, GROUP)
    t = (band * GROUP + program % (GROUP * tiles) % height) * M + tl.arange(0, M)
    n = program % (GROUP * tiles) // height * C + tl.arange(0, C)
    k = tl.arange(0, K)
    rows = a + tl.minimum(t, T - 1).to(tl.int64)[:, None] * D + k[None, :]
    columns = b + tl.minimum(n, N - 1).to(tl.int64)[None, :] * D + k[:, None]
    acc = tl.zeros([M, C], SUM)
    for first in range(0, D, K):
        if EVEN:
            acc = tl.dot(tl.load(rows + first), tl.load(columns + first), acc, out_dtype=SUM)
        else:
            left = tl.load(rows + first, (first + k < D)[None, :], 0.0)
            acc = tl.dot(left, tl.load(columns + first, (first + k < D)[:, None], 0.0), acc, out_dtype=SUM)
    y = acc.to(tl.float32) * tl.load(a_scales + t, t < T, 0.0)[:, None] * tl.load(b_scales + n, n < N, 0.0)[None, :]
    at = out + t.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, y.to(out.dtype.element_ty), (t[:, None] < T) & (n[None, :] < N))


def _quantize_triton(x_TD: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    kind = torch.float8_e4m3fn if fp8 else torch.int8
    q_TD, scale_T = torch.empty(x_TD.shape, dtype=kind, device=x_TD.device), x_TD.new_empty(len(x_TD), dtype=torch.float32)
    block = min(BLOCK, max(16, 1 << (x_TD.shape[1] - 1).bit_length()))
    if len(x_TD):
        _quantize_kernel[(len(x_TD),)](
            x_TD, q_TD, scale_T, x_TD.shape[1], x_TD.stride(0), TOP=TOP[kind], LEAST=LEAST, ROUND=not fp8, BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
    return q_TD, scale_T


def _product_triton(a_TD: Tensor, a_T: Tensor, b_ND: Tensor, b_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scaled product: FP8 by torch's faster kernel if it supports shapes and dtype, else (and INT8) by `_product_kernel`."""
    import triton.language as tl

    (T, D), N = a_TD.shape, len(b_ND)
    fp8 = a_TD.dtype == torch.float8_e4m3fn
    if fp8 and a_TD.is_cuda and dtype == torch.bfloat16 and T and D % 16 == 0 and N % 16 == 0:
        by_row = functional.ScalingType.RowWise
        return functional.scaled_mm(a_TD, b_ND.T, a_T[:, None], by_row, b_N[None], by_row, output_dtype=dtype, use_fast_accum=True)
    out_TN = torch.empty(T, N, dtype=dtype, device=a_TD.device)
    tile = configuration("scaled_product", capability(a_TD.device))
    if out_TN.numel():
        _product_kernel[(-(-T // tile.rows) * -(-N // tile.columns),)](
            a_TD, b_ND, a_T, b_N, out_TN, T, N, D, M=tile.rows, C=tile.columns, K=tile.depth, GROUP=8,
            SUM=tl.float32 if fp8 else tl.int32, EVEN=D % tile.depth == 0, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out_TN


# --- façade ----------------------------------------------------------------------------------------------


def _fake_quantize(x_TD: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    kind = torch.float8_e4m3fn if fp8 else torch.int8
    return torch.empty(x_TD.shape, dtype=kind, device=x_TD.device), x_TD.new_empty(x_TD.shape[0], dtype=wide(x_TD.dtype))


_quantize_rows = operator("quantize_rows(Tensor x, bool fp8) -> (Tensor, Tensor)", _quantize, _quantize_triton, _fake_quantize)
_scaled_product = operator(
    "scaled_product(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, ScalarType dtype) -> Tensor",
    _product, _product_triton, lambda a, a_scale, b, b_scale, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype),
)  # fmt: skip


def _forward(x_TD: Tensor, q_ND: Tensor, scale_N: Tensor) -> Tensor:
    q_TD, scale_T = _quantize_rows(x_TD, q_ND.dtype == torch.float8_e4m3fn)
    return _scaled_product(q_TD, scale_T, q_ND, scale_N, x_TD.dtype)  # type: ignore[no-any-return]


def require_products(kind: Kind, device: torch.device) -> None:
    """Raise ValueError if `device` has no 8-bit products of this kind: on a GPU, FP8 needs compute capability 8.9. A CPU computes FP8
    products in fp32: correct, but slower than without quantization."""
    if kind == "fp8" and device.type == "cuda" and capability(device) < 89:
        name, known = torch.cuda.get_device_name(device), capability(device) / 10
        raise ValueError(f"{name} (compute capability {known}) has no FP8 products, which need 8.9: choose int8 or no quantization")


def quantize_rows(x_TD: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return (q [T, D] int8 or e4m3, scales [T] at least fp32): x is about q times scale. A row that is not all finite has scale NaN."""
    return _quantize_rows(x_TD, kind == "fp8")  # type: ignore[no-any-return]


def quantized_linear(x_TD: Tensor, q_ND: Tensor, scale_N: Tensor) -> Tensor:
    """Return x w^T, [T, N] in x's dtype, without autograd; `q_ND` and `scale_N`: w from `quantize_rows`. x is quantized by row here."""
    return _forward(x_TD, q_ND, scale_N)
