"""Package archives read as data: streamed, never unpacked to disk, nothing in them is run."""

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import IO

from puna.storage import PunaError

MAX_MEMBER = 32 << 20  # bytes of one unpacked member
MAX_ARCHIVE = 256 << 20  # bytes of all unpacked members together
MAX_MEMBERS = 20_000


@dataclass(frozen=True)
class Member:
    """One regular file of an archive: its path, modification time (UTC) and content."""

    path: str
    modified: datetime
    body: bytes


def read_archive(archive: Path, wanted: Callable[[str], bool]) -> list[Member]:
    """Members of a ``.tar.gz`` sdist or a wheel whose path is wanted, sorted by path.

    Paths of an sdist lose their top folder. Links and special files are passed over. Raises PunaError for an
    unreadable archive, for names that leave it, and past MAX_MEMBER, MAX_ARCHIVE or MAX_MEMBERS.
    """
    read = _read_wheel if archive.suffix in (".whl", ".zip") else _read_sdist
    try:
        with archive.open("rb") as stream:
            return sorted(read(stream, archive.name, wanted), key=lambda member: member.path)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise PunaError(f"{archive}: cannot be read as an archive ({error})") from error


def gunzip(body: bytes, name: str, limit: int = MAX_MEMBER) -> bytes:
    """Unpack a gzip member of an archive; raises PunaError past ``limit`` bytes or when it is damaged."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise PunaError(f"{name}: damaged gzip data ({error})") from error
    if len(unpacked) > limit:
        raise PunaError(f"{name}: unpacks to more than {limit:,} bytes")
    if not unpacker.eof:
        raise PunaError(f"{name}: gzip data ends too early")
    return unpacked


class _Budget:
    """Counts the members and bytes of one archive and refuses those past the limits."""

    def __init__(self, archive: str) -> None:
        self.archive = archive
        self.members = 0
        self.bytes = 0

    def take(self, name: str, size: int) -> None:
        self.members += 1
        self.bytes += size
        if self.members > MAX_MEMBERS:
            raise PunaError(f"{self.archive}: more than {MAX_MEMBERS:,} members")
        if size > MAX_MEMBER:
            limit = f"more than {MAX_MEMBER:,} bytes"
            raise PunaError(f"{self.archive}: member {name!r} unpacks to {limit} ({size:,})")
        if self.bytes > MAX_ARCHIVE:
            raise PunaError(f"{self.archive}: unpacks to more than {MAX_ARCHIVE:,} bytes")


def _checked(name: str, archive: str) -> PurePosixPath:
    path = PurePosixPath(name)
    drive = len(name) > 1 and name[1] == ":"
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or drive:
        raise PunaError(f"{archive}: member name {name!r} leaves the archive; the file is not used")
    return path


def _read_sdist(stream: IO[bytes], archive: str, wanted: Callable[[str], bool]) -> Iterator[Member]:
    budget = _Budget(archive)
    # "r|gz" reads forward only, so a member's size is checked before its bytes are unpacked.
    with tarfile.open(fileobj=stream, mode="r|gz") as tar:
        for info in tar:
            parts = _checked(info.name, archive).parts
            budget.take(info.name, info.size)
            path = "/".join(parts[1:])
            if not info.isreg() or not path or not wanted(path):
                continue
            content = tar.extractfile(info)
            if content is None:
                raise PunaError(f"{archive}: member {info.name!r} has no content")
            yield Member(path, datetime.fromtimestamp(int(info.mtime), UTC), content.read())


def _read_wheel(stream: IO[bytes], archive: str, wanted: Callable[[str], bool]) -> Iterator[Member]:
    budget = _Budget(archive)
    with zipfile.ZipFile(stream) as wheel:
        for info in wheel.infolist():
            path = str(_checked(info.filename, archive))
            budget.take(info.filename, info.file_size)
            if info.is_dir() or not wanted(path):
                continue
            with wheel.open(info) as content:
                body = content.read(info.file_size + 1)
            yield Member(path, datetime(*info.date_time, tzinfo=UTC), body)
