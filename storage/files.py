"""The interface `Files` to a store's files, on a disk or an object store. All of `storage` accesses files through it.

Names are relative, with `/`. Committed files never change. Aliases change by compare-and-swap, as do leases and logs on an object store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import duckdb

from puna.storage.errors import PunaError

LOCKS = "locks"


class DamagedFile(PunaError):
    """The error for a file whose bytes have changed since it was written."""


class Stat(NamedTuple):
    """A file's size in bytes, its version (a text that changes when the bytes change), and the time of writing, seconds since 1970."""

    bytes: int
    version: str
    written: float


class Files(Protocol):
    """An interface to a store's files; small and picklable, so that workers get a copy. Reading a missing file raises FileNotFoundError."""

    def __hash__(self) -> int:
        return hash(self.uri)

    @property
    def uri(self) -> str:
        """Return the storage address for messages, without credentials."""

    @property
    def checks_reads(self) -> bool:
        """True if reads of opened files and of whole files verify checksums."""
        return False

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes start .. stop - 1 of a file; `stop` None: to its end."""

    def open(self, name: str) -> BinaryIO:
        """Return a file as a seekable object for reading."""

    def table(self, name: str) -> BinaryIO:
        """Return a Parquet file of an artifact, opened for reading. `damage.ComparedFiles` first verifies its checksum."""
        return self.open(name)

    def stat(self, name: str) -> Stat | None:
        """Return a file's `Stat`, or None if it does not exist."""

    def stats(self, folder: str) -> dict[str, Stat]:
        """Return name (relative to the folder) → `Stat` for all files below a folder."""

    def list(self, folder: str) -> Iterator[str]:
        """Return the names of the files below a folder, in order."""

    def folders(self, folder: str) -> Sequence[str]:
        """Return the names of the folders in a folder, in order."""

    def versions(self, folder: str, depth: int, name: str) -> dict[str, str]:
        """Return relative folder → version of its file `name`, for all folders `depth` levels below `folder` that have such a file."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file, completely or not at all, unless it exists; return False if it exists."""
        return self.swap(name, data, None)

    def swap(self, name: str, data: bytes, version: str | None) -> bool:
        """Write a small file and return True if the existing file has this version (None: does not exist); otherwise return False."""

    def write(self, name: str, data: bytes, *, lasting: bool = True) -> None:
        """Write a small file atomically, replacing any old one. If `lasting`, it survives a power failure."""

    def append(self, name: str, line: bytes) -> None:
        """Add one line to a log. A line truncated by a crash does not damage other lines."""

    def put(self, name: str, file: Path) -> None:
        """Move a local file to `name`, replacing any old one. Its bytes survive a power failure if it was synced before."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content, if it exists. A half-removed folder is never taken for an artifact."""

    def move(self, folder: str, target: str) -> None:
        """Rename a folder; the target must not exist."""

    def publish(self, folder: str, content: Mapping[str, str], last: tuple[str, bytes], staging: str) -> bool:
        """Create a folder from stored files, `content`: name in the folder → file to move or copy; `last` is written after all others.
        Return False, and leave the folder unchanged, if it already has the `last` file. `staging`: a folder for temporary use."""

    def lease(self, name: str, *, wait: bool = True) -> AbstractContextManager[bool]:
        """Hold a name exclusively, as a lock between processes. Without `wait`, yield False if another process holds it."""

    def is_held(self, name: str) -> bool:
        """True if a process holds a name."""

    def sql(self, connection: duckdb.DuckDBPyConnection) -> str:
        """Enable the DuckDB connection to read the store's files; return the prefix that SQL puts before their names."""

    def local(self, name: str) -> Path:
        """Return a local path of a file or folder: its own, or that of a copy in a bounded cache."""

    def scratch(self, name: str) -> Path:
        """Return a local folder for work in progress that survives a crash; create it if missing."""

    def free(self) -> int | None:
        """Return the number of free bytes; None if storage is unbounded."""


