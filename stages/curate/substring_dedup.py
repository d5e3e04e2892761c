"""`substring_dedup`: removal of passages that repeat word for word, within and across documents."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, StageConfig, StageRun, stage
from puna.storage import Part
from puna.storage.exchange import Partition, partitions
from puna.storage.parts import ShardRows
from puna.storage.schemas import table_schema

JOB_ROWS = 1 << 17
WINDOW_BYTES = 4  # approximate bytes per character of text: each word has the hash and the position of a window


class SubstringDedupConfig(StageConfig):
    words: int = Field(50, ge=2, le=10_000, description="Minimum length of a repeated passage to remove, in words")
    min_words: int = Field(20, ge=0, description="Minimum words left in a document that loses a passage; otherwise it is dropped")
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are neither searched nor changed")


@stage(kind="documents", filters="documents")
def substring_dedup(documents: Documents, config: SubstringDedupConfig, run: StageRun) -> None:
    """Remove all but the first occurrence, in id order, of passages of at least `words` words (Lee et al. 2021, ExactSubstr).

    White space is ignored. `removed_spans` has every removed passage. A document is dropped if too few words remain. To bound memory, the
    hashes of word windows are partitioned by value. A repeated window then goes to the shard of its first occurrence, which adds that
    document's id, and on to its own shard."""
    shards = documents.shards()
    starts, size = np.cumsum([0, *(shard.rows for shard in shards[:-1])]), partitions(WINDOW_BYTES * documents.record().characters)
    parts = documents.parts(columns=["source", "text"], rows=JOB_ROWS)
    windows = run.exchange(_windows, parts, config, by="hash", partitions=size)
    repeated = run.exchange(_repeats, windows.nonempty_parts, starts, by="shard", partitions=max(1, len(shards)))
    first = [(shard, own) for shard, own in zip(shards, repeated.parts, strict=False) if shard.rows]
    copies = run.exchange(_with_ids, first, starts, by="shard", partitions=max(1, len(shards)))
    run.transform(_cut, documents, copies, config)
    run.metric("repeated_windows", sum(repeated.infos))


def _window_hashes(texts: pa.ChunkedArray, config: SubstringDedupConfig) -> tuple[Any, ...]:
    from puna.kernels.text.strings import buffers
    from puna.kernels.text.windows import window_hashes

    data, offsets = buffers(texts)
    return (*window_hashes(data, offsets, config.words), data, offsets)


def _windows(part: Part, config: SubstringDedupConfig) -> Iterator[pa.Table]:
    for block in part.split():
        table = block.read()
        rows = np.flatnonzero(~np.asarray(pc.is_in(table["source"], pa.array(config.exempt_sources, pa.string()))))
        hashes, offsets, *_ = _window_hashes(table["text"].take(pa.array(rows)), config)
        counts = np.diff(offsets)
        number = np.arange(len(hashes)) - np.repeat(offsets[:-1], counts)
        yield pa.table({"hash": hashes, "row": np.repeat(rows, counts) + block.start, "window": number.astype(np.int32)})


def _repeats(windows: Partition, starts: NDArray[np.int64]) -> tuple[pa.Table, int]:
    """Return all windows except the first of each hash, each with the first one's shard and row; and the number of repeated hashes."""
    table = windows.read()
    hashes, row, number = (table[name].to_numpy() for name in ("hash", "row", "window"))
    order = np.argsort(hashes, kind="stable")  # windows are in row order
    again = np.append(False, np.diff(hashes[order]) == 0) if len(order) else np.zeros(0, bool)
    begins = np.flatnonzero(~again)
    first = row[order[begins[np.cumsum(~again) - 1]]][again]
    shard = np.searchsorted(starts, first, side="right") - 1
    at = order[again]
    columns = {"shard": shard.astype(np.int32), "first": first - starts[shard], "row": row[at], "window": number[at]}
    return pa.table(columns), int(np.count_nonzero(np.diff(again.astype(np.int8)) > 0))


def _with_ids(item: tuple[ShardRows, Partition], starts: NDArray[np.int64]) -> pa.Table:
    """Return repeated windows with their own shard, and the id of the document in `item`'s shard with the window's first occurrence."""
    shard, repeated = item
    table = repeated.read()
    row = table["row"].to_numpy()
    own = np.searchsorted(starts, row, side="right") - 1
    first_ids = shard.read(0, shard.rows, ["id"])["id"].take(table["first"])
    return pa.table({"shard": own.astype(np.int32), "row": row - starts[own], "window": table["window"], "kept_id": first_ids})


def _cut(documents: pa.Table, repeated: pa.Table, config: SubstringDedupConfig) -> dict[str, pa.Table]:
    repeated = repeated.sort_by([("row", "ascending"), ("window", "ascending")])
    row, window = (repeated[name].to_numpy() for name in ("row", "window"))
    rows, first = np.unique(row, return_index=True)
    *_, begins, ends, words, data, offsets = _window_hashes(documents["text"].take(pa.array(rows)), config)
    ids, texts = documents["id"].to_pylist(), documents["text"].to_pylist()
    keep = np.ones(len(ids), bool)
    spans: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    for d, (low_row, high_row) in enumerate(pairwise([*first.tolist(), len(row)])):
        gone, at = window[low_row:high_row], int(rows[d])
        covered = np.zeros(words[d + 1] - words[d] + 1, np.int64)
        np.add.at(covered, gone, 1)
        np.add.at(covered, gone + config.words, -1)
        removed = np.cumsum(covered)[:-1] > 0
        edges = np.flatnonzero(np.diff(removed.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        raw = data[offsets[d] : offsets[d + 1]].tobytes()
        pieces, last, character = [], 0, 0  # `character`: number of characters in raw[:last]
        for start, stop in edges.tolist():
            low, high = (int(v - offsets[d]) for v in (begins[words[d] + start], ends[words[d] + stop - 1]))
            pieces.append(raw[last:low])
            character += len(pieces[-1].decode())
            passage = raw[low:high].decode()
            keeper = repeated["kept_id"][low_row + int(np.searchsorted(gone, start))].as_py()
            spans.append({"id": ids[at], "start": character, "text": passage, "kept_id": keeper})
            character += len(passage)
            last = high
        texts[at] = b"".join([*pieces, raw[last:]]).decode().strip()
        left = int((~removed).sum())
        if left < max(1, config.min_words):
            keep[at] = False
            detail = f"{len(edges)} repeated passages removed"
            dropped.append(
                {"id": ids[at], "rule": "substring_dedup.words_left", "value": left, "threshold": config.min_words, "detail": detail}
            )
    column = documents.schema.get_field_index("text")
    survivors = documents.set_column(column, documents.schema.field("text"), pa.array(texts, pa.string())).filter(pa.array(keep))
    tables = {"documents": survivors}
    for name, results in (("removed_spans", spans), ("dropped", dropped)):
        tables[name] = pa.Table.from_pylist(results, schema=table_schema(name).schema)
    return tables
