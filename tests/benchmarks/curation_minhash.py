"""Near-duplicates: speed compared with datatrove and rensa on the same texts, and recall compared with brute force.

    python tests/benchmarks/curation_minhash.py [--json]

Every measurement starts from raw texts in memory and ends with the documents to remove, in process CPU seconds on one thread. datatrove's
four stages write and read their own files; Puna verifies each candidate, rensa and datatrove do not. `minhash_stage_*` are for the whole
stage, from Parquet to Parquet. Edited copies of texts are added, so that there are duplicates to find.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

HERE = Path(__file__).parent
SPEED_BYTES = 6_000_000
RECALL_TEXTS = 1500
REPEATS = 5


def edited(text: str, generator: random.Random) -> str:
    """Return a copy with up to one word in thirty replaced, omitted or inserted."""
    words = text.split(" ")
    for _ in range(int(len(words) * generator.uniform(0, 1 / 30))):
        place = generator.randrange(len(words))
        words[place : place + generator.randrange(2)] = [f"new{generator.randrange(10**6)}"] * generator.randrange(2)
    return " ".join(words)


def corpus(limit: int) -> list[str]:
    """Return texts of the sample, and edited copies of every tenth text."""
    import corpus

    generator = random.Random(0)
    found: list[str] = corpus.texts(limit)
    return found + [edited(text, generator) for text in found[::10]]


def best(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the minimum CPU seconds of several calls, and the result; the first call compiles."""
    result = function()
    least = float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        result = function()
        least = min(least, time.process_time() - started)
    return least, result


def prepare() -> None:
    """Check that the peers' environments exist."""
    import peers

    for name in ("datatrove", "rensa"):
        peers.python(name)


def near_duplicates(texts: list[str]) -> Any:
    """Return what `minhash_dedup` would remove among texts in memory, as positions; the longest is preferred, then the first."""
    from puna.stages.curate.minhash.config import MinhashDedupConfig
    from puna.stages.curate.minhash.decide import at_once

    column = pa.chunked_array([pa.array(texts, pa.large_string())])
    table = pa.table({"text": column, "fetched_at": np.zeros(len(column), np.int64), "source": pa.repeat("", len(column))})
    return at_once(table, None, MinhashDedupConfig())[0]


def figures() -> dict[str, float]:
    """Return ratios (above 1: Puna is faster), CPU seconds of each side, and recall."""
    import peers

    texts = corpus(SPEED_BYTES)
    own, _ = best(lambda: near_duplicates(texts))
    stage = stage_seconds(texts)
    datatrove = peers.run("datatrove", "peer_minhash_datatrove.py", texts=texts)
    rensa = peers.run("rensa", "peer_minhash_rensa.py", texts=texts)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    return {
        "minhash_vs_datatrove": datatrove["seconds"] / own,
        "minhash_stage_vs_datatrove": datatrove["seconds"] / stage,
        "minhash_vs_rensa": rensa["seconds"] / own,
        "minhash_mb_s": megabytes / own,
        "minhash_seconds": own,
        "minhash_stage_seconds": stage,
        "minhash_datatrove_seconds": datatrove["seconds"],
        "minhash_rensa_seconds": rensa["seconds"],
        **recall(),
    }


def stage_seconds(texts: list[str]) -> float:
    """Return the minimum CPU seconds of the stage, from Parquet to Parquet."""
    import pyarrow as pa

    from puna.stages.contract import execute
    from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
    from puna.storage import Store

    when = datetime(2024, 1, 1, tzinfo=UTC)
    rows = [
        {"id": f"{n:08d}", "url": f"https://x.org/{n}", "fetched_at": when, "source": "web", "title": None, "text": text}
        for n, text in enumerate(texts)
    ]
    least = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(REPEATS):
            store = Store.open(Path(folder) / str(number))
            documents = store.import_table("documents", pa.Table.from_pylist(rows))
            started = time.process_time()
            execute(minhash_dedup, MinhashDedupConfig(), {"documents": documents}, store)
            least = min(least, time.process_time() - started)
    return least


def recall() -> dict[str, float]:
    """Return the share of pairs with a Jaccard similarity of at least 0.8 (by brute force over Python sets) of which one is removed; the
    number of removed documents less similar to their survivor; and the number of all removed documents."""
    from puna.kernels.text.shingles import normalize

    texts = corpus(SPEED_BYTES)[-RECALL_TEXTS:]
    generator = random.Random(1)
    texts += [edited(text, generator) for text in texts]
    sets = []
    for text in texts:
        words = normalize(text).split()
        sets.append({tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))} if words else set())
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    shared: Counter[tuple[int, int]] = Counter()
    for number, one in enumerate(sets):
        for shingle in one:
            for other in holders[shingle]:
                shared[other, number] += 1
            holders[shingle].append(number)
    similarity = {(i, j): n / (len(sets[i]) + len(sets[j]) - n) for (i, j), n in shared.items()}
    pairs = [pair for pair, value in similarity.items() if value >= 0.8]
    found = near_duplicates(texts)
    gone = set(found.removed.tolist())
    wrong = sum(similarity.get((min(a, b), max(a, b)), 0.0) < 0.8 for a, b in zip(found.removed.tolist(), found.kept.tolist(), strict=True))
    return {
        "minhash_recall": sum(i in gone or j in gone for i, j in pairs) / len(pairs),
        "minhash_recall_pairs": float(len(pairs)),
        "minhash_unjustified": float(wrong),
        "minhash_removed": float(len(gone)),
    }


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object of named figures")
    arguments = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # before numpy is imported
    sys.path[:0] = [str(HERE.parents[1] / ".pkg"), str(HERE)]
    prepare()
    found = figures()
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<28} {value:,.4g}")


if __name__ == "__main__":
    main()
