"""Attacks on the sandbox of programs: each function returns how many attacks succeeded."""

from __future__ import annotations

from puna.stages.verifiers import sandbox

LIMIT_MB = 96
HOLD = "import time\ntime.sleep(0.2)\n"
"""Long enough for the watcher, which looks every 20 ms, to see what is held."""

MEMFD = """
import os
for number in range(8):
    handle = os.memfd_create(str(number))
    for _ in range(24):
        os.write(handle, bytes(1 << 20))
"""
SHARED_MAPPING = """
import mmap, os
for _ in range(3):
    read, write = os.pipe()
    if os.fork() == 0:
        held = mmap.mmap(-1, 40 << 20)
        for start in range(0, 40 << 20, 4096):
            held[start] = 1
        held.madvise(mmap.MADV_DONTNEED)
        os.write(write, b"1")
        break
    os.close(write)
    assert os.read(read, 1) == b"1"
"""
SHARED_ZERO = """
import mmap, os
handle = os.open("/dev/zero", os.O_RDWR)
for _ in range(2):
    held = mmap.mmap(handle, 16 << 20)
"""
SEGMENT = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.shmget(0, ctypes.c_size_t(32 << 20), 0o1600) >= 0
"""
QUEUE = """
import ctypes
assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0
"""
OWN_FILES = """
import ctypes
assert ctypes.CDLL(None).unshare(0x10020000) == 0
"""
SOCKETS = """
import os, socket
for _ in range(6):
    read, write = os.pipe()
    if os.fork() == 0:
        pairs, held = [], 0
        while held < 20 << 20:
            pairs.append(socket.socketpair())
            for one in pairs[-1]:
                one.setblocking(False)
                try:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
                except OSError:
                    pass
                try:
                    while True:
                        held += one.send(bytes(1 << 15))
                except BlockingIOError:
                    pass
        os.write(write, b"1")
        break
    os.close(write)
    assert os.read(read, 1) == b"1"
"""
FILES = """
for number in range(5):
    with open(f"/work/{number}", "wb") as file:
        file.write(bytes(24 << 20))
"""
ATTACKS = {
    "memfd": MEMFD, "shared mapping": SHARED_MAPPING, "shared /dev/zero": SHARED_ZERO, "shared segment": SEGMENT,
    "message queue": QUEUE, "file system of its own": OWN_FILES, "files": FILES,
    "socket buffers": SOCKETS,
}  # fmt: skip


def held_over_limit(program: str, how: sandbox.Mode) -> bool:
    """True if the program could hold memory that the limit does not count."""
    limits = sandbox.Limits(seconds=5.0, memory_mb=LIMIT_MB, disk_mb=128)
    outcome = sandbox.run(program + HOLD, ["pass"], limits, how)
    return outcome.results == [None] and not outcome.ended


def sandbox_over_limit(how: sandbox.Mode | None = None) -> int:
    """Return how many attacks held memory that the limit does not count."""
    mode = how or sandbox.mode("namespaces")
    return sum(held_over_limit(program, mode) for program in ATTACKS.values())
