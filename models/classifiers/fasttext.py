"""A fastText classifier (Joulin et al. 2016, arXiv 1607.01759): the mean vector of words and word n-grams, then a softmax over labels.

Training runs on one thread from seeded weights, so that equal lines give equal models. fastText can load the files."""

from __future__ import annotations

import hashlib
import re
import struct
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.cpu.vectors import LANES, add, fill, load, load_first, prefetch, store, store_first
from puna.kernels.text.hash_table import ONE, place, size_for
from puna.kernels.text.strings import buffers
from puna.models.training.state import Saver, check_identity, load_arrays, save_state

LABEL = "__label__"
MAGIC, VERSION, SOFTMAX, SUPERVISED = 793712314, 12, 3, 3
HEAD = struct.Struct("<14i d 3i 2q")  # magic number, version, settings, then the sizes of the dictionary
SHAPE = struct.Struct("<b2q")  # header of an uncompressed matrix: 0, rows, columns
AFTER_NAME = struct.Struct("<x q b")  # end of a name, its count, and 1 for a label
NAME = re.compile(rb"([^\0]*)\0.{9}", re.DOTALL)
LINES = 1 << 14  # lines to split into words at a time
SLICE = 1 << 11  # training steps, one line each, between chances to save
SAVE_SECONDS, REPEATED_SECONDS = 10.0, 0.5
BASIS, PRIME = np.uint32(2166136261), np.uint32(16777619)  # 32-bit FNV-1a, from which fastText computes the hashes of n-grams
LONG_BASIS, LONG_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # 64-bit FNV-1a, to tell words apart
NGRAM = np.uint64(116049371)


class Settings(NamedTuple):
    """Training settings: fastText's `lr`, `epoch`, `wordNgrams`, `dim`, `minCount`, `bucket` and `seed`, in this order."""

    rate: float
    epochs: int
    ngrams: int
    dimension: int
    min_count: int
    buckets: int
    seed: int


class Weights(NamedTuple):
    """The weights and sizes of a model: `first` float32[words + buckets, dimension], the vectors of words and of hash buckets of n-grams
    (up to `ngrams` words); `last` float32[labels, dimension], the output layer."""

    first: NDArray[np.float32]
    last: NDArray[np.float32]
    words: int
    ngrams: int
    buckets: int


class Model:
    """A trained classifier: `words` (large_string, most frequent first), `labels` and `weights`."""

    def __init__(self, words: pa.Array, labels: list[str], weights: Weights) -> None:
        self.words, self.labels, self.weights = words, labels, weights
        self._keys, self._places, _ = _table(*buffers(words))

    def probabilities(self, lines: pa.Array | pa.ChunkedArray) -> NDArray[np.float32]:
        """Return each label's probability, float32[lines, labels]; all 0 for a line with neither a known word nor an n-gram."""
        return _score(*_with_end_words(lines), self._keys, self._places, self.weights)  # type: ignore[no-any-return]


