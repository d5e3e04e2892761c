"""datatrove's four MinHash stages over texts in memory, in its own environment: seconds, signatures, clusters as JSON."""

from __future__ import annotations

import json
import struct
import sys
import tempfile
import time
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.utils.logging import logger


def main() -> None:
    """Read {"texts": [...]} from the file given; print what was found."""
    logger.remove()
    texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["texts"]
    config = MinhashConfig()
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as work:
        signature = MinhashDedupSignature(f"{work}/signatures", config)
        signature.word_tokenizer.word_tokenize("load the tokeniser")
        started = time.process_time()
        signature.run(iter(documents))
        for bucket in range(config.num_buckets):
            MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=config).run(None, bucket, config.num_buckets)
        MinhashDedupCluster(f"{work}/buckets", f"{work}/remove", config=config, save_cluster_id=True).run(None, 0, 1)
        kept = [document.id for document in MinhashDedupFilter(f"{work}/remove").run(iter(documents))]
        seconds = time.process_time() - started
        pairs = {pair[1::2] for file in Path(work, "buckets").glob("*.dups") for pair in struct.iter_unpack("<4I", file.read_bytes())}
        clusters = list(struct.iter_unpack("<2I", Path(work, "remove", "000000.clusters").read_bytes()))
    rows = [signature.get_shingles(text) for text in texts[:500]]
    signatures = [[v for bucket in signature.get_signature(s) for v in bucket] if s.size else None for s in rows]
    found = {"seconds": seconds, "kept": len(kept), "edges": sorted(pairs), "clusters": clusters, "signatures": signatures}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
