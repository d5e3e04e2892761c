"""Llama 3's signals of a document (arXiv 2407.21783, section 3.1.1): coverage by repeated n-grams, and the adult vocabulary."""

from __future__ import annotations

import re

from puna.stages.contract import signal
from puna.stages.curate.signals.definitions.views import entries, plain_words

COVERAGE_N = 5


def fold(word: str) -> str:
    """Return a word in lower case, with each run of digits replaced by 0."""
    return re.sub(r"\d+", "0", word.lower())


@signal(unit="fraction of words", compiled="heuristics")
def ngram_coverage(text: str) -> float:
    """Words inside n-grams seen earlier in the document; all numbers count as equal."""
    return coverage(text, COVERAGE_N)


def coverage(text: str, n: int) -> float:
    """Return the share of words inside n-grams seen earlier in the text. N-grams with letters in under half of their words do not count."""
    words = plain_words(text)
    seen: set[tuple[str, ...]] = set()
    covered: set[int] = set()
    for at in range(len(words) - n + 1):
        gram = tuple(map(fold, words[at : at + n]))
        if 2 * sum(any(c.isalpha() for c in word) for word in gram) < n:
            continue
        if gram in seen:
            covered |= set(range(at, at + n))
        seen.add(gram)
    return len(covered) / max(len(words), 1)


@signal(unit="words", compiled="heuristics")
def dirty_words(text: str) -> int:
    """Words from the adult vocabulary."""
    listed = {word for line in entries("dirty_words.txt") for word in line}
    return sum(fold(word) in listed for word in plain_words(text))


@signal(unit="fraction of words", compiled="heuristics")
def dirty_word_ratio(text: str) -> float:
    """Share of words from the adult vocabulary."""
    return dirty_words(text) / max(len(plain_words(text)), 1)
