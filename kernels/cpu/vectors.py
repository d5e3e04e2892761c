"""Sixteen fp32 numbers as one value in numba's loops, for loops that LLVM's own vectoriser leaves slow.

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

from puna.kernels.cpu import vector_code as llvm
from puna.kernels.cpu.lazy import strict_jit

LANES = llvm.LANES
carray, types = numba.carray, numba.types


class Vector(numba.types.Type):  # type: ignore[misc]
    """The numba type of sixteen fp32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = Vector()


@register_model(Vector)
class _VectorModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, llvm.VECTOR)


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """Return an address as a pointer to fp32 numbers: `carray(pointer(address), shape)` is the array there."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], llvm.FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.intp), code


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Prefetch the 64 bytes at an address, which may be outside any array."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        llvm.prefetch(builder, args[0], 2)
        return context.get_dummy_value()

    return types.void(types.intp), code


CACHE_LINE = 64
"""Bytes."""


@strict_jit
def prefetch_bytes(address: Any, size: Any) -> None:
    """Prefetch `size` bytes from an address on."""
    for offset in range(0, size, CACHE_LINE):
        prefetch(address + offset)


@intrinsic
def load(typing: Any, address: Any) -> Any:
    """Load the sixteen numbers at an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], llvm.VECTOR.as_pointer()), align=4)

    return vector(types.intp), code


@intrinsic
def store(typing: Any, address: Any, value: Any) -> Any:
    """Write sixteen numbers to an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], llvm.VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, vector), code


@intrinsic
def spread(typing: Any, address: Any) -> Any:
    """Load the number at an address into all lanes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.spread(builder, builder.load(builder.inttoptr(args[0], llvm.FLOAT.as_pointer()), align=4))

    return vector(types.intp), code


@intrinsic
def fill(typing: Any, value: Any) -> Any:
    """Return a number in all lanes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.spread(builder, args[0])

    return vector(types.float32), code


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a b + c, rounded once."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.call(builder, "fma", *args)

    return vector(vector, vector, vector), code


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    """Return a + b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return vector(vector, vector), code


@intrinsic
def times(typing: Any, a: Any, b: Any) -> Any:
    """Return a b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return vector(vector, vector), code


@intrinsic
def higher(typing: Any, a: Any, b: Any) -> Any:
    """Return the larger of a and b, lane by lane; b where either is NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), code


@intrinsic
def lane(typing: Any, a: Any, index: Any) -> Any:
    """Return one of the sixteen numbers."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], builder.trunc(args[1], ir.IntType(32)))

    return types.float32(vector, types.intp), code


@intrinsic
def between(typing: Any, a: Any, first: Any, stop: Any, other: Any) -> Any:
    """Return a in the lanes first .. stop - 1, `other` in the rest."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, first, stop, other = args
        whole = ir.VectorType(ir.IntType(64), llvm.LANES)
        lanes = ir.Constant(whole, list(range(llvm.LANES)))

        def everywhere(number: Any) -> Any:
            undefined = ir.Constant(whole, ir.Undefined)
            one = builder.insert_element(undefined, number, ir.IntType(32)(0))
            return builder.shuffle_vector(one, undefined, ir.Constant(llvm.INTEGERS, [0] * llvm.LANES))

        inside = builder.and_(
            builder.icmp_signed(">=", lanes, everywhere(first)), builder.icmp_signed("<", lanes, everywhere(stop))
        )
        return builder.select(inside, value, llvm.spread(builder, other))

    return vector(vector, types.intp, types.intp, types.float32), code


