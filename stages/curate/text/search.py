"""Several words looked for at once in bytes, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit


class Words:
    """Words that are looked for together, in steps as long as the last two bytes allow (Wu, Manber 1994)."""

    def __init__(self, *words: str) -> None:
        encoded = [word.encode() for word in words]
        self._window = min(map(len, encoded), default=0)
        if self._window < 2:
            raise ValueError(f"words of two bytes and more can be looked for, not {words}")
        self._lengths = np.array([len(word) for word in encoded], np.int64)
        self._words = np.zeros((len(words), self._lengths.max()), np.uint8)
        self._steps = np.full(1 << 16, self._window - 1, np.int64)
        for row, word in zip(self._words, encoded, strict=True):
            row[: len(word)] = list(word)
            for last in range(1, self._window):
                pair = word[last - 1] << 8 | word[last]
                self._steps[pair] = min(self._steps[pair], self._window - 1 - last)
        self._steps = self._steps.astype(np.uint8)

    def any_in(self, text: bytes) -> bool:
        """Whether one of the words occurs."""
        return bool(_any_in(np.frombuffer(text, np.uint8), self._words, self._lengths, self._steps, self._window))


@njit(cache=True)
def _any_in(text: NDArray[np.uint8], words: NDArray[np.uint8], lengths: NDArray[np.int64], steps: NDArray[np.uint8], window: int) -> bool:
    size, at = len(text), window - 1
    while at < size:
        step = np.int64(steps[np.int64(text[at - 1]) << 8 | text[at]])
        if step > 0:
            at = int(at + step)
            continue
        start = at - window + 1
        for w in range(len(words)):
            same = 0
            while same < lengths[w] and start + same < size and text[start + same] == words[w, same]:
                same += 1
            if same == lengths[w]:
                return True
        at += 1
    return False
