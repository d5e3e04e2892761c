"""The store's figures: what text is kept, what the driver does, what is found again and how fast.

python tests/benchmarks/store.py --json [--documents 20000] [--artifacts 10000] [--flips 500] [--store FINISHED_STORE]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from puna.stages.contract import execute
from puna.storage import Artifact, Store, catalog

WORDS = [hashlib.md5(str(n).encode()).hexdigest()[: 3 + n % 6] for n in range(5000)]


def made_up(store: Store, count: int, seed: int = 0) -> Artifact:
    """Documents of about a kilobyte; every tenth is a near-duplicate of another one, every twentieth has its address."""
    generator = np.random.default_rng(seed)
    ids = [hashlib.md5(f"{seed}-{n}".encode()).hexdigest() for n in range(count)]
    texts: list[str] = []
    for n in range(count):
        if n % 10 == 9:
            texts.append(texts[n - 7] + " the end")
            continue
        lines = [" ".join(WORDS[w] for w in generator.integers(0, len(WORDS), 12)) for _ in range(12)]
        texts.append("\n".join(["All rights reserved, terms of use", *lines]))
    urls = [f"https://site{n % 997}.org/{n}" for m in range(count) for n in [m - (m % 20 == 19)]]
    table = {"id": ids, "url": urls, "fetched_at": [datetime(2026, 1, 1, tzinfo=UTC)] * count, "source": ["web"] * count,
             "title": pa.array([None] * count, pa.string()), "text": texts}  # fmt: skip
    return store.import_table("documents", pa.table(table))


def chain(store: Store, documents: Artifact, executor: Any) -> list[Artifact]:
    """Filters and deduplication, one after another."""
    from puna.stages.curate.line_dedup import LineDedupConfig, line_dedup
    from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
    from puna.stages.curate.url_dedup import UrlDedupConfig, url_dedup
    from puna.stages.curate.url_filter import UrlFilterConfig, url_filter

    made = [documents]
    for stage, config in (
        (url_filter, UrlFilterConfig()), (url_dedup, UrlDedupConfig()), (minhash_dedup, MinhashDedupConfig()),
        (line_dedup, LineDedupConfig(sources_exempt=(), min_documents=0)),
    ):  # fmt: skip
        made.append(execute(stage, config, {"documents": made[-1]}, store, executor=executor))
    return made


def driven(folder: Path, documents: int, workers: int) -> dict[str, float]:
    """In a process of its own: the driver's share of CPU time and its peak memory, over the chain."""
    from puna.stages.contract.executors import local

    store = Store.open(folder)
    base = next(a for a in store.artifacts() if a.manifest.stage == "import")
    executor = local(workers)
    cpu = time.process_time()
    started = time.perf_counter()
    made = chain(store, base, executor)
    own = time.process_time() - cpu
    seconds = time.perf_counter() - started
    if executor is not None:
        executor.shutdown()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own + children.ru_utime + children.ru_stime
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    content = hashlib.sha256("".join(a.key + a.data_digest for a in made[1:]).encode()).hexdigest()
    return {"driver_cpu_share": own / total, "driver_peak_mb": peak, "seconds": seconds, "content": content}  # type: ignore[dict-item]


def drivers(documents: int) -> dict[str, Any]:
    """The chain with 1, 2 and 4 processes: what the driver does, and whether keys and digests are the same."""
    found, contents = {}, set()
    for workers in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            made_up(Store.open(folder), documents)
            words = [sys.executable, __file__, "--driven", folder, "--documents", str(documents), "--workers", str(workers)]
            told = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        contents.add(told.pop("content"))
        if workers == 2:
            found = told
    return {**found, "same_bytes": float(len(contents) == 1)}


