"""Kullback-Leibler divergence of a document's word distribution from the corpus (Llama 3, section 3.1.1).

Words, in lower case and with all numbers treated as equal, are hashed into `BINS` bins, which bounds memory. A document is compared with
the rest of the corpus. Unseen words share the Good-Turing mass, estimated from words seen once. Short texts diverge more, so rules judge
the excess over `expected_divergence`, the mean divergence of random texts of the same length drawn from the corpus."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.strings import readonly
from puna.stages.curate.signals.gopher import F64, I64, U32

BINS_BITS = 20
BINS = 1 << BINS_BITS
LENGTHS = tuple(2**k for k in range(4, 18))
DRAWS = 8


@dataclass(frozen=True)
class Corpus:
    """Word counts of a corpus: `counts` int64[BINS], their sum `words`, and the pseudocount `prior` that is added to every bin."""

    counts: I64
    words: int
    prior: float

    @classmethod
    def of(cls, counts: I64) -> Corpus:
        """Return the corpus with these counts. The prior is the number of bins with count 1 (at least 1) over `BINS` (Good-Turing)."""
        singletons = max(int((counts == 1).sum()), 1)
        return cls(counts, int(counts.sum()), singletons / BINS)

    def divergences(self, rows: I64, offsets: I64, bins: U32, counts: U32, *, inside: bool = True) -> F64:
        """Return KL(document || rest of the corpus) in nats for the documents `rows`, float64[len(rows)]; 0 for a document without words.

        Document d has `counts[i]` words in bin `bins[i]`, offsets[d] <= i < offsets[d + 1]. `inside`: the corpus includes the documents."""
        corpus, bins, counts = readonly(self.counts), readonly(bins), readonly(counts)  # some arrays are views of files
        result: F64 = _divergences(corpus, self.words, self.prior, rows, offsets, bins, counts, inside)
        return result

    def expected_divergence(self, generator: np.random.Generator) -> F64:
        """Return the mean divergence of random texts drawn from the corpus, one per length in `LENGTHS` (words); 0 for an empty corpus."""
        if not self.words:
            return np.zeros(len(LENGTHS))
        bins = np.flatnonzero(self.counts)
        ends = np.cumsum(self.counts[bins])
        shift = max(0, self.words.bit_length() - len(bins).bit_length() - 1)
        firsts = np.searchsorted(ends, np.arange(((self.words - 1) >> shift) + 1) << shift, side="right")
        means, tally = [], np.zeros(len(bins), np.uint32)
        for length in LENGTHS:
            results = []
            for _ in range(DRAWS):
                sample, counts = _count(generator.integers(self.words, size=length), ends, firsts, shift, tally)
                offsets = np.array([0, len(sample)])
                results += self.divergences(offsets[:1], offsets, bins[sample].astype(np.uint32), counts, inside=False).tolist()
            means.append(sum(results) / DRAWS)
        return np.array(means)


@njit(cache=True)
def _count(places: I64, ends: I64, firsts: I64, shift: int, tally: U32) -> tuple[I64, U32]:
    """Return the bins that contain the word positions `places`, ascending, and the count in each; bin i ends before position `ends[i]`.

    `firsts`: the bin of every 2^shift-th position, where the search begins. `tally`: scratch array, all zeros before and after the call."""
    for place in places:
        at = firsts[place >> shift]
        while ends[at] <= place:
            at += 1
        tally[at] += np.uint32(1)
    bins = np.flatnonzero(tally)
    counts = tally[bins]
    tally[bins] = 0
    return bins, counts


@njit(cache=True)
def _divergences(corpus: I64, words: int, prior: float, rows: I64, offsets: I64, bins: U32, counts: U32, inside: bool) -> F64:
    out = np.zeros(len(rows))
    for at in range(len(rows)):
        first, last = offsets[rows[at]], offsets[rows[at] + 1]
        size = 0
        for i in range(first, last):
            size += int(counts[i])
        own = size if inside else 0
        total = words - own + prior * len(corpus)
        # Neumaier's summation: apart from its final rounding, the result does not depend on the order of the words.
        value, compensation = 0.0, 0.0
        for i in range(first, last):
            share = counts[i] / size
            rest = corpus[bins[i]] - (np.int64(counts[i]) if inside else 0)
            term = share * math.log(share * total / (rest + prior))
            grown = value + term
            compensation += (value - grown) + term if abs(value) >= abs(term) else (term - grown) + value
            value = grown
        out[at] = max(value + compensation, 0.0)
    return out


def expected_at(words: I64, expected: F64) -> F64:
    """Return the expected divergence of texts of `words` words: linear in the logarithm of the length, constant outside `LENGTHS`."""
    return np.interp(np.log(np.maximum(words, 1)), np.log(LENGTHS), expected)


class Tally:
    """Word counts by bin, summed over parts. New entries are merged once they outnumber a quarter of the merged entries and `LEAST`."""

    LEAST = 1 << 16

    def __init__(self) -> None:
        self.pieces: list[tuple[U32, I64]] = []
        self.waiting = self.words = 0

    def add(self, bins: U32, counts: I64) -> None:
        """Add `counts[i]` words to bin `bins[i]`. The bins must be distinct."""
        self.pieces.append((bins, counts))
        self.words += int(counts.sum())
        self.waiting += len(bins)
        if self.waiting > max(self.LEAST, len(self.pieces[0][0]) // 4):
            total = self.dense()
            self.pieces = [(np.flatnonzero(total).astype(np.uint32), total[total > 0])]
            self.waiting = 0

    def dense(self) -> I64:
        """Return the counts of all bins, int64[BINS]."""
        total = np.zeros(BINS, np.int64)
        for bins, counts in self.pieces:
            total[bins] += counts
        return total
