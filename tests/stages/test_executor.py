"""Executors: order, killed workers, errors, limits; no worker outlives a killed driver."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from puna.stages import plugins
from puna.stages.executors import connect, local, map_in_order, parts, processes, worker
from puna.storage import PunaError


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    """Yield one pool for all tests that do not stop it: it survives dead workers and errors of each test."""
    with connect("processes", 2) as made:
        assert made is not None
        yield made


def late(item: int, factor: int) -> int:
    time.sleep(0.01 * (5 - item % 5))
    return item * factor


@pytest.mark.parametrize("workers", [0, 3])
def test_results_keep_the_order_of_the_items(workers: int) -> None:
    pool = ThreadPoolExecutor(workers) if workers else None
    assert list(map_in_order(pool, late, range(20), (3,), ahead=4)) == [3 * i for i in range(20)]


def test_one_worker_needs_no_pool() -> None:
    assert local(1) is None


def threads() -> list[int]:
    import numba
    import numpy as np
    import pyarrow as pa
    import torch

    np.ones((8, 8)) @ np.ones((8, 8))
    # NumPy does not report how many threads its matrix products use; the BLAS library that it loaded does.
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "numpy.libs/libscipy_openblas" in line}
    blas = [ctypes.CDLL(file).scipy_openblas_get_num_threads64_() for file in loaded]
    return [pa.cpu_count(), torch.get_num_threads(), numba.get_num_threads(), *blas]


def dies(item: int) -> int:
    return os._exit(9) if item == 3 else item


def test_a_part_that_ends_its_worker_each_time_is_an_error_that_says_so(pool: Executor) -> None:
    with pytest.raises(PunaError, match="a worker process ended in the middle of its work .*dies; 3 times"):
        list(map_in_order(pool, dies, range(20), ()))


def dies_once(item: int, folder: str) -> int:
    """End the worker on the first attempt at every fifth item; record each attempt."""
    file = Path(folder) / f"{item}"
    with file.open("a") as notes:
        notes.write("x")
    if item % 5 == 0 and file.stat().st_size == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item


def test_a_worker_that_is_killed_costs_its_parts_and_not_the_run(pool: Executor, tmp_path: Path) -> None:
    assert list(map_in_order(pool, dies_once, range(12), (str(tmp_path),))) == [i * i for i in range(12)]
    assert [(tmp_path / str(i)).stat().st_size for i in range(12)] == [1 + (i % 5 == 0) for i in range(12)]


def test_what_is_under_way_is_not_waited_for_when_work_is_stopped(tmp_path: Path) -> None:
    """This also holds for a part that was restarted because Ctrl-C ended its first worker before it reached the driver."""
    pool = connect("processes", 2)
    assert pool is not None
    part = pool.submit(never_ends, str(tmp_path))
    first = _begun(tmp_path, 1)[0]
    os.kill(first, signal.SIGINT)
    again = next(worker for worker in _begun(tmp_path, 2) if worker != first)
    pool.stop()
    with pytest.raises(PunaError, match="a worker process ended"):
        part.result()
    while Path(f"/proc/{again}").exists():
        time.sleep(0.05)


def test_a_worker_that_is_being_started_is_not_waited_for_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, starting, stopping = processes._Worker.start, threading.Event(), threading.Event()

    def late(self: processes._Worker) -> None:
        if starting.is_set() or list(tmp_path.iterdir()):  # the second worker
            starting.set()
            stopping.wait()
        start(self)

    monkeypatch.setattr(processes._Worker, "start", late)
    pool = connect("processes", 2)
    assert pool is not None
    end = pool._end
    monkeypatch.setattr(pool, "_end", lambda: (end(), stopping.set()))  # the first check finds no worker alive
    part = pool.submit(never_ends, str(tmp_path))
    os.kill(_begun(tmp_path, 1)[0], signal.SIGINT)
    assert starting.wait(60)
    pool.stop()
    with pytest.raises(PunaError, match="a worker process ended"):
        part.result()


def never_ends(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    threading.Event().wait()


def _begun(folder: Path, count: int) -> list[int]:
    """Return the workers that started the part, once there are `count` of them."""
    while len(found := [int(file.name) for file in folder.iterdir()]) < count:
        time.sleep(0.05)
    return found


def test_a_worker_killed_while_idle_is_replaced(pool: Executor) -> None:
    victim = pool.submit(os.getpid).result()
    os.kill(victim, signal.SIGKILL)
    while Path(f"/proc/{victim}").exists():  # until the pool has noticed
        time.sleep(0.05)
    assert [pool.submit(late, i, 2).result() for i in range(4)] == [0, 2, 4, 6]


class TwoArguments(Exception):
    """An error that cannot be unpickled: its constructor takes more arguments than it passes on."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} {number}")


