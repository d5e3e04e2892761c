"""Compiled measurement of Gopher's signals (Rae et al. 2021, arXiv 2112.11446, appendix A.1), as datatrove defines them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import ALPHANUMERIC, BREAK, SINGLE, SPACE
from puna.kernels.text.hash_table import ONE, clear_keys, clear_slots, mix, place, slot_of
from puna.kernels.text.words import BASE, DOT, HAS_LETTER, HYPHEN, IS_SYMBOL

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
HASH_SIGN, ELLIPSIS, BULLET, NEWLINE, RETURN = 0x23, 0x2026, 0x2022, 0x0A, 0x0D
GAP = np.uint64(0x20) + ONE  # the space between the words of an n-gram


@njit(cache=True, borrows=True)
def character_numbers(codes: U32, flags: U16) -> tuple[int, int, int, int, int]:
    """Return the number of `#`, of ellipses, of newlines, and of letters and digits; and the length of the longest line."""
    hashes, ellipses, newlines, alphanumeric, longest, start, dots, dot = 0, 0, 0, 0, 0, 0, 0, -2
    for at in range(len(codes)):
        code = codes[at]
        alphanumeric += flags[code] & ALPHANUMERIC != 0
        if code == NEWLINE or code == DOT or code == HASH_SIGN or code == ELLIPSIS:  # noqa: SIM109 - one branch, where `in` makes four
            if code == NEWLINE:
                newlines += 1
                longest = max(longest, at - start)
                start = at + 1
            elif code == DOT:
                dots = dots + 1 if dot == at - 1 else 1
                dot = at
                if dots == 3:
                    ellipses += 1
                    dots = 0
            elif code == HASH_SIGN:
                hashes += 1
            else:
                ellipses += 1
    return hashes, ellipses, newlines, alphanumeric, max(longest, len(codes) - start)


@njit(cache=True, borrows=True)
def word_numbers(codes: U32, flags: U16, start: I32, stop: I32, word_flags: U8) -> tuple[int, float, float]:
    """Return the number of non-symbol words, their mean length, and the share that have a letter (all 0 for a text without such words).

    The mean length is NaN if most words are in a script written without spaces, since bounds for English do not apply there."""
    count, characters, letters, single = 0, 0, 0, 0
    for word in range(len(start)):
        if word_flags[word] & IS_SYMBOL:
            continue
        count += 1
        characters += stop[word] - start[word]
        single += flags[codes[start[word]]] & SINGLE != 0
        letters += word_flags[word] & HAS_LETTER != 0
    mean = np.nan if 2 * single > count else characters / max(count, 1)
    return count, mean, letters / max(count, 1)


@njit(cache=True, borrows=True)
def line_numbers(codes: U32, flags: U16) -> tuple[float, float]:
    """Return the share of lines that start with a bullet, and of lines that end with an ellipsis; lines as in `str.splitlines`."""
    lines, bullets, ellipses = 0, 0, 0
    at, total = 0, len(codes)
    while at < total:
        end = at
        while end < total and not flags[codes[end]] & BREAK:
            end += 1
        lines += 1
        first, last = at, end
        while first < end and flags[codes[first]] & SPACE:
            first += 1
        while last > at and flags[codes[last - 1]] & SPACE:
            last -= 1
        if first < end and (codes[first] == BULLET or codes[first] == HYPHEN):
            bullets += 1
        if (last > at and codes[last - 1] == ELLIPSIS) or (
            last >= at + 3 and codes[last - 1] == DOT and codes[last - 2] == DOT and codes[last - 3] == DOT
        ):
            ellipses += 1
        at = end + 1
        if end + 1 < total and codes[end] == RETURN and codes[end + 1] == NEWLINE:
            at = end + 2
    return bullets / max(lines, 1), ellipses / max(lines, 1)


@njit(cache=True, borrows=True)
def duplicate_pieces(
    codes: U32, flags: U16, hashes: U64, power: U64, first: int, last: int, newlines: int, keys: U64
) -> tuple[int, int, int, int]:
    """Split codes[first:last] at runs of at least `newlines` newlines. Return the numbers of pieces, of repeated pieces, of characters in
    repeated pieces, and of characters in non-blank repeated pieces.

    `hashes`, `power`: see `words.prefix_hashes`; `keys`: an empty hash table, to which the hashes of the pieces are written."""
    pieces, duplicates, characters, inked = 0, 0, 0, 0
    start, at = first, first
    while at <= last:
        while at < last and codes[at] != NEWLINE:
            at += 1
        run = 0
        while at + run < last and codes[at + run] == NEWLINE:
            run += 1
        if at < last and run < newlines:
            at += run
            continue
        pieces += 1
        key = mix(hashes[at] - hashes[start] * power[at - start])
        where = place(keys, key)
        if keys[where] == key:
            duplicates += 1
            characters += at - start
            inked += at - start if strip(codes, flags, start, at)[0] < at else 0
        keys[where] = key
        if at == last:
            break
        at += run
        start = at
    return pieces, duplicates, characters, inked


@njit(cache=True, borrows=True)
def strip(codes: U32, flags: U16, first: int, last: int) -> tuple[int, int]:
    """Return the range first..last without the white space at its ends."""
    while first < last and flags[codes[first]] & SPACE:
        first += 1
    while last > first and flags[codes[last - 1]] & SPACE:
        last -= 1
    return first, last


@njit(cache=True, borrows=True)
def chain(hashes: U64, power: U64, start: I32, stop: I32, joined: U64, spaced: U64, length: I64) -> None:
    """Write the hashes and lengths of all prefixes of a text's words: `joined` without spaces, `spaced` with a space before each word.

    Each array has one element more than there are words. `gram_keys` computes the hash of an n-gram from two prefixes."""
    joined[0], spaced[0], length[0] = 0, 0, 0
    for word in range(len(start)):
        joined[word + 1] = joined[word] * power[word] + hashes[word]
        spaced[word + 1] = (spaced[word] * BASE + GAP) * power[word] + hashes[word]
        length[word + 1] = length[word] + stop[word] - start[word]


@njit(cache=True, borrows=True)
def gram_keys(chained: U64, length: I64, power: U64, n: int, spaces: int, keys: U64) -> int:
    """Write the hash of each n-gram to `keys`, and return the number of n-grams.

    `chained` (`joined` or `spaced`) and `length`: see `chain`; `spaces`: the number of spaces per n-gram in `chained`."""
    grams = max(len(chained) - n, 0)
    for i in range(grams):
        keys[i] = chained[i + n] - chained[i] * power[length[i + n] - length[i] + spaces]
    return grams


@njit(cache=True, borrows=True)
def _top_gram_characters(room: Any, spaced: U64, length: I64, n: int) -> int:
    """Return the length of the most frequent n-gram (the first among ties), including spaces, times its count; 0 if no n-gram repeats."""
    keys, slots, counts = room.keys, room.slots, room.counts
    grams = gram_keys(spaced, length, room.powers, n, n, keys)
    bits = clear_slots(slots, grams)
    best, best_first = min(grams, 1), 0
    for i in range(grams):
        where = slot_of(slots, bits, keys, keys[i])
        if slots[where] == 0:
            slots[where], counts[i] = i + 1, 1
            continue
        first = slots[where] - 1
        counts[first] += 1
        if counts[first] > best or (counts[first] == best and first < best_first):
            best, best_first = counts[first], first
    return int((length[best_first + n] - length[best_first] + n - 1) * best) if best > 1 else 0


@njit(cache=True, borrows=True)
def _duplicate_gram_characters(room: Any, joined: U64, length: I64, n: int) -> int:
    """Return the number of characters in n-grams seen earlier, counted without overlap."""
    keys, slots = room.keys, room.slots
    grams = gram_keys(joined, length, room.powers, n, 0, keys)
    bits = clear_slots(slots, grams)
    characters, i = 0, 0
    while i < grams:
        where = slot_of(slots, bits, keys, keys[i])
        if slots[where] != 0:
            characters += length[i + n] - length[i]
            i += n
        else:
            slots[where] = i + 1
            i += 1
    return int(characters)


@njit(cache=True, borrows=True)
def gram_repetition(room: Any, words: int, size: int, one: Any) -> None:
    """Write Gopher's n-gram repetition signals to the record of a document of `size` characters. `room`: see `measure.Space`."""
    chain(room.hash, room.power, room.start[:words], room.stop[:words], room.joined, room.spaced, room.length)
    joined, spaced, length = room.joined[: words + 1], room.spaced[: words + 1], room.length[: words + 1]
    one.top_2gram_character_fraction = _top_gram_characters(room, spaced, length, 2) / size
    one.top_3gram_character_fraction = _top_gram_characters(room, spaced, length, 3) / size
    one.top_4gram_character_fraction = _top_gram_characters(room, spaced, length, 4) / size
    one.duplicate_5gram_character_fraction = _duplicate_gram_characters(room, joined, length, 5) / size
    one.duplicate_6gram_character_fraction = _duplicate_gram_characters(room, joined, length, 6) / size
    one.duplicate_7gram_character_fraction = _duplicate_gram_characters(room, joined, length, 7) / size
    one.duplicate_8gram_character_fraction = _duplicate_gram_characters(room, joined, length, 8) / size
    one.duplicate_9gram_character_fraction = _duplicate_gram_characters(room, joined, length, 9) / size
    one.duplicate_10gram_character_fraction = _duplicate_gram_characters(room, joined, length, 10) / size


