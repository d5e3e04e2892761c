"""The paged KV cache of generation: its tensors, by layer. `generation/pages.py` assigns the pages to answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from puna.kernels.paged_attention import new_pages
from puna.models.generation.latent import new_latents
from puna.models.generation.sinks import Kept
from puna.models.transformer import Transformer

Layers = Sequence[tuple[Tensor, Tensor]]  # keys and values of each layer


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