def fails(item: int) -> int:
    if item == 1:
        raise PunaError("page 1: no text")
    raise TwoArguments("page", item)


def check_errors(pool: Executor) -> None:
    """Check that errors of parts come back complete, with the worker's traceback."""
    with pytest.raises(PunaError, match="page 1: no text") as caught:
        pool.submit(fails, 1).result()
    assert "in fails" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="TwoArguments: page 2"):
        pool.submit(fails, 2).result()


def test_errors_of_parts_come_back(pool: Executor) -> None:
    check_errors(pool)


def bulky(item: int, size: int) -> bytes:
    return bytes([item]) * size


def test_bytes_under_way_are_bounded(pool: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BYTES_UNDER_WAY", 1000)
    begun: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            begun.append(item)
            yield item

    results = map_in_order(pool, bulky, items(), (10_000,), ahead=20)
    assert next(results)[0] == 0
    time.sleep(0.3)
    ahead = len(begun)
    assert [r[0] for r in results] == list(range(1, 20))
    assert ahead <= 4  # each is larger than the limit: only parts sent before the first one finished are waiting


def test_another_program_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = worker.fingerprint()
    there = replace(here, python="3.10.1", code="0" * 16, libraries={**here.libraries, "pyarrow": "1.0"})
    monkeypatch.setattr(worker, "fingerprint", lambda: there)
    payload = worker.pack(late, (1, 2), {})
    monkeypatch.setattr(worker, "fingerprint", lambda: here)
    with pytest.raises(PunaError, match=r"was refused: it has Python 3.* instead of 3.10.1; other source files of Puna; pyarrow .* instead of 1.0"):
        worker.compute(payload).value()


def test_added_modules_are_added_in_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own_work.py"
    file.write_text("def work(x):\n    return x + 1\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_modules", {})
    try:
        function = plugins.add(str(file)).work
        with connect("processes", 2) as pool:
            assert pool.submit(function, 1).result() == 2
            file.unlink()
        with connect("processes", 2) as pool, pytest.raises(PunaError, match=r"has no file .*own_work.py, which --module names"):
            pool.submit(function, 1).result()
    finally:
        sys.modules.pop("own_work", None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("threads", "there is no such executor; use processes, dask"),
        ("dask://here", "not a valid address; write dask://HOST:PORT"),
        ("dask://127.0.0.1:1", "no connection"),
        ("ray://127.0.0.1:1", "no connection"),
    ],
)
def test_an_executor_that_is_not_there(name: str, message: str) -> None:
    pytest.importorskip("ray" if name.startswith("ray") else "distributed")
    with pytest.raises(PunaError, match=message):
        connect(name, 2)


