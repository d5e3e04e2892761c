"""Processes in which programs of strangers run within bounds of time and memory: chat templates, patterns of tokenizers and adapters.

A process is started once and kept. Requests are pickled, since they come from this process; answers are JSON, since a stranger's
program may have written them.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

SECONDS = 1.0  # seconds of computing that one request may take
PATIENCE = 30.0  # seconds to wait for an answer, whatever else the machine does
MEMORY = 256 << 20  # bytes of memory beyond those that the process has at its start
CHARACTERS = 1 << 25  # most bytes of an answer
PROGRAMS = 64  # most programs that a process remembers


class LimitError(RuntimeError):
    """A request that ran out of time or memory; the text says which."""


class Process:
    """A process that answers requests one at a time. It starts with the first request, and again after one that ended it. `module`: its
    function `serve` is what the process runs."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._begin()
        _processes.add(self)

    def _begin(self) -> None:
        """Forget the process. A forked child starts its own: two processes would read each other's answers."""
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._close: Callable[[], object] = lambda: None
        self.known: set[bytes] = set()  # what the running process remembers

    def ask(self, request: Any, key: bytes, more: Any, seconds: float = SECONDS) -> dict[str, Any]:
        """Return the answer to a request of at most `seconds` of computing. `more` is sent along if the process does not know `key` yet.
        Raise LimitError if the request takes too much time or memory."""
        with self._lock:
            popen = self._running()
            whole = pickle.dumps((seconds, key, None if key in self.known else more, request))
            assert popen.stdin is not None and popen.stdout is not None
            try:
                _write(popen.stdin, struct.pack("<Q", len(whole)) + whole)
                (size,) = struct.unpack("<Q", _read(popen.stdout, 8))
                if size > CHARACTERS:
                    raise LimitError(f"it writes more than {CHARACTERS >> 20} MB")
                answer: dict[str, Any] = json.loads(_read(popen.stdout, size))
            except BaseException as error:
                status = self._end()
                if isinstance(error, EOFError | OSError):
                    raise LimitError(_reason(status, seconds)) from error
                raise
            if (limit := answer.get("limit")) is not None:
                raise LimitError(limit)
            if answer.pop("known", False):
                self.known.add(key)
            return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._popen is None or self._popen.poll() is not None or len(self.known) >= PROGRAMS:
            self._end()
            alone = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}  # nothing else of this process's environment
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
            program = f"from {self._module} import serve; serve()"
            self._popen = subprocess.Popen([sys.executable, "-c", program], env=alone, **pipes)
            self._close = weakref.finalize(self, _kill, self._popen)
        return self._popen

    def _end(self) -> int:
        popen, self._popen = self._popen, None
        self.known.clear()
        if popen is not None:
            with suppress(subprocess.TimeoutExpired):
                popen.wait(0.5)  # one that is ending keeps its own status
        self._close()
        return 0 if popen is None else int(popen.returncode)


_processes: weakref.WeakSet[Process] = weakref.WeakSet()


def _begin_anew() -> None:
    for process in _processes:
        process._begin()


os.register_at_fork(after_in_child=_begin_anew)


def _kill(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            pipe.close()


def _reason(status: int, seconds: float) -> str:
    if status == -signal.SIGVTALRM:
        return f"it takes more than {seconds:.3g} s of computing"
    return f"its process ended with status {status}, as one does that takes too much memory, or more than {PATIENCE:g} s"


def _write(pipe: Any, whole: bytes) -> None:
    left = memoryview(whole)
    while left:
        left = left[pipe.write(left) :]


def _read(pipe: Any, size: int) -> bytes:
    """Read so many bytes. Raise EOFError if the process has ended or does not answer in time."""
    parts, left, until = list[bytes](), size, time.monotonic() + PATIENCE
    while left:
        if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            raise EOFError
        part = os.read(pipe.fileno(), min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def serve(answer: Callable[[bytes, Any, Any], dict[str, Any]], memory: int = MEMORY) -> None:
    """Answer the requests on standard input until it ends, each within the bounds. `memory`: bytes beyond those at the start."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    _bound_memory(memory)
    while head := requests.read(8):
        seconds, *request = _whole(requests, head)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            text = json.dumps(answer(*request)).encode()
        except MemoryError:
            text = json.dumps({"limit": f"it takes more than {memory >> 20} MB"}).encode()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        answers.write(struct.pack("<Q", len(text)) + text)
        answers.flush()


def _whole(requests: BinaryIO, head: bytes) -> Any:
    return pickle.loads(requests.read(struct.unpack("<Q", head)[0]))  # noqa: S301  from the process that started this one


def _bound_memory(memory: int) -> None:
    """Limit the memory of this process to its current size plus `memory` bytes, on Linux."""
    status = Path("/proc/self/statm")
    if status.is_file():
        most = int(status.read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
