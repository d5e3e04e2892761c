"""A fast word splitter for any script, close to spaCy's blank English tokenizer.

A word is a run of letters, marks and digits. Inside a run without white space, ASCII symbols hold letters and digits together ("U.S.",
"3.14", "example.org", "foo_bar(x"), except where spaCy splits too: a full stop before a capital ("end.Next"), a comma or a hyphen between
letters, `: < > = /` before a letter, signs between digits. An apostrophe between letters starts a new word ("don't" is "don" and "'t").
Every other character that is not white space is a word by itself, except that a run of full stops or hyphens is one. In scripts without
spaces (Han, kana, Thai, …) words begin where `unspaced` says. Joiners belong to the word around them; zero width spaces and the mark
between Tibetan syllables separate words and belong to no word.

Quality signals, near-duplicates, repeated passages, contamination and seed words all split words with this module or with `unspaced`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import (
    ALPHABETIC,
    CASED,
    DECIMAL,
    JOINER,
    SEPARATOR,
    SINGLE,
    SPACE,
    SYMBOL,
    UPPER,
    WORD,
    code_points,
    cut,
    decode,
    encode,
    lower_codes,
    tables,
)
from puna.kernels.text.hash_table import ONE, mix
from puna.kernels.text.strings import buffers, strings
from puna.kernels.text.unspaced import ROOM, begins_word, weights

BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing
DOT, HYPHEN, COMMA, APOSTROPHE, QUOTE, DOUBLE_QUOTE, ZERO, BLANK = 0x2E, 0x2D, 0x2C, 0x27, 0x2019, 0x22, 0x30, 0x20
TILDE, COLON, LESS, EQUALS, GREATER, SLASH, PLUS, STAR, CARET = 0x7E, 0x3A, 0x3C, 0x3D, 0x3E, 0x2F, 0x2B, 0x2A, 0x5E

IS_SYMBOL = 1  # every character is punctuation, a symbol or a control character
HAS_LETTER = 2  # some character is a letter


class Words(NamedTuple):
    """The words of one text, in order; all arrays have one element per word.

    `start`, `stop` int32: range of characters. `hash` uint64: polynomial hash of the characters, so that the
    hash of a concatenation is `hash_a * power_b + hash_b`. `power` uint64: BASE ** length. `folded` uint64:
    mixed hash of the lower-case word with one zero for each run of digits. `flags` uint8: IS_SYMBOL, HAS_LETTER."""

    start: NDArray[np.int32]
    stop: NDArray[np.int32]
    hash: NDArray[np.uint64]
    power: NDArray[np.uint64]
    folded: NDArray[np.uint64]
    flags: NDArray[np.uint8]


@njit(cache=True)
def prefix_hashes(codes: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Return the polynomial hashes of all prefixes, uint64[n + 1]; the hash of codes[a:b] is `out[b] - out[a] * BASE ** (b - a)`."""
    out = np.empty(len(codes) + 1, np.uint64)
    value = np.uint64(0)
    for at in range(len(codes)):
        out[at] = value
        value = value * BASE + np.uint64(codes[at]) + ONE
    out[len(codes)] = value
    return out


@njit(cache=True)
def powers(count: int) -> NDArray[np.uint64]:
    """Return BASE ** 0 .. BASE ** count modulo 2^64, uint64[count + 1]."""
    out = np.empty(count + 1, np.uint64)
    value = ONE
    for n in range(count + 1):
        out[n] = value
        value = value * BASE
    return out


@njit(cache=True, borrows=True)
def _joins(codes: NDArray[np.uint32], flags: NDArray[np.uint16], at: int, stop: int) -> bool:
    """True if the character at `at`, inside a run without white space, is an ASCII symbol that joins both neighbours into one word."""
    code = codes[at]
    before = flags[codes[at - 1]]
    after = flags[codes[at + 1]] if at + 1 < stop else 0
    next_code = codes[at + 1] if at + 1 < stop else 0
    letters = before & ALPHABETIC and after & ALPHABETIC
    if code >= 0x80 or flags[code] & SPACE:
        return False
    if code == DOT:
        if next_code == DOT or codes[at - 1] == DOT:
            return False
        # "end.Next" is two sentences, "example.org" and "U.S.A" are one word.
        capital = after & UPPER or next_code in (APOSTROPHE, DOUBLE_QUOTE)
        return not (capital and before & ALPHABETIC and not before & UPPER)
    if code == COMMA:
        return not letters
    if code in (HYPHEN, TILDE):
        digits = before & DECIMAL and after & DECIMAL
        return not (letters or digits or next_code == HYPHEN or codes[at - 1] == HYPHEN)
    if code == APOSTROPHE:
        return not (before & WORD and after & WORD)
    if code in (COLON, LESS, EQUALS, GREATER, SLASH):
        return not (before & WORD and after & ALPHABETIC)
    if code in (PLUS, STAR, CARET):
        return not (before & DECIMAL and (after & DECIMAL or next_code == HYPHEN))
    return True


