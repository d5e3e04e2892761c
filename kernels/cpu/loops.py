"""Functions that run numba's loops over rows, on as many threads as torch uses, and arithmetic that loops share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from puna.kernels.cpu.lazy_jit import inline_jit

DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.int32: np.int32, torch.bool: np.bool_}
THREAD_ELEMENTS = 1 << 18  # minimum elements per thread: fewer are not worth waking another thread

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)  # a child has none of its parent's threads


def parts(rows: int, width: int) -> int:
    """Return the number of parts into which `by_rows` cuts `rows` rows of `width` elements."""
    return max(1, min(torch.get_num_threads(), rows, rows * width // THREAD_ELEMENTS))


def by_rows(loop: Callable[..., None], rows: int, width: int, *tensors: Tensor | None) -> None:
    """Call `loop(part, start, stop, *arrays)` for each part of the rows, in parallel; None becomes an empty array. `width`: see `parts`."""
    run_rows(loop, rows, width, *(np.empty((0, 0), np.float32) if t is None else array(t) for t in tensors))


def array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a CPU tensor as an array, valid while the tensor lives. Unlike `Tensor.numpy`, it leaves the storage resizable, for FSDP."""
    bytes_each, strides = tensor.element_size(), tensor.stride()
    size = sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + 1 if tensor.numel() else 0
    memory = (ctypes.c_char * (size * bytes_each)).from_address(tensor.data_ptr())
    steps = tuple(s * bytes_each for s in strides)
    return np.ndarray(tuple(tensor.shape), DTYPES[tensor.dtype], memory, 0, steps)  # type: ignore[arg-type]


def run_rows(loop: Callable[..., None], rows: int, width: int, *args: Any) -> None:
    """Call a loop as `by_rows` does, but pass `args` unchanged: arrays, numbers, or addresses, which cost a tenth of an array to pass."""
    global _pool
    count = parts(rows, width)
    if count == 1:
        loop(0, 0, rows, *args)
        return
    cuts = [rows * i // count for i in range(count + 1)]
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="puna-kernels")
    for job in [_pool.submit(loop, i, cuts[i], cuts[i + 1], *args) for i in range(count)]:
        job.result()


@inline_jit
def exp32(x: Any) -> Any:
    """Return e^x in fp32 to 2 ulp by arithmetic that vectorizes; x outside [-87, 88] counts as the nearest bound.

    x = n ln 2 + r with |r| <= ln 2 / 2; e^r by Cephes' polynomial, 2^n by writing the exponent."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = p * r * r + r + np.float32(1.0)
    power = (np.int32(n) + np.int32(127)) << np.int32(23)
    return y * np.int32(power).view(np.float32)
