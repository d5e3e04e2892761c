"""Every heuristic number of many documents, in one compiled pass with one splitting into words."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.kernels.compiled import njit
from puna.stages.curate.signals import dolma
from puna.stages.curate.signals.divergence import BINS_BITS
from puna.stages.curate.signals.gopher import (
    DUPLICATE_N,
    TOP_N,
    chain,
    character_numbers,
    duplicate_gram_characters,
    duplicate_pieces,
    line_numbers,
    stripped,
    top_gram_characters,
    word_numbers,
)
from puna.stages.curate.signals.line_rules import c4_numbers, fineweb_numbers, ngram_coverage
from puna.stages.curate.text.characters import decode, tables
from puna.stages.curate.text.english_tables import EnglishTables, bare_tables, datatrove_flags
from puna.stages.curate.text.english_words import english_tables, split_english
from puna.stages.curate.text.hash_table import cleared, contains, mix, place, size_for, table_of
from puna.stages.curate.text.words import IS_SYMBOL, describe, exact_hashes, folded_hashes, powers, prefix_hashes, split_ranges

DATA = Path(__file__).parents[1] / "data"
Splitter = Literal["universal", "datatrove", "dolma"]

QUALITY = (
    "words", "mean_word_length", "alphabetic_word_fraction", "hash_ratio", "ellipsis_ratio", "bullet_line_fraction",
    "ellipsis_line_fraction", "english_stop_words", "stop_words",
)  # fmt: skip
REPETITION = (
    "duplicate_line_fraction", "duplicate_line_character_fraction", "duplicate_paragraph_fraction",
    "duplicate_paragraph_character_fraction", *(f"top_{n}gram_character_fraction" for n in TOP_N),
    *(f"duplicate_{n}gram_character_fraction" for n in DUPLICATE_N),
)  # fmt: skip
C4 = (
    "c4_sentences", "c4_lorem_ipsum_lines", "c4_curly_bracket_lines",
    "c4_open_sentences", "c4_open_lorem_ipsum_lines", "c4_open_curly_bracket_lines",
)  # fmt: skip
FINEWEB = ("lines", "terminated_line_fraction", "short_line_fraction", "newline_ratio", "repeated_line_character_fraction")
OTHER = (
    "characters", "mean_line_length", "max_line_length", "alphanumeric_fraction", "ngram_coverage", "dirty_words",
    "dirty_word_ratio",
)  # fmt: skip
NAMES = (*QUALITY, *REPETITION, *C4, *FINEWEB, *OTHER)
# Measured with the splitter dolma alone.
DOLMA = (
    "median_word_length", "symbol_word_fraction", "english_stop_word_occurrences", "unpunctuated_lines", "few_word_lines",
    "curly_bracket_lines", "lorem_ipsum_lines", "javascript_lines",
)  # fmt: skip
AT_REPETITION = len(QUALITY)
AT_C4 = AT_REPETITION + len(REPETITION)
AT_FINEWEB = AT_C4 + len(C4)
AT_OTHER = AT_FINEWEB + len(FINEWEB)
AT_DOLMA = len(NAMES)
AT_TOP, AT_DUPLICATE = AT_REPETITION + 4, AT_REPETITION + 4 + len(TOP_N)


def names(splitter: Splitter) -> tuple[str, ...]:
    """The signals that are measured with a splitter."""
    return (*NAMES, *DOLMA) if splitter == "dolma" else NAMES


class Vocabulary(NamedTuple):
    """What texts are measured with, besides the words' splitter.

    `flags`, `lower`: see `characters.Tables`. `stop_keys`: a table of stop words' hashes; `stop_languages` uint64 at the
    same places: bit i is set when the word is language i's (0: English). `dirty`: a table of folded hashes.
    """

    flags: NDArray[np.uint16]
    lower: NDArray[np.uint32]
    english: EnglishTables
    stop_keys: NDArray[np.uint64]
    stop_languages: NDArray[np.uint64]
    dirty: NDArray[np.uint64]


@lru_cache(maxsize=3)
def vocabulary(splitter: Splitter) -> Vocabulary:
    """The tables for a splitter."""
    lines = [line.split() for line in _lines("stop_words.txt")]
    bits: dict[int, int] = {}
    for language, (_, *words) in enumerate(lines):
        for value in exact_hashes(words).tolist():
            bits[value] = bits.get(value, 0) | 1 << language
    stop_keys = table_of(bits)
    stop_languages = np.zeros(len(stop_keys), np.uint64)
    for value, languages in bits.items():
        stop_languages[place(stop_keys, np.uint64(mix(np.uint64(value))))] = languages
    dirty = table_of(folded_hashes([word for line in _lines("dirty_words.txt") for word in line.split()]).tolist())
    flags, lower = tables()
    if splitter == "datatrove":
        return Vocabulary(datatrove_flags(), lower, english_tables(), stop_keys, stop_languages, dirty)
    return Vocabulary(flags, lower, bare_tables(), stop_keys, stop_languages, dirty)


def _lines(name: str) -> list[str]:
    text = (DATA / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


class Space(NamedTuple):
    """Room for one document at a time, so that nothing is allocated per document."""

    codes: NDArray[np.uint32]
    line: NDArray[np.uint32]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]
    hash: NDArray[np.uint64]
    power: NDArray[np.uint64]
    folded: NDArray[np.uint64]
    flags: NDArray[np.uint8]
    joined: NDArray[np.uint64]
    spaced: NDArray[np.uint64]
    length: NDArray[np.int64]
    keys: NDArray[np.uint64]
    counts: NDArray[np.int32]
    firsts: NDArray[np.int32]
    powers: NDArray[np.uint64]


def _space(characters: int) -> Space:
    """Room for documents of at most `characters` characters."""
    size = characters + 2
    table = size_for(size)
    kinds = dict.fromkeys(Space._fields, np.uint64) | {
        "codes": np.uint32, "line": np.uint32, "start": np.int32, "stop": np.int32, "flags": np.uint8, "length": np.int64,
        "counts": np.int32, "firsts": np.int32,
    }  # fmt: skip
    sizes = dict.fromkeys(Space._fields, size) | dict.fromkeys(("keys", "counts", "firsts"), table)
    made = {name: np.empty(sizes[name], kinds[name]) for name in Space._fields}
    # An n-gram with its spaces can be longer than the text.
    return Space(**(made | {"powers": powers(2 * size)}))


class Measurements(NamedTuple):
    """Of D documents. `values` float64[D, len(names(splitter))], NaN where not measured.

    Document d's words for the divergence: `bins` and `counts` uint32 in bin_offsets[d : d + 2]. Its lines that are
    covered enough: `line` (number), `line_words`, `line_covered` int32 in line_offsets[d : d + 2].
    """

    values: NDArray[np.float64]
    bin_offsets: NDArray[np.int64]
    bins: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    line_offsets: NDArray[np.int64]
    line: NDArray[np.int32]
    line_words: NDArray[np.int32]
    line_covered: NDArray[np.int32]


def measure(texts: pa.Array | pa.ChunkedArray, splitter: Splitter, coverage_n: int, line_coverage: float) -> Measurements:
    """All numbers of the documents but the divergence, which needs the whole corpus.

    Lines are reported where at least the share `line_coverage` of their words lies in n-grams of `coverage_n` words
    seen earlier.
    """
    data, offsets = buffers(texts)
    longest = int(np.diff(offsets).max(initial=0))
    values = np.full((len(offsets) - 1, len(names(splitter))), np.nan)
    universal, as_dolma = splitter != "datatrove", splitter == "dolma"
    found = _measure(data, offsets, vocabulary(splitter), _space(longest), values, universal, as_dolma, coverage_n, line_coverage)
    return Measurements(values, *found)


def buffers(texts: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The UTF-8 bytes of strings, and where each begins and the last ends, without copying where Arrow allows."""
    array = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    if isinstance(array, pa.ChunkedArray):  # no chunk at all
        array = pa.array([], pa.large_string())
    array = array.cast(pa.large_string())
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1] if len(array) else np.zeros(1, np.int64)
    return np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8), bounds


