"""Thirty-two bytes as one value in numba's loops."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.extending import intrinsic

types = numba.types
LANES = 32
BYTES = ir.VectorType(ir.IntType(8), LANES)


def _equal(builder: Any, address: Any, byte: Any) -> Any:
    """Return a 64-bit mask of the 32 bytes at an address that equal `byte`, the first byte in the lowest bit."""
    there = builder.load(builder.inttoptr(address, BYTES.as_pointer()), align=1)
    undefined = ir.Constant(BYTES, ir.Undefined)
    one = builder.insert_element(undefined, builder.trunc(byte, ir.IntType(8)), ir.IntType(32)(0))
    wanted = builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))
    return builder.zext(builder.bitcast(builder.icmp_unsigned("==", there, wanted), ir.IntType(LANES)), ir.IntType(64))


@intrinsic
def equal(typing: Any, address: Any, byte: Any) -> Any:
    """Return a mask of the 32 bytes at an address that equal `byte`, the first byte in the lowest bit."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _equal(builder, *args)

    return types.intp(types.intp, types.intp), code


@intrinsic
def lowest(typing: Any, bits: Any) -> Any:
    """Return the number of the lowest set bit; there must be one."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.intp(types.intp), code
