"""How far a document's words are from the corpus's: Kullback-Leibler divergence (Llama 3, section 3.1.1).

Words are counted in lower case, numbers alike, hashed into `BINS` bins: counts of any corpus add up, in any order
and within fixed memory. A document is compared with the rest of the corpus, without itself: a long document of
gibberish would otherwise vouch for its own words. The mass of words not seen in the rest is Good and Turing's
estimate: the share of words seen once.

The divergence of a short text is large for want of words alone, so `expected` gives what texts drawn from the
corpus itself show at each length, and the excess over it is what rules judge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS_BITS = 20
BINS = 1 << BINS_BITS
LENGTHS = tuple(2**k for k in range(4, 18))
DRAWS = 8


def count_bins(folded: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Bins of a document's words and how often each occurs, both uint32, ordered by bin."""
    bins, counts = np.unique((folded >> np.uint64(64 - BINS_BITS)).astype(np.uint32), return_counts=True)
    return bins, counts.astype(np.uint32)


@dataclass(frozen=True)
class Corpus:
    """Word counts of a corpus: `counts` int64[BINS], `words` their sum, `prior` the mass of an unseen bin."""

    counts: NDArray[np.int64]
    words: int
    prior: float

    @classmethod
    def of(cls, counts: NDArray[np.int64]) -> Corpus:
        """From the counts of every bin."""
        singletons = max(int((counts == 1).sum()), 1)
        return cls(counts, int(counts.sum()), singletons / BINS)

    def divergence(self, bins: NDArray[np.uint32], counts: NDArray[np.uint32], *, inside: bool = True) -> float:
        """KL(document || rest of the corpus) in nats; `inside`: the document is one of the corpus's.

        0 for a document without words.
        """
        words = int(counts.sum())
        if not words:
            return 0.0
        own = counts.astype(np.int64) if inside else np.zeros(len(counts), np.int64)
        rest = self.counts[bins] - own
        total = self.words - int(own.sum()) + self.prior * BINS
        share = counts / words
        # Sums of floats are exact and therefore the same in every order and on every machine.
        return max(math.fsum(share * np.log(share * total / (rest + self.prior))), 0.0)

    def expected(self, generator: np.random.Generator) -> NDArray[np.float64]:
        """Mean divergence of texts of `LENGTHS` words drawn from the corpus, float64[len(LENGTHS)]."""
        if not self.words:
            return np.zeros(len(LENGTHS))
        cumulative = np.cumsum(self.counts)
        means = []
        for length in LENGTHS:
            found = []
            for _ in range(DRAWS):
                drawn = np.searchsorted(cumulative, generator.integers(self.words, size=length), side="right")
                bins, counts = np.unique(drawn.astype(np.uint32), return_counts=True)
                found.append(self.divergence(bins, counts.astype(np.uint32), inside=False))
            means.append(sum(found) / DRAWS)
        return np.array(means)


def expected_at(words: int, expected: NDArray[np.float64]) -> float:
    """The expectation for a text of `words` words: linear in the logarithm of the length, flat outside."""
    return float(np.interp(math.log(max(words, 1)), np.log(LENGTHS), expected))