@njit(cache=True)
def _measure(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    about: Vocabulary,
    room: Space,
    values: NDArray[np.float64],
    universal: bool,
    as_dolma: bool,
    coverage_n: int,
    line_coverage: float,
) -> tuple[
    NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]
]:
    documents = len(offsets) - 1
    size = offsets[documents] - offsets[0]
    bin_offsets, line_offsets = np.zeros(documents + 1, np.int64), np.zeros(documents + 1, np.int64)
    bins, counts = np.empty(size, np.uint32), np.empty(size, np.uint32)
    line, line_words, line_covered = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.int32)
    for d in range(documents):
        characters = decode(data, offsets[d], offsets[d + 1], room.codes)
        codes = room.codes[:characters]
        hashes = prefix_hashes(codes)
        if about.english.longest_sequence:
            words = split_english(codes, about.flags, about.english, hashes, room.powers, room.start, room.stop)
        else:
            words = split_ranges(codes, about.flags, room.start, room.stop)
        one = values[d]
        signs, ellipses, newlines, alphanumeric, longest = character_numbers(codes, about.flags)
        start, stop = room.start[:words], room.stop[:words]
        power = room.powers
        describe(codes, about.flags, about.lower, hashes, power, start, stop, room.hash, room.power, room.folded, room.flags)
        one[0], one[1], one[2] = word_numbers(codes, about.flags, start, stop, room.flags, universal)
        one[3], one[4] = signs / max(words, 1), ellipses / max(words, 1)
        one[5], one[6] = line_numbers(codes, about.flags)
        one[7], one[8] = _stop_words(about, room.hash[:words])
        # What occurs once is no repetition, though datatrove counts it: a sentence would have the top 4-gram of a spam page.
        _line_repetition(codes, about.flags, room, hashes, newlines + 1, one[AT_REPETITION:])
        if not as_dolma:
            _gram_repetition(room, words, max(characters, 1), 2 if universal else 1, one[AT_TOP:])
        c4_numbers(codes, about.flags, about.lower, about.english, start, stop, room.line, one[AT_C4:])
        if universal and one[1] != one[1]:
            # C4 counts words between white space: a line of a script without spaces has one, and none would be kept.
            one[AT_C4] = one[AT_C4 + 3] = np.nan
        one[AT_FINEWEB], one[AT_FINEWEB + 1], one[AT_FINEWEB + 2] = fineweb_numbers(codes, about.flags)
        if universal and one[1] != one[1]:
            # 30 characters are a short line of letters, but a sentence of a script without spaces.
            one[AT_FINEWEB + 2] = np.nan
        one[AT_FINEWEB + 3] = newlines / max(words, 1)
        keys = cleared(room.keys, newlines + 1)
        repeated = duplicate_pieces(codes, about.flags, hashes, power, 0, characters, 1, True, keys)[2]
        one[AT_FINEWEB + 4] = repeated / max(characters - newlines, 1)
        one[AT_OTHER], one[AT_OTHER + 1] = characters, (characters - newlines) / (newlines + 1)
        one[AT_OTHER + 2], one[AT_OTHER + 3] = longest, alphanumeric / max(characters, 1)
        of_line, covered = np.empty(newlines + 1, np.int32), np.empty(newlines + 1, np.int32)
        ngram_coverage(codes, start, room.folded, room.flags, coverage_n, room.keys, of_line, covered)
        plain = of_line.sum()
        one[AT_OTHER + 4] = covered.sum() / max(plain, 1)
        found, dirty = _count_bins(room, words, about.dirty, bins[bin_offsets[d] :], counts[bin_offsets[d] :])
        one[AT_OTHER + 5], one[AT_OTHER + 6] = dirty, dirty / max(plain, 1)
        bin_offsets[d + 1] = bin_offsets[d] + found
        at = line_offsets[d]
        for number in range(newlines + 1):
            if of_line[number] and covered[number] / of_line[number] >= line_coverage:
                line[at], line_words[at], line_covered[at] = number, of_line[number], covered[number]
                at += 1
        line_offsets[d + 1] = at
        if as_dolma:
            _measure_as_dolma(about, room, codes, hashes, newlines, one)
    last, end = bin_offsets[documents], line_offsets[documents]
    return (
        bin_offsets, bins[:last].copy(), counts[:last].copy(),
        line_offsets, line[:end].copy(), line_words[:end].copy(), line_covered[:end].copy(),
    )  # fmt: skip


