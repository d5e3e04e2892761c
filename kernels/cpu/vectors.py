"""Vectors of sixteen fp32 numbers, for numba's loops that LLVM's own vectorizer leaves slow.

An arithmetic operation is one IEEE operation per lane; `fma` rounds once. So a loop of these operations has one order of operations, and
equal bits, on every CPU, and its sums stay in registers. An address is an integer, in bytes."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core.datamodel import PrimitiveModel
from numba.core.extending import register_model

from puna.kernels.cpu import vector_code as llvm
from puna.kernels.cpu.lazy_jit import Address, strict_jit

LANES = llvm.LANES
carray, types = numba.carray, numba.types
address, number, operation = types.intp, types.float32, llvm.operation


class Vector(types.Type):  # type: ignore[misc,name-defined]
    """The numba type of sixteen fp32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = Vector()


@register_model(Vector)
class _VectorModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, llvm.VECTOR)


add, minus, times, over = (
    operation(vector, vector, vector)(write) for write in (ir.IRBuilder.fadd, ir.IRBuilder.fsub, ir.IRBuilder.fmul, ir.IRBuilder.fdiv)
)
"""Operations that return a + b, a - b, a b, a / b, lane by lane."""
load = operation(vector, address)(llvm.load)  # operation that returns the sixteen numbers at an address
fill = operation(vector, number)(llvm.spread)  # operation that returns a vector with a number in all lanes


@operation(types.CPointer(number), address)
def pointer(builder: Any, address: Any) -> Any:
    """Return an address as a pointer to fp32 numbers; `carray(pointer(address), shape)` is the array at this address."""
    return builder.inttoptr(address, llvm.FLOAT.as_pointer())


@operation(types.void, address)
def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the 64 bytes at an address, which may be outside any array."""
    llvm.prefetch(builder, address, 2)


CACHE_LINE = 64  # bytes


@strict_jit
def prefetch_bytes(address: Address, size: int) -> None:
    for offset in range(0, size, CACHE_LINE):
        prefetch(address + offset)


@operation(types.void, address, vector)
def store(builder: Any, address: Any, value: Any) -> None:
    llvm.store(builder, value, address)


@operation(vector, address, types.intp)
def load_first(builder: Any, address: Any, count: Any) -> Any:
    """Return the first `count` numbers at an address, at most 16; the other lanes are zero and are not read. Whole vectors are read without
    a mask, which would cost a loop over rows a few percent of its time."""
    with builder.if_else(builder.icmp_signed(">=", count, llvm.INT(LANES))) as (all_, some):
        with all_:
            whole, from_all = llvm.load(builder, address), builder.block
        with some:
            part, from_some = llvm.load_first(builder, address, llvm.first_lanes(builder, count)), builder.block
    value = builder.phi(llvm.VECTOR)
    value.add_incoming(whole, from_all)
    value.add_incoming(part, from_some)
    return value


@operation(types.void, address, vector, types.intp)
def store_first(builder: Any, address: Any, value: Any, count: Any) -> None:
    """Write the first `count` of sixteen numbers to an address, or all if `count` is at least 16."""
    with builder.if_else(builder.icmp_signed(">=", count, llvm.INT(LANES))) as (all_, some):
        with all_:
            llvm.store(builder, value, address)
        with some:
            place, inside = builder.inttoptr(address, llvm.VECTOR.as_pointer()), llvm.first_lanes(builder, count)
            llvm.call_masked(builder, "store", ir.VoidType(), llvm.VECTOR, value, place, llvm.INT32(4), inside)


@operation(vector, vector, vector, vector)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return llvm.call(builder, "fma", a, b, c)


@operation(vector, vector)
def root(builder: Any, a: Any) -> Any:
    return llvm.call(builder, "sqrt", a)


@operation(vector, vector, vector)
def higher(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger of a and b, lane by lane; b if either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@operation(number, vector, types.intp)
def lane(builder: Any, a: Any, index: Any) -> Any:
    return builder.extract_element(a, builder.trunc(index, llvm.INT32))


@operation(vector, vector, types.intp, types.intp, number)
def between(builder: Any, a: Any, first: Any, stop: Any, other: Any) -> Any:
    """Return a in the lanes first .. stop - 1, `other` in the rest."""
    lanes = ir.Constant(ir.VectorType(llvm.INT, LANES), list(range(LANES)))
    above = builder.icmp_signed(">=", lanes, llvm.spread(builder, first))
    inside = builder.and_(above, builder.icmp_signed("<", lanes, llvm.spread(builder, stop)))
    return builder.select(inside, a, llvm.spread(builder, other))


@operation(vector, vector)
def exp(builder: Any, a: Any) -> Any:
    """Return e^a to 2 ulp, by the polynomial of `loops.exp32`: 0 below -87, e^88 above 88, NaN for NaN."""

    def fma(*args: Any) -> Any:
        return llvm.call(builder, "fma", *(llvm.constant(arg) if isinstance(arg, float) else arg for arg in args))

    there = builder.fcmp_unordered(">=", a, llvm.constant(-87.0))
    x = builder.select(there, a, llvm.constant(0.0))
    x = builder.select(builder.fcmp_unordered("<", x, llvm.constant(88.0)), x, llvm.constant(88.0))
    n = llvm.call(builder, "floor", fma(x, 1.44269504, 0.5))
    r = fma(n, 2.12194440e-4, fma(n, -0.693359375, x))
    p: Any = 1.9875691500e-4
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, factor)
    y = builder.fadd(fma(p, builder.fmul(r, r), r), llvm.constant(1.0))
    exponent = builder.add(builder.fptosi(n, llvm.INTEGERS), llvm.constant(127, llvm.INTEGERS))
    power = builder.bitcast(builder.shl(exponent, llvm.constant(23, llvm.INTEGERS)), llvm.VECTOR)
    return builder.select(there, builder.fmul(y, power), llvm.constant(0.0))


@operation(number, vector)
def total(builder: Any, a: Any) -> Any:
    """Return the sum of the sixteen lanes; halves of the vector are added until one number is left."""
    return builder.extract_element(llvm.sums(builder, [a]), llvm.INT32(0))


@operation(number, vector)
def peak(builder: Any, a: Any) -> Any:
    """Return the maximum of the sixteen lanes; if some are NaN, the result may be any lane's number."""
    while a.type.count > 1:
        half = a.type.count // 2
        parts = [ir.Constant(ir.VectorType(llvm.INT32, half), list(range(first, first + half))) for first in (0, half)]
        low, high = (builder.shuffle_vector(a, a, part) for part in parts)
        a = builder.select(builder.fcmp_ordered(">", low, high), low, high)
    return builder.extract_element(a, llvm.INT32(0))


@operation(types.void, address, vector, number, types.uint32)
def masked_above(builder: Any, address: Any, values: Any, bound: Any, mask: Any) -> None:
    """Replace the 32-bit integers at an address by their AND with `mask`, in the lanes where `values` exceeds `bound`."""
    bits = llvm.load(builder, address, llvm.INTEGERS)
    above = builder.fcmp_ordered(">", values, llvm.spread(builder, bound))
    llvm.store(builder, builder.select(above, builder.and_(bits, llvm.spread(builder, mask)), bits), address)
