"""`line_dedup`: lines or paragraphs that repeat across documents."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, Figure, StageConfig, StageRun, stage
from puna.stages.curate.signals.measure import buffers
from puna.stages.curate.text.code_lines import looks_like_code
from puna.stages.curate.text.line_pieces import (
    RADIX,
    Frequent,
    by_radix,
    find_pieces,
    frequent_of,
    gathered,
    piece_hashes,
    with_blank_lines,
    without_pieces,
)
from puna.storage import Part
from puna.storage.schemas import table_schema
from puna.storage.work import write_array

# Hashes that one process counts at a time, 16 bytes each.
JOB_PIECES = 1 << 24
MOST_SHOWN = 60
EXAMPLES = 50


class LineDedupConfig(StageConfig):
    """What is counted, and what happens to a line that repeats."""

    unit: Literal["line", "paragraph"] = Field("line", description="What is compared: lines, or paragraphs parted by an empty line")
    bucket_documents: int = Field(30_000_000, ge=1, description="Documents counted together, in the order of their ids")
    max_per_million: float = Field(
        0.2, ge=0, description="A line that occurs more often is removed, occurrences per million documents of the bucket; Llama 3: 6 in 30"
    )
    max_occurrences: int = Field(6, ge=1, description="Minimum of that limit, whatever the number of documents, occurrences")
    min_documents: int = Field(
        5_000,
        ge=0,
        description="A bucket of fewer documents loses no line, and what it would lose is shown: in few documents a line of seven "
        "occurrences is more likely a term of theirs than boilerplate, documents",
    )
    policy: Literal["drop_all", "keep_first"] = Field("drop_all", description="Whether the first occurrence of such a line stays")
    sources_exempt: tuple[str, ...] = Field(
        ("code",), description="Sources whose lines are neither counted nor removed: a program needs its repeated lines"
    )
    protect_code: bool = Field(
        False, description="Leave lines that look like code alone in all sources, so that the examples of manuals stay whole"
    )

    def limit(self, documents: int) -> int:
        """How often a line may occur in a bucket of so many documents."""
        return max(self.max_occurrences, int(self.max_per_million * documents / 1e6))

    @property
    def newlines(self) -> int:
        """Newlines in a row that part two units."""
        return 1 if self.unit == "line" else 2


class Counted(NamedTuple):
    """The pieces of one part that lie in one bucket: file of their hashes and rows, and where each first byte's begin."""

    bucket: int
    file: str
    begins: NDArray[np.int64]


@stage(kind="documents", filters="documents")
def line_dedup(documents: Documents, config: LineDedupConfig, run: StageRun) -> None:
    """Remove lines that occur too often in a bucket of documents (Llama 3, section 3.1.1: more than 6 times in 30 million).

    The rule is a rate, with a minimum: see `max_per_million`, `max_occurrences` and `min_documents`. The table `examples` has the
    most frequent of the lines that the rate takes, also of a bucket that is too small to lose them.
    Lines are compared without the white space around them; blank ones do not count, and go with a line that goes where they
    would pile up. They are told apart by 64-bit
    hashes: among a billion different lines about one pair in 40 such corpora is expected to be mistaken for one line.
    Hashes are parted by their first byte, so that a bucket is counted piece by piece in bounded memory. A document of
    which nothing is left is dropped. `removed_lines` holds every removed line, so that the input can be rebuilt.
    """
    parts = run.parts(documents, columns=["id", "source", "text"])
    counted = [one for many in run.map(_count, parts, config, str(run.scratch), rows=len(parts)) for one in many]
    ids = documents.read(columns=["id"]).column("id")
    frequent: dict[int, list[Frequent]] = {}
    jobs = list(_jobs(counted))
    sizes = _sizes(documents.rows(), config.bucket_documents)
    for (bucket, *_), found in zip(jobs, run.map(_frequent, jobs, config, sizes), strict=True):
        frequent.setdefault(bucket, []).append(found)
    files = {bucket: _save(run.scratch / f"frequent-{bucket}.npy", found) for bucket, found in frequent.items()}
    starts = [part.start for part in parts]
    first_ids = ids.take(pa.array(starts, pa.int64())).to_pylist()
    run.transform(_remove, documents, config, files, sizes, dict(zip(first_ids, starts, strict=True)))
    everything = [one for many in frequent.values() for one in many]
    run.metric("frequent_lines", sum(len(one.hash) for one in everything))
    run.metric("frequent_occurrences", sum(int(one.occurrences.sum()) for one in everything))
    spared = [one for bucket, many in frequent.items() if sizes[bucket] < config.min_documents for one in many]
    run.metric("spared_occurrences", sum(int(one.occurrences.sum()) for one in spared))
    run.metric("limit", max(map(config.limit, sizes.values()), default=config.max_occurrences))
    if everything:
        counts = np.bincount(np.minimum(np.concatenate([one.occurrences for one in everything]).astype(np.int64), MOST_SHOWN))
        points = [(int(n), float(count)) for n, count in enumerate(counts) if count]
        title = f"Lines by how often they occur, {MOST_SHOWN} or more as one"
        run.figure("occurrences", Figure(title, "occurrences", "lines", {"beyond the limit": points}, kind="bar"))


