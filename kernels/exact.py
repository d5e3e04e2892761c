"""Exact passes: the bits of a token's results depend only on the token's path, not on the other tokens of the pass.

Generation and training group tokens differently: generation computes them one at a time, in chunks, or after a cached prefix. In exact
passes, every routine computes a row by the same sequence of operations, whatever the other rows:

- products: each result is one chain of sums, whatever tile it is in (`linear.products`);
- attention: one loop over the keys of a query's path, in pages that begin at multiples of the page's size, wherever the pages are stored
  and whichever sequences share them (`paged_attention`);
- norms, rotations, SwiGLU, log-softmax: loops over rows in single IEEE operations (`vectors`), so that they have the same bits inside a
  loop that computes a whole layer (`dense_layers`).

Exact passes need fp32 on a CPU and numba; elsewhere `exact_passes` raises ValueError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from puna.kernels.cpu.lazy_jit import has_numba

_exact: ContextVar[bool] = ContextVar("exact", default=False)


def exact() -> bool:
    """True within `exact_passes(wanted=True)`, but not in compiled layers, because torch.compile chooses the order of sums."""
    return not torch.compiler.is_compiling() and _exact.get()


def can_be_exact(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float32 and device.type == "cpu" and has_numba()


@contextmanager
def exact_passes(dtype: torch.dtype, device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Make passes inside the context exact if `wanted`, else inexact. If `wanted`, raise ValueError unless `can_be_exact`."""
    if wanted and not can_be_exact(dtype, device):
        raise ValueError(f"exact passes need fp32 on a CPU and the package numba, not {dtype} on {device.type}")
    token = _exact.set(wanted)
    try:
        yield
    finally:
        _exact.reset(token)