@pytest.mark.parametrize(("name", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_an_engine_that_is_not_installed_names_its_extra(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PunaError, match=rf"pip install 'puna\[{name}\]'"):
        connect(name, 2)


@pytest.fixture(scope="module")
def dask() -> Iterator[Executor]:
    pytest.importorskip("distributed")
    with connect("dask", 2) as pool:
        assert pool is not None
        yield pool


def test_dask_workers_that_are_killed(dask: Executor, tmp_path: Path) -> None:
    assert list(map_in_order(dask, dies_once, range(12), (str(tmp_path),))) == [i * i for i in range(12)]
    sizes = [(tmp_path / str(i)).stat().st_size for i in range(12)]
    assert all(sizes[i] >= 2 for i in (0, 5, 10)) and max(sizes) <= 3
    check_errors(dask)


def test_dask_gives_a_part_up_that_ends_its_worker_each_time(dask: Executor, tmp_path: Path) -> None:
    with pytest.raises(PunaError, match="a worker process ended in the middle of its work .*always_dies; 3 times"):
        dask.submit(always_dies, str(tmp_path / "attempts")).result(timeout=60)
    assert (tmp_path / "attempts").stat().st_size == 3
    assert dask.submit(late, 1, 2).result(timeout=60) == 2


def always_dies(file: str) -> None:
    with open(file, "a") as notes:
        notes.write("x")
    os._exit(9)


def test_nobody_else_of_this_machine_uses_the_local_dask(dask: Executor) -> None:
    from distributed import Client

    from puna.stages.executors.dask_cluster import DaskCluster

    assert isinstance(dask, DaskCluster)
    port = dask._local.scheduler_address.rpartition(":")[2]
    with pytest.raises(OSError):
        Client(f"tcp://127.0.0.1:{port}", timeout=2, set_as_default=False)


def test_dask_workers_that_died_while_they_started(dask: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask drops workers that do not respond for some time, as on a busy machine, and starts no replacements."""
    from dask import config

    from puna.stages.executors import dask_cluster

    monkeypatch.setattr(dask_cluster, "LOOK_SECONDS", 0.2)
    assert isinstance(dask, dask_cluster.DaskCluster)
    nannies = list(dask._local.workers.values())

    async def close() -> None:
        await asyncio.gather(*(nanny.close(timeout=0.1) for nanny in nannies))

    with config.set({"distributed.deploy.lost-worker-timeout": "0.1s"}):
        dask._local.sync(close)
        assert dask.submit(late, 1, 2).result(timeout=60) == 2


def test_dask_workers_have_no_device(dask: Executor) -> None:
    assert isinstance(dask, parts.PartExecutor) and not dask.has_device()


def test_ray_workers_that_are_killed(tmp_path: Path) -> None:
    """Ray gives up if its agents take longer than 15 seconds to start, which an import of several seconds in each of its processes can
    cause."""
    pytest.importorskip("ray")
    with connect("ray", 2) as pool:
        assert list(map_in_order(pool, dies_once, range(6), (str(tmp_path),))) == [i * i for i in range(6)]
        check_errors(pool)
        with pytest.raises(PunaError, match="always_dies; 3 times"):
            pool.submit(always_dies, str(tmp_path / "attempts")).result(timeout=60)
    assert [(tmp_path / str(i)).stat().st_size for i in range(6)] == [2, 1, 1, 1, 1, 2]


def test_ray_that_does_not_start_says_where_its_logs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def fails(**_: object) -> None:
        raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", fails)
    with pytest.raises(PunaError, match=r"Ray did not start on this machine \(The current node timed out.*its logs are in .*/ray-") as caught:
        connect("ray", 2)
    Path(str(caught.value).partition("logs are in ")[2].partition(".")[0]).rmdir()


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # The driver's imported modules and thread count are not inherited: workers are not forked.
    assert len(threads()) >= 3
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    monkeypatch.setattr(processes, "cores", lambda: 2)
    pool = local(2)
    assert pool is not None
    with pool:
        assert set(pool.submit(threads).result()) == {1}
    assert os.environ["OMP_NUM_THREADS"] == "7" and "RAYON_NUM_THREADS" not in os.environ


SCRIPT = """
import os, time
from puna.stages.executors import local
if __name__ == "__main__":
    print(local(2).submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


def test_workers_end_with_a_killed_driver(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / ".pkg")}
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None
    worker = int(driver.stdout.readline())
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and Path(f"/proc/{worker}").exists():
        time.sleep(0.2)
    assert not Path(f"/proc/{worker}").exists()
