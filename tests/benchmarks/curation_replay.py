"""Replay: all rules applied to the stored signals of a million documents, read from Parquet.

The sample's signals are drawn with replacement and changed by up to 2 %, so that repeated values do not compress away. Seconds are wall
time: for every default rule except those on scores of models, with each dropped document's first rule, value and threshold as a table; and
for the same with one threshold changed.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

ROWS = 1_000_000


def write_signals(folder: Path, rows: int) -> None:
    """Write documents.parquet (id, source) and signals.parquet of `rows` documents to `folder`."""
    import corpus
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from puna.stages.contract import execute
    from puna.stages.curate.heuristics import HeuristicsConfig, heuristics

    documents = corpus.extracted()
    signals = execute(heuristics, HeuristicsConfig(), {"documents": documents}, corpus.store()).read()
    generator = np.random.default_rng(0)
    drawn = pa.array(generator.integers(0, signals.num_rows, rows))
    ids = pa.array([f"{n:032x}" for n in range(rows)])
    columns: dict[str, pa.Array] = {"id": ids}
    for name in signals.column_names[1:]:
        values = signals[name].combine_chunks().take(drawn)
        if pa.types.is_floating(values.type):
            values = pa.compute.multiply(values, generator.uniform(0.98, 1.02, rows))
        columns[name] = values
    pq.write_table(pa.table(columns), folder / "signals.parquet", compression="zstd")
    source = documents.read(columns=["source"])["source"].combine_chunks().take(drawn)
    pq.write_table(pa.table({"id": ids, "source": source}), folder / "documents.parquet", compression="zstd")


def figures() -> dict[str, float]:
    """Return the seconds of the best of three runs, and the number of dropped documents."""
    import pyarrow.parquet as pq

    from puna.stages.curate.rules.decide import decide
    from puna.stages.curate.rules.groups import active_rules
    from puna.stages.curate.select import SelectConfig

    with tempfile.TemporaryDirectory() as folder:
        write_signals(Path(folder), ROWS)
        times, dropped = [], 0
        for attempt in range(3):
            config = SelectConfig(gopher_quality={"min_words": 50 + attempt})
            started = time.perf_counter()
            rules = list(active_rules(config))
            table = pq.read_table(f"{folder}/signals.parquet", columns=["id", *dict.fromkeys(n for rule in rules for n in rule.signals)])
            source = pq.read_table(f"{folder}/documents.parquet", columns=["source"])["source"]
            dropped = decide(table.append_column("source", source), rules).num_rows
            times.append(time.perf_counter() - started)
    return {"replay_seconds_1m": min(times), "replay_dropped_1m": float(dropped)}
