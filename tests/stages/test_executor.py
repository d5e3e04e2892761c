"""The local pool: order, and no worker outlives a killed driver."""

from __future__ import annotations

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
    import pyarrow as pa
    import torch

    return [pa.cpu_count(), torch.get_num_threads(), numba.get_num_threads()]


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    monkeypatch.setattr(executor, "cores", lambda: 2)
    pool = local(2)
    assert pool is not None
    with pool:
        assert pool.submit(threads).result() == [1, 1, 1]
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
