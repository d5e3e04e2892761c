"""Compiled search for any of several words in bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.bytes import LANES, equal, lowest
from puna.kernels.cpu.numba_cache import njit

COMMON = b' etaoinsrl"/=<>-hdcupm.gf:wbvyk'  # frequent bytes of HTML and text, the most frequent first


class Words:
    """Words of two bytes or more, searched together. A word is compared in full where its two rarest bytes are, and near a text's end."""

    def __init__(self, *words: str) -> None:
        encoded = [word.encode() for word in words]
        if min(map(len, encoded), default=0) < 2:
            raise ValueError(f"words must have at least two bytes, not {words}")
        self._lengths = np.array([len(word) for word in encoded], np.int64)
        self._words = np.zeros((len(words), self._lengths.max()), np.uint8)
        self._rare = np.empty((len(words), 2), np.int64)
        for row, rare, word in zip(self._words, self._rare, encoded, strict=True):
            row[: len(word)] = list(word)
            rare[:] = sorted(range(len(word)), key=lambda place, word=word: -(COMMON.find(word[place]) % 256))[:2]  # type: ignore[misc]

    def any_in(self, text: bytes) -> bool:
        return bool(_any_in(np.frombuffer(text, np.uint8), self._words, self._lengths, self._rare))


@njit(cache=True)
def _any_in(text: NDArray[np.uint8], words: NDArray[np.uint8], lengths: NDArray[np.int64], rare: NDArray[np.int64]) -> bool:
    size, longest, address = len(text), words.shape[1], text.ctypes.data
    at = 0
    while at + longest + LANES <= size:
        for w in range(len(words)):
            first, second = rare[w]
            there = equal(address + at + first, words[w, first]) & equal(address + at + second, words[w, second])
            while there:
                if _stands(text, at + lowest(there), words[w], lengths[w]):
                    return True
                there &= there - 1
        at += LANES
    while at < size:
        for w in range(len(words)):
            if _stands(text, at, words[w], lengths[w]):
                return True
        at += 1
    return False


@njit(cache=True, borrows=True)
def _stands(text: NDArray[np.uint8], at: int, word: NDArray[np.uint8], length: int) -> bool:
    same = 0
    while same < length and at + same < len(text) and text[at + same] == word[same]:
        same += 1
    return same == length
