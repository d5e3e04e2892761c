"""Sixteen fp32 numbers as one value in numba's loops: what LLVM's own vectoriser does not make of them.

Each operation is one IEEE operation per lane, and `fma` is the fused one, so a loop in these words has one order of
operations whatever it is compiled to: bits that agree, and registers that hold sums. An address is an integer, in bytes.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import binding, ir
from numba.core.datamodel import PrimitiveModel
from numba.core.extending import register_model
from numba.extending import intrinsic

carray, types = numba.carray, numba.types
LANES = 16
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
INTEGERS = ir.VectorType(ir.IntType(32), LANES)
INT = ir.IntType(64)
# Rows and columns of a product that are computed together: as many sums as registers hold beside what they are made of.
TILE = (4, 4) if binding.get_host_cpu_features().get("avx512f") else (2, 2)


class Vector(numba.types.Type):  # type: ignore[misc]
    """The numba type of sixteen fp32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = Vector()


@register_model(Vector)
class _VectorModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


def _constant(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def _spread(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTEGERS, [0] * LANES))


def _call(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(args))
    return builder.call(builder.module.declare_intrinsic(f"llvm.{name}.v{LANES}f32", (), kind), args)


def _at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, VECTOR.as_pointer())


def _first_lanes(builder: Any, count: Any) -> Any:
    undefined = ir.Constant(INTEGERS, ir.Undefined)
    one = builder.insert_element(undefined, builder.trunc(count, ir.IntType(32)), ir.IntType(32)(0))
    everywhere = builder.shuffle_vector(one, undefined, ir.Constant(INTEGERS, [0] * LANES))
    return builder.icmp_signed("<", ir.Constant(INTEGERS, list(range(LANES))), everywhere)


def _masked(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(f"llvm.masked.{name}.v{LANES}f32.p0v{LANES}f32", (), kind), args)


def _load_first(builder: Any, address: Any, inside: Any) -> Any:
    return _masked(builder, "load", VECTOR, _at(builder, address), ir.IntType(32)(4), inside, _constant(0.0))


