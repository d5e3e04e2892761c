"""A quick check of a cluster's address, before an engine waits for minutes."""

from __future__ import annotations

import socket

from puna.storage import PunaError


def probed(engine: str, address: str) -> str:
    """Return `HOST:PORT` if a connection succeeds; raise PunaError otherwise."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PunaError(f"--executor {engine}://{address}: is no address; write {engine}://HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise PunaError(f"--executor {engine}://{address}: nobody answers there ({error}); start the cluster, or name another") from error
    return address
