"""The forward pass of a dense model's generation on a CPU, as one compiled loop per layer: in fp32, or with the layers' matrices in INT8.

The model's own operators compute what the loops cannot: experts, latent attention, parallel blocks, other dtypes and devices, INT8 without
AVX-512 VNNI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from puna.kernels.cpu.lazy_jit import has_numba
from puna.kernels.dense_layers import PROJECTIONS, DenseLayer, DenseLayers
from puna.kernels.operators import INTERPRETED
from puna.kernels.paged_attention import PAGE, PagedPlan
from puna.models.config import ModelConfig
from puna.models.formats.quantized import QuantizedLinear
from puna.models.transformer import Transformer, rotary_table

if has_numba():
    from puna.kernels.cpu.int8_products import AVAILABLE

# Fields of `DenseLayer` → names of a block's parameters.
WEIGHTS = {
    "input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkvo"},
    **{f"{name}_norm": f"self_attn.{name}_norm.weight" for name in "qk"},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}

Layers = Sequence[tuple[Tensor, Tensor]]  # keys and values of each layer
PLAIN = {WEIGHTS[name] for name in PROJECTIONS}  # names of a block's matrices
SMALL = {f"{place.removesuffix('weight')}{part}" for place in PLAIN for part in ("q", "scale")}  # the same, in 8 bits
Pass = Callable[[Tensor, Layers, PagedPlan, Sequence[int | None]], Tensor]
"""A forward pass: (embedded tokens, each layer's pages, plan, each layer's window) → hidden states."""


class Loops:
    """A forward pass (`Pass`) that runs the layers and the final norm by compiled loops; it holds the rotary table."""

    def __init__(self, model: Transformer) -> None:
        self.config, self.layers = model.config, _dense_layers(model)
        self._turns = rotary_table(self.config, torch.arange(0), torch.float32)

    def __call__(self, x_ND: Tensor, layers: Layers, plan: PagedPlan, windows: Sequence[int | None]) -> Tensor:
        """Return hidden states, computed in place in x_ND; write keys and values into each layer's pages."""
        longest = PAGE * plan.tables.shape[1]
        if len(self._turns[0]) < longest:
            self._turns = rotary_table(self.config, torch.arange(2 * longest), torch.float32)
        self.layers(x_ND, *self._turns, layers, plan, windows)
        return x_ND


def loops(model: Transformer) -> Pass | None:
    """Return the pass that `memory/offload.py` gave the model, else its pass by compiled loops; None if loops cannot compute it."""
    own: Pass | None = getattr(model.model, "by_loops", None)
    if own is not None:
        return own
    return Loops(model) if fits(model.config, model.blocks, [p for p in model.parameters() if not p.is_meta]) else None


def fits(config: ModelConfig, blocks: nn.ModuleList, parameters: Sequence[Tensor]) -> bool:
    """True if compiled loops can compute the layers `blocks` of a model with these `parameters`."""
    if not has_numba() or INTERPRETED or config.parallel_block:
        return False
    small = [module for module in blocks.modules() if isinstance(module, QuantizedLinear)]
    places = (SMALL if small else PLAIN) | {place for name, place in WEIGHTS.items() if name not in PROJECTIONS}
    needed = {place for place in places if not place.endswith(("bias", "q_norm.weight", "k_norm.weight"))}
    plain = all(needed <= {name for name, _ in block.named_parameters()} <= places for block in blocks)
    bytes_ = {id(module.q) for module in small if module.q.dtype == torch.int8 and AVAILABLE}
    return plain and all((p.dtype == torch.float32 or id(p) in bytes_) and p.is_cpu and p.is_contiguous() for p in parameters)


def _dense_layers(model: Transformer) -> DenseLayers:
    config, layers = model.config, []
    for block in model.blocks:
        parameters = dict(block.named_parameters())
        weights: dict[str, Any] = {name: parameters.get(place) for name, place in WEIGHTS.items()}
        for name in PROJECTIONS:
            place = WEIGHTS[name].removesuffix("weight")
            weights[name], weights[f"{name}_scale"] = parameters.get(f"{place}q", weights[name]), parameters.get(f"{place}scale")
        if model.parts is not None and not model.parts.first:
            weights["o_bias"] = None
        layers.append(DenseLayer(**weights))
    norm = None if model.model.norm.weight.is_meta else model.model.norm.weight
    heads, groups = (len(weight) // config.head_dim for weight in (layers[0].q, layers[0].k))
    return DenseLayers(layers, norm, heads, groups, config.head_dim, config.rms_norm_eps, model.parts)
