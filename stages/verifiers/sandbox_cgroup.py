"""A cgroup for one program, if this user may make one: the kernel then counts all memory that it causes."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

MOUNT = "/sys/fs/cgroup"
OWN = "/proc/self/cgroup"
TRIES = 200
"""Looks, 5 ms apart, if the last process has left."""


class Group:
    """A cgroup (version 2) and its open file `procs`: a process that writes 0 to it enters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.procs = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CREAT)

    def exceeded(self) -> bool:
        """True if the kernel ended a process for the group's memory."""
        with contextlib.suppress(OSError):
            events = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
            return int(events["oom_kill"]) > 0
        return False

    def close(self) -> None:
        """End the processes that are left, and remove the group."""
        os.close(self.procs)
        with contextlib.suppress(OSError):
            (self.folder / "cgroup.kill").write_text("1")
        for _ in range(TRIES):
            try:
                self.folder.rmdir()
            except OSError as error:
                if error.errno == errno.EBUSY:
                    time.sleep(0.005)
                    continue
            return


@contextlib.contextmanager
def group(memory_bytes: int) -> Iterator[Group | None]:
    """Yield a cgroup with this limit, beside the one of this process and under the limits of those above; None where none can be made."""
    folder = _beside()
    made = None if folder is None else _create(folder / f"puna-code-{uuid.uuid4().hex}", memory_bytes)
    try:
        yield made
    finally:
        if made is not None:
            made.close()


def _beside() -> Path | None:
    """Return the folder of a cgroup that this user may give children with limits of memory: above the one of this process."""
    with contextlib.suppress(OSError):
        own = next((line[3:] for line in Path(OWN).read_text().splitlines() if line.startswith("0::")), None)
        if own is None or ".." in own:
            return None
        folder = Path(MOUNT) if own == "/" else (Path(MOUNT) / own.lstrip("/")).parent
        given = (folder / "cgroup.subtree_control").read_text().split()
        return folder if "memory" in given and os.access(folder / "cgroup.procs", os.W_OK) else None
    return None


def _create(folder: Path, memory_bytes: int) -> Group | None:
    try:
        folder.mkdir()
    except OSError:  # read-only, as in most containers
        return None
    try:
        (folder / "memory.max").write_text(str(memory_bytes))
        with contextlib.suppress(OSError):  # a kernel without swap
            (folder / "memory.swap.max").write_text("0")
        return Group(folder)
    except OSError:
        folder.rmdir()
        return None
