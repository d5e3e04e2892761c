"""MinHash's permutations, as the field's libraries draw them; see `minhash.py` for the schemes."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
Scheme = Literal["affine32", "affine64", "legacy", "mersenne"]

MERSENNE = (1 << 61) - 1


def permutations(number: int, seed: int, scheme: Scheme = "affine32") -> tuple[NDArray[Any], NDArray[Any]]:
    """Parameters a_P and b_P of `number` permutations, as the scheme's library draws them from `seed`."""
    generator = np.random.RandomState(seed)
    if scheme == "mersenne":
        a = generator.randint(1, MERSENNE, dtype=np.uint64, size=number)
        return a, generator.randint(0, MERSENNE, dtype=np.uint64, size=number)
    if scheme == "legacy":
        pairs = [(generator.randint(1, MERSENNE, dtype=np.uint64), generator.randint(0, MERSENNE, dtype=np.uint64)) for _ in range(number)]
        both = np.array(pairs, dtype=np.uint64).reshape(number, 2)
        return np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1])
    kind: Any = np.uint32 if scheme == "affine32" else np.uint64
    width = 32 if scheme == "affine32" else 64
    a = generator.randint(0, 1 << (width - 1), number, dtype=kind) * kind(2) + kind(1)
    return a, generator.randint(0, 1 << width, number, dtype=kind)