@intrinsic
def exp(typing: Any, a: Any) -> Any:
    """Return e^a to 2 ulp, as `loops.exp32`, by Cephes' polynomial: 0 below -87, e^88 above 88, NaN of NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        there = builder.fcmp_unordered(">=", args[0], llvm.constant(-87.0))
        x = builder.select(there, args[0], llvm.constant(0.0))
        x = builder.select(builder.fcmp_unordered("<", x, llvm.constant(88.0)), x, llvm.constant(88.0))
        n = llvm.call(builder, "floor", llvm.call(builder, "fma", x, llvm.constant(1.44269504), llvm.constant(0.5)))
        r = llvm.call(builder, "fma", n, llvm.constant(-0.693359375), x)
        r = llvm.call(builder, "fma", n, llvm.constant(2.12194440e-4), r)
        p = llvm.constant(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = llvm.call(builder, "fma", p, r, llvm.constant(factor))
        y = builder.fadd(llvm.call(builder, "fma", p, builder.fmul(r, r), r), llvm.constant(1.0))
        exponent = builder.add(builder.fptosi(n, llvm.INTEGERS), ir.Constant(llvm.INTEGERS, [127] * llvm.LANES))
        e = builder.fmul(y, builder.bitcast(builder.shl(exponent, ir.Constant(llvm.INTEGERS, [23] * llvm.LANES)), llvm.VECTOR))
        return builder.select(there, e, llvm.constant(0.0))

    return vector(vector), code


@intrinsic
def load_first(typing: Any, address: Any, count: Any) -> Any:
    """Load the first `count` (at most 16) numbers at an address; the other lanes are zeros and are not read."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.load_first(builder, args[0], llvm.first_lanes(builder, args[1]))

    return vector(types.intp, types.intp), code


@intrinsic
def store_first(typing: Any, address: Any, value: Any, count: Any) -> Any:
    """Write the first `count` of sixteen numbers to an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        inside = llvm.first_lanes(builder, args[2])
        llvm.masked(builder, "store", ir.VoidType(), args[1], llvm.at(builder, args[0]), ir.IntType(32)(4), inside)
        return context.get_dummy_value()

    return types.void(types.intp, vector, types.intp), code


@intrinsic
def minus(typing: Any, a: Any, b: Any) -> Any:
    """Return a - b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(*args)

    return vector(vector, vector), code


@intrinsic
def over(typing: Any, a: Any, b: Any) -> Any:
    """Return a / b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return vector(vector, vector), code


@intrinsic
def root(typing: Any, a: Any) -> Any:
    """Return the square root of a."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.call(builder, "sqrt", *args)

    return vector(vector), code


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """Return the sum of the sixteen numbers, halves first."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(llvm.sums(builder, [args[0]]), ir.IntType(32)(0))

    return types.float32(vector), code


@intrinsic
def peak(typing: Any, a: Any) -> Any:
    """Return the largest of the sixteen numbers; any of them where some are NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = args[0]
        while found.type.count > 1:
            half = found.type.count // 2
            parts = [ir.Constant(ir.VectorType(ir.IntType(32), half), list(range(more, more + half))) for more in (0, half)]
            low, high = (builder.shuffle_vector(found, found, part) for part in parts)
            found = builder.select(builder.fcmp_ordered(">", low, high), low, high)
        return builder.extract_element(found, ir.IntType(32)(0))

    return types.float32(vector), code


@intrinsic
def masked_above(typing: Any, address: Any, values: Any, bound: Any, mask: Any) -> Any:
    """Clear the bits outside `mask` of the 32-bit numbers at an address whose values are above the bound."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = builder.inttoptr(args[0], llvm.INTEGERS.as_pointer())
        bits = builder.load(where, align=4)
        undefined = ir.Constant(llvm.INTEGERS, ir.Undefined)
        one = builder.insert_element(undefined, args[3], ir.IntType(32)(0))
        mask = builder.shuffle_vector(one, undefined, ir.Constant(llvm.INTEGERS, [0] * llvm.LANES))
        above = builder.fcmp_ordered(">", args[1], llvm.spread(builder, args[2]))
        builder.store(builder.select(above, builder.and_(bits, mask), bits), where, align=4)
        return context.get_dummy_value()

    return types.void(types.intp, vector, types.float32, types.uint32), code