def fit(
    lines: pa.Array | pa.ChunkedArray, classes: NDArray[np.int32], labels: list[str], settings: Settings, state: Path | None = None
) -> Model:
    """Return a model trained on lines of space-separated words; raise ValueError if it diverges. `classes`: lines' indices into `labels`.
    `state`: folder to save the run in (by `Saver`) and to resume from; a run of at least `REPEATED_SECONDS` is also saved at its end."""
    rate, epochs, ngrams, dimension, min_count, buckets, seed = settings
    words, codes, bounds = _encode(lines)
    counts = np.bincount(codes, minlength=len(words))
    order = np.argsort(-counts, kind="stable")
    order = order[counts[order] >= min_count]
    word_rows = np.full(len(words), -1, np.int32)
    word_rows[order] = np.arange(len(order))
    buckets = buckets if ngrams > 1 else 0
    first = _aligned_zeros(len(order) + buckets, dimension)
    first[: len(order)] = (2 * np.random.default_rng(seed).random((len(order), dimension), np.float32) - 1) / np.float32(dimension)
    last, short = _aligned_zeros(len(labels), dimension), _table(*buffers(words))[2]
    weights = Weights(first, last, len(order), ngrams, buckets)
    step, steps, seconds = 0, epochs * len(classes), 0.0
    text = b"".join(hashlib.sha256(part.data).digest() for part in (codes, bounds, classes, buffers(words)[0]))
    identity = {"settings": list(settings), "text": text.hex()}
    if state is not None and (results := load_arrays(state)) is not None:
        arrays, record = results
        check_identity(state, record, identity)
        first[:], last[:], step, seconds = arrays["first"], arrays["last"], record["done"], record["seconds"]

    def save() -> None:
        assert state is not None
        record = {**identity, "unit": "line", "done": step, "of": steps, "seconds": seconds}
        save_state(state, step, {"first": first, "last": last}, record)

    with Saver(SAVE_SECONDS, None if state is None else save) as saver:
        while step < steps:
            start, stop = time.perf_counter(), min(steps, step + SLICE)
            if not _descend(codes, bounds, word_rows, short, classes, weights, rate, epochs, step, stop):
                raise ValueError(f"a classifier diverged in training: try a smaller learning_rate than {rate}")
            step, seconds = stop, seconds + time.perf_counter() - start
            saver.save_if_due(step == steps and seconds >= REPEATED_SECONDS)
            saver.end_if_asked()
    return Model(words.take(pa.array(order)), labels, weights)


def write(model: Model, file: Path) -> None:
    """Write the model in fastText's format, without word counts."""
    first, last, words, ngrams, buckets = model.weights
    sizes = (words + len(model.labels), words, len(model.labels), 0, -1)
    with file.open("wb") as out:
        out.write(HEAD.pack(MAGIC, VERSION, first.shape[1], 5, 0, 1, 5, ngrams, SOFTMAX, SUPERVISED, buckets, 0, 0, 100, 1e-4, *sizes))
        for names, is_label in ((model.words.to_pylist(), 0), ([LABEL + label for label in model.labels], 1)):
            after = AFTER_NAME.pack(1, is_label).decode()
            out.write("".join([name + after for name in names]).encode())
        for matrix in (first, last):
            out.write(SHAPE.pack(0, *matrix.shape))
            matrix.tofile(out)


def read(file: Path) -> Model | None:
    """Return the classifier in a fastText file; None if it is damaged, compressed or unsupervised, or has subwords or no softmax loss."""
    data, matrices = file.read_bytes(), []
    try:
        magic, version, dimension, *_, ngrams, loss, kind, buckets, _, longest, _, _, size, words, labels, _, cut = HEAD.unpack_from(data)
        if (magic, version, loss, kind, longest, cut) != (MAGIC, VERSION, SOFTMAX, SUPERVISED, 0, -1):
            return None
        at = len(data) - 2 * SHAPE.size - 4 * dimension * (words + buckets + labels)
        names = NAME.findall(data, HEAD.size, max(0, at))
        if len(names) != size or HEAD.size + sum(map(len, names)) + AFTER_NAME.size * size != at:
            return None
        for rows in (words + buckets, labels):
            if SHAPE.unpack_from(data, at) != (0, rows, dimension):
                return None
            at += SHAPE.size
            matrices.append(np.frombuffer(data, np.float32, rows * dimension, at).reshape(rows, dimension))
            at += matrices[-1].nbytes
        vocabulary = pa.array(names[:words], pa.large_binary()).cast(pa.large_string())
        labelled = [name.decode().removeprefix(LABEL) for name in names[words:]]
    except (struct.error, ValueError):
        return None
    first, last = matrices
    return Model(vocabulary, labelled, Weights(first, last, words, ngrams, buckets))


def _aligned_zeros(rows: int, dimension: int) -> NDArray[np.float32]:
    """Return a zero matrix whose memory begins at a cache line, so that a row of 16 floats fills exactly one line."""
    room = np.zeros(rows * dimension + 16, np.float32)
    start = -room.ctypes.data % 64 // 4
    return room[start : start + rows * dimension].reshape(rows, dimension)


