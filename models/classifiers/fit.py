"""Training and applying fastText's classifiers by its own algorithm, in a fraction of its time.

fastText 0.9.3 looks every word of every pass up in a table of 120 MB, which takes most of its time. Here the table is as large as the
vocabulary needs, lines are kept as numbers, and the passes are one compiled loop. The arithmetic is that of `Model::update` and
`SoftmaxLoss` in the same order, in single precision: weights and probabilities are equal to the bit to those of one thread of
fastText where it is built for plain x86-64, as pip builds it.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.cpu.vectors import LANES, add, fill, load, load_first, prefetch, store, store_first, times
from puna.kernels.text.strings import buffers
from puna.models.classifiers.dictionary import (
    END,
    LABEL,
    NEWLINE,
    OFFSET,
    Dictionary,
    Model,
    Settings,
    dictionary_of,
    first_weights,
    is_space,
    mixed,
    table,
)
from puna.models.training.state import Saver, check_identity, load_arrays, save_state

UPDATE = 100  # tokens after which the learning rate falls
KEPT = 1 << 27  # numbers of a training's lines that are kept in memory: 512 MiB
OFFSET32, PRIME32 = np.uint32(2166136261), np.uint32(16777619)  # FNV-1a with 32 bits, as fastText, makes n-grams
NGRAM = np.uint64(116049371)
NO_WORD, ONE = np.int32(-1), np.uint64(1)
NUMBER = 4  # bytes of one in fp32
DONE, SINCE, AT, LINE, FIRST, LINES, FITS = range(7)
"""The place of a training: tokens done; those since the learning rate fell last; where the next line begins in the text, among the lines
kept and in their rows; lines kept; and whether the next one is kept."""
SAVED, PLACES = 3, 7  # numbers of the place that are saved, and all
SLICE = 1 << 19  # tokens of a training after which it may be saved
SAVE_SECONDS, REPEATED_SECONDS = 10.0, 0.5
AHEAD = 32  # rows that are asked for before they are added: they come from memory in no order


class Weights(NamedTuple):
    """A model's dictionary, as hashes of words and labels and their numbers (see `table`), and its matrices; `words`, `ngrams`,
    `buckets`: how many words it has, fastText's `wordNgrams` and `bucket`."""

    keys: NDArray[np.uint64]
    values: NDArray[np.int32]
    first: NDArray[np.float32]  # [words + buckets, dimension]
    last: NDArray[np.float32]  # [labels, dimension]
    words: int
    ngrams: int
    buckets: int


class Scratch(NamedTuple):
    """Room for one line: rows of the first matrix, hashes of words; and for one step."""

    rows: NDArray[np.int32]
    hashes: NDArray[np.uint64]
    hidden: NDArray[np.float32]
    grad: NDArray[np.float32]
    output: NDArray[np.float32]


class Scorer:
    """A model of words and their n-grams with a softmax over its labels."""

    def __init__(self, model: Model) -> None:
        known = model.dictionary
        self.labels = [name.removeprefix(LABEL).decode() for name in known.names(known.words)]
        self._weights = _weights(known, model.settings, model.first, model.last)

    def probabilities(self, lines: pa.Array | pa.ChunkedArray) -> NDArray[np.float32]:
        """What fastText gives for each label [lines, labels]; each line is words with spaces between, in which no label occurs."""
        found: NDArray[np.float32] = _score(*buffers(lines), self._weights)
        return found


