"""Replay: all rules over the stored signals of a million documents, by DuckDB from Parquet.

The sample's signals are drawn with replacement and shaken by up to 2 %, so that no value compresses away. Seconds are
wall time, with DuckDB's default number of threads: every default rule but those on scores of models, each dropped
document's first rule with value and threshold as a table; and the same with one threshold changed.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

ROWS = 1_000_000


def write_signals(folder: Path, rows: int) -> None:
    """documents.parquet (id, source) and signals.parquet of `rows` documents below `folder`."""
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
    """Seconds of the best of three runs, and documents dropped."""
    import duckdb

    from puna.stages.curate.rules.sql import rules_sql
    from puna.stages.curate.select import SelectConfig

    with tempfile.TemporaryDirectory() as folder:
        write_signals(Path(folder), ROWS)
        times, dropped = [], 0
        for attempt in range(3):
            config = SelectConfig(gopher_quality={"min_words": 50 + attempt})
            query = rules_sql(config, f"'{folder}/documents.parquet'", f"'{folder}/signals.parquet'")
            with duckdb.connect() as connection:
                started = time.perf_counter()
                connection.execute(f"create table dropped as {query}")
                times.append(time.perf_counter() - started)
                dropped = connection.sql("select count(*) from dropped").fetchall()[0][0]
    return {"replay_seconds_1m": min(times), "replay_dropped_1m": float(dropped)}
