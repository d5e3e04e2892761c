"""Layers of the decoder: linear maps, RMSNorm, grouped-query and latent attention, SwiGLU, experts, and the block of them.

Shapes: T tokens, N selected tokens, D model width, H query heads, G key-value heads, K head width, F feed-forward width, E experts
(in attention, V: width of values). Modules have the names that Hugging Face's models give them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from puna.kernels.grouped_linear import grouped_linear
from puna.kernels.linear import linear
from puna.kernels.moe import combine, dispatch, sort_by_expert, top_k_routing
from puna.kernels.rms_norm import add_rms_norm, rms_norm
from puna.kernels.rope import rope
from puna.kernels.swiglu import swiglu
from puna.models.config import ModelConfig

# attend(layer, q [T, H, K], k [T, G, K], v [T, G, V]) -> [T, H, V]: a layer's attention, in training under the forest mask, in generation
# over the cache; the rest of the model is the same for both.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Layer = Callable[[Tensor, Tensor, Tensor, Attend], tuple[Tensor, Tensor | None]]


class OverLatents(ABC):
    """An `Attend` for latent attention that takes the latents in place of keys and values (`generation/latent.py`)."""

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        raise TypeError(f"layer {layer} has keys and values, no latents")

    @abstractmethod
    def over_latents(self, layer: LatentAttention, q_THN: Tensor, q_THR: Tensor, latent_TL: Tensor, k_TR: Tensor) -> Tensor:
        """Return the attention output [T, H, V]. q_THN, q_THR: unrotated and rotated part of the queries; all heads share k_TR, rotated."""


class Linear(nn.Linear):
    """A linear layer with weight [outputs, inputs], left uninitialized for `Transformer.initialize` or a checkpoint."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Do nothing: see `initial_values`."""

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight)
        return y if self.bias is None else y + self.bias

    if TYPE_CHECKING:
        __call__ = forward


