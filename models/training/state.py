"""Checkpoints of a training run on disk: one folder each, complete or absent. Signal handling that saves the state before the end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from puna.models.training.boxes import TENSORS, empty, read, whole_boxes

if TYPE_CHECKING:  # training a classifier needs no torch
    from torch import Tensor

SIGNALS = (signal.SIGINT, signal.SIGTERM)
announce: Callable[[], object] | None = None  # called in the signal handler, at any point, when a signal has to wait for a step


class Stop:
    """Handling of SIGINT and SIGTERM in a training's main thread: the first signal of a kind waits for `act`, the second acts at once."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._asked: list[int] = []
        self.insisted = False

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            # None: a handler that was not set by Python code and cannot be restored.
            self._before = {number: one for number in SIGNALS if (one := signal.getsignal(number)) not in (signal.SIG_IGN, None)}
            for number in self._before:
                signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._put_back()
        if kind is None:
            self.act()

    @property
    def is_requested(self) -> bool:
        return bool(self._asked)

    def act(self) -> None:
        """Raise the first waiting signal, if any, for its previous handler, which may raise an error or end the process."""
        if self._asked:
            self._put_back()
            signal.raise_signal(self._asked.pop(0))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._asked:
            self.insisted = True
            self._put_back()
            signal.raise_signal(number)
            return
        self._asked.append(number)
        if announce is not None and len(self._asked) == 1:
            announce()

    def _put_back(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}


Tensors = TypeVar("Tensors")
Result = TypeVar("Result")
Job = Callable[[], object]


def interruptible(call: Callable[[], Result]) -> Result:
    """Return the result of a library's long call, which runs in another thread so that this thread can handle signals."""
    with ThreadPool(1) as pool:
        return pool.apply_async(call).get()


RECORD = "state.json"
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # errors that reading a damaged checkpoint may raise

SAVE_SHARE = 0.02  # maximum share of a training run's time that periodic saving may take (0 to 1)


class Saver:
    """A saver of a training run's state: when a step asks for a save, periodically, and before a signal ends the run.

    seconds: time between periodic saves; longer if saving would take more than `SAVE_SHARE` of the time. write: writes the state, or
    returns a job that writes a copy of the state while the training goes on; None: nothing is saved. One job runs at a time: the next
    save, or the end, waits for the job and raises the job's error. agree: returns True if any rank of the run passes True."""

    def __init__(self, seconds: float, write: Callable[[], object] | None, agree: Callable[[bool], bool] = bool) -> None:
        self._seconds, self._write, self._agree = seconds, write, agree
        self._cost, self._since, self._saved = 0.0, time.monotonic(), False
        self._stop = Stop()
        self._job: tuple[AsyncResult[object], ThreadPool] | None = None

    def __enter__(self) -> Saver:
        self._stop.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            if not self._stop.insisted:
                self.wait()
        except Exception:
            if kind is None:
                raise
        finally:
            self._stop.__exit__(kind, *error)

    def save_if_due(self, now: bool = False) -> None:
        """Save the state after a step if any rank has a reason: `now`, a waiting signal, or a periodic save that is due."""
        self._saved = False
        due = time.monotonic() - self._since >= max(self._seconds, self._cost / SAVE_SHARE) and (self._job is None or self._job[0].ready())
        if self._agree(now or self._stop.is_requested or due):
            self._save()

    def leave_if_asked(self) -> None:
        """Save the state of the last complete step if a signal is waiting, and end the run in the middle of the current step."""
        if self._stop.is_requested:
            self.save_if_due()
            self.end_if_asked()

    def end_if_asked(self) -> None:
        """Save the state and end the run if a signal is waiting on any rank; raise SystemExit if it waits only on other ranks."""
        if self._agree(self._stop.is_requested):
            self._save()
            self.wait()
            if not self._stop.is_requested:
                raise SystemExit("another rank of the training run was stopped")
            self._stop.act()

    def _save(self) -> None:
        if self._write is None or self._saved:
            return
        start = time.monotonic()
        self.wait()
        if callable(job := self._write()):
            pool = ThreadPool(1)
            self._job = pool.apply_async(job), pool
            pool.close()
        self._since, self._saved = time.monotonic(), True
        self._cost = self._since - start

    def wait(self) -> None:
        """Wait until the last saved state is on disk; raise the error of the job that writes it."""
        running, self._job = self._job, None
        if running is not None:
            running[0].wait()
            running[1].join()  # the thread frees the copy of the state; C++ aborts if the interpreter ends meanwhile
            running[0].get()


def save_state(folder: Path, step: int, tensors: Mapping[str, Tensor | NDArray[Any]], record: dict[str, Any]) -> Path:
    """Write the checkpoint of `step` under `folder`, remove all others, and return its path. `tensors`: all of torch or all of numpy.

    The checkpoint is written under a temporary name, flushed to disk and renamed: a crash leaves the last complete checkpoint in place."""
    return write_state(folder, step, tensors, json.dumps({"step": step, **record}))


