"""Digests of Puna's source files as this process runs them, read once at its start."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
ROOMS = ("flows", "stages", "models", "kernels", "storage")
SETTLED = 1.0  # seconds after which a file's times reliably show a later write, since file systems have coarse clocks


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _start_time() -> float:
    """Return the start time of this process, before any import, in seconds since 1970."""
    if hasattr(time, "CLOCK_BOOTTIME"):  # on Linux, psutil counts from a boot time in whole seconds
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK") + 0.02
    return float(psutil.Process().create_time())


def _source_files() -> Iterator[Path]:
    """Yield all files in Puna's source folders, without Python's caches and hidden files."""
    for room in ROOMS:
        for folder, folders, names in os.walk(ROOT / room):
            folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
            yield from (Path(folder, name) for name in names if not name.startswith("."))


def _read(files: Iterable[Path]) -> dict[str, str]:
    """Return the digest of each Python file, or "edited" if it was written after this process started and older code may be running.

    The inode's change time (ctime) decides, because archives may set any modification time. A future ctime counts as unedited."""
    start_time, digests = _start_time(), {}
    for file in files:
        if file.suffix == ".py":
            digests[str(file)] = "edited" if start_time <= file.stat().st_ctime <= time.time() else digest(file)
    return digests


def _combined_digest(digests: dict[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{os.path.relpath(n, ROOT)} {d}" for n, d in sorted(digests.items())).encode()).hexdigest()[:16]


_FILES = list(_source_files())
_AT_START = _read(_FILES)
_WHOLE = _combined_digest(_AT_START)
_unedited: dict[str, tuple[str, int, int, int, int]] = {}
"""Files verified as unedited: their digest, and their inode, size and times when they were checked."""


def source_digest(file: Path | str) -> str:
    """Return the digest of a source file. For Puna's Python files, it is the one at this process's start (or "edited", see `_read`); for
    other files, the one at the first call."""
    name = str(file)
    if name not in _AT_START:
        _AT_START[name] = digest(Path(file))
    return _AT_START[name]


def check(files: Iterable[Path | str]) -> None:
    """Raise PunaError if a file changed since this process read it. A file not written since the last check is not read again."""
    from puna.storage import PunaError

    for file in map(str, files):
        try:
            now = os.stat(file)
            state = (source_digest(file), now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
            if _unedited.get(file) == state:
                continue
            same = digest(Path(file)) == state[0]
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            same = False
        if not same:
            raise PunaError(f"{file} was edited while this process runs, and the process still runs the old code: nothing is committed, "
                "since its key would refer to the new code. Start the process again")  # fmt: skip
        if time.time() - now.st_ctime > SETTLED:
            _unedited[file] = state


def whole() -> str:
    """Return one digest of all of Puna's source files, as they were at the start of this process."""
    return _WHOLE


@cache
def contract() -> str:
    """Return one digest of the source files in this package, which analyses code."""
    return _combined_digest({name: digest for name, digest in _AT_START.items() if os.path.dirname(name) == os.path.dirname(__file__)})


@cache
def listing() -> str:
    """Return one digest of the names of all files that were in Puna's source folders at the start of this process."""
    return _combined_digest({str(file): "" for file in _FILES})
