"""Line deduplication: MB of UTF-8 per CPU second on one thread.

`line_dedup_mb_s`: from the shards of a stored artifact (Parquet is read and decompressed) to the rewritten documents in memory: hashing,
counting, deciding, rewriting. `line_dedup_stage_mb_s`: the whole stage in a store that holds the documents, including its compressed,
checksummed artifact. Both are the best of several runs.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from puna.storage import Artifact

REPEATS = 5


def figures() -> dict[str, float]:
    """Return both speeds on the sample's texts."""
    import corpus
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    from puna.stages.curate import line_dedup as stage

    documents = corpus.extracted()
    size = sum(len(text.encode()) for text in documents.read(columns=["text"])["text"].to_pylist()) / 1e6
    config = stage.LineDedupConfig(exempt_sources=(), min_documents=0)
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
    return {"line_dedup_mb_s": size / min(times[1:]), "line_dedup_stage_mb_s": size / stage_seconds(documents, config)}


def stage_seconds(documents: Artifact, config: Any) -> float:
    """Return the minimum CPU seconds of the stage, from Parquet to Parquet."""
    from puna.stages.contract import execute
    from puna.stages.curate.line_dedup import line_dedup
    from puna.storage import Store

    least = float("inf")
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            store = Store.open(folder)
            shutil.copytree(documents.folder, store.files.local(documents.place))
            given = store.find(documents.kind, documents.key)
            assert given is not None
            started = time.process_time()
            execute(line_dedup, config, {"documents": given}, store)
            least = min(least, time.process_time() - started)
    return least
