"""Processes that run untrusted programs within limits of time and memory: chat templates; patterns of tokenizers and adapters.

A process is started once and reused. Requests are pickled: they come from this process. An untrusted program may have written an answer, so
answers are JSON, with binary data under the key `BYTES`. A user's own programs run in the same way, with the user's environment."""

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

SECONDS = 1.0  # maximum CPU seconds of one request
PATIENCE = 30.0  # maximum seconds to wait for an answer
CLOCK = 10.0  # wall-clock seconds per CPU second for a user's program, which may wait or share a busy machine
START_SECONDS = 120.0  # maximum seconds for a process to start
GRACE_SECONDS = 5.0  # seconds after its wall-clock limit at which an orphaned user program ends itself
MEMORY = 256 << 20  # bytes of memory beyond those that the process has at its start
CHARACTERS = 1 << 25  # maximum bytes of an answer
BYTES = "bytes"  # name of an answer's value that is bytes
PROGRAMS = 64  # maximum programs that a process remembers


class LimitError(RuntimeError):
    """An error: a request exceeded a limit of time, memory or size, or its process ended; the message says which."""


class Process:
    """A process that answers requests one at a time. It starts at the first request, and again if it has ended, if `sys.path` or
    `arguments` have changed, or if it remembers `PROGRAMS` programs. `module`: the process runs this module's function `serve`.
    `own`: the process runs the user's own code, with this process's environment and `CLOCK` seconds of wall time per CPU second."""

    def __init__(self, module: str, own: bool = False, arguments: Callable[[], list[str]] = list) -> None:
        self._module, self._own, self._arguments = module, own, arguments
        self._begin()
        _processes.add(self)

    def _begin(self) -> None:
        """Forget the running process. A forked child needs a process of its own: parent and child would read each other's answers."""
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._close: Callable[[], object] = lambda: None
        self._command: list[str] = []
        self.known: set[bytes] = set()  # keys that the running process remembers

    def ask(self, request: Any, key: bytes, more: Any, seconds: float = SECONDS) -> dict[str, Any]:
        """Return the answer to a request of at most `seconds` CPU seconds. `more`: data of `key`, sent until the process remembers `key`.
        Raise LimitError if the request takes too much time or memory, the answer is too long, or the process ends."""
        patience = seconds * CLOCK if self._own else PATIENCE
        with self._lock:
            popen = self._running()
            whole = pickle.dumps((seconds, key, None if key in self.known else more, request))
            assert popen.stdin is not None
            try:
                _write(popen.stdin, struct.pack("<Q", len(whole)) + whole)
                answer = _answer(popen, patience)
            except BaseException as error:
                late = self._own and isinstance(error, TimeoutError)
                # A process that has closed its pipe is exiting, which may take a while on a busy machine.
                status = self.end(0.0 if late else 10.0 if isinstance(error, EOFError | BrokenPipeError) else 0.5)
                if isinstance(error, EOFError | OSError):
                    own = f"no answer within {patience:g} seconds" if late else "its process ended"
                    raise LimitError(_reason(status, seconds, own if self._own else "")) from error
                raise
            if (limit := answer.get("limit")) is not None:
                raise LimitError(limit)
            if answer.pop("known", False):
                self.known.add(key)
            return answer

    def _running(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(path for path in sys.path if path)
        command = [path, f"from {self._module} import serve; serve()", *self._arguments()]
        if self._popen is None or self._popen.poll() is not None or len(self.known) >= PROGRAMS or command != self._command:
            self.end()
            self._command = command
            # An untrusted program gets no other variable of this process's environment.
            environment = {**(os.environ if self._own else {}), "PYTHONPATH": path}
            self._popen = subprocess.Popen(
                [sys.executable, "-c", *command[1:]], bufsize=0, env=environment, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if self._own else None,
            )  # fmt: skip
            self._close = weakref.finalize(self, _kill, self._popen)
            try:
                _answer(self._popen, START_SECONDS)
            except (EOFError, OSError) as error:
                raise OSError(f"the process of {self._module} did not start ({self.end()}): {' '.join(command[2:])}") from error
        return self._popen

    def end(self, patience: float = 0.5) -> int:
        """Wait `patience` seconds for the process to end by itself, then kill its process group; return its exit status (0 if none ran)."""
        popen, self._popen = self._popen, None
        self.known.clear()
        if popen is not None:
            with suppress(subprocess.TimeoutExpired):
                popen.wait(patience)  # a process that is ending keeps its own status
        self._close()
        return 0 if popen is None else int(popen.returncode)


_processes: weakref.WeakSet[Process] = weakref.WeakSet()


os.register_at_fork(after_in_child=lambda: list(map(Process._begin, _processes)))


def _kill(popen: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            pipe.close()


def _reason(status: int, seconds: float, own: str) -> str:
    if status in (-signal.SIGVTALRM, -signal.SIGPROF):
        return f"it takes more than {seconds:.3g} s of CPU time"
    return own or f"its process ended with status {status}: it may have taken too much memory, or more than {PATIENCE:g} s"


def _write(pipe: Any, whole: bytes) -> None:
    left = memoryview(whole)
    while left:
        left = left[pipe.write(left) :]


def _answer(popen: subprocess.Popen[bytes], patience: float) -> dict[str, Any]:
    """Return an answer. Raise EOFError if the process has ended, TimeoutError after `patience` seconds, LimitError if it is too long."""
    until = time.monotonic() + patience
    (size,) = struct.unpack("<Q", _read(popen.stdout, 8, until))
    answer: dict[str, Any] = json.loads(_read(popen.stdout, size, until))
    if isinstance(answer.get(BYTES), int):
        answer[BYTES] = _read(popen.stdout, answer[BYTES], until)
    return answer


def _read(pipe: Any, size: int, until: float) -> bytes:
    if size > CHARACTERS:
        raise LimitError(f"it writes more than {CHARACTERS >> 20} MB")
    parts, left = list[bytes](), size
    while left:
        if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(pipe.fileno(), min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def serve(answer: Callable[[bytes, Any, Any], dict[str, Any]], memory: int = MEMORY, own: bool = False) -> None:
    """Answer the requests on standard input with `answer(key, data of the key, request)` until the input ends, each within its limits.
    `memory`: bytes beyond the size at the start. `own`: see `Process`; `answer` must then limit the memory itself."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    timer = signal.ITIMER_PROF if own else signal.ITIMER_VIRTUAL
    if not own:
        bound_memory(memory)

    def say(value: dict[str, Any]) -> None:
        more = value.get(BYTES, b"")
        text = json.dumps({**value, BYTES: len(more)} if more else value).encode()
        answers.write(struct.pack("<Q", len(text)) + text)
        answers.write(more)
        answers.flush()

    say({})
    while head := requests.read(8):
        seconds, *request = _whole(requests, head)
        signal.setitimer(timer, seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds * CLOCK + GRACE_SECONDS if own else 0)
        try:
            value = answer(*request)
        except MemoryError:
            value = {"limit": f"it takes more than {memory >> 20} MB"}
        signal.setitimer(timer, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(value)


def _whole(requests: BinaryIO, head: bytes) -> Any:
    return pickle.loads(requests.read(struct.unpack("<Q", head)[0]))  # noqa: S301  from the process that started this one


def bound_memory(memory: int) -> None:
    """Limit the memory of this process to its current size plus `memory` bytes, on Linux."""
    status = Path("/proc/self/statm")
    if status.is_file():
        most = int(status.read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
