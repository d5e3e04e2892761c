"""Matrix products for numba's loops, with sums in registers: of rows by rows, and in attention, of rows by pages of keys or values.

A result is computed in a fixed order of fused multiply-adds, so its bits do not depend on other rows. Arrays are given by
address and stride in bytes."""

from __future__ import annotations

from typing import Any

from llvmlite import binding
from numba.core import cgutils, types

from puna.kernels.cpu import vector_code as llvm

# Rows and columns of a product that are computed together: as many sums as registers hold beside their factors.
TILE = (4, 4) if binding.get_host_cpu_features().get("avx512f") else (2, 2)
LINE = 4 * llvm.LANES  # bytes of a vector
AHEAD = 4  # places in a page table between the page in use and the prefetched one


def _dots(rows: int, columns: int) -> Any:
    """Return an operation that writes to y the products of `rows` rows at x and `columns` rows at w, of `depth` numbers each."""

    @llvm.operation(types.void, *[types.intp] * 7)
    def dots(builder: Any, x: Any, x_row: Any, w: Any, w_row: Any, depth: Any, y: Any, y_row: Any) -> None:
        left, right = [llvm.add(builder, x, i, x_row) for i in range(rows)], [llvm.add(builder, w, j, w_row) for j in range(columns)]

        def product(a: Any, b: Any, sum_: Any) -> Any:
            return llvm.call(builder, "fma", a, b, sum_)

        for i, row in enumerate(llvm.row_products(builder, left, right, depth, llvm.VECTOR, llvm.constant(0.0), product)):
            llvm.store(builder, llvm.sums(builder, row), llvm.add(builder, y, i, y_row))

    return dots


dots_tile, dots_row, dots_column, dots_one = _dots(*TILE), _dots(1, TILE[1]), _dots(TILE[0], 1), _dots(1, 1)


def _by_rows(builder: Any, count: Any, rows: int, tile: Any) -> None:
    """Write code that covers `count` rows by calls tile(m, r) for rows m .. m + r - 1; r is `rows`, a power of two, then smaller ones."""
    with cgutils.for_range(builder, builder.sdiv(count, llvm.INT(rows))) as loop:
        tile(builder.mul(loop.index, llvm.INT(rows)), rows)
    while rows > 1:
        m, rows = builder.and_(count, llvm.INT(-rows)), rows // 2
        with builder.if_then(builder.icmp_signed("!=", builder.and_(count, llvm.INT(rows)), llvm.INT(0))):
            tile(m, rows)


def _page(builder: Any, table: Any, index: int, pages: Any, size: Any) -> Any:
    """Return the address of the page whose number is at `index` in a table of 32-bit numbers."""
    number = llvm.load(builder, llvm.add(builder, table, index, 4), llvm.INT32)
    return llvm.add(builder, pages, builder.sext(number, llvm.INT), size)


def _multiply(builder: Any, left: list[Any], right: list[Any], sums: llvm.Sums) -> None:
    """Add to sum[i, j] the number at address left[i] times the vector at address right[j]."""
    numbers = [llvm.spread(builder, llvm.load(builder, address, llvm.FLOAT)) for address in left]
    sums.multiply(numbers, [llvm.load(builder, address) for address in right], lambda *factors: llvm.call(builder, "fma", *factors))


def _page_scores(width: int, rows: int) -> Any:
    """Return an operation: out[m, 16 j : 16 j + 16] = sum over c < depth of a[m, c] b_j[c, 0:16] for `width` pages b_j of a table.

    A number is one chain of fused multiply-adds in the order of c. Pages `AHEAD` places further in the table are prefetched meanwhile, one
    cache line per line that is multiplied: prefetching all at once would stall the core."""

    @llvm.operation(types.void, *[types.intp] * 9)
    def scores(builder: Any, count: Any, depth: Any, a: Any, a_row: Any, table: Any, pages: Any, size: Any, out: Any, out_row: Any) -> None:
        here, later = ([_page(builder, table, j + more, pages, size) for j in range(width)] for more in (0, AHEAD))

        def tile(m: Any, r: int) -> None:
            lines = [builder.add(m, llvm.INT(i)) for i in range(r)]
            sums = llvm.Sums(builder, r, width, llvm.constant(0.0))
            with cgutils.for_range(builder, depth) as loop:
                for address in later:
                    llvm.prefetch(builder, llvm.add(builder, address, loop.index, LINE))
                left = [llvm.add(builder, llvm.add(builder, a, line, a_row), loop.index, 4) for line in lines]
                _multiply(builder, left, [llvm.add(builder, address, loop.index, LINE) for address in here], sums)
            for line, row in zip(lines, sums.rows, strict=True):
                to = llvm.add(builder, out, line, out_row)
                for j, value in enumerate(row):
                    llvm.store(builder, value, llvm.add(builder, to, j, LINE))

        _by_rows(builder, count, rows, tile)

    return scores


def _page_sums(width: int, rows: int) -> Any:
    """Return an operation: out[m, 0 : 16 width] += sum over pages i < length and rows c < 16 of a[m, 16 i + c] b_i[c, 0 : 16 width].

    A number is one chain of fused multiply-adds in the order of i and c. The page `AHEAD` places further in the table is prefetched."""

    @llvm.operation(types.void, *[types.intp] * 10)
    def values(
        builder: Any, count: Any, length: Any, a: Any, a_row: Any, table: Any, pages: Any, size: Any, b_row: Any, out: Any, out_row: Any
    ) -> None:
        def tile(m: Any, r: int) -> None:
            lines = [builder.add(m, llvm.INT(i)) for i in range(r)]
            places = [llvm.add(builder, llvm.add(builder, out, line, out_row), j, LINE) for line in lines for j in range(width)]
            sums = llvm.Sums(builder, r, width, llvm.constant(0.0))
            for place, sum_ in zip(places, sums.places, strict=True):
                builder.store(llvm.load(builder, place), sum_)
            with cgutils.for_range(builder, length) as outer:
                here, later = (_page(builder, llvm.add(builder, table, outer.index, 4), j, pages, size) for j in (0, AHEAD))
                numbers = [llvm.add(builder, llvm.add(builder, a, line, a_row), outer.index, LINE) for line in lines]
                with cgutils.for_range(builder, llvm.INT(llvm.LANES)) as inner:
                    b, next_b = (
                        [llvm.add(builder, llvm.add(builder, page, inner.index, b_row), j, LINE) for j in range(width)]
                        for page in (here, later)
                    )
                    for address in next_b:
                        llvm.prefetch(builder, address)
                    _multiply(builder, [llvm.add(builder, address, inner.index, 4) for address in numbers], b, sums)
            for place, value in zip(places, [value for row in sums.rows for value in row], strict=True):
                llvm.store(builder, value, place)

        _by_rows(builder, count, rows, tile)

    return values


# Rows and vectors of an attention tile: for many rows, and for few, which need more vectors so that sums do not wait for each other.
TALL, TALL_WIDTH, FEW_WIDTH = (8, 2, 4) if TILE[0] > 2 else (4, 1, 2)
scores_tall, scores_few, scores_one = _page_scores(TALL_WIDTH, TALL), _page_scores(FEW_WIDTH, TALL // 2), _page_scores(1, TALL)
values_tall, values_few, values_one = _page_sums(TALL_WIDTH, TALL), _page_sums(FEW_WIDTH, TALL // 2), _page_sums(1, TALL)
