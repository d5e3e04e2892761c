"""LLVM code for numba's loops over sixteen fp32 numbers at once (`vectors.py`, `vector_products.py`, `int8_products.py`).

A `builder` writes instructions; an address is a 64-bit integer, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
FLOAT, BYTE, INT32, INT = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
VECTOR, INTEGERS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)


def operation(result: Any, *takes: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that turns a function that writes LLVM code into an operation of numba's loops (`result`, `takes`: numba types).
    The function gets a builder and LLVM values, and returns a value, or None if the result is void."""

    def make(write: Callable[..., Any]) -> Any:
        def define(*_: Any) -> Any:
            def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                value = write(builder, *args)
                return context.get_dummy_value() if value is None else value

            return result(*takes), code

        names = (f"x{number}" for number in range(1 + len(takes)))
        define.__name__, define.__doc__ = write.__name__, write.__doc__
        define.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])  # type: ignore[attr-defined]
        return intrinsic(define)

    return make


def constant(value: float, kind: ir.VectorType = VECTOR) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def spread(builder: Any, value: Any, lanes: int = LANES) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, INT32(0))
    return builder.shuffle_vector(first, undefined, constant(0, ir.VectorType(INT32, lanes)))


def call(builder: Any, name: str, *args: Any) -> Any:
    """Return the result of LLVM's intrinsic `llvm.<name>` on fp32 vectors."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(args))
    return builder.call(builder.module.declare_intrinsic(f"llvm.{name}.v{LANES}f32", (), kind), args)


def add(builder: Any, address: Any, index: Any, size: Any = 1) -> Any:
    """Return address + index * size; `index` and `size` may be Python numbers."""
    factors = [INT(factor) if isinstance(factor, int) else factor for factor in (index, size)]
    return builder.add(address, builder.mul(*factors))


def load(builder: Any, address: Any, kind: Any = VECTOR, align: int = 4) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def first_lanes(builder: Any, count: Any, kind: ir.VectorType = VECTOR) -> Any:
    lane = BYTE if kind.element == BYTE else INT32
    lanes = ir.Constant(ir.VectorType(lane, kind.count), list(range(kind.count)))
    return builder.icmp_signed("<", lanes, spread(builder, builder.trunc(count, lane), kind.count))


def call_masked(builder: Any, name: str, result: Any, kind: ir.VectorType, *args: Any) -> Any:
    """Return the result of LLVM's masked `name` (load or store), called for vectors of type `kind`; `result`: the result's type."""
    lanes = f"v{kind.count}{'i8' if kind.element == BYTE else 'f32'}"
    function = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(f"llvm.masked.{name}.{lanes}.p0{lanes}", (), function), args)


def load_first(builder: Any, address: Any, inside: Any, kind: ir.VectorType = VECTOR) -> Any:
    """Return the vector at an address, read only in the lanes of the mask `inside`; the other lanes are zero."""
    place = builder.inttoptr(address, kind.as_pointer())
    return call_masked(builder, "load", kind, kind, place, INT32(1 if kind.element == BYTE else 4), inside, constant(0, kind))


def sums(builder: Any, vectors: list[Any], add: Any = None) -> Any:
    """Return a vector whose lane i is the sum of `vectors[i]`'s lanes, added pairwise. `add`: the builder's addition (default: `fadd`)."""
    add = add or builder.fadd
    width = LANES
    while width > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        lanes = vectors[0].type.count * (2 if len(vectors) > 1 else 1)
        low = [s + i for s in range(0, lanes, width) for i in range(width // 2)]
        parts = [ir.Constant(ir.VectorType(INT32, len(low)), [i + more for i in low]) for more in (0, width // 2)]
        vectors = [add(*(builder.shuffle_vector(*pair, part) for part in parts)) for pair in pairs]
        width //= 2
    return vectors[0]


def prefetch(builder: Any, address: Any, near: int = 3) -> None:
    """Prefetch the 64 bytes at an address; `near` is 3 for the L1 cache, 2 for the L2 cache."""
    where = builder.inttoptr(address, BYTE.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [where.type, INT32, INT32, INT32])
    builder.call(builder.module.declare_intrinsic("llvm.prefetch.p0i8", (), kind), [where, INT32(0), INT32(near), INT32(1)])


class Sums:
    """A table of sums, one per pair of a left and a right factor, that stay in registers while a loop adds to them."""

    def __init__(self, builder: Any, rows: int, columns: int, zero: Any) -> None:
        self.builder, self.columns = builder, columns
        self.places = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * columns)]

    def multiply(self, left: list[Any], right: list[Any], product: Callable[[Any, Any, Any], Any]) -> None:
        for number, place in enumerate(self.places):
            i, j = divmod(number, self.columns)
            self.builder.store(product(left[i], right[j], self.builder.load(place)), place)

    @property
    def rows(self) -> list[list[Any]]:
        values = [self.builder.load(place) for place in self.places]
        return [values[first : first + self.columns] for first in range(0, len(values), self.columns)]


def row_products(
    builder: Any, left: list[Any], right: list[Any], depth: Any, kind: ir.VectorType, zero: Any, product: Callable[[Any, Any, Any], Any]
) -> list[list[Any]]:
    """Return vectors [left, right]; a vector's lanes add up to the dot product of two rows of `depth` numbers, at a left and a right
    address. A lane is one chain of sums in the order of the numbers, so its bits do not depend on the tile."""
    sums = Sums(builder, len(left), len(right), zero)
    size = kind.count * (1 if kind.element == BYTE else 4)

    def more(at: Any, read: Callable[[Any], Any]) -> None:
        a, b = ([read(builder.add(address, at)) for address in side] for side in (left, right))
        sums.multiply(a, b, product)

    steps, rest = builder.sdiv(depth, INT(kind.count)), builder.srem(depth, INT(kind.count))
    align = 1 if kind.element == BYTE else 4
    with cgutils.for_range(builder, steps) as loop:
        more(builder.mul(loop.index, INT(size)), lambda address: load(builder, address, kind, align))
    with builder.if_then(builder.icmp_signed(">", rest, INT(0))):
        inside = first_lanes(builder, rest, kind)
        more(builder.mul(steps, INT(size)), lambda address: load_first(builder, address, inside, kind))
    return sums.rows
