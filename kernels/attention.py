"""Attention under the forest mask, with grouped queries: query q sees key k iff k <= q < end[k] and k is in the window, if any.

Shapes: T tokens, H query heads, G key-value heads, R = H / G query heads per key-value head, K width of queries and
keys, V width of values; in one tile: n queries, m keys.

On CPU, queries are cut into tiles of consecutive rows; a tile has all keys that any of its rows sees. Keys that no row of a tile sees
(another document, a sibling branch) are not read. The keys of a shared prompt are in memory once. The backward pass recomputes each
tile's softmax. The GPU version is in `attention_triton.py`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from puna.kernels import attention_triton as blocks
from puna.kernels.exact import exact
from puna.kernels.forest_mask import ForestMask, Tile, unpack_tiles
from puna.kernels.kv_append import kv_append_
from puna.kernels.operators import differentiable, operator, uses_triton, wide
from puna.kernels.paged_attention import PAGE, PagedPlan, new_pages, paged_attention

NUMERICS = {"attention": 1, "prepare": 1}
TILE_TENSORS = 3  # tensors of a tile layout; in exact passes the tensors for `paged_attention` follow

__all__ = ["ForestMask", "Tile", "attention", "attention_reference"]


def attention_reference(q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, mask: ForestMask) -> Tensor:
    """Return softmax(q k^T / sqrt(K) + mask) v with a dense mask, [T, H, V] in the inputs' dtype."""
    R = q_THK.shape[1] // k_TGK.shape[1]
    k_THK, v_THV = (x.repeat_interleave(R, dim=1) for x in (k_TGK, v_TGV))
    scores_HTT = torch.einsum("qhk,shk->hqs", q_THK, k_THK) / math.sqrt(q_THK.shape[-1])
    scores_HTT = scores_HTT.masked_fill(~mask.dense(), -math.inf)
    return torch.einsum("hqs,shv->qhv", scores_HTT.softmax(-1), v_THV)


