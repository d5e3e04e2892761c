"""Requests that Puna's pages and Prefect's API refuse: those from other sites' pages, and those to host names that may be another
machine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect
from typer.testing import CliRunner

from puna.flows.cli.main import app as cli
from puna.flows.server.guard import Bounded, OwnSite, Password
from puna.storage import PunaError, Store

HERE = "http://127.0.0.1:4200"


def answer(method: str, headers: dict[str, str], *, protected: bool = False) -> int:
    app = FastAPI()
    app.add_api_route("/", lambda: "done", methods=["GET", "POST"])
    return TestClient(OwnSite(app, protected=protected), base_url=HERE).request(method, "/", headers=headers).status_code


@pytest.mark.parametrize(("method", "headers", "status"), [
    ("POST", {}, 200),  # a program
    ("POST", {"origin": HERE, "sec-fetch-site": "same-origin"}, 200),
    ("POST", {"origin": "http://evil.example"}, 403),
    ("POST", {"origin": "null"}, 403),
    ("POST", {"origin": "http://127.0.0.1:9999"}, 403),  # another server of this machine
    ("POST", {"sec-fetch-site": "cross-site"}, 403),
    ("GET", {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}, 403),
    ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, 403),
    ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
    ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 200),  # a link on another site
    ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 403),
    ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}, 403),
    ("GET", {"sec-fetch-site": "none"}, 200),  # an address typed into the browser
    ("GET", {"referer": "http://evil.example/page"}, 403),  # a browser that sends no Sec-Fetch headers
    ("GET", {"referer": f"{HERE}/puna/"}, 200),
    ("GET", {"host": "evil.example@127.0.0.1"}, 400),
    ("GET", {"host": "127.0.0.1%00.evil.example"}, 400),
    ("GET", {"host": "[::1"}, 400),
    ("GET", {"host": "127.0.0.1:4200:80"}, 400),
    ("GET", {"host": "127.0.0.1:99999"}, 400),
    ("GET", {"host": ""}, 400),
    ("POST", {"origin": "http://[::1"}, 403),
    ("GET", {"host": "evil.example:4200"}, 403),
    ("POST", {"host": "evil.example:4200", "origin": "http://evil.example:4200", "sec-fetch-site": "same-origin"}, 403),
    ("GET", {"host": "localhost:4200"}, 200),
    ("GET", {"host": "[::1]:4200"}, 200),
])  # fmt: skip
def test_only_programs_and_own_pages_may_ask(method: str, headers: dict[str, str], status: int) -> None:
    assert answer(method, headers) == status


def test_a_socket_is_refused_to_pages_of_other_sites() -> None:
    app = FastAPI()

    @app.websocket("/events")
    async def events(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("event")

    client = TestClient(OwnSite(app, protected=False), base_url=HERE)
    for headers in ({}, {"origin": HERE}):
        with client.websocket_connect("/events", headers={"host": "127.0.0.1:4200", **headers}) as socket:
            assert socket.receive_text() == "event"
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/events", headers={"host": "127.0.0.1:4200", "origin": "http://evil.example"}),
    ):
        pass


def test_with_a_password_any_name_is_served() -> None:
    assert answer("GET", {"host": "train.example:4200"}, protected=True) == 200
    assert answer("POST", {"host": "train.example:4200", "origin": "http://evil.example"}, protected=True) == 403


@pytest.mark.parametrize(
    ("path", "status"), [("/puna/sql?q=select+1", 200), ("/puna/plan/curate", 403), ("/puna/documents?q=the", 403), ("/api/health", 403)]
)
def test_another_site_links_to_pages_that_do_no_work_alone(path: str, status: int) -> None:
    async def found(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("found")(scope, receive, send)

    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    client = TestClient(OwnSite(found, protected=False), base_url=HERE)
    assert client.get(path, headers=headers).status_code == status
    assert client.get(path, headers={"sec-fetch-site": "same-origin"}).status_code == 200
    silent = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64) Firefox/140.0"}  # no Sec-Fetch headers over plain HTTP, and a page may hide its address
    assert client.get(path, headers=silent).status_code == status
    assert client.get(path, headers={**silent, "referer": f"{HERE}/puna/"}).status_code == 200
    assert client.post(path, headers=silent).status_code == 403


@pytest.mark.parametrize("length", [True, False])
def test_a_body_is_counted_as_it_arrives(length: bool) -> None:
    read: list[int] = []

    async def takes(scope: Scope, receive: Receive, send: Send) -> None:
        read.append(len((await receive())["body"]))
        await PlainTextResponse("taken")(scope, receive, send)

    client = TestClient(Bounded(takes, 1000), base_url=HERE)

    def body(size: int) -> bytes | Iterator[bytes]:
        return b"x" * size if length else (b"x" * 100 for _ in range(size // 100))

    assert client.post("/", content=body(1000)).status_code == 200
    assert client.post("/", content=body(1100)).status_code == 413
    assert client.request("GET", "/", content=body(5000)).status_code == 413
    assert read == [1000]


@pytest.mark.parametrize("command", ["up", "web", "api", "annotate"])
def test_no_server_starts_for_other_machines_without_a_password_or_key(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PUNA_API_KEY", raising=False)
    monkeypatch.delenv("PUNA_AUTH", raising=False)
    store = Store.open(tmp_path / "store").uri
    words = {"api": ["model@latest"], "annotate": ["answers@latest"]}.get(command, [])
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        made = CliRunner().invoke(cli, [command, *words, "--host", host, "--port", "0", "--store", store])
        assert isinstance(made.exception, PunaError)
        said = str(made.exception)
        assert f"--host {host}: other machines reach this address" in said and ("--auth" in said or "--key" in said) and "\n" not in said


def test_a_password_is_asked_for_by_the_page_of_judgements() -> None:
    app = FastAPI()
    app.add_api_route("/", lambda: "page")
    client = TestClient(Password(app, "me:secret"))
    assert client.get("/").status_code == 401
    assert client.get("/", auth=("me", "wrong")).status_code == 401
    assert client.get("/", headers={"authorization": "Basic ÿ".encode("latin-1")}).status_code == 401
    assert client.get("/", auth=("me", "secret")).status_code == 200
