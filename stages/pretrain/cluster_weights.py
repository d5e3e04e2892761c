"""Weights by the number of near-duplicates that a document stands for (FineWeb-2's rehydration, Penedo et al. 2025)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.storage import Artifact, PunaError

FINEWEB_2 = {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0, 100: 8.0, 1000: 1.0}
"""Minimum size of a cluster → its weight: text that many sites copy is better than most, text that thousands copy is boilerplate."""


def cluster_sizes(deduplicated: Sequence[Artifact]) -> pa.Table:
    """The documents (`id`) in whose favour near-duplicates were removed, and how many they are with these (`size`).

    A document removed in favour of one that a later artifact removes counts for the last survivor.
    """
    kept: dict[str, str] = {}
    for artifact in deduplicated:
        if "duplicates" not in artifact.tables:
            raise PunaError(f"{artifact.id} has no table `duplicates`; give the artifacts of the stages that removed duplicates")
        table = artifact.read("duplicates", columns=["id", "kept_id"])
        kept |= dict(zip(table["id"].to_pylist(), table["kept_id"].to_pylist(), strict=True))
    counts: Counter[str] = Counter()
    for survivor in kept.values():
        while survivor in kept:
            survivor = kept[survivor]
        counts[survivor] += 1
    return pa.table({"id": pa.array(counts, pa.string()), "size": pa.array([1 + count for count in counts.values()], pa.int64())})


def weights_of(sizes: NDArray[np.int64], weights: Mapping[int, float]) -> NDArray[np.float64]:
    """The weight of each cluster's size, float64[n]: that of the greatest least size which it reaches; 1 below all of them."""
    steps = sorted(weights)
    table = np.array([1.0, *(weights[step] for step in steps)])
    return table[np.searchsorted(steps, sizes, side="right")]
