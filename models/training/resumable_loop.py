"""Loops over iterations or items that save their state at intervals, so that the next attempt of a run continues from there."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from puna.models.training.state import Saver, check_identity, load_arrays, save_state

SAVE_SECONDS, REPEATED_SECONDS = 10.0, 0.5  # seconds between two saves, and minimum seconds of work after which the end is saved, too
ROWS = "rows.f32"
Item = TypeVar("Item")
Arrays = Mapping[str, NDArray[Any]]


def iterate(
    step: Callable[[], bool], most: int, arrays: Callable[[], Arrays], take: Callable[[Arrays], object],
    state: Path | None = None, identity: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Call `step` until it returns True, at most `most` times.

    `arrays` returns the arrays that hold the state of `step`, and `take` restores this state. state: folder in which `Saver` saves the
    arrays, also at the end if the work took `REPEATED_SECONDS`. identity: values of this work; raise ValueError if the state's differ."""
    done, ended, seconds = 0, False, 0.0
    own = dict(identity or {})
    if state is not None and (saved := load_arrays(state)) is not None:
        values, record = saved
        check_identity(state, record, own)
        take(values)
        done, ended, seconds = record["done"], record["ended"], record["seconds"]

    def save() -> None:
        assert state is not None
        save_state(state, done, arrays(), {**own, "unit": "step", "done": done, "of": most, "ended": ended, "seconds": seconds})

    with Saver(SAVE_SECONDS, None if state is None else save) as saver:
        while done < most and not ended:
            start = time.perf_counter()
            ended = step()
            done, seconds = done + 1, seconds + time.perf_counter() - start
            saver.save_if_due((ended or done == most) and seconds >= REPEATED_SECONDS)
            saver.end_if_asked()


def rows_of(
    compute: Callable[[Item], NDArray[np.float32]], items: Sequence[Item], folder: Path | None = None, unit: str = "row"
) -> NDArray[np.float32]:
    """Return the rows [n, D] of all items, in order; `compute` returns the rows of one item, float32[k, D]. folder: where `Saver` appends
    the rows to one file, whose checksum a checkpoint holds. unit: name of an item in the checkpoint's record."""
    rows, done, width, size, seconds, digest = bytearray(), 0, 0, 0, 0.0, hashlib.sha256()
    if folder is not None and (saved := load_arrays(folder)) is not None:
        record = saved[1]
        check_identity(folder, record, {"of": len(items), "unit": unit})
        rows += (folder / ROWS).read_bytes()[: record["bytes"]] if (folder / ROWS).exists() else b""
        digest.update(rows)
        if digest.hexdigest() == record["rows"]:
            done, width, size, seconds = record["done"], record["width"], len(rows), record["seconds"]
        else:
            warnings.warn(f"{folder / ROWS}: the saved rows are damaged; they are computed again", stacklevel=2)
            rows, digest = bytearray(), hashlib.sha256()

    def save() -> None:
        nonlocal size
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        with open(os.open(folder / ROWS, os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.seek(size)
            file.write(memoryview(rows)[size:])
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        digest.update(memoryview(rows)[size:])
        size = len(rows)
        record = {"unit": unit, "done": done, "of": len(items), "seconds": seconds}
        save_state(folder, done, {}, {**record, "width": width, "bytes": size, "rows": digest.hexdigest()})

    with Saver(SAVE_SECONDS, None if folder is None else save) as saver:
        for item in items[done:]:
            start = time.perf_counter()
            some = compute(item)
            width = some.shape[1]
            rows += np.ascontiguousarray(some, np.float32).tobytes()
            done, seconds = done + 1, seconds + time.perf_counter() - start
            saver.save_if_due(done == len(items) and seconds >= REPEATED_SECONDS)
            saver.end_if_asked()
    return np.frombuffer(rows, np.float32).reshape(-1, max(width, 1))
