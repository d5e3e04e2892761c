"""Training state on disk: one folder per checkpoint, complete or absent, never half written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS = "state.safetensors"
RECORD = "state.json"


def save_state(folder: Path, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> Path:
    """Write the checkpoint of `step` under `folder`, then remove the older ones.

    It is written under a temporary name, flushed to disk and renamed, so that a crash at any moment
    leaves the last complete checkpoint in place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:09d}"
    temporary = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary / TENSORS)
    (temporary / RECORD).write_text(json.dumps({"step": step, **record}), encoding="utf-8")
    for name in (TENSORS, RECORD):
        _fsync(temporary / name)
    _fsync(temporary)
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    _fsync(folder)
    for path in folder.iterdir():
        # Other dot-folders are what a crash left behind.
        if path != final and path.name.startswith(("step-", ".step-")):
            shutil.rmtree(path)
    return final


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest complete checkpoint under `folder`: its tensors and its record; None if there is none."""
    found = sorted(folder.glob("step-*")) if folder.is_dir() else []
    if not found:
        return None
    record = json.loads((found[-1] / RECORD).read_text(encoding="utf-8"))
    return load_file(found[-1] / TENSORS), record


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
