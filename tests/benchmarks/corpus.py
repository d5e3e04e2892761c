"""Real pages for the benchmarks: the demo's sample, extracted once into a store.

The store is the environment variable PUNA_STORE, else `.puna`; a store in which the demo has already run is reused.
"""

from __future__ import annotations

import os
import random
import re
from functools import cache
from pathlib import Path

import pyarrow as pa

from puna.storage import Artifact, Store

TEXT = re.compile(rb"<(script|style)\b.*?</\1\s*>|<[^>]*>|[^<]+", re.DOTALL | re.IGNORECASE)


def store() -> Store:
    """Return the store of the benchmarks."""
    return Store.open(Path(os.environ.get("PUNA_STORE", ".puna")))


def sample() -> list[Path]:
    """Return the sample's archives, from PUNA_SAMPLE or the store's folder `sample`; fetch them if they are missing."""
    from puna.flows.demo.build import build_sample

    folder = Path(os.environ.get("PUNA_SAMPLE", store().root / "sample"))
    if not list(folder.glob("*.warc.gz")):
        build_sample(folder, lambda done, total, note: None)
    return sorted(folder.glob("*.warc.gz"))


def larger(folder: Path, times: int) -> list[Path]:
    """Write archives to `folder` with `times` copies of the sample's pages; in all copies but the first, each text's words are shuffled.

    So languages, word frequencies, markup and lengths equal the sample's, and no page is a near-duplicate of another because of its copy.
    """
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    from puna.flows.demo.warc import Page, write_warc

    made = []
    for file in sample():
        pages = []
        with file.open("rb") as stream:
            for record in ArchiveIterator(stream, record_types=WarcRecordType.response):
                kind = record.http_headers["Content-Type"]
                pages.append(Page(record.headers["WARC-Target-URI"], record.record_date, kind, record.reader.read()))
        mixed = [
            Page(f"{page.url}-{time}", page.fetched_at, page.content_type, _shuffled(page.body, random.Random(time)))
            for time in range(1, times)
            for page in pages
        ]
        made.append(folder / file.name)
        write_warc(made[-1], pages + mixed, {"description": f"the sample {times} times, words shuffled"})
    return made


def _shuffled(page: bytes, chance: random.Random) -> bytes:
    """Return a page (HTML or text) with the words of each run of text shuffled; scripts and styles stay unchanged."""

    def mixed(found: re.Match[bytes]) -> bytes:
        words = found[0].split(b" ")
        chance.shuffle(words)
        return b" ".join(words)

    return TEXT.sub(lambda found: found[0] if found[0].startswith(b"<") else mixed(found), page)


@cache
def extracted() -> Artifact:
    """Return the sample's documents before any filter."""
    from puna.stages.contract import External, execute
    from puna.stages.curate.extract import ExtractConfig, extract
    from puna.stages.curate.ingest import IngestConfig, ingest

    inputs = [found for file in sample() for found in External.resolve(str(file))]
    pages = execute(ingest, IngestConfig(), {"inputs": inputs}, store())
    return execute(extract, ExtractConfig(), {"pages": pages}, store())


def texts(limit: int, sources: tuple[str, ...] = ("web", "wikipedia")) -> list[str]:
    """Return texts of the sample, drawn evenly over the ids, with at most `limit` bytes in total."""
    table = extracted().read(columns=["source", "text"])
    table = table.filter(pa.array([source in sources for source in table["source"].to_pylist()]))
    found = [text for text in table["text"].to_pylist() if text]
    total = sum(len(text.encode()) for text in found)
    step = max(1, -(-total // limit))
    return found[::step]
