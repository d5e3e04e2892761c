"""The local pool: order, and no worker outlives a killed driver."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from puna.stages.contract import executor
from puna.stages.contract.executor import local, ordered
from puna.storage import PunaError


def late(item: int, factor: int) -> int:
    time.sleep(0.01 * (5 - item % 5))
    return item * factor


@pytest.mark.parametrize("workers", [0, 3])
def test_results_keep_the_order_of_the_items(workers: int) -> None:
    pool = ThreadPoolExecutor(workers) if workers else None
    assert list(ordered(pool, late, range(20), (3,), ahead=4)) == [3 * i for i in range(20)]


def test_one_worker_needs_no_pool() -> None:
    assert local(1) is None


def threads() -> list[int]:
    import numba
    import numpy as np
    import pyarrow as pa
    import torch

    np.ones((8, 8)) @ np.ones((8, 8))
    # NumPy says nowhere how many threads its matrix products take: the library that it has loaded does.
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "numpy.libs/libscipy_openblas" in line}
    blas = [ctypes.CDLL(file).scipy_openblas_get_num_threads64_() for file in loaded]
    return [pa.cpu_count(), torch.get_num_threads(), numba.get_num_threads(), *blas]


def dies(item: int) -> int:
    return os._exit(9) if item == 3 else item


def test_a_worker_that_is_killed_is_an_error_that_says_so() -> None:
    pool = local(2)
    assert pool is not None
    with pool, pytest.raises(PunaError, match="a worker process ended in the middle of its work .* use fewer workers"):
        list(ordered(pool, dies, range(20), ()))


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the driver has loaded, and how many threads it uses, is not handed on: workers are not forked.
    assert len(threads()) >= 3
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    monkeypatch.setattr(executor, "cores", lambda: 2)
    pool = local(2)
    assert pool is not None
    with pool:
        assert set(pool.submit(threads).result()) == {1}
    assert os.environ["OMP_NUM_THREADS"] == "7" and "RAYON_NUM_THREADS" not in os.environ


SCRIPT = """
import os, time
from puna.stages.contract.executor import local
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
