"""Keys and values that do not stay in memory: they lie in a file, and come layer by layer while others compute (FlexGen, Sheng et al.
2023).

Two buffers hold a layer's pages each. While one layer computes, a thread reads into the other buffer the pages of the next that this step
sees; then it writes back those that have changed. A page has one number in memory and in the file, and the same bytes, so answers have the
bits that they have with a cache in memory. The file lies in the folder of temporary files (TMPDIR), has its size from the start, and no
name: it is gone with the cache, and with the process however that ends. The system's page cache keeps of it what it has room for.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from puna.kernels.paged_attention import PAGE, PagedPlan
from puna.models.generation.cache import Cache, Layers, copy
from puna.models.generation.sinks import Kept
from puna.models.transformer import Transformer

Runs = list[tuple[int, int]]
"""Pages begin .. end - 1, each."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Io = Callable[[int, list[Any], int], int]


def cache_of(model: Transformer, count: int) -> Cache:
    """Return a cache of so many pages; one that streams, if the model's keys and values do not stay (`offload.py`)."""
    return StreamedCache(model, count) if getattr(model.model, "streamed_keys", False) else Cache(model, count)


class StreamedCache(Cache):
    """A cache whose layers share two buffers. ValueError where the disk has no room for them."""

    def __init__(self, model: Transformer, count: int) -> None:
        super().__init__(model, count, in_turn=True)
        self._file = tempfile.TemporaryFile(prefix="puna-keys-", buffering=0)  # noqa: SIM115  closed with the cache
        # The bytes of each buffer's keys and of its values, [G, count, bytes of a head's page].
        heads = self.config.num_key_value_heads
        self._bytes = [[_bytes(pages).reshape(heads, count, -1) for pages in buffer] for buffer in self.layers[:2]]
        self._layer_size = sum(part.nbytes for part in self._bytes[0])
        size = self._layer_size * len(self.layers)
        try:
            _allot(self._file.fileno(), size)
        except OSError as error:
            folder = tempfile.gettempdir()
            raise ValueError(f"{folder} has no room for {size / 1e9:.3g} GB of keys and values: set TMPDIR to another folder") from error
        self._thread = ThreadPoolExecutor(1, "puna-keys")
        self._writes: list[Future[None]] = []
        self._copies: list[tuple[int, int]] = []
        self._turns: list[tuple[Kept, Sequence[int]]] = []

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to), of each layer once it is here in the next step."""
        self._copies += pairs

    def turn_back(self, kept: Kept, pages: Sequence[int]) -> None:
        """Rotate the keys in these pages back, of each layer once it is loaded in the next step."""
        self._turns.append((kept, pages))

    @contextmanager
    def opened(self, plan: PagedPlan) -> Iterator[Layers]:
        """Yield the layers for a step: each is asked for in its turn, and stays until the next is asked for."""
        writes, self._writes = self._writes, []
        for done in writes:  # an error of the last step's
            done.result()
        layers = Turns(self, plan, self._copies, self._turns)
        self._copies, self._turns = [], []
        try:
            yield layers
        finally:
            self._writes = layers.close()

    def arrive(self, number: int, copies: Sequence[tuple[int, int]], turns: Sequence[tuple[Kept, Sequence[int]]]) -> None:
        """Apply to a loaded layer the changes that were asked for before."""
        copy(self.layers[number], copies)
        for kept, pages in turns:
            kept.turn_back([self.layers[number][0]], pages, self.config)

    def read(self, number: int, runs: Runs) -> Future[None]:
        """Read pages of a layer into its buffer, in the background."""
        return self._submit(os.preadv, number, runs)

    def write(self, number: int, runs: Runs) -> Future[None]:
        """Write pages of a layer from its buffer, in the background."""
        return self._submit(os.pwritev, number, runs)

    def _submit(self, io: Io, number: int, runs: Runs) -> Future[None]:
        # The file, not its number, which another file may have when pages of a cache that is gone are still to be written.
        return self._thread.submit(_move, io, self._file, number * self._layer_size, self._bytes[number % 2], runs)


class Turns(Layers):
    """A step's layers in their order."""

    def __init__(
        self, cache: StreamedCache, plan: PagedPlan, copies: list[tuple[int, int]], turns: list[tuple[Kept, Sequence[int]]]
    ) -> None:
        self._cache, self._todo, self._number = cache, (copies, turns), -1
        tables, sequence, position = (x.numpy() for x in (plan.tables, plan.sequence, plan.position))
        most = np.zeros(len(tables), np.int64)
        np.maximum.at(most, sequence, position // PAGE + 1)
        seen = tables[np.arange(tables.shape[1]) < most[:, None]].tolist()
        changed = tables[sequence, position // PAGE].tolist()
        turned = [page for _, pages in turns for page in pages]
        self._seen = runs([*seen, *(source for source, _ in copies), *turned])
        self._changed = runs([*changed, *(target for _, target in copies), *turned])
        self._coming = [cache.read(number, self._seen) for number in range(min(2, len(self)))]
        self._written: list[Future[None]] = []

    def __len__(self) -> int:
        return len(self._cache.layers)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if number != self._number:
            self._turn(number)
        return self._cache.layers[number]

    def _turn(self, number: int) -> None:
        """Wait for the next layer."""
        self._leave()
        self._number = number
        self._coming.pop(0).result()
        self._cache.arrive(number, *self._todo)

    def _leave(self) -> None:
        """Write back the changes of the layer that has computed, and load the one after the next in its place."""
        if self._number >= 0:
            self._written.append(self._cache.write(self._number, self._changed))
            if self._number + 2 < len(self):
                self._coming.append(self._cache.read(self._number + 2, self._seen))

    def close(self) -> list[Future[None]]:
        """Write back the last layer, and wait. After a step that failed, the layers that it did not come to are copied
        and turned, too, since that is asked for once."""
        for number in range(self._number + 1, len(self)):
            self._turn(number)
        self._leave()
        return self._written


def _allot(file: int, size: int) -> None:
    """Give a file its size. macOS cannot claim the room: there a full disk is told by the first write that does not fit."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def runs(pages: Sequence[int]) -> Runs:
    """Return runs of neighbouring pages."""
    numbers = np.unique(np.asarray(pages, np.int64))
    cuts = np.flatnonzero(np.diff(numbers) > 1)
    return list(zip(numbers[[0, *(cuts + 1)]].tolist(), (numbers[[*cuts, -1]] + 1).tolist(), strict=True))


def _bytes(pages: Tensor) -> Bytes:
    return torch.empty(0, dtype=torch.uint8).set_(pages.untyped_storage()).numpy()


def _move(io: Io, file: IO[bytes], at: int, parts: Sequence[Bytes], runs: Runs) -> None:
    """Read or write pages of keys, then of values, of each head, from `at` on in the file."""
    for part in parts:
        for head in part:
            for begin, end in runs:
                some, place, done = head[begin:end].reshape(-1), at + begin * head.shape[1], 0
                while done < len(some):
                    done += io(file.fileno(), [some[done:]], place + done)
            at += head.nbytes
