"""A Llama-family decoder over forests, and its heads: logits over the vocabulary, or one number per token.

No batch axis and no padding: a batch is one row of T tokens whose forest mask keeps sequences apart. Shapes: T tokens, N selected tokens,
D model width, H query heads, G key-value heads, K head width, V vocabulary. `formats/families.py` describes the layouts of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from puna.kernels.attention import ForestMask, attention, prepare
from puna.kernels.linear_cross_entropy import linear_cross_entropy
from puna.kernels.linear_token_logprobs import linear_token_logprobs
from puna.kernels.operators import wide
from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.layers import Attend, Block, Embedding, Layer, Linear, RMSNorm
from puna.models.parameters import normal_rows

if TYPE_CHECKING:
    from puna.kernels.dense_layers import Parts
    from puna.models.training.parallel.base import Parallel

Head = Literal["lm", "scalar"]


class Decoder(nn.Module):
    """Token embedding, layers and final norm. A call maps embedded tokens [T, D] to hidden states [T, D].

    With `checkpointing`, training keeps only each layer's input and computes the layer again in the backward pass (Chen et al. 2016).
    `balance`: the load-balancing loss of the last forward pass with gradients, averaged over the layers."""

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
    """Return hidden states [T, D] of embedded tokens x after layers and final norm; and the layers' mean load-balancing loss, or None."""
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
    block's output matrices and an untied output layer are zero, too (Zhang et al. 2019, Fixup)."""
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
    weights, see `initial_values`; without a seed the weights are left uninitialized, ready for a checkpoint."""

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
            self.initialize(seed)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
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
        """Return the last training pass's mean load-balancing loss, times `router_aux_loss_coef`, and forget it; None without experts."""
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

    def normalizers(self, forest: Forest, positions: Tensor, targets: Tensor) -> Tensor:
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
