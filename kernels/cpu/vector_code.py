"""LLVM code for numba's loops over sixteen fp32 numbers at once (`vectors.py`, `vector_products.py`): types,
and short pieces of its code. A `builder` writes instructions; an address is a 64-bit integer."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

LANES = 16
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
INTEGERS = ir.VectorType(ir.IntType(32), LANES)
INT = ir.IntType(64)


def constant(value: float) -> ir.Constant:
    """Return a constant in all lanes."""
    return ir.Constant(VECTOR, [value] * LANES)


def spread(builder: Any, value: Any) -> Any:
    """Return a value in all lanes."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTEGERS, [0] * LANES))


def call(builder: Any, name: str, *args: Any) -> Any:
    """Call LLVM's operation of this name on vectors."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(args))
    return builder.call(builder.module.declare_intrinsic(f"llvm.{name}.v{LANES}f32", (), kind), args)


def at(builder: Any, address: Any) -> Any:
    """Return an address as a pointer to a vector."""
    return builder.inttoptr(address, VECTOR.as_pointer())


def first_lanes(builder: Any, count: Any) -> Any:
    """Return a mask of the first `count` lanes."""
    undefined = ir.Constant(INTEGERS, ir.Undefined)
    one = builder.insert_element(undefined, builder.trunc(count, ir.IntType(32)), ir.IntType(32)(0))
    everywhere = builder.shuffle_vector(one, undefined, ir.Constant(INTEGERS, [0] * LANES))
    return builder.icmp_signed("<", ir.Constant(INTEGERS, list(range(LANES))), everywhere)


def masked(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Load or store some lanes."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(f"llvm.masked.{name}.v{LANES}f32.p0v{LANES}f32", (), kind), args)


def load_first(builder: Any, address: Any, inside: Any) -> Any:
    """Load the lanes `inside` of the vector at an address; the others are zeros and are not read."""
    return masked(builder, "load", VECTOR, at(builder, address), ir.IntType(32)(4), inside, constant(0.0))


def sums(builder: Any, vectors: list[Any], add: Any = None) -> Any:
    """The sum of each vector's lanes, as the lanes of one vector: halves are added until one lane of each is left. `add`: of the
    builder, for integers."""
    add = add or builder.fadd
    width = LANES
    while width > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        lanes = vectors[0].type.count * (2 if len(vectors) > 1 else 1)
        low = [s + i for s in range(0, lanes, width) for i in range(width // 2)]
        parts = [ir.Constant(ir.VectorType(ir.IntType(32), len(low)), [i + more for i in low]) for more in (0, width // 2)]
        vectors = [add(*(builder.shuffle_vector(*pair, part) for part in parts)) for pair in pairs]
        width //= 2
    return vectors[0]


def prefetch(builder: Any, address: Any, near: int = 3) -> None:
    """Ask for the 64 bytes at an address; `near` is 3 for the first cache, 2 for the second."""
    where, number = builder.inttoptr(address, ir.IntType(8).as_pointer()), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [where.type, number, number, number])
    builder.call(builder.module.declare_intrinsic("llvm.prefetch.p0i8", (), kind), [where, number(0), number(near), number(1)])
