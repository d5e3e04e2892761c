"""datatrove's four MinHash stages over texts in memory, in its own environment: seconds and kept texts as JSON."""

from __future__ import annotations

import json
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
    """Read {"texts": [...]} from the given file; print the seconds and the kept texts."""
    logger.remove()
    texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["texts"]
    config = MinhashConfig()
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as work:
        signature = MinhashDedupSignature(f"{work}/signatures", config)
        signature.word_tokenizer.word_tokenize("load the tokenizer")
        started = time.process_time()
        signature.run(iter(documents))
        for bucket in range(config.num_buckets):
            MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=config).run(None, bucket, config.num_buckets)
        MinhashDedupCluster(f"{work}/buckets", f"{work}/remove", config=config).run(None, 0, 1)
        kept = [document.id for document in MinhashDedupFilter(f"{work}/remove").run(iter(documents))]
        seconds = time.process_time() - started
    print(json.dumps({"seconds": seconds, "kept": len(kept)}))


if __name__ == "__main__":
    main()
