"""An executor on a Dask cluster, which is given by address or started on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from concurrent.futures import CancelledError
from typing import Any

from puna.stages.executors.parts import ATTEMPTS, Part, PartExecutor, probe
from puna.stages.executors.worker import Answer, compute
from puna.storage import PunaError

# Set before a local scheduler starts. Parts leave no results in the workers, so Dask need not spill to disk.
LOCAL = {
    "distributed.scheduler.allowed-failures": ATTEMPTS - 1, "distributed.scheduler.work-stealing": False,
    "distributed.worker.memory.target": False, "distributed.worker.memory.spill": False, "distributed.worker.daemon": False,
    "distributed.scheduler.http.routes": ["distributed.http.health"], "distributed.worker.http.routes": ["distributed.http.health"],
}  # fmt: skip
JOIN_SECONDS, GONE_SECONDS = 60, 600  # maximum seconds without a worker: before the first part, and during a part
LOOK_SECONDS = 5.0


class DaskCluster(PartExecutor):
    """The workers of the Dask scheduler at `address` or, if it is empty, `workers` processes on this machine.

    Dask counts a part's restarts if a worker dies while computing it, but not if a result is lost with the worker. So workers report every
    attempt, and the driver gives up on a part after `ATTEMPTS`. The constructor raises PunaError without Dask, or without workers."""

    def __init__(self, address: str, workers: int) -> None:
        super().__init__()
        try:
            import dask
            from distributed import Client, LocalCluster
        except ImportError as error:
            raise PunaError("--executor dask: Dask is not installed; pip install 'puna[dask]'") from error
        self._local: Any = None
        self._workers = workers
        if address:
            target: Any = f"tcp://{probe('dask', address)}"
        else:
            with dask.config.set(LOCAL):
                self._local = target = LocalCluster(
                    n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50, host="127.0.0.1",
                    security=True,  # otherwise other users of this machine could run code in the workers
                )  # fmt: skip
        self._where = address or "on this machine"
        self.below = not address
        self._gone = f"the Dask scheduler {self._where} is gone or has dropped the work; finished work is kept: run again"
        try:
            self._client: Any = Client(target, timeout=20, set_as_default=False)
            self._client.wait_for_workers(1, timeout=JOIN_SECONDS)
        except (OSError, TimeoutError) as error:
            raise PunaError(f"--executor dask: the cluster {self._where} cannot be used ({error}); check that it has workers") from error
        self._topic = f"puna-{uuid.uuid4().hex}"
        self._pending: dict[str, tuple[Part, Any, int]] = {}
        self._pending_lock = threading.Lock()
        self._client.subscribe_topic(self._topic, self._on_attempt)
        self._looked = 0.0
        self._threads = 1
        self._devices = False
        self._look()

    @property
    def slots(self) -> int:
        """Return how many parts may be at the workers: two per thread, so that a worker's next part arrives before its current one ends."""
        return 2 * self._threads

    def has_device(self) -> bool:
        """True if a worker was started with `--resources GPU=1`."""
        self._look()
        return self._devices

    def _submit(self, part: Part) -> Any:
        self._look()
        return super()._submit(part)

    def _look(self) -> None:
        """Update thread count and GPU flag, at most once in `LOOK_SECONDS`. Never call this in the client's event loop: it blocks."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        workers = self._client.scheduler_info()["workers"].values()
        self._threads = max(1, sum(worker["nthreads"] for worker in workers))
        self._devices = any("GPU" in worker.get("resources", {}) for worker in workers)

    def _begin(self, part: Part) -> None:
        if self._client.status != "running":  # a part that is submitted now would never end
            raise PunaError(self._gone)
        key = f"{self._topic}-{uuid.uuid4().hex}"
        future = self._client.submit(
            _compute, self._topic, key, part.payload, key=key, pure=False, retries=0, resources={"GPU": 1} if part.device else None
        )
        with self._pending_lock:
            self._pending[key] = (part, future, 0)
        self._client.loop.add_callback(self._relay, part, future, key)

    async def _relay(self, part: Part, future: Any, key: str) -> None:
        from distributed.scheduler import KilledWorker

        try:
            answer = await self._answer(future)
        except KilledWorker as error:
            part.attempts = max(ATTEMPTS, error.allowed_failures + 1)  # attempts that Dask made
            self._retry(part, str(error).partition("Inspecting")[0].strip())
        except (asyncio.CancelledError, CancelledError):
            with self._pending_lock:
                given_up = key in self._pending and self._pending[key][2] > ATTEMPTS
            if given_up:
                part.attempts = ATTEMPTS
                self._retry(part, "its worker ended each time before the result arrived")
            else:
                self._fail(part, PunaError(self._gone))
        except PunaError as error:
            self._fail(part, error)
        except Exception as error:  # noqa: BLE001 - any error must reach the caller that waits for this part
            self._fail(part, PunaError(f"Dask could not compute a part ({type(error).__name__}: {error})"))
        else:
            self._deliver(part, answer)
        finally:
            with self._pending_lock:
                self._pending.pop(key, None)
            future.release()

    async def _answer(self, future: Any) -> Answer:
        """Return a part's answer. Raise PunaError if the cluster has had no worker for `GONE_SECONDS`. Replace the lost workers of a local
        cluster, since Dask forgets workers that are away longer than its `lost-worker-timeout`."""
        result, seen = asyncio.ensure_future(future.result()), time.monotonic()
        while not (await asyncio.wait({result}, timeout=LOOK_SECONDS))[0]:
            if self._local is not None:
                self._local.scale(self._workers)
            if await self._client.nthreads():
                seen = time.monotonic()
            elif time.monotonic() - seen > GONE_SECONDS:
                result.cancel()
                raise PunaError(f"the Dask cluster {self._where} had no worker for {GONE_SECONDS} s; finished work is kept: run again")
        answer: Answer = result.result()
        return answer

    async def _on_attempt(self, event: tuple[float, Any]) -> None:
        key = event[1]
        with self._pending_lock:
            if key not in self._pending:
                return
            part, future, count = self._pending[key]
            self._pending[key] = (part, future, count + 1)
        if count + 1 > ATTEMPTS:
            await future.cancel()

    def _end(self) -> None:
        """Cancel unfinished parts. Calls that have started still run to their end, but their results are ignored."""
        with self._pending_lock:
            for _, future, _ in self._pending.values():
                self._client.loop.add_callback(future.cancel)

    def _close(self) -> None:
        with contextlib.suppress(Exception):  # the scheduler may be gone
            self._client.close(timeout=5)
        if self._local is not None:
            self._local.close(timeout=20)


def _compute(topic: str, key: str, payload: bytes) -> Answer:
    from distributed import get_worker

    get_worker().log_event(topic, key)
    return compute(payload)
