"""Pages that start runs: the list of forms, the forms, their plans, and requests to Prefect's server, which starts and stops the runs."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any
from urllib.parse import parse_qs, quote

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from puna.flows.engine.declare import Flow
from puna.flows.engine.launch import stage_config
from puna.flows.html.markup import Content, section, tag
from puna.flows.prefect.forms import offers, values_of
from puna.flows.server.client import Server, Unreachable, read_note
from puna.flows.server.guard import own_page
from puna.flows.web.bounded import Late
from puna.flows.web.forms import Asked, first_words, form_page, offer_of, request_of, values_given
from puna.flows.web.frame import STALE, Here, button, form_fields, pages, problem, projects_nav
from puna.flows.web.runs import FIRST, flow_run_of
from puna.stages.contract import Stage
from puna.storage import PunaError, Store, digest
from puna.storage.aliases import DEFAULT

router = pages("start", "Start", at=2)


@router.get("/start")
def list_page(site: Here, project: str | None = None) -> str:
    store = site.store
    parts: list[Content] = [projects_nav(store, project or DEFAULT, "/puna/start")]
    more = f"?project={store.within(project).project}" if project else ""
    for group, several in groupby(offers(), key=lambda offer: offer.group):
        links = []
        for offer in several:
            link = tag("a", offer.what.name, href=f"/puna/start/{offer.flow}{more}")
            links.append(tag("li", link, " ", first_words(offer.what.doc)))
        parts.append(section(group, {"flow": "flows", "io": "import and export"}.get(group, group), None, tag("ul", links)))
    return site.page("Start", parts, here="start", lead=FIRST)


@router.get("/start/{name}")
def start_page(site: Here, name: str, request: Request) -> str:
    query = parse_qs(request.url.query, keep_blank_values=True)
    return form_page(site, name, query, own=own_page(request.headers))


@router.post("/start/{name}/plan")
@router.post("/plan/{name}")
async def plan(site: Here, name: str, request: Request) -> Response:
    form = await form_fields(request)
    if not site.trusts(form):
        return HTMLResponse(site.page("Not planned", problem(STALE)), 403)
    fields = {key: values for key, values in form.items() if key != "token"}
    html = await run_in_threadpool(site.asker.ask, "plan", name=name, asked=fields)
    if request.url.path.endswith("/plan"):
        html = await run_in_threadpool(partial(form_page, site, name, form, plan=html))
    return HTMLResponse(html)


@router.post("/start/{name}")
async def go(site: Here, name: str, request: Request) -> Response:
    form = await form_fields(request)
    try:
        # If the check takes too long (large inputs), the run starts unchecked and makes the same check first.
        with suppress(Late):
            await run_in_threadpool(site.asker.ask, "check", name=name, asked=form)
        return RedirectResponse(await run_in_threadpool(start_run, site.store, name, form), 303)
    except PunaError as error:
        refused = partial(form_page, site, name, form, refused=str(error))
        return HTMLResponse(await run_in_threadpool(refused), status_code=422)


def start_run(store: Store, name: str, form: Asked) -> str:
    """Start the run that a form requests, and return the URL of the page that shows the run. The caller checks the form first."""
    offer = offer_of(name)
    request = request_of(offer, form)
    server = server_beside(store)
    target = deployment(server, name)
    values_: dict[str, Any] = {}
    for spec in offer.what.inputs:
        values = values_given(spec, form)
        if values:
            values_[spec.name] = values if spec.many else values[0]
    if isinstance(offer.what, Flow):
        values_ |= {"recipe": request.recipe, "changes": list(request.changes)}
    else:
        values_["config"] = stage_config(offer.what, None, list(request.changes)).model_dump(mode="json")
    values_["project"] = store.within(request.project).project if request.project else ""
    return _create_run(server, target["id"], request.title, {**target["parameters"], **values_}, form)


def _create_run(server: Server, deployment_id: str, title: str, parameters: Mapping[str, Any], form: Asked) -> str:
    """Start a run and return the URL of its page. A second request with the same parameters and `once` value starts nothing."""
    key = digest.of_value({"once": form.get("once", [uuid.uuid4().hex]), "deployment": deployment_id, "parameters": parameters})
    body = {"name": title, "parameters": parameters, "state": {"type": "SCHEDULED"}, "idempotency_key": key}
    flow_run = server.insist("POST", f"/deployments/{deployment_id}/create_flow_run", body)
    return f"/puna/started/{flow_run['id']}"


@router.get("/started/{flow_run}")
def started_page(site: Here, flow_run: str) -> Response:
    """Redirect to a started run's page once the run is in the store; until then show the state of the Prefect flow run."""
    store = site.store
    for name in store.runs()[:-20:-1]:
        if flow_run_of(store, name) == flow_run:
            return RedirectResponse(f"/puna/run/{quote(name)}")
    try:
        run = server_beside(store).ask("GET", f"/flow_runs/{flow_run}")
    except Unreachable:
        run = {"name": "the run", "state": {"name": "unknown: the server is busy"}}
    except PunaError as error:
        raise PunaError("the server knows no such run: it was deleted there, or the link belongs to another store") from error
    state = run["state"]
    ended = state.get("type") in ("FAILED", "CRASHED", "CANCELLED")
    message = problem(state.get("message") or state["name"]) if ended else tag("p", f"{state['name']} …", class_="lead")
    link = tag("p", button("In Prefect", f"/v2/runs/flow-run/{flow_run}"), class_="buttons")
    return HTMLResponse(site.page(str(run["name"]), message, link), headers={"refresh": "1"})


