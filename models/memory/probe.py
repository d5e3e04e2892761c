"""Measured rates of this CPU at a model's shapes. Products are timed in a training step or, for a large model, in one linear layer."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import cache

import torch

from puna.kernels.attention import ForestMask, attention
from puna.kernels.linear import product
from puna.kernels.swiglu import swiglu
from puna.models import accounting
from puna.models.accounting import Clock, Machine, best_seconds
from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.parameters import matrix_parameters, parameters
from puna.models.transformer import Transformer

PROBE_PARAMETERS = 100_000_000
"""Maximum parameters of the model of at most two layers that `measure` builds; above, the products of one linear layer are timed."""


@cache
def measure(config: ModelConfig, context: int, clock: Clock = time.perf_counter) -> Machine:
    """Return this CPU's fp32 rates at a model's shapes, for documents of `context` tokens (at most 1024), on torch's threads.

    Each rate is the best of several tries; results are cached. Attention and SwiGLU are timed alone. The matrix products' time is the rest
    of a training step with at most two layers or, above `PROBE_PARAMETERS`, that of one linear layer. On one thread, `clock` may be
    `time.process_time`, which other programs disturb less.
    """
    generator = torch.Generator().manual_seed(0)
    context = min(context, 1024)
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shapes = ((context, heads, width), (context, groups, width), (context, groups, config.value_dim))
    q, k, v = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in shapes)
    mask = ForestMask.from_end(torch.full((context,), context, dtype=torch.int32))
    upstream = torch.randn(context, heads, config.value_dim, generator=generator)
    gate, up = (torch.randn(1024, config.intermediate_size, generator=generator, requires_grad=True) for _ in range(2))

    def attend() -> None:
        with torch.enable_grad():
            attention(q, k, v, mask).backward(upstream)

    def activate() -> None:
        with torch.enable_grad():
            swiglu(gate, up).backward(gate.detach())

    attended = 3 * 2 * heads * (width + config.value_dim) * (context * (context + 1) // 2)
    machine = Machine(1.0, attended / best_seconds(attend, clock), 8 * gate.nbytes / best_seconds(activate, clock))
    return replace(machine, matrix_flops=_matrix_flops(config, context, machine, clock))


def _matrix_flops(config: ModelConfig, context: int, machine: Machine, clock: Clock) -> float:
    """Return the matrix products' operations per second. `machine` has the other rates: the time that they imply is subtracted."""
    layers = min(2, config.num_hidden_layers)
    small = config.replace(num_hidden_layers=layers, sliding_layers=None, sliding_window=None, model_type="")
    rows, inner = 1024, config.intermediate_size
    if parameters(small).total > PROBE_PARAMETERS:
        x, w, g = (torch.ones(*shape) for shape in ((rows, config.hidden_size), (inner, config.hidden_size), (rows, inner)))
        seconds = sum(best_seconds(f, clock) for f in (lambda: product(x, w), lambda: product(g, w.T), lambda: torch.mm(g.T, x)))
        return 3 * 2 * rows * w.numel() / seconds
    model = Transformer(small, seed=0)
    lengths = [context] * max(1, rows // context)
    tokens = torch.arange(sum(lengths)) % config.vocab_size
    weights = torch.full((len(tokens),), 1.0 / len(tokens))

    def train() -> None:
        with torch.enable_grad():
            forest = Forest.pack(tokens.split(lengths))
            model.cross_entropy(forest, torch.arange(len(tokens)), tokens, weights).backward()
        model.zero_grad(set_to_none=True)

    other = accounting.step_time(small, lengths, replace(machine, matrix_flops=math.inf), update=False)
    remaining = max(best_seconds(train, clock) - other.total, 1e-9)
    return 6 * matrix_parameters(small) * len(tokens) / remaining
