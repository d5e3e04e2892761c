"""Removing rows by id: the decision is made once, and every worker reads it from a sorted file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa


def write_removed(folder: Path, ids: Iterable[str]) -> str:
    """Write the sorted ids of the rows to remove below `folder`; returns the file's path for `without`."""
    file = folder / "removed.npy"
    np.save(file, np.unique(np.array([i.encode() for i in ids] or [b""], dtype=bytes)))
    return str(file)


def without(table: pa.Table, file: str) -> pa.Table:
    """The rows of `table` whose id is not in the file."""
    removed = np.load(file, mmap_mode="r")
    ids = np.array([i.encode() for i in table.column("id").to_pylist()], dtype=bytes)
    if not len(ids):
        return table
    place = np.minimum(np.searchsorted(removed, ids), len(removed) - 1)
    return table.filter(pa.array(removed[place] != ids))
