"""Which requests Puna's pages and Prefect's API refuse: those of other sites' pages, and names that may mean another machine."""

from __future__ import annotations

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from puna.flows.guard import OwnSite

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
    ("GET", {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}, 200),  # a link; nothing lets its page read the answer
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
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/events", headers={"host": "127.0.0.1:4200", "origin": "http://evil.example"}):
        pass


def test_with_a_password_any_name_is_served() -> None:
    assert answer("GET", {"host": "train.example:4200"}, protected=True) == 200
    assert answer("POST", {"host": "train.example:4200", "origin": "http://evil.example"}, protected=True) == 403
