"""What a machine can do: matrix products, attention and memory traffic per second, measured or from a data sheet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from puna.kernels.attention import ForestMask, attention
from puna.kernels.linear import product
from puna.kernels.swiglu import swiglu

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


@cache
def measure(
    width: int, inner: int, heads: int, groups: int, head_dim: int, context: int, clock: Clock = time.perf_counter
) -> Machine:
    """This CPU's rates at a model's shapes, fp32, on torch's threads: each the best of several tries, a second in
    all. `clock` may be `time.process_time` on one thread, which other work on the machine disturbs less."""
    rows = 1024
    generator = torch.Generator().manual_seed(0)
    matrix = sum(_matrix_seconds(rows, *shape, generator, clock) for shape in ((width, inner), (inner, width)))
    context = min(context, 2048)
    q, k, v = (
        torch.randn(context, n, head_dim, generator=generator, requires_grad=True) for n in (heads, groups, groups)
    )
    mask = ForestMask.from_end(torch.full((context,), context, dtype=torch.int32))
    upstream = torch.randn(context, heads, head_dim, generator=generator)

    def attend() -> None:
        with torch.enable_grad():
            attention(q, k, v, mask).backward(upstream)

    attended = 3 * 4 * heads * head_dim * (context * (context + 1) // 2)
    gate, up = (torch.randn(rows, inner, generator=generator, requires_grad=True) for _ in range(2))

    def activate() -> None:
        with torch.enable_grad():
            swiglu(gate, up).backward(gate.detach())

    return Machine(
        2 * 3 * 2 * rows * width * inner / matrix,
        attended / _best(attend, clock),
        8 * gate.nbytes / _best(activate, clock),
    )


def _matrix_seconds(rows: int, width: int, outputs: int, generator: torch.Generator, clock: Clock) -> float:
    """A linear layer's three matrix products: forward, the inputs' gradient, the weights' gradient."""
    shapes = ((rows, width), (outputs, width), (rows, outputs))
    x, w, g = (torch.randn(*shape, generator=generator) for shape in shapes)
    out = torch.empty(outputs, width)
    products = (lambda: product(x, w), lambda: product(g, w.T), lambda: torch.mm(g.T, x, out=out))
    return sum(_best(function, clock) for function in products)


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
