"""The keys that a live process uses, which `gc` spares: a log of keys, and a lease that ends with the process."""

from __future__ import annotations

import contextlib
import threading
import uuid

from puna.storage.errors import PunaError
from puna.storage.files import LOCKS, Files

LOGS = "runs/held-"


class Holding:
    """The keys that one process uses. Nothing is written before the first one."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.name = uuid.uuid4().hex
        self._keys: set[str] = set()
        self._guard = threading.Lock()
        self._lease = contextlib.ExitStack()

    def add(self, key: str) -> None:
        """Note a key. Where nothing may be written nothing can be removed either."""
        with self._guard:
            if key in self._keys:
                return
            with contextlib.suppress(OSError):
                if not self._keys:
                    self._lease.enter_context(self._files.lease(f"held-{self.name}"))
                self._files.append(f"{LOGS}{self.name}", key.encode() + b"\n")
                self._keys.add(key)

    def release(self) -> None:
        """Give up all keys. At the end of a process that can no longer write there, the lease expires."""
        with self._guard, contextlib.suppress(OSError, PunaError):
            if self._keys:
                self._lease.close()
                drop(self._files, self.name)
                self._keys.clear()


def drop(files: Files, name: str) -> None:
    """Remove the log and the lease of a process that has ended."""
    files.remove(f"{LOGS}{name}")
    files.remove(f"{LOCKS}/held-{name}")


def held(files: Files, but: str) -> tuple[set[str], list[str]]:
    """Return the keys that live processes use, and the names of processes that have ended. `but`: the caller's name."""
    keys: set[str] = set()
    gone = []
    for log in files.list("runs"):
        name = log.removeprefix(LOGS)
        if name in (log, but):
            continue
        if not files.held(f"held-{name}"):
            gone.append(name)
            continue
        with contextlib.suppress(FileNotFoundError):  # it ended while we looked
            keys |= set(files.read(log).decode(errors="replace").split())
    return keys, gone