def fit(
    text: Path, rate: float, epochs: int, ngrams: int, dimension: int, min_count: int, buckets: int, seed: int, state: Path | None = None
) -> Model:
    """The fastText model of a training file: a label and words a line; the parameters are fastText's.

    state: folder in which the training is saved as `Saver` says, and from which it goes on. One that took `REPEATED_SECONDS` is saved at
    its end, too.
    """
    data = np.fromfile(text, np.uint8)
    known = dictionary_of(data, min_count)
    settings = Settings(dimension, epochs, min_count, ngrams, buckets if ngrams > 1 else 0)
    # Seeds 0 and 1 are one seed to fastText's generator.
    first = first_weights(known.words + settings.buckets, dimension, seed + 1)
    weights = _weights(known, settings, first, np.zeros((known.labels, dimension), np.float32))
    tokens, longest = _sizes(data)
    every, place, seconds = epochs * tokens, np.zeros(PLACES, np.int64), 0.0
    place[FITS] = 1
    identity = {"settings": [rate, *settings, seed], "text": hashlib.sha256(data.data).hexdigest()}
    if state is not None and (found := load_arrays(state)) is not None:
        arrays, record = found
        check_identity(state, record, identity)
        first[:], weights.last[:], place[:SAVED] = arrays["first"], arrays["last"], arrays["place"]
        place[FITS], seconds = 0, record["seconds"]  # lines are kept again from the next pass on

    def write() -> None:
        assert state is not None
        record = {**identity, "unit": "token", "done": min(int(place[DONE]), every), "of": every, "seconds": seconds}
        save_state(state, record["done"], {"first": first, "last": weights.last, "place": place[:SAVED]}, record)

    kept = np.empty(min(KEPT, tokens * ngrams), np.int32)
    about = np.empty((np.count_nonzero(data == NEWLINE), 4), np.int64)
    with Saver(SAVE_SECONDS, None if state is None else write) as saver:
        while place[DONE] < every:
            started = time.perf_counter()
            if not _descend(data, weights, rate, every, longest, kept, about, place, SLICE):
                raise ValueError(f"the training of a classifier diverged: try a smaller learning_rate than {rate}")
            seconds += time.perf_counter() - started
            saver.stepped(bool(place[DONE] >= every) and seconds >= REPEATED_SECONDS)
            saver.end_if_asked()
    return Model(settings, known, first, weights.last)


def _weights(known: Dictionary, settings: Settings, first: NDArray[np.float32], last: NDArray[np.float32]) -> Weights:
    return Weights(*table(known.hashes, known.labels), first, last, known.words, settings.ngrams, settings.buckets)


@njit(cache=True, borrows=True)
def _sizes(data: NDArray[np.uint8]) -> tuple[int, int]:
    """Tokens of all lines, their ends included, and those of the longest."""
    tokens = longest = here = 0
    inside = False
    for c in data:
        if not is_space(c):
            here += not inside
            inside = True
            continue
        inside = False
        if c == NEWLINE:
            tokens, longest, here = tokens + here + 1, max(longest, here + 1), 0
    return tokens, longest


@njit(cache=True)
def _scratch(longest: int, weights: Weights) -> Scratch:
    """Room for lines of so many tokens."""
    size = weights.first.shape[1]
    rows, hashes = np.empty(longest * max(1, weights.ngrams), np.int32), np.empty(longest, np.uint64)  # fastText takes 0 for 1
    return Scratch(rows, hashes, np.empty(size, np.float32), np.empty(size, np.float32), np.empty(len(weights.last), np.float32))


@njit(cache=True, borrows=True)
def _number(weights: Weights, state: np.uint64) -> np.int32:
    """The number of a word, or of a label, by its hash."""
    keys = weights.keys
    slot = np.int64(state & np.uint64(len(keys) - 1))
    while keys[slot] != 0 and keys[slot] != state:
        slot = (slot + 1) & (len(keys) - 1)
    return weights.values[slot] if keys[slot] != 0 else NO_WORD