@njit(cache=True)
def line_repetition(codes: U32, flags: U16, room: Any, hashes: U64, newlines: int, one: Any) -> None:
    """Write Gopher's signals of repeated lines and paragraphs, and FineWeb's of repeated lines, to a document's record."""
    size = max(len(codes), 1)
    keys = clear_keys(room.keys, newlines + 1)
    pieces, repeated, characters, inked = duplicate_pieces(codes, flags, hashes, room.powers, 0, len(codes), 1, keys)
    one.duplicate_line_fraction, one.duplicate_line_character_fraction = repeated / pieces, characters / size
    one.repeated_line_character_fraction = inked / max(len(codes) - newlines, 1)
    first, last = strip(codes, flags, 0, len(codes))
    keys[:] = 0
    pieces, repeated, characters, _ = duplicate_pieces(codes, flags, hashes, room.powers, first, last, 2, keys)
    one.duplicate_paragraph_fraction, one.duplicate_paragraph_character_fraction = repeated / pieces, characters / size


# Characters that cp1252 decodes the bytes 0x80 to 0xBF to; the bytes that it leaves undefined are often read as control characters.
CONTINUATIONS = np.zeros(0x2123, np.bool_)
CONTINUATIONS[0x80:0xC0] = True
CONTINUATIONS[[ord(c) for c in bytes(range(0x80, 0xA0)).decode("cp1252", "ignore")]] = True


@njit(cache=True, borrows=True)
def misread_characters(codes: U32) -> int:
    """Return the number of characters in sequences that are one character's UTF-8 bytes misread as cp1252."""
    result, at, total = 0, 0, len(codes)
    while at < total:
        code = codes[at]
        if code < 0xC2 or code > 0xF4:
            at += 1
            continue
        size = 2 if code < 0xE0 else (3 if code < 0xF0 else 4)
        end = at + 1
        while end < total and end < at + size and codes[end] < len(CONTINUATIONS) and CONTINUATIONS[codes[end]]:
            end += 1
        if end == at + size:
            result += size
            at = end
        else:
            at += 1
    return result
