"""Word n-grams as hashes, and finding those of an index in a text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit
from puna.stages.curate.text.characters import code_points
from puna.stages.curate.text.hash_table import mix
from puna.stages.curate.text.words import IS_SYMBOL, split_codes


def word_hashes(text: str) -> tuple[NDArray[np.uint64], list[tuple[int, int]], str]:
    """Hashes of the words of a text without case and punctuation, uint64[n]; their character ranges; the text they are of."""
    lowered = text.lower()
    words = split_codes(code_points(lowered))
    kept = words.flags & IS_SYMBOL == 0
    return words.hash[kept], list(zip(words.start[kept].tolist(), words.stop[kept].tolist(), strict=True)), lowered


@njit(cache=True)
def gram_hashes(words: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """Hash of each n-gram of words, uint64[max(len(words) - n + 1, 0)]."""
    out = np.empty(max(len(words) - n + 1, 0), np.uint64)
    for i in range(len(out)):
        value = np.uint64(n)
        for k in range(i, i + n):
            value = mix(value + mix(words[k]))
        out[i] = value
    return out
