"""Namespaces, root file system and rights of a sandboxed program: only the standard library."""

from __future__ import annotations

import ctypes
import os

from puna.stages.verifiers.sandbox_calls import NEWIPC, NEWNET, NEWNS, NEWPID, NEWUSER, NEWUTS, call, libc

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048  # nosuid, nodev, noexec, noatime, nodiratime
PR_NO_NEW_PRIVS = 38
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
NOBODY = 65534


def enter(unprivileged: bool) -> None:
    """Leave the machine's namespaces: file systems, processes, network, shared memory, host name."""
    user, group = os.getuid(), os.getgid()
    call("unshare", NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | (NEWUSER if unprivileged else 0))
    if unprivileged:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
            with open(f"/proc/self/{file}", "w") as handle:
                handle.write(text)


def build_root(readable: list[str], hidden: list[str], disk_bytes: int) -> None:
    """Build a root file system with the interpreter, read-only, and one empty folder in memory as the working directory."""
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
    """Make `root` the root; the previous root is at `old`."""
    if libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], root.encode(), old.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"pivot_root: {os.strerror(ctypes.get_errno())}")
    os.chdir("/")


def show(path: str) -> None:
    """Make a file or folder of the machine visible under the new root, read-only; a link stays a link."""
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
    kept = os.statvfs(target).f_flag & KEPT_FLAGS  # in a user namespace flags may be added, never taken off
    call("mount", None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept, None)


def become_nobody(mode: str, user: int) -> None:
    """Give up every right, for this process and what it starts."""
    call("prctl", PR_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.getuid() == 0 or mode == "root":
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())) != 0:
        raise OSError(ctypes.get_errno(), "capset")
