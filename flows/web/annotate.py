"""The desk where people judge pairs of answers; their judgements become preferences."""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from puna.flows.web.frame import Site, pages
from puna.stages.align.judgements import ALIAS
from puna.storage import Artifact, PunaError, Store

if TYPE_CHECKING:
    from fastapi import FastAPI

    from puna.stages.align.judgements import Judgement

PAGE = Path(__file__).with_name("annotate.html")
POLICY = "default-src 'self' 'unsafe-inline'; base-uri 'none'; frame-ancestors 'self'"
"""What the page may load: itself, which holds its style and its script."""
DESKS = 8
"""Desks whose pairs are held in memory."""
LINKED = re.compile("/")
"""What another site may link to: the page, which does no work when it is opened."""


class Desk:
    """The pairs of an artifact of answers, each person's judgements, and their file: one line per judgement, never rewritten."""

    def __init__(self, store: Store, answers: Artifact, prompts: Artifact, pairs_per_prompt: int = 1) -> None:
        from puna.stages.align.judgements import JudgementsConfig, pairs_to_judge
        from puna.stages.align.sample import read_answers

        self.store, self.answers, self.prompts = store, answers, prompts
        self.config = JudgementsConfig(pairs_per_prompt=pairs_per_prompt)
        self.asked, answered = read_answers(answers, prompts)
        self.pairs = pairs_to_judge(answered, self.config)
        self.order = list(self.pairs)
        if not self.order:
            raise PunaError(f"{answers.id} has no prompt with two finished answers that differ: there is nothing to compare")
        self.file = store.root / "judgements" / f"{answers.key}.jsonl"
        self._said: dict[str, dict[str, Judgement]] = defaultdict(dict)
        self._lock = threading.Lock()
        self._read()

    def _read(self) -> None:
        from puna.stages.align.judgements import Judgement

        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            for line in self.file.read_text(encoding="utf-8").splitlines():
                one = Judgement.model_validate_json(line)
                self._said[one.by][one.pair] = one

    def swapped(self, pair: str, by: str) -> bool:
        """True if a person sees the second answer on the left: random, but the same each time."""
        from puna.stages.draws import fraction

        return fraction("side", pair, by) < 0.5

    def at(self, by: str, place: int | None) -> dict[str, Any]:
        """Return the pair at a place of the order (None: the first that this person has not judged), as a page shows it."""
        from puna.stages.conversations import messages_of, shown

        own = self._said[by]
        if place is None:
            place = next((n for n, pair in enumerate(self.order) if pair not in own), len(self.order))
        state: dict[str, Any] = {"place": place, "total": len(self.order), "judged": sum(one.worth != 0 for one in own.values())}
        if not 0 <= place < len(self.order):
            return state
        pair = self.order[place]
        texts = [answer["text"].strip() for answer in self.pairs[pair]]
        left, right = reversed(texts) if self.swapped(pair, by) else texts
        prompt = self.asked[self.pairs[pair][0]["prompt_id"]]
        messages = messages_of(prompt)
        before = None if pair not in own else own[pair].model_dump() | {"better": self._side(own[pair].better, pair, by)}
        shows = {"pair": pair, "prompt": shown(messages), "editable": len(messages) == 1, "left": left, "right": right, "before": before}
        return {**state, **shows}

    def judge(self, pair: str, by: str, better: str | None, level: str | None, edited: str | None, prompt: str | None) -> None:
        """Save a judgement on disk before it is acknowledged. `better`: left or right, as this person sees the pair."""
        from puna.stages.align.judgements import Judgement

        if pair not in self.pairs:
            raise PunaError(f"there is no pair {pair}")
        fields = {"pair": pair, "by": by, "better": self._side(better, pair, by), "level": level}
        judgement = Judgement.model_validate({**fields, "edited": edited or None, "prompt": prompt or None})
        with self._lock, self.file.open("a", encoding="utf-8") as file:
            file.write(judgement.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
            self._said[by][pair] = judgement

    def _side(self, side: str | None, pair: str, by: str) -> str | None:
        """Exchange first and second where the answers are swapped."""
        names = ("second", "first") if self.swapped(pair, by) else ("first", "second")
        there = {"left": names[0], "right": names[1], names[0]: "left", names[1]: "right"}
        return None if side is None else there.get(side, side)

    def save(self) -> Artifact:
        """Return the judgements so far as preferences, which `judged@latest` then names; the flow `round` learns from them."""
        from puna.stages.align.judgements import judgements
        from puna.stages.contract import External, execute

        if not self.file.exists():
            raise PunaError("nothing was judged yet")
        with self._lock:
            inputs: Any = {"answers": self.answers, "prompts": self.prompts, "judged": External.resolve(f"judged={self.file}")}
            preferences = execute(judgements, self.config, inputs, self.store)
        self.store.set_alias(ALIAS, preferences)
        return preferences


def application(desk: Desk) -> FastAPI:
    """Return the page and what it asks for."""
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse
    from pydantic import BaseModel, ConfigDict, Field

    class Said(BaseModel):
        """A judgement as the page sends it."""

        model_config = ConfigDict(extra="forbid")
        pair: str
        by: str = Field(min_length=1, max_length=100)
        better: str | None = Field(None, pattern="^(left|right)$")
        level: str | None = None
        edited: str | None = Field(None, max_length=100_000)
        prompt: str | None = Field(None, max_length=100_000)

    app = FastAPI(title="Puna: annotate", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestValidationError)
    def refused(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 422)

    def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": POLICY})

    def pair(by: str, place: int | None = None) -> JSONResponse:
        return JSONResponse(desk.at(by, place))

    def judge(said: Said) -> JSONResponse:
        try:
            desk.judge(**said.model_dump())
        except (PunaError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"ok": True})

    def save() -> JSONResponse:
        try:
            artifact = desk.save()
        except PunaError as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"id": artifact.id, "alias": desk.store.full_name(ALIAS), "rows": artifact.rows(), **artifact.manifest.metrics})

    judge.__annotations__["said"] = Said  # a class of this function, which its annotation as text cannot name
    app.add_api_route("/health", health, methods=["GET"], response_model=None)
    app.add_api_route("/", page, methods=["GET"], response_model=None)
    app.add_api_route("/pair", pair, methods=["GET"], response_model=None)
    app.add_api_route("/judge", judge, methods=["POST"], response_model=None)
    app.add_api_route("/save", save, methods=["POST"], response_model=None)
    return app


