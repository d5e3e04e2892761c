"""Hints of personal data in texts, from one pass over the bytes. The search for a kind of data skips texts without the kind's hints."""

from __future__ import annotations

import functools
import re
from enum import IntFlag
from string import ascii_letters, digits, hexdigits
from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import code_point, code_points
from puna.kernels.text.street_hints import beside_a_street
from puna.kernels.text.strings import readonly

U8 = NDArray[np.uint8]


class Hint(IntFlag):
    """Signs of personal data in a text. A text without the signs of a kind of data has no data of this kind that `personal` would find."""

    AT = 1  # an @ between two words, a dot after the second word
    HIDDEN_AT = 2  # [at], (at), {at}
    STREET = 4  # a number beside a word of addresses
    NUMBERS = 8  # groups of digits with separators, at least seven characters from the first digit to the last
    IBAN = 16  # a country's two letters and two digits at the beginning of a word
    IPV4 = 32  # four groups of digits with single dots between
    IPV6 = 64  # a 2 or 3 and three hexadecimal digits, a colon, one to four hexadecimal digits, a colon
    TEN = 128  # at least ten digits in groups of digits with separators
    TWELVE = 256  # at least twelve digits, with at most a single space or dash between two
    SSN = 512  # groups of three, two and four digits, separated by dashes
    ABROAD = 1024  # a plus before a digit, or two zeros and another digit
    PHONE = 2048  # at least seven digits in a run of characters of phone numbers


AT, HIDDEN_AT, STREET, NUMBERS, IBAN, IPV4, IPV6, TEN, TWELVE, SSN, ABROAD, PHONE = (int(hint) for hint in Hint)
# Non-ASCII digits are rare, and these kinds of numbers may consist of them: a text with such a digit gets all these hints.
OTHER_DIGITS = STREET | NUMBERS | IPV4 | TEN | TWELVE | SSN | ABROAD | PHONE
IS_DIGIT, IS_BETWEEN, IS_IN_PHONES, IS_SIGN, IS_WIDE, IS_WORD, IS_HEX = 1, 2, 4, 8, 16, 32, 64
"""Roles of a byte: a digit; a separator of groups of digits; a non-digit in phone numbers; a sign to examine; the first byte of a non-ASCII
character that may be a digit; part of a word (any non-ASCII byte counts); a hexadecimal digit."""
FIRST_WIDE = 0xD9  # smallest first byte in UTF-8 of a non-ASCII digit: no such digit is before U+0640
CODES_OF_DIGITS = 0x20000
LONG = 6  # minimum distance in characters from the first digit of NUMBERS to the last
BETWEEN_PHONES = " .()/-"
IN_PHONES = "+ext"  # further characters of phone numbers: a plus, the letters of an extension
PHONE_DIGITS = 7  # minimum number of digits of a phone number
IN_PHONE, OF_PHONE = 1, 2  # a character of phone numbers; a digit
# ISO 13616
IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BR": 29, "BY": 28, "CH": 21,
    "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "DO": 28, "EE": 20, "EG": 29, "ES": 24, "FI": 18, "FO": 18, "FR": 27,
    "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26,
    "IT": 27, "JO": 30, "KW": 30, "KZ": 20, "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "LY": 25, "MC": 27,
    "MD": 24, "ME": 22, "MK": 19, "MR": 27, "MT": 31, "MU": 30, "NL": 18, "NO": 15, "PK": 24, "PL": 28, "PS": 29, "PT": 25,
    "QA": 29, "RO": 24, "RS": 22, "SA": 24, "SC": 31, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "ST": 25, "SV": 28, "TL": 23,
    "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20,
}  # fmt: skip
COUNTRIES = np.zeros((256, 256), np.bool_)
COUNTRIES[tuple(zip(*(name.encode() for name in IBAN_LENGTHS), strict=True))] = True


