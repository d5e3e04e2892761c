"""Documents to packed rows of token ids."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from puna.stages.contract import Documents, Figure, Mixture, SeededConfig, StageRun, Tokenizer, stage
from puna.stages.pretrain.corpus import check_mixture, chosen, folder, mixture_file, rank
from puna.stages.pretrain.tokenizer import loaded
from puna.storage import Part, PunaError
from puna.storage.tables import write_part

BUCKET_DOCUMENTS = 20_480
"""Documents, consecutive by id, that are shuffled and packed together. Ids are hashes: any of them are a random sample."""
COUNTS = b"puna.counts"
"""Where a file of encoded documents holds its `Encoded`, as JSON."""


class TokenizeConfig(SeededConfig):
    """How documents are packed."""

    sequence_length: int = Field(512, ge=8, le=1_048_576, description="Tokens of a packed row")


@dataclass(frozen=True)
class Encoded:
    """What one part of the documents gave: its file, and its counts."""

    file: str
    tokens_in: dict[int, int]
    """Tokens by bucket."""
    documents: int
    copies: int
    bytes: int
    categories: dict[str, int]


@stage(kind="tokens")
def tokenize(documents: Documents, mixture: Mixture | None, tokenizer: Tokenizer, config: TokenizeConfig, run: StageRun) -> None:
    """Encode the training split and pack it into full rows, as Llama 3 does (section 3.2: masked across documents).

    Each document is framed by begin and end tokens and read as often as the mixture repeats it; the copies of each
    20,480 documents are shuffled by a hash of seed, id and copy. Rows are cut every sequence_length tokens: a document
    that does not fit goes on in the next row, and only the last row of such a bucket may be shorter.
    """
    if mixture is not None:
        check_mixture(documents, mixture)
    parts = run.parts(documents, columns=["id", "text"])
    arguments = (mixture_file(mixture), folder(tokenizer), str(run.scratch), run.seed("shuffle"), BUCKET_DOCUMENTS)
    encoded: list[Encoded] = list(run.map(_encode, parts, *arguments, rows=len(parts)))
    files: dict[int, list[str]] = {}
    totals: Counter[int] = Counter()
    for part in encoded:
        for bucket, count in part.tokens_in.items():
            files.setdefault(bucket, []).append(part.file)
            totals[bucket] += count
    if not totals:
        raise PunaError(f"{documents.id} has no training documents in this mixture: there is nothing to tokenize")
    jobs, first = [], 0
    for bucket in sorted(files):
        jobs.append((bucket, first, files[bucket]))
        first += -(-totals[bucket] // config.sequence_length)
    run.produce(_pack, jobs, config.sequence_length)
    _report(encoded, totals.total(), first, run)


def _encode(part: Part, split_file: str | None, tokenizer_folder: str, scratch: str, shuffle: int, bucket_documents: int) -> Encoded:
    """Write a part's encoded copies with their buckets and order; a part that is there from before a crash is kept."""
    target = Path(scratch) / f"encoded-{part.start:012d}-{part.stop:012d}.parquet"
    if target.exists():
        return _found(target)
    documents = part.read()
    place = {id_: (part.start + i) // bucket_documents for i, id_ in enumerate(documents["id"].to_pylist())}
    rows = [row for row in chosen(documents, split_file, "train") if row.text]
    tokenizer = loaded(tokenizer_folder)
    ids = [[tokenizer.bos, *encoding, tokenizer.eos] for encoding in tokenizer.encode_batch([row.text for row in rows])]
    copies = [(index, copy) for index, row in enumerate(rows) for copy in range(row.repeats)]
    tokens_in: Counter[int] = Counter()
    categories: Counter[str] = Counter()
    for index, _ in copies:
        tokens_in[place[rows[index].id]] += len(ids[index])
        categories[rows[index].category] += len(ids[index])
    size = sum(len(row.text.encode()) * row.repeats for row in rows)
    made = Encoded(str(target), dict(tokens_in), len(rows), len(copies), size, dict(categories))
    table = pa.table(
        {
            "bucket": pa.array([place[rows[i].id] for i, _ in copies], pa.int32()),
            "order": pa.array([rank(shuffle, rows[i].id, copy) for i, copy in copies], pa.int64()),
            "id": pa.array([rows[i].id for i, _ in copies], pa.string()),
            "copy": pa.array([copy for _, copy in copies], pa.int32()),
            "tokens": pa.array([ids[i] for i, _ in copies], pa.list_(pa.int32())),
        }
    )
    write_part(table.replace_schema_metadata({COUNTS: json.dumps(asdict(made))}), target)
    return made


def _found(file: Path) -> Encoded:
    values = json.loads(pq.read_schema(file).metadata[COUNTS])
    return Encoded(**values | {"file": str(file), "tokens_in": {int(bucket): count for bucket, count in values["tokens_in"].items()}})


def _pack(job: tuple[int, int, list[str]], sequence_length: int) -> pa.Table:
    """The rows of one bucket, from the files that hold some of it; the first row has the number that comes with the job."""
    bucket, first, files = job
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
