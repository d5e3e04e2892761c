"""Configuration of `minhash_dedup` and values derived from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from puna.stages.contract import StageConfig

if TYPE_CHECKING:
    from puna.stages.curate.minhash.near_duplicates import Criteria

SLACK = 4.0  # pairs are compared if their estimated similarity is at most this many standard errors below the threshold
MARGIN = 1.4  # factor that allows for random variation in short texts
LEVELS = 40  # number of times that shingle widths are doubled, more than the longest text allows


class MinhashDedupConfig(StageConfig):
    words: int = Field(5, ge=1, le=50, description="Words per shingle, ignoring case, punctuation, accents; a shorter text is one shingle")
    bands: int = Field(18, ge=1, le=1000, description="Bands of the index; documents that agree in a band are candidates")
    rows: int = Field(6, ge=1, le=64, description="Number of signature values per band")
    seed: int = Field(1, ge=0, le=2**32 - 1, description="Seed of the permutations, used as in datasketch")
    engine: Literal["puna", "datasketch"] = Field("puna", description="Compute signatures by Puna or datasketch's MinHash (equal results)")
    verify: bool = Field(True, description="Compare candidates exactly; false: keep one document of each chain of candidates")
    similarity: Literal["jaccard", "containment"] = Field("jaccard", description="Shared shingles over the union's or the removed text's")
    threshold: float = Field(0.8, gt=0, le=1, description="Minimum verified similarity of a removed document to the kept one (0 to 1)")
    max_new_words: int = Field(50, ge=0, description="Maximum length of a removed document's passage that the kept one lacks, in words")
    max_new_fraction: float = Field(0.05, ge=0, le=1, description="max_new_words as a fraction of the document's words; the larger applies")
    survivor: Literal["longest", "latest", "best_score"] = Field("longest", description="Document to keep; best_score: by `score`")
    score: str = Field("quality", description="Signal that ranks documents with survivor=best_score; higher is better, missing is worst")
    prefer_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are kept in preference to others")
    keep_index: bool = Field(False, description="Store normalized texts and signatures for `minhash_update`: about the documents' size")

    @property
    def method(self) -> str:
        """Return a description of the method, for the table `duplicates`."""
        if not self.verify:
            return f"minhash, signatures of {self.words}-word runs, not verified"
        return f"minhash, {self.similarity} of {self.words}-word runs"

    def detail(self, survivor: str, new_words: int) -> str:
        """Return the explanation of a removal, for the table `dropped`."""
        by = {"longest": "length", "latest": "time of fetching", "best_score": self.score}[self.survivor]
        evidence = f"longest passage of its own: {new_words} words" if self.verify else "not verified"
        return f"of {survivor}, preferred by {'source, then ' if self.prefer_sources else ''}{by}; {evidence}"

    def criteria(self) -> Criteria:
        """Return the criteria by which the kernel verifies a pair."""
        from puna.stages.curate.minhash.near_duplicates import Criteria

        estimate = 0.0
        if self.similarity == "jaccard":  # signatures estimate Jaccard similarity; pairs far below the threshold need no exact comparison
            t = self.threshold
            estimate = max(0.0, t - SLACK * (t * (1 - t) / (self.bands * self.rows)) ** 0.5 - 1e-9)
        similarity, distinct = (np.array([of(level) for level in range(LEVELS)]) for of in (self.least_similarity, self.least_distinct))
        contained = self.similarity == "containment"
        return Criteria(self.words, contained, similarity, distinct, estimate, self.max_new_words, self.max_new_fraction)

    def least_similarity(self, level: int) -> float:
        """Return the minimum similarity for shingles `2 ** level` times as wide, of which an edit changes `2 ** level` times as many.
        If two equally long documents share the fraction k of their shingles, containment is k and Jaccard similarity k / (2 - k)."""
        t = self.threshold
        share = float((t if self.similarity == "containment" else 2 * t / (1 + t)) ** (2**level))
        return share if self.similarity == "containment" else share / (2 - share)

    def least_distinct(self, level: int) -> float:
        """Return `MARGIN` times the share of distinct shingles below which two texts may reach the threshold of `level` by chance.

        n random shingles from a set of k contain a share p = 1 - exp(-n / k) of the set. Two such texts have containment p and Jaccard
        similarity p / (2 - p). The share of distinct shingles in each text is p / (n / k) = p / -log(1 - p)."""
        t = self.least_similarity(level)
        p = min(max(t if self.similarity == "containment" else 2 * t / (1 + t), 1e-9), 0.99)
        return MARGIN * -p / math.log1p(-p)
