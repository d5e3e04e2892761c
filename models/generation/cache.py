"""The memory of generation: keys and values in pages, by layer; `generation/pages.py` says whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from puna.kernels.paged_attention import PagedPlan, new_pages
from puna.models.generation.latent import new_latents
from puna.models.generation.sinks import Kept
from puna.models.transformer import Transformer

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer."""


class Cache:
    """Keys and values of each layer in `count` pages, or the latents that they grow out of. `in_turn`: layers take turns at the pages
    of the first two of them (`streamed_cache.py`)."""

    def __init__(self, model: Transformer, count: int, in_turn: bool = False) -> None:
        config, weight = model.config, model.model.embed_tokens.weight
        shape, where = (config.num_key_value_heads, config.head_dim, config.value_dim), (weight.dtype, weight.device)
        numbers, mla = range(config.num_hidden_layers), config.mla
        self.config, self.windows, self.layers = config, config.windows, list[tuple[Tensor, Tensor]]()
        for number in numbers if mla is None else ():
            self.layers.append(self.layers[number % 2] if in_turn and number > 1 else new_pages(count, *shape, *where))
        self.latents = [new_latents(count, mla, *where) for _ in numbers if mla is not None]

    @property
    def stores(self) -> list[Tensor]:
        """Return all tensors with `count` pages."""
        return list({id(pages): pages for pages in (*self.latents, *(pages for layer in self.layers for pages in layer))}.values())

    @property
    def bytes(self) -> int:
        """Bytes of all pages in memory."""
        return sum(pages.untyped_storage().nbytes() for pages in self.stores)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to)."""
        copy(self.stores, pairs)

    def turn_back(self, kept: Kept, pages: Sequence[int]) -> None:
        """Rotate the keys in these pages back, as tokens fall out before them."""
        mla = self.config.mla
        rotated = [keys for keys, _ in self.layers] if mla is None else [latents[..., mla.kv_lora_rank :] for latents in self.latents]
        kept.turn_back(rotated, pages, self.config)

    def opened(self, plan: PagedPlan) -> AbstractContextManager[Layers]:
        """Yield the layers for a step of this plan."""
        return nullcontext(self.layers)


def copy(stores: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy pages (from, to)."""
    if pairs:
        source, target = (list(pages) for pages in zip(*pairs, strict=True))
        for pages in stores:
            pages[target] = pages[source]
