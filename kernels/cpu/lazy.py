"""Kernels that compile at their first launch: importing an operator's file needs neither triton nor numba.

`@triton_jit`, `@numba_jit`, `@strict_jit` and `@inline_jit` leave a placeholder. Its first use compiles it and puts the compiled
function in its place in the file's globals, together with those that it calls, so that later uses cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from puna.kernels.cpu.placeholder import Placeholder

FAST = {"contract", "reassoc", "nsz", "arcp"}
"""LLVM's flags for arithmetic whose order and rounding the compiler chooses."""


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
    """Make a CPU loop that Python calls: no GIL, cached on disk, sums in any order, NaN and infinities as in IEEE 754.

    A loop that other loops call is `strict_jit` or `inline_jit`. LLVM optimises it once for itself and again in every caller's object;
    which copy runs depends on what the process loaded first, and with sums in any order the copies differ in bits.
    """

    return _loop(function, fastmath=FAST)


def strict_jit(function: Callable[..., Any]) -> Any:
    """Make a loop as `numba_jit` does, but keep the written order of operations: the same bits in every tile and every copy."""
    return _loop(function, fastmath=False)  # without it, a loop inherits the option from its caller


def inline_jit(function: Callable[..., Any]) -> Any:
    """Make a function that becomes part of each loop that calls it: there it has sums in any order, and is vectorised."""
    return _loop(function, fastmath=FAST, forceinline=True)


def _loop(function: Callable[..., Any], **options: Any) -> Any:
    def compile(function: Callable[..., Any]) -> Any:
        from puna.kernels.cpu.numba_cache import njit

        return njit(nogil=True, cache=True, error_model="numpy", **options)(function)

    return Placeholder(function, compile)


@cache
def has_numba() -> bool:
    """True if the fused CPU loops can run; without numba torch's own operators serve."""
    return find_spec("numba") is not None
