"""The application: who may come in, and which page answers which address."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, quote

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from puna.flows.html.markup import Html
from puna.flows.report.page import page as report_page
from puna.flows.report.run import Run
from puna.flows.web import artifact, documents, forms, home, questions, rounds, rules, run, start
from puna.flows.web.bounded import Asker, Late
from puna.flows.web.chat import Chat, chat_page
from puna.flows.web.frame import page, problem, style
from puna.flows.web.guard import Bounded, Password, own_page
from puna.flows.web.judge import Judging
from puna.storage import PunaError, Store

HERE = Path(__file__).parent
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'self'; base-uri 'none'"
LOOKED_SECONDS = 1.0
"""How often a page that is open has its run looked at."""
STALE = "this page is older than the server, or was made by another site: open it again from here, then ask"
MOST_FIELDS = 2000
"""Fields of a form."""
Next = Callable[[Request], Awaitable[Response]]


def application(store: Store, *, prefect: str | None, auth: str, urls: bool = False) -> FastAPI:
    """Return the pages of a store.

    `prefect`: the address of the server whose forms they link to; `auth`: USER:PASSWORD, where asked for; `urls`: forms may
    name inputs that are no local paths.
    """
    store = store.reading()
    asker, token = Asker(store, urls=urls), secrets.token_urlsafe(32)
    app = FastAPI(openapi_url=None)
    _guard(app)
    app.add_middleware(Bounded)
    app.add_middleware(Password, auth=auth)
    _looking(app, store, prefect)
    _asking(app, asker, prefect, token)
    _running(app, store, prefect)
    _starting(app, store, prefect, asker, token)
    _deciding(app, store, prefect)
    _talking(app, store, prefect)

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in ("style.css", "web.js"):
            raise PunaError(f"{name}: no such file")
        kind, content = ("text/css", style()) if name == "style.css" else ("text/javascript", (HERE / name).read_text(encoding="utf-8"))
        return Response(content, media_type=kind, headers={"cache-control": "max-age=60"})

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.exception_handler(PunaError)
    def told(request: Request, error: PunaError) -> Response:
        return HTMLResponse(page("This did not work", problem(str(error)), prefect=prefect), status_code=404)

    @app.exception_handler(404)
    def missing(request: Request, error: Exception) -> Response:
        return told(request, PunaError(f"{request.url.path}: there is no such page"))

    @app.exception_handler(Exception)
    def broken(request: Request, error: Exception) -> Response:
        said = f"{type(error).__name__}: {error}. This is an error in Puna, told in full where it was started. Go back and try again."
        return HTMLResponse(page("This did not work", problem(said), prefect=prefect), status_code=500)

    return app


def _guard(app: FastAPI) -> None:
    """Say what a page may load."""

    @app.middleware("http")
    async def guarded(request: Request, further: Next) -> Response:
        answer = await further(request)
        answer.headers.setdefault("content-security-policy", POLICY)
        answer.headers.setdefault("x-content-type-options", "nosniff")
        return answer


def _looking(app: FastAPI, store: Store, prefect: str | None) -> None:
    """Artifacts, questions, thresholds."""

    @app.get("/artifacts", response_class=HTMLResponse)
    def listed(kind: str | None = None, project: str | None = None) -> str:
        return artifact.list_page(store, kind, prefect, project)

    @app.get("/artifact/{kind}/{key}", response_class=HTMLResponse)
    def one(kind: str, key: str, table: str | None = None, start: Annotated[int, Query(ge=0)] = 0) -> str:
        return artifact.artifact_page(store, artifact.resolved(store, kind, key), prefect, table, start)

    @app.get("/artifacts/compare", response_class=HTMLResponse)
    def compared_artifacts(chosen: Annotated[list[str], Query(alias="artifact")] = []) -> str:  # noqa: B006
        return artifact.compare_page(store, chosen, prefect)

    @app.get("/documents", response_class=HTMLResponse)
    def search(q: str = "", artifact: str = "", rule: str = "") -> str:
        return documents.documents_page(store, artifact, q, rule, prefect)

    @app.post("/near", response_class=HTMLResponse)
    async def near(request: Request) -> str:
        return await run_in_threadpool(documents.documents_page, store, "", "", "", prefect, await _sent(request))

    @app.get("/document/{identity}", response_class=HTMLResponse)
    def document(identity: str) -> str:
        return documents.document_page(store, identity, prefect)

    @app.get("/rules", response_class=HTMLResponse)
    def sliders(request: Request) -> str:
        return rules.rules_page(store, request.query_params.get("artifact"), request.query_params, prefect)

    @app.get("/rules/outcome", response_class=HTMLResponse)
    def outcome(request: Request) -> str:
        chosen = rules.selection(store, store.resolve(request.query_params.get("artifact", "")))
        return rules.replayed(store, chosen, request.query_params)


def _asking(app: FastAPI, asker: Asker, prefect: str | None, token: str) -> None:
    """Questions in SQL. An address shows its question in the box; only the box, which holds the token, has it run."""

    @app.get("/sql", response_class=HTMLResponse)
    def box(q: str = "") -> str:
        return questions.sql_page(q, None, prefect, token)

    @app.post("/sql")
    async def sql(request: Request) -> Response:
        asked = await _sent(request)
        text = asked.get("q", [""])[0]
        answer: Html | None = None
        status = 200
        if not _has(token, asked):
            answer, status = problem(STALE), 403
        elif text.strip():
            try:
                answer = await run_in_threadpool(asker.ask, "sql", q=text)
            except PunaError as error:
                answer = problem(str(error))
        return HTMLResponse(questions.sql_page(text, answer, prefect, token), status)


def _running(app: FastAPI, store: Store, prefect: str | None) -> None:
    """Runs, as they go and as they went; the forms that start them."""

    @app.get("/", response_class=HTMLResponse)
    def first(older: Annotated[int, Query(ge=0)] = 0, project: str | None = None) -> str:
        return home.home(store, prefect, older, project)

    @app.get("/run/{name}", response_class=HTMLResponse)
    def one(name: str) -> str:
        return run.run_page(store, name, prefect)

    @app.get("/run/{name}/funnel", response_class=HTMLResponse)
    def funnel(name: str) -> str:
        return run.funnel_page(store, name, prefect)

    @app.get("/compare", response_class=HTMLResponse)
    def compared(run_names: Annotated[list[str], Query(alias="run")] = []) -> str:  # noqa: B006
        return run.compare_page(store, run_names, prefect)

    @app.get("/report/{name}")
    def report(name: str) -> Response:
        # The report holds its script and needs nothing else.
        alone = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
        return HTMLResponse(report_page(Run.open(store, name)), headers={"content-security-policy": alone})

    @app.get("/events")
    @app.get("/events/{name}")
    def events(request: Request, name: str | None = None, since: str = "") -> Response:
        told = _events(store, request, name, since)
        return StreamingResponse(told, media_type="text/event-stream", headers={"cache-control": "no-store"})


def _starting(app: FastAPI, store: Store, prefect: str | None, asker: Asker, token: str) -> None:
    """Forms: these pages' own, with the plan beside it, and the way to Prefect's."""

    @app.get("/deployment/{name}")
    def schedules(name: str) -> Response:
        return RedirectResponse(f"/v2/deployments/deployment/{start.deployment(start.server_beside(store), name)['id']}")

    @app.get("/form/{name}")
    def form(name: str, request: Request) -> Response:
        return RedirectResponse(forms.address(store, prefect, name, request.query_params))

    @app.get("/start", response_class=HTMLResponse)
    def all_forms(project: str | None = None) -> str:
        return start.list_page(store, prefect, project)

    @app.get("/start/{name}", response_class=HTMLResponse)
    def own_form(name: str, request: Request) -> str:
        asked = parse_qs(request.url.query, keep_blank_values=True)
        return start.start_page(store, name, asked, prefect, token=token, own=own_page(request.headers))

    @app.post("/start/{name}/plan")
    @app.post("/plan/{name}")
    async def plan(name: str, request: Request) -> Response:
        asked = await _sent(request)
        if not _has(token, asked):
            return HTMLResponse(page("Not planned", problem(STALE), prefect=prefect), 403)
        fields = {key: values for key, values in asked.items() if key != "token"}
        found = await run_in_threadpool(asker.ask, "plan", name=name, asked=fields)
        if request.url.path.endswith("/plan"):
            found = await run_in_threadpool(partial(start.start_page, store, name, asked, prefect, token=token, plan=found))
        return HTMLResponse(found)

    @app.post("/start/{name}")
    async def go(name: str, request: Request) -> Response:
        asked = await _sent(request)
        try:
            # What cannot be told in time, of large inputs, the run itself tells first.
            with suppress(Late):
                await run_in_threadpool(asker.ask, "check", name=name, asked=asked)
            return RedirectResponse(await run_in_threadpool(start.started, store, name, asked), 303)
        except PunaError as error:
            refused = partial(start.start_page, store, name, asked, prefect, token=token, refused=str(error))
            return HTMLResponse(await run_in_threadpool(refused), status_code=422)

    @app.post("/run/{name}/stop")
    def stop(name: str) -> Response:
        start.stop(store, name)
        return RedirectResponse(f"/puna/run/{quote(name)}", 303)

    @app.post("/run/{name}/again")
    async def again(name: str, request: Request) -> Response:
        return RedirectResponse(await run_in_threadpool(start.again, store, name, await _sent(request)), 303)

    @app.get("/started/{flow_run}")
    def follow(flow_run: str) -> Response:
        found = start.started_page(store, flow_run, prefect)
        if isinstance(found, Html):
            return HTMLResponse(found, headers={"refresh": "1"})
        return RedirectResponse(found)


def _deciding(app: FastAPI, store: Store, prefect: str | None) -> None:
    """Rounds, and people's judgements."""
    app.mount("/judge", Judging(store))

    @app.get("/rounds", response_class=HTMLResponse)
    def all_rounds(project: str | None = None) -> str:
        return rounds.rounds_page(store.within(project).known(), prefect)

    @app.post("/rounds/next")
    async def trigger(request: Request) -> Response:
        await run_in_threadpool(rounds.set_trigger, store, said := await _sent(request))
        return RedirectResponse(f"/puna/rounds?project={rounds.project_of(said)}#next", 303)

    @app.post("/rounds/{gate}")
    async def decide(gate: str, request: Request) -> Response:
        await run_in_threadpool(rounds.decided, store, gate, said := await _sent(request))
        return RedirectResponse(f"/puna/rounds?project={rounds.project_of(said)}", 303)


