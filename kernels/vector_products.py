"""Products of rows in numba's loops, whose sums stay in registers: of rows with rows, and weighted sums of rows.

Each result is one chain of fused products in a fixed order, so it has the same bits whatever is computed with it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import types
from numba.extending import intrinsic

from puna.kernels import vector_code as llvm

# Rows and columns of a product that are computed together: as many sums as registers hold beside what they are made of.
TILE = (4, 4) if binding.get_host_cpu_features().get("avx512f") else (2, 2)


def _dots(rows: int, columns: int) -> Any:
    """The products of `rows` rows at x with `columns` rows at w, each a sum over `depth` numbers, at y: all by address and stride in bytes.

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
            kind = ir.VectorType(llvm.FLOAT, columns).as_pointer()
            for i in range(rows):
                to = builder.add(y, builder.mul(y_row, llvm.INT(i)))
                found = llvm.sums(builder, results[i * columns : (i + 1) * columns])
                builder.store(found, builder.inttoptr(to, kind), align=4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), code

    return dots


dots_tile, dots_row, dots_column, dots_one = _dots(*TILE), _dots(1, TILE[1]), _dots(TILE[0], 1), _dots(1, 1)


def _weighted(rows: int) -> Any:
    """out[m, 0:16] = sum over c < depth of a[m, c] b[c, 0:16] for `rows` rows, or with `more` added to what is there: by address and
    stride in bytes. One chain of fused products for each row, in the order of c. What lies `ahead` bytes behind b is asked for on the
    way: one line for each that is multiplied, where a burst of them would keep the core from its work."""

    @intrinsic
    def weighted(typing: Any, depth: Any, a: Any, a_row: Any, b: Any, b_row: Any, out: Any, out_row: Any, more: Any, ahead: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            depth, a, a_row, b, b_row, out, out_row, more, ahead = args
            left = [builder.add(a, builder.mul(a_row, llvm.INT(i))) for i in range(rows)]
            to = [llvm.at(builder, builder.add(out, builder.mul(out_row, llvm.INT(i)))) for i in range(rows)]
            before = builder.block
            there, head, body, after = (builder.append_basic_block(f"weighted.{name}") for name in ("there", "head", "body", "after"))
            builder.cbranch(more, there, head)
            builder.position_at_end(there)
            begun = [builder.load(address, align=4) for address in to]
            builder.branch(head)

            builder.position_at_end(head)
            c, sums = builder.phi(llvm.INT), [builder.phi(llvm.VECTOR) for _ in range(rows)]
            for block in (before, there):
                c.add_incoming(llvm.INT(0), block)
            for each, value in zip(sums, begun, strict=True):
                each.add_incoming(llvm.constant(0.0), before)
                each.add_incoming(value, there)
            builder.cbranch(builder.icmp_signed("<", c, depth), body, after)

            builder.position_at_end(body)
            at = builder.add(b, builder.mul(b_row, c))
            x = builder.load(llvm.at(builder, at), align=4)
            llvm.prefetch(builder, builder.add(at, ahead))
            for each, address in zip(sums, left, strict=True):
                one = builder.load(builder.inttoptr(builder.add(address, builder.mul(c, llvm.INT(4))), llvm.FLOAT.as_pointer()), align=4)
                each.add_incoming(llvm.call(builder, "fma", llvm.spread(builder, one), x, each), body)
            c.add_incoming(builder.add(c, llvm.INT(1)), body)
            builder.branch(head)

            builder.position_at_end(after)
            for each, address in zip(sums, to, strict=True):
                builder.store(each, address, align=4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7, types.boolean, types.intp), code

    return weighted


weighted_1, weighted_2, weighted_4, weighted_8 = (_weighted(rows) for rows in (1, 2, 4, 8))
