"""Signals of boilerplate pages: terms and policies in seven European languages, and English notices in place of a page."""

from __future__ import annotations

from functools import lru_cache

from puna.stages.contract import signal
from puna.stages.curate.signals.definitions.counts import fold
from puna.stages.curate.signals.definitions.views import entries, plain_words

MIN_LEGAL_PHRASES = 8
MIN_SPOKEN_PHRASES = 2
SPEAKERS = frozenset((
    "we", "us", "our", "you", "your", "wir", "uns", "unsere", "unserer", "unserem", "unseren", "nous", "notre", "nos", "vous",
    "votre", "vos", "nosotros", "nuestra", "nuestro", "nuestros", "usted", "noi", "nostro", "nostra", "nostri", "tuo", "tua",
    "tuoi", "tue", "wij", "ons", "onze", "je", "uw", "nós", "nosso", "nossa", "nossos", "você",
))  # fmt: skip
"""Words for the writer and the reader in terms and policies. Laws and articles share many phrases with these, but lack such words."""
NOTICE_WORDS = 100


@lru_cache(maxsize=4)
def phrases(text: str, kind: str) -> tuple[frozenset[int], frozenset[tuple[str, ...]]]:
    """Return the indices of non-symbol words inside listed phrases of `kind` (`legal` or `notice`), and the phrases found."""
    listed = {entry[1:] for entry in entries("notices.txt") if entry[0] == kind}
    words = tuple(map(fold, plain_words(text)))
    inside: set[int] = set()
    seen = set()
    for size in sorted({len(phrase) for phrase in listed}):
        for at in range(len(words) - size + 1):
            if words[at : at + size] in listed:
                seen.add(words[at : at + size])
                inside |= set(range(at, at + size))
    return frozenset(inside), frozenset(seen)


@signal(unit="fraction of words", compiled="heuristics")
def legal_phrase_ratio(text: str) -> float:
    """Words in phrases from terms of use, privacy and cookie policies; 0 for a text with fewer than 8 different phrases, or fewer than 2
    that contain we or you."""
    inside, matches = phrases(text, "legal")
    spoken = sum(not SPEAKERS.isdisjoint(phrase) for phrase in matches)
    enough = len(matches) >= MIN_LEGAL_PHRASES and spoken >= MIN_SPOKEN_PHRASES
    return len(inside) / max(len(plain_words(text)), 1) if enough else 0.0


@signal(unit="fraction of words", compiled="heuristics")
def notice_ratio(text: str) -> float:
    """Words in lines with a phrase that stands in place of a page, such as an error or a request for JavaScript or a login. At most 100
    words count, since notices are short; a longer text is an article about such things."""
    inside, _ = phrases(text, "notice")
    first = total = 0
    for line in text.split("\n"):
        size = len(plain_words(line))
        total += size if any(word in inside for word in range(first, first + size)) else 0
        first += size
    return min(total, NOTICE_WORDS) / max(first, 1)
