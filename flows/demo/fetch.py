"""Pinned packages from pip's configured index, checked by digest and read as data: none of their code runs."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import functools
import hashlib
import html
import os
import re
import ssl
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import url2pathname

from puna.flows.demo.packages import Package
from puna.flows.demo.warc import Member
from puna.stages.contract.external import public
from puna.storage import PunaError

if TYPE_CHECKING:
    import httpx

ATTEMPTS = 3
CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30
HREF = re.compile(r"""<a\b[^>]*?\bhref\s*=\s*["']([^"'#]+)""", re.IGNORECASE)

Received = Callable[[int], None]


def default_cache() -> Path:
    """Return the user's cache folder for downloaded packages."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "puna" / "packages"


def cached_path(cache: Path, package: Package) -> Path:
    """Return the path of a package's verified file in the cache."""
    return cache / f"{package.sha256[:16]}-{package.filename}"


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder within the context; create a missing folder. Raise PunaError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / ".lock").open("w")
    except OSError as error:
        raise PunaError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def fetch(package: Package, cache: Path, received: Received) -> Path:
    """Return the verified file of a package, from the cache or from the first index or folder that provides it.

    `received` is called with the number of bytes downloaded so far. Raise PunaError if no index or folder has the pinned file."""
    import httpx

    path, failures = cached_path(cache, package), []
    if path.is_file() and path.stat().st_size == package.size and file_sha256(path) == package.sha256:
        received(package.size)
        return path
    settings = pip_settings()
    for place in pages(settings, package.project):
        try:
            addresses = [url for url in links(place, settings) if unquote(urlsplit(url).path).rsplit("/", 1)[-1] == package.filename]
            for url in addresses[:1]:
                _download(url, package, path, settings, received)
                return path
            failures.append(f"{public(place)}: does not offer this file")
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            failures.append(f"{public(place)}: {public(str(error)) or type(error).__name__}")
    lines = [
        f"puna demo-pages needs {package.filename} ({package.name}), which no configured index provides:",
        *(f"  {failure}" for failure in failures),
        "What to do: check the connection and pip's settings (pip config list); add an index or a folder that has the file",
        "(pip config set global.extra-index-url URL, PIP_FIND_LINKS=FOLDER);",
        f"or put the file there by hand as {path}; its sha256 must be {package.sha256}.",
    ]
    raise PunaError("\n".join(lines))


def pip_settings() -> dict[str, str]:
    """Return the settings that `pip download` uses, including its default index."""
    values: dict[str, str] = {}
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, "download": {}, ":env:": {}}  # later sections override earlier ones
    for section, name, value in re.findall(r"(?m)^(:env:|[\w-]+)\.([\w-]+)=(.*)$", _pip("config", "list")):
        if section in sections:
            sections[section][name.replace("_", "-")] = str(ast.literal_eval(value))
    for section_values in sections.values():
        values |= {name: value for name, value in section_values.items() if value}
    if "index-url" not in values:
        default = re.search(r"--index-url.*?\(default\s+(\S+?)\)", _pip("download", "--help"), re.DOTALL)
        values |= {"index-url": default[1]} if default else {}
    return values


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if ran.returncode:
        output = (ran.stderr + ran.stdout).strip() or str(ran.returncode)
        raise PunaError(f"{' '.join(command)} failed: {output}. The sample comes from the index that pip is configured for")
    return ran.stdout


def pages(settings: dict[str, str], project: str) -> list[str]:
    """Return the folders and index pages that may list a project's files, according to pip's settings."""
    result = settings.get("find-links", "").split()
    if settings.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        indexes = [settings.get("index-url", ""), *settings.get("extra-index-url", "").split()]
        normal = re.sub(r"[-_.]+", "-", project).lower()
        result += [f"{index.rstrip('/')}/{normal}/" for index in indexes if index]
    return result


def links(place: str, settings: dict[str, str]) -> list[str]:
    """Return the URLs of the files in a folder, or of the links on an index page."""
    local = local_path(place)
    if local is not None and local.is_dir() and not (local / "index.html").is_file():
        return [file.as_uri() for file in sorted(local.iterdir())]
    if local is not None:
        local = local / "index.html" if local.is_dir() else local
        base, text = local.resolve().as_uri(), local.read_text(encoding="utf-8")
    else:
        with _client(settings, place) as client:
            answer = client.get(place, headers={"Accept": "text/html"}).raise_for_status()
            base, text = str(answer.url), answer.text
    return [urljoin(base, html.unescape(address)) for address in HREF.findall(text)]


def local_path(address: str) -> Path | None:
    """Return the local path of a file URL or a plain path; None for any other URL."""
    if urlsplit(address).scheme == "file":
        return Path(url2pathname(urlsplit(address).path))
    return None if "://" in address else Path(address).expanduser().absolute()


def _client(settings: dict[str, str], address: str) -> httpx.Client:
    """Return a client with pip's proxy, certificates and trusted hosts."""
    import httpx

    trusted = urlsplit(address).hostname in {name.rsplit(":", 1)[0] for name in settings.get("trusted-host", "").split()}
    verify = ssl.create_default_context(cafile=settings["cert"]) if "cert" in settings else True
    return httpx.Client(verify=False if trusted else verify, proxy=settings.get("proxy"), follow_redirects=True, timeout=TIMEOUT_SECONDS)


def _download(url: str, package: Package, path: Path, settings: dict[str, str], received: Received) -> None:
    """Download a URL, or copy a local file, to `path`, which appears only when complete. Raise ValueError if it is not the pinned file."""
    import httpx

    partial, local = path.with_name(f".{path.name}.partial"), local_path(url)
    for attempt in range(ATTEMPTS):
        try:
            with contextlib.ExitStack() as stack:
                out = stack.enter_context(partial.open("wb"))
                if local is not None:
                    chunks = iter(functools.partial(stack.enter_context(local.open("rb")).read, CHUNK_BYTES), b"")
                else:
                    client = stack.enter_context(_client(settings, url))
                    chunks = stack.enter_context(client.stream("GET", url)).raise_for_status().iter_bytes(CHUNK_BYTES)
                for chunk in chunks:
                    out.write(chunk)
                    if out.tell() > package.size:
                        raise ValueError(f"sends more than the pinned {package.size:,} bytes")
                    received(out.tell())
            if (digest := file_sha256(partial)) != package.sha256:
                raise ValueError(f"what came has sha256 {digest}, pinned is {package.sha256}; it was discarded")
            os.replace(partial, path)
            return
        except (OSError, httpx.TransportError):
            if attempt + 1 == ATTEMPTS or local is not None:
                raise
        finally:
            partial.unlink(missing_ok=True)


def read_archive(archive: Path, wanted: Callable[[str], bool]) -> list[Member]:
    """Return the files of an sdist or wheel whose path is wanted, sorted by path. An sdist's paths leave out its top folder.

    The unpacked size needs no limit, since the archive's digest is pinned.
    """
    members = []
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            members = [
                Member(i.filename, datetime(*i.date_time, tzinfo=UTC), wheel.read(i)) for i in wheel.infolist() if wanted(i.filename)
            ]
    else:
        with tarfile.open(archive, "r:gz") as sdist:
            for info in sdist:
                path, content = info.name.partition("/")[2], sdist.extractfile(info) if info.isreg() else None
                if content is not None and wanted(path):
                    members.append(Member(path, datetime.fromtimestamp(int(info.mtime), UTC), content.read()))
    return sorted(members, key=lambda member: member.path)