def _sums(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each vector's lanes, as the lanes of one vector: halves are added until one lane of each is left."""
    width = LANES
    while width > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        lanes = vectors[0].type.count * (2 if len(vectors) > 1 else 1)
        low = [s + i for s in range(0, lanes, width) for i in range(width // 2)]
        parts = [ir.Constant(ir.VectorType(ir.IntType(32), len(low)), [i + more for i in low]) for more in (0, width // 2)]
        vectors = [builder.fadd(*(builder.shuffle_vector(*pair, part) for part in parts)) for pair in pairs]
        width //= 2
    return vectors[0]


def _prefetch(builder: Any, address: Any, near: int = 3) -> None:
    where, number = builder.inttoptr(address, ir.IntType(8).as_pointer()), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [where.type, number, number, number])
    builder.call(builder.module.declare_intrinsic("llvm.prefetch.p0i8", (), kind), [where, number(0), number(near), number(1)])


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """The address as a pointer to fp32 numbers: `carray(pointer(address), shape)` is the array that lies there."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.intp), code


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the 64 bytes at an address, which nothing need lie at."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _prefetch(builder, args[0], 2)
        return context.get_dummy_value()

    return types.void(types.intp), code


@intrinsic
def load(typing: Any, address: Any) -> Any:
    """The sixteen numbers at an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], VECTOR.as_pointer()), align=4)

    return vector(types.intp), code


@intrinsic
def store(typing: Any, address: Any, value: Any) -> Any:
    """Write sixteen numbers to an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, vector), code


@intrinsic
def spread(typing: Any, address: Any) -> Any:
    """The one number at an address, in all lanes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _spread(builder, builder.load(builder.inttoptr(args[0], FLOAT.as_pointer()), align=4))

    return vector(types.intp), code


@intrinsic
def fill(typing: Any, value: Any) -> Any:
    """A number in all lanes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _spread(builder, args[0])

    return vector(types.float32), code


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "fma", *args)

    return vector(vector, vector, vector), code


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    """a + b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return vector(vector, vector), code


@intrinsic
def times(typing: Any, a: Any, b: Any) -> Any:
    """a b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return vector(vector, vector), code


@intrinsic
def higher(typing: Any, a: Any, b: Any) -> Any:
    """The larger of a and b, lane by lane; b where either is no number."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), code


@intrinsic
def lane(typing: Any, a: Any, index: Any) -> Any:
    """One of the sixteen numbers."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], builder.trunc(args[1], ir.IntType(32)))

    return types.float32(vector, types.intp), code


@intrinsic
def between(typing: Any, a: Any, first: Any, stop: Any, other: Any) -> Any:
    """a in the lanes first .. stop - 1, `other` in the rest."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, first, stop, other = args
        whole = ir.VectorType(ir.IntType(64), LANES)
        lanes = ir.Constant(whole, list(range(LANES)))

        def everywhere(number: Any) -> Any:
            undefined = ir.Constant(whole, ir.Undefined)
            one = builder.insert_element(undefined, number, ir.IntType(32)(0))
            return builder.shuffle_vector(one, undefined, ir.Constant(INTEGERS, [0] * LANES))

        inside = builder.and_(
            builder.icmp_signed(">=", lanes, everywhere(first)), builder.icmp_signed("<", lanes, everywhere(stop))
        )
        return builder.select(inside, value, _spread(builder, other))

    return vector(vector, types.intp, types.intp, types.float32), code


@intrinsic
def exp(typing: Any, a: Any) -> Any:
    """e^a to 2 ulp, as `loops.exp32`, by Cephes' polynomial: 0 below -87, e^88 above 88, no number of no number."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        there = builder.fcmp_unordered(">=", args[0], _constant(-87.0))
        x = builder.select(there, args[0], _constant(0.0))
        x = builder.select(builder.fcmp_unordered("<", x, _constant(88.0)), x, _constant(88.0))
        n = _call(builder, "floor", _call(builder, "fma", x, _constant(1.44269504), _constant(0.5)))
        r = _call(builder, "fma", n, _constant(-0.693359375), x)
        r = _call(builder, "fma", n, _constant(2.12194440e-4), r)
        p = _constant(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = _call(builder, "fma", p, r, _constant(factor))
        y = builder.fadd(_call(builder, "fma", p, builder.fmul(r, r), r), _constant(1.0))
        exponent = builder.add(builder.fptosi(n, INTEGERS), ir.Constant(INTEGERS, [127] * LANES))
        e = builder.fmul(y, builder.bitcast(builder.shl(exponent, ir.Constant(INTEGERS, [23] * LANES)), VECTOR))
        return builder.select(there, e, _constant(0.0))

    return vector(vector), code


@intrinsic
def load_first(typing: Any, address: Any, count: Any) -> Any:
    """The first `count` of the sixteen numbers at an address, all where it is more, and zeros for the rest, which is not read."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load_first(builder, args[0], _first_lanes(builder, args[1]))

    return vector(types.intp, types.intp), code


@intrinsic
def store_first(typing: Any, address: Any, value: Any, count: Any) -> Any:
    """Write the first `count` of sixteen numbers to an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        inside = _first_lanes(builder, args[2])
        _masked(builder, "store", ir.VoidType(), args[1], _at(builder, args[0]), ir.IntType(32)(4), inside)
        return context.get_dummy_value()

    return types.void(types.intp, vector, types.intp), code


@intrinsic
def minus(typing: Any, a: Any, b: Any) -> Any:
    """a - b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(*args)

    return vector(vector, vector), code


@intrinsic
def over(typing: Any, a: Any, b: Any) -> Any:
    """a / b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return vector(vector, vector), code


@intrinsic
def root(typing: Any, a: Any) -> Any:
    """The square root of a."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "sqrt", *args)

    return vector(vector), code


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """The sum of the sixteen numbers, halves first."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(_sums(builder, [args[0]]), ir.IntType(32)(0))

    return types.float32(vector), code


def _dots(rows: int, columns: int) -> Any:
    """The products of `rows` rows at x with `columns` rows at w, each a sum over `depth` numbers, at y: all by address and stride in bytes.

    Every product is one chain of sixteen sums in the order of the numbers, added up at its end, in any tile: so it has the same bits
    whatever is computed with it.
    """

    @intrinsic
    def dots(typing: Any, x: Any, x_row: Any, w: Any, w_row: Any, depth: Any, y: Any, y_row: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_row, w, w_row, depth, y, y_row = args
            left = [builder.add(x, builder.mul(x_row, INT(i))) for i in range(rows)]
            right = [builder.add(w, builder.mul(w_row, INT(j))) for j in range(columns)]
            whole = builder.mul(builder.sdiv(depth, INT(LANES)), INT(4 * LANES))
            before = builder.block
            head, body, after = (builder.append_basic_block(f"dots.{name}") for name in ("head", "body", "after"))
            builder.branch(head)

            builder.position_at_end(head)
            at, sums = builder.phi(INT), [builder.phi(VECTOR) for _ in range(rows * columns)]
            at.add_incoming(INT(0), before)
            for each in sums:
                each.add_incoming(_constant(0.0), before)
            builder.cbranch(builder.icmp_signed("<", at, whole), body, after)

            def more(load: Any) -> list[Any]:
                b = [load(builder.add(address, at)) for address in right]
                found = []
                for i in range(rows):
                    a = load(builder.add(left[i], at))
                    found += [_call(builder, "fma", a, b[j], sums[i * columns + j]) for j in range(columns)]
                return found

            builder.position_at_end(body)
            for each, value in zip(sums, more(lambda address: builder.load(_at(builder, address), align=4)), strict=True):
                each.add_incoming(value, body)
            at.add_incoming(builder.add(at, INT(4 * LANES)), body)
            builder.branch(head)

            builder.position_at_end(after)
            rest = builder.srem(depth, INT(LANES))
            tail, end = (builder.append_basic_block(f"dots.{name}") for name in ("tail", "end"))
            builder.cbranch(builder.icmp_signed(">", rest, INT(0)), tail, end)
            builder.position_at_end(tail)
            inside = _first_lanes(builder, rest)
            longer = more(lambda address: _load_first(builder, address, inside))
            builder.branch(end)
            builder.position_at_end(end)
            results = []
            for each, value in zip(sums, longer, strict=True):
                result = builder.phi(VECTOR)
                result.add_incoming(each, after)
                result.add_incoming(value, tail)
                results.append(result)
            kind = ir.VectorType(FLOAT, columns).as_pointer()
            for i in range(rows):
                to = builder.add(y, builder.mul(y_row, INT(i)))
                found = _sums(builder, results[i * columns : (i + 1) * columns])
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
            left = [builder.add(a, builder.mul(a_row, INT(i))) for i in range(rows)]
            to = [_at(builder, builder.add(out, builder.mul(out_row, INT(i)))) for i in range(rows)]
            before = builder.block
            there, head, body, after = (builder.append_basic_block(f"weighted.{name}") for name in ("there", "head", "body", "after"))
            builder.cbranch(more, there, head)
            builder.position_at_end(there)
            begun = [builder.load(address, align=4) for address in to]
            builder.branch(head)

            builder.position_at_end(head)
            c, sums = builder.phi(INT), [builder.phi(VECTOR) for _ in range(rows)]
            for block in (before, there):
                c.add_incoming(INT(0), block)
            for each, value in zip(sums, begun, strict=True):
                each.add_incoming(_constant(0.0), before)
                each.add_incoming(value, there)
            builder.cbranch(builder.icmp_signed("<", c, depth), body, after)

            builder.position_at_end(body)
            at = builder.add(b, builder.mul(b_row, c))
            x = builder.load(_at(builder, at), align=4)
            _prefetch(builder, builder.add(at, ahead))
            for each, address in zip(sums, left, strict=True):
                one = builder.load(builder.inttoptr(builder.add(address, builder.mul(c, INT(4))), FLOAT.as_pointer()), align=4)
                each.add_incoming(_call(builder, "fma", _spread(builder, one), x, each), body)
            c.add_incoming(builder.add(c, INT(1)), body)
            builder.branch(head)

            builder.position_at_end(after)
            for each, address in zip(sums, to, strict=True):
                builder.store(each, address, align=4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7, types.boolean, types.intp), code

    return weighted


weighted_1, weighted_2, weighted_4, weighted_8 = (_weighted(rows) for rows in (1, 2, 4, 8))


@intrinsic
def peak(typing: Any, a: Any) -> Any:
    """The largest of the sixteen numbers; where some are no numbers, one of the sixteen."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = args[0]
        while found.type.count > 1:
            half = found.type.count // 2
            parts = [ir.Constant(ir.VectorType(ir.IntType(32), half), list(range(more, more + half))) for more in (0, half)]
            low, high = (builder.shuffle_vector(found, found, part) for part in parts)
            found = builder.select(builder.fcmp_ordered(">", low, high), low, high)
        return builder.extract_element(found, ir.IntType(32)(0))

    return types.float32(vector), code
