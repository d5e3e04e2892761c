"""A Llama-family decoder over forests: RMSNorm, RoPE, grouped-query or latent attention, SwiGLU or experts.

No batch axis and no padding: a batch is one row of T tokens whose forest mask keeps sequences apart. Shapes: T tokens, N selected tokens,
D model width, H query heads, G key-value heads, K head width, F feed-forward width, E experts, V vocabulary (in attention: width of
values). Module names are those of Hugging Face's models; `families.py` describes the layouts of checkpoints.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from puna.kernels.attention import ForestMask, attention, prepare
from puna.kernels.grouped_linear import grouped_linear
from puna.kernels.linear import linear
from puna.kernels.linear_cross_entropy import linear_cross_entropy
from puna.kernels.linear_token_logprobs import linear_token_logprobs
from puna.kernels.moe import combine, dispatch, sort_by_expert, top_k_routing
from puna.kernels.operators import wide
from puna.kernels.rms_norm import add_rms_norm, rms_norm
from puna.kernels.rope import rope
from puna.kernels.swiglu import swiglu
from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.parameters import normal_rows

if TYPE_CHECKING:
    from puna.kernels.dense_layers import Parts
    from puna.models.training.parallel.base import Parallel

Head = Literal["lm", "scalar"]
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
    """A linear layer with weight [outputs, inputs], left uninitialised for `Transformer.initialise` or a checkpoint."""

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
    """An embedding of tokens with weight [V, D], which is left uninitialised as in `Linear`."""

    def reset_parameters(self) -> None:
        """Do nothing: see `initial_values`."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned gain [D]."""

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
    mean router probability). If all experts are used evenly, the loss is k (Fedus et al. 2022, equation 4; every top-k choice counts).
    """

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


class Decoder(nn.Module):
    """Token embedding, layers and final norm. A call maps embedded tokens [T, D] to hidden states [T, D].

    With `checkpointing`, training keeps only each layer's input and computes the layer again in the backward pass (Chen et al. 2016).
    `balance`: the load-balancing loss of the last forward pass with gradients, averaged over the layers.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = False
        self.balance: Tensor | None = None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states of embedded tokens x [T, D] at position ids [T]."""
        hidden_TD, balance = decode(self.running(self.layers), self.norm, self.config, x_TD, positions, attend)
        if torch.is_grad_enabled():
            self.balance = balance
        return hidden_TD

    def running(self, layers: Iterable[Layer]) -> Iterable[Layer]:
        """Return the layers, wrapped in activation checkpointing if it is on and a backward pass may follow."""
        again = self.checkpointing and self.training and torch.is_grad_enabled()
        return [partial(checkpoint, layer, use_reentrant=False) for layer in layers] if again else layers

    if TYPE_CHECKING:
        __call__ = forward


def decode(
    layers: Iterable[Layer], norm: nn.Module, config: ModelConfig, x_TD: Tensor, positions: Tensor, attend: Attend
) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states of embedded tokens x [T, D] at position ids [T], after layers and final norm; and the load-balancing loss
    averaged over the layers, None without experts."""
    cos, sin = rotary_table(config, positions, x_TD.dtype)
    balances = []
    for layer in layers:
        x_TD, balance = layer(x_TD, cos, sin, attend)
        if balance is not None:
            balances.append(balance)
    return norm(x_TD), torch.stack(balances).mean() if balances else None


