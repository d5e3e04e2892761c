"""Pages about runs: the list of runs with start buttons and aliases, one run with its steps and funnel, and two runs side by side."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, Response, StreamingResponse

from puna.flows.html.markup import Content, Html, counted_rows, duration, number, section, table, tag
from puna.flows.html.plot import grid
from puna.flows.prefect.forms import offers
from puna.flows.report import training
from puna.flows.report.compare import compare_view
from puna.flows.report.curate import funnel_view
from puna.flows.report.funnel import characters_per_token, funnel
from puna.flows.report.lineage import lineage_view
from puna.flows.report.page import page as report_page
from puna.flows.report.page import tile
from puna.flows.report.run import Run, Step
from puna.flows.server.reporter import progress_text
from puna.flows.web.frame import Here, artifact_link, badge, bar, button, note, once, pages, problem, projects_nav, run_link, when
from puna.storage import Artifact, PunaError, Store
from puna.storage.runs import RunLog

MOST_RUNS = 50
MOST_PLOTS = 12
MOST_LINES = 500
LAST = f"What they wrote last, up to {MOST_LINES} lines."
LOOKED_SECONDS = 1.0  # seconds between two checks for changes of the runs that an open page shows
ALONE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Content security policy of the report page, whose style and scripts are inline."""
FIRST = "Each form shows which steps are reused and what the others may cost. Nothing runs before you press Start."
router = pages("", "Runs", at=1)


@router.get("/")
def home(site: Here, older: Annotated[int, Query(ge=0)] = 0, project: str | None = None) -> str:
    """Return the home page: the runs and aliases of `project`, by default of all projects. `older`: number of newest runs to skip."""
    store = site.store
    since, names = state_digest(store, None), store.runs()[::-1]
    if project is not None:
        store = store.within(project).require_project()
        names = [name for name in names if store.log(name).project == project]
    logs = [store.log(name) for name in names[older : older + MOST_RUNS]]
    how: Content = [tag("b", "curate"), ", started above,"] if site.prefect else tag("code", "puna run curate --recipe demo")
    none = tag("p", "This store has no run yet. ", how, " creates one; it first downloads a sample of real pages.", class_="lead")
    flows = [button(offer.what.name, f"/puna/start/{offer.flow}") for offer in offers() if offer.group == "flow"]
    return site.page(
        "Puna's store",
        projects_nav(store, project, "/puna/", every=True),
        [working_view(store, log) for log in logs if log.state == "at work"],
        section("start", "Start", FIRST, tag("p", flows, button("a stage …", "/puna/start"), class_="buttons")),
        section("runs", "Runs", None, runs_view(logs), _pages(len(names), older, project)) if names else none,
        section("aliases", "Aliases", "Aliases name artifacts; use them as inputs.", aliases_view(store, project)),
        here="", live=f"/puna/events?since={since}", lead=tag("code", store.uri),
    )  # fmt: skip


def _pages(count: int, older: int, project: str | None) -> Content:
    links, more = [], f"&project={project}" if project else ""
    if older:
        links.append(tag("a", "newer", href=f"/puna/?older={max(0, older - MOST_RUNS)}{more}"))
    if older + MOST_RUNS < count:
        links.append(tag("a", "older", href=f"/puna/?older={older + MOST_RUNS}{more}"))
    return tag("p", links, class_="more-links") if links else None


def progress_of(store: Store, run: str) -> dict[str, Any] | None:
    """Return the progress of a run's current step, from the file that the run's process writes; None without a readable file."""
    try:
        note = json.loads((store.root / "progress" / f"{run}.json").read_text())
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def state_digest(store: Store, run: str | None) -> str:
    """Return a digest of the displayed state of a run (None: of the three newest runs); pages reload when the digest changes."""
    names = store.runs()[-3:] if run is None else [run]
    stats = [store.files.stat(f"runs/{one}.jsonl") for one in names]
    state = [names, [s and s.version for s in stats], [(progress_of(store, one), store.files.is_held(f"run-{one}")) for one in names]]
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def working_view(store: Store, log: RunLog) -> Html:
    """Return the section on a run in progress: the number of steps done, and the current step with its progress if known."""
    now = progress_of(store, log.name)
    count = f"{len(log.made)} steps done"
    if now is None:
        inside: Content = note(count)
    elif not now["total"]:
        inside = [tag("p", tag("b", now["step"])), note(count)]
    else:
        words = f"{now['step']}: {progress_text((now['done'], now['total'], now['note']), now['seconds'])}"
        inside = [tag("p", tag("b", words)), bar(now["done"] / now["total"], words), note(count)]
    return tag("section", tag("h2", run_link(log.name, f"{log.title} is at work")), inside, class_="working")


