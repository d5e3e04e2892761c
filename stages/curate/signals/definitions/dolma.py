"""Signals that dolma 1.2 measures besides Gopher's and C4's (Soldaini et al. 2024, arXiv 2402.00159; taggers gopher_v2, c4_v2).

Words are what lies between white space. They are measured where `heuristics.words` is dolma.
"""

from __future__ import annotations

import statistics

from puna.stages.contract import signal
from puna.stages.curate.signals.definitions.views import entries


@signal(unit="characters per word", compiled="dolma")
def median_word_length(text: str) -> float:
    """Median length of the words between white space (Gopher as dolma measures it)."""
    return float(statistics.median(map(len, text.split()))) if text.split() else 0.0


@signal(unit="fraction of words", compiled="dolma")
def symbol_word_fraction(text: str) -> float:
    """Words between white space with '#' or '…' (Gopher as dolma measures it)."""
    words = text.split()
    return sum("#" in word or "…" in word for word in words) / max(len(words), 1)


@signal(unit="words", compiled="dolma")
def english_stop_word_occurrences(text: str) -> int:
    """Words that are one of Gopher's eight English stop words (dolma)."""
    return sum(word in entries("stop_words.txt")[0][1:] for word in text.split())


@signal(unit="lines", compiled="dolma")
def unpunctuated_lines(text: str) -> int:
    """Lines, blank ones too, that do not end in '.', '?', '!' or '\"' (C4 as dolma measures it)."""
    return sum(line.strip()[-1:] not in {".", "?", "!", '"'} for line in text.split("\n"))


@signal(unit="lines", compiled="dolma")
def few_word_lines(text: str) -> int:
    """Lines, blank ones too, of fewer than three words (C4 as dolma measures it)."""
    return sum(len(line.split()) < 3 for line in text.split("\n"))


@signal(unit="lines", compiled="dolma")
def curly_bracket_lines(text: str) -> int:
    """Lines with '{' (C4 as dolma measures it)."""
    return sum("{" in line for line in text.split("\n"))


@signal(unit="lines", compiled="dolma")
def lorem_ipsum_lines(text: str) -> int:
    """Lines with 'lorem ipsum' (C4 as dolma measures it)."""
    return sum("lorem ipsum" in line.lower() for line in text.split("\n"))


@signal(unit="lines", compiled="dolma")
def javascript_lines(text: str) -> int:
    """Lines with 'javascript' (C4 as dolma measures it)."""
    return sum("javascript" in line.lower() for line in text.split("\n"))
