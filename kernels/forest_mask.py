"""The forest mask, with an optional sliding window, and its block structure for attention: query q sees key k iff k <= q < end[k].

One int32 per token tells which queries see the token, in packed documents, preference pairs, or many answers to one prompt. No T x T mask
is stored: on a CPU the mask becomes tiles of queries with the keys that they see, on a GPU lists of the blocks to visit. Tiles and lists
are computed once per mask and shared by all layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from puna.kernels.paged_attention import PAGE

TILE_ROWS = 64  # maximum queries of one tile
TILE_PAIRS = 1 << 19  # maximum query-key pairs of one tile: after a long context, a tile has fewer queries


@dataclass(frozen=True, eq=False)
class Tile:
    """Queries [n], and the keys that they see: a slice if contiguous, else int64 indices [m]. `bias` [n, p] fp32: -inf where a query does
    not see one of the last p keys, else 0 (None: p is 0); all queries see all earlier keys of the tile."""

    rows: slice
    keys: slice | Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class ForestMask:
    """A forest mask: `end` [T] int32, and its segments (start, stop, end), the maximal runs of tokens with equal `end`. With a `window`, a
    query sees only the last `window` tokens of its path, itself included."""

    end: Tensor
    segments: tuple[tuple[int, int, int], ...]
    window: int | None = None

    @staticmethod
    def from_end(end: Tensor) -> ForestMask:
        """Return the mask of `end` [T]. Raise ValueError if the intervals [token, end[token]) do not nest."""
        values = end.cpu()
        if not len(values):
            return ForestMask(end, ())
        cuts = (torch.nonzero(values[1:] != values[:-1])[:, 0] + 1).tolist()
        starts, stops = [0, *cuts], [*cuts, len(values)]
        segments = tuple(zip(starts, stops, values[torch.tensor(starts)].tolist(), strict=True))
        path = [len(values)]
        for start, stop, last in segments:
            while path[-1] <= start:
                path.pop()
            if not stop <= last <= path[-1]:
                raise ValueError(f"end[{start}] is {last}: it must lie between {stop} and {path[-1]}")
            path.append(last)
        return ForestMask(end, segments)

    def to(self, device: torch.device | str) -> ForestMask:
        """Return this mask on a device, without computing the segments again."""
        return ForestMask(self.end.to(device), self.segments, self.window)

    def within(self, window: int | None) -> ForestMask:
        """Return this mask with a sliding window of `window` tokens of a path (None: the whole path). Raise ValueError if it is below 1."""
        if window == self.window:
            return self
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, not {window}: a token sees itself")
        if window not in self._windows:
            self._windows[window] = ForestMask(self.end, self.segments, window)
        return self._windows[window]

    @cached_property
    def _windows(self) -> dict[int | None, ForestMask]:
        return {}

    # Training may use cached tensors later, and tensors made in inference mode cannot be saved for a backward pass.

    @cached_property
    @torch.inference_mode(False)
    def depths(self) -> Tensor:
        """Return each token's depth on its path, [T] int32: the number of earlier tokens whose subtree has not ended."""
        T = len(self.end)
        none, one = (self.end.new_full((size,), value, dtype=torch.int64) for size, value in ((T + 1, 0), (T, 1)))
        ended = none.scatter_add(0, self.end.long(), one)[:T].cumsum(0)
        return (torch.arange(T, device=self.end.device) - ended).to(torch.int32)

    def dense(self) -> Tensor:
        """Return [T, T] bool, True where the row's query sees the column's key; for reference implementations."""
        index = torch.arange(len(self.end), device=self.end.device)
        seen = (index[None, :] <= index[:, None]) & (index[:, None] < self.end[None, :])
        if self.window is not None:
            seen &= self.depths[:, None] - self.depths[None, :] < self.window
        return seen

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Return the tiles of all queries, in order."""
        end, depths = self.end.cpu(), self.depths.cpu()
        return tuple(_tile(end, depths, self.window, start, stop) for start, stop in _row_cuts(self.segments))

    @cached_property
    @torch.inference_mode(False)
    def tile_layout(self) -> list[Tensor]:
        """Return the tiles as tensors, for `unpack_tiles`: a table on the CPU, and all key indices and all biases, on `end`'s device."""
        return _tile_layout(self.tiles, self.end.device)

    @torch.inference_mode(False)
    def some_tiles(self, cuts: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return a tile layout with one tile per range (start, stop) of rows in `cuts`, as if these rows were stored one after another."""
        end, depths, at, tiles = self.end.cpu(), self.depths.cpu(), 0, []
        for start, stop in cuts:
            tile = _tile(end, depths, self.window, start, stop)
            tiles.append(Tile(slice(at, at + stop - start), tile.keys, tile.bias))
            at += stop - start
        return _tile_layout(tiles, self.end.device)

    @cached_property
    @torch.inference_mode(False)
    def paged_layout(self) -> list[Tensor]:
        """Return the forest as a plan for `paged_attention`, in which every segment is a sequence: page tables, sequence [T], position [T],
        tokens [M] and their places in the pages [M]. If a path branches within a page, every branch has a copy of the page's tokens."""
        tables: list[list[int]] = []
        tokens: list[int] = []
        places: list[int] = []
        sequence: list[int] = []
        above: list[tuple[int, list[int], list[int]]] = []  # (end, whole pages, tokens of the page begun) of the segments above
        fresh = 0
        for start, stop, end in self.segments:
            while above and above[-1][0] <= start:
                above.pop()
            _, pages, open_pages = above[-1] if above else (0, [], [])
            pages, path = list(pages), [*open_pages, *range(start, stop)]
            whole, count = len(pages) + len(path) // PAGE, -(-len(path) // PAGE)
            tokens += path
            places += range(fresh * PAGE, fresh * PAGE + len(path))
            pages += range(fresh, fresh + count)
            fresh += count
            sequence += [len(tables)] * (stop - start)
            tables.append(pages)
            above.append((end, pages[:whole], path[len(path) // PAGE * PAGE :]))
        width = max(map(len, tables), default=0)
        return [
            torch.tensor([pages + [0] * (width - len(pages)) for pages in tables], dtype=torch.int32).view(-1, width),
            torch.tensor(sequence, dtype=torch.int32),
            self.depths.cpu(),
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor(places, dtype=torch.int64),
        ]

    @torch.inference_mode(False)
    def blocks(self, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the blocks of `columns` keys to visit for each block of `rows` queries, and the query blocks for each key block.

        The tuple is (order_qk, counts_qk, order_kq, counts_kq). `order_qk` [blocks of queries, blocks of keys] int32 begins with the key
        blocks of which every query sees every key, then the key blocks that need the mask; `counts_qk` [blocks of queries, 2] int32 has the
        ends of both parts. The largest `end` of a key block tells if it is skipped, the smallest if it needs no mask. No host sync."""
        if (rows, columns) not in self._blocks:
            kinds_QK = self._block_kinds(rows, columns)
            self._blocks[rows, columns] = (*_visits(kinds_QK), *_visits(kinds_QK.T))
        return self._blocks[rows, columns]

    @cached_property
    def _blocks(self) -> dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]]:
        return {}

    def _block_kinds(self, rows: int, columns: int) -> Tensor:
        """Return [blocks of queries, blocks of keys] int8: 2 if all pairs are visible, 1 if some may be, 0 if none is."""
        T, device = len(self.end), self.end.device
        first_Q = torch.arange(0, T, rows, device=device)[:, None]
        stop_Q = (first_Q + rows).clamp_max(T)
        first_K = torch.arange(0, T, columns, device=device)[None, :]
        last_K = first_K + columns - 1
        smallest, largest = _extremes(self.end, columns)
        some = (first_K < stop_Q) & (largest[None, :] > first_Q)
        every = (last_K <= first_Q) & (smallest[None, :] >= stop_Q)
        if self.window is not None:
            (low_Q, high_Q), (low_K, high_K) = _extremes(self.depths, rows), _extremes(self.depths, columns)
            some &= low_Q[:, None] - high_K[None, :] < self.window
            every &= high_Q[:, None] - low_K[None, :] < self.window
        return some.to(torch.int8) + (some & every).to(torch.int8)


def _extremes(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the minima and the maxima of chunks of `size` values; the last chunk may be shorter."""
    short = -len(values) % size
    padded = torch.cat([values, values[-1:].expand(short)]).view(-1, size)
    return padded.amin(1), padded.amax(1)


def _visits(kinds: Tensor) -> tuple[Tensor, Tensor]:
    order = kinds.argsort(dim=1, descending=True, stable=True).to(torch.int32).contiguous()
    counts = torch.stack([(kinds == 2).sum(1), (kinds > 0).sum(1)], 1).to(torch.int32)
    return order, counts


def _row_cuts(segments: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of tiles of at most TILE_ROWS rows and TILE_PAIRS pairs. A half-full tile may end where a segment ends."""
    first = root = tree_end = 0
    for start, stop, end in segments:
        if start >= tree_end:
            root, tree_end = start, end
        while stop > first:
            size = max(1, min(TILE_ROWS, TILE_PAIRS // (stop - min(root, first))))
            if stop - first < max(1, size // 2):
                break
            yield first, min(first + size, stop)
            first = min(first + size, stop)
    if segments and first < segments[-1][1]:
        yield first, segments[-1][1]


def _tile(end: Tensor, depths: Tensor, window: int | None, start: int, stop: int) -> Tile:
    index = torch.arange(start, stop)
    seen = end[:start] > start
    if window is not None:
        seen &= depths[:start] > depths[start:stop].min() - window
    before = torch.nonzero(seen)[:, 0]
    # Under a window, only some rows may see the oldest keys: so all keys are masked, and stay in order.
    whole = (end[before] >= stop) & (window is None)
    some = torch.cat([before[~whole], index])
    rows = index[:, None]
    hidden = (some[None, :] > rows) | (rows >= end[some][None, :])
    if window is not None:
        hidden |= depths[rows] - depths[some][None, :] >= window
        useful = ~hidden.all(0)
        some, hidden = some[useful], hidden[:, useful]
    keys = torch.cat([before[whole], some])
    contiguous = int(keys[-1]) - int(keys[0]) + 1 == len(keys) and bool((keys[1:] > keys[:-1]).all())
    where = slice(int(keys[0]), stop) if contiguous else keys
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf) if bool(hidden.any()) else None
    return Tile(slice(start, stop), where, bias)


def _tile_layout(tiles: Sequence[Tile], device: torch.device) -> list[Tensor]:
    table, keys, biases, key_at, bias_at = [], [], [], 0, 0
    for tile in tiles:
        indices = None if isinstance(tile.keys, slice) else tile.keys
        first = tile.keys.start if isinstance(tile.keys, slice) else -1
        count = tile.keys.stop - tile.keys.start if isinstance(tile.keys, slice) else len(tile.keys)
        masked = 0 if tile.bias is None else tile.bias.shape[1]
        table.append((tile.rows.start, tile.rows.stop, first, count, masked, key_at, bias_at))
        if indices is not None:
            keys.append(indices)
            key_at += count
        if tile.bias is not None:
            biases.append(tile.bias.flatten())
            bias_at += tile.bias.numel()
    return [
        torch.tensor(table, dtype=torch.int64).view(-1, 7),
        torch.cat([torch.empty(0, dtype=torch.int64), *keys]).to(device),
        torch.cat([torch.empty(0), *biases]).to(device),
    ]


def unpack_tiles(layout: list[Tensor]) -> Iterator[Tile]:
    table, keys, biases = layout
    for start, stop, first, count, masked, key_at, bias_at in table.tolist():
        bias = biases[bias_at : bias_at + (stop - start) * masked].view(stop - start, masked) if masked else None
        yield Tile(slice(start, stop), slice(first, first + count) if first >= 0 else keys[key_at : key_at + count], bias)
