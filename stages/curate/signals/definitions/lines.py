"""Signals of lines and characters, including those of C4 (Raffel et al. 2020, arXiv 1910.10683) and FineWeb (2406.17557) in datatrove."""

from __future__ import annotations

import re
from functools import lru_cache

from puna.kernels.text.characters import PUNCTUATION, TERMINAL, code_points
from puna.kernels.text.technical import BEFORE_RESULT, ENDS, MARKS
from puna.kernels.text.words import split_codes
from puna.stages.contract import signal
from puna.stages.curate.signals.definitions.views import has, is_unspaced, seen_before, words_of

CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_HIGH = "[\x80-\xbf" + bytes(range(0x80, 0xA0)).decode("cp1252", "ignore") + "]"
MISREAD = re.compile(f"[\xc2-\xdf]{_HIGH}|[\xe0-\xef]{_HIGH}{{2}}|[\xf0-\xf4]{_HIGH}{{3}}")
CALCULATION = re.compile(rf"(?<![A-Za-z_0-9.,])[0-9.,]*[0-9]%? *=[{re.escape(BEFORE_RESULT)}]*\.?[0-9]")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def sentences(line: str) -> int:
    """Return the number of sentences as in spaCy's sentencizer: the first word after a terminator that is not punctuation starts one."""
    if not line:
        return 0
    words = split_codes(code_points(line))
    tokens, position = [], 0
    for first, last in zip(words.start.tolist(), words.stop.tolist(), strict=True):
        tokens += [line[position:first], line[first:last]]
        position = last
    tokens.append(line[position:])
    count, ended = 1, False
    for token in tokens:
        if token in ("", " "):
            continue
        if len(token) == 1 and has(token, TERMINAL):
            ended = True
        elif ended and not all(has(c, PUNCTUATION) for c in token):
            count, ended = count + 1, False
    return count


@lru_cache(maxsize=4)
def c4(text: str, need_end: bool) -> tuple[int, int, int]:
    """Return counts: sentences in kept lines, "lorem ipsum" lines, and "{" lines before the first of these. `need_end`: see `_of_c4`."""
    results = lorem = curly = 0
    for line in map(str.strip, text.splitlines()):
        words = line.split()
        if any(len(word) > 1000 for word in words) or len(words) < 3:
            continue
        line = CITATION.sub("", line)
        if need_end and (not line.endswith((".", "?", "!", '"', "'")) or line.endswith("...")):
            continue
        lower = line.lower()
        if "lorem ipsum" in lower:
            lorem += 1
        elif "javascript" not in lower:
            curly += "{" in line and not lorem
            results += 0 if any(phrase in lower for phrase in POLICY) else sentences(line)
    return results, lorem, curly


def _of_c4(name: str, place: int, need_end: bool, meaning: str) -> None:
    """Declare result number `place` of `c4` as a signal. Sentences are null for scripts without spaces, whose lines C4 sees as one word."""

    def definition(text: str) -> int | None:
        return None if place == 0 and is_unspaced(text) else c4(text, need_end)[place]

    unit = "lines" if place else "sentences"
    signal(unit=unit, name=name, meaning=meaning, optional=not place, compiled="heuristics")(definition)


for _prefix, _need_end, _rules in (
    ("c4", True, "C4's preceding line rules"),
    ("c4_open", False, "C4's preceding line rules except terminal punctuation"),
):
    _of_c4(f"{_prefix}_sentences", 0, _need_end, f"sentences in the lines that pass {_rules}")
    _of_c4(f"{_prefix}_lorem_ipsum_lines", 1, _need_end, f"lines with 'lorem ipsum' that pass {_rules}")
    _of_c4(f"{_prefix}_curly_bracket_lines", 2, _need_end, f"lines with '{{', before any with 'lorem ipsum', that pass {_rules}")


def inked_lines(text: str) -> list[str]:
    """Return the lines that are not blank."""
    return [line for line in text.split("\n") if line.strip()]


@signal(unit="lines", compiled="heuristics")
def lines(text: str) -> int:
    """Lines that are not blank."""
    return len(inked_lines(text))


@signal(unit="fraction of lines", compiled="heuristics")
def terminated_line_fraction(text: str) -> float:
    """Lines that end in a sentence terminator (FineWeb)."""
    return sum(has(line[-1], TERMINAL) for line in inked_lines(text)) / max(len(inked_lines(text)), 1)


@signal(unit="fraction of lines", optional=True, compiled="heuristics")
def short_line_fraction(text: str) -> float | None:
    """Lines of at most 30 characters (FineWeb); null for scripts without spaces, in which 30 characters are a sentence."""
    return None if is_unspaced(text) else sum(len(line) <= 30 for line in inked_lines(text)) / max(len(inked_lines(text)), 1)


@signal(unit="per word", compiled="heuristics")
def newline_ratio(text: str) -> float:
    """Newlines per word (FineWeb)."""
    return text.count("\n") / max(len(words_of(text)), 1)


@signal(unit="fraction of characters", compiled="heuristics")
def repeated_line_character_fraction(text: str) -> float:
    """Characters in non-blank lines seen earlier (FineWeb)."""
    return seen_before(inked_lines(text))[1] / max(len(text.replace("\n", "")), 1)


@signal(unit="fraction of characters", compiled="heuristics")
def misread_fraction(text: str) -> float:
    """Characters that are UTF-8 misread as cp1252, such as "Ã©" for "é"."""
    return sum(len(match) for match in MISREAD.findall(text)) / max(len(text), 1)


@signal(unit="characters", compiled="heuristics")
def characters(text: str) -> int:
    """Length of the text in characters."""
    return len(text)


@signal(unit="characters", compiled="heuristics")
def mean_line_length(text: str) -> float:
    """Mean length of a line."""
    pieces = text.split("\n")
    return sum(map(len, pieces)) / len(pieces)


@signal(unit="characters", compiled="heuristics")
def max_line_length(text: str) -> int:
    """Length of the longest line."""
    return max(map(len, text.split("\n")))


@signal(unit="fraction of characters", compiled="heuristics")
def alphanumeric_fraction(text: str) -> float:
    """Letters and digits among the characters."""
    return sum(c.isalnum() for c in text) / max(len(text), 1)


@signal(unit="lines", compiled="heuristics")
def code_lines(text: str) -> int:
    """Lines that look like code: ending in a brace, or at least two marks such as brackets and operators, one per 8 visible characters."""
    return sum(map(is_code, text.split("\n")))


def is_code(line: str) -> bool:
    """True if a line looks like code. Bullet items, calculations, lines over a third digits, and lines with neither letters nor only marks
    do not."""
    visible = [c for c in line if c not in " \t\r\v\f"]
    marks, digits = sum(c in MARKS for c in visible), sum(c in "0123456789" for c in visible)
    letters = any(c.isascii() and c.isalpha() for c in visible)
    if not visible or visible[0] == "•" or CALCULATION.search(line) or 3 * digits > len(visible) or not (letters or marks == len(visible)):
        return False
    return visible[-1] in ENDS or (marks - ("(" in visible and ")" in visible) >= 2 and 8 * marks >= len(visible))
