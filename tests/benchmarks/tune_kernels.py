"""A search for the fastest configurations of the Triton kernels on the present GPU, which writes them into `configurations.json`.

    python -m tests.benchmarks.tune_kernels                    # prints what it would change
    python -m tests.benchmarks.tune_kernels --write            # and writes it, each row with the GPU's name, torch's and Triton's version
    python -m tests.benchmarks.tune_kernels --only attention   # only kernels whose name begins with this

A configuration is reported and skipped if it does not compile, needs more shared memory than available, or gives results that differ from
those of the table's current configuration by more than rounding. A GPU is required.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from puna.kernels import configurations
from puna.kernels.attention import ForestMask, attention
from puna.kernels.configurations import Configuration, Place
from puna.kernels.grouped_linear import grouped_linear
from puna.kernels.quantized_linear import quantize_rows, quantized_linear

Run = Callable[[], tuple[Tensor, ...]]
GAIN = 0.02  # minimum relative gain: smaller differences are noise and do not change the table


def candidates(place: Place) -> Iterator[Configuration]:
    """Yield the configurations that may be best for a place, whether or not they compile."""
    if place.fp32:
        yield from (Configuration(m, n, w, 1) for m, n, w in product((16, 32, 64), (16, 32, 64), (4, 8)))
        return
    if place.kernel.startswith("attention"):
        reading = (False, True) if place.capability >= 90 else (False,)
        # On compute capability 9.0, Triton 3.7 specializes no useful tile: it aborts on tiles other than 64 x 64.
        special = (False, True) if place.capability >= 100 and place.kernel == "attention_forward" else (False,)
        sizes = product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3), reading, special)
        tiles = (Configuration(m, n, w, s, 0, d, x) for m, n, w, s, d, x in sizes if d or not x)
        yield from (values for values in tiles if _registers(place, values) <= 255)
        return
    if place.kernel.startswith("grouped"):
        yield Configuration(128, 128, 8, 3, 64, library=True)
    for m, n, depth, warps, stages in product((64, 128), (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)):
        if m * n <= 32 * warps * 128 and stages * depth * (m + n) * (1 if place.kernel == "scaled_product" else 2) <= 227 << 10:
            yield Configuration(m, n, warps, stages, depth)


def _registers(place: Place, values: Configuration) -> float:
    """Return the minimum registers (of a thread's 255) for sums and scores; kernels that need more are not compiled."""
    own = 2 * values.columns if place.kernel == "attention_key_gradient" else values.rows
    scores = (1 if place.kernel == "attention_forward" else 2) * values.rows * values.columns
    return (own * place.width + scores) / (32 * values.warps)


def _attention(place: Place, device: torch.device, tokens: int) -> Run:
    """Return a run of attention with heads of the place's width, grouped by four, over one document; a window covers a quarter of it."""
    heads = max(4, min(4096, 2 * tokens) // max(place.width, 1))  # few heads, because an interpreter computes few tokens
    mask = ForestMask.from_end(torch.full((tokens,), tokens, dtype=torch.int32)).to(device)
    mask = mask.within(tokens // 4 if place.window else None)
    dtype = torch.float32 if place.fp32 or device.type == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(tokens, n, place.width, device=device).to(dtype).requires_grad_() for n in (heads, heads // 4, heads // 4))
    if place.kernel == "attention_forward":
        return lambda: (attention(q.detach(), k.detach(), v.detach(), mask),)
    upstream = torch.randn(tokens, heads, place.width, device=device).to(dtype)
    # The time includes the same forward pass for all configurations; its layout holds the gradients' blocks.
    return lambda: torch.autograd.grad(attention(q, k, v, mask), (q, k, v), upstream)


def _grouped(place: Place, device: torch.device, tokens: int) -> Run:
    experts, width, inner = (64, 4096, 1792) if tokens > 1024 else (3, 32, 16)
    cuts = (torch.distributions.Dirichlet(torch.full((experts,), 4.0)).sample().cumsum(0) * 2 * tokens).round().long()
    cuts[-1] = 2 * tokens
    offsets = torch.cat([cuts.new_zeros(1), cuts]).to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, w = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in ((2 * tokens, width), (experts, inner, width)))
    if place.kernel == "grouped_linear":
        return lambda: (grouped_linear(x.detach(), w.detach(), offsets),)
    upstream = torch.randn(2 * tokens, inner, device=device).to(dtype)
    return lambda: torch.autograd.grad(grouped_linear(x, w, offsets), (w,), upstream)


def _scaled(place: Place, device: torch.device, tokens: int) -> Run:
    """Return a run of INT8 products; FP8 uses torch's own product."""
    width, inner = (4096, 14336) if tokens > 1024 else (64, 48)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, w = (torch.randn(rows, width, device=device).to(dtype) for rows in (tokens, inner))
    quantized = quantize_rows(w, "int8")
    return lambda: (quantized_linear(x, *quantized),)


def work(place: Place, device: torch.device, tokens: int = 8192) -> Run:
    """Return a call to time for a place: the kernel's operator on inputs of a usual size."""
    maker = _attention if place.kernel.startswith("attention") else _scaled if place.kernel == "scaled_product" else _grouped
    return maker(place, device, tokens)


@contextmanager
def tried(place: Place, values: Configuration) -> Iterator[None]:
    """Use other values in one place of the table within the context."""
    table = configurations.table()
    before = table.get(place)
    table[place] = values, None
    configurations.configuration.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del table[place]
        else:
            table[place] = before
        configurations.configuration.cache_clear()


def milliseconds(run: Run, rounds: int = 10) -> float:
    """Return the shortest time of `rounds` calls on the GPU, after two calls that compile and warm up."""
    best = math.inf
    for number in range(rounds + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        if number > 1:
            best = min(best, start.elapsed_time(stop))
    return best


def differs(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Return the largest difference relative to the largest expected number; NaN if any number is NaN."""
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in zip(ours, expected, strict=True))


def best(
    place: Place, run: Run, timed: Callable[[Run], float] = milliseconds, among: Callable[[Place], Iterator[Configuration]] = candidates
) -> tuple[Configuration, float, float]:
    """Return the fastest configuration, its milliseconds, and those of the table's current one. Print the result of each candidate."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    present = configurations.configuration(place.kernel, place.capability, place.width, place.window, place.fp32)
    expected = run()
    usual = timed(run)
    found, shortest = present, usual
    for values in among(place):
        with tried(place, values):
            try:
                off = differs(run(), expected)
                taken = timed(run) if off < 0.02 else math.nan
            except (CompilationError, OutOfResources, RuntimeError) as error:  # Triton's passes raise no specific type of error
                print(f"  {values}: {type(error).__name__}", flush=True)
                continue
        print(f"  {values}: " + (f"{taken:.3f} ms" if off < 0.02 else f"WRONG by {off:.3g}"), flush=True)
        if taken < shortest and taken < usual * (1 - GAIN):
            found, shortest = values, taken
    return found, shortest, usual


def places(capability: int, begins: str) -> list[Place]:
    """Return the table's places as a GPU of this capability uses them, with this capability in each."""
    older = (p for p in configurations.table() if p.capability <= capability and p.kernel.startswith(begins))
    return sorted({replace(p, capability=capability) for p in older}, key=lambda p: (p.kernel, p.fp32, p.width, p.window))


def written(table: dict[Place, tuple[Configuration, str | None]]) -> str:
    """Return a table as JSON with one row per line, so that one change is one line of a diff."""
    rows = [vars(place) | vars(values) | {"machine": machine} for place, (values, machine) in table.items()]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="kernels whose name begins with NAME")
    parser.add_argument("--write", action="store_true", help="write the table")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("the tuner times kernels on a GPU, and there is none here")
    import triton

    device = torch.device("cuda")
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    table: dict[Place, Any] = dict(configurations.table())
    for place in places(configurations.capability(device), options.only):
        print(place, flush=True)
        found, shortest, usual = best(place, work(place, device))
        print(f"best: {found}, {shortest:.3f} ms; the table's: {usual:.3f} ms", flush=True)
        table[place] = found, machine
        torch.cuda.empty_cache()
    if options.write:
        configurations.FILE.write_text(written(table), encoding="utf-8")


if __name__ == "__main__":
    main()
