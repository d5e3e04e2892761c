"""Curation on every executor and kind of store: comparison of keys and digests of all artifacts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.storage.conftest import KEY, SECRET
from tests.storage.fault_proxy import FaultProxy


def figures(puna: Callable[..., Any], inputs: list[str], scratch: Callable[[], Any], recipe: str) -> dict[str, Any]:
    """Return `same_bytes`: 1 if all are equal; `same_NAME`: 1 if this executor's or store's results equal those of one process."""
    words = ("curate", "--recipe", recipe, *inputs)
    ways: dict[str, tuple[str, ...]] = {f"{n}_processes": ("--workers", str(n)) for n in (1, 2, 4)}
    ways["dask_3_one_killed"] = ("--executor", "dask", "--workers", "3")
    if importlib.util.find_spec("ray"):
        ways["ray_2"] = ("--executor", "ray", "--workers", "2")
    contents: dict[str, list[Any]] = {}
    found: dict[str, Any] = {}
    for name, more in ways.items():
        with scratch() as folder:
            killed = _Killer(3) if "killed" in name else None
            made, cost = puna(folder / "store", *words, *more)
            if killed is not None:
                found["same_dask_killed"] = killed.ended()
        contents[name] = _content(made)
        found[f"same_{name}_s"] = cost["seconds"]
    with scratch() as folder:
        contents["s3_with_faults"], met = _on_s3(puna, words, folder)
        found |= {"same_s3_requests": met["requests"], "same_s3_faults": sum(met.values()) - met["requests"]}
    first = contents["1_processes"]
    found |= {f"same_{name}": int(content == first) for name, content in contents.items()}
    return {"same_bytes": int(all(content == first for content in contents.values())), "same_artifacts": len(first), **found}


def _content(made: list[dict[str, Any]]) -> list[Any]:
    return [(one["step"], one["key"], one["data_digest"]) for one in made]


def _on_s3(puna: Callable[..., Any], words: tuple[str, ...], folder: Path) -> tuple[list[Any], dict[str, int]]:
    """Run the same on an S3 server that fails 2 % of its requests."""
    import boto3

    port, bucket = 5000 + os.getpid() % 1000, f"puna-{uuid.uuid4().hex}"
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
    try:
        with FaultProxy(port, rate=0.02) as proxy:
            credentials = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
            os.environ |= credentials
            client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1")
            _patiently(lambda: client.create_bucket(Bucket=bucket))
            where = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "PUNA_CACHE": str(folder / "cache")}
            made, _ = puna(f"s3://{bucket}/store", *words, **credentials, **where)
            return _content(made), dict(proxy.met)
    finally:
        server.kill()
        server.wait()


def _patiently(ask: Callable[[], Any]) -> None:
    """Repeat a request until the server listens."""
    from botocore.exceptions import BotoCoreError

    for _ in range(60):
        try:
            ask()
            return
        except BotoCoreError:
            time.sleep(0.5)
    sys.exit("moto does not answer")


class _Killer:
    """A thread that kills one busy worker of the next process started, once at least `workers` of them run."""

    def __init__(self, workers: int) -> None:
        self._workers, self._killed = workers, 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.2):
            below = [p for p in psutil.Process().children(recursive=True) if _is_worker(p)]
            busy = [p for p in below if sum(p.cpu_times()[:2]) > 8.0]  # a worker that has loaded its code and is computing
            if len(below) >= self._workers and busy:
                busy[0].kill()
                self._killed = 1
                return

    def ended(self) -> int:
        """Return the number of killed workers."""
        self._done.set()
        self._thread.join()
        return self._killed


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:
        return False
