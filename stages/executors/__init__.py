"""Executors for `run.map`: local processes, Dask or Ray, all with the interface of `concurrent.futures.Executor`."""

from __future__ import annotations

from puna.stages.executors.parts import PartExecutor, map_in_order
from puna.stages.executors.processes import Processes, cores
from puna.storage import PunaError

__all__ = ["FORMS", "PROCESSES", "PartExecutor", "connect", "cores", "local", "map_in_order"]

PROCESSES = "processes"
FORMS = "processes, dask, dask://HOST:PORT, ray or ray://HOST:PORT"


def local(workers: int | None = None) -> PartExecutor | None:
    """Return a pool of `workers` local processes (None: one per core), or None for one worker: the caller's process does the work."""
    count = workers or cores()
    return None if count == 1 else Processes(count)


def connect(name: str, workers: int | None = None) -> PartExecutor | None:
    """Return the executor `name` (None: this process does the work). Without an address, start Dask or Ray with `workers` local processes.
    Raise PunaError for an unknown name, or a cluster that cannot be used."""
    engine, _, address = name.partition("://")
    if engine == "dask":
        from puna.stages.executors.dask_cluster import DaskCluster

        return DaskCluster(address, workers or cores())
    if engine == "ray":
        from puna.stages.executors.ray_cluster import RayCluster

        return RayCluster(address, workers or cores())
    if name == PROCESSES:
        return local(workers)
    raise PunaError(f"--executor {name}: there is no such executor; use {FORMS}")
