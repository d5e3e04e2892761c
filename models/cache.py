"""The memory of generation: keys and values in pages, by layer; `generation/pages.py` says whose they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from puna.kernels.paged_attention import new_pages
from puna.models.latent import new_latents
from puna.models.transformer import Transformer


class Cache:
    """Keys and values of each layer in `count` pages, or the latents that they grow out of."""

    def __init__(self, model: Transformer, count: int) -> None:
        config, weight = model.config, model.model.embed_tokens.weight
        shape, where = (config.num_key_value_heads, config.head_dim, config.value_dim), (weight.dtype, weight.device)
        numbers, mla = range(config.num_hidden_layers), config.mla
        self.layers = [new_pages(count, *shape, *where) for _ in numbers if mla is None]
        self.latents = [new_latents(count, mla, *where) for _ in numbers if mla is not None]
        self.windows, self.rotated = config.windows, [keys for keys, _ in self.layers]
        if mla is not None:
            self.rotated = [latents[..., mla.kv_lora_rank :] for latents in self.latents]

    @property
    def stores(self) -> list[Tensor]:
        """All that has `count` pages."""
        return [*self.latents, *(pages for layer in self.layers for pages in layer)]

    @property
    def bytes(self) -> int:
        """Bytes of all pages."""
        return sum(pages.untyped_storage().nbytes() for pages in self.stores)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to)."""
        if pairs:
            source, target = (list(pages) for pages in zip(*pairs, strict=True))
            for pages in self.stores:
                pages[target] = pages[source]