def _with_end_words(lines: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of lines without leading white space, each followed by fastText's end word `</s>` and a space; and their bounds. A
    zero byte, which would end a name in a file, becomes a byte 1."""
    whole = pc.replace_substring(lines.cast(pa.large_string()), "\0", "\1")
    texts = pc.binary_join_element_wise(whole, *(pa.scalar(text, pa.large_string()) for text in ("</s>", "", " ")))
    data, bounds = buffers(pc.ascii_ltrim_whitespace(texts))  # an empty line would begin with a space
    return data[: bounds[-1]], bounds


def _encode(lines: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, NDArray[np.int32], NDArray[np.int64]]:
    """Return the distinct words of lines, each occurrence's index among them, and the bounds of each line's occurrences."""
    kind, chunks, starts, total = pa.dictionary(pa.int32(), pa.large_string()), [], [np.zeros(1, np.int64)], 0
    for start in range(0, len(lines), LINES):
        data, bounds = _with_end_words(lines.slice(start, LINES))
        ends = np.flatnonzero(data == 32) + 1
        words = pa.LargeStringArray.from_buffers(len(ends), pa.py_buffer(np.append(0, ends)), pa.py_buffer(data))
        chunks.append(words.dictionary_encode())
        starts.append(np.searchsorted(ends, bounds[1:], side="right") + total)
        total += len(ends)
    column = pa.chunked_array(chunks or [pa.array([], kind)], kind).unify_dictionaries()
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in column.chunks])
    return pc.ascii_rtrim_whitespace(column.chunk(0).dictionary), codes, np.concatenate(starts)


@njit(cache=True, borrows=True)
def _read(data: NDArray[np.uint8], start: int, stop: int, short: NDArray[np.uint64], long: NDArray[np.uint64]) -> int:
    """Write the 32-bit (`short`) and 64-bit (`long`) hashes of the space-separated words in data[start:stop]; return the word count."""
    count, a, b = 0, BASIS, LONG_BASIS
    for at in range(start, stop + 1):
        if at < stop and data[at] != 32:
            # fastText's bytes and hashes are signed.
            a, b = np.uint32(np.uint32(a ^ np.uint32(np.int32(np.int8(data[at])))) * PRIME), (b ^ np.uint64(data[at])) * LONG_PRIME
        elif b != LONG_BASIS:
            short[count], long[count] = np.uint64(np.int64(np.int32(a))), max(b, ONE)
            count, a, b = count + 1, BASIS, LONG_BASIS
    return count


@njit(cache=True)
def _table(data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int32], NDArray[np.uint64]]:
    """Return a hash table of words' 64-bit hashes, the index of each slot's word (-1: free slot), and each word's 32-bit hash."""
    short, long = np.zeros(len(bounds) - 1, np.uint64), np.ones(len(bounds) - 1, np.uint64)
    keys = np.zeros(size_for(len(short)), np.uint64)
    places = np.full(len(keys), -1, np.int32)
    for n in range(len(short)):
        _read(data, bounds[n], bounds[n + 1], short[n:], long[n:])
        slot = place(keys, long[n])
        keys[slot], places[slot] = long[n], n
    return keys, places, short


@njit(cache=True, borrows=True)
def _sum(rows: NDArray[np.int32], first: NDArray[np.float32], into: NDArray[np.float32]) -> None:
    for k in range(0, len(into), LANES):
        at, left, total = first.ctypes.data + 4 * k, len(into) - k, fill(np.float32(0))
        for row in rows:
            address = at + 4 * len(into) * np.int64(row)
            total = add(total, load(address) if left >= LANES else load_first(address, left))
        store_first(into.ctypes.data + 4 * k, total, left)


@njit(cache=True, borrows=True)
def _add(rows: NDArray[np.int32], first: NDArray[np.float32], more: NDArray[np.float32]) -> None:
    """Add the vector `more` to these `rows` of `first`; to a row that is listed n times, add it n times."""
    for k in range(0, len(more), LANES):
        at, left = first.ctypes.data + 4 * k, len(more) - k
        value = load_first(more.ctypes.data + 4 * k, left)
        for row in rows:
            address = at + 4 * len(more) * np.int64(row)
            if left >= LANES:
                store(address, add(load(address), value))
            else:
                store_first(address, add(load_first(address, left), value), left)


@njit(cache=True, borrows=True)
def _forward(known: NDArray[np.int32], short: NDArray[np.uint64], weights: Weights, rows: NDArray[np.int32], hidden: NDArray[np.float32],
             output: NDArray[np.float32]) -> int:  # fmt: skip
    """Write the mean vector of words (`known`: their rows in `first`, -1 if unknown) and n-grams to `hidden`, the labels' probabilities
    to `output`, and the vectors' rows in `first` to `rows`. Return the number of vectors in the mean, or -1 if a probability is NaN."""
    first, last, count = weights.first, weights.last, 0
    for row in known:
        if row >= 0:
            rows[count] = row
            count += 1
    for i in range(len(short)):
        gram = short[i]
        for j in range(i + 1, min(len(short), i + weights.ngrams)):
            gram = gram * NGRAM + short[j]
            rows[count] = weights.words + np.int64(gram % np.uint64(weights.buckets))
            prefetch(first.ctypes.data + 4 * len(hidden) * np.int64(rows[count]))
            count += 1
    _sum(rows[:count], first, hidden)
    for k in range(len(hidden)):
        hidden[k] /= np.float32(max(count, 1))
    highest, total = np.float32(-np.inf), np.float32(0)
    for c in range(len(output)):
        dot = np.float32(0)
        for k in range(len(hidden)):
            dot += last[c, k] * hidden[k]
        output[c], highest = dot, max(highest, dot)
    for c in range(len(output)):
        output[c] = np.float32(np.exp(np.float64(output[c] - highest)))
        total += output[c]
    for c in range(len(output)):
        output[c] /= total
    return count if total == total else -1


@njit(cache=True)
def _descend(codes: NDArray[np.int32], bounds: NDArray[np.int64], known: NDArray[np.int32], short: NDArray[np.uint64],
             classes: NDArray[np.int32], weights: Weights, rate: float, epochs: int, start: int, stop: int) -> bool:  # fmt: skip
    """Train the matrices in place for steps start .. stop - 1 (a line each; the rate falls linearly to 0). Return False on a NaN."""
    first, last, longest = weights.first, weights.last, np.diff(bounds).max() if len(classes) else 0
    here, hashes, rows = np.empty(longest, np.int32), np.empty(longest, np.uint64), np.empty(longest * max(1, weights.ngrams), np.int32)
    hidden, grad, output = np.empty(first.shape[1], np.float32), np.empty(first.shape[1], np.float32), np.empty(len(last), np.float32)
    for step in range(start, stop):
        epoch, n = divmod(step, len(classes))
        words = bounds[n + 1] - bounds[n]
        for i in range(words):
            code = codes[bounds[n] + i]
            here[i], hashes[i] = known[code], short[code]
        count = _forward(here[:words], hashes[:words], weights, rows, hidden, output)
        if count < 0:
            return False
        slope = rate * (1 - (epoch * len(codes) + bounds[n]) / (epochs * len(codes)))
        grad[:] = 0
        for c in range(len(last)):
            move = np.float32(slope * (np.float32(c == classes[n]) - output[c]))
            for k in range(len(grad)):
                grad[k] += move * last[c, k]
                last[c, k] += move * hidden[k]
        for k in range(len(grad)):
            grad[k] /= np.float32(max(count, 1))
        _add(rows[:count], first, grad)
    return True


@njit(cache=True)
def _score(data: NDArray[np.uint8], bounds: NDArray[np.int64], keys: NDArray[np.uint64], places: NDArray[np.int32],
           weights: Weights) -> NDArray[np.float32]:  # fmt: skip
    result, longest = np.zeros((len(bounds) - 1, len(weights.last)), np.float32), np.diff(bounds).max() // 2 + 1 if len(bounds) > 1 else 0
    word_rows, short, long = np.empty(longest, np.int32), np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    rows, hidden = np.empty(longest * max(1, weights.ngrams), np.int32), np.empty(weights.first.shape[1], np.float32)
    for n in range(len(result)):
        words = _read(data, bounds[n], bounds[n + 1], short, long)
        for i in range(words):
            word_rows[i] = places[place(keys, long[i])]
        if _forward(word_rows[:words], short[:words], weights, rows, hidden, result[n]) <= 0:
            result[n] = 0
    return result
