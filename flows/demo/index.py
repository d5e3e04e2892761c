"""A client of the user's package index that only reads: links and files, never a build step.

Where to look comes from pip's own configuration (files and PIP_* variables), so mirrors, local indexes,
proxies and certificates work as they do for ``pip install``. The protocol is the simple repository API
(PEP 503, PEP 691).
"""

import ast
import base64
import importlib
import json
import netrc
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from puna.storage import PunaError

MAX_LISTING = 64 << 20  # bytes of one index page
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True)
class Link:
    """A file that an index offers: its name, its address and the sha256 that the index gives, if any."""

    filename: str
    url: str
    sha256: str | None


@dataclass(frozen=True)
class IndexSettings:
    """What pip is configured to use; ``timeout`` in seconds. URLs may carry credentials."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    timeout: float = 15.0
    retries: int = 5


def pip_settings() -> IndexSettings:
    """Read pip's configuration as ``pip download`` sees it; raises PunaError when pip is not there."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if ran.returncode != 0:
        raise PunaError(
            f"{' '.join(command)} failed: {(ran.stderr + ran.stdout).strip() or ran.returncode}. "
            "The sample comes from the index that pip is configured for; install pip (python -m ensurepip)."
        )
    values = parse_configuration(ran.stdout)
    names = values.get("extra-index-url", "").split()
    if values.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        indexes: list[str] = []
    else:
        indexes = [values.get("index-url") or _default_index(), *names]
    return IndexSettings(
        indexes=tuple(indexes),
        find_links=tuple(values.get("find-links", "").split()),
        cert=values.get("cert"),
        client_cert=values.get("client-cert"),
        proxy=values.get("proxy"),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        timeout=_number(values, "timeout", "default-timeout", default=15.0),
        retries=int(_number(values, "retries", default=5)),
    )


def parse_configuration(listing: str) -> dict[str, str]:
    """Settings of ``pip config list``; of global, install, download and environment the later wins."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, "download": {}, ":env:": {}}
    for line in listing.splitlines():
        match = re.match(r"(:env:|[\w-]+)\.([\w-]+)=(.*)$", line.strip())
        if match is None or match[1] not in sections:
            continue
        try:
            value = ast.literal_eval(match[3])
        except (ValueError, SyntaxError) as error:
            raise PunaError(f"pip config list: cannot read the line {line!r}") from error
        sections[match[1]][match[2].replace("_", "-")] = str(value)
    return {name: value for section in sections.values() for name, value in section.items() if value}


def _number(values: dict[str, str], *names: str, default: float) -> float:
    for name in names:
        if name in values:
            try:
                return float(values[name])
            except ValueError as error:
                raise PunaError(f"pip's setting {name} is {values[name]!r}, not a number") from error
    return default


def _default_index() -> str:
    try:
        return str(importlib.import_module("pip._internal.models.index").PyPI.simple_url)
    except (ImportError, AttributeError) as error:
        raise PunaError(
            "This pip does not tell its default index. Set it: pip config set global.index-url URL"
        ) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects without handing the credentials of one host to another."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            new.remove_header("Authorization")
        return new


class IndexClient:
    """Finds and opens files of the configured indexes (https, http and file addresses)."""

    def __init__(self, settings: IndexSettings) -> None:
        self.settings = settings
        self._openers: dict[bool, urllib.request.OpenerDirector] = {}
        self._logins: dict[tuple[str, str], str] = {}
        for address in (*settings.indexes, *settings.find_links):
            if login := _login(address):
                self._logins[_origin(address)] = login

    def links(self, project: str) -> tuple[list[Link], list[str]]:
        """Files offered for a project, find-links first, and a line for each place that could not be read."""
        found: list[Link] = []
        failures: list[str] = []
        normal = re.sub(r"[-_.]+", "-", project).lower()
        places = [(place, place) for place in self.settings.find_links]
        places += [(index, f"{index.rstrip('/')}/{normal}/") for index in self.settings.indexes]
        for place, address in places:
            try:
                found.extend(self._listing(address))
            except (OSError, HTTPException, ValueError) as error:
                failures.append(f"{public_address(place)}: {reason(error)}")
        return found, failures

    def open(self, url: str, offset: int = 0) -> HTTPResponse:
        """Open an http or https address at byte ``offset``; raises OSError, HTTPException or ValueError."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"{public_address(url)} is no http, https or file address")
        address, authorization = self._authorized(url)
        headers = {"User-Agent": "puna-sample", "Accept": _ACCEPT, "Accept-Encoding": "identity"}
        if authorization:
            headers["Authorization"] = authorization
        if offset:
            headers["Range"] = f"bytes={offset}-"
        request = urllib.request.Request(address, headers=headers)
        opener = self._opener(urlsplit(address).hostname or "")
        answer: HTTPResponse = opener.open(request, timeout=self.settings.timeout)
        return answer

    def _authorized(self, url: str) -> tuple[str, str | None]:
        """An address without credentials, and the Authorization header: its own, its index's or netrc's."""
        parts = urlsplit(url)
        if login := _login(url):
            return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1])), login
        if login := self._logins.get(_origin(url)):
            return url, login
        try:
            entry = netrc.netrc().authenticators(parts.hostname or "")
        except (OSError, netrc.NetrcParseError):
            entry = None  # no netrc file, or one for other tools: as pip does, go on without
        return url, _basic(entry[0], entry[2] or "") if entry else None

    def _opener(self, host: str) -> urllib.request.OpenerDirector:
        trusted = host in {name.rsplit(":", 1)[0] for name in self.settings.trusted_hosts}
        if trusted not in self._openers:
            context = _certificates(self.settings.cert)
            if self.settings.client_cert:
                context.load_cert_chain(self.settings.client_cert)
            if trusted:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            handlers: list[urllib.request.BaseHandler] = [
                urllib.request.HTTPSHandler(context=context),
                _Redirects(),
            ]
            if proxy := self.settings.proxy:
                proxy = proxy if "://" in proxy else f"http://{proxy}"
                handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
            self._openers[trusted] = urllib.request.build_opener(*handlers)
        return self._openers[trusted]

    def _listing(self, address: str) -> Iterator[Link]:
        local = local_path(address)
        if local is not None and local.is_dir():
            page = local / "index.html"
            if not page.is_file():
                return iter([Link(file.name, file.as_uri(), None) for file in sorted(local.iterdir())])
            local = page
        if local is not None:
            return parse_html(local.read_text(encoding="utf-8"), local.resolve().as_uri())
        with self.open(address) as answer:
            body = answer.read(MAX_LISTING + 1)
            if len(body) > MAX_LISTING:
                raise ValueError(f"its page is larger than {MAX_LISTING:,} bytes")
            base = answer.geturl()
            if answer.headers.get_content_type().endswith("json"):
                return parse_json(body, base)
            return parse_html(body.decode("utf-8", "replace"), base)


