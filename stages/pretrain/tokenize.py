"""Documents to packed rows of token ids."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from puna.stages.contract import Documents, Figure, Mixture, SeededConfig, StageRun, Tokenizer, stage
from puna.stages.pretrain.corpus import check_mixture, chosen_of, folder, mixture_file, rank
from puna.stages.pretrain.tokenizer import loaded
from puna.storage import Part, PunaError

BUCKET_DOCUMENTS = 20_000
"""Documents shuffled and packed together; their number decides the buckets, so parts and workers do not."""


class TokenizeConfig(SeededConfig):
    """How documents are packed."""

    sequence_length: int = Field(512, ge=8, le=1_048_576, description="Tokens of a packed row")


@dataclass(frozen=True)
class Encoded:
    """What one part of the documents gave: its file, and counts for buckets and categories."""

    file: str
    tokens_in: dict[int, int]
    documents: int
    copies: int
    bytes: int
    categories: dict[str, int]


@stage(kind="tokens")
def tokenize(documents: Documents, mixture: Mixture | None, tokenizer: Tokenizer, config: TokenizeConfig, run: StageRun) -> None:
    """Encode the training split and pack it into full rows, as Llama 3 does (section 3.2: masked across documents).

    Each document is framed by begin and end tokens and read as often as the mixture repeats it; all copies are
    shuffled by a hash of seed, id and copy. Rows are cut every sequence_length tokens: a document that does not
    fit goes on in the next row, and only the last row of a bucket may be shorter.
    """
    if mixture is not None:
        check_mixture(documents, mixture)
    parts = run.parts(documents, columns=["id", "text"])
    buckets = 1 + documents.rows() // BUCKET_DOCUMENTS
    shuffle = run.seed("shuffle")
    encoded: list[Encoded] = list(
        run.map(_encode, parts, mixture_file(mixture), folder(tokenizer), str(run.scratch), shuffle, buckets, rows=len(parts))
    )
    totals = Counter(dict.fromkeys(range(buckets), 0))
    for part in encoded:
        totals.update(part.tokens_in)
    if not sum(totals.values()):
        raise PunaError(f"{documents.id} has no training documents in this mixture: there is nothing to tokenize")
    files = [part.file for part in encoded]
    jobs, first = [], 0
    for bucket in range(buckets):
        jobs.append((bucket, first))
        first += -(-totals[bucket] // config.sequence_length)
    for table in run.map(_pack, jobs, files, config.sequence_length, rows=len(jobs)):
        run.write(table)
    _report(encoded, sum(totals.values()), first, run)


def _encode(part: Part, split_file: str | None, tokenizer_folder: str, scratch: str, shuffle: int, buckets: int) -> Encoded:
    """Write a part's encoded copies, by bucket and order; the file is found again after a crash."""
    rows = [row for row in chosen_of(part, split_file, "train") if row.text]
    tokenizer = loaded(tokenizer_folder)
    ids = [[tokenizer.bos, *encoding, tokenizer.eos] for encoding in tokenizer.encode_batch([row.text for row in rows])]
    copies = []
    for index, row in enumerate(rows):
        for copy in range(row.repeats):
            order = rank(shuffle, row.id, copy)
            copies.append(((order * buckets) >> 63, order, row.id, copy, index))
    copies.sort()
    table = pa.table(
        {
            "bucket": pa.array([c[0] for c in copies], pa.int32()),
            "order": pa.array([c[1] for c in copies], pa.int64()),
            "id": pa.array([c[2] for c in copies], pa.string()),
            "copy": pa.array([c[3] for c in copies], pa.int32()),
            "tokens": pa.array([ids[c[4]] for c in copies], pa.list_(pa.int32())),
        }
    )
    target = Path(scratch) / f"encoded-{part.start:012d}-{part.stop:012d}.parquet"
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    pq.write_table(table, temporary, compression="zstd")
    os.replace(temporary, target)
    tokens_in: Counter[int] = Counter()
    categories: Counter[str] = Counter()
    for bucket, _, _, _, index in copies:
        tokens_in[bucket] += len(ids[index])
        categories[rows[index].category] += len(ids[index])
    size = sum(len(row.text.encode()) * row.repeats for row in rows)
    return Encoded(str(target), dict(tokens_in), len(rows), len(copies), size, dict(categories))


def _pack(job: tuple[int, int], files: list[str], sequence_length: int) -> pa.Table:
    """The rows of one bucket; the first of them has the number that comes with the job."""
    bucket, first = job
    table = pq.read_table(files, filters=pc.field("bucket") == bucket)
    table = table.sort_by([("order", "ascending"), ("id", "ascending"), ("copy", "ascending")])
    rows = pack(table["tokens"].combine_chunks(), table["id"].to_pylist(), sequence_length)
    return pa.table({"row": pa.array(np.arange(first, first + len(rows["tokens"])), pa.int64()), **rows})


def pack(tokens: Any, ids: list[str], sequence_length: int) -> dict[str, pa.Array]:
    """Columns `tokens`, `lengths` and `documents` of the rows that hold these documents (lists of ids), in order."""
    if isinstance(tokens, pa.ChunkedArray):
        tokens = tokens.combine_chunks()
    flat = tokens.flatten()
    ends = np.cumsum(pc.list_value_length(tokens).to_numpy(zero_copy_only=False).astype(np.int64))
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.arange(0, total + sequence_length, sequence_length).clip(max=total)
    cuts = np.unique(cuts) if total else np.zeros(1, np.int64)
    # A piece ends where a document or a row does.
    borders = np.unique(np.concatenate([cuts, ends]))
    pieces = np.diff(borders, prepend=0)[borders > 0] if total else np.zeros(0, np.int64)
    stops = borders[borders > 0] if total else np.zeros(0, np.int64)
    owners = np.searchsorted(ends, stops - 1, side="right")
    offsets = np.searchsorted(stops, cuts, side="right")
    return {
        "tokens": pa.ListArray.from_arrays(pa.array(cuts, pa.int32()), flat),
        "lengths": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(pieces, pa.int32())),
        "documents": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array([ids[o] for o in owners], pa.string())),
    }


def _report(encoded: list[Encoded], tokens: int, rows: int, run: StageRun) -> None:
    size = sum(part.bytes for part in encoded)
    run.metric("documents", sum(part.documents for part in encoded))
    run.metric("copies", sum(part.copies for part in encoded))
    run.metric("tokens", tokens)
    run.metric("rows", rows)
    run.metric("bytes", size)
    run.metric("bytes_per_token", size / tokens)
    categories: Counter[str] = Counter()
    for part in encoded:
        categories.update(part.categories)
    run.figure(
        "tokens",
        Figure(
            title="Training tokens by category",
            x="category",
            y="tokens",
            kind="bar",
            series={"tokens": [(name, float(count)) for name, count in sorted(categories.items())]},
            note="Repeats counted.",
        ),
    )
