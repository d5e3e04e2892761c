"""The dictionary of a fastText model, its first weights and its file, made as fastText 0.9.3 makes and lays them out, to the byte.

`Dictionary::readFromFile`, `DenseMatrix::uniform` (of one thread, which draws a tenth of the matrix and leaves the rest at 0) and
`FastText::saveModel`; only for models of whole words with a softmax over their labels.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit

LABEL = b"__label__"
IS_LABEL = np.frombuffer(LABEL, np.uint8)
END = b"</s>"
NEWLINE, SPACE = 10, 32
OFFSET, PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # FNV-1a with 64 bits tells words apart
LABELS_LAST = 1 << 62
MOST_WORDS = 22_500_000  # from then on fastText leaves out rare words while it reads
SHORT = 16  # what libstdc++'s sort leaves to insertion
MAGIC, VERSION = 793712314, 12
SOFTMAX, SUPERVISED = 3, 3
HEAD = struct.Struct("<14i d 3i 2q")  # magic number, version, Args, t, then the sizes of the dictionary
SHAPE = struct.Struct("<b2q")  # of a matrix that is not compressed
LINE = 16  # numbers of a cache line
ENTRY = 10  # bytes behind a name: a zero, eight of its count, and whether it is a label
WINDOW, NEGATIVES, UPDATE, SAMPLING = 5, 5, 100, 1e-4  # fastText's defaults, of which only the third counts here


class Dictionary(NamedTuple):
    """Words and then labels, the frequent ones first: `bounds` int64[n, 2] of each name in `text`, `hashes` uint64[n], `counts` int64[n];
    `labels`: how many of them are labels, `tokens`: of the whole text."""

    text: NDArray[np.uint8]
    bounds: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]
    labels: int
    tokens: int

    @property
    def words(self) -> int:
        """How many of the names are no labels."""
        return len(self.bounds) - self.labels

    def names(self, first: int = 0) -> list[bytes]:
        """The names from one on: some hundred thousand objects, of which a model needs none but its labels'."""
        return [self.text[start:stop].tobytes() for start, stop in self.bounds[first:].tolist()]


class Settings(NamedTuple):
    """fastText's `dim`, `epoch`, `minCount`, `wordNgrams` and `bucket`."""

    dimension: int
    epochs: int
    min_count: int
    ngrams: int
    buckets: int


class Model(NamedTuple):
    """A classifier: `first` float32[words + buckets, dimension], `last` float32[labels, dimension]."""

    settings: Settings
    dictionary: Dictionary
    first: NDArray[np.float32]
    last: NDArray[np.float32]


def dictionary_of(data: NDArray[np.uint8], min_count: int) -> Dictionary:
    """The dictionary of a training file's bytes; words that occur less often than `min_count` are left out."""
    hashes, bounds, counts, is_label = _entries(data)
    if len(hashes) > MOST_WORDS:
        raise ValueError(f"a classifier's training documents have {len(hashes):,} different words, of {MOST_WORDS:,} at most")
    keys = np.where(is_label, LABELS_LAST, 0) - counts
    order = _parted(keys)
    order = order[np.argsort(keys[order], kind="stable")]
    order = order[is_label[order] | (counts[order] >= min_count)]
    bounds[bounds[:, 1] == 0] = len(data), len(data) + len(END)
    text = np.concatenate([data, np.frombuffer(END, np.uint8)])
    return Dictionary(text, bounds[order], hashes[order], counts[order], int(is_label.sum()), int(counts.sum()))


def first_weights(rows: int, dimension: int, seed: int) -> NDArray[np.float32]:
    """fastText's weights before training, float32[rows, dimension]."""
    found = aligned(rows, dimension)
    _draw(found.reshape(-1), np.float64(np.float32(1.0 / dimension)), max(seed % 2147483647, 1))
    return found


def aligned(rows: int, dimension: int) -> NDArray[np.float32]:
    """Zeros float32[rows, dimension] from the beginning of a cache line on, so that a row of 16 is one; numpy asks for large pages."""
    room = np.zeros(rows * dimension + LINE, np.float32)
    start = -room.ctypes.data % (4 * LINE) // 4
    return room[start : start + rows * dimension].reshape(rows, dimension)


