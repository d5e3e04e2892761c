"""Puna's own harm model: probabilities that an English text is harmful, one for each of CATEGORIES.

A linear model of the words and pairs of neighbouring words in a passage. A document's probability is the mean over the worst SHARE of its
passages, so a long page is harmful if much of it is. `tests/benchmarks/train_harm.py` learns the weights; NOTICE names their sources."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.strings import buffers
from puna.models.classifiers.grades import BASE, MIXED, NEWLINE, wide_mark, word

WEIGHTS = Path(__file__).with_name("harm.safetensors")
LANGUAGE = "en"
CATEGORIES = ("hate", "violence", "sexual", "self_harm")
BUCKETS = 1 << 15
FEWEST, MOST = 40, 100  # words of a passage: it ends at a line's end after FEWEST, or after MOST
SCALE = 10  # minimum number of words that a passage counts as, so that a title of one word is no certain evidence
SHARE = 1 / 3
PAIR = np.uint64(0x9FB21C651E98DF25)


class Model(NamedTuple):
    """Weights [BUCKETS, categories] and biases [categories] of the log-odds."""

    weights: NDArray[np.float32]
    bias: NDArray[np.float64]


@lru_cache(maxsize=1)
def load() -> Model:
    """Return the model whose weights lie beside this module."""
    from safetensors.numpy import load_file

    results = load_file(WEIGHTS)
    return Model(results["weights"].astype(np.float32), results["bias"])


def harm_chances(texts: pa.ChunkedArray, model: Model) -> NDArray[np.float64]:
    """Return the probability that each text is harmful, float64[n, categories]; 0 for a text without words."""
    result: NDArray[np.float64] = _harm(*buffers(texts), model.weights, model.bias)
    return result


@njit(cache=True, borrows=True)
def bucket(token: np.uint64) -> np.int64:
    """Return the bucket of a token."""
    state = token * BASE
    state = (state ^ (state >> np.uint64(32))) * MIXED
    return np.int64(state >> np.uint64(40)) & (BUCKETS - 1)


@njit(cache=True, borrows=True)
def passage(data: NDArray[np.uint8], at: int, stop: int, tokens: NDArray[np.int32]) -> tuple[int, int]:
    """Write the buckets of the words and pairs of the passage at `at` to `tokens`, which has room for 2 * MOST, the pairs from MOST on.
    Return the passage's end and its number of words, 0 or more."""
    words, before = 0, np.uint64(0)
    while at < stop and words < MOST:
        c = int(np.int64(data[at]))
        if c == NEWLINE and words >= FEWEST:
            break
        begin = at
        token, at, _ = word(data, at, stop)
        if at == begin:
            at += 3 if wide_mark(data, at, stop) else 1
            continue
        tokens[words] = bucket(token)
        if words:
            tokens[MOST + words - 1] = bucket((before ^ PAIR) * BASE + token)
        words, before = words + 1, token
    return at, words


@njit(cache=True)
def _harm(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], weights: NDArray[np.float32], bias: NDArray[np.float64]
) -> NDArray[np.float64]:
    tokens, out = np.empty(2 * MOST, np.int32), np.zeros((len(offsets) - 1, len(bias)))
    for d in range(len(out)):
        at, stop, number = offsets[d], offsets[d + 1], 0
        chances = np.empty(((stop - at) // (2 * FEWEST) + 2, len(bias)))
        while at < stop:
            at, words = passage(data, at, stop, tokens)
            if words == 0:
                continue
            for k in range(len(bias)):
                total = 0.0
                for n in range(words):
                    total += weights[tokens[n], k]
                for n in range(words - 1):
                    total += weights[tokens[MOST + n], k]
                chances[number, k] = 1 / (1 + np.exp(-(bias[k] + total / np.sqrt(max(words, SCALE)))))
            number += 1
        worst = int(np.ceil(number * SHARE))
        for k in range(len(bias)):
            if number:
                out[d, k] = np.sort(chances[:number, k])[number - worst :].mean()
    return out
