"""The page on which people judge pairs of answers; the judgements become preferences."""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, Field

from puna.flows.web.frame import health, invalid, pages
from puna.stages.align.judgements import ALIAS, Judgement, JudgementsConfig, judgements, pairs_to_judge
from puna.stages.align.sample import read_answers
from puna.stages.contract import External, execute
from puna.stages.conversations import as_text, messages_of
from puna.stages.draws import fraction
from puna.storage import Artifact, PunaError, Store

PAGE = Path(__file__).with_name("annotate.html")
POLICY = "default-src 'self' 'unsafe-inline'; base-uri 'none'; frame-ancestors 'self'"
"""The page's content security policy: style and script are inline, and requests go only to this server."""
DESKS = 8  # maximum number of `Desk` objects in memory
LINKED = re.compile("/")  # paths that other sites may link to: only the page itself, which has no side effects


class Desk:
    """The state of an annotation page: pairs of answers, each person's judgements, and an append-only file with one line per judgement."""

    def __init__(self, store: Store, answers: Artifact, prompts: Artifact, pairs_per_prompt: int = 1) -> None:
        self.store, self.answers, self.prompts = store, answers, prompts
        self.config = JudgementsConfig(pairs_per_prompt=pairs_per_prompt)
        self.asked, answered = read_answers(answers, prompts)
        self.pairs = pairs_to_judge(answered, self.config)
        self.order = list(self.pairs)
        if not self.order:
            raise PunaError(f"{answers.id} has no prompt with two complete answers that differ; sample more, or with a larger max_tokens")
        choice = "" if pairs_per_prompt == 1 else f"-{pairs_per_prompt}"  # other numbers of pairs give other pairs
        self.file = store.root / "judgements" / f"{answers.key}{choice}.jsonl"
        self._said: dict[str, dict[str, Judgement]] = defaultdict(dict)
        self._lock = threading.Lock()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            whole = self.file.read_bytes().rpartition(b"\n")[0]
            for line in whole.split(b"\n") if whole else ():
                one = Judgement.model_validate_json(line)
                self._said[one.by][one.pair] = one
            os.truncate(self.file, len(whole) + bool(whole))  # an incomplete last line comes from a crash and was never acknowledged

    def is_swapped(self, pair: str, by: str) -> bool:
        """True if the person `by` sees the pair's second answer on the left: pseudo-random, but fixed for this pair and person."""
        return fraction("side", pair, by) < 0.5

    def at(self, by: str, place: int | None) -> dict[str, Any]:
        """Return the page's data for pair `place` (None: the first that `by` neither judged nor skipped); if there is none, counts only."""
        own = self._said.get(by, {})
        if place is None:
            place = next((n for n, pair in enumerate(self.order) if pair not in own), len(self.order))
        state: dict[str, Any] = {"place": place, "total": len(self.order), "judged": sum(one.worth != 0 for one in own.values())}
        if not 0 <= place < len(self.order):
            return state
        pair = self.order[place]
        texts = [answer["text"].strip() for answer in self.pairs[pair]]
        left, right = reversed(texts) if self.is_swapped(pair, by) else texts
        messages = messages_of(self.asked[self.pairs[pair][0]["prompt_id"]])
        before = None if pair not in own else own[pair].model_dump() | {"better": self._side(own[pair].better, pair, by)}
        shows = {"pair": pair, "prompt": as_text(messages), "editable": len(messages) == 1, "left": left, "right": right, "before": before}
        return {**state, **shows}

    def judge(self, pair: str, by: str, better: str | None, level: str | None, edited: str | None, prompt: str | None) -> None:
        """Append a judgement (`better`: left or right). Raise PunaError for an unknown pair or failed write, ValueError for a bad value."""
        if pair not in self.pairs:
            raise PunaError(f"there is no pair {pair}")
        fields = {"pair": pair, "by": by, "better": self._side(better, pair, by), "level": level}
        judgement = Judgement.model_validate({**fields, "edited": edited or None, "prompt": prompt or None})
        line = judgement.model_dump_json().encode() + b"\n"
        with self._lock, self.file.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError("the disk is full")
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(size)
                raise PunaError(f"{self.file}: not saved ({error}); judge the pair again") from error
            self._said[by][pair] = judgement

    def _side(self, side: str | None, pair: str, by: str) -> str | None:
        """Convert left or right on the person's screen to the answer shown there, first or second, and vice versa; keep other values."""
        names = ("second", "first") if self.is_swapped(pair, by) else ("first", "second")
        there = {"left": names[0], "right": names[1], names[0]: "left", names[1]: "right"}
        return None if side is None else there.get(side, side)

    def save(self) -> Artifact:
        """Convert the judgements so far to preferences, and set the alias `judged@latest` for `round`. Raise PunaError if none exist."""
        if not self.file.exists():
            raise PunaError("nothing was judged yet")
        with self._lock:
            inputs: Any = {"answers": self.answers, "prompts": self.prompts, "judged": External.resolve(f"judged={self.file}")}
            preferences = execute(judgements, self.config, inputs, self.store)
        self.store.set_alias(ALIAS, preferences)
        return preferences


