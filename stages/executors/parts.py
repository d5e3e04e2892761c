"""The driver's side of all executors: unfinished parts, their attempts, and results in order."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from typing import Any

from puna.models import progress
from puna.stages.executors.worker import Answer, pack
from puna.storage import PunaError

ATTEMPTS = 3  # maximum number of starts of a part whose workers keep dying
BYTES_UNDER_WAY = 1 << 30  # maximum bytes of arguments and results that wait in the driver
AHEAD = 64


def probe(engine: str, address: str) -> str:
    """Return the address if a connection succeeds, else raise PunaError within seconds (Dask and Ray would wait for minutes)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PunaError(f"--executor {engine}://{address}: not a valid address; write {engine}://HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise PunaError(f"--executor {engine}://{address}: no connection ({error}); start the cluster, or give another address") from error
    return address


class Part:
    """An unfinished call: its packed function and arguments, the number of attempts, and the caller's future."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: bool) -> None:
        self.name = getattr(function, "__qualname__", str(function))
        self.payload = pack(function, args, kwargs)
        self.device = device
        self.attempts = 0
        self.future = PartFuture()
        self.future.bytes = len(self.payload)


class PartFuture(Future[Any]):
    """A future with the size in bytes of its call's arguments or, once it is done, of its result."""

    bytes = 0


class PartExecutor(Executor):
    """An executor that survives dead workers: it restarts a lost part, up to `ATTEMPTS` starts in total.

    A subclass defines `slots` and `_begin`, which sends a part and calls `_deliver`, `_retry` or `_fail` once, from any thread.
    `cpu_seconds` is the sum over all parts, `resident_bytes` the memory of the largest worker. `below`: the workers are child processes of
    this one, not members of a cluster."""

    below = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._waiting: deque[Part] = deque()
        self._running = 0
        self._closed = False
        self.cpu_seconds = 0.0
        self.resident_bytes = 0

    @property
    def slots(self) -> int:
        """Return the number of parts that may be at the workers at the same time."""
        raise NotImplementedError

    def has_device(self) -> bool:
        """True if a worker has an accelerator."""
        return False

    def _begin(self, part: Part) -> None:
        raise NotImplementedError

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> PartFuture:
        return self._submit(Part(function, args, kwargs, device=False))

    def submit_to_device(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> PartFuture:
        """Submit a call to a worker that has an accelerator."""
        return self._submit(Part(function, args, kwargs, device=True))

    def _submit(self, part: Part) -> PartFuture:
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor has been shut down and accepts no more work")
            self._waiting.append(part)
        self._advance()
        return part.future

    def _advance(self) -> None:
        while True:
            with self._lock:
                if not self._waiting and not self._running:
                    self._settled.notify_all()
                if not self._waiting or self._running >= self.slots:
                    return
                part = self._waiting.popleft()
                if part.attempts == 0 and not part.future.set_running_or_notify_cancel():
                    continue
                part.attempts += 1
                self._running += 1
            try:
                self._begin(part)
            except Exception as error:  # noqa: BLE001 - the error goes to the part's caller
                with self._lock:
                    self._running -= 1
                part.future.set_exception(error)

    def _deliver(self, part: Part, answer: Answer) -> None:
        with self._lock:
            self._running -= 1
            self.cpu_seconds += answer.cpu_seconds
            self.resident_bytes = max(self.resident_bytes, answer.resident_bytes)
        part.future.bytes = len(answer.result)
        part.payload = b""
        try:
            part.future.set_result(answer.value())
        except Exception as error:  # noqa: BLE001 - the part's own error
            part.future.set_exception(error)
        self._advance()

    def _retry(self, part: Part, reason: str) -> None:
        """Restart a part whose worker ended. After `ATTEMPTS`, or if the executor is closed, fail it."""
        if part.attempts >= ATTEMPTS or self._closed:
            times = f"{part.attempts} times, the maximum number of attempts" if part.attempts > 1 else "once"
            remedy = "use fewer workers, or a machine with more memory; finished work is kept"
            message = f"a worker process ended in the middle of its work ({part.name}; {times}; {reason}). Most likely memory ran out"
            return self._fail(part, PunaError(f"{message}: {remedy}"))
        with self._lock:
            self._running -= 1
            self._waiting.appendleft(part)
        self._advance()

    def _fail(self, part: Part, error: Exception) -> None:
        with self._lock:
            self._running -= 1
        part.future.set_exception(error)
        self._advance()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work. `wait`: wait for accepted work; else it may fail. `cancel_futures`: cancel parts that have not started."""
        self._refuse(cancel_futures)
        if wait:
            self._wait(None)
        self._close()

    def stop(self) -> None:
        """Accept no more work, and stop unfinished parts instead of waiting for them."""
        self._refuse(drop=True)
        self._end()
        while not self._wait(0.1):  # a worker that was still starting may begin its part now
            self._end()
        self._close()

    def _refuse(self, drop: bool) -> None:
        with self._lock:
            self._closed = True
            dropped = list(self._waiting) if drop else []
            self._waiting = deque() if drop else self._waiting
        for part in dropped:
            if not part.future.cancel():  # the part was waiting for a restart
                part.future.set_exception(PunaError(f"{part.name}: stopped before it was started again"))

    def _wait(self, seconds: float | None) -> bool:
        with self._settled:
            return self._settled.wait_for(lambda: not self._running and not self._waiting, seconds)

    def _end(self) -> None:
        """Stop unfinished parts. A cluster's worker may finish its part, but the result is ignored."""

    def _close(self) -> None:
        raise NotImplementedError


def _result(future: Future[Any]) -> Any:
    """Return a call's result. The wait counts as progress, since executors notice processes that end, and verifiers have time limits."""
    while not wait([future], progress.BEAT).done:
        progress.advance()
    return future.result()


def map_in_order(
    executor: Executor | None, function: Callable[..., Any], items: Iterable[Any], arguments: tuple[Any, ...], ahead: int = AHEAD
) -> Iterator[Any]:
    """Yield `function(item, *arguments)` in the order of `items`. Without an executor, compute each value when it is requested. At most
    `ahead` calls (or two per slot, if more) and about `BYTES_UNDER_WAY` bytes are pending. If the caller stops early, cancel the rest."""
    if executor is None:
        for item in items:
            yield function(item, *arguments)
        return
    waiting: deque[Future[Any]] = deque()
    try:
        for item in items:
            most = max(ahead, 2 * executor.slots) if isinstance(executor, PartExecutor) else ahead
            while waiting and (len(waiting) >= most or sum(getattr(f, "bytes", 0) for f in waiting) > BYTES_UNDER_WAY):
                yield _result(waiting.popleft())
            waiting.append(executor.submit(function, item, *arguments))
        while waiting:
            yield _result(waiting.popleft())
    finally:
        for future in waiting:
            future.cancel()
