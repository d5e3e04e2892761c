"""The page for chatting with a model: a process of `puna api` serves the model, and this module passes the model's answers on."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from typing import Any

from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from puna.flows.engine.rounds import POLICY
from puna.flows.html.markup import tag
from puna.flows.prefect.forms import Choices, reference_in
from puna.flows.server.client import opener
from puna.flows.web.frame import Here, field, option, pages
from puna.storage import PunaError, Store

START_SECONDS, END_SECONDS = 180.0, 10.0  # maximum seconds for a model's process to load, and to end
router = pages("chat", "Chat", at=9)


@router.get("/chat")
def chat_page(site: Here, model: str = "") -> str:
    models = Choices(site.store).of("model")
    if not models:
        imported, trained = (tag("a", name, href=f"/puna/start/{name}") for name in ("import_model", "pretrain"))
        ways = [imported, " imports one, ", trained, " trains one."]
        return site.page("Chat", here="chat", lead=["The store holds no model yet: ", *ways])
    choice = model or (POLICY if POLICY in models else reference_in(models[0]))
    options = [option(reference_in(words), words, chosen=reference_in(words) == choice) for words in models]
    return site.page(
        "Chat",
        tag("form",
            field("Model", tag("select", options, name="model")),
            tag("div", id="talk", aria_live="polite"),
            field("You", tag("textarea", name="text", rows=3, autofocus=True, required=True)),
            tag("p", tag("button", "Send", class_="main"), " ", tag("button", "New chat", type="button", id="new"),
                tag("span", " Ctrl+Enter sends. A model takes some seconds to load.", class_="note")),
            id="chat"),
        here="chat",
    )  # fmt: skip


@dataclass(frozen=True)
class Talker:
    """A process of `puna api` that serves one model: the model's key, the server's URL and its API key."""

    key: str
    url: str
    secret: str
    process: subprocess.Popen[bytes]


class Chat:
    """The chat with a store's models, of which only one is loaded at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._talker: Talker | None = None
        self._lock = threading.Lock()

    def say(self, model: str, messages: list[dict[str, str]]) -> Iterator[str]:
        """Return an iterator over the answer's pieces, the last of which may be an error. Raise PunaError if no answer begins."""
        artifact = self._store.check(self._store.resolve(model))
        if artifact.kind != "model":
            raise PunaError(f"{artifact.id}: is not a model")
        with self._lock:
            talker = self._load(artifact.key, artifact.id)
        body = json.dumps({"model": artifact.id, "messages": messages, "stream": True}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {talker.secret}"}
        try:
            answer = opener(talker.url).open(urllib.request.Request(f"{talker.url}/v1/chat/completions", body, headers), timeout=300)
        except urllib.error.HTTPError as error:
            raise PunaError(f"{model}: {error.read(1000).decode('utf-8', 'replace')}") from error
        except OSError as error:
            raise PunaError(f"{model}: stopped answering ({error})") from error
        return _pieces(answer)

    def _load(self, key: str, name: str) -> Talker:
        """Return the process of model `key`. If none runs, end any other model's process and start one. Raise PunaError if that fails."""
        now = self._talker
        if now is not None and now.process.poll() is None:
            if now.key == key:
                return now
            _end(now.process)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        secret = secrets.token_urlsafe(24)
        words = [sys.executable, "-m", "puna.flows.cli.main", "api", name, "--port", str(port), "--store", self._store.uri, "--supervised"]
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe that nobody reads would stop the process when it is full)
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=errors, env={**os.environ, "PUNA_API_KEY": secret})
        weakref.finalize(self, process.terminate)
        talker = self._talker = Talker(key, f"http://127.0.0.1:{port}", secret, process)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                errors.seek(0)
                stderr = errors.read().decode("utf-8", "replace")
                raise PunaError(f"{name}: {stderr.strip()[-800:] or 'cannot be loaded'}")
            try:
                with opener(talker.url).open(f"{talker.url}/health", timeout=2):
                    return talker
            except OSError:
                time.sleep(0.1)
        _end(process)
        raise PunaError(f"{name}: was not loaded within {START_SECONDS:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a model's process and wait, so that two models are never in memory at once."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pieces(answer: Any) -> Iterator[str]:
    try:
        with answer:
            for line in answer:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(chunk["error"].get("message"))
                yield from (choice.get("delta", {}).get("content") or "" for choice in chunk.get("choices", []))
    except (OSError, HTTPException, ValueError) as error:  # the process has ended, or gave way to another model
        yield f"\n[stopped answering: {str(error) or type(error).__name__}]"


_chat = lru_cache(1)(Chat)  # for one store: opening another store's chat drops this one and ends its model process


class Talk(BaseModel):
    model: str
    messages: list[dict[str, str]]


@router.post("/chat/say")
def say(site: Here, talk: Talk) -> Response:
    answer = _chat(site.store).say(talk.model, talk.messages)
    return StreamingResponse(answer, media_type="text/plain; charset=utf-8")
