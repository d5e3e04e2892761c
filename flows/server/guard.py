"""Checks of each request to Puna's servers: the host, the site that sent it, the password and the body."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import socket
from base64 import b64decode
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import uvicorn
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from puna.flows.server.client import loopback
from puna.storage import PunaError

BODY_BYTES = 2 << 20  # maximum bytes of a request's body, for Puna's own pages
BODY_SECONDS = 60.0  # maximum seconds for a body to arrive
HEADER_SECONDS = 30.0  # maximum seconds that a connection stays open without a request
HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)(?::(?P<port>[0-9]{1,5}))?")
PAGES = re.compile(r"/|/puna/?|/puna/(start|artifacts|rounds|sql|chat|run/[^/]+|artifact/\w+/\w+|start/[\w-]+)|/v2(/.*)?")
"""Paths to which another site may link: opening them has no side effects."""
ASKING = re.compile(r"/puna/(sql|start/[\w-]+)|/v2(/.*)?")  # paths to which another site may link with a query, which only fills in a form
OWN = ("same-origin", "none")

Refusal = Callable[[int, str], Response]


class Connection(H11Protocol):
    """An HTTP connection that is closed if no request arrives for `HEADER_SECONDS`. (h11 limits the size of headers.)"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADER_SECONDS, self._close_idle, None)

    def _close_idle(self, last: RequestResponseCycle | None) -> None:
        """Close the connection if no request followed `last`; else check again after `HEADER_SECONDS`."""
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # closed, or a websocket
            return
        if self.cycle is last and (last is None or last.response_complete):
            self.transport.close()
        else:
            self.loop.call_later(HEADER_SECONDS, self._close_idle, self.cycle)


def configuration(door: ASGIApp, seconds: int = 3) -> uvicorn.Config:
    """Return the uvicorn configuration of a server. `seconds`: time that running requests get to finish when the server stops."""
    return uvicorn.Config(door, log_level="warning", timeout_graceful_shutdown=seconds, http=Connection, ws_max_size=BODY_BYTES)


class OwnSite:
    """ASGI middleware that checks each request's host and the site whose page sent the request.

    Unless a password or key protects the server (`protected`), the host must be `localhost` or an IP address: another site could let its
    name point to this machine (DNS rebinding), so that its pages count as the server's own. `pages`: matches the paths to which other sites
    may link; `asking`: matches those to which they may link with a query."""

    def __init__(
        self, app: ASGIApp, *, protected: bool, pages: re.Pattern[str] | None = PAGES, asking: re.Pattern[str] | None = ASKING
    ) -> None:
        self._app, self._protected, self._pages, self._asking = app, protected, pages, asking

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or refuse it with 400 or 403 and the reason in one line (a websocket: close with 1008)."""
        if scope["type"] in ("http", "websocket"):
            refused = self._refusal(scope)
            if refused and scope["type"] == "http":
                await PlainTextResponse(refused[1], refused[0])(scope, receive, send)
                return
            if refused:
                await send({"type": "websocket.close", "code": 1008})
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or (name := host_name(hosts[0])) is None:
            return 400, "the header Host must be one NAME or NAME:PORT"
        if not self._protected and not _here(name):
            return 403, f"{hosts[0]}: use the printed address; to use host names, set a password or key"
        if "\0" in scope["path"] or "%00" in scope.get("query_string", b"").decode("latin-1"):
            return 400, "the URL must not contain NUL"
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        if foreign(headers, hosts[0]) and not self._is_navigation(scope, headers):
            return 403, "sent by a page of another site; open this URL from Puna's own pages"
        return None

    def _is_navigation(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        """True if the request is a navigation (typed, or a link on another site) to a page without side effects."""
        follows = _silent(headers) or (headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document")
        if scope.get("method") != "GET" or not follows or "origin" in headers or self._pages is None:
            return False
        allowed = self._asking if scope.get("query_string") else self._pages
        return allowed is not None and allowed.fullmatch(scope["path"]) is not None


def host_name(host: str) -> str | None:
    """Return the name in a Host header without port and brackets; None if the header is malformed."""
    match = HOST.fullmatch(host)
    if match is None or len(host) > 260 or int(match["port"] or 0) > 65535:
        return None
    name = match["name"].lower()
    if not name.startswith("["):
        return name
    try:
        return str(ipaddress.IPv6Address(name[1:-1]))
    except ValueError:
        return None


def foreign(headers: Mapping[str, str], host: str) -> bool:
    """True if a browser sent the request for another site's page, or no header names the page. Programs other than browsers send no such
    headers, so they are never foreign. Over plain HTTP to another machine, browsers send no Sec-Fetch headers, and the other site decides
    whether its address is sent."""
    if _silent(headers):
        return True
    site, origin, referer = (headers.get(name) for name in ("sec-fetch-site", "origin", "referer"))
    if site is not None and site not in OWN:
        return True
    if origin is not None:
        return _netloc(origin) != host.lower()
    return site is None and referer is not None and _netloc(referer) != host.lower()


def _silent(headers: Mapping[str, str]) -> bool:
    """True if a browser sent the request and no header names the page that caused it."""
    says = any(name in headers for name in ("sec-fetch-site", "origin", "referer"))
    return not says and headers.get("user-agent", "").startswith("Mozilla/")


def own_page(headers: Mapping[str, str]) -> bool:
    """True if the browser's headers state that a page of this site, or the user directly, caused the request."""
    site = headers.get("sec-fetch-site")
    if site is None:
        return "referer" in headers and not foreign(headers, headers.get("host", ""))
    return site in OWN


