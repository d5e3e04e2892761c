"""The source of Puna as this process runs it: read once, at its start; what is edited later is another program."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
ROOMS = ("flows", "stages", "models", "kernels", "storage")


def digest(file: Path) -> str:
    """sha256 of a file's bytes, its first 16 hex digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _started() -> float:
    """When this process began, in seconds since 1970; Python has not imported anything by then."""
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux; psutil counts from a boot time in whole seconds there
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK") + 0.02
    return float(psutil.Process().create_time())


def _read() -> dict[str, str]:
    """The digest of every source file of Puna; of one written after this process started, which may run the older one, none."""
    started = _started()
    found = {}
    for room in ROOMS:
        for folder, _, names in os.walk(ROOT / room):
            for file in (Path(folder, name) for name in names if name.endswith(".py")):
                found[str(file)] = digest(file) if file.stat().st_mtime < started else "edited"
    return found


_AT_START = _read()
_WHOLE = hashlib.sha256("\n".join(f"{os.path.relpath(n, ROOT)} {d}" for n, d in sorted(_AT_START.items())).encode()).hexdigest()[:16]


def seen(file: Path) -> str:
    """The digest of a source file when this process started, or first asked for it."""
    name = str(file)
    if name not in _AT_START:
        _AT_START[name] = digest(file)
    return _AT_START[name]


def check(files: Iterable[Path]) -> None:
    """PunaError where a file is no longer what this process runs."""
    from puna.storage import PunaError

    for file in files:
        if not file.is_file() or digest(file) != seen(file):
            raise PunaError(
                f"{file} was edited while this process runs, which goes on with the older code: nothing is committed under "
                "the name of the newer one; start it again"
            )


def whole() -> str:
    """One digest of all of Puna's source files as they were at the start."""
    return _WHOLE
