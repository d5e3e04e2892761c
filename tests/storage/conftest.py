"""A real S3 server on loopback, behind a proxy that makes requests fail."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.fault_proxy import FaultProxy

KEY, SECRET = "AKIATESTONLYIDENT", "bm90LWEtcmVhbC1zZWNyZXQtYXQtYWxs"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[int]:
    """Yield the port of an S3 server.

    It is a separate process: in a thread of this one, a garbage collection that releases a lease would wait for the thread's own answer.
    """
    pytest.importorskip("moto.server", reason="needs moto[server]")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(port, server)
            yield port
        finally:
            server.kill()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"the S3 server does not listen on port {port}; exit status {server.poll()}")


@pytest.fixture
def proxy(s3_server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Yield a proxy before the server, set in the environment; it makes no faults until a test sets some."""
    with FaultProxy(s3_server) as proxy:
        for name, value in {
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "PUNA_CACHE": str(tmp_path / "cache"),
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        yield proxy


@pytest.fixture
def bucket(proxy: FaultProxy, s3_server: int) -> str:
    """Return the address of an empty store on the server."""
    import boto3

    name = f"puna-{uuid.uuid4().hex}"
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3_server}").create_bucket(Bucket=name)
    return f"s3://{name}/a/store"
