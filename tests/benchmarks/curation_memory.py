"""Out-of-core operation: peak memory and speed of `minhash_dedup` on corpora of growing size, each in a separate process.

    python tests/benchmarks/curation_memory.py [--megabytes 64 256 1024]

The corpora consist of copies of the sample's texts in which every third word is replaced, so that they are not near-duplicates of each
other, and of one edited copy of every tenth document. Memory is the process's peak resident set size minus its size after importing and
compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from puna.storage import Artifact, Store

HERE = Path(__file__).parent
MEGABYTES = (64, 256)
CHUNK = 500


def peak() -> float:
    """Return the peak resident set size of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def grown(megabytes: int, store: Store, key: str) -> Artifact:
    """Return an artifact of `megabytes` MB of documents, written a few hundred documents at a time."""
    import corpus
    import pyarrow as pa

    from puna.storage import Identity
    from puna.storage.schemas import table_schema

    texts = [text.split(" ") for text in corpus.texts(4_000_000)]
    schema, when = table_schema("documents").schema, datetime(2024, 1, 1, tzinfo=UTC)
    written = number = 0
    with store.work(key) as work:
        while written < megabytes * 1_000_000:
            rows = []
            for _ in range(CHUNK):
                copy, at = divmod(number, len(texts))
                if number % 10 == 9:
                    text = rows[-1]["text"] + f" edited {number}" if rows else ""
                else:
                    words = list(texts[at])
                    words[copy % 3 :: 3] = [f"{word}{copy}" for word in words[copy % 3 :: 3]]
                    text = " ".join(words) if copy else " ".join(texts[at])
                rows.append({"id": f"{number * 2654435761 % 2**32:08x}{number:08x}", "url": f"https://x.org/{number}", "fetched_at": when,
                             "source": "web", "title": None, "text": text})  # fmt: skip
                written += len(text.encode())
                number += 1
            work.add("documents", pa.Table.from_pylist(rows, schema=schema), f"made-{number:09d}")
        return work.commit("documents", key, Identity(stage="import"))


def measured(megabytes: int, folder: str) -> None:
    """Print the peak memory and CPU seconds of one size as JSON."""
    from puna.stages.contract import execute
    from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
    from puna.storage import Store

    store = Store.open(Path(folder))
    documents = store.find("documents", f"{megabytes:064x}")
    if documents is None:
        grown(megabytes, store, f"{megabytes:064x}")
        print(json.dumps({}))
        return
    started, before = time.process_time(), peak()
    made = execute(minhash_dedup, MinhashDedupConfig(), {"documents": documents}, store)
    seconds = time.process_time() - started
    print(json.dumps({"documents": documents.rows(), "removed": made.rows("dropped"), "seconds": seconds, "peak_mb": peak() - before}))


def figures(sizes: tuple[int, ...] = MEGABYTES) -> dict[str, float]:
    """Return the peak memory (MB) and speed of each size."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("PUNA_SCRATCH")) as folder:
        for size in sizes:
            for _ in range(2):  # the first process creates the corpus
                command = [sys.executable, str(HERE / "curation_memory.py"), "--one", str(size), folder]
                out = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ).stdout
            told = json.loads(out)
            found |= {f"minhash_{size}mb_{name}": value for name, value in told.items()}
            found[f"minhash_{size}mb_mb_s"] = size / told["seconds"]
    return found


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=MEGABYTES)
    parser.add_argument("--one", nargs=2, metavar=("MEGABYTES", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path[:0] = [str(HERE.parents[1] / ".pkg"), str(HERE)]
    if arguments.one:
        measured(int(arguments.one[0]), arguments.one[1])
        return
    for name, value in figures(tuple(arguments.megabytes)).items():
        print(f"{name:<28} {value:,.4g}")


if __name__ == "__main__":
    main()
