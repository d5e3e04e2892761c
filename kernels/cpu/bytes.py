"""Operations of numba's loops on 32 bytes at once."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from puna.kernels.cpu import vector_code as llvm

LANES = 32


@llvm.operation(types.intp, types.intp, types.intp)
def equal(builder: Any, address: Any, byte: Any) -> Any:
    """Return a 32-bit mask whose bit i is set if byte i at `address` equals `byte`."""
    there = llvm.load(builder, address, ir.VectorType(llvm.BYTE, LANES), align=1)
    same = builder.icmp_unsigned("==", there, llvm.spread(builder, builder.trunc(byte, llvm.BYTE), LANES))
    return builder.zext(builder.bitcast(same, ir.IntType(LANES)), llvm.INT)


@llvm.operation(types.intp, types.intp)
def lowest(builder: Any, bits: Any) -> Any:
    """Return the index of the lowest set bit of `bits`, which must not be 0."""
    return builder.cttz(bits, ir.IntType(1)(1))
