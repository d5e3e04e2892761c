"""External Dask clusters given by their address: stages on the worker with the device, lost schedulers and lost results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

import pytest

from puna.stages import plugins
from puna.stages.contract import perform
from puna.stages.contract.declaration import REGISTRY
from puna.stages.executors import PartExecutor, connect, parts
from puna.storage import PunaError, Store

pytest.importorskip("distributed")
REPOSITORY = Path(__file__).parents[2]
CLUSTER = """
import dask, time
from distributed import LocalCluster
if __name__ == "__main__":
    with dask.config.set({"distributed.scheduler.allowed-failures": 2, "distributed.worker.daemon": False}):
        cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1", resources={"GPU": 1}, silence_logs=50)
    print(cluster.scheduler_address, flush=True)
    time.sleep(600)
"""
STAGE = '''
import os
from datetime import UTC, datetime
from puna.stages.contract import StageConfig, StageRun, stage

@stage(kind="documents", device=True)
def told(config: StageConfig, run: StageRun) -> None:
    """Tells in which process it ran."""
    run.metric("process", os.getpid())
    run.write_rows([{"id": "a", "url": "", "fetched_at": datetime(2024, 1, 1, tzinfo=UTC), "source": "s", "title": None, "text": "t"}])
'''


class Cluster:
    """A scheduler and two workers with a device each, in other processes."""

    def __init__(self, folder: Path) -> None:
        script = folder / "cluster.py"
        script.write_text(CLUSTER)
        path = os.pathsep.join([str(REPOSITORY / ".pkg"), str(REPOSITORY)])
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}, start_new_session=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip().removeprefix("tcp://")

    def kill(self) -> None:
        """End the whole cluster at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.kill()


@pytest.fixture(scope="module")
def dask(cluster: Cluster) -> Iterator[Executor]:
    with connect(f"dask://{cluster.address}") as pool:
        assert pool is not None
        yield pool


def test_a_stage_with_a_device_runs_on_the_worker_that_has_it(dask: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own_stage.py"
    file.write_text(STAGE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_modules", {})
    assert isinstance(dask, parts.PartExecutor) and dask.has_device()
    try:
        stage = plugins.add(str(file)).told
        started: list[str] = []
        made = perform(stage, stage.config(), {}, Store.open(tmp_path / "there"), executor=dask, run="r", on_start=lambda i: started.append(i.key))
        again = perform(stage, stage.config(), {}, Store.open(tmp_path / "there"), executor=dask)
        here = perform(stage, stage.config(), {}, Store.open(tmp_path / "here"))
    finally:
        sys.modules.pop("own_stage", None)
        REGISTRY.pop("told", None)
    assert started == [made.artifact.key] and not made.reused and again.reused
    assert here.artifact.manifest.metrics["process"] == os.getpid() != made.artifact.manifest.metrics["process"]
    assert (here.artifact.key, here.artifact.data_digest) == (made.artifact.key, made.artifact.data_digest)
    assert made.artifact.manifest.run == "r"


def slow(item: int, folder: str) -> tuple[int, int]:
    with (Path(folder) / str(item)).open("a") as notes:
        notes.write("x")
    time.sleep(0.5)
    return item, os.getpid()


def dies_after_answering(item: int, folder: str) -> int:
    """End the worker just after it returned its result, twice; the result, which only the worker holds, is lost."""
    import threading

    with (Path(folder) / "attempts").open("a") as notes:
        notes.write("x")
    if (Path(folder) / "attempts").stat().st_size <= 2:
        threading.Timer(0.02, os._exit, (9,)).start()
    return item


def test_results_lost_with_their_worker_are_computed_again(dask: Executor, tmp_path: Path) -> None:
    assert dask.submit(dies_after_answering, 7, str(tmp_path)).result(timeout=60) == 7
    assert 1 <= (tmp_path / "attempts").stat().st_size <= parts.ATTEMPTS


def waits(folder: str) -> None:
    """Record the start, and wait for a signal to end."""
    (Path(folder) / "begun").touch()
    for _ in range(600):
        if (Path(folder) / "end").exists():
            return
        time.sleep(0.1)


def test_stopping_does_not_wait_for_what_is_under_way(cluster: Cluster, tmp_path: Path) -> None:
    with connect(f"dask://{cluster.address}") as pool:
        assert isinstance(pool, PartExecutor)
        future = pool.submit(waits, str(tmp_path))
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        pool.stop()
        assert isinstance(future.exception(timeout=0), PunaError)
    (tmp_path / "end").touch()


def test_a_lost_scheduler_is_an_error_that_says_so(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        with connect(f"dask://{cluster.address}") as pool:
            assert pool is not None
            futures = [pool.submit(slow, item, str(tmp_path)) for item in range(12)]
            assert futures[0].result(timeout=60)[0] == 0
            cluster.kill()
            with pytest.raises(PunaError, match="the Dask scheduler .* is gone or has dropped the work; finished work is kept"):
                futures[-1].result(timeout=60)
            assert all(future.done() or future.exception(timeout=60) for future in futures)
    finally:
        if cluster.process.poll() is None:
            cluster.kill()