def _has(token: str, asked: dict[str, list[str]]) -> bool:
    """True if a form sends the token along, which pages of this server alone hold."""
    return hmac.compare_digest(asked.get("token", [""])[0].encode(), token.encode())


async def _sent(request: Request) -> dict[str, list[str]]:
    """Return the fields of a form; 400 where the body is no form in UTF-8."""
    try:
        fields = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise HTTPException(400, f"the body is no form in UTF-8 of at most {MOST_FIELDS:,} fields") from error
    if any("\0" in text for name, values in fields.items() for text in (name, *values)):
        raise HTTPException(400, "a field must not hold NUL")
    return fields


async def _events(store: Store, request: Request, name: str | None, since: str) -> AsyncIterator[str]:
    """Yield a line whenever a run, or any run, has changed. `since`: the state shown by the page, which may be past by now."""
    while not await request.is_disconnected():
        now = await run_in_threadpool(home.shown, store, name)
        yield f"data: {json.dumps('changed')}\n\n" if now != since else ": still\n\n"
        since = now
        await asyncio.sleep(LOOKED_SECONDS)


def _talking(app: FastAPI, store: Store, prefect: str | None) -> None:
    """A talk with a model of the store."""
    chat = Chat(store)

    @app.get("/chat", response_class=HTMLResponse)
    def talk(model: str = "") -> str:
        return chat_page(store, model, prefect)

    @app.post("/chat/say")
    async def say(request: Request) -> Response:
        try:
            asked = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, "the body is no JSON") from error
        if not isinstance(asked, dict):
            raise HTTPException(400, "the body must be an object with model and messages")
        answer = await run_in_threadpool(chat.say, str(asked.get("model", "")), asked.get("messages"))
        return StreamingResponse(answer, media_type="text/plain; charset=utf-8")
