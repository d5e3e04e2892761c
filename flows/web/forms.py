"""Forms that start runs: these pages' own, and the way to Prefect's, filled with an artifact or a recipe's values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qs, quote

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from puna.flows.engine.declare import Flow
from puna.flows.html.markup import Html
from puna.flows.prefect.forms import Choices, picked, values_of
from puna.flows.server.guard import own_page
from puna.flows.web import start
from puna.flows.web.bounded import Late
from puna.flows.web.frame import STALE, Here, pages, problem, sent
from puna.storage import PunaError, Store

router = pages("start", "Start", at=2)


def address(store: Store, prefect: str | None, name: str, query: Mapping[str, str]) -> str:
    """Return the address of a form. `asked`: `recipe` and `step` that fill it; artifacts by input."""
    what = start.offer_of(name).what
    if prefect is None:
        raise PunaError("forms are Prefect's: start `puna up` in place of `puna web`")
    given: dict[str, Any] = {}
    if "recipe" in query:
        values = query["recipe"] if isinstance(what, Flow) else values_of(what, query["recipe"], query.get("step", what.name))
        if values is None:
            raise PunaError(f"{name}: recipe {query['recipe']} has no settings of it")
        given["recipe" if isinstance(what, Flow) else "config"] = values
    choices = Choices(store)
    for spec in what.inputs:
        if spec.name in query:
            label = next((one for one in choices.of(spec.kind) if picked(one) == query[spec.name]), query[spec.name])
            given[spec.name] = [label] if spec.many else label
    target = start.deployment(start.server_beside(store), name)
    filled = {**target["parameters"], **given} if given else {}
    return f"/v2/deployments/deployment/{target['id']}/run" + (f"?parameters={quote(json.dumps(filled))}" if filled else "")


@router.get("/deployment/{name}")
def schedules(site: Here, name: str) -> Response:
    return RedirectResponse(f"/v2/deployments/deployment/{start.deployment(start.server_beside(site.store), name)['id']}")


@router.get("/form/{name}")
def form(site: Here, name: str, request: Request) -> Response:
    return RedirectResponse(address(site.store, site.prefect, name, request.query_params))


@router.get("/start")
def list_page(site: Here, project: str | None = None) -> str:
    return start.list_page(site, project)


@router.get("/start/{name}")
def start_page(site: Here, name: str, request: Request) -> str:
    query = parse_qs(request.url.query, keep_blank_values=True)
    return start.start_page(site, name, query, own=own_page(request.headers))


@router.post("/start/{name}/plan")
@router.post("/plan/{name}")
async def plan(site: Here, name: str, request: Request) -> Response:
    form = await sent(request)
    if not site.trusts(form):
        return HTMLResponse(site.page("Not planned", problem(STALE)), 403)
    fields = {key: values for key, values in form.items() if key != "token"}
    html = await run_in_threadpool(site.asker.ask, "plan", name=name, asked=fields)
    if request.url.path.endswith("/plan"):
        html = await run_in_threadpool(partial(start.start_page, site, name, form, plan=html))
    return HTMLResponse(html)


@router.post("/start/{name}")
async def go(site: Here, name: str, request: Request) -> Response:
    form = await sent(request)
    try:
        # What cannot be told in time, of large inputs, the run itself tells first.
        with suppress(Late):
            await run_in_threadpool(site.asker.ask, "check", name=name, asked=form)
        return RedirectResponse(await run_in_threadpool(start.start_run, site.store, name, form), 303)
    except PunaError as error:
        refused = partial(start.start_page, site, name, form, refused=str(error))
        return HTMLResponse(await run_in_threadpool(refused), status_code=422)


@router.post("/run/{name}/stop")
def stop(site: Here, name: str) -> Response:
    start.stop(site.store, name)
    return RedirectResponse(f"/puna/run/{quote(name)}", 303)


@router.post("/run/{name}/again")
async def again(site: Here, name: str, request: Request) -> Response:
    return RedirectResponse(await run_in_threadpool(start.again, site.store, name, await sent(request)), 303)


@router.get("/started/{flow_run}")
def follow(site: Here, flow_run: str) -> Response:
    answer = start.started_page(site, flow_run)
    return HTMLResponse(answer, headers={"refresh": "1"}) if isinstance(answer, Html) else RedirectResponse(answer)
