"""Calls of the C library, and the system-call filter of a sandboxed program: only the standard library."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NEW_NAMESPACES = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | 0x2000000  # and cgroups
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SYS_MMAP, SYS_CLONE, SYS_CLONE3 = {"x86_64": 9, "aarch64": 222}, {"x86_64": 56, "aarch64": 220}, 435
SYS_SOCKET, SYS_SETSOCKOPT, SYS_FCNTL = {"x86_64": 41, "aarch64": 198}, {"x86_64": 54, "aarch64": 208}, {"x86_64": 72, "aarch64": 25}
SO_SNDBUF, SO_RCVBUF, AF_INET, F_SETPIPE_SZ = 7, 8, 2, 1031
REFUSED_CALLS = {
    # shmget, semget, msgget, mount, mq_open, add_key, keyctl, unshare, perf_event_open, setns, memfd_create, bpf, userfaultfd,
    # ptrace, process_vm_readv, process_vm_writev, splice, tee, vmsplice, inotify_init,
    # inotify_init1
    "x86_64": (29, 64, 68, 165, 240, 248, 250, 272, 298, 308, 319, 321, 323, 101, 310, 311, 275, 276, 278, 253, 294),
    "aarch64": (194, 190, 186, 40, 180, 217, 219, 97, 241, 268, 279, 280, 282, 117, 270, 271, 76, 77, 75, 26),
}
REFUSED_ANYWHERE = (425, 428, 429, 430, 432, 438, 447)  # io_uring_setup, open_tree, move_mount, fsopen, fsmount, pidfd_getfd, memfd_secret

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: str | int | None) -> None:
    """Call a function of the C library; OSError where it fails."""
    given = [ctypes.c_char_p(a.encode()) if isinstance(a, str) else None if a is None else ctypes.c_ulong(a) for a in arguments]
    if getattr(libc, name)(*given) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def refuse_calls() -> None:
    """Refuse system calls that hold memory outside every process (shared mappings, memfds, queues, pages in pipes) and tracing.

    Raise OSError if the kernel takes no filter. Shared mappings are refused whole: their pages stay after the process dropped them.
    Of sockets only local ones are allowed: a virtual machine's (vsock) know no namespace and reach its host.
    """
    machine = os.uname().machine
    if machine not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}")
    load, equal, at_least, has_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, absent = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    steps = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[machine]), (answer, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]  # the second numbering of x86-64
    for number in REFUSED_CALLS[machine] + REFUSED_ANYWHERE:
        steps += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    steps += [(equal, 0, 1, SYS_CLONE3), (answer, 0, 0, absent)]  # its flags cannot be read here; libraries then call clone
    for numbers, position, test, values in (
        (SYS_MMAP, 3, has_bit, (1,)), (SYS_CLONE, 0, has_bit, (NEW_NAMESPACES,)), (SYS_FCNTL, 1, equal, (F_SETPIPE_SZ,)),
        (SYS_SETSOCKOPT, 2, equal, (SO_SNDBUF, SO_RCVBUF)), (SYS_SOCKET, 0, at_least, (AF_INET,)),
    ):  # fmt: skip
        steps += [(equal, 0, 2 + 2 * len(values), numbers[machine]), (load, 0, 0, 16 + 8 * position)]
        for value in values:
            steps += [(test, 0, 1, value), (answer, 0, 0, refuse)]
        steps.append((answer, 0, 0, allow))
    steps.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    filter_program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(filter_program), 0, 0)
