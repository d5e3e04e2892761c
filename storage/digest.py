"""Digests of configuration, of files and of the logical content of tables.

A data digest hashes values, not Parquet bytes, since a Parquet footer names the writer's version."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from puna.storage.errors import PunaError
from puna.storage.files import DamagedFile, Files


def canonical(value: Any) -> str:
    """Return the canonical JSON text of a value. Raise PunaError for a value without a stable text (NaN, tuples, sets, objects)."""

    def check(item: Any, where: str) -> None:
        if isinstance(item, float) and not math.isfinite(item):
            raise PunaError(f"{where}: {item} cannot be part of an identity; give a finite number")
        if isinstance(item, list):
            for index, element in enumerate(item):
                if type(element) is not str:
                    check(element, f"{where}[{index}]")
        elif isinstance(item, dict):
            for name, element in item.items():
                if not isinstance(name, str):
                    raise PunaError(f"{where}: key {name!r} is not a string")
                if type(element) is not str:  # most elements are strings: the hashes of a stage's code
                    check(element, f"{where}.{name}")
        elif item is not None and not isinstance(item, (bool, int, float, str)):
            raise PunaError(f"{where}: a {type(item).__name__} has no stable encoding")

    check(value, "value")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def of_value(value: Any) -> str:
    """Return the sha256 of the canonical JSON of `value`, 64 hex digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_stored(files: Files, name: str) -> str:
    """Return the sha256 of a file in a store, 64 hex digits; empty if the store itself finds it damaged."""
    with contextlib.suppress(DamagedFile), files.open(name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # each store's files have `readinto`
    return ""


class Rolling:
    """A running sha256 of a table's column names, types and values in row order. It is independent of batches, compression and writer."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._states: dict[str, Any] = {}
        self._rows = 0

    def update(self, rows: pa.RecordBatch | pa.Table) -> None:
        for batch in rows.to_batches() if isinstance(rows, pa.Table) else [rows]:
            self._rows += batch.num_rows
            for field, column in zip(self._schema, batch.columns, strict=True):
                _update(self._states, field.name, column)

    def hexdigest(self) -> str:
        whole = hashlib.sha256(f"{self._rows}".encode())
        for field in self._schema:
            whole.update(f"\0{field.name}\0{field.type}\0".encode())
        for path in sorted(self._states):
            whole.update(f"\0{path}\0".encode() + self._states[path].digest())
        return whole.hexdigest()


ROW_BYTES = 16


def of_rows(table: pa.Table) -> npt.NDArray[np.uint8]:
    """Return a digest of each row's values, uint8[n, 16]; equal rows have equal digests. Columns are strings, bytes, integers or times."""
    lengths, values = [], []
    for column in table.columns:
        data = column if pa.types.is_string(column.type) or pa.types.is_binary(column.type) else column.cast(pa.int64()).cast(pa.string())
        data = pa.chunked_array(data.cast(pa.large_binary()))
        lengths.append(pc.fill_null(pc.binary_length(data).cast(pa.string()), "-").cast(pa.large_binary()))
        values.append(pc.fill_null(data, b""))
    # All lengths come first, so that different rows never have the same bytes.
    whole = pc.binary_join_element_wise(*lengths, *values, pa.scalar(b" ", pa.large_binary()))
    out = bytearray()
    for chunk in whole.chunks if isinstance(whole, pa.ChunkedArray) else [whole]:
        if len(chunk):
            bounds = np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset : chunk.offset + len(chunk) + 1].tolist()
            data = memoryview(chunk.buffers()[2])
            for begin, end in pairwise(bounds):
                out += hashlib.sha256(data[begin:end]).digest()[:ROW_BYTES]
    return np.frombuffer(bytes(out), np.uint8).reshape(-1, ROW_BYTES)


def of_table(table: pa.Table) -> str:
    rolling = Rolling(table.schema)
    rolling.update(table)
    return rolling.hexdigest()


def _update(states: dict[str, Any], path: str, array: pa.Array) -> None:
    """Add a column's values to its running hashes, in a form that depends only on the values."""

    def feed(aspect: str, data: Any) -> None:
        states.setdefault(f"{path}\0{aspect}", hashlib.sha256()).update(data)

    kind = array.type
    feed("valid", np.asarray(array.is_valid().cast(pa.uint8()), dtype=np.uint8).tobytes())
    array = array.drop_null()
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        binary = array.cast(pa.large_binary())
        feed("length", np.asarray(pc.binary_length(binary), dtype=np.int64).tobytes())
        if len(binary):
            offsets = np.frombuffer(binary.buffers()[1], dtype=np.int64)
            first, last = int(offsets[binary.offset]), int(offsets[binary.offset + len(binary)])
            if last > first:
                feed("value", memoryview(binary.buffers()[2])[first:last])
    elif pa.types.is_list(kind):
        feed("length", np.asarray(pc.list_value_length(array), dtype=np.int64).tobytes())
        _update(states, f"{path}[]", array.flatten())
    elif pa.types.is_boolean(kind):
        feed("value", np.asarray(array.cast(pa.uint8()), dtype=np.uint8).tobytes())
    elif pa.types.is_timestamp(kind):
        feed("value", np.asarray(array.cast(pa.int64()), dtype=np.int64).tobytes())
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        feed("value", array.to_numpy(zero_copy_only=False).tobytes())
    else:
        raise PunaError(f"column {path}: type {kind} has no digest; use strings, numbers, times or lists")
