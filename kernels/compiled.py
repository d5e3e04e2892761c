"""numba's `njit` with caches that know every file of compiled loops.

Numba compiles a loop together with the loops that it calls, but looks for changes only in the file of the one that it
loads from its cache: after an edit of the other file it would go on with the old loop. So the caches of one state of all
these files lie in a folder of their own.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numba
from numba import njit

__all__ = ["njit"]

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "stages")


def state(root: Path) -> str:
    """Hash of all files below the rooms of `root` that compile loops."""
    found = hashlib.sha256()
    for room in ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            source = file.read_bytes()
            if b"njit" in source or b"numba_jit" in source:
                found.update(str(file.relative_to(root)).encode() + b"\0" + hashlib.sha256(source).digest())
    return found.hexdigest()[:16]


def folder(root: Path) -> Path:
    """Where the caches of the present state lie: below NUMBA_CACHE_DIR, the checkout, or if that is read-only, the user's cache."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(given) / state(root)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "puna"
    for base in (root / ".loops", home, Path(tempfile.gettempdir()) / "puna"):
        try:
            (base / state(root)).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(base / state(root), os.W_OK):
            return base / state(root)
    raise OSError(f"no place for compiled loops: neither {root / '.loops'} nor {home} can be written; set NUMBA_CACHE_DIR")


numba.config.CACHE_DIR = str(folder(ROOT))
