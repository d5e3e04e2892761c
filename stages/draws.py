"""Random numbers and ids that depend only on a seed and a text, not on the order of rows or the number of workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def uniform(ids: Iterable[str], seed: int, purpose: str) -> NDArray[np.float64]:
    """Return one uniform random number in [0, 1) per id, float64 [n]. Different purposes give independent numbers."""
    key = hashlib.blake2b(f"{seed}\0{purpose}".encode(), digest_size=32).digest()
    digests = b"".join(hashlib.blake2b(identity.encode(), digest_size=8, key=key).digest() for identity in ids)
    return (np.frombuffer(digests, dtype=">u8") >> 11).astype(np.float64) / float(1 << 53)


def folds(ids: Iterable[str], seed: int, count: int) -> NDArray[np.int64]:
    """Return the fold of each id, int64 [n] in [0, count)."""
    return np.floor(uniform(ids, seed, "fold") * count).astype(np.int64)


def identifier(*parts: object) -> str:
    """Return the first 32 hex digits of the SHA-256 of the parts."""
    return _sha256(parts).hex()[:32]


def hash_of(*parts: object) -> int:
    """Return a 64-bit hash of the parts."""
    return int.from_bytes(_sha256(parts)[:8], "big")


def fraction(*parts: object) -> float:
    """Return a hash of the parts as a number from 0 to 1."""
    return hash_of(*parts) / 2**64


def place(*parts: object) -> int:
    """Return a 64-bit hash of the parts, for example to sort rows. It differs from `hash_of`, which is slower."""
    return int.from_bytes(hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest(), "big")


def _sha256(parts: tuple[object, ...]) -> bytes:
    # Texts of users' files may contain lone surrogates.
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()
