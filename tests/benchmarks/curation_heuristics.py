"""Heuristics: every signal in one pass, against datatrove's four filters on the same texts.

`heuristics_mb_s`: all signals of texts in memory with the default splitter, divergence from the corpus included.
`heuristics_vs_datatrove`: datatrove's seconds for Gopher repetition, Gopher quality, C4 and FineWeb over Puna's for all
signals with datatrove's words and the four sets of rules. `heuristics_equal`: share of (document, filter) with the same
decision and reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PEER_BYTES = 1_500_000
REPEATS = 3
PART = 1024


def best(function: Callable[[], Any]) -> tuple[float, Any]:
    """Least CPU seconds of some calls, and the result; the first call compiles."""
    result, least = function(), float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        result = function()
        least = min(least, time.process_time() - started)
    return least, result


def measured(texts: Any, splitter: str) -> list[Any]:
    """Measurements part by part, as the stage makes them."""
    from puna.stages.curate.signals.measure import measure

    return [measure(texts.slice(at, PART), splitter, 5, 0.5) for at in range(0, len(texts), PART)]


def everything(texts: Any) -> None:
    """All signals: measurements, then the divergence from the whole."""
    import numpy as np

    from puna.stages.curate.signals.divergence import BINS, Corpus

    parts = measured(texts, "universal")
    total = np.zeros(BINS, np.int64)
    for part in parts:
        total += np.bincount(part.bins, weights=part.counts, minlength=BINS).astype(np.int64)
    corpus = Corpus.of(total)
    for part in parts:
        corpus.divergences(np.arange(len(part.values)), part.bin_offsets, part.bins, part.counts)


def decided(texts: Any) -> dict[str, list[str | None]]:
    """The reason for which each text goes by each of datatrove's sets, None where it stays."""
    import numpy as np
    import pyarrow as pa

    from puna.stages.curate.rules.decide import decide
    from puna.stages.curate.rules.groups import active_rules
    from puna.stages.curate.rules.sets import DATATROVE_REASONS, RULE_SETS
    from puna.stages.curate.select import SelectConfig
    from puna.stages.curate.signals.measure import NAMES

    values = np.concatenate([part.values for part in measured(texts, "datatrove")])
    ids = [str(n) for n in range(len(texts))]
    table = pa.table({"id": ids, "source": ["web"] * len(ids), **dict(zip(NAMES, values.T, strict=True))})
    out: dict[str, list[str | None]] = {}
    for name in RULE_SETS["datatrove"]:
        off = dict.fromkeys(field for field in SelectConfig.model_fields if field not in ("rule_set", name))
        dropped = decide(table, list(active_rules(SelectConfig(rule_set="datatrove", **off))))
        rules = dict(zip(dropped["id"].to_pylist(), dropped["rule"].to_pylist(), strict=True))
        out[name] = [DATATROVE_REASONS[rules[i]] if i in rules else None for i in ids]
    return out


def prepare() -> None:
    """See that the peer is there."""
    import peers

    peers.python("datatrove")


def figures() -> dict[str, float]:
    """Speeds in MB of UTF-8 per CPU second on one thread, ratio and agreement."""
    import corpus
    import peers
    import pyarrow as pa

    texts = corpus.texts(1 << 40)
    size = sum(len(text.encode()) for text in texts) / 1e6
    column = pa.array(texts, pa.large_string())
    universal, _ = best(lambda: everything(column))
    datatrove, _ = best(lambda: measured(column, "datatrove"))

    some = corpus.texts(PEER_BYTES)
    small = sum(len(text.encode()) for text in some) / 1e6
    seconds, ours = best(lambda: decided(pa.array(some, pa.large_string())))
    theirs = peers.run("datatrove", "peer_heuristics_datatrove.py", texts=some)
    pairs = [(a, b) for name in ours for a, b in zip(ours[name], theirs["reasons"][name], strict=True)]
    return {
        "heuristics_mb_s": size / universal,
        "heuristics_datatrove_words_mb_s": size / datatrove,
        "heuristics_vs_datatrove": theirs["seconds"] / seconds,
        "datatrove_filters_mb_s": small / theirs["seconds"],
        "heuristics_equal": sum(a == b for a, b in pairs) / len(pairs),
    }
