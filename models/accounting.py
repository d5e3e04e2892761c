"""What a model costs: parameters, floating-point operations and memory, from its configuration alone.

A multiply-add counts as two operations. The backward pass of a matrix product costs twice its forward
pass, which gives the usual 6 operations per parameter and token; attention's products with the keys and
values come on top and are counted exactly for a document mask. Norms, rotations and the softmax are left
out: together they stay far below a percent of the arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from puna.models.config import ModelConfig

Precision = Literal["fp32", "bf16"]
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters by part of the model.

    `head` is 0 where the output layer shares the embedding's matrix.
    """

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.attention + self.feed_forward + self.norms + self.head

    @property
    def layers(self) -> int:
        """Parameters of the layers' matrices, without embedding and output layer."""
        return self.attention + self.feed_forward


def parameters(config: ModelConfig) -> Parameters:
    """Parameters of the language model with this configuration."""
    width, layers = config.hidden_size, config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    vocabulary = config.vocab_size * width
    return Parameters(
        embedding=vocabulary,
        attention=layers * width * (2 * queries + 2 * keys),
        feed_forward=layers * 3 * width * config.intermediate_size,
        norms=(2 * layers + 1) * width,
        head=0 if config.tie_word_embeddings else vocabulary,
    )


def matrix_parameters(config: ModelConfig) -> int:
    """Parameters that multiply every token: the layers' matrices and the output layer, shared or not."""
    return parameters(config).layers + config.vocab_size * config.hidden_size


def seen_keys(lengths: Iterable[int]) -> int:
    """Query-key pairs of documents of these lengths, in tokens, each token seeing itself and those before."""
    return sum(n * (n + 1) // 2 for n in lengths)


def forward_flops(config: ModelConfig, lengths: Iterable[int]) -> int:
    """Operations of one forward pass over documents of these lengths (tokens), packed in any way."""
    lengths = list(lengths)
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 2 * matrix_parameters(config) * sum(lengths) + attention * seen_keys(lengths)


def training_flops(config: ModelConfig, lengths: Iterable[int]) -> int:
    """Operations of forward and backward over documents of these lengths (tokens)."""
    return 3 * forward_flops(config, lengths)


def flops_per_token(config: ModelConfig, context: int) -> float:
    """Training operations per token in documents of `context` tokens: 6 N + 12 L H K (context + 1) / 2."""
    if context < 1:
        raise ValueError(f"context must be at least 1 token, not {context}")
    return training_flops(config, [context]) / context


def state_bytes(config: ModelConfig, precision: Precision = "fp32") -> int:
    """Weights, gradients and AdamW's two moments, in bytes.

    All four are fp32, 16 bytes per parameter; bf16 is autocast over the same fp32 state.
    """
    if precision not in ELEMENT_BYTES:
        raise ValueError(f"precision must be fp32 or bf16, not {precision!r}")
    return 16 * parameters(config).total


def activation_bytes(config: ModelConfig, tokens: int, precision: Precision = "fp32") -> int:
    """Estimate of what a forward pass over `tokens` tokens keeps for the backward pass, in bytes.

    Per layer and token: the inputs and outputs of two norms (4 D), queries before and after rotation and the
    attention's output (3 H K), keys likewise and values (3 G K), gate, up and their product (3 F). The output
    layer works in chunks and keeps its input and that input's gradient only.
    """
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    width = config.hidden_size
    layer = 4 * width + 3 * queries + 3 * keys + 3 * config.intermediate_size
    return ELEMENT_BYTES[precision] * tokens * (config.num_hidden_layers * layer + 4 * width)


def cache_bytes(config: ModelConfig, tokens: int, precision: Precision = "fp32") -> int:
    """Keys and values of `tokens` tokens during generation, in bytes."""
    width = config.num_key_value_heads * config.head_dim
    return ELEMENT_BYTES[precision] * 2 * config.num_hidden_layers * width * tokens


def matrix_rate(size: int = 768, seconds: float = 0.3) -> float:
    """Operations per second that fp32 matrix products of `size` reach here on torch's threads: best of many.

    The ceiling against which the utilisation of a CPU run is stated.
    """
    import torch

    left, right = torch.ones(size, size), torch.ones(size, size)
    best, stop = float("inf"), time.perf_counter() + seconds
    torch.mm(left, right)
    while True:
        started = time.perf_counter()
        torch.mm(left, right)
        now = time.perf_counter()
        best = min(best, now - started)
        if now > stop:
            return 2.0 * size**3 / best