def local_path(address: str) -> Path | None:
    """The path of a file address or of a plain path, None for an address on the network."""
    parts = urlsplit(address)
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path))
    return Path(address).expanduser().absolute() if "://" not in address else None


def parse_json(body: bytes, base: str) -> Iterator[Link]:
    """Links of a PEP 691 page; raises ValueError when it is none."""
    page = json.loads(body)
    if not isinstance(page, dict) or not isinstance(page.get("files"), list):
        raise ValueError("its JSON page has no list of files")
    for file in page["files"]:
        try:
            digest = file.get("hashes", {}).get("sha256")
            yield Link(str(file["filename"]), urljoin(base, str(file["url"])), digest)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its JSON page has a file without name or address ({error!r})") from error


def parse_html(body: str, base: str) -> Iterator[Link]:
    """Links of a PEP 503 page or of any page of links to files."""
    parser = _Anchors(base)
    parser.feed(body)
    parser.close()
    for url in parser.urls:
        parts = urlsplit(url)
        digest = re.search(r"(?:^|&)sha256=([0-9a-fA-F]{64})(?:&|$)", parts.fragment)
        filename = unquote(parts.path.rsplit("/", 1)[-1])
        yield Link(filename, urlunsplit(parts._replace(fragment="")), digest[1].lower() if digest else None)


class _Anchors(HTMLParser):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get("href")
        if address and tag == "base":
            self.base = urljoin(self.base, address)
        elif address and tag == "a":
            self.urls.append(urljoin(self.base, address))


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.rsplit("@", 1)[-1].lower()


def _login(url: str) -> str | None:
    """The Authorization header for the user and password in an address."""
    parts = urlsplit(url)
    if parts.username is None:
        return None
    return _basic(unquote(parts.username), unquote(parts.password or ""))


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _certificates(cert: str | None) -> ssl.SSLContext:
    """Certificates as pip chooses them: its setting, the variables it honours, the bundle it brings."""
    chosen = cert or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if chosen and Path(chosen).is_dir():
        return ssl.create_default_context(capath=chosen)
    context = ssl.create_default_context(cafile=chosen)
    if not chosen:
        try:
            context.load_verify_locations(importlib.import_module("pip._vendor.certifi").where())
        except ImportError:
            return context  # a pip without a bundle of its own uses the system's
    return context


def public_address(address: str) -> str:
    """An address without its credentials, for messages."""
    return re.sub(r"//[^/@]*@", "//", address)


def reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"answers {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"cannot be reached ({error.reason})"
    return str(error) or type(error).__name__