def prompts_of(store: Store, answers: Artifact) -> Artifact:
    """Return the prompts that `answers` were sampled for. Raise PunaError for another kind of artifact, or if the store lacks them."""
    if answers.kind != "answers":
        raise PunaError(f"{answers.id}: takes answers, which `puna run sample` makes")
    records = [i for i in answers.manifest.inputs if i.kind == "prompts"]
    if len(records) != 1 or (prompts := store.find("prompts", records[0].key)) is None:
        raise PunaError(f"{answers.id}: the prompts that it answers are not in the store")
    return prompts


_lock = threading.Lock()


@lru_cache(DESKS)
def _desk(store: Store, name: str) -> Desk:
    project, _, key = name.rpartition("~")
    store = store.within(project)
    answers = store.check(store.resolve(f"answers/{key}"))
    return Desk(store, answers, prompts_of(store, answers))


def _desk_of(request: Request) -> Desk:
    """Return the desk for the URL `/judge/[PROJECT~]KEY/…`, whose `save` sets that project's alias; in `puna annotate`, the only desk."""
    desk: Desk | None = getattr(request.app.state, "desk", None)
    if desk is not None:
        return desk
    with _lock:
        return _desk(request.app.state.site.store, request.path_params["name"])


DeskOfAddress = Annotated[Desk, Depends(_desk_of)]


class Said(BaseModel, extra="forbid"):
    """The body of the request with which the page sends a judgement."""

    pair: str
    by: str = Field(min_length=1, max_length=100)
    better: str | None = Field(None, pattern="^(left|right)$")
    level: str | None = None
    edited: str | None = Field(None, max_length=100_000)
    prompt: str | None = Field(None, max_length=100_000)


desks = APIRouter()


@desks.get("/")
def page(desk: DeskOfAddress) -> Response:
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": POLICY})


@desks.get("/pair")
def pair(desk: DeskOfAddress, by: str, place: int | None = None) -> Response:
    return JSONResponse(desk.at(by, place))


@desks.post("/judge")
def judge(desk: DeskOfAddress, said: Said) -> Response:
    try:
        desk.judge(**said.model_dump())
    except (PunaError, ValueError) as error:
        return JSONResponse({"error": str(error)}, 400)
    return JSONResponse({"ok": True})


@desks.post("/save")
def save(desk: DeskOfAddress) -> Response:
    try:
        artifact = desk.save()
    except PunaError as error:
        return JSONResponse({"error": str(error)}, 400)
    return JSONResponse({"id": artifact.id, "alias": desk.store.full_name(ALIAS), "rows": artifact.rows(), **artifact.manifest.metrics})


def desk_application(desk: Desk) -> FastAPI:
    app = FastAPI(title="Puna: annotate", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.desk = desk
    app.include_router(desks)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_api_route("/health", health)
    return app


pages().include_router(desks, prefix="/judge/{name}")
