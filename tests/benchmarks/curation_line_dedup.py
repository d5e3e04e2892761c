"""Line dedup: MB of UTF-8 per CPU second on one thread.

`line_dedup_mb_s`: from parts of a stored artifact (Parquet is read and decompressed) to the rewritten documents in
memory: hashing, counting in files of hashes, deciding, rewriting. `line_dedup_stage_mb_s`: the whole stage, its
compressed, checksummed artifact included.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path


def figures() -> dict[str, float]:
    """Both speeds over the sample's texts."""
    import corpus

    from puna.stages.contract import execute
    from puna.stages.curate import line_dedup as stage
    from puna.storage import Store

    documents = corpus.extracted()
    size = sum(len(text.encode()) for text in documents.read(columns=["text"])["text"].to_pylist()) / 1e6
    config = stage.LineDedupConfig(sources_exempt=(), min_documents=0)
    with tempfile.TemporaryDirectory() as folder:
        parts = documents.parts(columns=["id", "source", "text"])
        sizes = stage._sizes(documents.rows(), config.bucket_documents)
        starts = {part.read()["id"][0].as_py(): part.start for part in parts}

        def work(into: Path) -> None:
            into.mkdir()
            counted = [one for part in parts for one in stage._count(part, config, str(into))]
            found = [stage._frequent(job, config, sizes) for job in stage._jobs(counted)]
            files = {0: stage._save(into / "frequent.npy", found)}
            for part in documents.parts():
                stage._remove(part.read(), config, files, sizes, starts)

        times = []
        for attempt in range(4):
            started = time.process_time()
            work(Path(folder) / str(attempt))
            times.append(time.process_time() - started)
        started = time.process_time()
        execute(stage.line_dedup, config, {"documents": documents}, Store.open(Path(folder) / "store"))
        whole = time.process_time() - started
    return {"line_dedup_mb_s": size / min(times[1:]), "line_dedup_stage_mb_s": size / whole}