class Embedding(nn.Embedding):
    """An embedding of tokens with weight [V, D], which is left uninitialized as in `Linear`."""

    def reset_parameters(self) -> None:
        """Do nothing: see `initial_values`."""


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a learned gain [D]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, sum) in one pass, in x's dtype, so that the residual stream `x_TD` stays fp32 under autocast."""
        return add_rms_norm(x_TD, residual_TD.to(x_TD.dtype), self.weight, self.eps)

    if TYPE_CHECKING:
        __call__ = forward


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        D, K = config.hidden_size, config.head_dim
        self.head_dim = K
        self.q_proj = Linear(D, config.num_attention_heads * K, config.qkv_bias)
        self.k_proj = Linear(D, config.num_key_value_heads * K, config.qkv_bias)
        self.v_proj = Linear(D, config.num_key_value_heads * K, config.qkv_bias)
        self.o_proj = Linear(config.num_attention_heads * K, D, config.o_bias)
        self.q_norm, self.k_norm = (RMSNorm(K, config.rms_norm_eps) if config.qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q_THK = rope(self.q_norm(self.q_proj(x_TD).unflatten(1, (-1, self.head_dim))), cos, sin)
        k_TGK = rope(self.k_norm(self.k_proj(x_TD).unflatten(1, (-1, self.head_dim))), cos, sin)
        v_TGK = self.v_proj(x_TD).unflatten(1, (-1, self.head_dim))
        return self.o_proj(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(1))

    if TYPE_CHECKING:
        __call__ = forward


class LatentAttention(nn.Module):
    """Multi-head latent attention: a token's keys and values are computed from one narrow vector (DeepSeek-V2). Only the part of a key that
    all heads share is rotated. An `Attend` gets the keys and values of every head, an `OverLatents` the latents."""

    LATENT_EPS = 1e-6  # epsilon of the latent vectors' norms in every model

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.mla is not None
        self.layer, self.mla = layer, config.mla
        D, H, mla, bias = config.hidden_size, config.num_attention_heads, config.mla, config.o_bias
        if mla.q_lora_rank:
            self.q_a_proj = Linear(D, mla.q_lora_rank, bias)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, self.LATENT_EPS)
            self.q_b_proj = Linear(mla.q_lora_rank, H * mla.qk_head_dim)
        else:
            self.q_proj = Linear(D, H * mla.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(D, mla.kv_lora_rank + mla.qk_rope_head_dim, bias)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, self.LATENT_EPS)
        self.kv_b_proj = Linear(mla.kv_lora_rank, H * (mla.qk_nope_head_dim + mla.v_head_dim))
        self.o_proj = Linear(H * mla.v_head_dim, D, bias)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        mla = self.mla
        low = mla.q_lora_rank > 0
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD))) if low else self.q_proj(x_TD)
        q_THN, q_THR = q.unflatten(1, (-1, mla.qk_head_dim)).split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1)
        latent, shared = self.kv_a_proj_with_mqa(x_TD).split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        latent_TL, k_TR = self.kv_a_layernorm(latent.contiguous()), rope(shared[:, None], cos, sin)[:, 0]
        q_THR = rope(q_THR, cos, sin)
        if isinstance(attend, OverLatents):
            seen_THV = attend.over_latents(self, q_THN, q_THR, latent_TL, k_TR)
        else:
            seen_THV = attend(self.layer, torch.cat([q_THN, q_THR], -1), *self.spelled_out(latent_TL, k_TR))
        return self.o_proj(seen_THV.flatten(1))

    def spelled_out(self, latent_TL: Tensor, k_TR: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [T, H, K] and values [T, H, V] of all heads, from latents and the rotated part that the heads' keys share."""
        mla = self.mla
        kv = self.kv_b_proj(latent_TL).unflatten(1, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
        k_THN, v_THV = kv.split([mla.qk_nope_head_dim, mla.v_head_dim], -1)
        return torch.cat([k_THN, k_TR[:, None].expand(-1, k_THN.shape[1], -1)], -1), v_THV

    if TYPE_CHECKING:
        __call__ = forward


class MLP(nn.Module):
    """A SwiGLU feed-forward block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, F = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(D, F)
        self.up_proj = Linear(D, F)
        self.down_proj = Linear(F, D)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_TD), self.up_proj(x_TD)))

    if TYPE_CHECKING:
        __call__ = forward


class Experts(nn.Module):
    """The experts' matrices, stacked: gate and up [E, 2 F, D], down [E, D, F]."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x_ND: Tensor, offsets_E1: Tensor) -> Tensor:
        """Return the experts' outputs [N, D] for rows x [N, D] sorted by expert; expert e has rows offsets[e] to offsets[e + 1]."""
        gate, up = grouped_linear(x_ND, self.gate_up_proj, offsets_E1).chunk(2, -1)
        return grouped_linear(swiglu(gate, up), self.down_proj, offsets_E1)


class MoeMLP(nn.Module):
    """A feed-forward block that sends each token through its top-k experts and drops no token.

    A call also returns the load-balancing loss: E times the sum over experts of (share of tokens that chose the expert) x (the expert's
    mean router probability). If all experts are used evenly, the loss is k (Fedus et al. 2022, equation 4; every top-k choice counts)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe = config.moe
        self.gate = Linear(config.hidden_size, self.moe.num_experts)
        self.experts = Experts(self.moe.num_experts, config.hidden_size, self.moe.moe_intermediate_size)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        E, k = self.moe.num_experts, self.moe.num_experts_per_tok
        weight_Tk, p_TE, chosen_Tk = top_k_routing(self.gate(x_TD), k, self.moe.norm_topk_prob)
        order_N, place_N, offsets_E1 = sort_by_expert(chosen_Tk, E)
        balance = E * (offsets_E1.diff().to(p_TE.dtype) / len(x_TD) * p_TE.mean(0)).sum()
        y_ND = self.experts(dispatch(x_TD, order_N, place_N), offsets_E1)
        return combine(y_ND, weight_Tk, order_N, place_N), balance

    if TYPE_CHECKING:
        __call__ = forward


class Block(nn.Module):
    """A pre-norm layer; with `parallel_block`, one norm feeds attention and MLP. A call also returns the load-balancing loss or None."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.parallel = config.parallel_block
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer) if config.mla is None else LatentAttention(config, layer)
        if not self.parallel:
            self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config) if config.moe is None else MoeMLP(config)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor | None]:
        normed_TD = self.input_layernorm(x_TD)
        seen_TD = self.self_attn(normed_TD, cos, sin, attend)
        if self.parallel:
            x_TD = x_TD + seen_TD
        else:
            normed_TD, x_TD = self.post_attention_layernorm.add(x_TD, seen_TD)
        if isinstance(self.mlp, MLP):
            return x_TD + self.mlp(normed_TD), None
        y_TD, balance = self.mlp(normed_TD)
        return x_TD + y_TD, balance
