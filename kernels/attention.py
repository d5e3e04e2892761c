"""Attention under the forest mask, with grouped queries: query q sees key k iff k <= q < end[k].

Shapes: T tokens, H query heads, G key-value heads, R = H / G query heads to each, K head width;
of one tile: n queries, m keys.

The mask is never laid out as T x T. Queries are cut into tiles of consecutive rows; a tile's keys are
those any of its rows sees: first the keys that all rows see, which need no mask, then the others with
theirs. Keys that no row sees (another document, a sibling's answer) are never touched, and the keys of
a shared prompt stand in memory once. The keys of one tile have one softmax, so tiles are independent,
and the backward computes a tile's softmax again instead of keeping it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_ROWS = 64  # queries of one tile
TILE_PAIRS = 1 << 19  # query-key pairs of one tile: behind a long context it has fewer queries


@dataclass(frozen=True, eq=False)
class Tile:
    """Queries [n] and the keys they see: a slice where contiguous, else int64 indices [m].

    `bias` [n, p] fp32 is -inf where a query does not see one of the last p keys, else 0; all queries see
    the keys before those.
    """

    rows: slice
    keys: slice | Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class ForestMask:
    """`end` [T] int32 and its segments (start, stop, end): maximal runs of tokens with one `end`.

    With a `window`, a query sees only the last `window` tokens of its path, itself included.
    """

    end: Tensor
    segments: tuple[tuple[int, int, int], ...]
    window: int | None = None

    @staticmethod
    def from_end(end: Tensor) -> ForestMask:
        """Cut `end` into segments. Raises ValueError where intervals do not nest."""
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

    def within(self, window: int | None) -> ForestMask:
        """The same forest under a sliding window of that many tokens of a path (None: the whole path)."""
        if window == self.window:
            return self
        if window not in self._windowed:
            self._windowed[window] = ForestMask(self.end, self.segments, window)
        return self._windowed[window]

    @cached_property
    def _windowed(self) -> dict[int | None, ForestMask]:
        return {}

    @cached_property
    def depths(self) -> Tensor:
        """[T] int64 on CPU: how many tokens stand before each one on its path."""
        depths = torch.arange(len(self.end))
        path: list[tuple[int, int, int]] = []  # (stop, end, depth of the next token) of the segments above
        for start, stop, end in self.segments:
            while path and path[-1][1] <= start:
                path.pop()
            depth = path[-1][2] if path else 0
            depths[start:stop] += depth - start
            path.append((stop, end, depth + stop - start))
        return depths

    def dense(self) -> Tensor:
        """[T, T] bool, True where the row's query sees the column's key. For the reference."""
        index = torch.arange(len(self.end), device=self.end.device)
        seen = (index[None, :] <= index[:, None]) & (index[:, None] < self.end[None, :])
        if self.window is not None:
            depths = self.depths.to(self.end.device)
            seen &= depths[:, None] - depths[None, :] < self.window
        return seen

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles of all queries, in order; a layout's tiles are made once and serve every layer."""
        end, index = self.end.cpu(), torch.arange(len(self.end))
        return tuple(_tile(self, end, index, start, stop, self.end.device) for start, stop in _row_cuts(self.segments))


def _row_cuts(segments: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[int, int]]:
    """Cut rows into tiles of at most TILE_ROWS, and where a segment ends once a tile is half full."""
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


def _tile(
    mask: ForestMask, end: Tensor, index: Tensor, start: int, stop: int, device: torch.device
) -> Tile:
    seen = end[:start] > start
    if mask.window is not None:
        seen &= mask.depths[:start] > mask.depths[start:stop].min() - mask.window
    before = torch.nonzero(seen)[:, 0]
    # Under a window the oldest keys are those that only some rows see: all are masked, and stay in order.
    whole = (end[before] >= stop) & (mask.window is None)
    some = torch.cat([before[~whole], index[start:stop]])
    rows = index[start:stop, None]
    hidden = (some[None, :] > rows) | (rows >= end[some][None, :])
    if mask.window is not None:
        hidden |= mask.depths[rows] - mask.depths[some][None, :] >= mask.window
    keys = torch.cat([before[whole], some])
    contiguous = int(keys[-1]) - int(keys[0]) + 1 == len(keys) and bool((keys[1:] > keys[:-1]).all())
    where = slice(int(keys[0]), stop) if contiguous else keys.to(device)
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf).to(device) if bool(hidden.any()) else None
    return Tile(slice(start, stop), where, bias)


