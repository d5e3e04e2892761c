"""A process that scores answers one at a time, and is ended with all it started when an answer takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from puna.stages.contract import plugins
from puna.stages.verifiers.base import Item, Question, Score, attempt, checked, to_json
from puna.stages.verifiers.tools import Tools, chunks

START_SECONDS = 120.0
"""How long the process may take to load what it needs."""
GRACE_SECONDS = 5.0
ANSWER_BYTES = 1 << 20
CHUNK = 64
"""Answers that a worker is given at once."""


class Child:
    """The process; it is started with the first answer, and again after one that did not come to its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def score(self, item: Item, seconds: float) -> Score:
        """The score of one answer; None where that takes longer than `seconds`, or ends the process."""
        job = {"verifier": to_json(item.verifier), "question": item.question._asdict(), "answer": item.answer, "seconds": seconds}
        with self._lock:
            if self._process is None:
                self._process = self._start()
            said = self._exchange(job, seconds)
            if isinstance(said, str):
                self.close()
                return Score(None, f"{item.verifier.name}: {said}")
        return Score(said["value"], said["detail"])

    def close(self) -> None:
        """End the process and what it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        program, modules = f"from {serve.__module__} import serve; serve()", [file or name for name, file in plugins.added().items()]
        process = subprocess.Popen(
            [sys.executable, "-c", program, *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
        self._process = process
        said = self._read(START_SECONDS)
        if isinstance(said, str):
            self.close()
            raise RuntimeError(f"the process that scores answers did not start: {said}")
        return process

    def _exchange(self, job: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        """What the process says of a job, or why it says nothing."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return "its process ended"
        return self._read(seconds)

    def _read(self, seconds: float) -> dict[str, Any] | str:
        assert self._process is not None and self._process.stdout is not None
        end, found = time.monotonic() + seconds, b""
        pipe = self._process.stdout.fileno()
        while not found.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return f"no score within {seconds:g} seconds"
            piece = os.read(pipe, 1 << 16)
            if not piece:
                return "its process ended"
            found += piece
            if len(found) > ANSWER_BYTES:
                return "its process wrote too much"
        answer: dict[str, Any] = json.loads(found)
        return answer


@lru_cache(maxsize=1)
def child() -> Child:
    """The one of this process; it ends with its parent, whose end closes its pipe."""
    return Child()


def in_children(items: Sequence[Item], tools: Tools) -> list[Score]:
    """Scores by `Verifier.score`, in processes of their own that are ended after `seconds` for an answer."""
    jobs = [{"verifier": to_json(i.verifier), "question": tuple(i.question), "answer": i.answer} for i in items]
    found = tools.run.map(score_chunk, chunks(jobs, CHUNK), tools.config.seconds)
    made = [Score(*one) for chunk in found for one in chunk]
    return [checked(score, item.verifier.name) for score, item in zip(made, items, strict=True)]


def score_chunk(chunk: list[dict[str, Any]], seconds: float) -> list[tuple[float | None, str]]:
    """In a worker: (value, detail) of each job, in order."""
    from puna.stages.verifiers.registry import from_json

    found = []
    for job in chunk:
        item = Item(from_json(job["verifier"]), Question(*job["question"]), job["answer"])
        made = child().score(item, seconds)
        found.append((made.value, made.detail))
    return found


def serve() -> None:
    """In the process: read jobs as lines, write scores as lines. What a verifier prints goes nowhere."""
    from puna.stages.verifiers.registry import from_text

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def say(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    for module in sys.argv[1:]:
        plugins.add(module)
    say({"ready": True})
    for line in sys.stdin.buffer:
        job = json.loads(line)
        # The parent ends this process in time; should it be gone, the alarm does, whatever the verifier is busy with.
        signal.setitimer(signal.ITIMER_REAL, job["seconds"] + GRACE_SECONDS)
        item = Item(from_text(json.dumps(job["verifier"])), Question(**job["question"]), job["answer"])
        made = attempt(item)
        signal.setitimer(signal.ITIMER_REAL, 0)
        say({"value": made.value, "detail": made.detail})