class Bounded:
    """ASGI middleware that limits a request's body: status 413 if the body is too long, 408 if it arrives too slowly."""

    def __init__(self, app: ASGIApp, limit: int = BODY_BYTES, refusal: Refusal | None = None) -> None:
        self._app, self._limit = app, limit
        self._refusal: Refusal = refusal or (lambda status, words: PlainTextResponse(words, status))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application once the whole body has arrived, or refuse the request."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        try:
            body = None if not length.isdigit() or int(length) > self._limit else await self._body(receive)
        except TimeoutError:
            await self._refusal(408, f"the body did not arrive in {BODY_SECONDS:.0f} s")(scope, receive, send)
            return
        if body is None:
            answer = self._refusal(413, f"the body is too long: it may have at most {self._limit} bytes")
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replay, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body; None as soon as it exceeds the limit or the client disconnects. Raise TimeoutError after `BODY_SECONDS`."""
        parts, size, more = [], 0, True
        async with asyncio.timeout(BODY_SECONDS):
            while more:
                message = await receive()
                if message["type"] != "http.request":  # the client is gone: nobody reads the answer
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > self._limit:
                    return None
                more = message.get("more_body", False)
        return b"".join(parts)


def _has_body(scope: Scope) -> bool:
    announced = {b"content-length", b"transfer-encoding"} & {name for name, _ in scope["headers"]}
    return scope["method"] not in ("GET", "HEAD", "OPTIONS") or bool(announced)


class Password:
    """ASGI middleware that requires a password (HTTP basic) if `auth` is set; websockets pass. `bodies`: only of requests with a body."""

    def __init__(self, app: ASGIApp, auth: str, bodies: bool = False) -> None:
        self._app, self._auth, self._bodies = app, auth, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or ask for user and password with 401."""
        if self._auth and scope["type"] == "http" and (_has_body(scope) or not self._bodies):
            header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            if not _knows(header, self._auth):
                asks = {"www-authenticate": 'Basic realm="Puna", charset="UTF-8"'}
                await PlainTextResponse("user and password are required", 401, asks)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _knows(header: str, auth: str) -> bool:
    kind, _, credentials = header.partition(" ")
    try:
        return kind.lower() == "basic" and secrets.compare_digest(b64decode(credentials), auth.encode())
    except ValueError:
        return False


def check_reach(host: str, secret: str | None, remedy: str) -> None:
    """Raise PunaError, which ends with `remedy`, if other machines can reach `host` and no password or key (`secret`) protects it."""
    if not loopback(host) and not secret:
        raise PunaError(f"--host {host}: other machines reach this address; {remedy}")


def check_auth(host: str, auth: str) -> None:
    """Raise PunaError if `auth` is not USER:PASSWORD, or is missing although other machines can reach the address."""
    check_reach(host, auth, "others could start runs and read the store: set --auth USER:PASSWORD too")
    if auth and ":" not in auth:
        raise PunaError("--auth: write USER:PASSWORD")


def address(host: str, listener: socket.socket) -> str:
    """Return the URL of the server that listens on `listener`; an unspecified host becomes the loopback address."""
    name = "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address. Raise PunaError if the address is not free; call this before slow work."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PunaError(f"--port {port}: {host}:{port} cannot be used ({error.strerror or error}); choose another, or 0 for any") from error
    listener.listen()
    return listener


def _here(name: str) -> bool:
    """True if a host name can only mean this machine, or is an IP address, which DNS cannot redirect."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc.lower() or None
    except ValueError:
        return None
