"""Derived views of a text that several definitions share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from puna.kernels.text.characters import SINGLE, SYMBOL, tables
from puna.kernels.text.words import split

DATA = Path(__file__).parents[2] / "data"


def has(character: str, flag: int) -> bool:
    """True if a character has the property `flag` (see `puna.kernels.text.characters`)."""
    return bool(tables().flags[ord(character)] & flag)


@lru_cache(maxsize=4)
def words_of(text: str) -> tuple[str, ...]:
    """Return all words of a text, including symbols."""
    return tuple(split(text))


@lru_cache(maxsize=4)
def plain_words(text: str) -> tuple[str, ...]:
    """Return the words that contain a character that is neither punctuation nor a symbol."""
    return tuple(word for word in words_of(text) if not all(has(c, SYMBOL) for c in word))


def is_unspaced(text: str) -> bool:
    """True if most words are in a script that is written without spaces."""
    words = plain_words(text)
    return 2 * sum(has(word[0], SINGLE) for word in words) > len(words)


def seen_before(pieces: Iterable[str]) -> tuple[int, int]:
    """Return the number of pieces that equal an earlier piece, and the number of characters in these repeated pieces."""
    seen: set[str] = set()
    count = characters = 0
    for piece in pieces:
        if piece in seen:
            count += 1
            characters += len(piece)
        seen.add(piece)
    return count, characters


@lru_cache(maxsize=2)
def entries(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the lines of a word list in the data folder, split into words, without comments and empty lines."""
    text = (DATA / name).read_text(encoding="utf-8")
    return tuple(tuple(line.split()) for line in text.splitlines() if line and not line.startswith("#"))