def table(hashes: NDArray[np.uint64], labels: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Open addressing: hashes of words and their numbers, labels (the last ones) as -2 and below; -1 where there is none."""
    size, words = 1 << max(4, (2 * len(hashes)).bit_length()), len(hashes) - labels
    numbers = np.concatenate([np.arange(words), -2 - np.arange(labels)]).astype(np.int32)
    keys, values = _placed(hashes, numbers, size)
    return keys, values


def write(model: Model, file: Path) -> None:
    """Write fastText's file of a model."""
    known, about = model.dictionary, model.settings
    head = HEAD.pack(
        MAGIC, VERSION, about.dimension, WINDOW, about.epochs, about.min_count, NEGATIVES, about.ngrams, SOFTMAX, SUPERVISED,
        about.buckets, 0, 0, UPDATE, SAMPLING, len(known.bounds), known.words, known.labels, known.tokens, -1,
    )  # fmt: skip
    with file.open("wb") as out:
        out.write(head)
        _written(known.text, known.bounds, known.counts, known.words).tofile(out)
        for matrix in (model.first, model.last):
            out.write(SHAPE.pack(0, *matrix.shape))
            matrix.tofile(out)


def read(file: Path) -> Model | None:
    """The model of a file; None where it is none of these: compressed, of parts of words, with another loss."""
    text = file.read_bytes()
    data = np.frombuffer(text, np.uint8)
    if len(text) < HEAD.size:
        return None
    magic, version, dimension, _, epochs, min_count, _, ngrams, *kind, buckets, _, longest, _, _, size, words, labels, tokens, pruned = (
        HEAD.unpack_from(text)
    )
    if (magic, version, kind, longest, pruned) != (MAGIC, VERSION, [SOFTMAX, SUPERVISED], 0, -1):
        return None
    bounds, at = _names(data, HEAD.size, size)
    found = []
    for rows in (words + buckets, labels):
        stop = at + SHAPE.size + 4 * rows * dimension
        if stop > len(text) or SHAPE.unpack_from(text, at) != (0, rows, dimension):
            return None
        found.append(np.frombuffer(text, np.float32, rows * dimension, at + SHAPE.size).reshape(rows, dimension))
        at = stop
    settings = Settings(dimension, epochs, min_count, ngrams, buckets)
    known = Dictionary(data, bounds, _hashes(data, bounds), np.zeros(size, np.int64), labels, tokens)
    return Model(settings, known, *found)


@njit(cache=True, borrows=True)
def is_space(c: int) -> bool:
    """Whether fastText ends a word at this byte."""
    return c <= SPACE and (c == SPACE or 9 <= c <= 13 or c == 0)


@njit(cache=True, borrows=True)
def mixed(state: np.uint64, c: int) -> np.uint64:
    """The hash of one more byte."""
    return (state ^ np.uint64(c)) * PRIME


@njit(cache=True)
def _entries(data: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Different words as they first occur: hashes, where each lies [n, 2] (nowhere: the end of a line), how often, whether a label."""
    slots, hashes = np.full(1 << 12, -1, np.int64), np.empty(1 << 11, np.uint64)
    bounds, counts = np.empty((1 << 11, 2), np.int64), np.zeros(1 << 11, np.int64)
    at, number = _entered(data, 0, 0, slots, hashes, bounds, counts)
    while at < len(data):
        slots = _spread(hashes[:number], 2 * len(slots))
        hashes, bounds, counts = np.concatenate((hashes, hashes)), np.concatenate((bounds, bounds)), np.concatenate((counts, 0 * counts))
        at, number = _entered(data, at, number, slots, hashes, bounds, counts)
    is_label = np.zeros(number, np.bool_)
    for n in range(number):
        first, last = bounds[n]
        is_label[n] = last - first >= len(IS_LABEL) and (data[first : first + len(IS_LABEL)] == IS_LABEL).all()
    return hashes[:number].copy(), bounds[:number].copy(), counts[:number].copy(), is_label


@njit(cache=True, borrows=True)
def _entered(
    data: NDArray[np.uint8], at: int, number: int, slots: NDArray[np.int64], hashes: NDArray[np.uint64], bounds: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> tuple[int, int]:  # fmt: skip
    """Count the words from the byte `at` on; the first byte that is not counted, and how many words there are: it stops before a word
    for which there may be no room."""
    ended = OFFSET
    for c in END:
        ended = mixed(ended, c)
    size = len(data)
    while at < size and number + 1 < len(hashes):
        start, state, place = at, OFFSET, np.uint64(at)  # unsigned: see `text.hashing`
        while place < np.uint64(size) and not is_space(data[place]):
            state = mixed(state, data[place])
            place += np.uint64(1)
        at = int(np.int64(place))
        if at == size:
            break  # no line without its end
        if at > start:
            number = _counted(state, start, at, number, slots, hashes, bounds, counts)
        if data[at] == NEWLINE:
            number = _counted(ended, 0, 0, number, slots, hashes, bounds, counts)
        at += 1
    return at, number


@njit(cache=True, borrows=True)
def _counted(
    state: np.uint64, start: int, stop: int, number: int, slots: NDArray[np.int64], hashes: NDArray[np.uint64], bounds: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> int:  # fmt: skip
    """Count the word start..stop with this hash; how many words there are."""
    slot = np.int64(state & np.uint64(len(slots) - 1))
    while slots[slot] >= 0 and hashes[slots[slot]] != state:
        slot = (slot + 1) & (len(slots) - 1)
    if slots[slot] < 0:
        slots[slot], hashes[number], bounds[number, 0], bounds[number, 1] = number, state, start, stop
        number += 1
    counts[slots[slot]] += 1
    return number


@njit(cache=True)
def _spread(hashes: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """A table of `size` slots, a power of two, with the place of each hash."""
    slots = np.full(size, -1, np.int64)
    for n in range(len(hashes)):
        slot = np.int64(hashes[n] & np.uint64(size - 1))
        while slots[slot] >= 0:
            slot = (slot + 1) & (size - 1)
        slots[slot] = n
    return slots


@njit(cache=True)
def _placed(hashes: NDArray[np.uint64], numbers: NDArray[np.int32], size: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    keys, values = np.zeros(size, np.uint64), np.full(size, -1, np.int32)
    slots = _spread(hashes, size)
    for slot in range(size):
        if slots[slot] >= 0:
            keys[slot], values[slot] = hashes[slots[slot]], numbers[slots[slot]]
    return keys, values


@njit(cache=True)
def _parted(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order in which the partitions of libstdc++'s `std::sort` (introsort, median of three) leave entries: a stable sort of it is
    its result, and so the order of words that are equally frequent."""
    order = np.arange(len(keys))
    depth = 0
    while len(keys) >> (depth + 1):
        depth += 1
    todo = [(0, len(keys), 2 * depth)]
    while todo:
        first, last, depth = todo.pop()
        while last - first > SHORT and depth > 0:
            depth -= 1
            cut = _cut(keys, order, first, last)
            todo.append((cut, last, depth))
            last = cut
    return order


@njit(cache=True)
def _cut(keys: NDArray[np.int64], order: NDArray[np.int64], first: int, last: int) -> int:
    """Part first..last by the median of three; where the second part begins."""
    places = (first + 1, first + (last - first) // 2, last - 1)
    a, b, c = keys[order[places[0]]], keys[order[places[1]]], keys[order[places[2]]]
    if a < b:
        median = places[1] if b < c else places[2] if a < c else places[0]
    else:
        median = places[0] if a < c else places[2] if b < c else places[1]
    order[first], order[median] = order[median], order[first]
    pivot, low, high = keys[order[first]], first + 1, last
    while True:
        while keys[order[low]] < pivot:
            low += 1
        high -= 1
        while pivot < keys[order[high]]:
            high -= 1
        if low >= high:
            return int(low)
        order[low], order[high] = order[high], order[low]
        low += 1


@njit(cache=True)
def _draw(found: NDArray[np.float32], bound: float, seed: int) -> None:
    """`std::minstd_rand` and `std::uniform_real_distribution<double>` of libstdc++, two numbers a draw."""
    span, state = 2147483646.0, np.int64(seed)
    for i in range(len(found) // 10):
        state = state * 48271 % 2147483647
        low = np.float64(state - 1)
        state = state * 48271 % 2147483647
        drawn = (low + np.float64(state - 1) * span) / (span * span)
        found[i] = np.float32(drawn * (bound + bound) - bound)


@njit(cache=True)
def _names(data: NDArray[np.uint8], at: int, count: int) -> tuple[NDArray[np.int64], int]:
    """Where the names of a file's dictionary lie, int64[count, 2], and where it ends."""
    bounds = np.empty((count, 2), np.int64)
    for n in range(count):
        bounds[n, 0] = at
        while at < len(data) and data[at] != 0:
            at += 1
        bounds[n, 1] = at
        at += ENTRY
    return bounds, at


@njit(cache=True)
def _written(text: NDArray[np.uint8], bounds: NDArray[np.int64], counts: NDArray[np.int64], words: int) -> NDArray[np.uint8]:
    """The names as they lie in a file, those from `words` on as labels."""
    size = 0
    for start, stop in bounds:
        size += stop - start + ENTRY
    found = np.zeros(size, np.uint8)
    at = 0
    for n in range(len(bounds)):
        length = bounds[n, 1] - bounds[n, 0]
        found[at : at + length] = text[bounds[n, 0] : bounds[n, 1]]
        at += length + 1
        for byte in range(8):
            found[at + byte] = (counts[n] >> (8 * byte)) & 255
        found[at + 8] = n >= words
        at += ENTRY - 1
    return found


@njit(cache=True)
def _hashes(data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> NDArray[np.uint64]:
    found = np.empty(len(bounds), np.uint64)
    for n in range(len(bounds)):
        state = OFFSET
        for at in range(bounds[n, 0], bounds[n, 1]):
            state = mixed(state, data[at])
        found[n] = state
    return found
