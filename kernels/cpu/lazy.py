"""Kernels that compile at their first launch: importing an operator's file needs neither triton nor numba.

`@triton_jit`, `@numba_jit` and `@strict_jit` leave a placeholder. Its first use compiles it and puts the compiled function in
its place in the file's globals, together with those that it calls, so that later uses cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from puna.kernels.cpu.placeholder import Placeholder


def triton_jit(function: Callable[..., Any]) -> Any:
    """Make a Triton kernel or device function; `tl` is `triton.language` in its file."""

    def compile(function: Callable[..., Any]) -> Any:
        try:
            import triton
            import triton.language as tl
        except ImportError as error:
            raise ImportError(f"the GPU version of {function.__name__} needs the package triton") from error
        function.__globals__["tl"] = tl
        return triton.jit(function)

    return Placeholder(function, compile)


def numba_jit(function: Callable[..., Any]) -> Any:
    """Make a CPU loop: no GIL, cached on disk, sums in any order, NaN and infinities as in IEEE 754."""

    return _loop(function, fastmath={"contract", "reassoc", "nsz", "arcp"})


def strict_jit(function: Callable[..., Any]) -> Any:
    """Make a loop as `numba_jit` does, but keep the written order of operations: the same bits in every tile of a product."""
    return _loop(function, fastmath=False)  # said, or a loop takes it over from the one that calls it


def _loop(function: Callable[..., Any], **options: Any) -> Any:
    def compile(function: Callable[..., Any]) -> Any:
        from puna.kernels.cpu.numba_cache import njit

        return njit(nogil=True, cache=True, error_model="numpy", **options)(function)

    return Placeholder(function, compile)


@cache
def has_numba() -> bool:
    """True if the fused CPU loops can run; without numba torch's own operators serve."""
    return find_spec("numba") is not None