def prompts_of(store: Store, answers: Artifact) -> Artifact:
    """Return the prompts that were answered, as the lineage has them."""
    if answers.kind != "answers":
        raise PunaError(f"{answers.id}: takes answers, which `puna run sample` makes")
    records = [i for i in answers.manifest.inputs if i.kind == "prompts"]
    if len(records) != 1 or (prompts := store.find("prompts", records[0].key)) is None:
        raise PunaError(f"{answers.id}: the prompts that it answers are not in the store")
    return prompts


class Judging:
    """An application that serves `/[PROJECT~]KEY/…` by the desk of those answers; its judgements are the project's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._desks: dict[str, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on to its desk. Raise PunaError where there are no such answers, or no pair to compare."""
        key, slash, _ = scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/").partition("/")
        if not slash:
            return await RedirectResponse(f"{scope['path']}/")(scope, receive, send)
        if key not in self._desks:
            self._desks[key] = await run_in_threadpool(self._opened, key)
            while len(self._desks) > DESKS:
                del self._desks[next(iter(self._desks))]
        await self._desks[key]({**scope, "root_path": f"{scope.get('root_path', '')}/{key}"}, receive, send)

    def _opened(self, name: str) -> ASGIApp:
        project, _, key = name.rpartition("~")
        store = self._store.within(project)
        answers = store.checked(store.resolve(f"answers/{key}"))
        # Who may ask, and from which page, is the outer application's to say.
        return application(Desk(store, answers, prompts_of(store, answers)))


@pages()
def routes(site: Site) -> None:
    """Add the desks on which people judge answers."""
    site.app.mount("/judge", Judging(site.store))
