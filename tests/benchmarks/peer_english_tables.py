"""Prints kernels/text/data/english_words.json: what spaCy's blank English tokeniser and datatrove's filters know
about characters and words, as tables. Runs in the environment of the peer "datatrove" (see peers.py).

Character classes are evaluated over all of Unicode and stored as ranges; split exceptions are stored as their pieces
parted by spaces.
"""

import json
import re
import sys

import spacy
from datatrove.utils.text import PUNCTUATION_SET, TERMINAL_PUNCTUATION
from spacy.attrs import ORTH
from spacy.lang import char_classes as cc
from spacy.lang.punctuation import TOKENIZER_PREFIXES
from spacy.pipeline.sentencizer import Sentencizer

POINTS = [chr(p) for p in range(sys.maxunicode + 1)]


def ranges(found: set[str]) -> str:
    """A set of characters as "41-5a b5 …" in hexadecimal."""
    out: list[list[int]] = []
    for point in sorted(map(ord, found)):
        if out and out[-1][1] == point - 1:
            out[-1][1] = point
        else:
            out.append([point, point])
    return " ".join(f"{a:x}" if a == b else f"{a:x}-{b:x}" for a, b in out)


def of_class(pattern: str) -> set[str]:
    """The characters that a class matches."""
    return set(re.findall(f"[{pattern}]", "".join(POINTS)))


def single(pieces: list[str]) -> set[str]:
    """The characters that one of the patterns, a character or a class, matches all of."""
    letters = {piece.replace("\\", "") for piece in pieces}
    classes = [piece[1:-1] for piece in pieces if len(piece) > 2 and piece[0] == "["]
    return {letter for letter in letters if len(letter) == 1}.union(*map(of_class, classes))


def main() -> None:
    rules = spacy.blank("en").tokenizer.rules
    suffixes = cc.LIST_PUNCT + cc.LIST_ELLIPSES + cc.LIST_QUOTES + cc.LIST_ICONS + ["—", "–"]
    before_dot = r"0-9{al}{e}{p}(?:{q})".format(al=cc.ALPHA_LOWER, e=r"%²\-\+", q=cc.CONCAT_QUOTES, p=cc.PUNCT)
    tables = {
        "about": "Facts of spaCy 3.8 (MIT) and datatrove 0.10 (Apache-2.0), made by tests/benchmarks/peer_english_tables.py",
        "classes": {
            "alpha": ranges(of_class(cc.ALPHA)),
            "lower": ranges(of_class(cc.ALPHA_LOWER)),
            "upper": ranges(of_class(cc.ALPHA_UPPER)),
            "prefix": ranges(single([p for p in TOKENIZER_PREFIXES if not p.startswith(r"\+")])),
            "suffix": ranges(single(suffixes)),
            "icon": ranges(of_class(cc.CONCAT_ICONS) | {"…"}),
            "quote": ranges(of_class(cc.CONCAT_QUOTES)),
            "before_dot": ranges(of_class(before_dot)),
            "currency": ranges(single(cc.LIST_CURRENCY)),
            "sentence_end": ranges(set(Sentencizer.default_punct_chars)),
            "symbol": ranges(PUNCTUATION_SET),
            "terminal": ranges(set(TERMINAL_PUNCTUATION)),
        },
        "units": sorted(u for u in cc.LIST_UNITS if u),
        "specials": sorted(" ".join(piece[ORTH] for piece in pieces) for word, pieces in rules.items() if not re.search(r"\s", word)),
    }
    print(json.dumps(tables, ensure_ascii=False, indent=0))


if __name__ == "__main__":
    main()
