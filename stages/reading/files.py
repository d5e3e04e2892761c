"""Files of rows and pages: suffixes, streaming decompression, a row's fields by path, and jobs for files and hub shards."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

import zstandard

from puna.stages import urls
from puna.stages.contract import External, ExternalFile
from puna.storage import PunaError, errors_at

COMPRESSED = (".gz", ".zst", ".xz")
GZIP_MAGIC = b"\x1f\x8b\x08"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
CHUNK_BYTES = 1 << 20
RATIO, FREE_BYTES, RECORD_BYTES = 500, 128 << 20, 200
"""A file may decompress to `FREE_BYTES`, or to `RATIO` times its size if that is more. Very repetitive text has a ratio of about 100.
Each record counts `RECORD_BYTES` extra, because records without text take time, too."""
WINDOW_BYTES = 1 << 31  # window of `zstd --long=31`, which some published dumps use
SLICE_BYTES = 512  # bytes of zstd input per call: four bytes may decompress to 128 KiB, and the library has no limit
DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)  # raised by reading a damaged or truncated file


def suffix(name: str) -> str:
    """Return a file name's suffix in lower case, ignoring a suffix in `COMPRESSED`."""
    path = PurePosixPath(name.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


class Unpacking:
    """A counter of a file's decompressed bytes. `add` raises PunaError above the file's limit. No limit for unseekable files."""

    def __init__(self, name: str, handle: BinaryIO) -> None:
        self._name, self._packed, self._bytes = name, 1 << 60, 0
        if handle.seekable():
            place = handle.tell()
            self._packed = handle.seek(0, io.SEEK_END)
            handle.seek(place)

    def add(self, size: int, records: int = 0) -> None:
        self._bytes += size + RECORD_BYTES * records
        if self._bytes > max(FREE_BYTES, RATIO * self._packed):
            raise PunaError(f"{self._name}: its {self._packed:,} bytes unpack to {self._bytes:,} and more, like a decompression bomb. "
                "If you trust the file, unpack it yourself and give the unpacked file, as JSON Lines or CSV")  # fmt: skip


class _Pieces(io.RawIOBase):
    """A stream of decompressed pieces, which delivers all data before a damaged position."""

    def __init__(self, source: Any, pieces: Iterator[bytes], unpacking: Unpacking) -> None:
        self._source, self._pieces, self._left, self._unpacking = source, pieces, memoryview(b""), unpacking

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        while not self._left and (piece := next(self._pieces, None)) is not None:
            self._left = memoryview(piece)
            self._unpacking.add(len(piece))
        size = min(len(room), len(self._left))
        room[:size], self._left = self._left[:size], self._left[size:]
        return size

    def close(self) -> None:
        self._source.close()
        super().close()


def zstd_pieces(data: Iterator[bytes], window: int = 0) -> Iterator[bytes]:
    """Yield the content of zstd frames in pieces. Raise EOFError if the data end inside a frame. `window`: maximum window of a frame in
    bytes (0: 128 MB); its memory is allocated only as it fills."""
    engine = None
    for left in (chunk[at : at + SLICE_BYTES] for chunk in data for at in range(0, len(chunk), SLICE_BYTES)):
        while left:
            engine = engine or zstandard.ZstdDecompressor(max_window_size=window).decompressobj()
            yield engine.decompress(left)
            left = engine.unused_data if engine.eof else b""
            engine = None if engine.eof else engine
    if engine is not None:
        raise EOFError("the file ends inside a zstd frame")


def decompress(handle: BinaryIO, name: str, unpacking: Unpacking | None = None) -> io.BufferedReader:
    """Return a reader of a file's bytes, decompressed if its suffix is in `COMPRESSED`. Reading raises PunaError at `unpacking`'s limit."""
    ending = PurePosixPath(name.lower()).suffix
    raw: Any = handle
    unpacking = unpacking or Unpacking(name, handle)
    if ending in (".gz", ".xz"):
        file: Any = gzip.GzipFile(fileobj=handle) if ending == ".gz" else lzma.LZMAFile(handle)  # noqa: SIM115  closed by `_Pieces`
        raw = _Pieces(file, iter(partial(file.read1, CHUNK_BYTES), b""), unpacking)
    elif ending == ".zst":
        raw = _Pieces(handle, zstd_pieces(iter(partial(handle.read, CHUNK_BYTES), b""), WINDOW_BYTES), unpacking)
    return io.BufferedReader(raw, CHUNK_BYTES)


def address(source: str, name: str) -> str:
    """Return the URL file:///SOURCE/NAME, for a page or row without a URL."""
    return f"file:///{quote(source)}/{quote(name)}"


def address_of(given: str, source: str, name: str, row: int) -> str:
    """Return a row's URL: `given` if it is absolute or begins with a host (then with https), else the file's URL followed by `given` or, if
    that is "", by the row's number."""
    return given if "://" in given else urls.of_host(given) or f"{address(source, name)}/{quote(given, errors='replace') or row}"


def field_at(row: Any, path: str) -> Any:
    """Return `row["a"]["b"][0]` for the path `a.b.0`; for `a.*.b`, a list with `b` of every item of the list `a`; None if missing. A key of
    `row` that equals the whole path is preferred."""
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


class Job(NamedTuple):
    """One file to read or, if `file` is None, one shard of a hub data set."""

    source: str
    format: str
    name: str
    file: ExternalFile | None
    uri: str = ""
    subset: str | None = None
    split: str = ""
    shard: int = 0
    shards: int = 1

    @property
    def location(self) -> str:
        return self.file.location if self.file is not None else f"{self.uri}/{self.name}"

    def stream(self) -> Any:
        return hub_stream(self.uri, self.subset, self.split).shard(self.shards, self.shard)


def jobs_of(
    inputs: Sequence[External], subset: str | None, split: str, format_of: Callable[[External, ExternalFile], str | None]
) -> Iterator[Job]:
    """Yield one job per file, or per shard of a hub data set (an input without files); skip files whose `format_of` is None."""
    for external in inputs:
        if not external.files:
            shards = hub_stream(external.uri, subset, split).num_shards
            for shard in range(shards):
                yield Job(external.name, "hub", f"{split}/{shard}", None, external.uri, subset, split, shard, shards)
        for file in external.files:
            if (format := format_of(external, file)) is not None:
                yield Job(external.name, format, file.name, file)


def hub_stream(uri: str, subset: str | None, split: str) -> Any:
    """Return the streaming hub data set `hf://datasets/OWNER/NAME[@REVISION]` (or a local folder). Raise PunaError on failure."""
    import datasets

    name, _, revision = uri.removeprefix("hf://").removeprefix("datasets/").partition("@")
    with errors_at(f"input {uri}", ValueError, OSError):
        return datasets.load_dataset(name, subset, split=split, streaming=True, revision=revision or None)
