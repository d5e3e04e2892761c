"""Sixteen fp32 numbers as one value in numba's loops: what LLVM's own vectoriser does not make of them.

Each operation is one IEEE operation per lane, and `fma` is the fused one, so a loop in these words has one order of
operations whatever it is compiled to: bits that agree, and registers that hold sums. An address is an integer, in bytes.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core.datamodel import PrimitiveModel
from numba.core.extending import register_model
from numba.extending import intrinsic

carray, types = numba.carray, numba.types
LANES = 16
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
INTEGERS = ir.VectorType(ir.IntType(32), LANES)


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


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """The address as a pointer to fp32 numbers: `carray(pointer(address), shape)` is the array that lies there."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.intp), code


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
