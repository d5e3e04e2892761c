"""Signatures as datasketch's objects."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from puna.stages.curate.minhash.config import MinhashDedupConfig

if TYPE_CHECKING:
    from datasketch import MinHash


def signatures(values: NDArray[np.uint64], offsets: NDArray[np.int64], config: MinhashDedupConfig) -> NDArray[Any]:
    """Return the signatures [D, P] of documents by the values of their shingles, one `MinHash` each: those of `puna.kernels.minhash`."""
    rows = [minhash(config, values[a:b].tolist()).hashvalues for a, b in pairwise(offsets)]
    kind = np.uint32 if config.scheme == "affine32" else np.uint64
    return np.array(rows, kind).reshape(len(rows), config.bands * config.rows)


def minhash(config: MinhashDedupConfig, values: list[int]) -> MinHash:
    """Return the `MinHash` of hashed shingles."""
    from datasketch import MinHash

    mask = (1 << 64) - 1 if config.scheme == "affine64" else (1 << 32) - 1
    size = config.bands * config.rows
    result = MinHash(size, config.seed, hashfunc=lambda value: value & mask, scheme=config.scheme)
    if values:
        result.update_batch(values)
    return result
