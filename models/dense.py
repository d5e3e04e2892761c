"""A dense model in fp32 on a CPU by loops that compute a layer each: generation's way through the model, with the model's own weights.

Where the loops do not reach (experts, latent attention, parallel blocks, other types and devices) the model's own operators serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from puna.kernels.dense_layers import DenseLayer, DenseLayers
from puna.kernels.lazy import has_numba
from puna.kernels.operators import INTERPRETED
from puna.kernels.paged_attention import PAGE, PagedPlan
from puna.models.transformer import Transformer, rotary_table

# Where a layer's weights stand in a block of the model.
WEIGHTS = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkvo"},
    **{f"{name}_norm": f"self_attn.{name}_norm.weight" for name in "qk"},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}

NEEDED = {place for name, place in WEIGHTS.items() if not name.endswith("_bias") and name not in ("q_norm", "k_norm")}


class Loops:
    """The layers and the final norm with their rotation."""

    def __init__(self, model: Transformer) -> None:
        config = model.config
        self.config, self.layers = config, _dense_layers(model)
        self._turns = rotary_table(config, torch.arange(0), torch.float32)

    def __call__(
        self, x_ND: Tensor, pages: Sequence[tuple[Tensor, Tensor]], plan: PagedPlan, windows: Sequence[int | None]
    ) -> Tensor:
        """Hidden states of embedded tokens, in their place; their keys and values go into each layer's pages."""
        longest = PAGE * plan.tables.shape[1]
        if len(self._turns[0]) < longest:
            self._turns = rotary_table(self.config, torch.arange(2 * longest), torch.float32)
        self.layers(x_ND, *self._turns, pages, plan, windows)
        return x_ND


def loops(model: Transformer) -> Loops | None:
    """The model by loops, where they can compute it: not with adapters, of which the loops know nothing."""
    config = model.config
    names = {name for block in model.model.layers for name, _ in block.named_parameters()}
    plain = not config.parallel_block and NEEDED <= names <= {*WEIGHTS.values()}
    alike = all(p.dtype == torch.float32 and p.is_cpu and p.is_contiguous() for p in model.parameters())
    return Loops(model) if plain and alike and has_numba() and not INTERPRETED else None


def _dense_layers(model: Transformer) -> DenseLayers:
    config, layers = model.config, []
    for block in model.model.layers:
        found = dict(block.named_parameters())
        given: dict[str, Any] = {name: found.get(place) for name, place in WEIGHTS.items()}
        layers.append(DenseLayer(**given))
    norm = model.model.norm.weight
    return DenseLayers(layers, norm, config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps)
