"""Products of rows in INT8 for numba's loops, by AVX-512 VNNI, which adds four products of bytes to a 32-bit sum. A CPU without VNNI
computes the same sums by plain instructions. As that is slow, `AVAILABLE` is False there, and the model multiplies in fp32.

    y[t, n] = s[t] s'[n] sum_d q[t, d] q'[n, d]

The sums are integers, so the bits of a row of y do not depend on other rows, and equal those of `quantized_linear`. VNNI multiplies
unsigned bytes by signed bytes: rows of x are stored as q + 128, and 128 times the sum of a row of w is subtracted."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import types

from puna.kernels.cpu import vector_code as llvm
from puna.kernels.cpu.lazy_jit import Address, strict_jit
from puna.kernels.cpu.vectors import LANES, add, fill, higher, load_first, minus, peak, prefetch_bytes, store, times, total, vector

AVAILABLE = bool({"avx512vnni", "avx512bw"} <= {name for name, there in binding.get_host_cpu_features().items() if there})
STEP = 64  # bytes of one VNNI instruction
ROWS, COLUMNS = 4, 4  # rows and columns of a product that are computed together
PANEL = 64  # columns that stay in a cache while they are multiplied by all rows
AHEAD = 8 << 10  # bytes between the weights in use and the prefetched ones
LEAST = np.float32(1e-30)
BYTES = ir.VectorType(llvm.BYTE, STEP)


def row_bytes(D: int) -> int:
    """Return the number of bytes of a quantized row of x: D bytes, padded to a multiple of `STEP`, and a vector of the row's scale."""
    return -(-D // STEP) * STEP + 4 * LANES


@llvm.operation(types.void, types.intp, vector)
def _store_bytes(builder: Any, address: Any, value: Any) -> None:
    """Round sixteen numbers between -127 and 127, add 128 to each, and write the results as bytes."""
    whole = builder.add(builder.fptosi(llvm.call(builder, "rint", value), llvm.INTEGERS), llvm.constant(128, llvm.INTEGERS))
    llvm.store(builder, builder.trunc(whole, ir.VectorType(llvm.BYTE, LANES)), address, align=1)


def _add_products(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """Return `sums`, with four products of an unsigned byte of a and a signed byte of b added to each 32-bit sum. On a CPU without VNNI,
    LLVM ends the process at a VNNI instruction, so plain instructions are used there."""
    if AVAILABLE:
        kind = ir.FunctionType(llvm.INTEGERS, [llvm.INTEGERS] * 3)
        a, b = (builder.bitcast(factor, llvm.INTEGERS) for factor in (a, b))
        return builder.call(builder.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", (), kind), [sums, a, b])
    wide = ir.VectorType(llvm.INT32, STEP)
    products = builder.mul(builder.zext(a, wide), builder.sext(b, wide))
    for part in range(4):
        lanes = ir.Constant(llvm.INTEGERS, [4 * lane + part for lane in range(LANES)])
        sums = builder.add(sums, builder.shuffle_vector(products, products, lanes))
    return sums


def _dots(rows: int, columns: int) -> Any:
    """Return an operation that multiplies `rows` rows at x (of `quantize_row`, scales at byte `scale_at`) by `columns` rows of w into y."""
    integers, floats = ir.VectorType(llvm.INT32, columns), ir.VectorType(llvm.FLOAT, columns)

    @llvm.operation(types.void, *[types.intp] * 9)
    def dots(builder: Any, x: Any, x_row: Any, w: Any, depth: Any, scale_at: Any, scales: Any, sums: Any, y: Any, y_row: Any) -> None:
        left, right = [llvm.add(builder, x, i, x_row) for i in range(rows)], [llvm.add(builder, w, j, depth) for j in range(columns)]
        zero = llvm.constant(0, llvm.INTEGERS)
        products = llvm.row_products(builder, left, right, depth, BYTES, zero, lambda *factors: _add_products(builder, *factors))
        shift = builder.mul(llvm.load(builder, sums, integers), llvm.constant(128, integers))
        scale = llvm.load(builder, scales, floats)
        for i, row in enumerate(products):
            whole = builder.sitofp(builder.sub(llvm.sums(builder, row, builder.add), shift), floats)
            one = llvm.load(builder, builder.add(left[i], scale_at), floats)
            llvm.store(builder, builder.fmul(builder.fmul(whole, one), scale), llvm.add(builder, y, i, y_row))

    return dots


_tile, _row, _column, _one = _dots(ROWS, COLUMNS), _dots(1, COLUMNS), _dots(ROWS, 1), _dots(1, 1)


@strict_jit
def quantize_row(D: int, x: Address, to: Address) -> None:
    """Write the row of D numbers at x as bytes q + 128 at `to`, and then a vector with the row's scale in all lanes. q and scale equal
    those of `quantize_rows`. A row with a number that is not finite gets the scale NaN."""
    peaks, zeros, none = fill(LEAST), fill(np.float32(0)), fill(np.float32(0))
    for d in range(0, D, LANES):
        row = load_first(x + 4 * d, D - d)
        peaks = higher(higher(row, minus(none, row)), peaks)
        zeros = add(zeros, times(row, none))
    top = peak(peaks)
    finite = total(zeros) == np.float32(0)
    inverse = fill(np.float32(127) / top if finite else np.float32(0))
    end = (D + STEP - 1) // STEP * STEP
    for d in range(0, end, LANES):
        _store_bytes(to + d, times(load_first(x + 4 * d, D - d), inverse) if finite else none)
    store(to + end, fill(top / np.float32(127) if finite else np.float32(np.nan)))


@strict_jit
def products8(T: int, N: int, D: int, x: Address, w: Address, scales: Address, sums: Address, y: Address, y_row: int) -> None:
    """Write y [T, N], the products of T rows at x (of `quantize_row`) and the INT8 rows of w [N, D]; scales and sums [N] are those of w's
    rows. Arrays are given by address; rows of y are y_row bytes apart."""
    scale_at = (D + STEP - 1) // STEP * STEP
    x_row = scale_at + 4 * LANES
    for left in range(0, N, PANEL):
        right = min(left + PANEL, N)
        even = left + (right - left) // COLUMNS * COLUMNS
        t = 0
        while t < T:
            tall = t + ROWS <= T
            a, to = x + t * x_row, y + t * y_row
            for n in range(left, even, COLUMNS):
                if t == 0:
                    prefetch_bytes(w + n * D + AHEAD, COLUMNS * D)
                b, scale, sum_, out = w + n * D, scales + 4 * n, sums + 4 * n, to + 4 * n
                if tall:
                    _tile(a, x_row, b, D, scale_at, scale, sum_, out, y_row)
                else:
                    _row(a, x_row, b, D, scale_at, scale, sum_, out, y_row)
            for n in range(even, right):
                b, scale, sum_, out = w + n * D, scales + 4 * n, sums + 4 * n, to + 4 * n
                if tall:
                    _column(a, x_row, b, D, scale_at, scale, sum_, out, y_row)
                else:
                    _one(a, x_row, b, D, scale_at, scale, sum_, out, y_row)
            t += ROWS if tall else 1
