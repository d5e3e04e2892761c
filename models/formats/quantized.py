"""Quantization of a model's layers' matrices to 8 or 4 bits; embeddings, the output layer and norms stay as they are.

INT8 or FP8 with a scale per output (LLM.int8, Dettmers et al. 2022; SmoothQuant, Xiao et al. 2023): products are also in 8 bits, and each
token's input vector gets a scale (`kernels/quantized_linear.py`). NF4 with quantized scales (QLoRA, Dettmers et al. 2023), through
bitsandbytes: the matrices are frozen, and PEFT adds adapters to them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from puna.kernels.quantized_linear import Kind, quantize_rows, quantized_linear, require_products
from puna.models.layers import Experts, Linear
from puna.models.transformer import Transformer

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

# On import, bitsandbytes warns of a missing package for products that Puna does not use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class QuantizedLinear(nn.Module):
    """A linear layer with its matrix in 8-bit numbers [N, D] and a scale per row [N]; the matrix is not trained."""

    def __init__(self, linear: Linear, kind: Kind) -> None:
        super().__init__()
        q_ND, scale_N = quantize_rows(linear.weight.detach(), kind)
        self.q, self.scale = nn.Parameter(q_ND, requires_grad=False), nn.Parameter(scale_N, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TN = quantized_linear(x_TD, self.q, self.scale)
        return y_TN if self.bias is None else y_TN + self.bias


def quantize(model: Transformer, kind: Kind) -> Transformer:
    """Quantize the matrices of the model's layers to 8 bits, in place; matrices already in 8 bits stay. Raise ValueError for a mixture of
    experts, whose matrices are stacked, and on a device that cannot multiply such matrices."""
    require_products(kind, model.model.embed_tokens.weight.device)
    return _replace_linears(model, lambda linear: QuantizedLinear(linear, kind), f"weights = {kind!r}", "8 bits; choose 'same'")


def to_nf4(model: Transformer) -> Transformer:
    """Convert the matrices of the model's layers to NF4, in place. Raise ValueError for a mixture of experts."""
    return _replace_linears(model, Nf4Linear, "quantization nf4", "4 bits; set quantization to none")


def _replace_linears(model: Transformer, layer: Callable[[Linear], nn.Module], setting: str, bits: str) -> Transformer:
    """Replace each `Linear` of the model's layers by `layer(linear)`, one by one, in place; raise ValueError for a mixture of experts."""
    if any(isinstance(module, Experts) for module in model.modules()):
        raise ValueError(f"{setting}: the experts' matrices of a mixture cannot be kept in {bits}")
    for module in list(model.model.layers.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, layer(child))
    return model


class Nf4Linear(nn.Linear):
    """A linear layer with its matrix [N, D] in NF4, which is unpacked to fp32 for each product and not trained. The class is an `nn.Linear`
    by type only, so that PEFT adds adapters: `weight` holds two numbers per byte."""

    state: QuantState

    def __init__(self, linear: Linear) -> None:
        from bitsandbytes.functional import quantize_4bit

        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        packed, self.state = quantize_4bit(linear.weight.detach().float().contiguous(), quant_type="nf4", compress_statistics=True)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias

    def dequantize(self) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        matrix: Tensor = dequantize_4bit(self.weight.detach(), self.state)
        return matrix

    def plain(self, weight: Tensor) -> Linear:
        """Return an unquantized layer with the matrix `weight` [N, D] and this layer's bias."""
        with torch.device("meta"):
            layer = Linear(self.in_features, self.out_features)
        layer.weight, layer.bias = nn.Parameter(weight), self.bias
        return layer

    def bytes(self) -> int:
        """Return the bytes of the packed matrix and its scales."""
        state, second = self.state, self.state.state2
        return sum(t.numel() * t.element_size() for t in (self.weight, state.absmax, state.code, state.offset, second.absmax, second.code))

    def _apply(self, fn: Any, recurse: bool = True) -> Nf4Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.state.to(self.weight.device)
        return self


class _Product(torch.autograd.Function):
    """The product of x [..., D] and the unpacked matrix; only the packed matrix is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.dequantize().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.dequantize().to(grads[0].dtype), None


def held_bytes(model: nn.Module) -> int:
    """Return the bytes that the model's parameters take in memory, with the scales of NF4 matrices."""
    packed = [module for module in model.modules() if isinstance(module, Nf4Linear)]
    weights = {id(module.weight) for module in packed}
    plain = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in weights)
    return plain + sum(module.bytes() for module in packed)


def merge(model: Transformer) -> None:
    """Merge each adapter into its matrix, remove the adapters, unpack NF4 matrices, and make all weights trainable; in place."""
    for name, module in list(model.named_modules()):
        if name.endswith(".base_layer"):
            continue
        adapted = hasattr(module, "get_delta_weight")  # PEFT's layers, without its import
        base = module.get_base_layer() if adapted else module
        if isinstance(base, Nf4Linear):
            weight = base.dequantize()
            plain = base.plain(weight if base is module else weight + module.get_delta_weight("default").detach())
        elif adapted:
            module.merge()
            plain = base
        else:
            continue
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
