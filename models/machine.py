"""What a machine can do: matrix products, attention and memory traffic per second, measured or from a data sheet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from puna.kernels.attention import ForestMask, attention
from puna.kernels.linear import product
from puna.kernels.swiglu import swiglu
from puna.models.config import ModelConfig

Clock = Callable[[], float]
Precision = Literal["fp32", "bf16"]
# Dense bf16 operations and memory bytes per second of GPUs, from their makers' data sheets, by a part of the name.
GPUS: dict[str, tuple[float, float]] = {
    "B200": (2250e12, 8.0e12),
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "A100": (312e12, 2.0e12),
    "L40S": (362e12, 0.864e12),
    "L4": (121e12, 0.3e12),
    "RTX 4090": (165e12, 1.0e12),
}


@dataclass(frozen=True)
class Machine:
    """Rates of one device.

    matrix_flops     operations per second of the matrix products of a training step
    attention_flops  the same of attention, forward and backward, by the model's own count of its operations
    bandwidth        bytes per second that elementwise work reads and writes, SwiGLU standing for all of it
    """

    matrix_flops: float
    attention_flops: float
    bandwidth: float

    @property
    def ops_per_byte(self) -> float:
        """Arithmetic intensity at which matrix products and memory take equally long."""
        return self.matrix_flops / self.bandwidth

    @staticmethod
    def gpu(name: str) -> Machine:
        """A GPU of `GPUS` in bf16, at the shares of its data sheet that good kernels reach: 0.75 of the matrix
        rate, 0.5 in attention, 0.85 of the bandwidth. ValueError for one that is not listed."""
        for part, (flops, bandwidth) in GPUS.items():
            if part in name:
                return Machine(0.75 * flops, 0.5 * flops, 0.85 * bandwidth)
        raise ValueError(f"there are no rates of {name!r}; known are {', '.join(GPUS)}")


PROBE_PARAMETERS = 100_000_000
"""The largest model that `measure` builds; beyond it one linear layer's products stand for all."""


@cache
def measure(config: ModelConfig, context: int, clock: Clock = time.perf_counter) -> Machine:
    """This CPU's rates at a model's shapes in documents of `context` tokens, fp32, on torch's threads: each the
    best of several tries, a few seconds in all.

    Attention and SwiGLU are timed alone; then forward and backward of the model with two of its layers, of which
    the matrix products are what remains. `clock` may be `time.process_time` on one thread, which other work on
    the machine disturbs less.
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
    known = Machine(1.0, attended / _best(attend, clock), 8 * gate.nbytes / _best(activate, clock))
    return replace(known, matrix_flops=_matrix_flops(config, context, known, clock))


def _matrix_flops(config: ModelConfig, context: int, known: Machine, clock: Clock) -> float:
    """Rate of the matrix products in a training step, given those of everything else."""
    from puna.models import accounting
    from puna.models.forest import Forest
    from puna.models.transformer import Transformer

    layers = min(2, config.num_hidden_layers)
    small = config.replace(num_hidden_layers=layers, sliding_layers=None, sliding_window=None, model_type="")
    rows, inner = 1024, config.intermediate_size
    if accounting.parameters(small).total > PROBE_PARAMETERS:
        x, w, g = (torch.ones(*shape) for shape in ((rows, config.hidden_size), (inner, config.hidden_size), (rows, inner)))
        seconds = sum(_best(f, clock) for f in (lambda: product(x, w), lambda: product(g, w.T), lambda: torch.mm(g.T, x)))
        return 3 * 2 * rows * w.numel() / seconds
    model = Transformer(small, generator=torch.Generator().manual_seed(0))
    lengths = [context] * max(1, rows // context)
    tokens = torch.arange(sum(lengths)) % config.vocab_size
    weights = torch.full((len(tokens),), 1.0 / len(tokens))

    def train() -> None:
        with torch.enable_grad():
            forest = Forest.pack(tokens.split(lengths))
            model.cross_entropy(forest, torch.arange(len(tokens)), tokens, weights).backward()
        model.zero_grad(set_to_none=True)

    other = accounting.step_time(small, lengths, replace(known, matrix_flops=math.inf), update=False)
    remaining = max(_best(train, clock) - other.total, 1e-9)
    return 6 * accounting.matrix_parameters(small) * len(tokens) / remaining


def _best(function: Callable[[], object], clock: Clock, tries: int = 5, seconds: float = 0.15) -> float:
    """Shortest time of one call, in seconds."""
    function()
    best, started, count = float("inf"), clock(), 0
    while count < tries or clock() - started < seconds:
        before = clock()
        function()
        best, count = min(best, clock() - before), count + 1
    return best


def matrix_rate(size: int = 768, seconds: float = 0.3, clock: Clock = time.perf_counter) -> float:
    """Operations per second that fp32 matrix products of `size` reach here on torch's threads: best of many.

    The ceiling against which the utilisation of a CPU run is stated.
    """
    left, right = torch.ones(size, size), torch.ones(size, size)
    return 2.0 * size**3 / _best(lambda: torch.mm(left, right), clock, 1, seconds)


@cache
def peak_flops(device: str, precision: Precision = "fp32") -> float | None:
    """Operations per second of the device's matrix products at most: measured on a CPU, the data sheet's bf16
    rate on a GPU in `GPUS`; None where neither is known."""
    if device == "cpu":
        return matrix_rate()
    if device != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name()
    return next((flops for part, (flops, _) in GPUS.items() if part in name), None)
