"""Isolation of a sandboxed program: namespaces, root file system, privileges, system call filter. Imports only the standard library."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NEW_NAMESPACES = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | 0x2000000  # and cgroups
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SYS_MMAP, SYS_CLONE, SYS_PRCTL = {"x86_64": 9, "aarch64": 222}, {"x86_64": 56, "aarch64": 220}, {"x86_64": 157, "aarch64": 167}
SYS_SOCKET, SYS_SETSOCKOPT, SYS_FCNTL = {"x86_64": 41, "aarch64": 198}, {"x86_64": 54, "aarch64": 208}, {"x86_64": 72, "aarch64": 25}
SYS_SIGACTION = {"x86_64": 13, "aarch64": 134}
SO_SNDBUF, SO_RCVBUF, AF_INET, F_SETPIPE_SZ, SIGCHLD = 7, 8, 2, 1031, 17
REFUSED_CALLS = {
    # shmget, semget, msgget, mount, mq_open, add_key, keyctl, unshare, perf_event_open, setns, memfd_create, bpf, userfaultfd, ptrace,
    # process_vm_readv, process_vm_writev, splice, tee, vmsplice, seccomp, fanotify_init, request_key, inotify_init, inotify_init1
    "x86_64": (29, 64, 68, 165, 240, 248, 250, 272, 298, 308, 319, 321, 323, 101, 310, 311, 275, 276, 278, 317, 300, 249, 253, 294),
    "aarch64": (194, 190, 186, 40, 180, 217, 219, 97, 241, 268, 279, 280, 282, 117, 270, 271, 76, 77, 75, 277, 262, 218, 26),
}
# Of FIRST_NEW and later, only pidfd_send_signal, pidfd_open, close_range, openat2, faccessat2, epoll_pwait2, futex_waitv, fchmodat2 pass.
FIRST_NEW, NEW_CALLS = 424, (424, 434, 436, 437, 439, 441, 449, 452)

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: str | int | None) -> None:
    """Call a C library function; raise OSError if it does not return 0."""
    values = [ctypes.c_char_p(a.encode()) if isinstance(a, str) else None if a is None else ctypes.c_ulong(a) for a in arguments]
    if getattr(libc, name)(*values) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def refuse_calls() -> None:
    """Forbid system calls for tracing, mounts, new namespaces, and memory outside processes (shared mappings, memfds, queues, filters).

    Raise OSError if this fails. All shared mappings are forbidden, because their pages remain after a process unmaps them. Only Unix
    sockets are allowed: sockets of virtual machines (vsock) ignore namespaces and reach the host. No process may change its action for
    SIGCHLD: if it ignored the signal, the kernel would not count the CPU time of its ended children."""
    machine = os.uname().machine
    if machine not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}")
    load, equal, at_least, has_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, absent = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    steps = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[machine]), (answer, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]  # x32, the second set of call numbers on x86-64
    for number in REFUSED_CALLS[machine] + NEW_CALLS:
        steps += [(equal, 0, 1, number), (answer, 0, 0, allow if number in NEW_CALLS else refuse)]
    steps += [(at_least, 0, 1, FIRST_NEW), (answer, 0, 0, absent)]  # also clone3, whose flags cannot be read; libraries then call clone
    for numbers, position, test, values in (
        (SYS_MMAP, 3, has_bit, (1,)), (SYS_CLONE, 0, has_bit, (NEW_NAMESPACES,)), (SYS_FCNTL, 1, equal, (F_SETPIPE_SZ,)),
        (SYS_SETSOCKOPT, 2, equal, (SO_SNDBUF, SO_RCVBUF)), (SYS_SOCKET, 0, at_least, (AF_INET,)), (SYS_SIGACTION, 0, equal, (SIGCHLD,)),
        (SYS_PRCTL, 0, equal, (PR_SET_SECCOMP,)),
    ):  # fmt: skip
        steps += [(equal, 0, 2 + 2 * len(values), numbers[machine]), (load, 0, 0, 16 + 8 * position)]
        for value in values:
            steps += [(test, 0, 1, value), (answer, 0, 0, refuse)]
        steps.append((answer, 0, 0, allow))
    steps.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    filter_program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(filter_program), 0, 0)


MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048  # nosuid, nodev, noexec, noatime, nodiratime
PR_NO_NEW_PRIVS = 38
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
NOBODY = 65534


def enter(unprivileged: bool) -> None:
    """Enter new namespaces: mounts, network, IPC, host name, processes (only for children), and users if `unprivileged`."""
    user, group = os.getuid(), os.getgid()
    call("unshare", NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | (NEWUSER if unprivileged else 0))
    if unprivileged:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
            with open(f"/proc/self/{file}", "w") as handle:
                handle.write(text)


def build_root(readable: list[str], hidden: list[str], disk_bytes: int) -> None:
    """Build and enter a read-only root file system of `readable` without `hidden`. The working directory is empty, writable, in memory."""
    size = f"size={disk_bytes},nr_inodes=4096"
    call("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    call("mount", "tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"{size},mode=755")
    os.mkdir("/tmp/old")
    pivot("/tmp", "/tmp/old")  # the machine's root is /old from here on
    for folder in ("/root", "/root/proc", "/root/dev", "/root/work", "/root/old"):
        os.mkdir(folder)
    call("mount", "/root", "/root", None, MS_BIND, None)
    for path in readable:
        show(path)
    for path in hidden:
        call("mount", "tmpfs", f"/root{path}", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4096,mode=755")
    for name in ("null", "zero", "urandom"):
        with open(f"/root/dev/{name}", "w"):
            pass
        call("mount", f"/old/dev/{name}", f"/root/dev/{name}", None, MS_BIND, None)
    call("mount", "proc", "/root/proc", "proc", MS_NOSUID | MS_NODEV, None)
    call("mount", "tmpfs", "/root/work", "tmpfs", MS_NOSUID | MS_NODEV, f"{size},mode=777")
    call("umount2", "/old", MNT_DETACH)
    pivot("/root", "/root/old")
    call("umount2", "/old", MNT_DETACH)
    os.rmdir("/old")
    call("mount", None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None)
    os.chdir("/work")


def pivot(root: str, old: str) -> None:
    """Make `root` the root file system and working directory; move the old root to `old`, a folder in `root`. Raise OSError on failure."""
    if libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], root.encode(), old.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"pivot_root: {os.strerror(ctypes.get_errno())}")
    os.chdir("/")


def show(path: str) -> None:
    """Make a file or folder of the machine visible under the new root, read-only; copy a symbolic link as a link."""
    source, target = f"/old{path}", f"/root{path}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        with open(target, "w"):
            pass
    call("mount", source, target, None, MS_BIND | MS_REC, None)
    flags = os.statvfs(target).f_flag & KEPT_FLAGS  # in a user namespace, flags may be added but not removed
    call("mount", None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags, None)


def become_nobody(mode: str, user: int) -> None:
    """Drop all privileges of this process and its later children; as root, first switch to user and group `user`, without other groups."""
    call("prctl", PR_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.getuid() == 0 or mode == "root":
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())) != 0:
        raise OSError(ctypes.get_errno(), "capset")