@njit(cache=True, borrows=True)
def _line(data: NDArray[np.uint8], at: int, stop: int, weights: Weights, scratch: Scratch) -> tuple[int, int, int, int]:
    """Read a line, whose end is a word of its own (`</s>`): its label, tokens, rows (in `scratch`), and where the next line begins."""
    rows, hashes = scratch.rows, scratch.hashes
    first, width = weights.first.ctypes.data, NUMBER * weights.first.shape[1]
    label, tokens, known, words, ended = -1, 0, 0, 0, False
    while not ended:
        state, short, start, place = OFFSET, OFFSET32, at, np.uint64(at)  # unsigned: see `text.hashing`
        while place < np.uint64(stop) and not is_space(data[place]):
            state, short, place = mixed(state, data[place]), _with32(short, data[place]), place + ONE
        at = int(np.int64(place))
        if at == start:
            at += 1
            if at <= stop and data[start] != NEWLINE:
                continue
            ended = True
            for e in END:
                state, short = mixed(state, e), _with32(short, e)
        number = _number(weights, state)
        tokens += 1
        if number <= -2:
            label = -2 - number
        else:
            if number >= 0:
                prefetch(first + width * np.int64(number))
                rows[known] = number
                known += 1
            hashes[words] = np.uint64(np.int64(np.int32(short)))
            words += 1
    for i in range(words):
        gram = hashes[i]
        for j in range(i + 1, min(words, i + weights.ngrams)):
            gram = gram * NGRAM + hashes[j]
            row = weights.words + np.int64(gram % np.uint64(weights.buckets))
            prefetch(first + width * row)
            rows[known] = row
            known += 1
    return label, tokens, known, at


@njit(cache=True, borrows=True)
def _with32(state: np.uint32, c: int) -> np.uint32:
    """fastText's hash of one more byte, which has a sign there."""
    return np.uint32(np.uint32(state ^ np.uint32(np.int32(np.int8(c)))) * PRIME32)


@njit(cache=True, borrows=True)
def _mean(rows: NDArray[np.int32], count: int, first: NDArray[np.float32], into: NDArray[np.float32]) -> None:
    """Write the mean of the first `count` of some rows, added in their order, to `into`; the rows behind them come next."""
    size, width = len(into), NUMBER * len(into)
    share = fill(np.float32(1.0 / count))
    for k in range(0, size, LANES):
        at, out, left = first.ctypes.data + NUMBER * k, into.ctypes.data + NUMBER * k, size - k
        whole, total = left >= LANES, fill(np.float32(0))
        for i in range(count):
            if i + AHEAD < len(rows):
                prefetch(at + width * np.int64(rows[i + AHEAD]))
            row = at + width * np.int64(rows[i])
            total = add(total, load(row) if whole else load_first(row, left))
        if whole:
            store(out, times(total, share))
        else:
            store_first(out, times(total, share), left)


@njit(cache=True, borrows=True)
def _add(rows: NDArray[np.int32], count: int, first: NDArray[np.float32], grad: NDArray[np.float32]) -> None:
    """Add `grad` to the first `count` of some rows."""
    size, width = len(grad), NUMBER * len(grad)
    for k in range(0, size, LANES):
        at, left = first.ctypes.data + NUMBER * k, size - k
        whole, more = left >= LANES, load_first(grad.ctypes.data + NUMBER * k, left)
        for i in range(count):
            row = at + width * np.int64(rows[i])
            if whole:
                store(row, add(load(row), more))
            else:
                store_first(row, add(load_first(row, left), more), left)


@njit(cache=True, borrows=True)
def _forward(rows: NDArray[np.int32], count: int, weights: Weights, scratch: Scratch) -> bool:
    """The mean of a line's `count` rows, and the probabilities of the labels; whether its numbers are numbers. Behind these in `rows` lie
    those of the next line, as far as they are known."""
    last, hidden, output = weights.last, scratch.hidden, scratch.output
    _mean(rows, count, weights.first, hidden)
    highest = np.float32(-np.inf)
    for c in range(len(output)):
        dot = np.float32(0)
        for k in range(len(hidden)):
            dot += last[c, k] * hidden[k]
        if np.isnan(dot):
            return False
        output[c], highest = dot, max(highest, dot)
    total = np.float32(0)
    for c in range(len(output)):
        output[c] = np.float32(np.exp(np.float64(np.float32(output[c] - highest))))
        total += output[c]
    for c in range(len(output)):
        output[c] /= total
    return True


