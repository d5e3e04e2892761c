"""A process that does jobs of untrusted code one at a time, killed with its children when a job takes too long."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from puna.stages import plugins

START_SECONDS = 120.0
"""How long the process may take to load what it needs."""
GRACE_SECONDS = 5.0
ANSWER_BYTES = 1 << 20

Work = Callable[[dict[str, Any]], dict[str, Any]]


class Apart:
    """A process that runs `work`, JSON in, JSON out. It starts with the first job, and again after a failure or when modules were added."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: tuple[list[str], dict[str, str]] = [], {}
        self._lock = threading.Lock()

    def ask(self, job: dict[str, Any], seconds: float, memory_mb: int | None = None) -> dict[str, Any] | str:
        """Return a job's result, or a sentence on its failure. `memory_mb`: memory that the process may take after its start (Linux)."""
        with self._lock:
            if self._process is None or self._loaded != (sys.path, plugins.added()):
                self.close()
                self._start()
            answer = self._exchange({"job": job, "seconds": seconds, "memory_mb": memory_mb}, seconds)
            if isinstance(answer, str):
                self.close()
        return answer

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError), process:  # closes its pipes and waits for it
            pass

    def _start(self) -> None:
        self._loaded = list(sys.path), plugins.added()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        program, modules = f"from {serve.__module__} import serve; serve()", [file or name for name, file in plugins.added().items()]
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, self._work.__module__, self._work.__name__, *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
        answer = self._read(START_SECONDS)
        if isinstance(answer, str):
            self.close()
            raise RuntimeError(f"the process for {self._work.__module__} did not start: {answer}")

    def _exchange(self, job: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return "its process ended"
        return self._read(seconds)

    def _read(self, seconds: float) -> dict[str, Any] | str:
        assert self._process is not None and self._process.stdout is not None
        end, data = time.monotonic() + seconds, b""
        pipe = self._process.stdout.fileno()
        while not data.endswith(b"\n"):
            seconds_left = end - time.monotonic()
            if seconds_left <= 0 or not select.select([pipe], [], [], seconds_left)[0]:
                return f"no answer within {seconds:g} seconds"
            piece = os.read(pipe, 1 << 16)
            if not piece:
                return "its process ended"
            data += piece
            if len(data) > ANSWER_BYTES:
                return "its process wrote too much"
        answer: dict[str, Any] = json.loads(data)
        return answer


def serve() -> None:
    """Read jobs as lines and write answers as lines, in the process itself; discard what the work prints."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def say(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    module, name, *modules = sys.argv[1:]
    for added in modules:
        plugins.add(added)
    work: Work = getattr(importlib.import_module(module), name)
    say({"ready": True})
    limited = False
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if request["memory_mb"] is not None and not limited:
            _limit(request["memory_mb"])
            limited = True
        # The parent ends this process in time; should it be gone, the alarm does, whatever the work is busy with.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + GRACE_SECONDS)
        answer = work(request["job"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(answer)


def _limit(memory_mb: int) -> None:
    """Limit this process's memory beyond its present size; only Linux reports and enforces it."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (memory_mb << 20),) * 2)