@njit(cache=True)
def _stop_words(about: Vocabulary, hashes: NDArray[np.uint64]) -> tuple[int, int]:
    """Distinct stop words of English, and of the language with most."""
    seen = np.zeros(len(about.stop_keys), np.bool_)
    languages = np.zeros(64, np.int64)
    for value in hashes:
        key = mix(value)
        where = place(about.stop_keys, key)
        if about.stop_keys[where] == key and not seen[where]:
            seen[where] = True
            bits, language = about.stop_languages[where], 0
            while bits:
                languages[language] += bits & np.uint64(1)
                bits >>= np.uint64(1)
                language += 1
    return languages[0], languages.max()


@njit(cache=True)
def _line_repetition(
    codes: NDArray[np.uint32], flags: NDArray[np.uint16], room: Space, hashes: NDArray[np.uint64], lines: int, out: NDArray[np.float64]
) -> None:
    """Write Gopher's numbers of repeated lines and paragraphs to out[:4]."""
    size = max(len(codes), 1)
    keys = cleared(room.keys, lines)
    pieces, repeated, characters = duplicate_pieces(codes, flags, hashes, room.powers, 0, len(codes), 1, False, keys)
    out[0], out[1] = repeated / pieces, characters / size
    first, last = stripped(codes, flags, 0, len(codes))
    keys[:] = 0
    pieces, repeated, characters = duplicate_pieces(codes, flags, hashes, room.powers, first, last, 2, False, keys)
    out[2], out[3] = repeated / pieces, characters / size


