"""Products of rows in numba's loops, whose sums stay in registers: of rows with rows, and attention's, of rows with pages.

Each result is one chain of fused products in a fixed order, so it has the same bits whatever is computed with it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from puna.kernels.cpu import vector_code as llvm

# Rows and columns of a product that are computed together: as many sums as registers hold beside what they are made of.
TILE = (4, 4) if binding.get_host_cpu_features().get("avx512f") else (2, 2)


def _store_sums(builder: Any, vectors: list[Any], columns: int, y: Any, y_row: Any) -> None:
    """Write the sum of each vector's lanes at y, `columns` to a row."""
    kind = ir.VectorType(llvm.FLOAT, columns).as_pointer()
    for i in range(len(vectors) // columns):
        to = builder.add(y, builder.mul(y_row, llvm.INT(i)))
        row = llvm.sums(builder, vectors[i * columns : (i + 1) * columns])
        builder.store(row, builder.inttoptr(to, kind), align=4)


def _dots(rows: int, columns: int) -> Any:
    """Compile the products of `rows` rows at x with `columns` rows at w, sums over `depth` numbers, into y: by address and stride in bytes.

    Every product is one chain of sixteen sums in the order of the numbers, added up at its end, in any tile: so it has the same bits
    whatever is computed with it.
    """

    @intrinsic
    def dots(typing: Any, x: Any, x_row: Any, w: Any, w_row: Any, depth: Any, y: Any, y_row: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_row, w, w_row, depth, y, y_row = args
            left = [builder.add(x, builder.mul(x_row, llvm.INT(i))) for i in range(rows)]
            right = [builder.add(w, builder.mul(w_row, llvm.INT(j))) for j in range(columns)]
            whole = builder.mul(builder.sdiv(depth, llvm.INT(llvm.LANES)), llvm.INT(4 * llvm.LANES))
            before = builder.block
            head, body, after = (builder.append_basic_block(f"dots.{name}") for name in ("head", "body", "after"))
            builder.branch(head)

            builder.position_at_end(head)
            at, sums = builder.phi(llvm.INT), [builder.phi(llvm.VECTOR) for _ in range(rows * columns)]
            at.add_incoming(llvm.INT(0), before)
            for each in sums:
                each.add_incoming(llvm.constant(0.0), before)
            builder.cbranch(builder.icmp_signed("<", at, whole), body, after)

            def more(load: Any) -> list[Any]:
                b = [load(builder.add(address, at)) for address in right]
                found = []
                for i in range(rows):
                    a = load(builder.add(left[i], at))
                    found += [llvm.call(builder, "fma", a, b[j], sums[i * columns + j]) for j in range(columns)]
                return found

            builder.position_at_end(body)
            for each, value in zip(sums, more(lambda address: builder.load(llvm.at(builder, address), align=4)), strict=True):
                each.add_incoming(value, body)
            at.add_incoming(builder.add(at, llvm.INT(4 * llvm.LANES)), body)
            builder.branch(head)

            builder.position_at_end(after)
            rest = builder.srem(depth, llvm.INT(llvm.LANES))
            tail, end = (builder.append_basic_block(f"dots.{name}") for name in ("tail", "end"))
            builder.cbranch(builder.icmp_signed(">", rest, llvm.INT(0)), tail, end)
            builder.position_at_end(tail)
            inside = llvm.first_lanes(builder, rest)
            longer = more(lambda address: llvm.load_first(builder, address, inside))
            builder.branch(end)
            builder.position_at_end(end)
            results = []
            for each, value in zip(sums, longer, strict=True):
                result = builder.phi(llvm.VECTOR)
                result.add_incoming(each, after)
                result.add_incoming(value, tail)
                results.append(result)
            _store_sums(builder, results, columns, y, y_row)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), code

    return dots


dots_tile, dots_row, dots_column, dots_one = _dots(*TILE), _dots(1, TILE[1]), _dots(TILE[0], 1), _dots(1, 1)


AHEAD = 4  # pages of attention between the one that is multiplied and the one that is asked for


def _by_rows(builder: Any, count: Any, rows: int, tile: Any) -> None:
    """Write tile(m, r) for rows m .. m + r - 1: `rows`, a power of two, as often as it fits, then what is left by smaller powers."""
    with cgutils.for_range(builder, builder.sdiv(count, llvm.INT(rows))) as loop:
        tile(builder.mul(loop.index, llvm.INT(rows)), rows)
    while rows > 1:
        m, rows = builder.and_(count, llvm.INT(-rows)), rows // 2
        with builder.if_then(builder.icmp_signed("!=", builder.and_(count, llvm.INT(rows)), llvm.INT(0))):
            tile(m, rows)


def _page(builder: Any, table: Any, index: int, pages: Any, size: Any) -> Any:
    """Return the address of the page that stands at `index` in a table of 32-bit numbers."""
    number = builder.load(builder.inttoptr(builder.add(table, llvm.INT(4 * index)), ir.IntType(32).as_pointer()))
    return builder.add(pages, builder.mul(builder.sext(number, llvm.INT), size))


def _number(builder: Any, address: Any) -> Any:
    """Return the number at an address, in all lanes."""
    return llvm.spread(builder, builder.load(builder.inttoptr(address, llvm.FLOAT.as_pointer()), align=4))


def _multiply(builder: Any, left: list[Any], vectors: list[Any], sums: list[Any]) -> None:
    """sums[i, j] += the number at left[i] times vectors[j]."""
    for i, address in enumerate(left):
        x = _number(builder, address)
        for vector, place in zip(vectors, sums[i * len(vectors) :], strict=False):
            builder.store(llvm.call(builder, "fma", x, vector, builder.load(place)), place)


def _page_scores(width: int, rows: int) -> Any:
    """out[m, 16 j : 16 j + 16] = sum over c < depth of a[m, c] b_j[c, 0:16] for `width` pages b_j of a table: by address and stride in
    bytes. One chain of fused products for each number, in the order of c. The pages that stand `AHEAD` places further in the table are
    asked for on the way: a line for each that is multiplied, where a burst of them would keep the core from its work."""

    @intrinsic
    def scores(
        typing: Any, count: Any, depth: Any, a: Any, a_row: Any, table: Any, pages: Any, size: Any, out: Any, out_row: Any
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            count, depth, a, a_row, table, pages, size, out, out_row = args
            right, later = ([_page(builder, table, j + more, pages, size) for j in range(width)] for more in (0, AHEAD))

            def tile(m: Any, r: int) -> None:
                left = [builder.add(a, builder.mul(a_row, builder.add(m, llvm.INT(i)))) for i in range(r)]
                sums = [cgutils.alloca_once(builder, llvm.VECTOR) for _ in range(r * width)]
                for place in sums:
                    builder.store(llvm.constant(0.0), place)
                with cgutils.for_range(builder, depth) as loop:
                    number, line = (builder.mul(loop.index, llvm.INT(step)) for step in (4, 4 * llvm.LANES))
                    vectors = [builder.load(llvm.at(builder, builder.add(address, line)), align=4) for address in right]
                    for address in later:
                        llvm.prefetch(builder, builder.add(address, line))
                    _multiply(builder, [builder.add(address, number) for address in left], vectors, sums)
                for i in range(r):
                    to = builder.add(out, builder.mul(out_row, builder.add(m, llvm.INT(i))))
                    for j in range(width):
                        address = llvm.at(builder, builder.add(to, llvm.INT(4 * llvm.LANES * j)))
                        builder.store(builder.load(sums[i * width + j]), address, align=4)

            _by_rows(builder, count, rows, tile)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), code

    return scores


def _page_sums(width: int, rows: int) -> Any:
    """out[m, 0 : 16 width] += sum over pages i < length of a table and their rows c < 16 of a[m, 16 i + c] b_i[c, 0 : 16 width]: by
    address and stride in bytes. One chain of fused products for each number, in the order of i and c. The page that stands `AHEAD`
    places further in the table is asked for on the way."""

    @intrinsic
    def values(
        typing: Any, count: Any, length: Any, a: Any, a_row: Any, table: Any, pages: Any, size: Any, b_row: Any, out: Any, out_row: Any
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            count, length, a, a_row, table, pages, size, b_row, out, out_row = args

            def tile(m: Any, r: int) -> None:
                sums = [cgutils.alloca_once(builder, llvm.VECTOR) for _ in range(r * width)]
                to = [builder.add(out, builder.mul(out_row, builder.add(m, llvm.INT(i)))) for i in range(r)]
                places = [llvm.at(builder, builder.add(row, llvm.INT(4 * llvm.LANES * j))) for row in to for j in range(width)]
                for sum_, place in zip(sums, places, strict=True):
                    builder.store(builder.load(place, align=4), sum_)
                with cgutils.for_range(builder, length) as outer:
                    here = builder.add(table, builder.mul(outer.index, llvm.INT(4)))
                    b, later = (_page(builder, here, j, pages, size) for j in (0, AHEAD))
                    line = builder.mul(outer.index, llvm.INT(4 * llvm.LANES))
                    left = [builder.add(builder.add(a, builder.mul(a_row, builder.add(m, llvm.INT(i)))), line) for i in range(r)]
                    with cgutils.for_range(builder, llvm.INT(llvm.LANES)) as inner:
                        row, number = builder.mul(inner.index, b_row), builder.mul(inner.index, llvm.INT(4))
                        at = [builder.add(row, llvm.INT(4 * llvm.LANES * j)) for j in range(width)]
                        vectors = [builder.load(llvm.at(builder, builder.add(b, place)), align=4) for place in at]
                        for place in at:
                            llvm.prefetch(builder, builder.add(later, place))
                        _multiply(builder, [builder.add(address, number) for address in left], vectors, sums)
                for sum_, place in zip(sums, places, strict=True):
                    builder.store(builder.load(sum_), place, align=4)

            _by_rows(builder, count, rows, tile)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 10), code

    return values


# Rows and vectors of a tile of attention: of many rows, and of few, whose sums alone would wait for each other.
TALL, TALL_WIDTH, FEW_WIDTH = (8, 2, 4) if TILE[0] > 2 else (4, 1, 2)
scores_tall, scores_few, scores_one = _page_scores(TALL_WIDTH, TALL), _page_scores(FEW_WIDTH, TALL // 2), _page_scores(1, TALL)
values_tall, values_few, values_one = _page_sums(TALL_WIDTH, TALL), _page_sums(FEW_WIDTH, TALL // 2), _page_sums(1, TALL)
