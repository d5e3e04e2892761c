"""The first page: runs at work, forms to start, finished runs, aliases."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse

from puna.flows.html.markup import Content, Html, counted_rows, duration, number, section, table, tag
from puna.flows.prefect.forms import offers
from puna.flows.web.frame import Here, artifact_link, badge, bar, button, note, pages, projects_nav, run_link, spent, when
from puna.storage import PunaError, Store
from puna.storage.runs import RunLog

MOST_RUNS = 50
LOOKED_SECONDS = 1.0
"""Time between two looks at the run of an open page."""
FIRST = "Each form shows which steps are reused and what the others may cost. Nothing runs before you press Start."
router = pages("", "Runs", at=1)


@router.get("/")
def home(site: Here, older: Annotated[int, Query(ge=0)] = 0, project: str | None = None) -> str:
    """Return the page of runs and aliases, of all projects or of one. `older`: so many newer runs are left out."""
    store = site.store
    since, names = state_digest(store, None), store.runs()[::-1]
    if project is not None:
        store = store.within(project).require_project()
        names = [name for name in names if store.log(name).project == project]
    logs = [store.log(name) for name in names[older : older + MOST_RUNS]]
    working = [log for log in logs if log.state == "at work"]
    return site.page(
        "Puna's store",
        projects_nav(store, project, "/puna/", every=True),
        [working_view(store, log) for log in working],
        section("start", "Start", FIRST, starts()),
        section("runs", "Runs", None, runs_view(logs), _pages(len(names), older, project)) if names else _nothing(site.prefect),
        section("aliases", "Aliases", "The newest of each name, as inputs take them.", aliases_view(store, project)),
        here="", live=f"/puna/events?since={since}", lead=tag("code", store.uri),
    )  # fmt: skip


def _nothing(prefect: str | None) -> Html:
    how: Content = [tag("b", "curate"), ", started above,"] if prefect else tag("code", "puna run curate --recipe demo")
    return tag("p", "This store holds no run yet. ", how, " makes one; it fetches a sample of real pages first.", class_="lead")


def _pages(count: int, older: int, project: str | None) -> Content:
    links, more = [], f"&project={project}" if project else ""
    if older:
        links.append(tag("a", "newer", href=f"/puna/?older={max(0, older - MOST_RUNS)}{more}"))
    if older + MOST_RUNS < count:
        links.append(tag("a", "older", href=f"/puna/?older={older + MOST_RUNS}{more}"))
    return tag("p", links, class_="more-links") if links else None


def progress_of(store: Store, run: str) -> dict[str, Any] | None:
    """Return the progress of a run's current step, as its process noted it."""
    try:
        note = json.loads((store.root / "progress" / f"{run}.json").read_text())
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def state_digest(store: Store, run: str | None) -> str:
    """Return a digest of the displayed state of a run, or of the newest runs; it changes with that state."""
    names = store.runs()[-3:] if run is None else [run]
    stats = [store.files.stat(f"runs/{one}.jsonl") for one in names]
    state = [names, [stat and stat.version for stat in stats], [(progress_of(store, one), store.files.held(f"run-{one}")) for one in names]]
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def working_view(store: Store, log: RunLog) -> Html:
    """Return a run at work: its last step, and the step's progress if known."""
    now = progress_of(store, log.name)
    count = f"{len(log.made)} steps done"
    if now is None:
        inside: Content = note(count)
    elif not now["total"]:
        inside = [tag("p", tag("b", now["step"])), note(count)]
    else:
        share = now["done"] / max(now["total"], 1e-9)
        left = now["seconds"] * (1 - share) / share if share > 0.02 else None
        words = f"{now['step']}: {100 * share:.0f} %, {number(now['done'])} of {number(now['total'])} {now['note']}"
        after = f", about {duration(left)} left" if left is not None and share < 1 else ""
        inside = [tag("p", tag("b", words), after), bar(share, words), note(count)]
    return tag("section", tag("h2", run_link(log.name, f"{log.title} is at work")), inside, class_="working")


def starts() -> Html:
    links = [button(offer.what.name, f"/puna/start/{offer.flow}") for offer in offers() if offer.group == "flow"]
    return tag("p", links, button("a stage …", "/puna/start"), class_="buttons")


def aliases_view(store: Store, project: str | None = None) -> Html:
    """Return every alias, of all projects or of one, newest first."""
    entries = []
    for name in store.aliases():
        if project not in (None, store.project_of(name)):
            continue
        try:
            artifact = store.alias(name)
            entries.append((artifact.manifest.created_at, name, artifact))
        except PunaError:
            continue
    rows: list[list[Content]] = []
    for created, name, artifact in sorted(entries, reverse=True, key=lambda item: item[:2]):
        talk = f"/puna/chat?model={store.full_name(name)}"
        use = {"model": ("chat", talk), "documents": ("search", f"/puna/documents?artifact={artifact.id}")}
        words, address = use.get(artifact.kind, ("look", f"/puna/artifact/{artifact.kind}/{artifact.key[:12]}"))
        created_at = when(datetime.fromisoformat(created))
        link, use_link = artifact_link(artifact), tag("a", words, href=address)
        rows.append([tag("b", name), link, artifact.manifest.stage, counted_rows(artifact) or "–", created_at, use_link])
    if not rows:
        return note("No alias is set yet.")
    return table(["alias", "artifact", "made by", "rows", "made", "use"], rows, numeric=(3,))


def runs_view(logs: list[RunLog]) -> Html:
    """Return runs as a table, with two of them to compare."""
    rows: list[list[Content]] = []
    for log in logs:
        box = tag("input", type="checkbox", name="run", value=log.name, aria_label=f"compare {log.name}")
        reused = sum(record.reused for record in log.made)
        why = tag("small", log.error.partition("\n")[0]) if log.error else None
        cells: list[Content] = [[run_link(log.name, log.title), why], badge(log), when(log.opened), spent(log)]
        rows.append([box, *cells, number(len(log.made)), number(reused)])
    listing = table([tag("small", "pick"), "run", "state", "began", "took", "artifacts", "reused"], rows, numeric=(4, 5, 6))
    return tag("form", listing, tag("p", tag("button", "Compare two")), action="/puna/compare", method="get")


async def _events(store: Store, request: Request, name: str | None, since: str) -> AsyncIterator[str]:
    """Yield a line whenever a run, or any run, has changed. `since`: the state shown by the page, which may be past by now."""
    while not await request.is_disconnected():
        now = await run_in_threadpool(state_digest, store, name)
        yield f"data: {json.dumps('changed')}\n\n" if now != since else ": still\n\n"
        since = now
        await asyncio.sleep(LOOKED_SECONDS)


@router.get("/events")
@router.get("/events/{name}")
def events(site: Here, request: Request, name: str | None = None, since: str = "") -> Response:
    """Return the events after which an open page reloads."""
    lines = _events(site.store, request, name, since)
    return StreamingResponse(lines, media_type="text/event-stream", headers={"cache-control": "no-store"})
