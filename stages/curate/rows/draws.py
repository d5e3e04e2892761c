"""Chance that belongs to a document: numbers that its id alone decides, whatever the order or the company."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def uniform(ids: Iterable[str], seed: int, purpose: str) -> NDArray[np.float64]:
    """One number in [0, 1) per id, float64[n]; different purposes give independent numbers."""
    key = hashlib.blake2b(f"{seed}\0{purpose}".encode(), digest_size=32).digest()
    digests = b"".join(hashlib.blake2b(identity.encode(), digest_size=8, key=key).digest() for identity in ids)
    return (np.frombuffer(digests, dtype=">u8") >> 11).astype(np.float64) / float(1 << 53)


def folds(ids: Iterable[str], seed: int, count: int) -> NDArray[np.int64]:
    """The fold of each document, int64[n] in [0, count)."""
    return np.floor(uniform(ids, seed, "fold") * count).astype(np.int64)
