"""What a text may have of personal data, from one pass over its characters: a search that cannot find anything is spared."""

from __future__ import annotations

import functools
from enum import IntFlag
from string import ascii_letters, digits

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit


class Hint(IntFlag):
    """What was seen; a text without it has nothing of the kind."""

    AT = 1  # an @
    HIDDEN_AT = 2  # [at], (at), {at}
    DIGIT = 4
    NUMBERS = 8  # seven characters of digits and what stands between groups of them
    IBAN = 16  # two letters and two digits at the beginning of a word
    IPV4 = 32  # four groups of digits with a dot between
    IPV6 = 64  # a colon after four characters, of which the first is 2 or 3
    TEN = 128  # ten digits in such numbers
    TWELVE = 256  # twelve
    SSN = 512  # two dashes three characters apart, digits around
    ABROAD = 1024  # a plus before a digit, or two zeros


AT, HIDDEN_AT, DIGIT, NUMBERS, IBAN, IPV4, IPV6, TEN, TWELVE, SSN, ABROAD = (int(hint) for hint in Hint)
# IS_WORD: letters, digits and what else stands in a word, of ASCII. IS_SIGN: what is looked for itself
IS_DIGIT, IS_BETWEEN, IS_LETTER, IS_WORD, IS_SIGN = 1, 2, 4, 8, 16
LONG = 6  # characters between the first and the last digit of NUMBERS


def hints(text: str) -> Hint:
    """What the text may have."""
    return Hint(int(_hints(np.frombuffer(text.encode("utf-16-le", "surrogatepass"), np.uint16), _roles())))


@functools.cache
def _roles() -> NDArray[np.uint8]:
    """What each UTF-16 unit may be; half of a character of two units may be a digit."""
    found = np.zeros(1 << 16, np.uint8)
    found[[code for code in range(1 << 16) if chr(code).isdecimal()]] = IS_DIGIT
    found[0xD800:0xE000] = IS_DIGIT
    words = f"{ascii_letters}{digits}_-"
    for role, characters in ((IS_BETWEEN, " .()/-"), (IS_LETTER, ascii_letters), (IS_WORD, words), (IS_SIGN, "@:-])}")):
        found[[ord(character) for character in characters]] |= role
    return found


@njit(cache=True)
def _hints(units: NDArray[np.uint16], roles: NDArray[np.uint8]) -> int:
    found = 0
    first, count, groups = -1, 0, 0  # of the numbers that are read: the first digit, how many, how many groups with dots
    for i in range(len(units)):
        unit = units[i]
        role = roles[unit]
        if not role & (IS_DIGIT | IS_BETWEEN | IS_SIGN):
            first = -1
            continue
        before = roles[units[i - 1]] if i > 0 else np.uint8(0)
        if role & IS_DIGIT:
            found |= DIGIT
            if first < 0:
                first, count = i, 0
            count += 1
            if i - first >= LONG:
                found |= NUMBERS
            if count >= 10:
                found |= TEN
                if count >= 12:
                    found |= TWELVE
            if before & IS_DIGIT:
                two = i > 2 and roles[units[i - 2]] & IS_LETTER and roles[units[i - 3]] & IS_LETTER
                if two and (i == 3 or not roles[units[i - 4]] & IS_WORD):
                    found |= IBAN
                if unit == 48 and units[i - 1] == 48:
                    found |= ABROAD
            else:
                groups = groups + 1 if i > 1 and units[i - 1] == 46 and roles[units[i - 2]] & IS_DIGIT else 1
                if groups >= 4:
                    found |= IPV4
                if i > 0 and units[i - 1] == 43:
                    found |= ABROAD
            continue
        if not role & IS_BETWEEN:
            first = -1
        if unit == 64:
            found |= AT
        elif unit == 58:
            found |= IPV6 * (i > 3 and (units[i - 4] == 50 or units[i - 4] == 51))
        elif unit == 45:
            if i > 2 and units[i - 3] == 45 and before & IS_DIGIT and roles[units[i - 2]] & IS_DIGIT:
                found |= SSN
        elif i > 2 and units[i - 1] | 32 == 116 and units[i - 2] | 32 == 97:  # a bracket, then: `at` before it?
            found |= HIDDEN_AT * (units[i - 3] == 91 or units[i - 3] == 40 or units[i - 3] == 123)
    return found
