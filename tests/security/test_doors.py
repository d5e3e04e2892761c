"""Hostile requests to every server: none fails, changes the store, fetches an address or ends the server."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fastapi import FastAPI
from starlette.responses import RedirectResponse
from starlette.routing import Route

from puna.flows.annotate import LINKED, Desk
from puna.flows.annotate import application as desk_application
from puna.flows.api import Limits
from puna.flows.api import application as api_application
from puna.flows.guard import PAGES, Bounded, OwnSite
from puna.flows.web import application
from puna.models.config import ModelConfig
from puna.models.generation import Engine
from puna.models.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.align.prompts import PromptsConfig, prompts
from puna.stages.contract import execute
from puna.storage import Store

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
    """The store's files, but for what reading leaves."""
    return sorted(str(path) for path in store.root.rglob("*") if path.name != "index.jsonl" and ".lock" not in path.name)


@pytest.fixture(scope="module")
def pages(store: Store) -> Iterator[int]:
    """Puna's pages as `puna web` serves them."""
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
    engine = Engine(Transformer(shape, generator=torch.Generator().manual_seed(0)), tokenizer, sequences=4)
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
