"""Configuration of `minhash_dedup` and values derived from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from puna.stages.contract import StageConfig

if TYPE_CHECKING:
    from puna.stages.curate.minhash.near_duplicates import Criteria

SLACK = 4.0  # standard errors of a signature's estimate below the threshold at which pairs are still compared
MARGIN = 1.4  # covers the scatter of short texts
LEVELS = 40  # doublings of the shingles' width; no text is so long


class MinhashDedupConfig(StageConfig):
    """Settings of candidate search, duplicate threshold, and choice of the surviving document."""

    words: int = Field(5, ge=1, le=50, description="Words per shingle, without case, punctuation, accents; a shorter text is one shingle")
    bands: int = Field(18, ge=1, le=1000, description="Bands of the index; documents that agree in one are candidates")
    rows: int = Field(6, ge=1, le=64, description="Signature values per band")
    seed: int = Field(1, ge=0, le=2**32 - 1, description="Seed of the permutations, as in datasketch")
    engine: Literal["puna", "datasketch"] = Field("puna", description="Signatures by Puna or datasketch's MinHash, with equal results")
    verify: bool = Field(True, description="Compare candidates exactly; else each chain of candidates shrinks to one document")
    similarity: Literal["jaccard", "containment"] = Field("jaccard", description="Common shingles, of both or of the removed document")
    threshold: float = Field(0.8, gt=0, le=1, description="Candidates below this verified similarity are kept, fraction")
    max_new_words: int = Field(50, ge=0, description="A document with a longer passage that its survivor lacks is kept (templates), words")
    max_new_fraction: float = Field(0.05, ge=0, le=1, description="The same bound as a fraction of the document's words; the larger counts")
    survivor: Literal["longest", "latest", "best_score"] = Field("longest", description="Which one is kept; best_score: by `score`")
    score: str = Field("quality", description="Signal that ranks documents for survivor: best_score, higher is better; missing is worst")
    prefer_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents survive others, as a file before a page")
    keep_index: bool = Field(False, description="Store signatures and normal texts, about as large as the documents, for `minhash_update`")

    @property
    def method(self) -> str:
        """Return the method that found and judged a pair, as evidence."""
        if not self.verify:
            return f"minhash, signatures of {self.words}-word runs, not verified"
        return f"minhash, {self.similarity} of {self.words}-word runs"

    def detail(self, survivor: str, new_words: int) -> str:
        """Return the explanation of a removal."""
        by = {"longest": "length", "latest": "time of fetching", "best_score": self.score}[self.survivor]
        evidence = f"longest passage of its own: {new_words} words" if self.verify else "not verified"
        return f"of {survivor}, preferred by {'source, then ' if self.prefer_sources else ''}{by}; {evidence}"

    def criteria(self) -> Criteria:
        """Return the kernel's criteria to verify a pair."""
        from puna.stages.curate.minhash.near_duplicates import Criteria

        estimate = 0.0
        if self.similarity == "jaccard":  # a signature estimates it: pairs far below need no exact comparison
            t = self.threshold
            estimate = max(0.0, t - SLACK * (t * (1 - t) / (self.bands * self.rows)) ** 0.5 - 1e-9)
        similarity, distinct = (np.array([of(level) for level in range(LEVELS)]) for of in (self.least_similarity, self.least_distinct))
        contained = self.similarity == "containment"
        return Criteria(self.words, contained, similarity, distinct, estimate, self.max_new_words, self.max_new_fraction)

    def least_similarity(self, level: int) -> float:
        """Return the threshold for shingles `2 ** level` times as wide, of which an edit breaks `2 ** level` times as many.

        Of equally long documents with a share k of whole shingles, k is the containment and k / (2 - k) the Jaccard similarity.
        """
        t = self.threshold
        share = float((t if self.similarity == "containment" else 2 * t / (1 + t)) ** (2**level))
        return share if self.similarity == "containment" else share / (2 - share)

    def least_distinct(self, level: int) -> float:
        """Return the share of distinct shingles below which texts could be as similar as the threshold by chance.

        n words drawn at random show a share p = 1 - exp(-n / k) of all k shingles. Two such texts have containment p and similarity p / (2
        - p). The distinct share of their shingles is p / (n / k) = p / -log(1 - p).
        """
        t = self.least_similarity(level)
        p = min(max(t if self.similarity == "containment" else 2 * t / (1 + t), 1e-9), 0.99)
        return MARGIN * -p / math.log1p(-p)
