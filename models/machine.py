"""The speed of a machine in matrix products, attention and memory traffic, measured or from a data sheet; limits of generation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from puna.kernels.linear import product

Clock = Callable[[], float]
Precision = Literal["fp32", "bf16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DataSheet(NamedTuple):
    """A GPU's data sheet: dense bf16 operations per second, memory traffic in bytes per second, and bytes of memory. `within`, `between`:
    bytes per second that one GPU usually sends to GPUs of the same machine, and to other machines. `fp32`: fp32 operations per second."""

    flops: float
    bandwidth: float
    memory: float
    within: float
    between: float
    fp32: float


GPUS = {
    "B200": DataSheet(2250e12, 8.0e12, 180e9, 900e9, 50e9, 75e12),
    "H200": DataSheet(989e12, 4.8e12, 141e9, 450e9, 50e9, 67e12),
    "H100": DataSheet(989e12, 3.35e12, 80e9, 450e9, 50e9, 67e12),
    "A100": DataSheet(312e12, 2.0e12, 80e9, 300e9, 25e9, 19.5e12),
    "L40S": DataSheet(362e12, 0.864e12, 48e9, 32e9, 12.5e9, 91.6e12),
    "L4": DataSheet(121e12, 0.3e12, 24e9, 32e9, 12.5e9, 30.3e12),
    "RTX 4090": DataSheet(165e12, 1.0e12, 24e9, 32e9, 12.5e9, 82.6e12),
}
"""Data sheets by substrings of the GPU's name."""


def data_sheet(name: str) -> DataSheet:
    """Return the data sheet of the GPU with this name; raise ValueError if no key of `GPUS` is part of the name."""
    for part, sheet in GPUS.items():
        if part in name:
            return sheet
    raise ValueError(f"there is no data sheet for the GPU {name!r}; there are data sheets for {', '.join(GPUS)}")


@dataclass(frozen=True)
class Machine:
    """Rates of one device.

    matrix_flops     operations per second of the matrix products of a training step
    attention_flops  operations per second of attention, forward and backward, as counted by `accounting.py`
    bandwidth        bytes per second that elementwise work reads and writes, measured on SwiGLU
    """

    matrix_flops: float
    attention_flops: float
    bandwidth: float

    @property
    def ops_per_byte(self) -> float:
        """Return the arithmetic intensity at which matrix products and memory traffic take equally long."""
        return self.matrix_flops / self.bandwidth

    @staticmethod
    def of(sheet: DataSheet, precision: Precision = "bf16") -> Machine:
        """Return a GPU's rates as shares of its data sheet's: 0.75 of the FLOPs in matrix products, 0.5 of the FLOPs in attention, 0.85 of
        the bandwidth. Good kernels reach these shares in bf16; they are assumed for fp32, too."""
        flops = sheet.flops if precision == "bf16" else sheet.fp32
        return Machine(0.75 * flops, 0.5 * flops, 0.85 * sheet.bandwidth)

    @staticmethod
    def gpu(name: str, precision: Precision = "bf16") -> Machine:
        """Return the rates of the GPU with this name, see `of`; raise ValueError if `GPUS` does not list the GPU."""
        return Machine.of(data_sheet(name), precision)


def best_seconds(function: Callable[[], object], clock: Clock, tries: int = 5, seconds: float = 0.15) -> float:
    """Return the seconds of the fastest call, after one untimed call; call at least `tries` times, for at least `seconds` in all."""
    function()
    best, start, count = float("inf"), clock(), 0
    while count < tries or clock() - start < seconds:
        before = clock()
        function()
        best, count = min(best, clock() - before), count + 1
    return best


def matrix_rate(size: int = 768, seconds: float = 0.3, dtype: torch.dtype = torch.float32) -> float:
    """Return the operations per second of `size`×`size` matrix products on torch's threads: one thread's rate per CPU second, times the
    number of threads, from the faster of two routines. Wall-clock time would understate the rate while other programs run."""
    threads = torch.get_num_threads()
    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    routines = (lambda: product(left, right), lambda: torch.mm(left, right))
    torch.set_num_threads(1)
    try:
        spent = min(best_seconds(routine, time.process_time, 1, seconds / len(routines)) for routine in routines)
    finally:
        torch.set_num_threads(threads)
    return threads * 2.0 * size**3 / spent


@cache
def peak_flops(device: str, precision: Precision = "fp32") -> float | None:
    """Return the device's peak operations per second in matrix products: measured on a CPU; by data sheet for bf16 on a GPU; else None."""
    if device == "cpu":
        return matrix_rate(dtype=DTYPES[precision])
    if device != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name()
    return next((sheet.flops for part, sheet in GPUS.items() if part in name), None)


class Room(NamedTuple):
    """The limits of generation on a device: concurrent answers, tokens per step, bytes of keys and values."""

    sequences: int
    step_tokens: int
    memory: int


USUAL_ANSWERS = {"cpu": 64, "cuda": 256}
"""Default number of concurrent answers, by device type."""
USUAL_STEP = {"cpu": 2048, "cuda": 8192}
"""Default tokens of a generation step, by device type."""
CPU_KEYS = 1 << 30
"""Default bytes of keys and values on a CPU; on a GPU half of the free memory."""


def generation_room(device: torch.device, sequences: int | None, step_tokens: int | None, memory: int | None) -> Room:
    """Return the given limits, with the device's defaults in place of None; raise ValueError for a limit below 1."""
    if any(own is not None and own < 1 for own in (sequences, step_tokens, memory)):
        raise ValueError(f"sequences, step_tokens and memory must be at least 1, not {sequences}, {step_tokens} and {memory}")
    key_bytes = CPU_KEYS
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # memory that torch has cached
        key_bytes = (torch.cuda.mem_get_info(device)[0] + unused) // 2
    usual = Room(USUAL_ANSWERS[device.type], USUAL_STEP[device.type], key_bytes)
    return Room(*(room if own is None else own for own, room in zip((sequences, step_tokens, memory), usual, strict=True)))


def free_memory(device: torch.device) -> int:
    """Return the bytes that a model may take by default: nine tenths of a GPU's free memory, or four fifths of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 9 // 10
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: half of the physical memory
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return free * 4 // 5


@cache
def bf16_pays() -> bool:
    """True if this CPU multiplies matrices over 1.25 times as fast in bf16 as in fp32. With AVX2, bf16 takes 180 times as long."""
    fast, full = (matrix_rate(256, 0.1, dtype) for dtype in (torch.bfloat16, torch.float32))
    return fast > 1.25 * full
