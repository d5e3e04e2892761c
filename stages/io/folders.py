"""Folders that stand whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from puna.storage import PunaError


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write in, which becomes `target` at the end or is removed. PunaError if `target` is not empty."""
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PunaError(f"export: {target} is there already and not empty; give a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.part"
    part.mkdir()
    try:
        yield part
        if target.exists():
            target.rmdir()
        os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