def _sizes(rows: int, size: int) -> dict[int, int]:
    """Documents of each bucket."""
    return {bucket: min(size, rows - bucket * size) for bucket in range(-(-rows // size))}


def _buckets(start: int, rows: int, size: int) -> list[tuple[int, int, int]]:
    """Rows start .. start + rows cut where a bucket of `size` ends: bucket, first and last (exclusive) counted from start."""
    edges = [0, *range(size - start % size, rows, size), rows]
    return [((start + a) // size, a, b) for a, b in pairwise(edges) if a < b]


def _judged(table: pa.Table, config: LineDedupConfig) -> NDArray[np.bool_]:
    return np.array([source not in config.sources_exempt for source in table.column("source").to_pylist()], np.bool_)


def _count(part: Part, config: LineDedupConfig, scratch: str) -> list[Counted]:
    """Write the hashes of one part's pieces, ordered by their first byte."""
    table = part.read()
    data, offsets = buffers(table.column("text"))
    judged = _judged(table, config)
    out = []
    for bucket, a, b in _buckets(part.start, part.rows, config.bucket_documents):
        hashes, rows = piece_hashes(data, offsets[a : b + 1], judged[a:b], config.newlines)
        hashes, rows, begins = by_radix(hashes, rows + part.start + a)
        file = Path(scratch) / f"pieces-{bucket}-{part.start}-{part.stop}.npy"
        write_array(file, np.stack([hashes, rows.astype(np.uint64)]))
        out.append(Counted(bucket, str(file), begins))
    return out


def _jobs(counted: list[Counted]) -> list[tuple[int, int, int, list[Counted]]]:
    """What is counted at a time: bucket, range of first bytes, the parts. At most about JOB_PIECES pieces each."""
    jobs = []
    for bucket in sorted({one.bucket for one in counted}):
        members = [one for one in counted if one.bucket == bucket]
        ends = np.sum([one.begins for one in members], axis=0)
        first = 0
        while first < RADIX:
            last = max(int(np.searchsorted(ends, ends[first] + JOB_PIECES, "right")) - 1, first + 1)
            jobs.append((bucket, first, last, members))
            first = last
    return jobs


def _frequent(job: tuple[int, int, int, list[Counted]], config: LineDedupConfig, sizes: dict[int, int]) -> Frequent:
    """The pieces of a job that occur too often."""
    bucket, first, last, members = job
    pieces = [np.load(one.file, mmap_mode="r")[:, one.begins[first] : one.begins[last]] for one in members]
    both = np.concatenate(pieces, axis=1)
    return frequent_of(both[0], both[1].astype(np.int64), config.limit(sizes[bucket]))


def _save(file: Path, found: list[Frequent]) -> str:
    """Write a bucket's decision, sorted by hash, for the workers."""
    columns = [np.concatenate([getattr(one, name).astype(np.uint64) for one in found]) for name in Frequent._fields]
    write_array(file, np.stack(columns))
    return str(file)


def _remove(
    documents: pa.Table, config: LineDedupConfig, files: dict[int, str], sizes: dict[int, int], starts: dict[str, int]
) -> dict[str, pa.Table]:
    """Documents of a part without the frequent pieces, what was removed, and the documents of which nothing is left."""
    ids = documents.column("id").combine_chunks()
    start = starts[ids[0].as_py()]
    data, offsets = buffers(documents.column("text"))
    judged = _judged(documents, config)
    found, shown = [], []
    for bucket, a, b in _buckets(start, len(ids), config.bucket_documents):
        known, occurrences, first = np.load(files[bucket], mmap_mode="r")
        row, number, begin, end, place = find_pieces(
            data, offsets[a : b + 1], judged[a:b], config.newlines, start + a, known, first.astype(np.int64), config.policy == "keep_first"
        )
        pieces = (row + a, number, begin, end, known[place], occurrences[place].astype(np.float64))
        shown += _examples(data, pieces, first[place].astype(np.int64) - start, occurrences, (bucket, sizes[bucket]), config)
        loses = sizes[bucket] >= config.min_documents
        found.append(tuple(column if loses else column[:0] for column in pieces))
    row, number, begin, end, hashes, value = (np.concatenate(column) for column in zip(*found, strict=True))
    if config.protect_code and len(row):
        chosen = ~_code(data, begin, end, hashes)
        row, number, begin, end, value = row[chosen], number[chosen], begin[chosen], end[chosen], value[chosen]
    if config.unit == "line":
        end = with_blank_lines(data, offsets, row, begin, end)
    made, bounds, empty = without_pieces(data, offsets, config.newlines, row, begin, end)
    text = _strings(made, bounds)
    place = documents.schema.get_field_index("text")
    kept = documents.set_column(place, documents.schema.field(place), text).filter(pa.array(~empty))
    removed = {
        "id": ids.take(pa.array(row)),
        "line": number,
        "text": _strings(*gathered(data, begin, end)),
        "rule": pa.repeat(f"{config.unit}_occurrences", len(row)),
        "value": value,
    }
    gone = np.bincount(row, minlength=len(ids))[empty]
    dropped = {
        "id": ids.filter(pa.array(empty)),
        "rule": pa.repeat("line_dedup_empty", len(gone)),
        "value": np.zeros(len(gone)),
        "threshold": pa.nulls(len(gone), pa.float64()),
        "detail": [f"all {count} {config.unit}s occur more than {config.limit(max(sizes.values()))} times" for count in gone.tolist()],
    }
    examples = pa.Table.from_pylist(shown, schema=table_schema("examples").schema)
    return {"documents": kept, "examples": examples} | {
        name: pa.table(columns, schema=table_schema(name).schema) for name, columns in (("removed_lines", removed), ("dropped", dropped))
    }


def _examples(
    data: NDArray[np.uint8],
    pieces: tuple[NDArray[Any], ...],
    first: NDArray[np.int64],
    occurrences: NDArray[np.uint64],
    of: tuple[int, int],
    config: LineDedupConfig,
) -> list[dict[str, str | None]]:
    """Rows of `examples` for the most frequent pieces of a bucket, where each occurs first.

    `first`: that document's row here. `of`: the bucket and its documents.
    """
    bucket, documents = of
    row, _, begin, end, hashes, value = pieces
    least = np.sort(occurrences)[-EXAMPLES] if len(occurrences) > EXAMPLES else 0
    chosen = np.flatnonzero((value >= least) & (row == first))
    _, once = np.unique(hashes[chosen], return_index=True)
    end_of_it = "removed" if documents >= config.min_documents else f"kept: fewer than min_documents={config.min_documents}"
    return [
        {
            "id": f"{bucket}-{int(hashes[at]):016x}",
            "kind": f"frequent {config.unit}",
            "prompt": None,
            "text": bytes(data[begin[at] : end[at]]).decode().strip(),
            "detail": f"{int(value[at])} times in {documents} documents, limit {config.limit(documents)}; {end_of_it}",
        }
        for at in chosen[once].tolist()
    ]


def _strings(data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> pa.Array:
    return pa.LargeStringArray.from_buffers(len(bounds) - 1, pa.py_buffer(bounds), pa.py_buffer(data)).cast(pa.string())


def _code(data: NDArray[np.uint8], begin: NDArray[np.int64], end: NDArray[np.int64], hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which pieces look like code; each different one is looked at once."""
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    seen = np.array([looks_like_code(bytes(data[begin[at] : end[at]]).decode().strip()) for at in first.tolist()], np.bool_)
    return seen[which]