def hints(data: U8, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the `Hint`s of each text; text n is the UTF-8 in data[offsets[n]:offsets[n + 1]]."""
    result = np.zeros(len(offsets) - 1, np.int64)
    _hints(data, offsets, _roles(), _digits(), result)
    return result


def hints_of(text: str) -> int:
    data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    return int(hints(data, readonly(np.array([0, len(data)])))[0])


def phone_stretches(text: str) -> list[tuple[int, int]]:
    """Return start and stop of every maximal run of phone number characters with at least `PHONE_DIGITS` digits."""
    result: list[tuple[int, int]] = list(map(tuple, _stretches(code_points(text), _in_phones()).tolist()))
    return result


@functools.cache
def _in_phones() -> U8:
    """Return the bits IN_PHONE and OF_PHONE of each code point; the last entry stands for all code points beyond the table."""
    result = np.append(np.where(_digits(), np.uint8(IN_PHONE | OF_PHONE), np.uint8(0)), np.uint8(0))
    result[[ord(character) for character in BETWEEN_PHONES + IN_PHONES]] = IN_PHONE
    return result


@njit(cache=True)
def _stretches(codes: NDArray[np.uint32], kinds: NDArray[np.uint8]) -> NDArray[np.int64]:
    results, count = np.empty((len(codes) // PHONE_DIGITS + 1, 2), np.int64), 0
    start, digits = 0, 0
    for at in range(len(codes) + 1):
        kind = np.uint8(0) if at == len(codes) else kinds[min(codes[at], np.uint32(len(kinds) - 1))]
        if kind:
            digits += kind & OF_PHONE != 0
            continue
        if digits >= PHONE_DIGITS:
            results[count, 0], results[count, 1] = start, at
            count += 1
        start, digits = at + 1, 0
    return results[:count]


@functools.cache
def _digits() -> NDArray[np.bool_]:
    """Return a mask of the code points that are decimal digits (`\\d`); code points beyond the mask do not count as digits."""
    every = np.arange(CODES_OF_DIGITS, dtype=np.uint32).tobytes().decode("utf-32-le", "surrogatepass")
    result = np.zeros(CODES_OF_DIGITS, np.bool_)
    result[[match.start() for match in re.finditer(r"\d", every)]] = True
    return result


@functools.cache
def _roles() -> U8:
    result = np.zeros(256, np.uint8)
    for role, characters in (
        (IS_DIGIT, digits), (IS_BETWEEN, BETWEEN_PHONES), (IS_IN_PHONES, BETWEEN_PHONES + IN_PHONES), (IS_SIGN, "@:])}"),
        (IS_WORD, f"{ascii_letters}{digits}_"), (IS_HEX, hexdigits),
    ):  # fmt: skip
        result[[ord(character) for character in characters]] |= role
    result[0x80:] |= IS_WORD
    result[FIRST_WIDE:] |= IS_WIDE
    return result


@njit(cache=True, borrows=True)
def _hints(data: U8, offsets: NDArray[np.int64], roles: U8, wide: NDArray[np.bool_], out: NDArray[np.int64]) -> None:
    code: Any
    for d in range(len(out)):
        first, last = offsets[d], offsets[d + 1]
        # `ended`: end of the last number. Over this number and those joined to it: `begun`, the first digit; the counts of digits, of a
        # possible card's digits, of a possible phone number's digits, and of groups separated by dots.
        ended, begun, count, of_card, of_phone, groups = first - 1, first, 0, 0, 0, 0
        results, at = 0, first
        while at < last:
            role = roles[data[at]]
            if not role & (IS_DIGIT | IS_SIGN | IS_WIDE):
                at += 1
            elif role & IS_SIGN:
                results |= _of_sign(data, first, at, last, roles)
                at += 1
            elif role & IS_WIDE:
                code, size = code_point(data, np.uint64(at))
                results |= OTHER_DIGITS * (code < np.uint64(len(wide)) and wide[code])
                at += np.int64(size)
            else:
                start = at
                while at < last and roles[data[at]] & IS_DIGIT:
                    at += 1
                runs_on = ended >= first
                if not (runs_on and _all(data, ended, start, roles, IS_BETWEEN)):
                    begun, count = start, 0
                joined = runs_on and start == ended + 1 and (data[ended] == ord(" ") or data[ended] == ord("-"))
                of_card = (of_card if joined else 0) + at - start
                of_phone = (of_phone if runs_on and _all(data, ended, start, roles, IS_IN_PHONES) else 0) + at - start
                groups = groups + 1 if runs_on and start == ended + 1 and data[ended] == ord(".") else 1
                count += at - start
                ended = at
                results |= NUMBERS * (at - 1 - begun >= LONG) | TEN * (count >= 10) | TWELVE * (of_card >= 12)
                results |= PHONE * (of_phone >= PHONE_DIGITS) | IPV4 * (groups >= 4) | _of_number(data, first, start, at, roles)
                if not results & STREET and beside_a_street(data, first, start, at, last):
                    results |= STREET
        out[d] = results


@njit(cache=True, borrows=True)
def _all(data: U8, start: int, stop: int, roles: U8, role: int) -> bool:
    at = start
    while at < stop and roles[data[at]] & role:
        at += 1
    return at >= stop


@njit(cache=True, borrows=True)
def _of_number(data: U8, first: int, start: int, stop: int, roles: U8) -> int:
    """Return the hints that the digits data[start:stop] give together with the bytes before them."""
    result = 0
    if start > first and data[start - 1] == ord("+"):
        result |= ABROAD
    if stop - start > 2 and data[start] == data[start + 1] == ord("0") and data[start + 2] != ord("0"):
        result |= ABROAD
    if stop - start >= 2 and start - first >= 2 and COUNTRIES[data[start - 2] & 0xDF, data[start - 1] & 0xDF]:
        before = data[start - 3] if start - 2 > first else np.uint8(ord(" "))
        if before >= 0x80 or not (roles[before] & IS_WORD or before == ord("-")):
            result |= IBAN
    grouped = stop - start >= 4 and start - 7 >= first and data[start - 1] == data[start - 4] == ord("-")
    if grouped and _all(data, start - 3, start - 1, roles, IS_DIGIT) and _all(data, start - 7, start - 4, roles, IS_DIGIT):
        result |= SSN
    return result


@njit(cache=True, borrows=True)
def _of_sign(data: U8, first: int, at: int, last: int, roles: U8) -> int:
    if data[at] == ord("@"):
        before = data[at - 1] if at > first else np.uint8(ord(" "))
        if not (roles[before] & IS_WORD or before == ord(".") or before == ord("%") or before == ord("+") or before == ord("-")):
            return 0
        stop = at + 1
        while stop < last and (roles[data[stop]] & IS_WORD or data[stop] == ord("-")):
            stop += 1
        return AT * (stop > at + 1 and stop < last and data[stop] == ord("."))
    if data[at] == ord(":"):
        start = at
        while start > first and start > at - 4 and roles[data[start - 1]] & IS_HEX:
            start -= 1
        if start == at or start - 5 < first or data[start - 1] != ord(":") or data[start - 5] & 0xFE != ord("2"):
            return 0
        return IPV6 if _all(data, start - 4, start - 1, roles, IS_HEX) else 0
    opened = at - 3 >= first and (data[at - 3] == ord("[") or data[at - 3] == ord("(") or data[at - 3] == ord("{"))
    return HIDDEN_AT if opened and data[at - 2] | 32 == ord("a") and data[at - 1] | 32 == ord("t") else 0
