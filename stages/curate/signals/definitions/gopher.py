"""Gopher's signals (Rae et al. 2021, arXiv 2112.11446, appendix A.1), as datatrove defines them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from puna.stages.contract import signal
from puna.stages.curate.signals.definitions.views import entries, is_unspaced, plain_words, seen_before, words_of

TOP_N = (2, 3, 4)
DUPLICATE_N = (5, 6, 7, 8, 9, 10)


@signal(unit="words", compiled="heuristics")
def words(text: str) -> int:
    """Words with a character that is neither punctuation nor a symbol (Gopher)."""
    return len(plain_words(text))


@signal(unit="characters per word", optional=True, compiled="heuristics")
def mean_word_length(text: str) -> float | None:
    """Mean length of words other than symbols (Gopher); null if most words are in a script without spaces."""
    results = plain_words(text)
    return None if is_unspaced(text) else sum(map(len, results)) / max(len(results), 1)


@signal(unit="fraction of words", compiled="heuristics")
def alphabetic_word_fraction(text: str) -> float:
    """Words with an alphabetic character (Gopher)."""
    results = plain_words(text)
    return sum(any(c.isalpha() for c in word) for word in results) / max(len(results), 1)


@signal(unit="per word", compiled="heuristics")
def hash_ratio(text: str) -> float:
    """'#' characters per word (Gopher)."""
    return text.count("#") / max(len(words_of(text)), 1)


@signal(unit="per word", compiled="heuristics")
def ellipsis_ratio(text: str) -> float:
    """'...' and '…' per word (Gopher)."""
    return (text.count("...") + text.count("…")) / max(len(words_of(text)), 1)


@signal(unit="fraction of lines", compiled="heuristics")
def bullet_line_fraction(text: str) -> float:
    """Lines that start with a bullet (Gopher)."""
    results = text.splitlines()
    return sum(line.lstrip().startswith(("•", "-")) for line in results) / max(len(results), 1)


@signal(unit="fraction of lines", compiled="heuristics")
def ellipsis_line_fraction(text: str) -> float:
    """Lines that end with an ellipsis (Gopher)."""
    results = text.splitlines()
    return sum(line.rstrip().endswith(("...", "…")) for line in results) / max(len(results), 1)


@signal(unit="distinct words", compiled="heuristics")
def english_stop_words(text: str) -> int:
    """Distinct words among Gopher's eight English stop words."""
    return len(set(entries("stop_words.txt")[0][1:]) & set(words_of(text)))


@signal(unit="distinct words", optional=True, compiled="heuristics")
def stop_words(text: str) -> int | None:
    """Distinct stop words of the document's language (null if it has no list); for an unknown language, the largest count of any list."""
    return max(len(set(listed) & set(words_of(text))) for _, *listed in entries("stop_words.txt"))


@signal(unit="fraction of words", optional=True, compiled="heuristics")
def stop_word_fraction(text: str) -> float | None:
    """Words that are stop words of the document's language; null for English, unknown languages and languages without a list."""
    return None


def top_gram(text: str, n: int) -> float:
    """Return the length of the most frequent n-gram times its count, as a fraction of the text's length; 0 if no n-gram repeats."""
    results = words_of(text)
    grams = Counter(" ".join(results[i : i + n]) for i in range(len(results) - n + 1))
    gram, count = max(grams.items(), key=lambda pair: pair[1], default=("", 0))  # ties go to the first
    return len(gram) * count / max(len(text), 1) if count > 1 else 0.0


def duplicate_gram(text: str, n: int) -> float:
    """Return the fraction of characters in n-grams seen earlier, counted without overlap."""
    results = words_of(text)
    seen: set[str] = set()
    at = characters = 0
    while at + n <= len(results):
        gram = "".join(results[at : at + n])
        characters += len(gram) if gram in seen else 0
        at += n if gram in seen else 1
        seen.add(gram)
    return characters / max(len(text), 1)


def _of_grams(found: Callable[[str, int], float], n: int, name: str, meaning: str) -> None:
    def definition(text: str) -> float:
        return found(text, n)

    signal(unit="fraction of characters", name=name, meaning=meaning, compiled="heuristics")(definition)


def _of_pieces(name: str, pieces: Callable[[str], list[str]]) -> None:
    def fraction(text: str) -> float:
        return seen_before(pieces(text))[0] / len(pieces(text))

    def characters(text: str) -> float:
        return seen_before(pieces(text))[1] / max(len(text), 1)

    for unit, middle, definition in ((f"{name}s", "", fraction), ("characters", "_character", characters)):
        meaning = f"{unit} in {name}s seen earlier (Gopher)" if middle else f"{unit} seen earlier in the document (Gopher)"
        signal_name = f"duplicate_{name}{middle}_fraction"
        signal(unit=f"fraction of {unit}", name=signal_name, meaning=meaning, compiled="heuristics")(definition)


_of_pieces("line", lambda text: re.split(r"\n+", text))
_of_pieces("paragraph", lambda text: re.split(r"\n{2,}", text.strip()))
for _n in TOP_N:
    _of_grams(top_gram, _n, f"top_{_n}gram_character_fraction", f"most frequent {_n}-gram (Gopher)")
for _n in DUPLICATE_N:
    _of_grams(duplicate_gram, _n, f"duplicate_{_n}gram_character_fraction", f"{_n}-grams seen earlier (Gopher)")
