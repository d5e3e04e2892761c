"""Search for prompts that a document contains with changes: sampled n-grams find places, and the passage around each is compared in full.

Every `step`-th n-gram of a document is looked up among the n-grams of all prompts. From a hit, the passage grows in both directions
while at most `misses` n-grams in a row are absent from the prompt. The share of the prompt that the passage covers is weighted by rarity:
n-grams that many prompts have ("which of the following is") say little about any prompt."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from puna.kernels.text.grams import Hashed, gram_hashes, places_held, word_hashes
from puna.kernels.text.hash_table import table_of


@dataclass(frozen=True)
class FuzzyIndex:
    """An index of prompts: n-gram `weights` and `totals` per prompt; all n-grams' sorted `hashes` uint64[m] and their prompts, `owners`."""

    n: int
    step: int
    misses: int
    weights: list[dict[int, float]]
    totals: list[float]
    hashes: NDArray[np.uint64]
    owners: NDArray[np.int64]
    table: NDArray[np.uint64]
    """A hash table of all prompts' n-grams, for `places_held`."""


def build_fuzzy(texts: list[str], n: int, step: int, misses: int, min_words: int) -> FuzzyIndex:
    """Return the index of the prompts `texts`; prompts of fewer than `min_words` or `n` words have no n-grams in the index."""
    results = []
    for text in texts:
        words = word_hashes(text).words
        results.append(set(gram_hashes(words, n).tolist()) if len(words) >= max(n, min_words) else set())
    prompts = Counter(gram for grams in results for gram in grams)
    weights = [{gram: math.log1p(len(texts) / prompts[gram]) for gram in sorted(grams)} for grams in results]
    pairs = sorted((gram, owner) for owner, grams in enumerate(results) for gram in grams)
    return FuzzyIndex(
        n, step, misses, weights, [sum(w.values()) for w in weights], np.array([gram for gram, _ in pairs], np.uint64),
        np.array([owner for _, owner in pairs], np.int64), table_of(prompts),
    )  # fmt: skip


@dataclass(frozen=True)
class FuzzyMatch:
    """The prompt that a passage of a document covers best: the prompt's index, its weighted share covered, the passage in lower case."""

    prompt: int
    share: float
    text: str


def fuzzy_match(text: Hashed, index: FuzzyIndex) -> FuzzyMatch | None:
    """Return the match of the prompt that one passage of the document covers best (on a tie, the first prompt), or None without a hit."""
    grams = gram_hashes(text.words, index.n)
    sampled = places_held(np.ascontiguousarray(grams[:: index.step]), index.table)
    low = np.searchsorted(index.hashes, grams[sampled * index.step], side="left")
    high = np.searchsorted(index.hashes, grams[sampled * index.step], side="right")
    best: FuzzyMatch | None = None
    covered: dict[int, int] = {}  # prompt → end of its last passage, so that a passage is measured once
    for place, at in enumerate((sampled * index.step).tolist()):
        for prompt in index.owners[low[place] : high[place]].tolist():
            if covered.get(prompt, -1) >= at:
                continue
            start, stop = _passage(grams, at, index.weights[prompt], index.misses)
            covered[prompt] = stop
            weight = sum(index.weights[prompt].get(gram, 0.0) for gram in sorted(set(grams[start : stop + 1].tolist())))
            share = weight / index.totals[prompt]
            if best is None or (share, -prompt) > (best.share, -best.prompt):
                passage = text.lowered[text.start[start] : text.stop[stop + index.n - 1]]
                best = FuzzyMatch(prompt, share, passage)
    return best


def _passage(grams: NDArray[np.uint64], at: int, weights: dict[int, float], misses: int) -> tuple[int, int]:
    """Return the indices of the first and last n-gram of the passage around `at`; at most `misses` in a row are not in `weights`."""
    ends = []
    for direction in (-1, 1):
        end, missed, here = at, 0, at + direction
        while 0 <= here < len(grams) and missed <= misses:
            if int(grams[here]) in weights:
                end, missed = here, 0
            else:
                missed += 1
            here += direction
        ends.append(end)
    return ends[0], ends[1]
