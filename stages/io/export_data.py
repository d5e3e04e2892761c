"""Tables of artifacts as plain files that DuckDB and Hugging Face's `datasets` load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from puna.stages.conversations import message_of, messages_of, others_of, tools_of
from puna.stages.io.folders import new_folder
from puna.storage import Artifact, PunaError

Row = dict[str, Any]
SIDES = ("chosen", "rejected", "edited")


def export_data(artifact: Artifact, folder: Path | str, format: Literal["parquet", "jsonl"] = "parquet") -> Path:
    """Write the main table of an artifact to `folder` as one file, whole or not at all; returns the file.

    Parquet holds the columns as they are stored. JSON lines hold conversations in the field's layout: `messages` (instructions),
    `prompt` with `chosen` and `rejected`, or with `completion` and `label` where a preference has one side, all as lists of
    messages. PunaError where the artifact has no table, holds bytes that JSON cannot, or the folder holds something already.
    """
    if artifact.kind not in artifact.tables:
        raise PunaError(f"{artifact.id} has no table to export; export_model writes models and tokenizers")
    schema = next(iter(artifact.batches(rows=1)), None)
    if format == "jsonl" and schema is not None:
        wrong = [field.name for field in schema.schema if pa.types.is_binary(field.type)]
        if wrong:
            raise PunaError(f"{artifact.id}: the column {wrong[0]} holds bytes, which JSON cannot; export it as parquet")
    with new_folder(Path(folder)) as part:
        (_parquet if format == "parquet" else _jsonl)(artifact, part / f"{artifact.kind}.{format}")
    return Path(folder) / f"{artifact.kind}.{format}"


def _parquet(artifact: Artifact, file: Path) -> None:
    writer: pq.ParquetWriter | None = None
    try:
        for batch in artifact.batches():
            if writer is None:
                writer = pq.ParquetWriter(file, batch.schema, compression="zstd")
            writer.write_batch(batch)
        if writer is None:
            pq.write_table(artifact.read(), file)
    finally:
        if writer is not None:
            writer.close()


def _jsonl(artifact: Artifact, file: Path) -> None:
    with file.open("w", encoding="utf-8") as out:
        for row in _rows(artifact):
            out.write(json.dumps(row, ensure_ascii=False, default=_plain) + "\n")
        out.flush()
        os.fsync(out.fileno())


def _rows(artifact: Artifact) -> Iterator[Row]:
    shape = SHAPES.get(artifact.kind, dict)
    for batch in artifact.batches(rows=1024):
        yield from map(shape, batch.to_pylist())


def _rest(row: Row) -> Row:
    done = ("messages", "tools", "others", *SIDES)
    return {name: value for name, value in row.items() if name not in done and value is not None}


def _with_tools(row: Row) -> Row:
    tools = tools_of(row)
    return {"tools": tools} if tools else {}


def _instruction(row: Row) -> Row:
    return {"messages": messages_of(row), **_with_tools(row), **_rest(row)}


def _prompt(row: Row) -> Row:
    return {"prompt": messages_of(row), **_with_tools(row), **_rest(row)}


def _preference(row: Row) -> Row:
    sides: Row = {side: [message] for side in SIDES if (message := message_of(row, side)) is not None}
    if ("chosen" in sides) != ("rejected" in sides) and "edited" not in sides:
        ((side, answer),) = sides.items()
        sides = {"completion": answer, "label": side == "chosen"}
    others = {"others": others_of(row)} if row["others"] is not None else {}
    return {"prompt": messages_of(row), **sides, **others, **_with_tools(row), **_rest(row)}


SHAPES: dict[str, Callable[[Row], Row]] = {"instructions": _instruction, "prompts": _prompt, "preferences": _preference}


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no JSON value")
