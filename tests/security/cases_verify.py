"""Attacks on the sandbox of programs: each function returns how many attacks succeeded."""

from __future__ import annotations

import os

from puna.stages.verifiers import sandbox

LIMIT_MB = 96
HOLD = "import time\ntime.sleep(0.2)\n"
"""A wait long enough for the watcher, which checks every 20 ms, to see the memory held."""

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
PIPES = """
import fcntl, os
pipes, held = [os.pipe() for _ in range(28)], 0
for _, write in pipes:
    fcntl.fcntl(write, 1031, 1 << 20)
    os.set_blocking(write, False)
    while True:
        try:
            held += os.write(write, bytes(1 << 16))
        except BlockingIOError:
            break
assert held > 16 << 20
"""
"""Pipes larger than the kernel's default."""
PAGES_IN_PIPES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
libc.mmap.restype, huge = ctypes.c_void_p, 2 << 20
for _, write in [os.pipe() for _ in range(8)]:
    for _ in range(16):
        begin = libc.mmap(None, ctypes.c_size_t(2 * huge), 3, 0x22, -1, ctypes.c_long(0))
        page = (begin + huge - 1) & -huge
        libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(huge), 14)
        ctypes.memset(page, 1, huge)
        assert libc.vmsplice(write, ctypes.byref(Piece(page, 4096)), ctypes.c_size_t(1), 0) == 4096
        libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(2 * huge))
"""
"""One byte of a huge page in a pipe keeps the whole page allocated, which belongs to no process any more."""
TIMERS = """
import ctypes
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
for _ in range(1000):
    assert libc.timer_create(0, None, ctypes.byref(timer)) == 0
"""
NETWORK = """
import socket
held = []
for family in range(2, 46):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            held.append(socket.socket(family, kind))
        except OSError:
            pass
assert held
"""
"""Non-local sockets: their buffers grow by themselves, and those of virtual machines reach the host."""
LANDLOCK = """
import ctypes
assert ctypes.CDLL(None).syscall(444, ctypes.byref((ctypes.c_uint64 * 2)(1, 0)), ctypes.c_long(8), 0) >= 0
"""
"""A Landlock rule set takes kernel memory for each rule, one for each of 65,536 ports."""
FILTERS = """
import ctypes, struct
libc = ctypes.CDLL(None)
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000))
rules = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(code)))
assert not libc.prctl(22, 2, ctypes.c_ulong(ctypes.addressof(rules)), 0, 0) or not libc.syscall(CALL, 1, 0, ctypes.byref(rules))
"""
"""Each system-call filter takes pages of kernel memory; thousands fit."""
EVENTS = """
import ctypes
assert ctypes.CDLL(None).syscall(CALL, 0x200, 0) >= 0
"""
"""A queue of file events takes kernel memory for each unread event."""
UNKNOWN = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert any(libc.syscall(number, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 38 for number in range(453, 600))
"""
"""System calls of later kernels, whose memory use is unknown."""
CALLS = {"x86_64": (317, 300), "aarch64": (277, 262)}[os.uname().machine]  # seccomp, fanotify_init
AREAS = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype, pages = ctypes.c_void_p, 50_000
begin = libc.mmap(None, ctypes.c_size_t(pages * 4096), 0, 0x4022, -1, ctypes.c_long(0))
for page in range(0, pages, 2):
    assert libc.mprotect(ctypes.c_void_p(begin + page * 4096), ctypes.c_size_t(4096), 1) == 0
for _ in range(10):
    if os.fork() == 0:
        time.sleep(9)
"""
"""Ten copies of 50,000 memory mappings, which take kernel memory; needs a limit of 256 MB."""
ATTACKS = {
    "large pipes": PIPES, "pages in pipes": PAGES_IN_PIPES, "timers": TIMERS, "network": NETWORK,
    "memfd": MEMFD, "shared mapping": SHARED_MAPPING, "shared /dev/zero": SHARED_ZERO, "shared segment": SEGMENT,
    "message queue": QUEUE, "file system of its own": OWN_FILES, "files": FILES,
    "socket buffers": SOCKETS, "rules": LANDLOCK, "calls of later kernels": UNKNOWN,
    "filters": FILTERS.replace("CALL", str(CALLS[0])), "file events": EVENTS.replace("CALL", str(CALLS[1])),
}  # fmt: skip


def held_over_limit(program: str, how: sandbox.Mode, limit_mb: int = LIMIT_MB) -> bool:
    """True if the program can hold memory that the limit does not count."""
    limits = sandbox.Limits(seconds=5.0, memory_mb=limit_mb, disk_mb=128)
    outcome = sandbox.run(program + HOLD, ["pass"], limits, how)
    return outcome.results == [None] and not outcome.ended


def sandbox_over_limit(how: sandbox.Mode | None = None) -> int:
    """Return the number of attacks that held memory that the limit does not count."""
    mode = how or sandbox.mode()
    return sum(held_over_limit(program, mode) for program in ATTACKS.values())
