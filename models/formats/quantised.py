"""A model with its layers' matrices in 8 bits, INT8 or FP8 with a scale per output: a quarter or half of the memory, and of what a step
of few tokens reads.

Products are in 8 bits, too: each token's vector is put there with a scale of its own (`kernels/quantized_linear.py`). On a CPU with
AVX-512 VNNI a layer in INT8 is computed by the loops of `dense.py`, with the same bits. Embeddings, the
output layer and norms stay as they are, as in most quantised models (LLM.int8, Dettmers et al. 2022; SmoothQuant, Xiao et al. 2023).
"""

from __future__ import annotations

from torch import Tensor, nn

from puna.kernels.quantized_linear import Kind, quantize_rows, quantized_linear, require_products
from puna.models.transformer import Experts, Linear, Transformer


class QuantisedLinear(nn.Module):
    """A matrix as 8-bit numbers [N, D] with a scale for each row [N], and its bias; it is not trained."""

    def __init__(self, linear: Linear, kind: Kind) -> None:
        super().__init__()
        q_ND, scale_N = quantize_rows(linear.weight.detach(), kind)
        self.q, self.scale = nn.Parameter(q_ND, requires_grad=False), nn.Parameter(scale_N, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TN = quantized_linear(x_TD, self.q, self.scale)
        return y_TN if self.bias is None else y_TN + self.bias


def quantise(model: Transformer, kind: Kind) -> Transformer:
    """Put the matrices of the model's layers into 8 bits, in place and one after the other; what is there already stays.

    ValueError for a mixture of experts, whose matrices are multiplied together, and on a device without such products.
    """
    require_products(kind, model.model.embed_tokens.weight.device)
    if any(isinstance(module, Experts) for module in model.modules()):
        raise ValueError(f"weights = {kind!r}: the experts' matrices of a mixture cannot be kept in 8 bits; choose 'same'")
    for module in list(model.model.layers.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, QuantisedLinear(child, kind))
    return model