@njit(cache=True, borrows=True)
def _step(rows: NDArray[np.int32], count: int, label: int, rate: np.float32, weights: Weights, scratch: Scratch) -> bool:
    """One step of descent on a line (see `_forward`); whether its numbers are numbers."""
    last, hidden, grad = weights.last, scratch.hidden, scratch.grad
    if not _forward(rows, count, weights, scratch):
        return False
    grad[:] = 0
    for c in range(len(last)):
        alpha = np.float32(rate * np.float32(np.float32(c == label) - scratch.output[c]))
        for k in range(len(grad)):
            grad[k] += alpha * last[c, k]
            last[c, k] += alpha * hidden[k]
    share = np.float32(1.0 / count)
    for k in range(len(grad)):
        grad[k] *= share
    _add(rows, count, weights.first, grad)
    return True


@njit(cache=True)
def _descend(
    data: NDArray[np.uint8], weights: Weights, rate: float, every: int, longest: int, kept: NDArray[np.int32], about: NDArray[np.int64],
    place: NDArray[np.int64], tokens: int,
) -> bool:  # fmt: skip
    """Train the matrices in place by so many tokens of lines of a label and words, from `place` on; whether they stayed numbers.

    The rows of the first lines, as many as `kept` has place for, are kept for the passes that follow; other lines are read again.
    `about`: of each line kept its label, tokens, where its rows end in `kept`, and where it ends in `data`.
    """
    scratch = _scratch(longest, weights)
    done, since, at, line, first, lines = place[DONE], place[SINCE], place[AT], place[LINE], place[FIRST], place[LINES]
    fits, numbers, stop = place[FITS] != 0, True, min(every, place[DONE] + tokens)
    while numbers and done < stop:
        if at >= len(data):
            at = line = first = 0
            fits = fits or lines == 0
        progress = np.float32(np.float32(done) / np.float32(every))
        here = np.float32(rate * (1.0 - np.float64(progress)))
        if line < lines:
            label, count, last, at = about[line]
            rows, known = kept[first:], last - first
            first, line = last, line + 1
        else:
            label, count, known, at = _line(data, at, len(data), weights, scratch)
            rows = scratch.rows[:known]
            fits = fits and first + known <= len(kept)
            if fits:
                kept[first : first + known] = rows
                first, line, lines = first + known, line + 1, lines + 1
                about[lines - 1] = label, count, first, at
        if label >= 0 and known > 0:
            numbers = _step(rows, known, label, here, weights, scratch)
        since += count
        if since > UPDATE:
            done, since = done + since, 0
    place[DONE], place[SINCE], place[AT] = done, since, at
    place[LINE], place[FIRST], place[LINES], place[FITS] = line, first, lines, fits
    return numbers


@njit(cache=True)
def _score(data: NDArray[np.uint8], offsets: NDArray[np.int64], weights: Weights) -> NDArray[np.float32]:
    """Probabilities [lines, labels]; 0 where a line has no word that is known."""
    longest = 0
    for n in range(len(offsets) - 1):
        longest = max(longest, offsets[n + 1] - offsets[n])
    scratch = _scratch(longest // 2 + 2, weights)
    found = np.zeros((len(offsets) - 1, len(weights.last)), np.float32)
    for n in range(len(found)):
        _, _, known, _ = _line(data, offsets[n], offsets[n + 1], weights, scratch)
        if known > 0 and _forward(scratch.rows[:known], known, weights, scratch):
            for c in range(len(weights.last)):
                # fastText hands logarithms on, of a little more.
                found[n, c] = np.exp(np.float32(np.log(np.float64(scratch.output[c]) + 1e-5)))
    return found
