"""Tokenization of documents into packed rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from puna.stages.contract import Documents, Figure, Mixture, SeededConfig, StageRun, Tokenizer, stage
from puna.stages.training.corpus import check_mixture, rank, split_documents
from puna.stages.training.token_rows import pack
from puna.stages.training.vocabulary import load
from puna.storage import Artifact, Part, PunaError
from puna.storage.exchange import Partition

BUCKET_DOCUMENTS = 20_480
"""Number of documents, consecutive by id, that are shuffled and packed together. Ids are hashes, so each bucket is a random sample."""


class TokenizeConfig(SeededConfig):
    sequence_length: int = Field(512, ge=8, le=1_048_576, description="Tokens per packed row")


@stage(kind="tokens")
def tokenize(documents: Documents, mixture: Mixture | None, tokenizer: Tokenizer, config: TokenizeConfig, run: StageRun) -> None:
    """Encode the training split and pack it into full rows, as Llama 3 does (section 3.2; attention stays inside a document).

    A document is enclosed in BOS and EOS tokens and repeated as often as the mixture says (without a mixture: once). Every 20,480 documents
    form a bucket, in which all copies are shuffled by a hash of seed, id and copy number. Rows are cut every `sequence_length` tokens: a
    document that does not fit continues in the next row, and only the last row of a bucket may be shorter."""
    check_mixture(run, documents, mixture)
    parts = documents.parts(columns=["id", "text"], rows=BUCKET_DOCUMENTS)
    buckets = max(1, -(-documents.rows() // BUCKET_DOCUMENTS))
    arguments = (mixture, str(tokenizer.path()), run.seed("shuffle"), BUCKET_DOCUMENTS)
    encoded = run.exchange(_encode, parts, *arguments, by="bucket", partitions=buckets)
    totals: Counter[int] = Counter()
    for counts in encoded.infos:
        totals.update({int(bucket): count for bucket, count in counts["buckets"].items()})
    if not totals:
        raise PunaError(f"{documents.id} has no training documents in this mixture to tokenize")
    jobs, first = [], 0
    for bucket in sorted(totals):
        jobs.append((encoded.parts[bucket], first))
        first += -(-totals[bucket] // config.sequence_length)
    run.produce(_pack, jobs, config.sequence_length)
    _report(encoded.infos, totals.total(), first, run)


def _encode(part: Part, mixture: Artifact | None, tokenizer_folder: str, shuffle: int, size: int) -> tuple[pa.Table, dict[str, Any]]:
    """Return a part's encoded copies with bucket and order; and counts: tokens by bucket and by category, documents, copies, bytes."""
    documents = part.read()
    place = {id_: (part.start + i) // size for i, id_ in enumerate(documents["id"].to_pylist())}
    rows = [row for row in split_documents(documents, mixture, "train") if row.text]
    tokenizer = load(tokenizer_folder)
    ids = [[tokenizer.begin, *encoding, *tokenizer.end] for encoding in tokenizer.encode_batch([row.text for row in rows])]
    copies = [(index, copy) for index, row in enumerate(rows) for copy in range(row.repeats)]
    buckets: Counter[str] = Counter()
    categories: Counter[str] = Counter()
    for index, _ in copies:
        buckets[str(place[rows[index].id])] += len(ids[index])
        categories[rows[index].category] += len(ids[index])
    read = sum(len(row.text.encode()) * row.repeats for row in rows)
    counts = {"buckets": buckets, "categories": categories, "documents": len(rows), "copies": len(copies), "bytes": read}
    table = pa.table(
        {
            "bucket": pa.array([place[rows[i].id] for i, _ in copies], pa.int32()),
            "order": pa.array([rank(shuffle, rows[i].id, copy) for i, copy in copies], pa.int64()),
            "id": pa.array([rows[i].id for i, _ in copies], pa.string()),
            "copy": pa.array([copy for _, copy in copies], pa.int32()),
            "tokens": pa.array([ids[i] for i, _ in copies], pa.list_(pa.int32())),
        }
    )
    return table, counts


def _pack(job: tuple[Partition, int], sequence_length: int) -> pa.Table:
    """Return the packed rows of one bucket. `job`: the bucket, and the number of the bucket's first row."""
    bucket, first = job
    table = bucket.read().sort_by([("order", "ascending"), ("id", "ascending"), ("copy", "ascending")])
    rows = pack(table["tokens"].combine_chunks(), table["id"].to_pylist(), sequence_length)
    return pa.table({"row": pa.array(np.arange(first, first + len(rows["tokens"])), pa.int64()), **rows})


def _report(counts: Sequence[dict[str, Any]], tokens: int, rows: int, run: StageRun) -> None:
    size = sum(part["bytes"] for part in counts)
    run.metric("documents", sum(part["documents"] for part in counts))
    run.metric("copies", sum(part["copies"] for part in counts))
    run.metric("tokens", tokens)
    run.metric("rows", rows)
    run.metric("bytes", size)
    run.metric("bytes_per_token", size / tokens)
    categories = sum((Counter[str](part["categories"]) for part in counts), Counter[str]())
    series: dict[str, list[tuple[Any, float]]] = {"tokens": [(name, float(count)) for name, count in sorted(categories.items())]}
    title = "Training tokens by category"
    run.figure("tokens", Figure(title, x="category", y="tokens", kind="bar", series=series, note="Repeats counted."))
