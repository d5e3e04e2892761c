"""An executor on a Ray cluster, which is given by address or started on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from concurrent.futures import Future
from functools import partial
from typing import Any

from puna.stages.executors.parts import Part, PartExecutor, probe
from puna.stages.executors.worker import Answer, compute
from puna.storage import PunaError

OBJECT_STORE_BYTES = 80 << 20


class RayCluster(PartExecutor):
    """The workers of the Ray cluster whose client port is at `address` or, if it is empty, `workers` processes on this machine.
    The constructor raises PunaError if Ray is not installed or does not start."""

    below = False

    def __init__(self, address: str, workers: int) -> None:
        super().__init__()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as error:
            raise PunaError("--executor ray: Ray is not installed; pip install 'puna[ray]'") from error
        self._ray: Any = ray
        environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
        self._folder = ""
        if address:
            ray.init(f"ray://{probe('ray', address)}", log_to_driver=False)
        else:
            self._folder = tempfile.mkdtemp(prefix="ray-")  # it contains sockets, so its path must be short
            try:
                ray.init(
                    num_cpus=workers, include_dashboard=False, log_to_driver=False, object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=self._folder, runtime_env=environment,
                )  # fmt: skip
            except Exception as error:
                ray.shutdown()
                # Ray's own limit of 15 seconds for starting its agents cannot be configured.
                raise PunaError(
                    f"--executor ray: Ray did not start on this machine ({str(error).strip()}); its logs are in {self._folder}. "
                    "Most likely the machine is too busy: try again when it is not, or use --executor processes"
                ) from error
        self._resources: dict[str, float] = ray.cluster_resources()
        self._task = ray.remote(compute)
        self._pending: dict[Part, Any] = {}

    @property
    def slots(self) -> int:
        """Return how many parts may be at the workers: two per core, so that a worker's next part arrives before its current one ends."""
        return max(1, 2 * int(self._resources.get("CPU", 1)))

    def has_device(self) -> bool:
        return self._resources.get("GPU", 0) >= 1

    def _begin(self, part: Part) -> None:
        # Attempts are counted here, not by Ray.
        task = self._task.options(max_retries=0, num_cpus=1, num_gpus=1 if part.device else 0)
        self._pending[part] = reference = task.remote(part.payload)
        reference.future().add_done_callback(partial(self._complete, part))

    def _complete(self, part: Part, future: Future[Answer]) -> None:
        from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, WorkerCrashedError

        self._pending.pop(part, None)
        try:
            answer = future.result()
        except (WorkerCrashedError, NodeDiedError, ObjectLostError, OutOfMemoryError) as error:
            self._retry(part, str(error).strip().partition("\n")[0])
        except Exception as error:  # noqa: BLE001 - any error must reach the caller that waits for this part
            self._fail(part, PunaError(f"Ray could not compute a part ({type(error).__name__}: {str(error).strip()})"))
        else:
            self._deliver(part, answer)

    def _end(self) -> None:
        for reference in list(self._pending.values()):
            self._ray.cancel(reference, force=True)

    def _close(self) -> None:
        self._ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