@router.post("/run/{name}/stop")
def stop(site: Here, name: str) -> Response:
    """Ask Prefect to cancel a run; finished steps and the last training checkpoint are kept."""
    body = {"state": {"type": "CANCELLING"}, "force": True}
    server_beside(site.store).insist("POST", f"/flow_runs/{_own(site.store, name)}/set_state", body)
    return RedirectResponse(f"/puna/run/{quote(name)}", 303)


@router.post("/run/{name}/again")
async def again(site: Here, name: str, request: Request) -> Response:
    """Start a run again with the same parameters; existing artifacts are reused."""
    form = await form_fields(request)

    def create() -> str:
        server = server_beside(site.store)
        run = server.insist("GET", f"/flow_runs/{_own(site.store, name)}")
        return _create_run(server, run["deployment_id"], run["name"], run["parameters"], form)

    return RedirectResponse(await run_in_threadpool(create), 303)


@router.get("/form/{name}")
def prefects_form(site: Here, name: str, request: Request) -> Response:
    """Redirect to Prefect's form of a flow or stage. The query may name a recipe's step, whose values then fill the form of a stage."""
    what, query = offer_of(name).what, request.query_params
    if site.prefect is None:
        raise PunaError("forms need Prefect: start `puna up` instead of `puna web`")
    target, parameters = deployment(server_beside(site.store), name), ""
    if "recipe" in query and isinstance(what, Stage):
        if (values := values_of(what, query["recipe"], query.get("step", what.name))) is None:
            raise PunaError(f"{name}: recipe {query['recipe']} has no settings for it")
        parameters = f"?parameters={quote(json.dumps({**target['parameters'], 'config': values}))}"
    return RedirectResponse(f"/v2/deployments/deployment/{target['id']}/run{parameters}")


@router.get("/deployment/{name}")
def schedules(site: Here, name: str) -> Response:
    return RedirectResponse(f"/v2/deployments/deployment/{deployment(server_beside(site.store), name)['id']}")


def _own(store: Store, name: str) -> str:
    if (flow_run := flow_run_of(store, name)) is None:
        raise PunaError(f"run {name}: was not started from these pages; repeat its command where it was started")
    return flow_run


def server_beside(store: Store) -> Server:
    """Return the Prefect server that starts runs for the store's pages. Raise PunaError if none runs, as with `puna web`."""
    note = read_note(store.root)
    if note is None:
        raise PunaError("runs are started by Prefect: start `puna up` instead of `puna web`")
    return Server(str(note["api"]), str(note.get("auth") or ""))


def deployment(server: Server, name: str) -> dict[str, Any]:
    asking = {"deployments": {"tags": {"all_": ["puna"]}}, "flows": {"name": {"any_": [name]}}}
    deployments: list[dict[str, Any]] = server.insist("POST", "/deployments/filter", asking)
    if not deployments:
        raise PunaError(f"{name}: has no form on the server yet; try again in some seconds")
    return deployments[0]