def connecting(artifacts: int) -> float:
    """Seconds to open the catalog of a store of so many artifacts, when most of it was opened before."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(folder)
        with mock.patch("os.fsync", lambda descriptor: None):  # the artifacts need not outlive a loss of power
            for number in range(artifacts):
                store.import_table("prompts", pa.table({
                    "id": [f"{number}"], "task": ["t"], "split": ["train"], "messages": ["[]"], "tools": pa.array([None], pa.string()),
                    "reference": pa.array([None], pa.string()), "verifier": pa.array([None], pa.string())}))  # fmt: skip
        catalog.query(store, "select count(*) from artifacts")
        started = time.perf_counter()
        assert catalog.query(store, "select count(*) as n from artifacts")["n"][0].as_py() == artifacts
        return time.perf_counter() - started


def text_copies(store: Store) -> float:
    """Bytes of text that the documents of a store take, over those of its last documents."""
    found = [a for a in store.artifacts() if a.kind == "documents"]
    final = sum(len(t.encode()) for b in found[-1].batches(columns=["text"]) for t in b["text"].to_pylist())
    own = sum(len(t.encode()) for a in found for shard in a.shards() if shard.stored[0] is not None
              for t in shard.stored[0].read(range(len(shard.stored[0].groups)), ["text"])["text"].to_pylist())  # fmt: skip
    return own / final


def flipped(trials: int) -> dict[str, int]:
    """How many of so many flips in what a killed run left end in a committed artifact of other content."""
    from puna.stages.contract import run as module
    from puna.stages.curate.url_filter import UrlFilterConfig, url_filter

    generator, wrong, original = np.random.default_rng(0), 0, module.transformed
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = Store.open(folder)
        base = made_up(store, 12_000)
        given = {"documents": base}
        config = UrlFilterConfig(blocked=("site5.org", "site7.org"))
        expected = execute(url_filter, config, given, store)
        for _ in range(trials):
            store.files.remove(expected.place)
            with mock.patch.object(module, "transformed", _stopped(original, 3)), contextlib.suppress(KeyboardInterrupt):
                execute(url_filter, config, given, store)
            left = sorted(f for f in (Path(folder) / "work").rglob("*") if f.is_file() and "parts" in f.parts)
            file = left[int(generator.integers(len(left)))]
            data = bytearray(file.read_bytes())
            data[int(generator.integers(len(data)))] ^= 1 << int(generator.integers(8))
            file.write_bytes(bytes(data))
            made = execute(url_filter, config, given, store)
            wrong += made.manifest.files != expected.manifest.files or bool(made.damage())
    return {"staged_flips_wrong": wrong, "staged_flips": trials}


def _stopped(original: Callable[[Any], Any], shards: int) -> Callable[[Any], Any]:
    left = iter(range(shards))

    def failing(task: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return original(task)

    return failing


def states(trials: int) -> dict[str, int]:
    """How many training states with a flipped bit are loaded."""
    import torch

    from puna.models.training.state import load_state, save_state

    generator, loaded = np.random.default_rng(0), 0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for trial in range(trials):
            made = save_state(Path(folder) / str(trial), 1, {"w": torch.randn(64, 64)}, {"log": []})
            file = sorted(made.iterdir())[trial % 2]
            data = bytearray(file.read_bytes())
            data[int(generator.integers(len(data)))] ^= 1 << int(generator.integers(8))
            file.write_bytes(bytes(data))
            loaded += load_state(Path(folder) / str(trial)) is not None
    return {"training_state_flips_loaded": loaded, "training_state_flips": trials}


def reuse(documents: int) -> float:
    """Seconds to find every artifact of the chain again."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(folder)
        base = made_up(store, documents)
        chain(store, base, None)
        started = time.perf_counter()
        chain(store, base, None)
        return time.perf_counter() - started


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    for name, default in (("documents", 20_000), ("artifacts", 10_000), ("flips", 500), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--store")
    parser.add_argument("--driven")
    asked = parser.parse_args()
    if asked.driven:
        print(json.dumps(driven(Path(asked.driven), asked.documents, asked.workers)))
        return
    figures: dict[str, Any] = drivers(asked.documents)
    figures |= {"chain_reuse_seconds": reuse(asked.documents), **flipped(asked.flips), **states(min(100, asked.flips))}
    figures["sql_connect_s"] = connecting(asked.artifacts)
    figures["artifacts"] = asked.artifacts
    if asked.store:
        figures["text_copies"] = text_copies(Store.open(asked.store))
    print(json.dumps({"documents": asked.documents, "cores": os.cpu_count(), **figures}, indent=1))


if __name__ == "__main__":
    main()
