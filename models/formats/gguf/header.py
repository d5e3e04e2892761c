"""A check of a GGUF file's header: every length in it is compared with the file before anybody reads by it."""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

ELEMENTS = 1 << 21
"""Most elements of all arrays: two million, as a vocabulary of half a million tokens has with its merges, scores and types."""
DIMENSIONS = 4
DAMAGED = "is no GGUF file, or a damaged one"
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each type of number."""
STRING, ARRAY = 8, 9


def check_header(path: Path) -> None:
    """Raise ValueError where the header claims more than the file has: fields, lengths of texts and arrays, tensors and their data."""
    size = path.stat().st_size
    if size < 24:
        raise ValueError(f"{DAMAGED}: it has {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Walk(data).check()


class _Walk:
    """A position in the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.elements, self.alignment = data, 4, 0, 32
        self.order = "<" if struct.unpack_from("<I", data, 4)[0] & 0xFFFF else ">"

    def check(self) -> None:
        if self.data[:4] != b"GGUF":
            raise ValueError("is no GGUF file: it does not begin with GGUF")
        self.number("I")
        tensors, fields = self.number("Q"), self.number("Q")
        self.room(13 * fields, f"{fields:,} fields")
        self.room(32 * tensors, f"{tensors:,} tensors")
        for _ in range(fields):
            name = self.text("a field's name")
            kind = self.number("I")
            begin = self.at
            self.value(kind, name)
            if name == "general.alignment" and kind == 4:
                (self.alignment,) = struct.unpack_from(f"{self.order}I", self.data, begin)
        self.tensors(tensors)

    def tensors(self, count: int) -> None:
        """Check that the tensors' data lie in the file, and are not more than it has."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        claims: list[tuple[str, int, int]] = []
        for _ in range(count):
            name, sides = self.text("a tensor's name"), self.number("I")
            if not 1 <= sides <= DIMENSIONS:
                raise ValueError(f"{DAMAGED}: the tensor {name[:80]!r} has {sides:,} dimensions")
            shape = [self.number("Q") for _ in range(sides)]
            kind, offset = self.number("I"), self.number("Q")
            block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            claims.append((name, offset, math.prod(shape) * width // block))
        begin, whole = -(-self.at // max(self.alignment, 1)) * self.alignment, len(self.data)
        for name, offset, size in claims:
            if begin + offset + size > whole:
                raise ValueError(f"{DAMAGED}: the tensor {name[:80]!r} claims {size:,} bytes, the file has {whole:,}")
        if (total := sum(size for _, _, size in claims)) > whole:
            raise ValueError(f"{DAMAGED}: its tensors claim {total:,} bytes in all, the file has {whole:,}")

    def value(self, kind: int, name: str) -> None:
        """Read past a field's value."""
        if kind == STRING:
            self.skip(self.number("Q"), name)
        elif kind in SCALARS:
            self.skip(SCALARS[kind], name)
        elif kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            self.elements += count
            self.room(count * (8 if inner == STRING else SCALARS.get(inner, 1)), f"{name[:80]!r} with {count:,} elements")
            if self.elements > ELEMENTS:
                raise ValueError(f"the arrays up to {name[:80]!r} have {self.elements:,} elements: at most {ELEMENTS:,} are read")
            if inner in SCALARS:
                self.skip(SCALARS[inner] * count, name)
            elif inner == STRING:
                for _ in range(count):
                    self.skip(self.number("Q"), name)
            else:
                raise ValueError(f"{name[:80]!r} is an array of type {inner}, which is not read here")
        else:
            raise ValueError(f"{DAMAGED}: {name[:80]!r} is of the unknown type {kind}")

    def number(self, form: str) -> int:
        begin = self.at
        self.skip(struct.calcsize(f"={form}"), "the header")
        value: int = struct.unpack_from(f"{self.order}{form}", self.data, begin)[0]
        return value

    def text(self, what: str) -> str:
        size = self.number("Q")
        self.skip(size, what)
        return self.data[self.at - size : self.at].decode("utf-8", "replace")

    def skip(self, size: int, what: str) -> None:
        self.room(size, what[:80])
        self.at += size

    def room(self, size: int, what: str) -> None:
        if size > len(self.data) - self.at:
            raise ValueError(f"{DAMAGED}: {what} claims {size:,} bytes, the file has {len(self.data) - self.at:,} more")
