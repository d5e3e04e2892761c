"""Child processes that answer the pages' questions (SQL statements, plans, form checks) within limits of time, memory and length.

A child reads each question as a line of JSON and writes the answer as a line of JSON. It ends after `IDLE_SECONDS` without a question."""

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
import weakref
from collections.abc import Mapping
from typing import Any

from puna.flows.engine.defaults import ADDRESSES, ALLOWED, REFUSED
from puna.flows.html.markup import Html
from puna.storage import PunaError, Store

SECONDS = {"sql": 60.0, "plan": 60.0, "check": 30.0}  # kind of question → maximum seconds for an answer
MEMORY_BYTES = min(2 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
"""Maximum bytes of memory that a child allocates after its start; all working children together use at most half of the RAM."""
ANSWER_BYTES = 16 << 20  # maximum bytes of an answer
START_SECONDS = 120.0  # maximum seconds for a child to start
AT_ONCE = 2  # maximum number of children that work on SQL at once; the same limit holds for plans and checks together
IDLE_SECONDS = 120.0  # seconds without a question after which a child ends


class Late(PunaError):
    """An error for a question that was not answered in time, or whose answer is too long."""


_children: weakref.WeakSet[Child] = weakref.WeakSet()


def end_children() -> None:
    for child in list(_children):
        child.end()


class Asker:
    """A client that sends questions about a store to child processes. `urls`: plans may read inputs that are not local paths."""

    def __init__(self, store: Store, *, urls: bool) -> None:
        self._store, self._urls = store, urls
        self._free = {"sql": threading.BoundedSemaphore(AT_ONCE), "plan": threading.BoundedSemaphore(AT_ONCE)}
        self._idle: dict[str, list[Child]] = {"sql": [], "plan": []}

    def ask(self, question: str, **fields: Any) -> Html:
        """Return the answer as HTML. Raise PunaError if the question is refused or the child has died, `Late` if the answer is late or too
        long, RuntimeError if the child failed."""
        group = "sql" if question == "sql" else "plan"
        if not self._free[group].acquire(timeout=SECONDS[question]):
            raise Late("the server is busy with other questions; try again later")
        try:
            child = self._child(group)
            answer = child.answer({"question": question, "store": self._store.uri, **fields}, SECONDS[question])
            self._idle[group].append(child)
        finally:
            self._free[group].release()
        if "refused" in answer:
            raise PunaError(str(answer["refused"]))
        if "broken" in answer:
            raise RuntimeError(answer["broken"])
        return Html(answer["html"])

    def _child(self, group: str) -> Child:
        with contextlib.suppress(IndexError):
            while True:
                child = self._idle[group].pop()
                if child.waits():
                    return child
                child.end()
        return Child({**os.environ, ADDRESSES: ALLOWED if self._urls else REFUSED})


class Child:
    def __init__(self, environment: Mapping[str, str]) -> None:
        words = [sys.executable, "-m", "puna.flows.web.bounded_worker"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True)
        _children.add(self)
        self._line(time.monotonic() + START_SECONDS, "the process that answers questions did not start")

    def waits(self) -> bool:
        """True if the child's process still runs, so that the child can take a question."""
        return self._process.poll() is None

    def answer(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the child's answer. If it is late or too long, kill the child and raise `Late`. Raise PunaError if the child has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**question, "seconds": seconds}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self.end()
            raise PunaError("the process that answers questions has ended; ask again") from error
        late = f"stopped after {seconds:.0f} s; the commands `puna sql` and `puna plan` have no time limit"
        reply: dict[str, Any] = json.loads(self._line(time.monotonic() + seconds, late))
        if reply.get("last"):
            self.end()
        return reply

    def _line(self, deadline: float, late: str) -> bytes:
        assert self._process.stdout is not None
        pipe, line = self._process.stdout.fileno(), bytearray()
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(pipe, 1 << 16) if ready else b""
            line += piece
            if not ready or len(line) > ANSWER_BYTES:
                self.end()
                raise Late(late if not ready else f"stopped: the answer has more than {ANSWER_BYTES >> 20} MB")
            if not piece:
                self.end()
                raise PunaError(f"stopped: the process ended without answering; it may need more than {MEMORY_BYTES >> 20:,} MB of memory")
        return bytes(line)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
