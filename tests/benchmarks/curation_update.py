"""`minhash_update`: the cost of adding 1 % of documents, compared with deduplicating all documents, which must give the same result.

    python tests/benchmarks/curation_update.py [--megabytes 170]

The documents are those of `curation_memory.py`; every hundredth is added later, and most added documents are edited copies of others or
have such copies. CPU seconds are those of whole stages on one thread, including the store's checksums and commits, each in a separate
process that has first run both stages on a few documents: compiled loops are loaded and character tables built. That start-up, which does
not depend on the size, is `minhash_update_start_seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEGABYTES = 170
ALL, OLD, NEW = (f"{n:064x}" for n in range(3))


def prepared(megabytes: int, folder: str) -> None:
    """Write all documents, the earlier ones and the added ones."""
    import curation_memory
    import numpy as np
    import pyarrow as pa

    from puna.storage import Identity, Store

    store = Store.open(Path(folder))
    whole = curation_memory.grown(megabytes, store, ALL)
    added = np.arange(whole.rows()) % 100 == 99
    for key, chosen in ((OLD, ~added), (NEW, added)):
        with store.work(key) as work:
            at = 0
            for number, batch in enumerate(whole.batches(rows=65_536)):
                work.add("documents", pa.table(batch).filter(pa.array(chosen[at : at + batch.num_rows])), f"made-{number:06d}")
                at += batch.num_rows
            work.commit("documents", key, Identity(stage="import"))


def measured(step: str, folder: str) -> None:
    """Run one stage and print its CPU seconds, documents and a digest of all verdicts as JSON."""
    from puna.stages.contract import StageConfig, execute
    from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
    from puna.stages.curate.minhash_update import minhash_update, verdicts
    from puna.storage import Store, digest

    store = Store.open(Path(folder))
    config = MinhashDedupConfig(keep_index=True)
    documents = {name: store.find("documents", key) for name, key in (("full", ALL), ("base", OLD), ("update", NEW))}
    given = {"documents": documents[step]}
    start = started_up(documents["update"].read().slice(0, 40))
    chain = [execute(minhash_dedup, config, {"documents": documents["base"]}, store)] if step == "update" else []
    started = time.process_time()
    if step == "update":
        chain.append(execute(minhash_update, StageConfig(), given | {"previous": list(chain)}, store))
    else:
        chain.append(execute(minhash_dedup, config, given, store))
    seconds = time.process_time() - started
    found = {i: [kept, similarity] for i, (kept, similarity) in verdicts(chain).items()}
    told = {"start": start, "seconds": seconds, "documents": documents[step].rows(), "removed": len(found)}
    print(json.dumps(told | {"verdicts": digest.of_value(found)}))


def started_up(few: Any) -> float:
    """Return the CPU seconds of running both stages on a few documents and copies of them, so that every loop is loaded."""
    import pyarrow as pa

    from puna.stages.contract import StageConfig, execute
    from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
    from puna.stages.curate.minhash_update import minhash_update
    from puna.storage import Store

    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(folder)
        copies = few.slice(0, 10)
        copies = copies.set_column(0, few.schema.field("id"), pa.array([f"{n:032x}" for n in range(copies.num_rows)]))
        rows = (few.slice(0, 20), pa.concat_tables([few.slice(20), copies]))
        old, new = (store.import_table("documents", some) for some in rows)
        base = execute(minhash_dedup, MinhashDedupConfig(keep_index=True), {"documents": old}, store)
        execute(minhash_update, StageConfig(), {"documents": new, "previous": [base]}, store)
    return time.process_time() - started


def figures(megabytes: int = MEGABYTES) -> dict[str, float]:
    """Return the CPU seconds of both, their ratio, the number of documents, and whether the verdicts are equal."""
    told = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("PUNA_SCRATCH")) as folder:
        for step in ("prepare", "base", "full", "update"):
            command = [sys.executable, str(HERE / "curation_update.py"), "--megabytes", str(megabytes), "--step", step, folder]
            told[step] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout or "{}")
    full, update = told["full"], told["update"]
    return {
        "minhash_update_documents": full["documents"],
        "minhash_update_added": update["documents"],
        "minhash_update_removed": full["removed"],
        "minhash_update_full_seconds": full["seconds"],
        "minhash_update_seconds": update["seconds"],
        "minhash_update_start_seconds": update["start"],
        "minhash_update_share": update["seconds"] / full["seconds"],
        "minhash_update_equal": float(full["verdicts"] == update["verdicts"]),
    }


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    parser.add_argument("--step", nargs=2, metavar=("STEP", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path[:0] = [str(HERE.parents[1] / ".pkg"), str(HERE)]
    if arguments.step:
        step, folder = arguments.step
        prepared(arguments.megabytes, folder) if step == "prepare" else measured(step, folder)
        return
    for name, value in figures(arguments.megabytes).items():
        print(f"{name:<28} {value:,.4g}")


if __name__ == "__main__":
    main()