def duration_of(log: RunLog) -> str:
    """Return a run's duration as text; for a run in progress, the time since its start; a dash if it has no start."""
    if log.opened is None:
        return "–"
    end = datetime.now(UTC) if log.state == "at work" else log.closed or log.opened
    return duration((end - log.opened).total_seconds())


def aliases_view(store: Store, project: str | None = None) -> Html:
    """Return a table of the aliases of `project`, by default of all projects; aliases of the newest artifacts come first."""
    entries = {one["key"]: one for one in store.entries()}
    own = {name: key for name, key in store.aliases().items() if key in entries and project in (None, store.project_of(name))}
    rows: list[list[Content]] = []
    for name in sorted(own, reverse=True, key=lambda name: (entries[own[name]]["created_at"], name)):
        entry = entries[own[name]]
        artifact = Artifact(entry["kind"], entry["key"], store.files)
        talk = f"/puna/chat?model={store.full_name(name)}"
        use = {"model": ("chat", talk), "documents": ("search", f"/puna/documents?artifact={artifact.id}")}
        words, address = use.get(artifact.kind, ("look", f"/puna/artifact/{artifact.kind}/{artifact.key[:12]}"))
        created_at = when(datetime.fromisoformat(entry["created_at"]))
        link, use_link = artifact_link(artifact), tag("a", words, href=address)
        rows.append([tag("b", name), link, artifact.manifest.stage, counted_rows(artifact) or "–", created_at, use_link])
    if not rows:
        return note("No alias is set yet.")
    return table(["alias", "artifact", "made by", "rows", "made", "use"], rows, numeric=(3,))


def runs_view(logs: list[RunLog]) -> Html:
    rows: list[list[Content]] = []
    for log in logs:
        box = tag("input", type="checkbox", name="run", value=log.name, aria_label=f"compare {log.name}")
        reused = sum(record.reused for record in log.made)
        why = tag("small", log.error.partition("\n")[0]) if log.error else None
        cells: list[Content] = [[run_link(log.name, log.title), why], badge(log), when(log.opened), duration_of(log)]
        rows.append([box, *cells, number(len(log.made)), number(reused)])
    listing = table([tag("small", "pick"), "run", "state", "began", "took", "artifacts", "reused"], rows, numeric=(4, 5, 6))
    return tag("form", listing, tag("p", tag("button", "Compare two")), action="/puna/compare", method="get")


async def _events(store: Store, request: Request, name: str | None, since: str) -> AsyncIterator[str]:
    """Yield an event every `LOOKED_SECONDS` if the named run (None: one of the newest) changed, else a comment. `since`: last digest."""
    while not await request.is_disconnected():
        now = await run_in_threadpool(state_digest, store, name)
        yield f"data: {json.dumps('changed')}\n\n" if now != since else ": still\n\n"
        since = now
        await asyncio.sleep(LOOKED_SECONDS)


@router.get("/events")
@router.get("/events/{name}")
def events(site: Here, request: Request, name: str | None = None, since: str = "") -> Response:
    """Stream an event whenever the named run (without a name: one of the newest runs) changes; an open page then reloads its content."""
    lines = _events(site.store, request, name, since)
    return StreamingResponse(lines, media_type="text/event-stream", headers={"cache-control": "no-store"})


