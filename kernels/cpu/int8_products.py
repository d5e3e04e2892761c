"""Products of rows in INT8 for numba's loops, by the unit that adds four products of bytes to a 32-bit sum (AVX-512 VNNI). A CPU
without that unit computes the same sums in steps; as that is slow, `AVAILABLE` is False there and the model multiplies in fp32.

    y[t, n] = s[t] s'[n] sum_d q[t, d] q'[n, d]

The sums are integers, so a number has the same bits whatever is computed with it, and those of `quantized_linear`. The unit multiplies
bytes without a sign by bytes with one: rows of x are kept as q + 128, and 128 times the sum of a row of w is taken off again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from puna.kernels.cpu import vector_code as llvm
from puna.kernels.cpu.lazy import strict_jit
from puna.kernels.cpu.vectors import (
    LANES,
    add,
    fill,
    higher,
    load_first,
    minus,
    peak,
    prefetch_bytes,
    store,
    times,
    total,
    vector,
)

AVAILABLE = bool({"avx512vnni", "avx512bw"} <= {name for name, there in binding.get_host_cpu_features().items() if there})
STEP = 64  # bytes that the unit takes at once
ROWS, COLUMNS = 4, 4  # of a product that are computed together
PANEL = 64  # columns that stay in a cache while rows take turns at them
AHEAD = 8 << 10  # bytes that weights are asked for ahead
LEAST = np.float32(1e-30)
BYTES, MASK = ir.VectorType(ir.IntType(8), STEP), ir.VectorType(ir.IntType(1), STEP)


def row_bytes(D: int) -> int:
    """Return the bytes of a row of x: its numbers, to whole steps, and a vector of its scale."""
    return -(-D // STEP) * STEP + 4 * LANES


@intrinsic
def _store_bytes(typing: Any, address: Any, value: Any) -> Any:
    """Round sixteen numbers between -127 and 127, add 128 to each and write them as bytes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = builder.fptosi(llvm.call(builder, "rint", args[1]), llvm.INTEGERS)
        small = ir.VectorType(ir.IntType(8), LANES)
        lanes = builder.trunc(builder.add(whole, ir.Constant(llvm.INTEGERS, [128] * LANES)), small)
        builder.store(lanes, builder.inttoptr(args[0], small.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, vector), code


def _add_products(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """Add to each 32-bit sum four products of a byte of a (without a sign) and a byte of b (with one). LLVM ends the process where it
    meets the unit's instruction on a CPU without the unit, so such a CPU gets plain instructions."""
    if AVAILABLE:
        kind = ir.FunctionType(llvm.INTEGERS, [llvm.INTEGERS] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", (), kind), [sums, a, b])
    wide = ir.VectorType(ir.IntType(32), STEP)
    products = builder.mul(builder.zext(builder.bitcast(a, BYTES), wide), builder.sext(builder.bitcast(b, BYTES), wide))
    for part in range(4):
        lanes = ir.Constant(llvm.INTEGERS, [4 * lane + part for lane in range(LANES)])
        sums = builder.add(sums, builder.shuffle_vector(products, products, lanes))
    return sums


def _dots(rows: int, columns: int) -> Any:
    """Compile the products of `rows` rows at x (of `quantize_row`, `scale_at` bytes before their scale) with `columns` dense rows of w."""

    @intrinsic
    def dots(typing: Any, x: Any, x_row: Any, w: Any, depth: Any, scale_at: Any, scales: Any, sums: Any, y: Any, y_row: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_row, w, depth, scale_at, scales, sums, y, y_row = args
            left = [builder.add(x, builder.mul(x_row, llvm.INT(i))) for i in range(rows)]
            right = [builder.add(w, builder.mul(depth, llvm.INT(j))) for j in range(columns)]
            found = [cgutils.alloca_once(builder, llvm.INTEGERS) for _ in range(rows * columns)]
            for place in found:
                builder.store(ir.Constant(llvm.INTEGERS, [0] * LANES), place)

            def more(at: Any, load: Any) -> None:
                b = [builder.bitcast(load(builder.add(address, at)), llvm.INTEGERS) for address in right]
                for i in range(rows):
                    pointer = builder.inttoptr(builder.add(left[i], at), llvm.INTEGERS.as_pointer())
                    a = builder.load(pointer, align=1)
                    for j, place in enumerate(found[i * columns : (i + 1) * columns]):
                        builder.store(_add_products(builder, builder.load(place), a, b[j]), place)

            def whole(address: Any) -> Any:
                return builder.load(builder.inttoptr(address, BYTES.as_pointer()), align=1)

            steps, rest = builder.sdiv(depth, llvm.INT(STEP)), builder.srem(depth, llvm.INT(STEP))
            with cgutils.for_range(builder, steps) as loop:
                more(builder.mul(loop.index, llvm.INT(STEP)), whole)
            with builder.if_then(builder.icmp_signed(">", rest, llvm.INT(0))):
                # The bits below 2^rest: which bytes of w are its row's; those of x behind them count nothing then.
                bits = builder.sub(builder.shl(llvm.INT(1), rest), llvm.INT(1))
                inside, none = builder.bitcast(bits, MASK), ir.Constant(BYTES, [0] * STEP)
                kind = ir.FunctionType(BYTES, [BYTES.as_pointer(), ir.IntType(32), MASK, BYTES])
                some = builder.module.declare_intrinsic(f"llvm.masked.load.v{STEP}i8.p0v{STEP}i8", (), kind)
                last = builder.mul(steps, llvm.INT(STEP))
                more(last, lambda at: builder.call(some, [builder.inttoptr(at, BYTES.as_pointer()), ir.IntType(32)(1), inside, none]))
            number, floats = (ir.VectorType(kind, columns) for kind in (ir.IntType(32), llvm.FLOAT))
            shift = builder.mul(
                builder.load(builder.inttoptr(sums, number.as_pointer()), align=4), ir.Constant(number, [128] * columns)
            )
            scale = builder.load(builder.inttoptr(scales, floats.as_pointer()), align=4)
            for i in range(rows):
                lanes = llvm.sums(builder, [builder.load(place) for place in found[i * columns : (i + 1) * columns]], builder.add)
                one = builder.load(builder.inttoptr(builder.add(left[i], scale_at), floats.as_pointer()), align=4)
                value = builder.fmul(builder.fmul(builder.sitofp(builder.sub(lanes, shift), floats), one), scale)
                to = builder.inttoptr(builder.add(y, builder.mul(y_row, llvm.INT(i))), floats.as_pointer())
                builder.store(value, to, align=4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), code

    return dots


_tile, _row, _column, _one = _dots(ROWS, COLUMNS), _dots(1, COLUMNS), _dots(ROWS, 1), _dots(1, 1)


@strict_jit
def quantize_row(D: Any, x: Any, to: Any) -> None:
    """Write the row of D numbers at x as bytes q + 128 at `to`, and its scale in each lane of a vector behind them: the numbers of
    `quantize_rows`. A row that is not finite has the scale NaN."""
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
def products8(T: Any, N: Any, D: Any, x: Any, w: Any, scales: Any, sums: Any, y: Any, y_row: Any) -> None:
    """Compute y [T, N] from `quantize_row` rows at x and w [N, D] in INT8 with its rows' scales and sums [N]. By address; y has rows
    y_row bytes apart."""
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
