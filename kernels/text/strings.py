"""Conversion of Arrow text columns to byte arrays, and back."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

T = TypeVar("T", bound=np.generic)


def buffers(texts: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the UTF-8 bytes of strings and their offsets int64[n + 1], which may begin after 0; both read-only, copied only if needed."""
    array = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    if isinstance(array, pa.ChunkedArray):  # no chunk at all
        array = pa.array([], pa.large_string())
    array = array.cast(pa.large_string())
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1] if len(array) else np.zeros(1, np.int64)
    return readonly(np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)), readonly(bounds)


def readonly(values: NDArray[T]) -> NDArray[T]:
    """Return a read-only view. Arrow's memory is sometimes writable, and numba would compile loops twice, for writable arrays too."""
    view = values.view()
    view.flags.writeable = False
    return view


def strings(data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> pa.Array:
    """Return the strings whose UTF-8 bytes are concatenated in `data`; `bounds`: the strings' offsets int64[n + 1]."""
    return pa.LargeStringArray.from_buffers(len(bounds) - 1, pa.py_buffer(bounds), pa.py_buffer(data)).cast(pa.string())
