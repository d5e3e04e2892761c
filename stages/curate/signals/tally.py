"""Word counts of many parts of a corpus."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.stages.curate.signals.divergence import BINS


class Tally:
    """Word counts of many parts, added up as they come; at most about a million entries wait to be merged."""

    LIMIT = 1 << 20

    def __init__(self) -> None:
        self.pieces: list[tuple[NDArray[np.uint32], NDArray[np.int64]]] = []
        self.waiting = 0
        self.words = 0

    def add(self, bins: NDArray[np.uint32], counts: NDArray[np.int64]) -> None:
        """Count `counts` more words in `bins`."""
        self.pieces.append((bins, counts))
        self.words += int(counts.sum())
        self.waiting += len(bins)
        if self.waiting > self.LIMIT:
            total = self.dense()
            self.pieces = [(np.flatnonzero(total).astype(np.uint32), total[total > 0])]
            self.waiting = 0

    def dense(self) -> NDArray[np.int64]:
        """Return counts of all bins, int64[BINS]."""
        total = np.zeros(BINS, np.int64)
        for bins, counts in self.pieces:
            total[bins] += counts
        return total
