"""Latent attention over pages: for all heads' keys and values, a token keeps one narrow vector and a rotated key part (DeepSeek-V2, 2.1).

Two methods give the same numbers, up to the order of sums:

- spelled out (naive): each step recomputes the keys and values of all its pages, by training's matrix product, for ordinary attention. A
  token's output equals training's bit for bit, so exact passes use this method. It is cheap if many queries see few tokens.
- absorbed: the keys' matrix multiplies the queries, the values' matrix the softmax-weighted sums of latents: no key or value is spelled out
  (the paper's 2.1.2). This method is cheap if few queries see many tokens, as in decoding.

Passes that are not exact use the method with fewer multiplications, or the first method if an adapter wraps the matrix.

Shapes: N the step's tokens, H heads; widths L of latents, C of keys' unrotated part, R of their rotated part, V of values; P pages of S."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from puna.kernels.exact import exact
from puna.kernels.operators import uses_triton, wide
from puna.kernels.paged_attention import PAGE, PagedPlan, new_pages, paged_attention
from puna.models.config import Mla
from puna.models.formats.quantized import QuantizedLinear
from puna.models.layers import LatentAttention, Linear, OverLatents


def new_latents(count: int, mla: Mla, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return zeroed pages [P, S, 1, L + R]. On a CPU they are at least fp32, and take memory only once written."""
    shape = (count, PAGE, 1, mla.kv_lora_rank + mla.qk_rope_head_dim)
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, np.float64 if wide(dtype) == torch.float64 else np.float32))


class LatentPages(OverLatents):
    """A step's attention over latents. `layers`: pages of each layer from `first` on. `places_N`: the tokens' rows in the pages, int64."""

    def __init__(self, layers: Sequence[Tensor], plan: PagedPlan, places_N: Tensor, first: int = 0) -> None:
        self.layers, self.plan, self.places, self.first = layers, plan, places_N, first
        self._room: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def over_latents(self, layer: LatentAttention, q_NHC: Tensor, q_NHR: Tensor, latent_NL: Tensor, k_NR: Tensor) -> Tensor:
        """Write the tokens' latents into the pages; return the attention's output [N, H, V]."""
        pages = self.layers[layer.layer - self.first]
        pages.view(-1, pages.shape[3])[self.places] = torch.cat([latent_NL, k_NR], -1).to(pages.dtype)
        matrix = None if exact() else _matrix(layer)
        if matrix is None or not self._absorbing(layer):
            return self._spelled_out(layer, torch.cat([q_NHC, q_NHR], -1), pages)
        mla, H = layer.mla, q_NHC.shape[1]
        keys_HCL, values_HVL = matrix.view(H, -1, mla.kv_lora_rank).split([mla.qk_nope_head_dim, mla.v_head_dim], 1)
        q_NHL = torch.bmm(q_NHC.transpose(0, 1), keys_HCL).transpose(0, 1)
        q_NHK, scale = torch.cat([q_NHL, q_NHR], -1), mla.qk_head_dim**-0.5
        if uses_triton(q_NHK):
            seen_NHL = paged_attention(q_NHK, pages, pages[..., : mla.kv_lora_rank], self.plan, scale=scale)
        else:
            rows = pages[self._at_hand[0]]
            seen_NHL = self._attend(q_NHK, rows, rows[..., : mla.kv_lora_rank], scale)
        return torch.bmm(seen_NHL.transpose(0, 1), values_HVL.transpose(1, 2)).transpose(0, 1)

    def _spelled_out(self, layer: LatentAttention, q_NHK: Tensor, pages: Tensor) -> Tensor:
        """Return attention over the keys and values of all heads, which exist only during this call."""
        mla, rows = layer.mla, pages[self._at_hand[0]].to(q_NHK.dtype).view(-1, pages.shape[3])
        grown = layer.spelled_out(*(part.contiguous() for part in rows.split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)))
        return self._attend(q_NHK, *(part.unflatten(0, (-1, PAGE)) for part in grown))

    def _attend(self, q_NHK: Tensor, k_PSGK: Tensor, v_PSGV: Tensor, scale: float | None = None) -> Tensor:
        """Return attention over keys and values copied to pages of the kernel's own layout; a step's layers share these pages."""
        shape = G, K, V = (*k_PSGK.shape[2:], v_PSGV.shape[3])
        if shape not in self._room:
            self._room[shape] = new_pages(len(k_PSGK), G, K, V, q_NHK.dtype, q_NHK.device)
        for to, source in zip(self._room[shape], (k_PSGK, v_PSGV), strict=True):
            to.copy_(source)
        return paged_attention(q_NHK, *self._room[shape], self._at_hand[1], scale=scale)

    @cached_property
    def _at_hand(self) -> tuple[Tensor, PagedPlan]:
        """Return the indices (int64) of the pages that any query sees, and the plan with indices into this list instead."""
        plan = self.plan
        tables, sequence, position = (t.numpy() for t in (plan.tables, plan.sequence, plan.position))
        last = np.zeros(len(tables), np.int32)
        np.maximum.at(last, sequence, position // PAGE)
        visible = np.arange(tables.shape[1]) <= last[:, None]
        pages, numbers = np.unique(tables[visible], return_inverse=True)
        renumbered = np.zeros_like(tables)
        renumbered[visible] = numbers
        moved = PagedPlan(torch.from_numpy(renumbered), plan.sequence, plan.position, plan.device)
        return torch.from_numpy(pages.astype(np.int64)).to(plan.device), moved

    def _absorbing(self, layer: LatentAttention) -> bool:
        """True if the absorbed method takes fewer multiplications than the method that spells out keys and values."""
        mla, (pairs, tokens) = layer.mla, self._sizes
        wider = 2 * mla.kv_lora_rank - mla.qk_nope_head_dim - mla.v_head_dim
        grow = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
        return pairs * wider < (tokens - len(self.places)) * grow

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Return the number of pairs of query and key, and the number of tokens whose keys and values would be spelled out."""
        return int(self.plan.position.sum(dtype=torch.int64)) + len(self.places), PAGE * len(self._at_hand[0])


def _matrix(layer: LatentAttention) -> Tensor | None:
    """Return the matrix [H (C + V), L] that projects latents to keys and values; None for any layer but a plain or an 8-bit one."""
    grow = layer.kv_b_proj
    if isinstance(grow, QuantizedLinear):
        return grow.q.to(grow.scale.dtype) * grow.scale[:, None]
    return grow.weight if type(grow) is Linear else None
