"""One step of the model on ragged work (any number of tokens of any number of answers), with a KV cache in the pages of `pages.py`.

Shapes: N tokens of the step, D model width. Training uses the same decoder and weights, with another `attend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from puna.kernels.kv_append import kv_append_
from puna.kernels.paged_attention import PAGE, PagedPlan, new_pages, paged_attention
from puna.models.generation.dense import Layers, Pass
from puna.models.generation.latent import LatentPages, new_latents
from puna.models.generation.sinks import Kept
from puna.models.layers import Attend
from puna.models.transformer import Transformer


class Cache:
    """Keys and values of each layer in `count` pages, or the latents that both are computed from."""

    def __init__(self, model: Transformer, count: int) -> None:
        config, (device, dtype) = model.config, model.place
        shape, where = (model.key_value_heads, config.head_dim, config.value_dim), (dtype, device)
        numbers, mla = range(model.first, model.first + len(model.blocks)), config.mla
        self.config, self.windows = config, [config.windows[number] for number in numbers]
        self.layers = [new_pages(count, *shape, *where) for _ in numbers if mla is None]
        self.latents = [new_latents(count, mla, *where) for _ in numbers if mla is not None]

    @property
    def stores(self) -> list[Tensor]:
        """Return the tensors that hold the pages: the layers' latents, or their keys and values."""
        return [*self.latents, *chain.from_iterable(self.layers)]

    @property
    def bytes(self) -> int:
        return sum(pages.untyped_storage().nbytes() for pages in self.stores)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            source, target = (list(pages) for pages in zip(*pairs, strict=True))
            for pages in self.stores:
                pages[target] = pages[source]

    def turn_back(self, kept: Kept, pages: Sequence[int]) -> None:
        """Rotate the keys in these pages back by `kept.step` positions, because this many tokens before them were dropped."""
        mla = self.config.mla
        rotated = [keys for keys, _ in self.layers] if mla is None else [latents[..., mla.kv_lora_rank :] for latents in self.latents]
        kept.turn_back(rotated, pages, self.config)


class Stretch(NamedTuple):
    """Tokens of one answer to be computed, the cache position `begin` of the first, and the answer's pages up to the last token's."""

    pages: Sequence[int]
    begin: int
    tokens: Sequence[int]


def run(model: Transformer, cache: Cache, work: Sequence[Stretch], by_loops: Pass | None = None) -> Tensor:
    """Run the model on `work`, writing keys and values to `cache`; return the hidden states [N, D] of the tokens of `work`, in order."""
    counts = np.array([len(one.tokens) for one in work])
    ids = torch.tensor([token for one in work for token in one.tokens])
    sequence = np.repeat(np.arange(len(work), dtype=np.int32), counts)
    position = (np.arange(len(ids)) + np.repeat([one.begin for one in work] + counts - np.cumsum(counts), counts)).astype(np.int32)
    page_counts = np.array([len(one.pages) for one in work])
    tables = np.zeros((len(work), page_counts.max()), np.int32)
    tables[np.arange(tables.shape[1]) < page_counts[:, None]] = [page for one in work for page in one.pages]
    device, _ = model.place
    plan = PagedPlan(torch.from_numpy(tables), torch.from_numpy(sequence), torch.from_numpy(position), device)
    x_ND = model.embed(ids.to(device))
    if by_loops is not None and not torch.is_autocast_enabled("cpu"):
        return by_loops(x_ND, cache.layers, plan, cache.windows)
    if cache.latents:
        positions, where = _places(plan)
        return model.decode(x_ND, positions, LatentPages(cache.latents, plan, where, model.first))
    return by_operators(model.decode, x_ND, cache.layers, plan, cache.windows, model.first)


def by_operators(
    decoder: Callable[[Tensor, Tensor, Attend], Tensor], x_ND: Tensor, layers: Layers, plan: PagedPlan, windows: Sequence[int | None],
    first: int = 0,
) -> Tensor:  # fmt: skip
    """Return embedded tokens' hidden states by the decoder's own operators, from layer `first` on; write keys and values into `layers`."""
    positions, where = _places(plan)

    def attend(layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGV: Tensor) -> Tensor:
        pages = layers[layer - first]
        kv_append_(*pages, k_NGK, v_NGV, where)
        return paged_attention(q_NHK, *pages, plan, windows[layer - first])

    return decoder(x_ND, positions, attend)


def _places(plan: PagedPlan) -> tuple[Tensor, Tensor]:
    """Return the position of each token of a plan, and the token's row in the pages, [N] int64 each."""
    position = plan.position.long()
    where = plan.tables[plan.sequence.long(), position // PAGE].long() * PAGE + position % PAGE
    return position.to(plan.device), where.to(plan.device)
