"""Hostile requests to every server: none fails, changes the store, fetches an address or ends the server."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import socket
import sys
from base64 import b64encode
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.responses import RedirectResponse
from starlette.routing import Route

from puna.flows.cli.openai import Limits
from puna.flows.cli.openai import application as api_application
from puna.flows.engine import defaults, launch
from puna.flows.prefect import deployments
from puna.flows.server.guard import PAGES, Bounded, OwnSite
from puna.flows.web import application, bounded, serve
from puna.flows.web.annotate import LINKED, Desk, desk_application
from puna.models.config import ModelConfig
from puna.models.generation import Engine
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.contract import execute
from puna.stages.prompts.prompts import PromptsConfig, prompts
from puna.storage import PunaError, Store

SPEC = importlib.util.spec_from_file_location("cases_doors", Path(__file__).with_name("cases_doors.py"))
assert SPEC is not None and SPEC.loader is not None
doors = sys.modules.setdefault("cases_doors", importlib.util.module_from_spec(SPEC))
SPEC.loader.exec_module(doors)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store.open(tmp_path_factory.mktemp("doors"))
    execute(prompts, PromptsConfig(tasks=[{"task": "chain_sum"}], train=5, heldout=2), {}, made)
    return made


def files(store: Store) -> list[str]:
    """Return the store's files, except those that reading creates."""
    return sorted(str(path) for path in store.root.rglob("*") if path.name != "index.jsonl" and ".lock" not in path.name)


@pytest.fixture(scope="module")
def pages(store: Store) -> Iterator[int]:
    """Yield the port of Puna's pages as `puna web` serves them."""
    app = FastAPI(openapi_url=None)
    app.mount("/puna", application(store, prefect=None, auth=""))
    app.router.routes.insert(0, Route("/", lambda _: RedirectResponse("/puna/")))
    with doors.serving(OwnSite(Bounded(app), protected=False)) as port:
        yield port


def test_hostile_requests_do_no_harm_to_the_pages(pages: int, store: Store) -> None:
    with doors.trapped() as (trap, fetched):
        requests = doors.hostile_requests(0, 1000, pages, trap=trap)
        harm = doors.harm_done(
            pages, requests, health="/puna/health", effects=lambda: (files(store), len(fetched)),
            linked=lambda path: PAGES.fullmatch(path.partition("?")[0]) is not None,
        )  # fmt: skip
    assert harm.requests == 1000 and harm.total == 0, "\n".join(harm.examples)


def test_hostile_requests_do_no_harm_to_a_model_server() -> None:
    tokenizer = Tokenizer.train(["to be or not to be, that is the question"], 280)
    shape = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                        num_key_value_heads=1, max_position_embeddings=64)  # fmt: skip
    engine = Engine(Transformer(shape, seed=0), tokenizer, sequences=4)
    served = api_application(engine, "tiny", Limits(body=1 << 18))
    with doors.serving(OwnSite(served, protected=False, pages=None, asking=None)) as port:
        requests = doors.hostile_requests(1, 400, port, doors.API, limit=1 << 18)
        harm = doors.harm_done(port, requests, health="/health", effects=lambda: None, linked=lambda _: False)
    assert harm.total == 0, "\n".join(harm.examples)


def test_hostile_requests_do_no_harm_to_judging(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Desk, "__init__", lambda self: vars(self).update(order=[], pairs={}, _said={}) or None)
    monkeypatch.setattr(Desk, "at", lambda self, by, place: {"place": place, "by": by})
    monkeypatch.setattr(Desk, "save", lambda self: pytest.fail("saved"))
    with doors.serving(OwnSite(Bounded(desk_application(Desk())), protected=False, pages=LINKED, asking=None)) as port:  # type: ignore[call-arg]
        allowed = [
            one
            for one in doors.hostile_requests(2, 400, port, doors.ANNOTATE)
            if not one.line.startswith("POST /save") or one.kind == "crossing"
        ]
        harm = doors.harm_done(port, iter(allowed), health="/health", effects=lambda: None, linked=lambda path: path == "/")
    assert harm.total == 0, "\n".join(harm.examples)


def planned(client: TestClient, given: str) -> str:
    token = re.findall(r'name="token" value="([^"]+)"', client.get("/start/curate").text)[0]
    return unescape(client.post("/plan/curate", data={"inputs": given, "token": token, "recipe": "clean"}).text)


