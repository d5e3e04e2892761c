"""External inputs: files outside the store, named by URI."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote

from puna.storage import PunaError


@dataclass(frozen=True)
class ExternalFile:
    """A file of an external input. `name`: relative to the URI. `state`: size, modification time, ETag and so on, at the time of `digest`.
    `address` may contain a signature or a password, so show and record only `location`."""

    name: str
    address: str = field(repr=False)
    bytes: int
    digest: str
    state: str

    def open(self) -> BinaryIO:
        try:
            system, path = _located(self.address)
            handle: BinaryIO = system.open(path, "rb")
        except Exception as error:
            if self.location == self.address:
                raise
            raise PunaError(f"input {self.location}: cannot be opened ({without_secrets(str(error), self.address)})") from None
        return handle

    def local(self) -> Path | None:
        from fsspec.implementations.local import LocalFileSystem

        system, path = _located(self.address)
        return Path(path) if isinstance(system, LocalFileSystem) else None

    @property
    def location(self) -> str:
        return public(self.address)

    def has_changed(self) -> bool:
        system, path = _located(self.address)
        system.invalidate_cache()
        return not system.exists(path) or _state(system.info(path)) != self.state


@dataclass(frozen=True)
class External:
    """A named set of files at a URI, identified by their names and contents; a whole hub repository is identified by its commit."""

    name: str
    uri: str
    files: tuple[ExternalFile, ...]
    data_digest: str

    @staticmethod
    def of(sent: dict[str, Any]) -> External:
        """Return the external input that `dataclasses.asdict` turned into `sent`."""
        return External(**{**sent, "files": tuple(ExternalFile(**file) for file in sent["files"])})

    def check_unchanged(self) -> None:
        for file in self.files:
            if file.has_changed():
                raise PunaError(f"input {self.name}: {file.location} was changed or removed while it was read; run again when it is stable")

    @classmethod
    def resolve(cls, text: str) -> list[External]:
        """Return the inputs that `[NAME=]URI` stands for: a file, or a folder with everything below it.

        Without a name, a flat folder of only archives (WARC, WET, Parquet, JSONL) gives one input per file, named after the file.
        Any other URI gives one input, named after its last part. `hf://datasets/OWNER/NAME[@REVISION]` is a whole data set and
        `hf://OWNER/NAME[@REVISION]` a model, both resolved to a commit; with a path, they give files. Raise PunaError for a bad URI."""
        name, _, uri = text.partition("=") if is_named(text) else ("", "", text)
        if not uri:
            raise PunaError(f"input {text!r} names no file or folder; write [NAME=]URI")
        if uri.startswith("hf://"):
            kind = "dataset" if uri.startswith("hf://datasets/") else "model"
            inside = uri.removeprefix("hf://").removeprefix("datasets/").strip("/").split("/")
            if len(inside) < 2 or not all(inside):
                raise PunaError(f"input {uri}: write hf://datasets/OWNER/NAME, or hf://OWNER/NAME for a model; /FOLDER for a part")
            if len(inside) == 2:
                return [_hub(name, "/".join(inside), kind)]
        files, uri = list(_files(uri)), public(uri)
        single = len(files) == 1 and files[0].name == PurePosixPath(uri).name
        archives = all(f.name.lower().endswith(ARCHIVES) for f in files)
        if not name and not single and archives and not any("/" in f.name for f in files):
            return [external(_stem(f.name), uri, (f,)) for f in files]
        return [external(name or _stem(PurePosixPath(uri.rstrip("/")).name), uri, tuple(files))]


def public(uri: str) -> str:
    """Return a URI without credentials: without user, password, query (such as a presigned signature) and fragment."""
    parts = []
    for part in uri.split("::"):
        if "://" in part:
            scheme, rest = part.split("://", 1)
            host, slash, path = rest.partition("/")
            path = path if scheme in ("file", "local") else path.partition("?")[0].partition("#")[0]
            host = host if slash else host.partition("?")[0].partition("#")[0]
            part = f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
        parts.append(part)
    return "::".join(parts)


def without_secrets(text: str, uri: str) -> str:
    """Return a message without the credentials of `uri`, percent-encoded or not. Credentials shorter than 4 characters stay."""
    for form in dict.fromkeys((uri, unquote(uri))):
        text = text.replace(form, public(form))
        for part in form.split("::"):
            rest = part.partition("://")[2]
            secrets = [rest.partition("?")[2], rest.partition("/")[0].rpartition("@")[0].partition(":")[2]]
            secrets += [value.partition("=")[2] for value in secrets[0].split("&")]
            for secret in sorted((s for s in secrets if len(s) >= 4), key=len, reverse=True):
                text = text.replace(secret, "…")
    return text


ARCHIVES = (".warc", ".warc.gz", ".warc.zst", ".wet", ".wet.gz", ".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz")
ROWS = (*ARCHIVES, ".csv", ".csv.gz", ".csv.zst", ".tsv", ".tsv.gz", ".tsv.zst", ".json", ".json.zst", ".ndjson", ".ndjson.gz", ".gguf")
"""File endings that are removed when an input is named after a file."""
UNCHAINED = ("file", "local", "memory", "s3", "gs")  # not http, of which `public` could then show a signature
CHUNK_BYTES = 1 << 22


def is_named(text: str) -> bool:
    """True if a text has the form NAME=URI."""
    head, sign, _ = text.partition("=")
    return bool(sign) and head.replace("_", "").replace("-", "").isalnum()


def _stem(name: str) -> str:
    return next((name[: -len(end)] for end in sorted(ROWS, key=len, reverse=True) if name.lower().endswith(end)), name)


def external(name: str, uri: str, files: tuple[ExternalFile, ...]) -> External:
    """Return files as an external input; its digest covers their names and contents."""
    return External(name, uri, files, hashlib.sha256("".join(f"{f.name}\0{f.digest}\0" for f in files).encode()).hexdigest())


def _local(root: Path) -> list[str]:
    """Return the visible files below a path, sorted. Raise PunaError for an unreadable folder, a name that is not UTF-8, or a link to a
    folder or to a file outside the path (in the hub's cache: outside the repository)."""
    if (shown := str(root).encode(errors="backslashreplace").decode()) != str(root):
        raise PunaError(f"input {shown}: is not UTF-8; rename the file or folder")
    place = root.resolve()
    whole = place.parents[list(place.parts)[::-1].index("snapshots")] if "snapshots" in place.parts[-4:] else place
    files = []

    def on_error(error: OSError) -> None:  # otherwise the folder's files would be left out silently
        raise PunaError(f"input {root}: {error.filename} cannot be read ({error.strerror}); make it readable, or move it away") from error

    for folder, folders, names in os.walk(root, onerror=on_error) if root.is_dir() else ():
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in [*folders, *names]:
            path = Path(folder, name)
            if name.startswith("."):
                continue
            why = _refusal(path, whole, name in folders)
            if why:
                raise PunaError(f"input {root}: {str(path.relative_to(root)).encode(errors='backslashreplace').decode()} {why}")
            if name not in folders:
                files.append(str(path))
    if not root.is_dir() and (why := _refusal(root.resolve(), whole, is_folder=False)):
        raise PunaError(f"input {root}: {why}")
    return sorted(files) if root.is_dir() else [str(root)]


def _refusal(path: Path, whole: Path, is_folder: bool) -> str | None:
    try:
        path.name.encode()
    except UnicodeEncodeError:
        return "has a name that is not UTF-8; rename it"
    if path.is_symlink() and is_folder:
        return f"is a link to the folder {os.readlink(path)!r}; links to folders are not followed: give the folder, or remove the link"
    if path.is_symlink() and not path.resolve().is_relative_to(whole):
        return f"is a link to {os.readlink(path)!r}, outside the folder; give the file itself, or remove the link"
    return None if is_folder or path.is_file() else "is not a regular file (it is a pipe, socket, device or broken link); remove it"


def _located(uri: str) -> tuple[Any, str]:
    """Return the file system of a URI, and the path in it. `::` is a part of names, unless the URI chains file systems (zip, caches)."""
    import fsspec

    scheme = "file" if os.path.lexists(uri) else uri.partition("://")[0]
    mark = "\ue000" if scheme in UNCHAINED else "::"  # a character for private use, which fsspec takes for a part of a name
    system, path = fsspec.core.url_to_fs(uri.replace("::", mark))
    return system, path.replace(mark, "::")


def _files(uri: str) -> Iterator[ExternalFile]:
    from fsspec.implementations.local import LocalFileSystem

    try:
        system, root = _located(uri)
        if not system.exists(root):
            raise PunaError(f"input {public(uri)}: no such file or folder")
        if isinstance(system, LocalFileSystem):
            addresses = _local(Path(root))
        else:
            addresses = [root] if system.isfile(root) else sorted(system.find(root))
    except PunaError:
        raise
    except Exception as error:  # noqa: BLE001 - every file system of fsspec has errors of its own: credentials, hosts, protocols
        message = without_secrets(str(error).strip(), uri) or type(error).__name__
        # `from None`: the original error's text may contain a signature, which a traceback would show.
        raise PunaError(f"input {public(uri)}: cannot be accessed ({message}); give a path or another URI") from None
    addresses = [a for a in addresses if not any(p.startswith(".") for p in PurePosixPath(a[len(root) :]).parts)]
    if not addresses:
        raise PunaError(f"input {public(uri)}: the folder is empty")
    names = [address[len(root) :].lstrip("/") or PurePosixPath(public(address)).name for address in addresses]
    # Threads help: hashing releases the GIL, and remote file systems mostly wait.
    with ThreadPoolExecutor() as pool:
        try:
            for name, address, facts in zip(names, addresses, pool.map(_digest, addresses, repeat(system)), strict=True):
                yield ExternalFile(name, system.unstrip_protocol(address), *facts)
        except OSError as error:
            message = without_secrets(str(error), uri)
            raise PunaError(f"input {public(uri)}: a file cannot be read ({message}); make it readable, or move it away") from None


def _digest(address: str, system: Any) -> tuple[int, str, str]:
    """Return a file's size in bytes, its SHA-256, and its state (see `ExternalFile`)."""
    # The state is taken before the first read, so that a write during reading counts as a change.
    version = _state(system.info(address))
    state, size = hashlib.sha256(), 0
    with system.open(address, "rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            state.update(chunk)
            size += len(chunk)
    return size, state.hexdigest(), version


def _state(info: dict[str, Any]) -> str:
    return str([info.get(name) for name in ("size", "mtime", "ETag", "etag", "LastModified", "last_modified", "generation", "updated")])


def _hub(name: str, place: str, kind: str) -> External:
    """Return a data set or model of the Hugging Face hub, `OWNER/NAME[@REVISION]`. Its commit identifies it; it is downloaded when used."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    repository, _, revision = place.partition("@")
    what = "data set" if kind == "dataset" else kind
    ask = HfApi().dataset_info if kind == "dataset" else HfApi().model_info
    try:
        commit = ask(repository, revision=revision or None).sha
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PunaError(f"input {place}: the hub has no {what} {repository} that can be read ({reason})") from error
    # The address contains the commit, so that later reads get the content that was identified.
    address = f"{repository}@{commit}"
    prefix = "hf://datasets/" if kind == "dataset" else "hf://"
    return External(name or repository.rpartition("/")[2], f"{prefix}{address}", (), hashlib.sha256(address.encode()).hexdigest())
