"""The files of an object store for DuckDB: each is read by ranges that are compared with its checksums."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import duckdb
from fsspec.spec import AbstractFileSystem

from puna.storage.files import Files

PROTOCOL = "puna"


class StoreFileSystem(AbstractFileSystem):
    """Files of a store under `puna://NAME`, for reading. They do not change, so that nothing has to be asked twice."""

    protocol = PROTOCOL
    cachable = False

    def __init__(self, files: Files) -> None:
        super().__init__()
        self._files = files

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return name and size of a file."""
        name = self._strip_protocol(path)
        stat = self._files.stat(name)
        if stat is None:
            raise FileNotFoundError(path)
        return {"name": name, "size": stat.bytes, "type": "file"}

    def modified(self, path: str) -> datetime:
        """Return one time for every file: files do not change."""
        return datetime.fromtimestamp(0, UTC)

    def glob(self, path: str, **_: Any) -> list[str]:
        """Return the file that a pattern without wildcards names."""
        return [path] if self.exists(path) else []

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> Any:
        return self._files.open(self._strip_protocol(path))


def attach(connection: duckdb.DuckDBPyConnection, files: Files) -> str:
    """Let a connection read the files; return the prefix of their names in SQL."""
    connection.register_filesystem(StoreFileSystem(files))
    return f"{PROTOCOL}://"
