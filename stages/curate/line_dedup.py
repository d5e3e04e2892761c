"""`line_dedup`: lines that repeat across documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, StageConfig, StageRun, stage
from puna.storage import Part
from puna.storage.schemas import table_schema

CODE_START = re.compile(
    r">>>|\.\.\. |[$%#@] ?\w|//|/\*|</?\w|(?:def|class|import|return|raise|yield|elif|assert|await|async|lambda|public|private|static|"
    r"void|const|var|let|fn|func|struct|enum|#include) |from \S+ import |(?:if|for|while|with|except|try|else|switch)\b.*[:{]$|"
    r"(?:pass|break|continue|else:|try:|finally:)$|(?:SELECT|INSERT INTO|UPDATE|DELETE FROM|CREATE|DROP|ALTER|FROM|WHERE|JOIN|VALUES) |"
    r"[\w.]+(?:\[.*\])?(?:: ?[\w.\[\], |]+)? ?[-+*/|&]?= ?\S|[\w.]+\(.*\)[,:;]?$"
)
CODE_MARK = re.compile(r"[(){}\[\]<>=;_\"'`|&*/+\\@#%^~$]")
CODE_MARKS = 0.15


class LineDedupConfig(StageConfig):
    """What is counted, and what happens to a line that repeats."""

    bucket_documents: int = Field(30_000_000, ge=1, description="Documents counted together, in the order of their ids")
    max_occurrences: int = Field(6, ge=1, description="A line that occurs more often than this in a bucket is removed, occurrences")
    policy: Literal["drop_all", "keep_first"] = Field("drop_all", description="Whether the first occurrence of such a line stays")
    sources_exempt: tuple[str, ...] = Field(
        ("code",), description="Sources whose lines are neither counted nor removed: a program needs its repeated lines"
    )
    protect_code: bool = Field(
        False, description="Leave lines that look like code alone in all sources, so that the examples of manuals stay whole"
    )


class Counts(NamedTuple):
    """Distinct lines of some documents: bucket, hash of the line, occurrences, and row and line of the first one; sorted."""

    bucket: NDArray[np.int64]
    line: NDArray[np.uint64]
    occurrences: NDArray[np.int64]
    row: NDArray[np.int64]
    number: NDArray[np.int64]


@stage(kind="documents", filters="documents")
def line_dedup(documents: Documents, config: LineDedupConfig, run: StageRun) -> None:
    """Remove lines that occur more than `max_occurrences` times in a bucket of documents (Llama 3, section 3.1.1).

    Lines are compared without the white space around them; blank ones do not count. They are told apart by 64-bit
    hashes: among a billion different lines about one pair is expected to be mistaken for one line. A document of which
    nothing is left is dropped. `removed_lines` holds every removed line, so that the input can be rebuilt.
    """
    parts = run.parts(documents, columns=["id", "source", "text"])
    counted = list(run.map(_count, parts, config, rows=len(parts)))
    frequent = _frequent(counted, config)
    ids = documents.read(columns=["id"]).column("id")
    bounds = ids.take(pa.array(range(0, len(ids), config.bucket_documents), pa.int64())).to_pylist()
    file = _save(run.scratch, frequent, ids.take(pa.array(frequent.row)).to_pylist())
    run.transform(_remove, documents, config, file, bounds)
    run.metric("frequent_lines", len(frequent.line))
    run.metric("frequent_occurrences", int(frequent.occurrences.sum()))


def looks_like_code(line: str) -> bool:
    """Whether a line (without the white space around it) is more likely code than prose or boilerplate."""
    if line.startswith(("•", "–")):
        return False
    if CODE_START.match(line) or line[-1] in "{};([\\" or not any(map(str.isalnum, line)):
        return True
    return len(CODE_MARK.findall(line)) > max(2, CODE_MARKS * len(line))


def _count(part: Part, config: LineDedupConfig) -> Counts:
    """Distinct lines of one part."""
    table = part.read()
    rows, numbers, lines = [], [], []
    for place, (source, text) in enumerate(zip(table.column("source").to_pylist(), table.column("text").to_pylist(), strict=True)):
        if source in config.sources_exempt:
            continue
        for number, line in enumerate(text.split("\n")):
            line = line.strip()
            if line and not (config.protect_code and looks_like_code(line)):
                rows.append(part.start + place)
                numbers.append(number)
                lines.append(line)
    row = np.array(rows, dtype=np.int64)
    bucket = row // config.bucket_documents
    one = np.ones(len(row), dtype=np.int64)
    return _grouped(Counts(bucket, _hashes(lines), one, row, np.array(numbers, dtype=np.int64)))


def _hashes(lines: list[str]) -> NDArray[np.uint64]:
    from puna.kernels import minhash
    from puna.stages.curate.shingles import packed

    hashes: NDArray[np.uint64] = minhash.slice_hashes(*packed(lines))
    return hashes


def _grouped(counts: Counts) -> Counts:
    """Rows of equal bucket and line as one: occurrences added, the first place kept."""
    if not len(counts.line):
        return counts
    order = np.lexsort((counts.number, counts.row, counts.line, counts.bucket))
    bucket, line = counts.bucket[order], counts.line[order]
    starts = np.flatnonzero(np.r_[True, (bucket[1:] != bucket[:-1]) | (line[1:] != line[:-1])])
    first = order[starts]
    total = np.add.reduceat(counts.occurrences[order], starts)
    return Counts(counts.bucket[first], counts.line[first], total, counts.row[first], counts.number[first])


def _merged(counted: list[Counts]) -> Counts:
    """The counts of all parts as one."""
    none = np.zeros(0, np.int64)
    return _grouped(
        Counts(
            np.concatenate([none, *(c.bucket for c in counted)]),
            np.concatenate([none.astype(np.uint64), *(c.line for c in counted)]),
            np.concatenate([none, *(c.occurrences for c in counted)]),
            np.concatenate([none, *(c.row for c in counted)]),
            np.concatenate([none, *(c.number for c in counted)]),
        )
    )


def _frequent(counted: list[Counts], config: LineDedupConfig) -> Counts:
    """The lines that occur too often, of all parts together."""
    merged = _merged(counted)
    often = np.flatnonzero(merged.occurrences > config.max_occurrences)
    return Counts(merged.bucket[often], merged.line[often], merged.occurrences[often], merged.row[often], merged.number[often])


def _save(folder: Path, frequent: Counts, first_ids: list[str]) -> str:
    """Write the decision to a file that every worker opens."""
    file = folder / "frequent.arrow"
    table = pa.table(
        {
            "bucket": frequent.bucket,
            "line": frequent.line,
            "occurrences": frequent.occurrences,
            "first_id": pa.array(first_ids, pa.string()),
            "first_number": frequent.number,
        }
    )
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return str(file)


class _Frequent:
    """The decision, read by memory map: looked up by bucket and line."""

    def __init__(self, file: str) -> None:
        with pa.memory_map(file) as source:
            table = pa.ipc.open_file(source).read_all().combine_chunks()
        bucket, self._line, self._occurrences, self._number = (
            table.column(name).to_numpy() for name in ("bucket", "line", "occurrences", "first_number")
        )
        self._first_id = table.column("first_id")
        self._bounds = {int(b): (int(np.searchsorted(bucket, b)), int(np.searchsorted(bucket, b, "right"))) for b in np.unique(bucket)}

    def find(self, bucket: int, lines: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Row of the decision for each line, or -1."""
        start, stop = self._bounds.get(bucket, (0, 0))
        if start == stop:
            return np.full(len(lines), -1, dtype=np.int64)
        known = self._line[start:stop]
        place = np.minimum(np.searchsorted(known, lines), len(known) - 1)
        return np.where(known[place] == lines, place + start, -1)

    def occurrences(self, row: int) -> int:
        return int(self._occurrences[row])

    def is_first(self, row: int, identity: str, number: int) -> bool:
        return int(self._number[row]) == number and self._first_id[row].as_py() == identity


