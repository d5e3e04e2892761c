"""`line_dedup`: removal of lines or paragraphs that occur too often in the corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from puna.kernels.text.code_lines import looks_like_code
from puna.kernels.text.line_pieces import bounds_of, frequent_of, gather, piece_hashes, with_blank_lines, without_pieces
from puna.kernels.text.strings import buffers, strings
from puna.stages.contract import Documents, Figure, StageConfig, StageRun, stage
from puna.storage import Part
from puna.storage.exchange import Partition, partitions
from puna.storage.schemas import table_schema

JOB_ROWS = 1 << 17
CHARACTERS_PER_BYTE = 2  # a line has about 40 characters; its hash, row and position take 20 bytes
MOST_SHOWN = 60
EXAMPLES = 50


class LineDedupConfig(StageConfig):
    unit: Literal["line", "paragraph"] = Field("line", description="Unit of comparison: lines, or paragraphs separated by empty lines")
    bucket_documents: int = Field(30_000_000, ge=1, description="Documents per bucket, in id order; occurrences are counted per bucket")
    max_per_million: float = Field(0.2, ge=0, description="Maximum number of occurrences of a line, per million documents; Llama 3: 0.2")
    max_occurrences: int = Field(6, ge=1, description="Minimum for the limit that max_per_million gives, in occurrences")
    min_documents: int = Field(5_000, ge=0, description="Minimum documents in a bucket to remove lines; fewer: examples only")
    policy: Literal["drop_all", "keep_first"] = Field("drop_all", description="Remove all occurrences of a frequent line, or all but one")
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources, such as code, whose lines are neither counted nor removed")
    protect_code: bool = Field(False, description="Keep lines that look like code in any source, so that examples in manuals stay whole")

    def limit(self, documents: int) -> int:
        """Return the maximum number of occurrences of a line or paragraph in a bucket of `documents` documents."""
        return max(self.max_occurrences, int(self.max_per_million * documents / 1e6))

    @property
    def newlines(self) -> int:
        """Return the number of newlines that separate two units."""
        return 1 if self.unit == "line" else 2


@stage(kind="documents", filters="documents")
def line_dedup(documents: Documents, config: LineDedupConfig, run: StageRun) -> None:
    """Remove lines or paragraphs (`unit`) that occur too often in a bucket of documents (Llama 3, section 3.1.1: over 6 in 30 million).

    `max_per_million`, `max_occurrences` and `min_documents` determine the limit. Lines are compared by 64-bit hashes, ignoring white space
    at their ends; one in 40 corpora of a billion lines has a hash collision. Blank lines are not counted; those after a removed line are
    removed too, if they would follow the start of the text or another blank line. To bound memory, hashes are partitioned by value and
    counted; then the positions of frequent hashes are partitioned by shard. A document that loses all lines is dropped. `removed_lines` has
    each removed line, so that the input can be rebuilt. `examples` has the most frequent lines of each bucket, even if none is removed."""
    shards, rows, size = documents.shards(), documents.rows(), config.bucket_documents
    sizes = {bucket: min(size, rows - bucket * size) for bucket in range(-(-rows // size))}
    parts = documents.parts(columns=["source", "text"], rows=JOB_ROWS)
    pieces = run.exchange(_pieces, parts, config, by="hash", partitions=partitions(documents.record().characters // CHARACTERS_PER_BYTE))
    starts = np.cumsum([0, *(shard.rows for shard in shards[:-1])])
    frequent = run.exchange(_frequent, pieces.nonempty_parts, config, sizes, starts, by="shard", partitions=max(1, len(shards)))
    counts: dict[int, Counter[int]] = {bucket: Counter() for bucket in sizes}
    for info in frequent.infos:
        for bucket, occurrences, lines in info:
            counts[bucket][occurrences] += lines
    run.transform(_remove, documents, frequent, config, sizes, {bucket: _example_count(results) for bucket, results in counts.items()})
    together: Counter[int] = sum(counts.values(), Counter())
    spared = sum((results for bucket, results in counts.items() if sizes[bucket] < config.min_documents), Counter[int]())
    run.metric("frequent_lines", together.total())
    run.metric("frequent_occurrences", sum(often * lines for often, lines in together.items()))
    run.metric("spared_occurrences", sum(often * lines for often, lines in spared.items()))
    run.metric("limit", max(map(config.limit, sizes.values()), default=config.max_occurrences))
    if together:
        bars: Counter[int] = Counter()
        for often, lines in together.items():
            bars[min(often, MOST_SHOWN)] += lines
        points = [(often, float(lines)) for often, lines in sorted(bars.items())]
        title = f"Lines by number of occurrences, {MOST_SHOWN} or more together"
        run.figure("occurrences", Figure(title, "occurrences", "lines", {"beyond the limit": points}, kind="bar"))


def _example_count(counts: Counter[int]) -> int:
    left = EXAMPLES
    for often in sorted(counts, reverse=True):
        left -= counts[often]
        if left <= 0:
            return often
    return 0


def _pieces(part: Part, config: LineDedupConfig) -> Iterator[pa.Table]:
    exempt = pa.array(config.exempt_sources, pa.string())
    for block in part.split():
        table = block.read()
        judged = ~np.asarray(pc.is_in(table["source"], exempt))
        hashes, rows, places = piece_hashes(*buffers(table["text"]), judged, config.newlines)
        yield pa.table({"hash": hashes, "row": rows + block.start, "place": places})


def _frequent(
    pieces: Partition, config: LineDedupConfig, sizes: dict[int, int], starts: NDArray[np.int64]
) -> tuple[pa.Table, list[tuple[int, int, int]]]:
    """Return a row per occurrence of a piece that is too frequent in its bucket, and (bucket, count, number of pieces with this count)."""
    table = pieces.read()
    hashes, row, place = (table[name].to_numpy() for name in ("hash", "row", "place"))
    edges = np.searchsorted(row, [bucket * config.bucket_documents for bucket in [*sizes, len(sizes)]])
    results, counts = [], []
    for bucket, (low, high) in enumerate(pairwise(edges.tolist())):
        at, occurrences, first = frequent_of(hashes[low:high], config.limit(sizes[bucket]))
        results.append((at + low, np.full(len(at), bucket), occurrences, first))
        counts += [(bucket, often, lines) for often, lines in Counter(occurrences[first].tolist()).items()]
    at, buckets, occurrences, first = (np.concatenate(column) for column in zip(*results, strict=True))
    shard = np.searchsorted(starts, row[at], side="right") - 1
    columns = {"shard": shard.astype(np.int32), "row": row[at] - starts[shard], "place": place[at], "bucket": buckets}
    return pa.table(columns | {"hash": hashes[at], "occurrences": occurrences, "first": first}), counts


def _remove(
    documents: pa.Table, frequent: pa.Table, config: LineDedupConfig, sizes: dict[int, int], shown: dict[int, int]
) -> dict[str, pa.Table]:
    order = np.argsort(frequent["row"].to_numpy() << 32 | frequent["place"].to_numpy(), kind="stable")
    names = ("row", "place", "bucket", "hash", "occurrences", "first")
    row, place, bucket, hashes, occurrences, first = (frequent[name].to_numpy()[order] for name in names)
    data, offsets = buffers(documents["text"])
    begin, end, number = bounds_of(data, offsets, row, place, config.newlines)
    loses = np.array([size >= config.min_documents for size in sizes.values()])[bucket]
    code = np.zeros(len(loses), np.bool_)
    if config.protect_code and loses.any():
        code[loses] = _code(data, begin[loses], end[loses], hashes[loses])
    most = "removed" if config.policy == "drop_all" else "removed except the first"
    examples = [
        {"id": f"{bucket[at]}-{int(hashes[at]):016x}", "kind": f"frequent {config.unit}", "prompt": None,
         "text": bytes(data[begin[at] : end[at]]).decode().strip(),
         "detail": f"{occurrences[at]} times in {sizes[bucket[at]]} documents, limit {config.limit(sizes[bucket[at]])}; "
         + ("kept: code" if code[at] else most if loses[at] else f"kept: fewer than min_documents={config.min_documents}")}
        for at in np.flatnonzero(first & (occurrences >= np.array(list(shown.values()))[bucket])).tolist()
    ]  # fmt: skip
    gone = loses & ~code if config.policy == "drop_all" else loses & ~code & ~first
    row, number, begin, end, occurrences = row[gone], number[gone], begin[gone], end[gone], occurrences[gone]
    if config.unit == "line":
        end = with_blank_lines(data, offsets, row, begin, end)
    new_data, bounds, empty = without_pieces(data, offsets, config.newlines, row, begin, end)
    ids, place = documents["id"].combine_chunks(), documents.schema.get_field_index("text")
    left = pa.array(~empty)
    survivors = documents.drop_columns("text").filter(left) if empty.any() else documents.drop_columns("text")
    survivors = survivors.add_column(place, documents.schema.field(place), strings(new_data, bounds[np.append(~empty, True)]))
    rule, value = pa.repeat(f"{config.unit}_occurrences", len(row)), occurrences.astype(np.float64)
    removed = {"id": ids.take(pa.array(row)), "line": number, "text": strings(*gather(data, begin, end)), "rule": rule, "value": value}
    counts = np.bincount(row, minlength=len(ids))[empty]
    owner = np.zeros(len(ids), np.int64)
    owner[row] = bucket[gone]
    limits = [config.limit(sizes[one]) for one in owner[empty].tolist()]
    detail = [f"all {count} {config.unit}s occur more than {limit} times" for count, limit in zip(counts.tolist(), limits, strict=True)]
    dropped = {
        "id": ids.filter(pa.array(empty)), "rule": pa.repeat("line_dedup_empty", len(counts)), "value": np.zeros(len(counts)),
        "threshold": pa.nulls(len(counts), pa.float64()), "detail": detail,
    }  # fmt: skip
    shown_rows = pa.Table.from_pylist(examples, schema=table_schema("examples").schema)
    return {"documents": survivors, "examples": shown_rows} | {
        name: pa.table(columns, schema=table_schema(name).schema) for name, columns in (("removed_lines", removed), ("dropped", dropped))
    }


def _code(data: NDArray[np.uint8], begin: NDArray[np.int64], end: NDArray[np.int64], hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    seen = np.array([looks_like_code(bytes(data[begin[at] : end[at]]).decode().strip()) for at in first.tolist()], np.bool_)
    return seen[which]
