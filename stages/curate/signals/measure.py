"""Measurement of all heuristic signals except the divergence, in one compiled pass that splits each document into words once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import decode, tables
from puna.kernels.text.hash_table import bits_of, clear_keys, clear_slots, contains, mix, perhaps, place, size_for, table_of
from puna.kernels.text.strings import buffers
from puna.kernels.text.technical import code_lines
from puna.kernels.text.unspaced import weights
from puna.kernels.text.words import describe, powers, prefix_hashes, split_ranges, words_listed
from puna.stages.contract import SIGNALS
from puna.stages.curate.signals import definitions
from puna.stages.curate.signals.definitions.views import entries
from puna.stages.curate.signals.divergence import BINS_BITS
from puna.stages.curate.signals.gopher import (
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    character_numbers,
    gram_repetition,
    line_numbers,
    line_repetition,
    misread_characters,
    word_numbers,
)
from puna.stages.curate.signals.line_rules import (
    Phrases,
    PlainWords,
    c4_numbers,
    fineweb_numbers,
    listed_phrases,
    ngram_coverage,
    notice_numbers,
    plain_words,
)
from puna.storage import PunaError, errors_at

assert definitions  # the import declares the signals that are measured here

# One field per compiled signal. A field that no measurement fills stays NaN, which means null.
RECORD = np.dtype([(name, np.float64) for name, made in SIGNALS.items() if made.compiled])
NAMES: tuple[str, ...] = RECORD.names or ()


class Vocabulary(NamedTuple):
    """Lookup tables for measuring texts.

    `flags`, `lower`: see `characters.Tables`; `breaks`: see `unspaced.weights`; `phrases`: see `line_rules.Phrases`. `stop_keys`: a hash
    table of stop words; `stop_languages`: bit i for language i (0: English). `dirty_keys`, `dirty_bits`: table, bitmap of adult words."""

    flags: U16
    lower: U32
    breaks: NDArray[np.int8]
    stop_keys: U64
    stop_languages: U64
    dirty_keys: U64
    dirty_bits: U64
    phrases: Phrases


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """Return the tables built from the word lists in the data folder, once per process."""
    bits: dict[int, int] = {}
    for language, (_, *words) in enumerate(entries("stop_words.txt")):
        for value in words_listed(words).hash.tolist():
            bits[value] = bits.get(value, 0) | 1 << language
    stop_keys = table_of(bits)
    stop_languages = np.zeros(len(stop_keys), np.uint64)
    for value, languages in bits.items():
        stop_languages[place(stop_keys, np.uint64(mix(np.uint64(value))))] = languages
    folded = words_listed([word for words in entries("dirty_words.txt") for word in words]).folded.tolist()
    flags, lower = tables()
    return Vocabulary(flags, lower, weights(), stop_keys, stop_languages, table_of(folded), bits_of(folded), listed_phrases())


class Space(NamedTuple):
    """Scratch arrays, which are reused for all documents of a call."""

    codes: U32
    line: U32
    start: I32
    stop: I32
    hash: U64
    power: U64
    folded: U64
    flags: U8
    joined: U64
    spaced: U64
    length: I64
    keys: U64
    slots: I32
    counts: I32
    firsts: I32
    powers: U64
    plain: PlainWords


def _space(characters: int) -> Space:
    size = characters + 2
    table = size_for(size)
    names = Space._fields[:-1]
    kinds = dict.fromkeys(names, np.uint64) | {
        "codes": np.uint32, "line": np.uint32, "start": np.int32, "stop": np.int32, "flags": np.uint8, "length": np.int64,
        "counts": np.int32, "firsts": np.int32, "slots": np.int32,
    }  # fmt: skip
    sizes = dict.fromkeys(names, size) | dict.fromkeys(("keys", "counts", "firsts"), table) | {"slots": 2 * table}
    arrays: dict[str, Any] = {name: np.empty(sizes[name], kinds[name]) for name in names}
    plain = PlainWords(np.empty(size, np.uint64), np.empty(size, np.int32), np.empty(size, np.bool_))
    # An n-gram with its spaces can be longer than the text.
    return Space(**(arrays | {"powers": powers(2 * size), "plain": plain}))


class Measurements(NamedTuple):
    """Measurements of D documents. `values` RECORD[D], NaN if not measured.

    Document d has its words' hash bins and their counts, `bins` and `counts` uint32, at bin_offsets[d] : bin_offsets[d + 1]; and its lines
    with n-gram coverage ≥ `line_coverage`, `line` (number), `line_words`, `line_covered` int32, at line_offsets[d] to [d + 1]."""

    values: NDArray[np.void]
    bin_offsets: I64
    bins: U32
    counts: U32
    line_offsets: I64
    line: I32
    line_words: I32
    line_covered: I32


class OwnWords(NamedTuple):
    """Stop word lists for D documents: `keys`, a table of hashes salted by list; `salts` uint64[lists]; `of` int64[D], the index of each
    document's list, or `ANY_LIST` (the best-matching list of `stop_words.txt` counts) or `NO_LIST` (nothing is counted)."""

    keys: U64
    salts: U64
    of: I64


