"""Identification of a text's main script, the one with most letters, by its ISO 15924 code."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import ALPHABETIC, ALPHANUMERIC, POINTS, WORD, code_points, tables

# Unicode's script names → ISO 15924 codes. `script_shares` counts Han with some kana as Japanese.
SCRIPTS = {
    "Latin": "Latn", "Cyrillic": "Cyrl", "Arabic": "Arab", "Greek": "Grek", "Hebrew": "Hebr", "Armenian": "Armn", "Georgian": "Geor",
    "Devanagari": "Deva", "Bengali": "Beng", "Gurmukhi": "Guru", "Gujarati": "Gujr", "Oriya": "Orya", "Tamil": "Taml", "Telugu": "Telu",
    "Kannada": "Knda", "Malayalam": "Mlym", "Sinhala": "Sinh", "Thaana": "Thaa", "Thai": "Thai", "Lao": "Laoo", "Khmer": "Khmr",
    "Myanmar": "Mymr", "Tibetan": "Tibt", "Mongolian": "Mong", "Ethiopic": "Ethi", "Tifinagh": "Tfng", "Nko": "Nkoo", "Vai": "Vaii",
    "Adlam": "Adlm", "Cherokee": "Cher", "Canadian_Aboriginal": "Cans", "Syriac": "Syrc", "Javanese": "Java", "Balinese": "Bali",
    "Sundanese": "Sund", "Tai_Tham": "Lana", "New_Tai_Lue": "Talu", "Tai_Le": "Tale", "Tai_Viet": "Tavt", "Cham": "Cham",
    "Meetei_Mayek": "Mtei", "Ol_Chiki": "Olck", "Limbu": "Limb", "Lepcha": "Lepc", "Chakma": "Cakm", "Grantha": "Gran", "Yi": "Yiii",
    "Coptic": "Copt", "Gothic": "Goth", "Tagalog": "Tglg", "Mro": "Mroo", "Lisu": "Lisu", "Samaritan": "Samr", "Osage": "Osge",
    "Hangul": "Hang", "Han": "Hani", "Hiragana": "Jpan", "Katakana": "Jpan", "Bopomofo": "Hani",
}  # fmt: skip
CODES = ("", *dict.fromkeys(SCRIPTS.values()))  # codes by number; 0: characters of no listed script
HANI, JPAN, MYMR, ARAB = (CODES.index(code) for code in ("Hani", "Jpan", "Mymr", "Arab"))
MIN_KANA = 0.1
ZAWGYI = "Qaag"  # CLDR's code for Burmese in the Zawgyi encoding, which gives other meanings to Unicode's Burmese code points

# Code points of the Burmese block that distinguish the two encodings.
SHAN_FIRST, SHAN_LAST = 0x1075, 0x1081
SIGN_E, ASAT, VIRAMA, FIRST_CONSONANT, LAST_CONSONANT = 0x1031, 0x103A, 0x1039, 0x1000, 0x102A


@lru_cache(maxsize=1)
def script_numbers() -> NDArray[np.uint8]:
    """Return the index in `CODES` of every code point's script, uint8[0x110000]."""
    import regex

    points = np.flatnonzero(tables().flags & WORD)
    letters = "".join(map(chr, points.tolist()))
    result = np.zeros(POINTS, np.uint8)
    for name, code in SCRIPTS.items():
        for match in regex.finditer(rf"\p{{Script={name}}}+", letters):
            result[points[match.start() : match.end()]] = CODES.index(code)
    return result


@njit(cache=True)
def is_letter(flags: int) -> bool:
    """True if a character is a letter or a mark, by its flags."""
    return bool(flags & WORD and (flags & ALPHABETIC or not flags & ALPHANUMERIC))


@njit(cache=True, borrows=True)
def _count_scripts(
    codes: NDArray[np.uint32], bounds: NDArray[np.int64], flags: NDArray[np.uint16], numbers: NDArray[np.uint8], counts: NDArray[np.int64]
) -> None:
    for d in range(len(counts)):
        for at in range(bounds[d], bounds[d + 1]):
            if is_letter(flags[codes[at]]):
                counts[d, numbers[codes[at]]] += 1


@njit(cache=True)
def zawgyi_signs(codes: NDArray[np.uint32]) -> tuple[int, int]:
    """Return the counts of Burmese signs that only Zawgyi text has, and that only Unicode text has.

    In Zawgyi the vowel E stands before its consonant, in visual order, U+1039 kills a vowel, and U+103A is a medial. In Unicode, E follows
    a consonant or a medial, U+1039 stacks two consonants, and U+103A kills a vowel."""
    zawgyi, plain = 0, 0
    for at in range(len(codes)):
        code = codes[at]
        before = codes[at - 1] if at else np.uint32(0)
        after = codes[at + 1] if at + 1 < len(codes) else np.uint32(0)
        of_consonant = FIRST_CONSONANT <= before <= LAST_CONSONANT
        if code == SIGN_E and SHAN_FIRST <= before <= SHAN_LAST:
            plain += 1
        elif code == SIGN_E:
            # After U+1039 to U+103E (virama, asat, medials) the vowel proves neither encoding.
            if of_consonant and not FIRST_CONSONANT <= after <= LAST_CONSONANT:
                plain += 1
            elif not of_consonant and not 0x1039 <= before <= 0x103E:
                zawgyi += 1
        elif code == VIRAMA:
            if FIRST_CONSONANT <= after <= LAST_CONSONANT and of_consonant:
                plain += 1
            else:
                zawgyi += 1
        elif 0x1060 <= code <= 0x1081 and of_consonant:
            # Zawgyi's stacked consonants; in Unicode, letters of Shan, Mon and Karen, which do not follow a consonant.
            zawgyi += 1
        elif code == ASAT and of_consonant:
            plain += 1
    return zawgyi, plain


def script_of(codes: NDArray[np.uint32]) -> str:
    """Return the script of a text given as code points; the empty string if it has no letters of a known script."""
    return CODES[script_shares(codes, np.array([0, len(codes)]))[0][0]]


def script_shares(codes: NDArray[np.uint32], bounds: NDArray[np.int64]) -> tuple[list[int], list[float]]:
    """Return each text's main script (index into `CODES`) and its share of letters and marks. Text n: codes[bounds[n]:bounds[n + 1]]."""
    counts = np.zeros((len(bounds) - 1, 64), np.int64)
    _count_scripts(codes, bounds, tables().flags, script_numbers(), counts)
    total = counts.sum(axis=1)
    counts[:, 0] = 0
    together = counts[:, HANI] + counts[:, JPAN]
    japanese = (together > 0) & (counts[:, JPAN] >= MIN_KANA * together)
    counts[japanese, JPAN], counts[japanese, HANI] = together[japanese], 0
    return counts.argmax(axis=1).tolist(), (counts.max(axis=1) / np.maximum(total, 1)).tolist()


def is_zawgyi(codes: NDArray[np.uint32]) -> bool:
    """True if a text in Burmese letters is in the Zawgyi encoding."""
    zawgyi, plain = zawgyi_signs(codes)
    return bool(zawgyi > plain)


def script(text: str) -> str:
    """Return the ISO 15924 code of a text's script, `Qaag` for Zawgyi; the empty string if no letter is of a known script."""
    codes = code_points(text)
    results = script_of(codes)
    return ZAWGYI if results == CODES[MYMR] and is_zawgyi(codes) else results