@njit(cache=True)
def _gram_repetition(room: Space, words: int, size: int, least: int, out: NDArray[np.float64]) -> None:
    """Write Gopher's numbers of repeated n-grams, of `size` characters, to `out`; a top n-gram occurs at least `least` times."""
    chain(room.hash, room.power, room.start[:words], room.stop[:words], room.joined, room.spaced, room.length)
    joined, spaced, length = room.joined[: words + 1], room.spaced[: words + 1], room.length[: words + 1]
    at = 0
    for n in TOP_N:
        out[at] = top_gram_characters(spaced, length, room.powers, n, room.keys, room.counts, room.firsts, least, 1) / size
        at += 1
    for n in DUPLICATE_N:
        out[at] = duplicate_gram_characters(joined, length, room.powers, n, room.keys) / size
        at += 1


@njit(cache=True)
def _measure_as_dolma(
    about: Vocabulary, room: Space, codes: NDArray[np.uint32], hashes: NDArray[np.uint64], newlines: int, out: NDArray[np.float64]
) -> None:
    """Write what dolma measures to a document's signals, over what it measures in another way; the words in `room` are lost."""
    words, lettered, symbols = dolma.split_white_space(
        codes, about.flags, hashes, room.powers, room.start, room.stop, room.hash, room.power
    )
    start, stop = room.start[:words], room.stop[:words]
    chain(room.hash, room.power, start, stop, room.joined, room.spaced, room.length)
    spaced, length = room.spaced[: words + 1], room.length[: words + 1]
    size = max(length[words], 1)  # characters that are no white space
    out[0], out[2] = words, lettered / max(words, 1)
    keys = cleared(room.keys, newlines + 1)
    out[5], out[6], out[AT_REPETITION], repeated = dolma.line_numbers(codes, hashes, room.powers, keys, room.counts)
    out[AT_REPETITION + 1] = repeated / size
    at = AT_TOP
    for n in TOP_N:
        out[at] = top_gram_characters(spaced, length, room.powers, n, room.keys, room.counts, room.firsts, 1, 0) / size
        at += 1
    for n in DUPLICATE_N:
        out[at] = dolma.repeated_gram_share(spaced, length, room.powers, n, room.keys, room.counts)
        at += 1
    out[AT_DOLMA], out[AT_DOLMA + 1] = dolma.median_length(start, stop, room.counts), symbols / max(words, 1)
    out[AT_DOLMA + 2] = dolma.occurrences(room.hash[:words], about.stop_keys, about.stop_languages)
    dolma.c4_lines(codes, about.flags, about.lower, out[AT_DOLMA + 3 :])


@njit(cache=True)
def _count_bins(
    room: Space, words: int, dirty: NDArray[np.uint64], bins: NDArray[np.uint32], counts: NDArray[np.uint32]
) -> tuple[int, int]:
    """Write the bins of the non-symbol words in the order in which they first occur, and how often each does.

    Returns how many bins, and how many of the words are in `dirty`.
    """
    keys = cleared(room.keys, words)
    found, bad = 0, 0
    for word in range(words):
        if room.flags[word] & IS_SYMBOL:
            continue
        folded = room.folded[word]
        bad += contains(dirty, folded)
        key = (folded >> np.uint64(64 - BINS_BITS)) + np.uint64(1)
        where = place(keys, key)
        if keys[where] == 0:
            keys[where] = key
            room.firsts[where] = found
            bins[found], counts[found] = key - np.uint64(1), 0
            found += 1
        counts[room.firsts[where]] += 1
    return found, bad
