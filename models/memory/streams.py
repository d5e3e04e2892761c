"""Reading of a checkpoint's tensors from disk, layer by layer and ahead of use, into buffers.

Reads bypass the page cache if the file system has O_DIRECT: this is several times faster than the page faults of a memory map, and takes no
memory beyond the buffers. Cached pages are copied (RWF_NOWAIT). Without O_DIRECT, pages are dropped from the cache after reading."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from puna.models.formats.checkpoint import Entry

ALIGN = 4096  # alignment of direct reads, in bytes
CHUNK = 16 << 20  # maximum bytes of one read
GAP = 1 << 20  # two tensors are read together if at most this many bytes lie between them


class Place(NamedTuple):
    """A tensor's place in a buffer. `start`: its byte offset in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class Extent(NamedTuple):
    """A range of a file, read into a buffer at `start`: `size` bytes from `offset`. The file must hold the first `needed` of them."""

    path: Path
    offset: int
    size: int
    needed: int
    start: int


@dataclass(frozen=True)
class Layout:
    """The file ranges that are read into one buffer, and the tensors' places in that buffer."""

    extents: tuple[Extent, ...]
    places: tuple[Place, ...]

    @property
    def size(self) -> int:
        last = self.extents[-1]
        return last.start + last.size

    @staticmethod
    def of(tensors: Mapping[str, Entry]) -> Layout:
        """Return a layout for these tensors. Tensors of one file that are at most `GAP` bytes apart are read as one range."""
        extents: list[Extent] = []
        places = []
        for name, one in sorted(tensors.items(), key=lambda item: (item[1].path, item[1].begin)):
            last = extents[-1] if extents else None
            if last is not None and last.path == one.path and one.begin <= last.offset + last.size + GAP:
                start, offset = last.start, last.offset
                extents.pop()
            else:
                start, offset = (0 if last is None else last.start + last.size), one.begin // ALIGN * ALIGN
            extents.append(Extent(one.path, offset, -(-(one.end - offset) // ALIGN) * ALIGN, one.end - offset, start))
            places.append(Place(name, one.dtype, one.shape, start + one.begin - offset))
        return Layout(tuple(extents), tuple(places))


class Buffer:
    """A buffer whose memory begins at a multiple of ALIGN, as direct reads require."""

    def __init__(self, size: int, pinned: bool = False) -> None:
        whole = torch.empty(size + ALIGN, dtype=torch.uint8, pin_memory=pinned)
        start = -whole.data_ptr() % ALIGN
        self.bytes = memoryview(whole.numpy().data)[start : start + size]

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        return {
            place.name: torch.frombuffer(self.bytes, dtype=place.dtype, count=math.prod(place.shape), offset=place.start).view(place.shape)
            for place in layout.places
        }


class Reader:
    """A reader of layouts from files that it keeps open. The constructor raises OSError if a file cannot be opened."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.direct = True
        self._files: dict[Path, int] = {}
        self._cached: dict[Path, int] = {}  # the same files, opened without O_DIRECT
        self.close = weakref.finalize(self, _close, self._files, self._cached)
        for path in paths:
            self._files[path] = self._open(path)
            if self.direct:
                self._cached[path] = os.open(path, os.O_RDONLY)

    def _open(self, path: Path) -> int:
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(file, [Buffer(ALIGN).bytes], 0)
                return file
            except OSError:
                os.close(file)
        except (OSError, AttributeError):  # the file system or the operating system has no O_DIRECT
            pass
        self.direct = False
        return os.open(path, os.O_RDONLY)

    def fill(self, layout: Layout, buffer: Buffer) -> int:
        """Read a layout's file ranges into the buffer; return the number of bytes read. Raise OSError if a file has become shorter."""
        total = 0
        for path, offset, size, needed, start in layout.extents:
            done = 0
            while done < needed:
                end = min(done + CHUNK, size)
                some = buffer.bytes[start + done : start + end]
                got = self._at_hand(path, some, offset + done) or os.preadv(self._files[path], [some], offset + done)
                if not got:
                    raise OSError(f"{path} has become shorter while it is in use: import the model again")
                done += got
            if not self.direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._files[path], offset, size, os.POSIX_FADV_DONTNEED)
            total += done
        return total

    def _at_hand(self, path: Path, some: memoryview, offset: int) -> int:
        """Copy the bytes at `offset` that the page cache holds into `some`; return their number: all, or a multiple of ALIGN (0: none)."""
        if path not in self._cached:
            return 0
        try:
            got = os.preadv(self._cached[path], [some], offset, os.RWF_NOWAIT)
        except (OSError, AttributeError):  # nothing is cached, or the system has no RWF_NOWAIT
            return 0
        return got if got == len(some) else got // ALIGN * ALIGN


def _close(*files: dict[Path, int]) -> None:
    for file in chain.from_iterable(one.values() for one in files):
        os.close(file)


@dataclass
class Counts:
    """The work of a loader: bytes read, seconds of reading, and seconds that `Loader.take` waited."""

    bytes: int = 0
    reading: float = 0.0
    waiting: float = 0.0


class Loader:
    """A thread that reads layouts in a cycle, ahead of their use. It starts at the first `take`; deletion, `close` or an error ends it."""

    def __init__(self, reader: Reader, layouts: Mapping[int, Layout], buffers: int = 2, pinned: bool = False) -> None:
        self.layouts, self.counts = dict(layouts), Counts()
        size = max(layout.size for layout in layouts.values())
        self._free: queue.SimpleQueue[Buffer | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[int, Buffer] | OSError] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put(Buffer(size, pinned))
        work = (reader, self.layouts, self._free, self._ready, self.counts)
        self._thread = threading.Thread(target=_load, args=work, name="puna-loader", daemon=True)
        self.close = weakref.finalize(self, self._free.put, None)

    def take(self, number: int) -> Buffer:
        """Return the buffer of layout `number` once read; release buffers that were read before it. Raise OSError if reading failed."""
        if not self._thread.is_alive() and self._thread.ident is None:
            self._thread.start()
        before = time.perf_counter()
        try:
            while True:
                ready = self._ready.get()
                if isinstance(ready, OSError):
                    self._ready.put(ready)
                    raise ready
                if ready[0] == number:
                    return ready[1]
                self._free.put(ready[1])
        finally:
            self.counts.waiting += time.perf_counter() - before

    def give(self, buffer: Buffer) -> None:
        """Release a buffer whose tensors are no longer in use."""
        self._free.put(buffer)


def _load(
    reader: Reader, layouts: dict[int, Layout], free: queue.SimpleQueue[Buffer | None],
    ready: queue.SimpleQueue[tuple[int, Buffer] | OSError], counts: Counts,
) -> None:  # fmt: skip
    """Read layouts in a cycle until `free` yields None or a read fails. `Loader` is not referenced here, so that it can be deleted."""
    while True:
        for number, layout in layouts.items():
            buffer = free.get()
            if buffer is None:
                return
            before = time.perf_counter()
            try:
                counts.bytes += reader.fill(layout, buffer)
            except OSError as error:
                ready.put(error)
                return
            counts.reading += time.perf_counter() - before
            ready.put((number, buffer))
