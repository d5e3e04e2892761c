"""A Llama-family decoder over forests: RMSNorm, RoPE, grouped-query attention, SwiGLU.

No batch axis and no padding: a batch is one row of T tokens whose forest mask keeps sequences apart.
Shapes: T tokens, N asked positions, D model width, H query heads, G key-value heads, K head width,
F feed-forward width, V vocabulary. Module names are those of Hugging Face's Llama, so a state
dictionary is a Llama checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from puna.kernels.attention import attention
from puna.kernels.linear import linear
from puna.kernels.linear_cross_entropy import linear_cross_entropy, linear_token_logprobs
from puna.kernels.rms_norm import rms_norm
from puna.kernels.rope import rope, rope_table
from puna.kernels.swiglu import swiglu
from puna.models.config import ModelConfig
from puna.models.forest import Forest

Head = Literal["lm", "scalar"]
# attend(layer, q [T, H, K], k [T, G, K], v [T, G, K]) -> [T, H, K]: what a layer's queries look at. Training
# gives the forest mask, generation its cache; the rest of the model is the same for both.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Linear(nn.Linear):
    """A matrix [N, D] without bias. Its weights come from a generator or a checkpoint, never from torch's
    global random numbers."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: see `Transformer.initialise`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Embedding(nn.Embedding):
    """Token vectors [V, D], left uninitialised like `Linear`."""

    def reset_parameters(self) -> None:
        """Nothing: see `Transformer.initialise`."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned gain [D]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        D, K = config.hidden_size, config.head_dim
        self.head_dim = K
        self.q_proj = Linear(D, config.num_attention_heads * K)
        self.k_proj = Linear(D, config.num_key_value_heads * K)
        self.v_proj = Linear(D, config.num_key_value_heads * K)
        self.o_proj = Linear(config.num_attention_heads * K, D)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        T = x_TD.shape[0]
        q_THK = rope(self.q_proj(x_TD).view(T, -1, self.head_dim), cos, sin)
        k_TGK = rope(self.k_proj(x_TD).view(T, -1, self.head_dim), cos, sin)
        v_TGK = self.v_proj(x_TD).view(T, -1, self.head_dim)
        return self.o_proj(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(1))


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, F = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(D, F)
        self.up_proj = Linear(D, F)
        self.down_proj = Linear(F, D)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_TD), self.up_proj(x_TD)))


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos, sin, attend)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Decoder(nn.Module):
    """Token embedding, layers and final norm: tokens [T] -> hidden states [T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states of embedded tokens x [T, D] at position ids [T]."""
        return decode(self.layers, self.norm, self.config, x_TD, positions, attend)


def decode(
    layers: Iterable[nn.Module],
    norm: nn.Module,
    config: ModelConfig,
    x_TD: Tensor,
    positions: Tensor,
    attend: Attend,
) -> Tensor:
    """Run embedded tokens x [T, D] at position ids [T] through layers and final norm."""
    cos, sin = rope_table(positions, config.head_dim, config.rope_theta, x_TD.dtype)
    for layer in layers:
        x_TD = layer(x_TD, cos, sin, attend)
    return norm(x_TD)


class Transformer(nn.Module):
    """A decoder with a language-model head (`lm`) or one number per token (`scalar`: reward, value).

    Weights are drawn from `generator` (normal, `config.initializer_range`); without one they are left
    uninitialised, ready for a checkpoint.
    """

    def __init__(
        self, config: ModelConfig, head: Head = "lm", generator: torch.Generator | None = None
    ) -> None:
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
        if generator is not None:
            self.initialise(generator)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw all matrices from `generator`, in the order of their names; gains become one."""
        for _, parameter in sorted(self.named_parameters()):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)

    def hidden(self, forest: Forest) -> Tensor:
        """Final-norm hidden states [T, D]."""
        mask = forest.mask

        def attend(_: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
            return attention(q_THK, k_TGK, v_TGK, mask)

        return self.model(self.model.embed_tokens(forest.tokens), forest.positions, attend)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Next-token logits [N, V]."""
        return self.lm_head(hidden_ND)

    def scalar(self, hidden_ND: Tensor) -> Tensor:
        """The scalar head's number for each hidden state, [N]."""
        return self.score(hidden_ND)[:, 0]

    def token_logprobs(
        self, forest: Forest, positions: Tensor, targets: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """([N] log p(targets[i] | path up to and including positions[i]), [N] entropies), in nats.

        `positions` [N] int64 are indices into the row (not position ids); several may be equal.
        """
        return linear_token_logprobs(
            self.hidden(forest)[positions], self.lm_head.weight, targets, temperature
        )

    def cross_entropy(self, forest: Forest, positions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """sum_i weights[i] * -log p(targets[i] | positions[i]), a scalar in nats; the cheapest training loss.

        Denominators are the caller's, in `weights` [N] float: 1 / N each gives the mean.
        """
        return linear_cross_entropy(self.hidden(forest)[positions], self.lm_head.weight, targets, weights)
