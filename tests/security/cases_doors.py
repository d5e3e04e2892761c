"""Hostile requests to Puna's servers, drawn from a seed, and a count of those that did harm.

Each request is written to a socket byte by byte, so that no client library corrects a bad header.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import uvicorn
from starlette.types import ASGIApp

SECONDS = 20.0
"""Maximum seconds until an answer."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND")
WEB = (
    "/", "/puna/", "/puna/artifacts", "/puna/artifacts/compare", "/puna/artifact/documents/0123456789ab", "/puna/compare", "/puna/documents",
    "/puna/document/0123", "/puna/near", "/puna/sql", "/puna/rules", "/puna/rules/outcome", "/puna/run/one", "/puna/run/one/stop",
    "/puna/run/one/again", "/puna/run/one/funnel", "/puna/report/one", "/puna/start", "/puna/start/prompts", "/puna/start/curate/plan",
    "/puna/plan/curate", "/puna/started/one", "/puna/form/curate", "/puna/deployment/curate", "/puna/judge/0123/", "/puna/judge/0123/judge",
    "/puna/rounds", "/puna/rounds/next", "/puna/rounds/0123", "/puna/chat", "/puna/chat/say", "/puna/static/web.js",
)  # fmt: skip
API = ("/v1/models", "/v1/models/other", "/v1/completions", "/v1/chat/completions", "/metrics")
ANNOTATE = ("/", "/pair", "/judge", "/save")
BAD_HOSTS = (
    "evil.example", "evil.example:{port}", "evil.example@127.0.0.1", "evil.example@127.0.0.1:{port}", "127.0.0.1@evil.example",
    "127.0.0.1%00.evil.example", "%00", "[::1", "::1]", "[::1]evil.example", "[]", "[:::]", "127.0.0.1:port", "127.0.0.1:{port}:{port}",
    "127.0.0.1:-1", "127.0.0.1:999999", "127.0.0.1:{port}/evil.example", "127.0.0.1 evil.example", "localhost.evil.example", "", ".", ":80",
    "http://127.0.0.1:{port}", "127.0.0.1#@evil.example", "127.0.0.1\\@evil.example", "127.0.0.1,evil.example", "\xff\xfe", "a" * 5000,
)  # fmt: skip
SITES = (
    {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"}, {"origin": "http://[::1"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document", "origin": "http://evil.example"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
    {"sec-fetch-site": "cross-site"}, {"referer": "http://evil.example/"}, {"referer": "http://127.0.0.1@evil.example/"},
)  # fmt: skip
QUERIES = (
    "q=select+count(*)+from+range(100000000000)", "q=select+*+from+read_text('/etc/passwd')", "inputs={trap}", "inputs=simplecache::{trap}",
    "inputs=zip://x::{trap}", "inputs=a=filecache::{trap}", "q=%00", "q=%ff%fe", "start=-1", "start=99999999999999999999999", "older=x",
    "run=one&run=two", "artifact=../../../etc/passwd", "a=b&" * 3000, "recipe=../../etc/passwd", "recipe={trap}", "model=%ed%a0%80",
)  # fmt: skip
TRAVERSALS = (
    "/../../../etc/passwd", "/puna/static/..%2f..%2fapp.py", "/puna/static/%2e%2e/app.py", "/puna/run/..%2f..%2f..%2fetc%2fpasswd",
    "/puna/run/%00", "/puna/report/..%00", "/puna/artifact/documents/..%2f..", "/puna/started/..%2fadmin%2fversion", "/puna/judge/%00/",
    "/puna/judge/..%2f..%2f/", "/puna/%ff%fe", "/puna/document/%f0%28%8c%28", "//evil.example/", "/puna/deployment/..%2f..%2f..", "*",
    "http://evil.example/puna/", "/puna/" + "a/" * 2000, "/puna/start/%c0%ae%c0%ae%2f", "/v1/models/..%2f..%2fetc", "/v1/models/%00",
)  # fmt: skip
BODIES = (
    b"", b"\xff\xfe\x00", b"{", b"[]", b"null", b'"\\ud800"', b'{"model": "\\ud800", "messages": [{"content": "\\ud800"}]}', b"[" * 100_000,
    b'{"a":' * 50_000, b"text=%ff%fe&artifact=%00", b"text=%00&artifact=documents", b"a=b&" * 50_000, b"q=select+1", b"token=%ff&q=select+1",
    *(b'{"messages": [{"role": "user", "content": "a", "x": %b}], "tools": [{"x": %b}]}' % (b"[" * n + b"]" * n, b"[]") for n in (300, 900)),
    *(b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "tools": [{"x": %b}]}' % (b'{"a":' * n + b"1" + b"}" * n) for n in (300, 900)),
    b"inputs={trap}", b"recipe=demo&once=1", b'{"prompt": "\\u0000", "max_tokens": 1e999}', b'{"pair": "\\ud800", "by": "\\ud800"}',
)  # fmt: skip


@dataclass(frozen=True)
class Hostile:
    """A request as bytes, and its kind of hostility. `body`: parts that are sent one by one; the server may close the connection in
    between."""

    kind: str
    head: bytes
    body: tuple[bytes, ...] = ()

    @property
    def line(self) -> str:
        """Return the first line of the request."""
        return self.head.partition(b"\r\n")[0][:200].decode("latin-1")


@dataclass
class Harm:
    """Harm done by hostile requests, by kind. `requests`: number of requests sent; `examples`: some that did harm."""

    requests: int = 0
    failures: int = 0
    """Number of answers with a status of 500 or more."""
    crossed: int = 0
    """Number of answered requests from other sites, except links to pages that only read."""
    effects: int = 0
    """Number of changes of the store, and of fetches of an address that a request named."""
    dead: int = 0
    """Number of times that the server no longer answered."""
    statuses: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Return the total harm."""
        return self.failures + self.crossed + self.effects + self.dead


def hostile_requests(
    seed: int, count: int, port: int, paths: Sequence[str] = WEB, trap: str = "http://127.0.0.1:9/trap", limit: int = 2 << 20
) -> Iterator[Hostile]:
    """Yield requests: first every method and path from another site, then a random mixture.

    `trap`: an address that must not be fetched; `limit`: maximum bytes of a body that the server accepts.
    """
    draw = random.Random(seed)
    here = f"127.0.0.1:{port}"
    crossing = [(method, path) for path in paths for method in METHODS]
    for number in range(count):
        if number < len(crossing):
            method, path = crossing[number]
            yield _crossing(draw, method, path, here, trap)
            continue
        kind = draw.choice(("host", "crossing", "query", "traversal", "body", "body", "huge", "headers"))
        method, path = draw.choice(METHODS), draw.choice(paths)
        if kind == "host":
            host = draw.choice(BAD_HOSTS).replace("{port}", str(port))
            yield Hostile(kind, _head(method, path, {"host": host}))
        elif kind == "crossing":
            yield _crossing(draw, method, path, here, trap)
        elif kind == "query":
            query = draw.choice(QUERIES).replace("{trap}", trap)
            yield Hostile(kind, _head(draw.choice(("GET", "POST")), f"{path}?{query}", {"host": here}))
        elif kind == "traversal":
            yield Hostile(kind, _head(method, draw.choice(TRAVERSALS), {"host": here}))
        elif kind == "body":
            body = draw.choice(BODIES).replace(b"{trap}", trap.encode())
            type_ = draw.choice(("application/json", "application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"))
            yield Hostile(kind, _head("POST", path, {"host": here, "content-type": type_, "content-length": str(len(body))}), (body,))
        elif kind == "huge":
            yield _huge(draw, path, here, limit)
        else:
            yield Hostile(kind, _odd(draw, method, path, here))


def _crossing(draw: random.Random, method: str, path: str, here: str, trap: str) -> Hostile:
    query = draw.choice(("", "", "?" + draw.choice(QUERIES).replace("{trap}", trap)))
    body = b"" if method in ("GET", "HEAD", "OPTIONS") else b"q=select+1&once=1"
    length = {"content-length": str(len(body)), "content-type": "application/x-www-form-urlencoded"} if body else {}
    return Hostile("crossing", _head(method, path + query, {"host": here, **draw.choice(SITES), **length}), (body,) if body else ())


def _huge(draw: random.Random, path: str, here: str, limit: int) -> Hostile:
    """Return a request with a body longer than the limit, with a declared length or in chunks."""
    if draw.random() < 0.5:
        return Hostile(
            "huge", _head("POST", path, {"host": here, "content-length": str(draw.choice((limit + 1, 1 << 40)))}), (b"x" * 1000,)
        )
    piece = b"x" * (1 << 16)
    chunk = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    return Hostile("huge", _head("POST", path, {"host": here, "transfer-encoding": "chunked"}), (chunk,) * (limit // len(piece) + 2))


def _odd(draw: random.Random, method: str, path: str, here: str) -> bytes:
    """Return a request with headers that no client sends."""
    return draw.choice((
        _head(method, path, {}),
        _head(method, path, {"host": here}) .replace(b"\r\n\r\n", b"\r\nHost: evil.example\r\n\r\n"),
        _head(method, path, {"host": here, "authorization": "Basic \xff\xfe"}),
        _head(method, path, {"host": here, "authorization": "Basic !!!"}),
        _head(method, path, {"host": here, "authorization": "Bearer \xff"}),
        _head(method, path, {"host": here, "content-length": "-1"}),
        _head(method, path, {"host": here, "content-length": "1e3"}),
        _head(method, path, {"host": here, "transfer-encoding": "gzip, chunked"}),
        _head(method, path, {"host": here, "cookie": "x" * 40_000}),
        _head(method, path, {"host": here, "x": "\x00"}),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET " + b"/" * 70_000,
    ))  # fmt: skip


def _head(method: str, target: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "connection: close"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def status_of(port: int, request: Hostile, seconds: float = SECONDS) -> int | None:
    """Send a request and return the answer's status; None if the server closes without an answer."""
    with socket.create_connection(("127.0.0.1", port), seconds) as door:
        with contextlib.suppress(OSError):  # the server may close before it has read everything
            door.sendall(request.head)
            for part in request.body:
                door.sendall(part)
        if not request.head.endswith(b"\r\n\r\n"):
            with contextlib.suppress(OSError):
                door.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            found = re.match(rb"HTTP/1\.\d (\d{3})", door.recv(1 << 12))
            return int(found[1]) if found else None
    return None


def healthy(port: int, path: str) -> bool:
    """True if the server answers on its health page."""
    with contextlib.suppress(OSError):
        return status_of(port, Hostile("health", _head("GET", path, {"host": f"127.0.0.1:{port}"}))) == 200
    return False


def harm_done(
    port: int, requests: Iterator[Hostile], *, health: str, effects: Callable[[], object], linked: Callable[[str], bool] = lambda _: True
) -> Harm:
    """Send the requests and count what they did.

    `health`: path of the health page; `effects`: returns a value that must stay the same; `linked`: True for a path that other sites may
    link to.
    """
    harm, before = Harm(), effects()
    for request in requests:
        harm.requests += 1
        try:
            status = status_of(port, request)
        except OSError:
            status = None
        harm.statuses[f"{request.kind} {status}"] += 1
        bad = ""
        if status is not None and status >= 500 and status != 501:
            harm.failures, bad = harm.failures + 1, "failure"
        elif request.kind == "crossing" and status is not None and status < 400 and not _followed(request, linked):
            harm.crossed, bad = harm.crossed + 1, "crossed"
        if status is None and not healthy(port, health):
            harm.dead, bad = harm.dead + 1, "dead"
        if (now := effects()) != before:
            harm.effects, bad, before = harm.effects + 1, "effect", now
        if bad and len(harm.examples) < 30:
            harm.examples.append(
                f"{bad} {status} {request.kind}: {request.line} {json.dumps((request.body[:1] or (b'',))[0][:60].decode('latin-1'))}"
            )
    harm.dead += not healthy(port, health)
    return harm


def _followed(request: Hostile, linked: Callable[[str], bool]) -> bool:
    """True if a browser sends such a request when a user follows a link."""
    link = b"sec-fetch-mode: navigate" in request.head and b"sec-fetch-dest: document" in request.head and b"origin:" not in request.head
    return link and request.head.startswith(b"GET ") and linked(request.line.split(" ")[1])


@contextlib.contextmanager
def serving(app: ASGIApp, config: uvicorn.Config | None = None) -> Iterator[int]:
    """Serve an application on a port of this machine, in a thread."""
    server = uvicorn.Server(config or uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)


@contextlib.contextmanager
def trapped() -> Iterator[tuple[str, list[bytes]]]:
    """Listen at an address that must not be fetched: yield its URL, and the received requests."""
    fetched: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        stop = threading.Event()

        def listen() -> None:
            while not stop.is_set():
                with contextlib.suppress(TimeoutError), listening.accept()[0] as door:
                    fetched.append(door.recv(1000))
                    door.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/trap", fetched
        finally:
            stop.set()
            thread.join()
