"""Signals that end a training: its step in progress ends, its state is written, and then the signal acts as it would have at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
announce: Callable[[], object] | None = None
"""Called when a signal has to wait for a step. It runs in the signal's handler, in the middle of anything."""


class Stop:
    """Ctrl-C and SIGTERM during a training: the first one of each waits for `act`, a second one acts at once.

    Only a process's main thread is given signals. In another thread nothing waits.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._asked: list[int] = []

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            # None: set by other code than Python's, which cannot be put back.
            self._before = {number: one for number in SIGNALS if (one := signal.getsignal(number)) not in (signal.SIG_IGN, None)}
            for number in self._before:
                signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._put_back()
        if kind is None:
            self.act()

    @property
    def asked(self) -> bool:
        return bool(self._asked)

    def act(self) -> None:
        """Raise the waiting signal, if any: as KeyboardInterrupt, as an error of Prefect's, or by ending the process."""
        if self._asked:
            self._put_back()
            signal.raise_signal(self._asked.pop(0))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._asked:
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
