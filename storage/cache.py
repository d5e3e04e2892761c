"""A cache of local copies of an object store's files, for libraries that read by path. A full cache evicts the least recently used entries.

The last `PINNED` entries that a process used are not evicted while the process runs. The environment variable `PUNA_CACHE` names the
cache's folder, and `PUNA_CACHE_GB` is the maximum size of one store's cache in GB (default: 50)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from puna.storage.errors import PunaError

MOST_GB = 50.0
PINNED = 64  # number of most recently used entries that a process protects from removal

_pinned: OrderedDict[Path, BinaryIO] = OrderedDict()


def folder() -> Path:
    return Path(os.environ.get("PUNA_CACHE") or Path.home() / ".cache" / "puna").expanduser().absolute()


def most_bytes() -> int:
    """Return the maximum size of a store's cache in bytes. Raise PunaError if PUNA_CACHE_GB is not a number."""
    text = os.environ.get("PUNA_CACHE_GB", str(MOST_GB))
    try:
        return int(float(text) * 1e9)
    except (ValueError, OverflowError) as error:
        raise PunaError(f"PUNA_CACHE_GB={text!r}: is not a number of gigabytes") from error


@dataclass(frozen=True)
class Cache:
    """The local copies of one store's files."""

    root: Path

    def path(self, name: str) -> Path:
        """Return the path of the local copy of a file or folder, which need not exist."""
        return self.root / "files" / name

    def have(self, versions: Mapping[str, str], fetch: Callable[[str, Path], None]) -> None:
        """Call fetch(name, path) for each file of `versions` (name → version) without a copy of this version. Pin all these files, then
        evict others if the cache is full."""
        for entry in sorted({_entry(name) for name in versions}):
            self._pin(entry)
        fetched = False
        for name, version in versions.items():
            copy, mark = self.path(name), self.root / "versions" / name
            if copy.is_file() and mark.is_file() and mark.read_text() == version:
                continue
            mark.unlink(missing_ok=True)
            for file in (copy, mark):
                file.parent.mkdir(parents=True, exist_ok=True)
            temporary = copy.with_name(f".{uuid.uuid4().hex}")
            try:
                fetch(name, temporary)
                os.replace(temporary, copy)
            finally:
                temporary.unlink(missing_ok=True)
            mark.write_text(version)
            fetched = True
        if fetched:
            self._shrink(most_bytes())

    def forget(self, name: str) -> None:
        for path in (self.path(name), self.root / "versions" / name):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def scratch(self, name: str) -> Path:
        """Return a folder for work in progress. It does not count towards the maximum size; `forget_scratch` removes it."""
        path = self.root / "scratch" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def forget_scratch(self, name: str) -> None:
        shutil.rmtree(self.root / "scratch" / name, ignore_errors=True)

    def _lock(self, entry: str) -> Path:
        return self.root / "locks" / entry.replace("/", "+")

    def _pin(self, entry: str) -> None:
        """Keep all processes from removing an entry while this process runs, or until it has used `PINNED` other entries."""
        file = self._lock(entry)
        if file not in _pinned:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = file.open("a+b")
            fcntl.flock(handle, fcntl.LOCK_SH)
            _pinned[file] = handle
        _pinned.move_to_end(file)
        os.utime(file)
        if len(_pinned) > PINNED:
            _pinned.popitem(last=False)[1].close()

    def _shrink(self, most: int) -> None:
        """Remove unpinned entries, least recently used first, until at most `most` bytes or only pinned entries are left."""
        sizes: dict[str, int] = {}
        files = self.root / "files"
        for path, _, names in os.walk(files):
            for name in names:
                file = Path(path, name)
                with contextlib.suppress(FileNotFoundError):
                    entry = _entry(str(file.relative_to(files)))
                    sizes[entry] = sizes.get(entry, 0) + file.stat().st_size
        total = sum(sizes.values())
        locks = {entry: self._lock(entry) for entry in sizes}
        for entry in sorted(sizes, key=lambda entry: locks[entry].stat().st_mtime_ns if locks[entry].exists() else 0):
            if total <= most:
                return
            with locks[entry].open("a+b") as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                self.forget(entry)
                total -= sizes[entry]


def _entry(name: str) -> str:
    """Return the unit of eviction that a file belongs to: an artifact, the work of one key, or another top-level file or folder."""
    inside = name.split("/")
    return "/".join(inside[: {"objects": 4, "work": 2}.get(inside[0], 1)])