@dataclass(frozen=True)
class LocalFiles(Files):
    """A folder on a local or mounted disk."""

    root: Path

    @property
    def uri(self) -> str:
        return str(self.root)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with open(f"{self.root}/{name}", "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def open(self, name: str) -> BinaryIO:
        return open(f"{self.root}/{name}", "rb")

    def stat(self, name: str) -> Stat | None:
        try:
            return _stat(os.stat(f"{self.root}/{name}"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def stats(self, folder: str) -> dict[str, Stat]:
        start = f"{self.root}/{folder}"
        stats = {}
        for path, _, names in os.walk(start):
            for name in names:
                file = f"{path}/{name}"
                with contextlib.suppress(FileNotFoundError):  # a link that points nowhere
                    stats[file[len(start) + 1 :]] = _stat(os.stat(file))
        return stats

    def list(self, folder: str) -> Iterator[str]:
        cut = len(os.path.join(self.root, ""))  # for ten thousand artifacts, `Path` objects would take a second
        yield from sorted(os.path.join(path, name)[cut:] for path, _, inside in os.walk(self.root / folder) for name in inside)

    def folders(self, folder: str) -> Sequence[str]:
        start = self.root / folder
        return sorted(path.name for path in start.iterdir() if path.is_dir()) if start.is_dir() else []

    def versions(self, folder: str, depth: int, name: str) -> dict[str, str]:
        start, level, versions = f"{self.root}/{folder}/", [""], {}
        for _ in range(depth):
            below = []
            for place in level:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(start + place) as inside:
                    below += [f"{place}{one.name}/" for one in inside]
            level = below
        for place in level:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                versions[place[:-1]] = _stat(os.stat(f"{start}{place}{name}")).version
        return versions

    def swap(self, name: str, data: bytes, version: str | None) -> bool:
        with self.lease(".swap"):
            now = self.stat(name)
            if (now.version if now else None) != version:
                return False
            self.write(name, data)
            return True

    def write(self, name: str, data: bytes, *, lasting: bool = True) -> None:
        self._in_folder(name, lambda file: write_bytes(file, data, lasting=lasting))

    def append(self, name: str, line: bytes) -> None:
        with (self.root / name).open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)

    def put(self, name: str, file: Path) -> None:
        self._in_folder(name, lambda target: os.replace(file, target))

    def _in_folder(self, name: str, write: Callable[[Path], None]) -> None:
        path = self.root / name
        try:
            write(path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            # First move the folder away in one step, so that a half-removed artifact neither looks intact nor blocks its key.
            doomed = self.root / "quarantine" / f"removed-{path.name[:12]}-{uuid.uuid4().hex}"
            doomed.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process, such as `gc`, removes the folder, too
                path.rename(doomed)
                shutil.rmtree(doomed)
        else:
            path.unlink(missing_ok=True)

    def move(self, folder: str, target: str) -> None:
        os.rename(self.root / folder, self.root / target)

    def publish(self, folder: str, content: Mapping[str, str], last: tuple[str, bytes], staging: str) -> bool:
        whole, target = self.root / staging, self.root / folder
        if whole.exists():
            shutil.rmtree(whole)
        whole.mkdir(parents=True)
        for name, file in content.items():
            self.put(f"{staging}/{name}", self.root / file)
        write_bytes(whole / last[0], last[1])
        for path, _, _ in os.walk(whole):
            sync(Path(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not (target / last[0]).is_file():
            os.rename(target, self.root / "quarantine" / f"{target.name[:12]}-{uuid.uuid4().hex}")
        try:
            os.rename(whole, target)
        except OSError:
            if not (target / last[0]).is_file():
                raise
            return False
        finally:
            for parent in target.parents[:3]:
                sync(parent)
        return True

    @contextlib.contextmanager
    def lease(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        file = self.root / LOCKS / name
        while True:
            with file.open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    yield False
                    return
                # `gc` removes old lock files, and a lock on a file that was removed meanwhile excludes nobody.
                if file.exists() and os.path.samestat(os.fstat(lock.fileno()), os.stat(file)):
                    yield True
                    return

    def is_held(self, name: str) -> bool:
        try:
            with (self.root / LOCKS / name).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def sql(self, connection: duckdb.DuckDBPyConnection) -> str:
        return f"{self.root.resolve()}/"

    def local(self, name: str) -> Path:
        return self.root / name

    def scratch(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def free(self) -> int | None:
        return shutil.disk_usage(self.root).free


def _stat(stat: os.stat_result) -> Stat:
    return Stat(stat.st_size, f"{stat.st_ino}-{stat.st_mtime_ns}", stat.st_mtime)


def write_bytes(file: Path, data: bytes, *, lasting: bool = True) -> None:
    """Write a small file atomically. If `lasting`, it survives a power failure."""
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:16]}")  # several threads may write one file
    with temporary.open("wb") as out:
        out.write(data)
        if lasting:
            out.flush()
            os.fsync(out.fileno())
    os.replace(temporary, file)
    if lasting:
        sync(file.parent)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power failure (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