ANY_LIST, NO_LIST = -1, -2


def own_words(lists: list[tuple[str, ...]], of: list[int]) -> OwnWords:
    """Return the stop word `lists` as hashes. `of`: index of each document's list, `ANY_LIST` or `NO_LIST`."""
    return OwnWords(*_salt_words(tuple(lists)), np.array(of, np.int64))


@lru_cache(maxsize=2)
def _salt_words(lists: tuple[tuple[str, ...], ...]) -> tuple[U64, U64]:
    """Return `OwnWords.keys` and `salts`, cached because all parts of a corpus share them."""
    salts = np.array([mix(np.uint64(number)) for number in range(1, len(lists) + 1)], np.uint64)
    with errors_at("heuristics: the stop words of the table of languages", ValueError):
        keys = [value ^ salt for words, salt in zip(lists, salts, strict=True) for value in words_listed(list(words)).folded]
    return table_of(keys), salts


def measure(texts: pa.Array | pa.ChunkedArray, coverage_n: int, line_coverage: float, own: OwnWords | None = None) -> Measurements:
    """Return all compiled signals of documents, that is, all except the divergence, which needs the whole corpus.

    Lines are reported if at least the share `line_coverage` of their words is in n-grams of `coverage_n` words seen earlier. `own`: the
    stop words of each document's language; None: `ANY_LIST` for all documents."""
    data, offsets = buffers(texts)
    longest = int(np.diff(offsets).max(initial=0))
    values = np.full(len(offsets) - 1, np.nan, RECORD)
    own = own_words([], [ANY_LIST] * len(values)) if own is None else own
    return Measurements(values, *_measure(data, offsets, vocabulary(), own, _space(longest), values, coverage_n, line_coverage))


