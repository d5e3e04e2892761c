"""What a text may have of personal data, and where its long numbers are, each from one pass over its characters: a search that cannot
find anything is spared."""

from __future__ import annotations

import functools
from enum import IntFlag
from string import ascii_letters, digits

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit
from puna.stages.curate.text.characters import code_points


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
IN_PHONES = "+ext"  # what a phone number may have besides digits and what stands between them: a plus, the words of its extension
PHONE_DIGITS = 7  # of a phone number, at least
IN_PHONE, OF_PHONE = 1, 2  # a character of phone numbers; a digit of them


def hints(text: str) -> Hint:
    """What the text may have."""
    return Hint(int(_hints(np.frombuffer(text.encode("utf-16-le", "surrogatepass"), np.uint16), _roles())))


def phone_stretches(text: str) -> list[tuple[int, int]]:
    """Start and stop of each stretch of the characters of phone numbers, as long as it can be, that has the digits of one."""
    found: list[tuple[int, int]] = list(map(tuple, _stretches(code_points(text), _in_phones()).tolist()))
    return found


@functools.cache
def _in_phones() -> NDArray[np.uint8]:
    """Whether a code point of two bytes is in phone numbers, and whether it is a digit; at the end of all others, some of which are."""
    roles = np.append(_roles(), np.uint8(IS_DIGIT))
    found = np.where(roles & IS_DIGIT, IN_PHONE | OF_PHONE, np.where(roles & IS_BETWEEN, IN_PHONE, 0)).astype(np.uint8)
    found[[ord(character) for character in IN_PHONES]] = IN_PHONE
    return found


@njit(cache=True)
def _stretches(codes: NDArray[np.uint32], kinds: NDArray[np.uint8]) -> NDArray[np.int64]:
    found, count = np.empty((len(codes) // PHONE_DIGITS + 1, 2), np.int64), 0
    start, digits = 0, 0
    for at in range(len(codes) + 1):
        kind = np.uint8(0) if at == len(codes) else kinds[min(codes[at], np.uint32(len(kinds) - 1))]
        if kind:
            digits += kind & OF_PHONE != 0
            continue
        if digits >= PHONE_DIGITS:
            found[count, 0], found[count, 1] = start, at
            count += 1
        start, digits = at + 1, 0
    return found[:count]


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
