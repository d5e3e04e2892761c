"""Counts of a model's parameters, from its configuration alone, and their initial values, without torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from puna.models.config import ModelConfig


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters by part. `head`: 0 if it is tied to the embedding; `experts`: the experts' part of `feed_forward`."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int
    experts: int = 0

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.feed_forward + self.norms + self.head

    @property
    def layers(self) -> int:
        """Return the number of parameters of attention and feed-forward blocks, without norms, embedding and output layer."""
        return self.attention + self.feed_forward


def parameters(config: ModelConfig) -> Parameters:
    """Return the numbers of parameters, by part, of the language model with this configuration; all experts count."""
    width, layers = config.hidden_size, config.num_hidden_layers
    vocabulary = config.vocab_size * width
    experts = 1 if config.moe is None else config.moe.num_experts
    norms = (1 if config.parallel_block else 2) * width + (2 * config.head_dim if config.qk_norm else 0)
    if config.mla is not None:
        norms += config.mla.kv_lora_rank + config.mla.q_lora_rank
    return Parameters(
        embedding=vocabulary, attention=layers * (_attention_matrices(config) + _attention_biases(config)),
        feed_forward=layers * (experts * _feed_forward_matrices(config) + _router(config)), norms=layers * norms + width,
        head=0 if config.tie_word_embeddings else vocabulary,
        experts=0 if config.moe is None else layers * experts * _feed_forward_matrices(config),
    )  # fmt: skip


def _attention_matrices(config: ModelConfig) -> int:
    width, heads, mla = config.hidden_size, config.num_attention_heads, config.mla
    if mla is None:
        return 2 * width * config.head_dim * (heads + config.num_key_value_heads)
    rank = mla.q_lora_rank
    queries = rank * (width + heads * mla.qk_head_dim) if rank else width * heads * mla.qk_head_dim
    keys = mla.kv_lora_rank * (width + heads * (mla.qk_nope_head_dim + mla.v_head_dim))
    return queries + keys + width * (mla.qk_rope_head_dim + heads * mla.v_head_dim)


def _attention_biases(config: ModelConfig) -> int:
    output = config.hidden_size if config.o_bias else 0
    if config.mla is not None:
        latent = config.mla.q_lora_rank + config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
        return output + (latent if config.o_bias else 0)
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    return output + (heads * config.head_dim if config.qkv_bias else 0)


def _feed_forward_matrices(config: ModelConfig) -> int:
    """Return the number of parameters in the matrices of a layer's feed-forward block, or of one expert."""
    inner = config.intermediate_size if config.moe is None else config.moe.moe_intermediate_size
    return 3 * config.hidden_size * inner


def _router(config: ModelConfig) -> int:
    return 0 if config.moe is None else config.moe.num_experts * config.hidden_size


def matrix_parameters(config: ModelConfig) -> int:
    """Return the number of matrix parameters active per token: of the layers (with a token's experts only) and of the output layer."""
    top_k = 1 if config.moe is None else config.moe.num_experts_per_tok
    layer = _attention_matrices(config) + top_k * _feed_forward_matrices(config) + _router(config)
    return config.num_hidden_layers * layer + config.vocab_size * config.hidden_size


def normal_rows(seed: int, name: str, rows: range, width: int) -> NDArray[np.float32]:
    """Return [len(rows), width] standard normal numbers in fp32: these rows of the weight `name`.

    A row is a function of (seed, name, row, width), whatever the other rows and weights are. The numbers come from a counter-based
    generator (Philox, Salmon et al. 2011), whose key is a digest of seed and name; the row is the highest word of its counter."""
    key = np.frombuffer(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest(), "<u8")
    bits = np.random.Philox(key=key)
    generator, start = np.random.Generator(bits), bits.state
    values = np.empty((len(rows), width), np.float32)
    for row, out in zip(rows, values, strict=True):
        start["state"]["counter"][:] = 0, 0, 0, row
        bits.state = start
        generator.standard_normal(dtype=np.float32, out=out)
    return values
