"""Texts as runs of words: what near-duplicate detection compares."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
from numpy.typing import NDArray

BREAK = re.compile(r"[\W_]+")
ACCENTS = re.compile("[\u0300-\u036f]")
# Scripts written without spaces: each character is a word of its own.
UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])"
)


def normalized(text: str) -> str:
    """Lower-case words without punctuation and Latin accents, parted by single spaces; numbers stay as they are.

    Numbers tell apart what templates make alike (statistics, product pages), so they are not mapped to one digit.
    """
    text = text.casefold()
    if not text.isascii():
        text = ACCENTS.sub("", unicodedata.normalize("NFD", text))
        text = UNSPACED.sub(r" \1 ", text)
    return BREAK.sub(" ", text).strip()


def packed(texts: list[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The UTF-8 bytes of all texts one after another, and where each begins (and the last ends)."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int64)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets
