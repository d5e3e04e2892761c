"""Line dedup: MB of UTF-8 per CPU second on one thread.

`line_dedup_mb_s`: from parts of a stored artifact (Parquet is read and decompressed) to the rewritten documents in memory:
hashing, counting, deciding, rewriting. `line_dedup_stage_mb_s`: the whole stage, its compressed, checksummed artifact included.
"""

from __future__ import annotations

import tempfile
import time
from types import SimpleNamespace


def figures() -> dict[str, float]:
    """Both speeds over the sample's texts."""
    import corpus
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    from puna.stages.contract import execute
    from puna.stages.curate import line_dedup as stage
    from puna.storage import Store

    documents = corpus.extracted()
    size = sum(len(text.encode()) for text in documents.read(columns=["text"])["text"].to_pylist()) / 1e6
    config = stage.LineDedupConfig(sources_exempt=(), min_documents=0)
    sizes = stage._sizes(documents.rows(), config.bucket_documents)

    def work() -> None:
        pieces = pa.concat_tables(found for part in documents.parts() for found in stage._pieces(part, config))
        frequent, _ = stage._frequent(SimpleNamespace(read=lambda: pieces), config, sizes, np.zeros(1, np.int64))  # type: ignore[arg-type]
        for part in documents.parts():
            own = frequent.filter((pc.field("row") >= part.start) & (pc.field("row") < part.stop))
            own = own.set_column(1, "row", pc.subtract(own["row"], part.start))
            stage._remove(part.read(), own, config, sizes, dict.fromkeys(sizes, 0))

    times = []
    for _ in range(4):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        execute(stage.line_dedup, config, {"documents": documents}, Store.open(folder))
        whole = time.process_time() - started
    return {"line_dedup_mb_s": size / min(times[1:]), "line_dedup_stage_mb_s": size / whole}
