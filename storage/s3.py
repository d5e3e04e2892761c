"""Files of a store on S3 or a compatible service: conditional puts for manifests and aliases, leases for locks, copies for renames."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlsplit

import duckdb
import obstore
from fsspec.spec import AbstractFileSystem

from puna.storage import blocks, cache, lease
from puna.storage.bucket import NAME, TRIES, Bucket, passing, pause
from puna.storage.errors import PunaError
from puna.storage.files import LOCKS, DamagedFile, Files, Stat

if TYPE_CHECKING:  # the package has these names only for type checkers
    from obstore import ObjectMeta, PutMode

MULTIPART = 16 << 20  # file size in bytes above which uploads are in pieces, and the minimum size of a piece
COPIED = 5 << 30  # maximum size in bytes of an object that S3 copies in one request
AT_ONCE = 8
SUMS, NONCE = "puna-sums", "puna-nonce"


@dataclass(frozen=True)
class S3Files(Bucket, Files):
    """The files below a prefix in a bucket. Versions are ETags. `term`: see `lease.TERM`.

    `read` verifies the checksums of whole files; callers that read a range must verify it themselves. `append` rewrites the whole log.
    `publish` copies within the bucket; the conditional put of the last file decides which of two writers wins."""

    term: float = lease.TERM

    @classmethod
    def at(cls, uri: str) -> S3Files:
        """Return the files at `s3://BUCKET/PREFIX`. Raise PunaError if the address is invalid or contains credentials."""
        parsed = urlsplit(uri)
        if "@" in parsed.netloc or parsed.query:
            raise PunaError(
                "store s3://…: credentials do not belong in the address, which logs and process lists show: "
                "give s3://BUCKET/PREFIX, and AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
            )
        prefix = parsed.path.strip("/")
        if parsed.scheme != "s3" or not NAME.fullmatch(parsed.netloc) or not re.fullmatch(r"[\w!.*'()/-]*", prefix) or parsed.fragment:
            raise PunaError(f"store {uri}: is not the address of an object store; give s3://BUCKET/PREFIX")
        if any(part in (".", "..", "") for part in prefix.split("/")) and prefix:
            raise PunaError(f"store {uri}: the prefix has a part that is empty, `.` or `..`")
        return cls(parsed.netloc, prefix)

    @property
    def checks_reads(self) -> bool:
        return True

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if start or stop is not None:
            return b"" if stop is not None and stop <= start else self._get(name, start, stop)[0]
        return self._read_blocks(name, 0, None)[0]

    def read_version(self, name: str) -> tuple[bytes, str] | None:
        """Return (content, version) of a whole file, after verifying its checksums; None if there is no file."""
        try:
            return self._read_blocks(name, 0, None)
        except FileNotFoundError:
            return None

    def _read_blocks(self, name: str, start: int, stop: int | None, size: int | None = None) -> tuple[bytes, str]:
        """Return (whole blocks, version) of a file. Raise PunaError if a checksum is wrong, or if the file's size is not `size`."""
        for attempt in range(TRIES):
            data, now, sums, version = self._get(name, start, stop)
            if size not in (None, now):
                _size.cache_clear()
                raise PunaError(f"{self.uri}/{name}: another process replaced the file while it was read; run again")
            if not sums or blocks.right(data, start, now, sums):  # files that other tools copied into the bucket have no checksums
                return data, version
            pause(attempt)
        raise DamagedFile(f"{self.uri}/{name}: is damaged: its bytes are not those that were written")

    def open(self, name: str) -> BinaryIO:
        size = _size(self, name)
        return cast("BinaryIO", blocks.Reader(size, lambda start, stop: self._read_blocks(name, start, stop, size)[0]))

    def _get(self, name: str, start: int, stop: int | None) -> tuple[bytes, int, str, str]:
        """Return (bytes of the range, size of the whole file, its block checksums as text, its version)."""
        options = {} if not start and stop is None else {"range": {"offset": start} if stop is None else (start, stop)}

        def get() -> tuple[bytes, int, str, str]:
            answer = obstore.get(self._client(), name, options=options)  # type: ignore[arg-type]
            return bytes(answer.bytes()), answer.meta["size"], answer.attributes.get(SUMS, ""), answer.meta["e_tag"] or ""

        return self._request(name, get)

    def stat(self, name: str) -> Stat | None:
        try:
            return _stat(self._request(name, lambda: obstore.head(self._client(), name)))
        except FileNotFoundError:
            return None

    def stats(self, folder: str) -> dict[str, Stat]:
        return {name[len(folder) + 1 :]: stat for name, stat in self._list(folder)}

    def list(self, folder: str) -> Iterator[str]:
        return (name for name, _ in self._list(folder))

    def folders(self, folder: str) -> Sequence[str]:
        listing = self._request(folder, lambda: obstore.list_with_delimiter(self._client(), prefix=folder))
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in listing["common_prefixes"])

    def versions(self, folder: str, depth: int, name: str) -> dict[str, str]:
        split = ((one[len(folder) + 1 :].rpartition("/"), stat) for one, stat in self._list(folder))
        return {place: stat.version for (place, _, last), stat in split if last == name and place.count("/") == depth - 1}

    def _list(self, folder: str) -> Iterator[tuple[str, Stat]]:
        after = ""
        for attempt in range(TRIES):
            try:
                for chunk in obstore.list(self._client(), prefix=folder, offset=after or None):
                    for one in chunk:
                        after = one["path"]
                        yield after, _stat(one)
                return
            except obstore.exceptions.BaseError as error:
                if attempt == TRIES - 1 or not passing(error):
                    raise self._failure(folder, error) from None
                pause(attempt)

    def swap(self, name: str, data: bytes, version: str | None) -> bool:
        return self.swap_version(name, data, version) is not None

    def swap_version(self, name: str, data: bytes, version: str | None) -> str | None:
        """Write like `swap`, and return the new version; None if the file's version is not `version`. Raise PunaError under contention."""
        nonce = uuid.uuid4().hex
        mode: PutMode = "create" if version is None else {"e_tag": version}
        for attempt in range(TRIES):
            try:
                return self._put(name, data, mode, nonce)
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
                # Either the put was rejected, or it succeeded but its response was lost and the retry was rejected.
                writer = self._writer(name)
                if writer is not None and writer[0] == nonce:
                    return writer[1]
                if (writer[1] if writer is not None else None) != version:
                    return None
                pause(attempt)  # another writer's put was in progress, and failed
        raise PunaError(f"{self.uri}/{name}: other processes keep changing the file; run again")

    def _writer(self, name: str) -> tuple[str, str] | None:
        try:
            answer = self._request(name, lambda: obstore.get(self._client(), name, options={"head": True}))
        except FileNotFoundError:
            return None
        return answer.attributes.get(NONCE, ""), answer.meta["e_tag"] or ""

    def write(self, name: str, data: bytes, *, lasting: bool = True) -> None:
        self._put(name, data, "overwrite", "")

    def _put(self, name: str, data: bytes, mode: PutMode, nonce: str) -> str:
        about = {SUMS: blocks.of_bytes(data)} | ({NONCE: nonce} if nonce else {})
        put = partial(obstore.put, self._client(), name, data, attributes=about, mode=mode, use_multipart=False)
        return self._request(name, put, written=True)["e_tag"] or ""

    def append(self, name: str, line: bytes) -> None:
        content = None
        for attempt in range(10 * TRIES):
            data, version = self.read_version(name) or (b"", None)
            # The put may have succeeded although its response was lost; other writers' lines may follow by now.
            if content is not None and data.startswith(content):
                return
            content = data + line
            if self.swap(name, content, version):
                return
            pause(min(attempt, 2))
        raise PunaError(f"{self.uri}/{name}: other processes keep changing the file; run again")

    def put(self, name: str, file: Path) -> None:
        size = file.stat().st_size
        if size <= MULTIPART:
            self._put(name, file.read_bytes(), "overwrite", "")
        else:
            about, piece = {SUMS: blocks.of_file(file)}, max(MULTIPART, -(-size // 9_000))
            put = partial(obstore.put, self._client(), name, file, attributes=about, chunk_size=piece, max_concurrency=4)
            self._request(name, put, written=True)
        file.unlink()

    def remove(self, name: str) -> None:
        names = sorted(self.list(name), key=lambda one: one.rpartition("/")[2] != "manifest.json")  # the manifest first
        for some in ([name], names[:1], names[1:]):
            if some:
                self._request(name, partial(obstore.delete, self._client(), some))
        self._cache().forget(name)
        self._cache().forget_scratch(name)

    def move(self, folder: str, target: str) -> None:
        self._copy({f"{folder}/{name}": f"{target}/{name}" for name in self.stats(folder)})
        self.remove(folder)

    def publish(self, folder: str, content: Mapping[str, str], last: tuple[str, bytes], staging: str) -> bool:
        present = self.stats(folder)
        if last[0] in present:
            return False
        lease.check(self, f"{LOCKS}/{folder.rpartition('/')[2]}")
        for name in sorted(set(present) - set(content)):  # left over from an attempt that was killed here
            self.remove(f"{folder}/{name}")
        self._copy({source: f"{folder}/{name}" for name, source in content.items()})
        lease.check(self, f"{LOCKS}/{folder.rpartition('/')[2]}")
        return self.create(f"{folder}/{last[0]}", last[1])

    def _copy(self, names: Mapping[str, str]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for job in [pool.submit(self._copy_one, source, target) for source, target in names.items()]:
                job.result()

    def _copy_one(self, source: str, target: str) -> None:
        client = self._client()
        stat = self.stat(source)
        if stat is None:
            raise FileNotFoundError(f"{self.uri}/{source}")
        if stat.bytes <= COPIED:
            self._request(source, lambda: obstore.copy(client, source, target))
            return

        def through() -> None:
            whole = obstore.get(client, source)
            about = {SUMS: whole.attributes.get(SUMS, "")}
            piece = max(MULTIPART, -(-stat.bytes // 9_000))
            obstore.put(client, target, whole.stream(piece), attributes=about, chunk_size=piece, max_concurrency=4)

        self._request(source, through, written=True)

    def lease(self, name: str, *, wait: bool = True) -> AbstractContextManager[bool]:
        return lease.lease(self, f"{LOCKS}/{name}", self.term, wait=wait)

    def is_held(self, name: str) -> bool:
        return lease.is_held(self, f"{LOCKS}/{name}", self.term)

    def sql(self, connection: duckdb.DuckDBPyConnection) -> str:
        connection.register_filesystem(StoreFileSystem(self))
        return f"{StoreFileSystem.protocol}://"

    def local(self, name: str) -> Path:
        own = self.stat(name)
        stats = {name: own} if own is not None else {f"{name}/{inside}": stat for inside, stat in self.stats(name).items()}
        versions = {one: stat.version for one, stat in stats.items() if not one.endswith("/.checked")}
        self._cache().have(versions, self._fetch)
        return self._cache().path(name)

    def _fetch(self, name: str, path: Path) -> None:
        with self.open(name) as source, path.open("wb") as out:
            while data := source.read(blocks.LARGEST):
                out.write(data)

    def scratch(self, name: str) -> Path:
        return self._cache().scratch(name)

    def free(self) -> int | None:
        return None

    def _cache(self) -> cache.Cache:
        place = f"{os.environ.get('AWS_ENDPOINT_URL', '')} {self.uri}"
        return cache.Cache(cache.folder() / hashlib.sha256(place.encode()).hexdigest()[:16])


@lru_cache(maxsize=100_000)
def _size(files: S3Files, name: str) -> int:
    """Return the size of a file, cached because committed files never change; raise FileNotFoundError if it is missing."""
    stat = files.stat(name)
    if stat is None:
        raise FileNotFoundError(f"{files.uri}/{name}")
    return stat.bytes


def _stat(meta: ObjectMeta) -> Stat:
    return Stat(meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp())


class StoreFileSystem(AbstractFileSystem):
    """A file system of a store's files as `puna://NAME`, for DuckDB. Committed files do not change, so DuckDB may cache them."""

    protocol = "puna"
    cachable = False

    def __init__(self, files: Files) -> None:
        super().__init__()
        self._files = files

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        stat = self._files.stat(name)
        if stat is None:
            raise FileNotFoundError(path)
        return {"name": name, "size": stat.bytes, "type": "file"}

    def modified(self, path: str) -> datetime:
        """Return 1970-01-01 for every file, because committed files do not change."""
        return datetime.fromtimestamp(0, UTC)

    def glob(self, path: str, **_: Any) -> list[str]:
        return [path] if self.exists(path) else []

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> Any:
        return self._files.open(self._strip_protocol(path))
