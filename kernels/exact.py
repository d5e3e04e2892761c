"""Exact passes: the bits of a token's results depend only on the token's path, not on the other tokens of the pass.

Generation computes a token together with other tokens than training does: one at a time, in chunks, after a cached prefix. In exact passes
every routine has one order of operations for a row, whatever the rows around it:

- products: one loop in which a number is one chain of sums, whatever its tile (`linear.products`);
- attention: one loop over the keys of a query's path in pages that begin at multiples of the page's size, wherever the
  pages are stored and whichever sequences share them (`paged_attention`);
- norms, rotations, SwiGLU, log-softmax: loops over rows in single IEEE operations (`vectors`), so that they have the same bits inside a
  loop that computes a whole layer (`dense_layers`).

Exact passes need fp32 on a CPU and numba; elsewhere `exact_passes` raises ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from puna.kernels.cpu.lazy_jit import has_numba

_exact: ContextVar[bool] = ContextVar("exact", default=False)


def exact() -> bool:
    """True inside `exact_passes`, but not in compiled layers: torch.compile chooses the order of sums itself."""
    return not torch.compiler.is_compiling() and _exact.get()


def can_be_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """True if passes can be exact: in fp32 on a CPU, with the package numba."""
    return dtype == torch.float32 and device.type == "cpu" and has_numba()


@contextmanager
def exact_passes(dtype: torch.dtype, device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Make passes inside the context exact if `wanted`. Raise ValueError outside fp32, off the CPU or without numba."""
    if wanted and not can_be_exact(dtype, device):
        raise ValueError(f"exact passes need fp32 on a CPU and the package numba, not {dtype} on {device.type}")
    token = _exact.set(wanted)
    try:
        yield
    finally:
        _exact.reset(token)