def write_state(folder: Path, step: int, tensors: Mapping[str, Tensor | NDArray[Any]], text: str) -> Path:
    """Write a checkpoint as `save_state` does; `text`: the checkpoint's record, in JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:09d}"
    temporary = folder / f".{final.name}.{uuid.uuid4().hex[:16]}"  # processes of several machines may have one pid
    for left in folder.glob(".step-*"):  # left by writers that were killed or had no room
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()
    _write(tensors, temporary / TENSORS)
    checksums = {TENSORS: file_checksum(temporary / TENSORS), RECORD: checksum(text.encode())}
    (temporary / RECORD).write_text(json.dumps({"record": text, "checksums": checksums}), encoding="utf-8")
    for name in (TENSORS, RECORD):
        flush(temporary / name)
    publish(temporary, final)
    return final


def publish(temporary: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name; then remove all other checkpoints, complete or not."""
    flush(temporary)
    if final.exists():  # until the new checkpoint is in place, the old one is found under another name
        shutil.rmtree(before := final.with_name(f"{final.name}.before"), ignore_errors=True)
        os.replace(final, before)
    os.replace(temporary, final)
    flush(final.parent)
    for path in final.parent.iterdir():
        if path != final and path.name.startswith(("step-", ".step-")):
            shutil.rmtree(path)


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the tensors and the record of the newest undamaged checkpoint under `folder`; None if there is none. Remove newer, damaged
    checkpoints with a warning, so that no run continues from them. Raise OSError if the disk fails."""
    from safetensors.torch import load

    return _newest(folder, load)


def read_each(folder: Path, prefix: str) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """Return meta tensors of the shapes of the tensors whose names begin with `prefix` in the newest checkpoint under `folder`, and an
    iterator over these tensors, each read when it is due. Raise ValueError if the checkpoint is damaged or missing."""
    path = next(iter(newest_first(folder)), folder)
    try:
        text, checksums = read_record(path)
        if any(file_checksum(path / name) != value for name, value in checksums.items() if name != RECORD):
            raise ValueError(f"{path}: a file's checksum is wrong")
        index = json.loads(text).get("index")
        own = {name: tensor for name, tensor in empty(path, index).items() if name.startswith(prefix)}
    except DAMAGE as error:
        raise_if_disk(error)
        raise ValueError(f"{path}: the saved training state is damaged; remove the folder to begin anew") from error
    return own, (item for name, tensor in own.items() for item in read(path, index, whole_boxes({name: tensor})).items())


def load_arrays(folder: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    """Return the newest checkpoint like `load_state`, but with numpy arrays."""
    from safetensors.numpy import load

    return _newest(folder, load)


def _newest(folder: Path, load: Callable[[bytes], Tensors]) -> tuple[Tensors, dict[str, Any]] | None:
    for path in newest_first(folder):
        try:
            text, checksums = read_record(path)
            if TENSORS not in checksums:
                return _of_ranks(path, text, checksums), json.loads(text)
            tensors = (path / TENSORS).read_bytes()
            if checksums[TENSORS] == checksum(tensors):
                return load(tensors), json.loads(text)
        except DAMAGE as error:
            raise_if_disk(error)
        warnings.warn(f"{path}: the saved training state was damaged and is removed; an older state is used if there is one", stacklevel=2)
        shutil.rmtree(path)
    return None


def load_record(folder: Path) -> dict[str, Any] | None:
    """Return only the record of the newest checkpoint; None if it is damaged or there is none. Raise OSError for a disk error."""
    for path in newest_first(folder)[:1]:
        try:
            record: dict[str, Any] = json.loads(read_record(path)[0])
            return record
        except DAMAGE as error:
            raise_if_disk(error)
    return None


def raise_if_disk(error: Exception) -> None:
    """Raise an error that means that the disk fails now: the checkpoint on it may be intact."""
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        raise error


def cached_json(file: Path, make: Callable[[], Any], first: Callable[[str], str] = str) -> Any:
    """Return the JSON value in `file`; compute the value with `make` and write it first if the file is missing or damaged. `first`: returns
    the first rank's text, because a shared folder's listing may be old on another machine."""
    text = "-"
    with suppress(*DAMAGE):
        own, content = file.read_text(encoding="utf-8").split("\n", 1)
        text = content if own == checksum(content.encode()) else text
    if (text := first(text)) != "-":
        return json.loads(text)
    text = json.dumps(make())
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:16]}")  # ranks of several pods may have one pid
    temporary.write_text(f"{checksum(text.encode())}\n{text}", encoding="utf-8")
    os.replace(temporary, file)
    return json.loads(text)


def check_identity(folder: Path | None, record: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise ValueError if a checkpoint's `record` differs from `identity` in any of its keys: the checkpoint belongs to another run."""
    for key, value in json.loads(json.dumps(identity)).items():
        if record.get(key) != value:
            raise ValueError(f"{folder} holds the state of another run: {key} was {record.get(key)!r}, now it is "
                f"{value!r}; remove the folder or restore what changed")  # fmt: skip


def _write(tensors: Mapping[str, Any], file: Path) -> None:
    if all(isinstance(value, np.ndarray) for value in tensors.values()):
        from safetensors.numpy import save_file as save_arrays

        save_arrays(dict(tensors), file)
    else:
        from safetensors.torch import save_file

        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)


def newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), key=lambda path: (path.stem, not path.suffix), reverse=True) if folder.is_dir() else []


def read_record(path: Path) -> tuple[str, dict[str, str]]:
    """Return a checkpoint's record as text, and the checksums of its files; raise an error of `DAMAGE` if the record is damaged."""
    data = json.loads((path / RECORD).read_text(encoding="utf-8"))
    text, checksums = data["record"], data["checksums"]
    files = {TENSORS} if TENSORS in checksums else set(json.loads(text)["index"])
    if set(checksums) != {*files, RECORD} or checksums[RECORD] != checksum(text.encode()):
        raise ValueError(f"{path}: the record's checksum is wrong")
    return text, checksums


def _of_ranks(path: Path, text: str, checksums: dict[str, str]) -> Any:
    """Return whole tensors of a checkpoint that several ranks wrote, one file each; raise ValueError if a file is damaged."""
    if any(file_checksum(path / name) != value for name, value in checksums.items() if name != RECORD):
        raise ValueError(f"{path}: a file's checksum is wrong")
    index = json.loads(text)["index"]
    return read(path, index, whole_boxes(empty(path, index)))


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_checksum(path: Path) -> str:
    """Return the sha256 of a file's content, read in small blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
