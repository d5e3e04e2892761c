"""Checksums of the blocks of a file on an object store. They are in the object's metadata, so every response contains all of them.

Reads of an opened file are extended to whole blocks, whose checksums are verified. So Parquet, DuckDB and model loaders detect bits that
flipped in transit or at rest. Files that other tools copied into the bucket have no checksums and are not verified."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

LEAST = 1 << 16
MOST = 320  # maximum number of blocks of a file, since an object can have 2 kB of metadata
FIRST, LARGEST = 1 << 20, 8 << 20  # bytes fetched for a smaller read: at first, and at most; doubled while reads are sequential


def block_bytes(size: int) -> int:
    """Return the size in bytes of the blocks of a file of `size` bytes, a power of two."""
    return max(LEAST, 1 << max(0, -(-size // MOST) - 1).bit_length())


def of_bytes(data: bytes) -> str:
    return _text(io.BytesIO(data), len(data))


def of_file(path: Path) -> str:
    with path.open("rb") as file:
        return _text(file, path.stat().st_size)


def _text(file: BinaryIO, size: int) -> str:
    sums = [zlib.crc32(block) for block in iter(partial(file.read, block_bytes(size)), b"")]
    return base64.b64encode(np.array(sums, dtype="<u4").tobytes()).decode()


def whole_blocks(start: int, stop: int, size: int) -> tuple[int, int]:
    """Return the smallest range of whole blocks that contains the bytes `start` to `stop` - 1 of a file of `size` bytes."""
    step = block_bytes(size)
    return start // step * step, min(size, -(-stop // step) * step)


def right(data: bytes, start: int, size: int, sums: str) -> bool:
    """True if `data`, at offset `start` of a file of `size` bytes, matches the file's checksums `sums`. `start` must begin a block."""
    step, view = block_bytes(size), memoryview(data)
    try:
        expected = np.frombuffer(base64.b64decode(sums, validate=True), dtype="<u4")
    except ValueError:
        return False
    actual = [zlib.crc32(view[at : at + step]) for at in range(0, len(data), step)]
    first = start // step
    return len(expected) == -(-size // step) and expected[first : first + len(actual)].tolist() == actual


class Reader(io.RawIOBase):
    """A seekable reader of a file of `size` bytes; `fetch(start, stop)` returns the bytes of a range after verifying their checksums."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._size, self._fetch = size, fetch
        self._at = 0
        self._start, self._window = 0, memoryview(b"")
        self._ahead = FIRST

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return the next `size` bytes, or fewer at the end of the file; all if `size` is negative or None."""
        count = max(0, self._size - self._at)
        count = count if size is None or size < 0 else min(size, count)
        if not count:
            return b""
        end = self._start + len(self._window)
        if not self._start <= self._at <= self._at + count <= end:
            follows = len(self._window) > 0 and self._start <= self._at <= end
            self._ahead = min(LARGEST, 2 * self._ahead) if follows else FIRST
            self._start, stop = whole_blocks(self._at, min(self._size, self._at + max(count, self._ahead)), self._size)
            self._window = memoryview(self._fetch(self._start, stop))
        begin = self._at - self._start
        self._at += count
        return bytes(self._window[begin : begin + count])

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
