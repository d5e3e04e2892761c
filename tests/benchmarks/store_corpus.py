"""Any number of generated documents for the store's figures: English words in lines, near-duplicates, repeated lines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from puna.storage import Artifact, Store

LINE_WORDS = 12
BATCH = 20_000
ENGLISH = """the of and that with which there have from this were about would their other into more some time than when these people
water between light house world under story while never night paper earth river cities trees family country plants music table
mountain government machine morning winter science animal language kitchen garden question evening history letter teacher
village weather market doctor forest island engine bridge winner purple silver golden simple modern ancient central distant
northern southern western famous common public private natural several certain different important possible similar recent
early large small young better greater shorter longer higher lower quickly slowly often always usually perhaps almost nearly
walked talked looked asked called moved lived opened closed started finished carried followed remembered understood decided
believed explained expected included produced provided received required returned reported changed travelled studied worked"""
WORDS = ENGLISH.split()
REPEATED = "All rights reserved, see the terms of use and the notes about this site."


def tables(count: int, lines: int, seed: int = 0) -> Iterator[pa.Table]:
    """Yield tables of `url` and `text` for `count` documents. Every tenth is a near-duplicate, every twentieth has the address of another
    one."""
    vocabulary = pa.array(WORDS)
    for first in range(0, count, BATCH):
        generator = np.random.default_rng((seed, first))
        rows = min(BATCH, count - first)
        chosen = generator.integers(0, len(WORDS), rows * lines * LINE_WORDS, dtype=np.int32)
        words = pa.DictionaryArray.from_arrays(pa.array(chosen), vocabulary).dictionary_decode()
        ends = pa.array(np.arange(rows * lines + 1, dtype=np.int32) * LINE_WORDS)
        each = pc.binary_join_element_wise(pc.binary_join(pa.ListArray.from_arrays(ends, words), " "), "", pa.scalar("."))
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * lines), each), "\n")
        joined = pc.binary_join_element_wise(REPEATED, joined, "\n")
        number = np.arange(rows)
        alike = number % 10 == 9
        text = pc.if_else(pa.array(alike), pc.binary_join_element_wise(joined.take(pa.array(np.where(alike, number - 7, number))), "The end.", "\n"), joined)
        address = [f"https://site{n % 997}.org/{n}" for m in (number + first).tolist() for n in [m - (m % 20 == 19)]]
        yield pa.table({"url": address, "text": text})


def write(folder: Path, count: int, lines: int, files: int = 8) -> int:
    """Write `count` documents as Parquet files for `ingest`; return the bytes of their texts."""
    folder.mkdir(parents=True)
    size, writers = 0, []
    for number, table in enumerate(tables(count, lines)):
        if len(writers) < files:
            writers.append(pq.ParquetWriter(folder / f"{number:02d}.parquet", table.schema, compression="zstd"))
        writers[number % files].write_table(table)
        size += pc.sum(pc.binary_length(table["text"])).as_py()
    for writer in writers:
        writer.close()
    return size


def made_up(store: Store, count: int, lines: int = 12) -> Artifact:
    """Return `count` generated documents as an artifact."""
    table = pa.concat_tables(tables(count, lines)).combine_chunks()
    ids = [hashlib.md5(str(n).encode()).hexdigest() for n in range(count)]
    more = {"id": ids, "fetched_at": [datetime(2026, 1, 1, tzinfo=UTC)] * count, "source": ["web"] * count,
            "title": pa.nulls(count, pa.string())}  # fmt: skip
    for name, values in more.items():
        table = table.append_column(name, pa.chunked_array([values]) if isinstance(values, pa.Array) else pa.array(values))
    return store.import_table("documents", table)


def chain(store: Store, documents: Artifact, executor: Any) -> list[Artifact]:
    """Run filters and deduplication one after another; return the artifacts."""
    from puna.stages.contract import execute
    from puna.stages.curate.line_dedup import LineDedupConfig, line_dedup
    from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
    from puna.stages.curate.url_dedup import UrlDedupConfig, url_dedup
    from puna.stages.curate.url_filter import UrlFilterConfig, url_filter

    made = [documents]
    for stage, config in (
        (url_filter, UrlFilterConfig()), (url_dedup, UrlDedupConfig()), (minhash_dedup, MinhashDedupConfig()),
        (line_dedup, LineDedupConfig(exempt_sources=(), min_documents=0)),
    ):  # fmt: skip
        made.append(execute(stage, config, {"documents": made[-1]}, store, executor=executor))
    return made
