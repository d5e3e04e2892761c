"""Files of rows and pages: their kind by name, their bytes decompressed piece by piece, fields of a row by path."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from pathlib import PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import quote

import zstandard

COMPRESSED = (".gz", ".zst", ".xz")
DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)
"""What reading a damaged or truncated file raises."""


def suffix(name: str) -> str:
    """The file's suffix in lower case, that of a compression set aside."""
    path = PurePosixPath(name.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


class _Pieces(io.RawIOBase):
    """What a decompressor gives, piece by piece: what comes before a fault is not lost with it."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        piece = self._source.read1(len(room))
        room[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._source.close()
        super().close()


def unpacked(handle: BinaryIO, name: str) -> io.BufferedReader:
    """The file's bytes, decompressed as its name says."""
    ending = PurePosixPath(name.lower()).suffix
    raw: Any = handle
    if ending == ".gz":
        raw = _Pieces(gzip.GzipFile(fileobj=handle))
    elif ending == ".xz":
        raw = _Pieces(lzma.LZMAFile(handle))  # noqa: SIM115  closed with the reader around it
    elif ending == ".zst":
        raw = zstandard.ZstdDecompressor().stream_reader(handle, read_across_frames=True)
    return io.BufferedReader(raw, 1 << 20)


def address(source: str, name: str) -> str:
    """The address of a file that brings none: its place in the input."""
    return f"file:///{quote(source)}/{quote(name)}"


def address_of(given: str, source: str, name: str, row: int) -> str:
    """The address of a row of a file: the one it brings, below the file's where that is not a whole one; else its place in the file."""
    if "://" in given:
        return given
    return f"{address(source, name)}/{quote(given, errors='replace') or row}"


def field_at(row: Any, path: str) -> Any:
    """`row["a"]["b"][0]` for the path `a.b.0`, for `a.*.b` that of every member of a list; None where there is none.

    A key that holds dots itself comes first.
    """
    if isinstance(row, dict) and path in row:
        return row[path]
    value: Any = row
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part == "*" and isinstance(value, list):
            rest = ".".join(parts[place + 1 :])
            return [field_at(item, rest) for item in value] if rest else value
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            return None
    return value
