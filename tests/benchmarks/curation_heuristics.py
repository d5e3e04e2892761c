"""Heuristics: every signal in one pass, compared with datatrove's four filters on the same texts.

`heuristics_mb_s`: MB/s of all signals on texts in memory, including the divergence from the corpus. `heuristics_vs_datatrove`: datatrove's
seconds for Gopher repetition, Gopher quality, C4 and FineWeb, divided by Puna's for all signals and the same rules.
`heuristics_equal_NAME`: share of texts on which all four filters and Puna's rules agree, and `heuristics_texts_NAME` the number of texts:
of the sample, and of each file in the environment variable PUNA_TEXTS (separated by colons): JSON lines with `text` or
`ground_truth.main_content`, or articles under headings `= TITLE =`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEER_BYTES = 1_500_000
REPEATS = 3
PART = 1024
HEADING = re.compile(r"(?m)^ = (?!=).* = $\n")


def best(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the minimum CPU seconds of several calls, and the result; the first call compiles."""
    result, least = function(), float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        result = function()
        least = min(least, time.process_time() - started)
    return least, result


def everything(texts: Any) -> None:
    """Measure all signals: batch by batch as the stage does, then the divergence over the whole corpus."""
    import numpy as np

    from puna.stages.curate.signals.divergence import BINS, Corpus
    from puna.stages.curate.signals.measure import measure

    parts = [measure(texts.slice(at, PART), 5, 0.5) for at in range(0, len(texts), PART)]
    total = np.zeros(BINS, np.int64)
    for part in parts:
        total += np.bincount(part.bins, weights=part.counts, minlength=BINS).astype(np.int64)
    corpus = Corpus.of(total)
    for part in parts:
        corpus.divergences(np.arange(len(part.values)), part.bin_offsets, part.bins, part.counts)


def texts_of(file: Path) -> list[str]:
    """Return the documents of a file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".jsonl":
        return [found.strip() for found in HEADING.split(text) if found.strip()]
    rows = [json.loads(line) for line in text.split("\n") if line]
    found = [row["text"] if "text" in row else row["ground_truth"].get("main_content") for row in rows]
    return [text for text in found if text]


def agreement(name: str, texts: list[str]) -> dict[str, float]:
    """Return the share of texts on which Puna and datatrove agree, and the number of texts."""
    import datatrove_rules

    return {
        f"heuristics_equal_{name}": 1 - len(datatrove_rules.different(texts)) / len(texts),
        f"heuristics_texts_{name}": len(texts),
    }


def figures() -> dict[str, float]:
    """Return speeds in MB of UTF-8 per CPU second on one thread, their ratio, and agreement."""
    import corpus
    import datatrove_rules
    import pyarrow as pa
    from datatrove_rules import RULES

    texts = corpus.texts(1 << 40)
    size = sum(len(text.encode()) for text in texts) / 1e6
    column = pa.array(texts, pa.large_string())
    whole, _ = best(lambda: everything(column))
    some = corpus.texts(PEER_BYTES)
    small = sum(len(text.encode()) for text in some) / 1e6
    ours, _ = best(lambda: [datatrove_rules.dropped(signals, one) for signals in [datatrove_rules.measured(some)] for one in RULES])
    theirs, _ = best(lambda: datatrove_rules.dropped_by_datatrove(some))
    files = [Path(name) for name in os.environ.get("PUNA_TEXTS", "").split(":") if name]
    found = {"heuristics_mb_s": size / whole, "heuristics_vs_datatrove": theirs / ours, "datatrove_filters_mb_s": small / theirs}
    found |= agreement("sample", some)
    for file in files:
        found |= agreement(file.stem, texts_of(file))
    return found