@njit(cache=True, borrows=True)
def _word_end(codes: NDArray[np.uint32], flags: NDArray[np.uint16], start: int, stop: int) -> int:
    """Return the end of the word of letters and digits that begins at `start`."""
    at = start + 1
    while at < stop:
        here = flags[codes[at]]
        if here & (WORD | JOINER):
            if here & SINGLE:
                break
            at += 1
            continue
        if here & SPACE:
            break
        ahead = at
        while ahead < stop and not flags[codes[ahead]] & WORD and _joins(codes, flags, ahead, stop):
            ahead += 1
        if ahead > at and ahead < stop and flags[codes[ahead]] & WORD and not flags[codes[ahead]] & SINGLE:
            at = ahead
            continue
        single_capital = flags[codes[at - 1]] & UPPER and (at < start + 2 or not flags[codes[at - 2]] & UPPER)
        if codes[at] == DOT and single_capital and not (at + 1 < stop and codes[at + 1] == DOT):
            return at + 1  # an initial keeps its full stop: "J. Smith", "U.S."
        break
    return at


@njit(cache=True)
def split_ranges(
    codes: NDArray[np.uint32], flags: NDArray[np.uint16], breaks: NDArray[np.int8], start_of: NDArray[np.int32], stop_of: NDArray[np.int32]
) -> int:
    """Write the words' starts and ends to `start_of` and `stop_of`; return the number of words. `breaks`: `unspaced.weights()`."""
    count, at, stop = 0, 0, len(codes)
    room = np.empty(ROOM, np.int64)
    while at < stop:
        code = codes[at]
        here = flags[code]
        if here & (SPACE | SEPARATOR | JOINER):
            at += 1
            continue
        start = at
        if here & SINGLE:
            at += 1
            # Combining marks stay with their letter.
            while (
                at < stop
                and flags[codes[at]] & (WORD | JOINER)
                and not (
                    begins_word(codes, flags, breaks, at, room) if flags[codes[at]] & SINGLE else flags[codes[at]] & (ALPHABETIC | DECIMAL)
                )
            ):
                at += 1
        elif here & WORD:
            at = _word_end(codes, flags, at, stop)
        elif (
            (code in (APOSTROPHE, QUOTE))
            and at > 0
            and flags[codes[at - 1]] & WORD
            and at + 1 < stop
            and flags[codes[at + 1]] & WORD
            and not flags[codes[at + 1]] & SINGLE
        ):
            at = _word_end(codes, flags, at + 1, stop)
        elif code in (DOT, HYPHEN):
            while at < stop and codes[at] == code:
                at += 1
        else:
            at += 1
        start_of[count] = start
        stop_of[count] = at
        count += 1
    return count


@njit(cache=True, borrows=True)
def folded_hash(codes: NDArray[np.uint32], flags: NDArray[np.uint16], lower: NDArray[np.uint32], first: int, last: int) -> np.uint64:
    """Return `Words.folded` of the word codes[first:last]."""
    value, digit = np.uint64(0), False
    for at in range(first, last):
        code = codes[at]
        if flags[code] & DECIMAL:
            if not digit:
                value = value * BASE + np.uint64(ZERO) + ONE
            digit = True
        else:
            value = value * BASE + np.uint64(lower[code]) + ONE
            digit = False
    return np.uint64(mix(value))


