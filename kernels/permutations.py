"""MinHash's permutations, as datasketch 2 draws them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]


def permutations(number: int, seed: int) -> tuple[U32, U32]:
    """Return the parameters a_P (odd) and b_P of `number` permutations."""
    generator = np.random.RandomState(seed)
    a = generator.randint(0, 1 << 31, number, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return a, generator.randint(0, 1 << 32, number, dtype=np.uint32)