def _remove(documents: pa.Table, config: LineDedupConfig, file: str, bounds: list[str]) -> dict[str, pa.Table]:
    """Documents of a part without the frequent lines, what was removed, and the documents of which nothing is left."""
    frequent = _Frequent(file)
    columns = (documents.column(name).to_pylist() for name in ("id", "source", "text"))
    keep: list[bool] = []
    texts: list[str] = []
    removed: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    buckets = np.searchsorted(np.array(bounds), documents.column("id").to_pylist(), "right") - 1
    for identity, source, text, bucket in zip(*columns, buckets.tolist(), strict=True):
        gone = {} if source in config.sources_exempt else _gone(identity, text, bucket, frequent, config)
        if gone:
            lines = text.split("\n")
            removed += [
                {"id": identity, "line": number, "text": lines[number], "rule": "line_occurrences", "value": float(count)}
                for number, count in gone.items()
            ]
            text = "\n".join(line for number, line in enumerate(lines) if number not in gone)
        keep.append(bool(not gone or text.strip()))
        if keep[-1]:
            texts.append(text)
        else:
            detail = f"all {len(gone)} lines occur more than {config.max_occurrences} times"
            dropped.append({"id": identity, "rule": "line_dedup_empty", "value": 0.0, "threshold": None, "detail": detail})
    kept = documents.filter(pa.array(keep, pa.bool_()))
    place = kept.schema.get_field_index("text")
    kept = kept.set_column(place, kept.schema.field(place), pa.array(texts, pa.string()))
    tables = {"removed_lines": removed, "dropped": dropped}
    return {"documents": kept} | {name: pa.Table.from_pylist(rows, schema=table_schema(name).schema) for name, rows in tables.items()}


def _gone(identity: str, text: str, bucket: int, frequent: _Frequent, config: LineDedupConfig) -> dict[int, int]:
    """Numbers of the lines to remove from one document, each with its occurrences in the bucket."""
    stripped = [line.strip() for line in text.split("\n")]
    numbers = [number for number, line in enumerate(stripped) if line and not (config.protect_code and looks_like_code(line))]
    places = frequent.find(bucket, _hashes([stripped[number] for number in numbers]))
    found = {number: int(place) for number, place in zip(numbers, places.tolist(), strict=True) if place >= 0}
    if config.policy == "keep_first":
        found = {number: place for number, place in found.items() if not frequent.is_first(place, identity, number)}
    return {number: frequent.occurrences(place) for number, place in found.items()}
