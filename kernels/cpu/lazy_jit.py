"""Decorators for kernels that compile at their first use, so that importing a kernel's file needs neither triton nor numba.

`@triton_jit`, `@numba_jit`, `@strict_jit` and `@inline_jit` return a placeholder. The first use of one replaces all placeholders in the
file's globals by compiled kernels. Later uses have no extra cost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

Address = int  # memory address of numbers that a loop reads or writes; 0: none. Passing an address costs a tenth of passing an array.
FAST = {"contract", "reassoc", "nsz", "arcp"}  # LLVM's fast-math flags that let the compiler choose the order and rounding of arithmetic
_one_thread = threading.RLock()


class Placeholder:
    """A kernel that is compiled at its first use."""

    def __init__(self, function: Callable[..., Any], compile: Callable[[Callable[..., Any]], Any]) -> None:
        self.function, self._compile = function, compile
        self._compiled: Any = None

    def compiled_function(self) -> Any:
        """Return the compiled function. Before any thread gets it, replace all placeholders among the globals of the function's file."""
        with _one_thread:
            if self._compiled is None:
                self._compiled = self._compile(self.function)
                scope = self.function.__globals__
                for name, value in list(scope.items()):
                    if isinstance(value, Placeholder):
                        scope[name] = value.compiled_function()
            return self._compiled

    def __getitem__(self, grid: Any) -> Any:
        return self.compiled_function()[grid]

    def __call__(self, *args: Any) -> Any:
        return self.compiled_function()(*args)


def triton_jit(function: Callable[..., Any]) -> Any:
    """Return a placeholder for a Triton kernel or device function. Its first use sets `tl` to `triton.language` in its file."""

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
    """Return a placeholder for a CPU loop that Python calls: no GIL, cached on disk, sums in any order, NaN and infinities as in IEEE 754.

    Use `strict_jit` or `inline_jit` for a loop that other loops call. LLVM optimizes such a loop on its own and again in every caller's
    object; which copy runs depends on what the process loaded first. With sums in any order, the copies differ in bits."""

    return _loop(function, fastmath=FAST)


def strict_jit(function: Callable[..., Any]) -> Any:
    """Return a placeholder like `numba_jit`, but with sums in the written order: every tile and every copy gives equal bits."""
    return _loop(function, fastmath=False)  # if `fastmath` is not set, a loop inherits the option from its caller


def inline_jit(function: Callable[..., Any]) -> Any:
    """Return a placeholder for a function that is inlined into the loops that call it, vectorized, with sums in any order."""
    return _loop(function, fastmath=FAST, forceinline=True)


def _loop(function: Callable[..., Any], **options: Any) -> Any:
    def compile(function: Callable[..., Any]) -> Any:
        from puna.kernels.cpu.numba_cache import njit

        return njit(nogil=True, cache=True, error_model="numpy", **options)(function)

    return Placeholder(function, compile)


@cache
def has_numba() -> bool:
    """True if the fused CPU loops can run; without numba, torch's own operators are used."""
    return find_spec("numba") is not None
