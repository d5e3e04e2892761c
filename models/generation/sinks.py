"""Endless generation in bounded memory: a cache of the first tokens (attention sinks) and the last ones (StreamingLLM, Xiao et al. 2024).

Positions count within the cache, as in the paper's 3.2, and keys are cached after rotation. So tokens are dropped in blocks, and the keys
after a block are rotated back by its length, each key only a few times. Which tokens a token sees depends only on its index in
the sequence, not on chunks, pauses or the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from puna.kernels.operators import wide
from puna.kernels.paged_attention import PAGE
from puna.models.config import ModelConfig
from puna.models.transformer import rotary_table


@dataclass(frozen=True)
class Kept:
    """The tokens of a sequence that a cache keeps: its first `sinks` tokens and at least its last `window`, both in whole pages. At `room`
    tokens, `step` tokens (about a quarter of the window) are dropped. The constructor raises ValueError for invalid numbers."""

    sinks: int
    window: int

    def __post_init__(self) -> None:
        if self.window < PAGE or self.sinks < 0 or self.window % PAGE or self.sinks % PAGE:
            raise ValueError(f"sinks and window must be whole pages of {PAGE} tokens, window > 0, not {self.sinks} and {self.window}")

    @property
    def step(self) -> int:
        """Return the number of tokens that are dropped at once."""
        return max(PAGE, self.window // 4 // PAGE * PAGE)

    @property
    def room(self) -> int:
        """Return the maximum number of tokens of one sequence in the cache: sinks, window and one step."""
        return self.sinks + self.window + self.step

    def dropped_tokens(self, computed: int) -> int:
        """Return how many of a sequence's `computed` tokens the cache has dropped."""
        return -(-max(0, computed - self.room) // self.step) * self.step

    def turn_back(self, keys: Sequence[Tensor], pages: Sequence[int], config: ModelConfig) -> None:
        """Rotate the keys in these pages back by `step` positions. keys: the rotated part of each layer's pages, [P, S, G, K]."""
        numbers = torch.tensor(pages, device=keys[0].device)
        cos, sin = rotary_table(config, torch.tensor([self.step], device=keys[0].device), wide(keys[0].dtype))
        # The first rotation already multiplied the keys by `growth`.
        growth = 1.0 if config.rope_scaling is None else config.rope_scaling.growth
        cos, sin = cos / growth, sin / growth
        for keys_PSGK in keys:
            first, second = keys_PSGK[numbers].to(cos.dtype).chunk(2, -1)
            turned = torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
            keys_PSGK[numbers] = turned.to(keys_PSGK.dtype)


def kept_tokens(config: ModelConfig, sinks: int, window: int | None, whole: bool) -> Kept | None:
    """Return the limits of the tokens that an engine's cache keeps, or None if it keeps all. `whole`: exact passes or a draft need all
    tokens. Raise ValueError if the settings conflict or do not suit the model."""
    if window is None:
        if sinks:
            raise ValueError(f"sinks = {sinks}: sinks are kept only with a window; set a window, or leave sinks out")
        return None
    if whole:
        raise ValueError(f"window = {window}: a draft, or log-probs equal to training's (exact), need all tokens; leave one of the two out")
    limits = Kept(sinks, window)
    if any(config.windows):
        raise ValueError(f"the model has a sliding window of its own, {config.sliding_window} tokens: leave sinks and window out")
    if limits.room > config.max_position_embeddings:
        raise ValueError(
            f"sinks {sinks} and window {window} need room for {limits.room} tokens, since a quarter of the window is dropped at once; "
            f"the model's context has only {config.max_position_embeddings}"
        )
    return limits
