"""Documents as full rows of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def pack(tokens: Any, ids: list[str], sequence_length: int) -> dict[str, pa.Array]:
    """Pack documents (lists of ids) into rows, in order; return columns `tokens`, `lengths` and `documents`."""
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
