"""`gather`: the union of several inputs' documents in one table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from puna.stages.contract import Documents, Facts, StageConfig, StageRun, stage
from puna.stages.reading.pages import repetitions
from puna.storage import Part, PunaError
from puna.storage.exchange import partitions
from puna.storage.schemas import table_schema
from puna.storage.shards import count


class GatherConfig(StageConfig):
    sources: tuple[str, ...] = Field((), description="New source name for the documents of each input, in order; empty: keep the sources")


def _needs(config: GatherConfig, facts: Facts) -> list[str]:
    count = len(facts.inputs.get("documents", ()))
    return [f"sources names {len(config.sources)} of {count} inputs; name all"] if config.sources and len(config.sources) != count else []


@stage(kind="documents", needs=_needs)
def gather(documents: list[Documents], config: GatherConfig, run: StageRun) -> None:
    """Join documents from several inputs in one table; the configuration may rename each input's source.

    Of documents with the same id, the newest is kept, or the first input's if the times are equal. The others are dropped (`same_id`)."""
    if config.sources and len(config.sources) != len(documents):
        raise PunaError(f"gather: sources names {len(config.sources)} inputs, but there are {len(documents)}; name all, or none")
    names = config.sources or ("",) * len(documents)
    parts = [(part, at, name) for at, (artifact, name) in enumerate(zip(documents, names, strict=True)) for part in run.parts(artifact)]
    rows = run.exchange(_read_part, parts, by="id", partitions=partitions(sum(artifact.record().characters for artifact in documents)))
    removed = run.produce_shards(_once, rows, count(table_schema("documents"), sum(rows.infos)))
    run.count_input(sum(artifact.rows() for artifact in documents))
    run.metric("removed", sum(removed))


def _read_part(given: tuple[Part, int, str]) -> tuple[pa.Table, int]:
    """Return a part's rows with the column `input` (the input's number) and the new source name, if any; and the bytes of text."""
    part, at, name = given
    table = part.read()
    if name:
        place = table.schema.get_field_index("source")
        table = table.set_column(place, table.schema.field(place), pa.array([name] * len(table), pa.string()))
    size = pc.sum(pc.binary_length(table["text"]).cast(pa.int64())).as_py() or 0
    return table.append_column("input", pa.array(np.full(len(table), at, np.int32))), size


def _once(rows: pa.Table) -> tuple[dict[str, pa.Table], int]:
    rows = rows.sort_by([("id", "ascending"), ("fetched_at", "descending"), ("input", "ascending")])
    ids = rows["id"].to_pylist()
    first, repeated = repetitions(ids)
    dropped: list[dict[str, Any]] = []
    for at, identity in repeated.items():
        example = f"{ids[at]}: {rows['url'][at].as_py()} of {rows['source'][at].as_py()} is already there"
        dropped.append({"id": identity, "rule": "same_id", "detail": example})
    schema = table_schema("documents").schema
    documents = rows.filter(pa.array(first)).select(schema.names)
    return {"documents": documents, "dropped": pa.Table.from_pylist(dropped, schema=table_schema("dropped").schema)}, len(dropped)