def attention_reference(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, mask: ForestMask) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask) v with a dense mask, in the inputs' dtype. Returns [T, H, K]."""
    R = q_THK.shape[1] // k_TGK.shape[1]
    k_THK, v_THK = (x.repeat_interleave(R, dim=1) for x in (k_TGK, v_TGK))
    scores_HTT = torch.einsum("qhk,shk->hqs", q_THK, k_THK) / math.sqrt(q_THK.shape[-1])
    scores_HTT = scores_HTT.masked_fill(~mask.dense(), -math.inf)
    return torch.einsum("hqs,shk->qhk", scores_HTT.softmax(-1), v_THK)


def _stack(x_nHK: Tensor, G: int) -> Tensor:
    """[n, H, K] -> [G, n R, K]: the R heads of a group become rows of one matrix."""
    n, H, K = x_nHK.shape
    return x_nHK.reshape(n, G, H // G, K).transpose(0, 1).reshape(G, n * (H // G), K)


def _unstack(x_GmK: Tensor, n: int) -> Tensor:
    """The inverse of `_stack`: [G, n R, K] -> [n, H, K]."""
    G, _, K = x_GmK.shape
    return x_GmK.view(G, n, -1, K).transpose(0, 1).reshape(n, -1, K)


def _probabilities(q_GnK: Tensor, k_GmK: Tensor, bias: Tensor | None, n: int) -> Tensor:
    """Softmax of one tile, [G, n R, m], from queries already scaled."""
    scores = torch.bmm(q_GnK, k_GmK.transpose(1, 2))
    if bias is not None:
        scores.view(len(scores), n, -1, scores.shape[-1])[..., -bias.shape[1] :] += bias[:, None, :]
    return torch.softmax(scores, -1, out=scores)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THK, k_TGK, v_TGK, mask):  # type: ignore[no-untyped-def]
        G, scale = k_TGK.shape[1], q_THK.shape[-1] ** -0.5
        out_THK = torch.empty(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
        for tile in mask.tiles:
            n = tile.rows.stop - tile.rows.start
            k, v = k_TGK[tile.keys].transpose(0, 1), v_TGK[tile.keys].transpose(0, 1)
            p = _probabilities(_stack(q_THK[tile.rows] * scale, G), k, tile.bias, n)
            out_THK[tile.rows] = _unstack(torch.bmm(p, v), n)
        ctx.save_for_backward(q_THK, k_TGK, v_TGK, out_THK)
        ctx.mask = mask
        return out_THK

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_THK):  # type: ignore[no-untyped-def]
        q_THK, k_TGK, v_TGK, out_THK = ctx.saved_tensors
        G, scale = k_TGK.shape[1], q_THK.shape[-1] ** -0.5
        dq_THK = torch.empty_like(out_THK)
        dk_TGK, dv_TGK = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k_TGK, v_TGK))
        for tile in ctx.mask.tiles:
            rows, n = tile.rows, tile.rows.stop - tile.rows.start
            k, v = k_TGK[tile.keys].transpose(0, 1), v_TGK[tile.keys].transpose(0, 1)
            q, g = _stack(q_THK[rows] * scale, G), _stack(grad_THK[rows], G)
            p = _probabilities(q, k, tile.bias, n)
            _accumulate(dv_TGK, tile.keys, torch.bmm(p.transpose(1, 2), g))
            # d scores = p (dp - sum(p dp)), and sum(p dp) over keys is grad . out (FlashAttention, 3.1).
            delta = _stack((grad_THK[rows] * out_THK[rows]).sum(-1, keepdim=True), G)
            ds = torch.bmm(g, v.transpose(1, 2)).sub_(delta).mul_(p)
            dq_THK[rows] = _unstack(torch.bmm(ds, k).mul_(scale), n)
            _accumulate(dk_TGK, tile.keys, torch.bmm(ds.transpose(1, 2), q))
        return dq_THK, dk_TGK, dv_TGK, None


def _accumulate(total_TGK: Tensor, keys: slice | Tensor, part_GmK: Tensor) -> None:
    part = part_GmK.transpose(0, 1)
    if isinstance(keys, slice):
        total_TGK[keys] += part
    else:
        total_TGK.index_add_(0, keys, part)


def attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, mask: ForestMask) -> Tensor:
    """Attention under the forest mask, scaled by 1/sqrt(K). Returns [T, H, K] in the inputs' dtype.

    Low precision is computed in fp32.
    """
    if q_THK.dtype not in (torch.float32, torch.float64):
        wide = _TiledAttention.apply(q_THK.float(), k_TGK.float(), v_TGK.float(), mask)
        return wide.to(q_THK.dtype)
    return _TiledAttention.apply(q_THK, k_TGK, v_TGK, mask)
