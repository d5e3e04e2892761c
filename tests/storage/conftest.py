"""A real S3 server on loopback, with a proxy before it that makes requests fail."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.fault_proxy import FaultProxy

KEY, SECRET = "AKIATESTONLYIDENT", "bm90LWEtcmVhbC1zZWNyZXQtYXQtYWxs"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[int]:
    """The port of a server that speaks the protocol of S3."""
    server = pytest.importorskip("moto.server", reason="needs moto[server]").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def proxy(s3_server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server, that the environment names; without faults until a test sets some."""
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
    """The address of an empty store on the server."""
    import boto3

    name = f"puna-{uuid.uuid4().hex}"
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3_server}").create_bucket(Bucket=name)
    return f"s3://{name}/a/store"
