"""Pinned packages into a cache folder, by digest: verified, resumed, never half-written."""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from puna.flows.demo.index import IndexClient, Link, local_path, public_address, reason
from puna.flows.demo.packages import Package
from puna.storage import PunaError

_CHUNK = 1 << 18

Received = Callable[[int], None]


def cached_path(cache: Path, package: Package) -> Path:
    """Where the verified file of a package lies in the cache."""
    return cache / f"{package.sha256[:16]}-{package.filename}"


def cached_bytes(cache: Path, package: Package) -> int:
    """Bytes of a package that are in the cache already, whole or in part."""
    for path in (cached_path(cache, package), _partial_path(cache, package)):
        if path.is_file():
            return min(path.stat().st_size, package.size)
    return 0


def is_whole(path: Path, package: Package) -> bool:
    """Whether a file is the pinned one, by size and sha256."""
    return path.is_file() and path.stat().st_size == package.size and file_sha256(path) == package.sha256


def file_sha256(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, so that two processes do not write the same partial file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / ".lock").open("w")
    except OSError as error:
        raise PunaError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def fetch(package: Package, client: Callable[[], IndexClient], cache: Path, received: Received) -> Path:
    """The verified file of ``package``, from the cache or from the first address that gives it.

    ``client`` is asked for only when something must be downloaded; ``received`` is told the bytes of this
    package that are here so far. Raises PunaError when no configured index has the file, none can be reached,
    or what comes has another digest.
    """
    path = cached_path(cache, package)
    if is_whole(path, package):
        received(package.size)
        return path
    path.unlink(missing_ok=True)
    index = client()
    offered, failures = index.links(package.project)
    links = [link for link in offered if link.filename == package.filename]
    if not links:
        raise PunaError(_missing(package, path, failures, reached=bool(offered)))
    for link in links:
        try:
            _fetch_link(package, link, index, _partial_path(cache, package), received)
        except (OSError, HTTPException, ValueError, PunaError) as error:
            failures.append(f"{public_address(link.url)}: {reason(error)}")
            continue
        os.replace(_partial_path(cache, package), path)
        return path
    raise PunaError(_missing(package, path, failures, reached=True))


def _partial_path(cache: Path, package: Package) -> Path:
    return cache / f"{package.sha256}.partial"


def _fetch_link(package: Package, link: Link, client: IndexClient, partial: Path, received: Received) -> None:
    """Fill ``partial`` from one address, going on where it stops, until it is whole and verified."""
    if link.sha256 is not None and link.sha256 != package.sha256:
        raise PunaError(f"the index gives sha256 {link.sha256}, pinned is {package.sha256}")
    attempts = client.settings.retries + 1
    for attempt in range(attempts):
        resumed = partial.is_file() and partial.stat().st_size > 0
        try:
            _receive(package, link, client, partial, received)
        except HTTPError as error:
            if error.code == 416:  # the range cannot be had: what is here does not fit, start again
                partial.unlink(missing_ok=True)
            if attempt + 1 == attempts or (error.code < 500 and error.code not in (408, 416, 429)):
                raise
        except (OSError, HTTPException):
            if attempt + 1 == attempts or local_path(link.url) is not None:
                raise
        else:
            found = file_sha256(partial)
            if found == package.sha256:
                return
            partial.unlink()
            if not resumed or attempt + 1 == attempts:
                raise PunaError(f"what came has sha256 {found}, pinned is {package.sha256}; thrown away")
            continue  # the half of an earlier run may have been damaged: once more from the start
        time.sleep(min(0.25 * 2**attempt, 8.0))


def _receive(package: Package, link: Link, client: IndexClient, partial: Path, received: Received) -> None:
    """One connection: append to ``partial``, or start it again when the server sends the whole file."""
    offset = partial.stat().st_size if partial.is_file() else 0
    if offset == package.size:
        return
    if offset > package.size:
        partial.unlink()
        offset = 0
    local = local_path(link.url)
    if local is not None:
        offset = 0
    with local.open("rb") if local is not None else client.open(link.url, offset) as answer:
        if offset and not _continues(answer, offset):
            offset = 0  # the server sends the whole file
        with partial.open("ab" if offset else "wb") as stream:
            while chunk := answer.read(_CHUNK):
                offset += len(chunk)
                if offset > package.size:
                    stream.close()
                    partial.unlink()
                    raise PunaError(f"sends more than the pinned {package.size:,} bytes")
                stream.write(chunk)
                received(offset)
            stream.flush()
            os.fsync(stream.fileno())
    if offset < package.size:
        raise ConnectionError(f"the connection ended after {offset:,} of {package.size:,} bytes")


def _continues(answer: object, offset: int) -> bool:
    headers = getattr(answer, "headers", {})
    status = getattr(answer, "status", 200)
    return status == 206 and str(headers.get("Content-Range", "")).startswith(f"bytes {offset}-")


def _missing(package: Package, path: Path, failures: list[str], reached: bool) -> str:
    what = "no address gave the right file" if reached else "no configured index answers for this project"
    if reached and not failures:
        what = "the configured package index does not offer this file"
    return "\n".join(
        [
            f"puna sample needs {package.filename} ({package.project} {package.version}): {what}.",
            *(f"  {failure}" for failure in failures),
            "What to do: check the connection and pip's settings (pip config list); add an index or a folder "
            "that has the file (pip config set global.extra-index-url URL, PIP_FIND_LINKS=FOLDER);",
            f"or put the file there by hand as {path}; its sha256 must be {package.sha256}.",
        ]
    )