def _stack(x_nHK: Tensor, G: int) -> Tensor:
    """Return x [n, H, K] as [G, n R, K]: the R heads of a group become rows of one matrix."""
    n, H, K = x_nHK.shape
    return x_nHK.reshape(n, G, H // G, K).transpose(0, 1).reshape(G, n * (H // G), K)


def _unstack(x_GmK: Tensor, n: int) -> Tensor:
    """Return x [G, n R, K] as [n, H, K]: the inverse of `_stack`."""
    G, _, K = x_GmK.shape
    return x_GmK.view(G, n, -1, K).transpose(0, 1).reshape(n, -1, K)


def _probabilities(q_GnK: Tensor, k_GmK: Tensor, bias: Tensor | None, n: int) -> Tensor:
    """Return the softmax of one tile, [G, n R, m], from scaled queries."""
    scores = torch.bmm(q_GnK, k_GmK.transpose(1, 2))
    if bias is not None:
        scores.view(len(scores), n, -1, scores.shape[-1])[..., -bias.shape[1] :] += bias[:, None, :]
    return torch.softmax(scores, -1, out=scores)


def _accumulate(total_TGK: Tensor, keys: slice | Tensor, part_GmK: Tensor) -> None:
    part = part_GmK.transpose(0, 1)
    if isinstance(keys, slice):
        total_TGK[keys] += part
    else:
        total_TGK.index_add_(0, keys, part)


def _forward(q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, layout: list[Tensor], window: int) -> tuple[Tensor, Tensor]:
    if len(layout) > TILE_TENSORS:
        return _exact_forward(q_THK, k_TGK, v_TGV, layout[TILE_TENSORS:], window), q_THK.new_empty(0)
    dtype = q_THK.dtype
    q_THK, k_TGK, v_TGV = (x.to(wide(dtype)) for x in (q_THK, k_TGK, v_TGV))
    T, H, K = q_THK.shape
    G = k_TGK.shape[1]
    out_THV = q_THK.new_empty(T, H, v_TGV.shape[2])
    for tile in unpack_tiles(layout):
        n = tile.rows.stop - tile.rows.start
        k, v = k_TGK[tile.keys].transpose(0, 1), v_TGV[tile.keys].transpose(0, 1)
        p = _probabilities(_stack(q_THK[tile.rows] * K**-0.5, G), k, tile.bias, n)
        out_THV[tile.rows] = _unstack(torch.bmm(p, v), n)
    return out_THV.to(dtype), q_THK.new_empty(0)


def _exact_forward(q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, layout: list[Tensor], window: int) -> Tensor:
    """Return attention computed by `paged_attention`, over the same keys in the same order as in generation."""
    tables, sequence, position, tokens, places = layout
    count = int(places[-1]) // PAGE + 1 if len(places) else 0
    pages = new_pages(count, k_TGK.shape[1], k_TGK.shape[2], v_TGV.shape[2], q_THK.dtype)
    kv_append_(*pages, k_TGK[tokens], v_TGV[tokens], places)
    return paged_attention(q_THK, *pages, PagedPlan(tables, sequence, position), window or None)


def _backward(
    grad_THV: Tensor, q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, out_THV: Tensor, lse: Tensor, layout: list[Tensor], window: int
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = q_THK.dtype
    grad_THV, q_THK, k_TGK, v_TGV, out_THV = (x.to(wide(dtype)) for x in (grad_THV, q_THK, k_TGK, v_TGV, out_THV))
    G, scale = k_TGK.shape[1], q_THK.shape[-1] ** -0.5
    dq_THK = q_THK.new_empty(q_THK.shape)
    dk_TGK, dv_TGV = (x.new_zeros(x.shape) for x in (k_TGK, v_TGV))
    for tile in unpack_tiles(layout[:TILE_TENSORS]):
        rows, n = tile.rows, tile.rows.stop - tile.rows.start
        k, v = k_TGK[tile.keys].transpose(0, 1), v_TGV[tile.keys].transpose(0, 1)
        q, g = _stack(q_THK[rows] * scale, G), _stack(grad_THV[rows], G)
        p = _probabilities(q, k, tile.bias, n)
        _accumulate(dv_TGV, tile.keys, torch.bmm(p.transpose(1, 2), g))
        # d scores = p (dp - sum(p dp)), and sum(p dp) over keys is grad . out (FlashAttention, 3.1).
        delta = _stack((grad_THV[rows] * out_THV[rows]).sum(-1, keepdim=True), G)
        ds = torch.bmm(g, v.transpose(1, 2)).sub_(delta).mul_(p)
        dq_THK[rows] = _unstack(torch.bmm(ds, k).mul_(scale), n)
        _accumulate(dk_TGK, tile.keys, torch.bmm(ds.transpose(1, 2), q))
    return dq_THK.to(dtype), dk_TGK.to(dtype), dv_TGV.to(dtype)


def _layout(mask: ForestMask, q_THK: Tensor, V: int) -> list[Tensor]:
    """Return the mask's layout for the kernel on q's device (on a CPU, for exact passes if they are on)."""
    if uses_triton(q_THK):
        return blocks.layout(mask, q_THK, V)
    return mask.tile_layout + mask.paged_layout if exact() else mask.tile_layout


def prepare(mask: ForestMask, K: int, V: int) -> None:
    """Compute and cache the mask's layout for attention in fp32 with keys of width K and values of width V, so that a compiled layer reads
    only tensors. Without this call, or in another dtype on a GPU, the first call of `attention` computes the layout."""
    _layout(mask, mask.end.new_empty(0, 1, K, dtype=torch.float32), V)


def _fake(q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], window: int) -> tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    lse = q.new_empty((H, T) if uses_triton(q) else (0,), dtype=wide(q.dtype))
    return q.new_empty(T, H, v.shape[2]), lse


_attention = operator(
    "forest_attention(Tensor q, Tensor k, Tensor v, Tensor[] layout, int window) -> (Tensor, Tensor)", _forward, blocks.forward, _fake
)
_attention_backward = operator(
    "forest_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] layout, int window)"
    " -> (Tensor, Tensor, Tensor)",
    _backward, blocks.backward, lambda grad, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
)  # fmt: skip


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, layout, ctx.window = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *layout)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *layout = ctx.saved_tensors
    return *_attention_backward(grad, q, k, v, out, lse, layout, ctx.window), [None] * len(layout), None


differentiable(_attention, _gradients, _setup)


def attention(q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, mask: ForestMask) -> Tensor:
    """Return attention under the forest mask, scaled by 1/sqrt(K): [T, H, V] in the inputs' dtype.

    `k` [T, G, K] and `v` [T, G, V], G a divisor of H. Softmax and sums are in fp32 at least; on CPU low precision is computed in fp32.
    Raise ValueError if shapes or the mask do not fit."""
    T, H, K = q_THK.shape
    if k_TGK.shape[::2] != (T, K) or v_TGV.shape[:2] != k_TGK.shape[:2] or H % k_TGK.shape[1] or len(mask.end) != T:
        raise ValueError(
            f"q {list(q_THK.shape)}, k {list(k_TGK.shape)}, v {list(v_TGV.shape)} and a mask of {len(mask.end)} tokens do not fit: "
            "all must have equally many tokens, q and k one width, k and v equal heads that divide q's"
        )
    out, _ = _attention(q_THK, k_TGK, v_TGV, _layout(mask, q_THK, v_TGV.shape[2]), mask.window or 0)
    return out  # type: ignore[no-any-return]


def attention_of_rows(q_nHK: Tensor, k_TGK: Tensor, v_TGV: Tensor, layout: list[Tensor]) -> Tensor:
    """Return some rows' attention over all rows' keys, on a CPU: [n, H, V]. `layout`: `ForestMask.some_tiles` of these rows, windowed."""
    out, _ = _attention(q_nHK, k_TGK, v_TGV, layout, 0)
    return out  # type: ignore[no-any-return]