@pytest.mark.parametrize(
    "given",
    ["{trap}", "web={trap}", "simplecache::{trap}", "filecache::{trap}", "zip://x.warc::{trap}", "x=blockcache::{trap}",
     "s3://bucket/key", "hf://datasets/owner/name", "ftp://127.0.0.1/x", "git://x", "HTTP://127.0.0.1:1/x"],
)  # fmt: skip
def test_an_address_in_a_form_is_not_fetched(store: Store, given: str, addressed: dict[bool, TestClient]) -> None:
    with doors.trapped() as (trap, fetched):
        said = planned(addressed[False], given.replace("{trap}", trap))
    assert "forms read only local paths" in said and "--urls" in said and not fetched


def test_an_address_is_fetched_where_the_server_allows_it(addressed: dict[bool, TestClient], tmp_path: Path) -> None:
    with doors.trapped() as (trap, fetched):
        said = planned(addressed[True], trap)
    assert "forms read only local paths" not in said and fetched
    page = tmp_path / "page.html"
    page.write_text("<p>one</p>")
    for path in (str(page), f"web={page}", f"file://{page}"):
        assert "On the command line" in planned(addressed[False], path)


def test_a_run_of_a_form_fetches_no_address(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of `puna up` has the same restriction in its environment."""
    monkeypatch.setenv(defaults.ADDRESSES, defaults.REFUSED)
    with doors.trapped() as (trap, fetched), pytest.raises(PunaError, match="forms read only local paths"):
        launch.run(launch.Request("flow:curate", inputs=(trap,), json=True), store)
    assert not fetched


def test_a_form_names_no_store_or_executor_elsewhere(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(defaults.ADDRESSES, defaults.REFUSED)
    monkeypatch.setenv(defaults.SERVED, store.uri)
    with doors.trapped() as (trap, fetched):
        for given in ({"store": trap}, {"store": "s3://bucket/store"}, {"executor": trap.replace("http", "dask")}, {"executor": "ray://127.0.0.1:9"}):
            with pytest.raises(PunaError, match=f"{next(iter(given))} .*forms read only local paths"):
                deployments._open_store({"store": store.uri, "executor": "processes", **given})
    assert not fetched and deployments._open_store({"store": store.uri, "executor": "processes"}).uri == store.uri
    monkeypatch.setenv(defaults.SERVED, "s3://bucket/store")
    monkeypatch.setattr(deployments.Store, "open", lambda uri: uri)
    assert deployments._open_store({"store": "s3://bucket/store", "executor": "processes"}) == "s3://bucket/store"


@pytest.fixture(scope="module")
def addressed(store: Store) -> dict[bool, TestClient]:
    return {urls: TestClient(application(store, prefect=None, auth="", urls=urls)) for urls in (False, True)}


def test_questions_of_pages_leave_half_of_the_memory() -> None:
    """The maximum number of concurrent queries and plans, each with the maximum memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine / 2 >= 2 * bounded.AT_ONCE * bounded.MEMORY_BYTES


def exchanged(port: int, sent: bytes) -> bytes:
    """Send the beginning of a request; return what the server sends before it closes, or within 5 s."""
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(sent)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
            if b"\r\n\r\n" in answer:
                break
        return answer


def test_strangers_hold_no_connections_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections without a request used to stay open forever; bodies of up to 32 MB were read before the password was checked."""
    monkeypatch.setattr("puna.flows.server.guard.HEADER_SECONDS", 0.3)
    app = FastAPI()

    @app.get("/slow")
    async def slow() -> str:
        await asyncio.sleep(1)
        return "whole"

    @app.post("/take")
    async def take(body: dict[str, int]) -> dict[str, int]:
        return body

    config = serve._config(app, "ann:secret")
    config.port = 0
    with doors.serving(app, config) as port:
        for beginning in (b"", b"GET /slow HTT", b"GET /slow HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
            assert exchanged(port, beginning) == b""
        assert b"200 OK" in exchanged(port, b"GET /slow HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        head = b"POST /take HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
        assert b"401 Unauthorized" in exchanged(port, head + b"\r\n")
        key = b"Authorization: Basic " + b64encode(b"ann:secret") + b"\r\n\r\n"
        assert b"200 OK" in exchanged(port, head + key + b'{"a": 12}')