@router.get("/run/{name}")
def run_page(site: Here, name: str) -> str:
    store = site.store
    since, run = state_digest(store, name), Run.open(store, name)
    log = run.log
    reused = sum(step.reused for step in run.steps)
    names = store.runs()
    again = [other for other in names[: names.index(log.name)] if store.log(other).flow == log.flow][-1:]
    tiles = [
        tile("State", badge(log)), tile("Began", when(log.opened)), tile("Took", duration_of(log)),
        tile("Artifacts", f"{len(run.steps)}, {reused} reused"),
    ]  # fmt: skip
    plots = [plot for step in run.steps for plot in training.with_titles(step, training.figures(step)) if not plot.empty]
    links: list[Content] = [button("Full report", f"/puna/report/{log.name}")]
    links += [button("Funnel", f"/puna/run/{log.name}/funnel")] if run.kind("pages", "documents") else []
    links += [button("Compare with the run before", f"/puna/compare?run={again[0]}&run={log.name}")] if again else []
    mine = flow_run_of(store, log.name) if site.prefect else None
    if mine:
        word, label = ("stop", "Stop") if log.state == "at work" else ("again", "Run again" if log.state == "finished" else "Go on")
        links.append(tag("form", once(), tag("button", label), action=f"/puna/run/{log.name}/{word}", method="post"))
        links.append(button("In Prefect", f"/v2/runs/flow-run/{mine}"))
    return site.page(
        log.title,
        tag("dl", tiles, class_="tiles"),
        problem(log.error) if log.error else None,
        problem(f"No longer in the store: {', '.join(run.missing)}") if run.missing else None,
        working_view(store, log) if log.state == "at work" else None,
        tag("div", links, class_="buttons"),
        section("steps", "Steps", None, steps_view(run.steps)),
        section("plots", "Measured", f"The first {MOST_PLOTS}." if plots[MOST_PLOTS:] else None, grid(plots[:MOST_PLOTS])),
        section("processes", "Other processes", LAST, tag("pre", "\n".join(log.lines[-MOST_LINES:]))) if log.lines else None,
        section("lineage", "Lineage", "How each artifact was made.", lineage_view(run)),
        live=f"/puna/events/{log.name}?since={since}" if log.state == "at work" else None, lead=tag("code", log.name),
    )  # fmt: skip


@router.get("/run/{name}/funnel")
def funnel_page(site: Here, name: str) -> str:
    run = Run.open(site.store, name)
    levels = funnel(run)
    if not levels:
        raise PunaError(f"run {run.log.name}: made no pages or documents")
    return site.page(f"Funnel of {run.log.flow}", funnel_view(levels, characters_per_token(run)), lead=run_link(run.log.name))


def steps_view(steps: list[Step]) -> Html:
    longest = max((step.seconds for step in steps), default=0.0) or 1.0
    rows: list[list[Content]] = []
    for step in steps:
        artifact = step.artifact
        state = tag("span", "reused", class_="tag") if step.reused else duration(step.seconds)
        share = None if step.reused else bar(step.seconds / longest, duration(step.seconds))
        label: Content = [tag("b", step.label), tag("small", step.stage)]
        rows.append([label, artifact_link(artifact), counted_rows(artifact), counted_rows(artifact, "dropped"), state, share])
    if not rows:
        return note("No step has finished yet.")
    return table(["step", "artifact", "rows", "dropped", "took", "share of the longest"], rows, numeric=(2, 3, 4))


@router.get("/compare")
def compare_page(site: Here, names: Annotated[list[str], Query(alias="run")] = []) -> str:  # noqa: B006
    if len(names) != 2:
        raise PunaError(f"compare: choose two runs, not {len(names)}")
    first, second = (Run.open(site.store, name) for name in sorted(names))
    titled = [[run_link(run.log.name), " ", badge(run.log), Html("<br>")] for run in (first, second)]
    return site.page("Two runs", compare_view(first, second, artifact_link), lead=titled)


@router.get("/report/{name}")
def report(site: Here, name: str) -> Response:
    return HTMLResponse(report_page(Run.open(site.store, name)), headers={"content-security-policy": ALONE})


def flow_run_of(store: Store, name: str) -> str | None:
    """Return the id of the Prefect flow run that executes a run; None if Prefect did not start the run (from a form or a schedule)."""
    return next((str(event["flow_run"]) for event in store.events(name)[:1] if event.get("flow_run")), None)
