"""Keys that a live process uses, so that `gc` leaves their artifacts: a log of keys, and a lease that goes with the process."""

from __future__ import annotations

import contextlib
import threading
import uuid

from puna.storage.errors import PunaError
from puna.storage.files import LOCKS, Files

LOGS = "runs/held-"


class Holding:
    """The keys that one process has; nothing is written before the first one."""

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
        """Have nothing any more. At the end of a process that can no longer write there, the lease runs out."""
        with self._guard, contextlib.suppress(OSError, PunaError):
            if self._keys:
                self._lease.close()
                drop(self._files, self.name)
                self._keys.clear()


def drop(files: Files, name: str) -> None:
    """Forget what a process had that is gone."""
    files.remove(f"{LOGS}{name}")
    files.remove(f"{LOCKS}/held-{name}")


def held(files: Files, but: str) -> tuple[set[str], list[str]]:
    """The keys that live processes have, and the names of those that are gone. `but`: the one that asks."""
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