@njit(cache=True, borrows=True)
def describe(
    codes: NDArray[np.uint32], flags: NDArray[np.uint16], lower: NDArray[np.uint32], hashes: NDArray[np.uint64], power: NDArray[np.uint64],
    start_of: NDArray[np.int32], stop_of: NDArray[np.int32], out_hash: NDArray[np.uint64], out_power: NDArray[np.uint64],
    out_folded: NDArray[np.uint64], out_flags: NDArray[np.uint8],
) -> None:  # fmt: skip
    """Fill `hash`, `power`, `folded` and `flags` (see `Words`) of words from their ranges, `prefix_hashes` and `powers`."""
    for word in range(len(start_of)):
        first, last = start_of[word], stop_of[word]
        every, some = 0xFFFF, 0
        for at in range(first, last):
            here = flags[codes[at]]
            every &= here
            some |= here
        value = hashes[last] - hashes[first] * power[last - first]
        folded = folded_hash(codes, flags, lower, first, last) if some & (CASED | DECIMAL) else mix(value)
        out_hash[word] = value
        out_power[word] = power[last - first]
        out_folded[word] = folded
        out_flags[word] = (IS_SYMBOL if every & SYMBOL else 0) | (HAS_LETTER if some & ALPHABETIC else 0)


def split_codes(codes: NDArray[np.uint32]) -> Words:
    """Return the words of a text given as code points."""
    flags, lower = tables()
    start, stop = np.empty(len(codes), np.int32), np.empty(len(codes), np.int32)
    count = split_ranges(codes, flags, weights(), start, stop)
    # Copies, so that the long buffers are freed.
    words = Words(
        start[:count].copy(), stop[:count].copy(), np.empty(count, np.uint64), np.empty(count, np.uint64), np.empty(count, np.uint64),
        np.empty(count, np.uint8),
    )  # fmt: skip
    longest = int((words.stop - words.start).max(initial=0))
    describe(codes, flags, lower, prefix_hashes(codes), powers(longest), *words)
    return words


def join_words(texts: pa.Array | pa.ChunkedArray, characters: int) -> pa.Array:
    """Return, per text, the words of its first `characters` characters in lower case, joined by spaces."""
    data, offsets = buffers(texts)
    out, bounds, alone = _join_words(data, offsets, characters, *tables(), weights())
    lines = strings(out, bounds)
    if alone.all():
        return lines
    others = pa.array(~alone)
    lower = [text[:characters].lower() for text in texts.filter(others).to_pylist()]
    return pc.replace_with_mask(lines, others, join_words(pa.array(lower, pa.string()), max(map(len, lower))))


@njit(cache=True)
def _join_words(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], characters: int, flags: NDArray[np.uint16], lower: NDArray[np.uint32],
    breaks: NDArray[np.int8],
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:  # fmt: skip
    """Return the texts' words as UTF-8 joined by spaces, the texts' offsets, and a mask of texts for which `lower_codes` returned True."""
    texts = len(offsets) - 1
    longest = size = 0
    for n in range(texts):
        here = offsets[n + 1] - offsets[n]
        # Lower case has at most 1.5 times as many bytes (U+023A: three instead of two).
        longest, size = max(longest, min(here, characters)), size + min(4 * characters, here + here // 2) + min(here, characters)
    codes, start, stop = np.empty(longest, np.uint32), np.empty(longest, np.int32), np.empty(longest, np.int32)
    out, bounds, alone = np.empty(size, np.uint8), np.zeros(texts + 1, np.int64), np.empty(texts, np.bool_)
    for n in range(texts):
        many = decode(data, offsets[n], cut(data, offsets[n], offsets[n + 1], characters), codes)
        alone[n] = lower_codes(codes[:many], lower)
        at = bounds[n]
        for word in range(split_ranges(codes[:many], flags, breaks, start, stop)):
            if word:
                out[at] = BLANK
                at += 1
            at = encode(codes[start[word] : stop[word]], out, at)
        bounds[n + 1] = at
    return out[: bounds[texts]], bounds, alone


def split(text: str) -> list[str]:
    words = split_codes(code_points(text))
    return [text[a:b] for a, b in zip(words.start.tolist(), words.stop.tolist(), strict=True)]


def words_listed(vocabulary: list[str]) -> Words:
    """Return the words of a vocabulary, one per entry; raise ValueError if an entry is not exactly one word."""
    words = split_codes(code_points("\n".join(vocabulary)))
    ends = np.cumsum([len(entry) + 1 for entry in vocabulary], dtype=np.int64)
    counts = np.bincount(np.searchsorted(ends, words.start, side="right"), minlength=len(vocabulary))
    if (wrong := np.flatnonzero(counts != 1)).size:
        raise ValueError(f"{vocabulary[wrong[0]]!r} is {counts[wrong[0]]} words; a word list has one word per entry")
    return words
