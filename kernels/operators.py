"""Custom operators for torch's dispatcher, with one implementation per device, visible to autograd and torch.compile.

An operator has a portable implementation (torch operators; numba loops on CPU) and a Triton implementation. The dispatcher picks
by the tensors' device; fp64, which is for checks, always takes the portable one. With TRITON_INTERPRET=1,
Triton's interpreter runs the Triton implementations on CPU tensors, so that tests run them without a GPU.

A file's `NUMERICS` gives each operation's results a version. Artifacts' keys depend on this version and the reference, not on loops
and Triton programs: raise the version when a result's bits change (`tests/identity/numerics.py` compares bits)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_LIBRARY = torch.library.Library("puna", "FRAGMENT")

Function = Callable[..., Any]
PLAIN = (Tensor, torch.nn.Parameter)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Switch torch's deterministic algorithms on or off within the context. If on, an operation without such an algorithm only warns."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def operator(schema: str, portable: Function, triton: Function, fake: Function) -> Any:
    """Define an operator `puna::…` and return a function that calls it. `fake` returns empty outputs of the right shapes, for tracing, and
    must read `x.shape[0]`: `len(x)` would be a constant, and torch.compile would compile every length again."""
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)
    plain = portable
    portable = _without_autocast(portable)
    _LIBRARY.impl(name, portable, "CompositeExplicitAutograd")
    for key in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
        _LIBRARY.impl(name, _guard(portable, triton), key)
    torch.library.register_fake(f"puna::{name}", fake, lib=_LIBRARY)
    dispatched = getattr(torch.ops.puna, name).default

    def call(*args: Any) -> Any:
        return plain(*args) if alone(*args) else dispatched(*args)

    call.dispatched = dispatched  # type: ignore[attr-defined]
    return call


_LIBRARY.define("seen_by_mode() -> bool")
_LIBRARY.impl("seen_by_mode", lambda: False, "CompositeExplicitAutograd")
_LIBRARY.impl("seen_by_mode", lambda: True, "Python")  # the dispatch key of an active mode


def alone(first: Any, *others: Any) -> bool:
    """True if a call can skip the dispatcher, which costs 20 us: autograd, autocast, tracing, modes and Triton's interpreter are off, all
    tensors are plain, and `first` is on CPU. Subclasses of Tensor may wait for communication, which only the dispatcher triggers."""
    return (
        not torch.compiler.is_compiling()
        and not INTERPRETED
        and not torch.is_grad_enabled()
        and type(first) in PLAIN
        and first.device.type == "cpu"
        and all(_plain(other) for other in others)
        and not torch.is_autocast_enabled("cpu")
        and not torch.ops.puna.seen_by_mode.default()
    )


def _plain(argument: Any) -> bool:
    if isinstance(argument, list):
        return all(map(_plain, argument))
    return type(argument) in PLAIN or not isinstance(argument, Tensor)


def _without_autocast(function: Function) -> Function:
    """Return a function that runs `function` with autocast off: autocast would round the function's products."""

    def run(*args: Any) -> Any:
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return function(*args)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args)

    return run


def _guard(portable: Function, triton: Function) -> Function:
    def launch(*args: Any) -> Any:
        first = next(arg for arg in args if isinstance(arg, Tensor) or (isinstance(arg, list) and arg and isinstance(arg[0], Tensor)))
        tensor = first if isinstance(first, Tensor) else first[0]
        if not uses_triton(tensor):
            return portable(*args)
        with torch.cuda.device_of(tensor):
            return triton(*args)

    return launch


def uses_triton(tensor: Tensor) -> bool:
    """True if operators on this tensor run their Triton implementation."""
    return tensor.dtype != torch.float64 and (tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu"))


def differentiable(call: Any, backward: Function, setup: Function) -> None:
    """Attach a backward pass to `call`, a result of `operator`; `setup(ctx, inputs, output)` saves what `backward` needs. `call` is the
    operator, not its name: so a stage's key, which depends on all reachable code, depends on the backward pass too."""
    torch.library.register_autograd(call.dispatched, backward, setup_context=setup, lib=_LIBRARY)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums and statistics of `dtype` values are computed: fp64 for fp64, else fp32."""
    return dtype if dtype == torch.float64 else torch.float32


def fused_on_cpu(*tensors: Tensor | None) -> bool:
    """True if numba's loops can take these tensors (None is ignored): contiguous fp32 on CPU, with numba installed."""
    from puna.kernels.cpu.lazy_jit import has_numba

    for t in tensors:
        if t is not None and not (t.dtype == torch.float32 and t.is_cpu and t.is_contiguous()):
            return False
    return has_numba()