@njit(cache=True)
def _measure(
    data: U8, offsets: I64, about: Vocabulary, own: OwnWords, room: Space, values: Any, coverage_n: int, line_coverage: float
) -> tuple[I64, U32, U32, I64, I32, I32, I32]:
    documents = len(offsets) - 1
    size = offsets[documents] - offsets[0]
    bin_offsets, line_offsets = np.zeros(documents + 1, np.int64), np.zeros(documents + 1, np.int64)
    bins, counts = np.empty(size, np.uint32), np.empty(size, np.uint32)
    line, line_words, line_covered = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.int32)
    for d in range(documents):
        characters = decode(data, offsets[d], offsets[d + 1], room.codes)
        codes = room.codes[:characters]
        hashes = prefix_hashes(codes)
        words = split_ranges(codes, about.flags, about.breaks, room.start, room.stop)
        one = values[d]
        signs, ellipses, newlines, alphanumeric, longest = character_numbers(codes, about.flags)
        start, stop = room.start[:words], room.stop[:words]
        power = room.powers
        describe(codes, about.flags, about.lower, hashes, power, start, stop, room.hash, room.power, room.folded, room.flags)
        plain, mean_length, lettered = word_numbers(codes, about.flags, start, stop, room.flags)
        one.words, one.mean_word_length, one.alphabetic_word_fraction = plain, mean_length, lettered
        one.hash_ratio, one.ellipsis_ratio = signs / max(words, 1), ellipses / max(words, 1)
        one.bullet_line_fraction, one.ellipsis_line_fraction = line_numbers(codes, about.flags)
        one.english_stop_words, one.stop_words = _stop_words(about, room.hash[:words])
        if own.of[d] != ANY_LIST:
            one.stop_words = np.nan
        if own.of[d] >= 0:
            results, occurrences = _own_stop_words(own, own.salts[own.of[d]], room.folded[:words], room.keys)
            one.stop_words, one.stop_word_fraction = results, occurrences / max(plain, 1)
        # Unlike in datatrove, n-grams that occur once do not count: they would make a single sentence look as repetitive as a spam page.
        line_repetition(codes, about.flags, room, hashes, newlines, one)
        gram_repetition(room, words, max(characters, 1), one)
        c4_numbers(codes, about.flags, about.lower, start, stop, room.line, one)
        one.lines, one.terminated_line_fraction, one.short_line_fraction = fineweb_numbers(codes, about.flags)
        if mean_length != mean_length:
            # C4 splits words at white space, so it would keep no line in a script without spaces, in which 30 characters are a sentence.
            one.c4_sentences = one.c4_open_sentences = one.short_line_fraction = np.nan
        one.newline_ratio, one.code_lines = newlines / max(words, 1), code_lines(codes)[1]
        one.misread_fraction = misread_characters(codes) / max(characters, 1)
        one.characters, one.mean_line_length = characters, (characters - newlines) / (newlines + 1)
        one.max_line_length, one.alphanumeric_fraction = longest, alphanumeric / max(characters, 1)
        of_line, covered = np.empty(newlines + 1, np.int32), np.empty(newlines + 1, np.int32)
        plain_end = plain_words(codes, start, room.folded, room.flags, room.plain)
        ngram_coverage(room.plain, plain_end, coverage_n, room.keys, room.slots, of_line, covered)
        one.ngram_coverage = covered.sum() / max(plain, 1)
        results, dirty = _count_bins(room, room.plain.folded[:plain_end], about, bins[bin_offsets[d] :], counts[bin_offsets[d] :])
        one.dirty_words, one.dirty_word_ratio = dirty, dirty / max(plain, 1)
        one.legal_phrase_ratio, one.notice_ratio = notice_numbers(room.plain.folded[:plain_end], room.plain.line[:plain_end], about.phrases)
        bin_offsets[d + 1] = bin_offsets[d] + results
        at = line_offsets[d]
        for number in range(newlines + 1):
            if of_line[number] and covered[number] / of_line[number] >= line_coverage:
                line[at], line_words[at], line_covered[at] = number, of_line[number], covered[number]
                at += 1
        line_offsets[d + 1] = at
    last, end = bin_offsets[documents], line_offsets[documents]
    return (
        bin_offsets, bins[:last].copy(), counts[:last].copy(),
        line_offsets, line[:end].copy(), line_words[:end].copy(), line_covered[:end].copy(),
    )  # fmt: skip


@njit(cache=True)
def _stop_words(about: Vocabulary, hashes: U64) -> tuple[int, int]:
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
def _own_stop_words(own: OwnWords, salt: np.uint64, folded: U64, space: U64) -> tuple[int, int]:
    seen = clear_keys(space, len(folded))
    results, occurrences = 0, 0
    for value in folded:
        if contains(own.keys, value ^ salt):
            occurrences += 1
            where = place(seen, value)
            results += seen[where] == 0
            seen[where] = value
    return results, occurrences


@njit(cache=True, borrows=True)
def _count_bins(room: Space, words: U64, about: Vocabulary, bins: U32, counts: U32) -> tuple[int, int]:
    """Write the bins of the non-symbol `words` (folded hashes) in order of first occurrence, and their counts.

    Return the number of bins, and the number of words from the adult vocabulary."""
    slots, results, bad = room.slots, 0, 0
    mask = (1 << clear_slots(slots, len(words))) - 1
    for folded in words:
        if perhaps(about.dirty_bits, folded):
            bad += contains(about.dirty_keys, folded)
        bin = np.uint32(folded >> np.uint64(64 - BINS_BITS))
        at = np.int64(bin) & mask
        while slots[at] != 0 and bins[slots[at] - 1] != bin:
            at = (at + 1) & mask
        if slots[at] == 0:
            bins[results], counts[results] = bin, 0
            results += 1
            slots[at] = results
        counts[slots[at] - 1] += np.uint32(1)
    return results, bad


def check_against_definitions(found: Measurements, texts: pa.ChunkedArray, documents: int = 3) -> None:
    """Raise PunaError if an optional signal is null for all documents, but its definition gives one of the first `documents` a value."""
    for name in NAMES:
        arrays = SIGNALS[name]
        if arrays.optional and arrays.definition and np.isnan(found.values[name]).all():
            for text in texts.slice(0, documents).to_pylist():
                if arrays.definition(text) is not None:
                    raise PunaError(f"signal {name} ({arrays.meaning}) was measured for no document, but its definition gives a value")