def rotary_table(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [T, K/2] of the rotation at each position id, times any YaRN factor, in `dtype`; computed in fp64."""
    frequencies = torch.tensor(config.rotary_frequencies(), dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64)[:, None] * frequencies
    growth = 1.0 if config.rope_scaling is None else config.rope_scaling.growth
    return (growth * angles.cos()).to(dtype), (growth * angles.sin()).to(dtype)


def forest_attend(config: ModelConfig, mask: ForestMask) -> Attend:
    """Return the `Attend` of training: attention under the forest mask, within each layer's sliding window."""
    masks = {window: mask.within(window) for window in set(config.windows)}
    for each in masks.values():
        prepare(each, config.head_dim, config.value_dim)

    def attend(layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        return attention(q_THK, k_TGK, v_TGK, masks[config.windows[layer]])

    return attend


ROWS = 512  # maximum number of positions whose logits over the vocabulary are in memory at one time


def softcap(logits_NV: Tensor, cap: float | None) -> Tensor:
    return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)


def by_rows(head: Callable[[Tensor], Tensor], hidden_ND: Tensor, targets: Tensor) -> Tensor:
    """Return [3, N], in nats: log p of the targets, log-sum-exp of the logits `head(hidden)`, entropies. Backward recomputes the logits."""

    def compute(rows_CD: Tensor, own: Tensor) -> Tensor:
        z_CV = head(rows_CD).to(wide(rows_CD.dtype))
        lse = z_CV.logsumexp(-1)
        return torch.stack([z_CV.gather(1, own[:, None])[:, 0] - lse, lse, lse - (z_CV.softmax(-1) * z_CV).sum(-1)])

    parts = zip(hidden_ND.split(ROWS), targets.split(ROWS), strict=True)
    return torch.cat([checkpoint(compute, *part, use_reentrant=False) for part in parts], 1)


def initial_values(config: ModelConfig, seed: int, name: str, shape: Sequence[int], box: Sequence[slice] = ()) -> Tensor:
    """Return the initial values of a weight, or of its part `box`; only the rows of this part are drawn.

    Matrices have deviation `config.initializer_range`, see `normal_rows`; gains are one, biases zero. With `config.zero_residual` each
    block's output matrices and an untied output layer are zero, too (Zhang et al. 2019, Fixup).
    """
    first, *rest = box or (slice(None),)
    start, stop, _ = first.indices(shape[0])
    zero = ("o_proj", "down_proj", "lm_head") if config.zero_residual else ()
    if len(shape) == 1:
        values = torch.full((stop - start,), 0.0 if name.endswith("bias") else 1.0)
    elif zero and name.removesuffix(".weight").endswith(zero):
        values = torch.zeros(()).expand(stop - start, *shape[1:])
    else:
        stack = math.prod(shape[1:-1])  # rows of an expert
        rows = normal_rows(seed, name, range(start * stack, stop * stack), shape[-1])
        values = torch.from_numpy(rows).view(stop - start, *shape[1:]).mul_(config.initializer_range)
    return values[(slice(None), *rest)]


class Transformer(nn.Module):
    """A decoder with a language-model head (`lm`), or with a head of one number per token (`scalar`: reward, value). `seed` draws the
    weights, see `initial_values`; without a seed the weights are left uninitialised, ready for a checkpoint."""

    def __init__(self, config: ModelConfig, head: Head = "lm", seed: int | None = None) -> None:
        super().__init__()
        if head not in ("lm", "scalar"):
            raise ValueError(f"head must be 'lm' or 'scalar', not {head!r}")
        self.config, self.head = config, head
        self.model = Decoder(config)
        if head == "lm":
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight
        else:
            self.score = Linear(config.hidden_size, 1)
        if seed is not None:
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set all weights to their `initial_values`."""
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_values(self.config, seed, name, parameter.shape))

    held: Parallel | None = None
    """The ranks' pieces that are this model's weights; None: its own parameters are. See `Parallel.release`."""
    first = 0
    """Index of the first layer that this process has."""
    parts: Parts | None = None
    """The processes that share each layer's matrices (tensor parallelism); None: this process has whole matrices."""

    @property
    def blocks(self) -> nn.ModuleList:
        """Return the layers that this process has."""
        return self.model.layers

    @property
    def key_value_heads(self) -> int:
        """Return this process's number of key-value heads per layer."""
        return self.config.num_key_value_heads

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        weight = next(p for p in self.parameters() if not p.is_meta)
        return weight.device, weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input [N, D] of this process's first layer for tokens [N], in generation."""
        x_ND: Tensor = self.model.embed_tokens(tokens)
        return x_ND

    def decode(self, x_ND: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the output [N, D] of this process's layers for their input x, after the final norm if they include the last layer."""
        return self.model(x_ND, positions, attend)

    def hidden(self, forest: Forest) -> Tensor:
        """Return the hidden states [T, D] of a forest's tokens after the final norm."""
        return self.model(self.model.embed_tokens(forest.tokens), forest.positions, forest_attend(self.config, forest.mask))

    def take_balance_loss(self) -> Tensor | None:
        """Return `router_aux_loss_coef` times the layers' mean load-balancing loss of the last forward pass with gradients, and forget the
        loss; None without such a pass or without experts."""
        balance, self.model.balance = self.model.balance, None
        return None if balance is None or self.config.moe is None else self.config.moe.router_aux_loss_coef * balance

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return the next-token logits [N, V]."""
        return softcap(self.lm_head(hidden_ND), self.config.final_logit_softcapping)

    def scalar(self, hidden_ND: Tensor) -> Tensor:
        """Return the scalar head's number for each hidden state, [N]."""
        return self.score(hidden_ND)[:, 0]

    def token_logprobs(self, forest: Forest, positions: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return ([N] log p(targets[i] | path up to and including positions[i]), [N] entropies), in nats, of the logits over `temperature`.
        `positions` [N] int64: indices of tokens in the row (not position ids), which may repeat."""
        return self._logprobs(self.hidden(forest)[positions], targets, temperature)

    def _logprobs(self, hidden_ND: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if (cap := self.config.final_logit_softcapping) is None:
            return linear_token_logprobs(hidden_ND, self.lm_head.weight, targets, temperature)
        results = by_rows(lambda rows_CD: softcap(self.lm_head(rows_CD), cap) / temperature, hidden_ND, targets)
        return results[0], results[2]

    def normalisers(self, forest: Forest, positions: Tensor, targets: Tensor) -> Tensor:
        """Return [2, N], in nats: log p(targets[i] | path up to and including positions[i]), and the log-sum-exp of the logits there."""
        return by_rows(self.logits, self.hidden(forest)[positions], targets)[:2]

    def cross_entropy(self, forest: Forest, positions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the scalar sum_i weights[i] * -log p(targets[i] | path up to and including positions[i]), in nats. `weights` [N] float
        include the denominator: with all equal to 1 / N the result is the mean."""
        return self._cross_entropy(self.hidden(forest)[positions], targets, weights)

    def _cross_entropy(self, hidden_ND: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        if self.config.final_logit_softcapping is not None:
            return -(self._logprobs(hidden_ND, targets, 1.0)[0] * weights).sum()
        return linear_cross_entropy(hidden_ND, self.lm_head.weight, targets, weights)
