"""Removal of duplicates, the last step of deduplication stages: decisions are partitioned by id and applied to the documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from puna.stages.contract import StageRun
from puna.storage import Artifact
from puna.storage.schemas import table_schema

DECIDED = pa.schema([("id", pa.string()), ("kept_id", pa.string()), ("similarity", pa.float64()), ("detail", pa.string())])
"""Schema of decisions: the ids of a removed document and of the document kept instead, their similarity, and an explanation."""
MANY = 100_000  # approximate number of decisions per partition if every document is removed


def remove(
    run: StageRun, documents: Artifact, decide: Callable[..., Any], items: Sequence[Any], *args: Any, method: str, rule: str,
    threshold: float | None = None,
) -> Sequence[Any]:  # fmt: skip
    """Remove the documents in the tables `decide(item, *args)` (schema DECIDED); write the evidence to `duplicates` and `dropped`. Return
    the JSON value that `decide` returns with each item's table. If `threshold` is None, threshold and value are null in `dropped`."""
    parts = 1 << max(0, (documents.rows() // MANY).bit_length() - 1)
    decided = run.exchange(decide, items, *args, by="id", partitions=parts)
    run.filter(_remove, documents, decided if decided.rows else DECIDED.empty_table(), method, rule, threshold, columns=["id"])
    run.metric("removed", decided.rows)
    return decided.infos


def _remove(documents: pa.Table, decided: pa.Table, method: str, rule: str, threshold: float | None) -> dict[str, Any]:
    ids, survivors, similarity = decided["id"], decided["kept_id"], decided["similarity"]
    count = len(ids)
    evidence = {"id": ids, "kept_id": survivors, "method": pa.repeat(method, count), "similarity": similarity, "cluster": survivors}
    value = pa.nulls(count, pa.float64()) if threshold is None else similarity
    bound = pa.nulls(count, pa.float64()) if threshold is None else pa.repeat(threshold, count)
    dropped = {"id": ids, "rule": pa.repeat(rule, count), "value": value, "threshold": bound, "detail": decided["detail"]}
    return {
        "keep": pc.invert(pc.is_in(documents["id"], value_set=ids.combine_chunks())),
        "duplicates": pa.table(evidence, schema=table_schema("duplicates").schema),
        "dropped": pa.table(dropped, schema=table_schema("dropped").schema),
    }
