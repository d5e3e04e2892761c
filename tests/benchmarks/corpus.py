"""Real pages for the benchmarks: the demo's sample, extracted once into a store.

The store is the environment's PUNA_STORE, `.puna` otherwise: a store in which the demo ran is used as it is.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pyarrow as pa

from puna.storage import Artifact, Store


def store() -> Store:
    """The benchmarks' store."""
    return Store.open(Path(os.environ.get("PUNA_STORE", ".puna")))


def sample() -> list[Path]:
    """The sample's archives, in PUNA_SAMPLE or the store's `sample`; made where there are none."""
    from puna.stages.sample.build import build_sample

    folder = Path(os.environ.get("PUNA_SAMPLE", store().root / "sample"))
    if not list(folder.glob("*.warc.gz")):
        build_sample(folder, lambda done, total, note: None)
    return sorted(folder.glob("*.warc.gz"))


@cache
def extracted() -> Artifact:
    """The documents of the sample, before any filter."""
    from puna.stages.contract import External, execute
    from puna.stages.curate.extract import ExtractConfig, extract
    from puna.stages.curate.ingest import IngestConfig, ingest

    inputs = [found for file in sample() for found in External.resolve(str(file))]
    pages = execute(ingest, IngestConfig(), {"inputs": inputs}, store())
    return execute(extract, ExtractConfig(), {"pages": pages}, store())


def texts(limit: int, sources: tuple[str, ...] = ("web", "wikipedia")) -> list[str]:
    """Texts of the sample, evenly drawn over the ids, of at most `limit` bytes together."""
    table = extracted().read(columns=["source", "text"])
    table = table.filter(pa.array([source in sources for source in table["source"].to_pylist()]))
    found = [text for text in table["text"].to_pylist() if text]
    total = sum(len(text.encode()) for text in found)
    step = max(1, -(-total // limit))
    return found[::step]
