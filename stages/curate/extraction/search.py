"""Searching in bytes, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit
from puna.stages.curate.extraction.layout import OFFSET, PRIME
from puna.stages.curate.extraction.tags import TAG_KEYS, TAG_VALUES

WINDOW = 5  # bytes of each word that `Words` looks at first


@njit(cache=True, borrows=True)
def find(html: NDArray[np.uint8], at: int, byte: int, stop: int = -1) -> int:
    """Index of the first `byte` from `at` on, or `stop`, or the end."""
    stop = len(html) if stop < 0 else stop
    while at < stop and html[at] != byte:
        at += 1
    return at


@njit(cache=True, borrows=True)
def has(html: NDArray[np.uint8], start: int, stop: int, words: bytes) -> bool:
    """Whether bytes occur in html[start:stop], letters in either case."""
    for at in range(start, stop - len(words) + 1):
        here = 0
        while here < len(words) and (
            html[at + here] == words[here] or (65 <= html[at + here] <= 90 and html[at + here] + 32 == words[here])
        ):
            here += 1
        if here == len(words):
            return True
    return False


@njit(cache=True, borrows=True)
def is_space(byte: int) -> bool:
    """Whether a byte is white space between the parts of a tag; other control characters belong to names."""
    return byte == 32 or byte == 10 or byte == 9 or byte == 13 or byte == 12


@njit(cache=True, borrows=True)
def tag_name(html: NDArray[np.uint8], at: int) -> tuple[int, np.uint64, int]:
    """Number and hash of the element's name at `at`, letters in either case, and where it ends."""
    state = OFFSET
    while at < len(html) and not is_space(html[at]) and html[at] != 62 and html[at] != 47:
        c = html[at]
        state = (state ^ np.uint64(c | 32 if 65 <= c <= 90 else c)) * PRIME
        at += 1
    slot = np.int64(state & np.uint64(len(TAG_KEYS) - 1))
    while TAG_KEYS[slot] != 0 and TAG_KEYS[slot] != state:
        slot = (slot + 1) & (len(TAG_KEYS) - 1)
    return (TAG_VALUES[slot] if TAG_KEYS[slot] != 0 else 0), state, at


class Words:
    """Words of at least `WINDOW` bytes that are looked for together, in steps as long as the last two bytes allow (Wu, Manber 1994)."""

    def __init__(self, *words: str) -> None:
        encoded = [word.encode() for word in words]
        if not words or min(map(len, encoded)) < WINDOW:
            raise ValueError(f"words of {WINDOW} bytes and more can be looked for, not {words}")
        self._lengths = np.array([len(word) for word in encoded], np.int64)
        self._words = np.zeros((len(words), self._lengths.max()), np.uint8)
        self._steps = np.full(1 << 16, WINDOW - 1, np.uint8)
        for row, word in zip(self._words, encoded, strict=True):
            row[: len(word)] = list(word)
            for last in range(1, WINDOW):
                pair = word[last - 1] << 8 | word[last]
                self._steps[pair] = min(self._steps[pair], WINDOW - 1 - last)

    def any_in(self, text: bytes) -> bool:
        """Whether one of the words occurs."""
        return bool(_any_in(np.frombuffer(text, np.uint8), self._words, self._lengths, self._steps))


@njit(cache=True)
def _any_in(text: NDArray[np.uint8], words: NDArray[np.uint8], lengths: NDArray[np.int64], steps: NDArray[np.uint8]) -> bool:
    size, at = len(text), WINDOW - 1
    while at < size:
        step = np.int64(steps[np.int64(text[at - 1]) << 8 | text[at]])
        if step > 0:
            at = int(at + step)
            continue
        start = at - WINDOW + 1
        for w in range(len(words)):
            same = 0
            while same < lengths[w] and start + same < size and text[start + same] == words[w, same]:
                same += 1
            if same == lengths[w]:
                return True
        at += 1
    return False
