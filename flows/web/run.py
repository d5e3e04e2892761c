"""The page of a run, and two runs side by side."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from fastapi.responses import HTMLResponse, Response

from puna.flows.html.markup import Content, Html, counted_rows, duration, section, table, tag
from puna.flows.html.svg import draw, grid
from puna.flows.report import training
from puna.flows.report.compare import compare_view
from puna.flows.report.curate import funnel_view
from puna.flows.report.funnel import characters_per_token, funnel
from puna.flows.report.lineage import lineage_view
from puna.flows.report.page import page as report_page
from puna.flows.report.page import tile
from puna.flows.report.run import Run, Step
from puna.flows.web.frame import Here, artifact_link, badge, bar, button, note, once, pages, problem, run_link, spent, when
from puna.flows.web.home import state_digest, working_view
from puna.flows.web.start import flow_run_of
from puna.storage import PunaError

MOST_PLOTS = 12
ALONE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The report holds its script and needs nothing else."""
router = pages()


@router.get("/run/{name}")
def run_page(site: Here, name: str) -> str:
    """Return a run: its steps as they are now, and what they measured."""
    store = site.store
    since, run = state_digest(store, name), Run.open(store, name)
    log = run.log
    reused = sum(step.reused for step in run.steps)
    again = [other for other in store.runs() if other < log.name and store.log(other).flow == log.flow][-1:]
    tiles = [
        tile("State", badge(log)), tile("Began", when(log.opened)), tile("Took", spent(log)),
        tile("Artifacts", f"{len(run.steps)}, {reused} reused"),
    ]  # fmt: skip
    plots = [draw(plot) for step in run.steps for plot in training.titled(step, training.figures(step))]
    links: list[Content] = [
        button("Full report", f"/puna/report/{log.name}"),
        button("Funnel", f"/puna/run/{log.name}/funnel") if run.kind("pages", "documents") else None,
        button("Compare with the run before", f"/puna/compare?run={again[0]}&run={log.name}") if again else None,
    ]
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
        section("plots", "Measured", None, grid(plots[:MOST_PLOTS])),
        section("lineage", "Lineage", "What was made of what.", lineage_view(run)),
        live=f"/puna/events/{log.name}?since={since}" if log.state == "at work" else None, lead=tag("code", log.name),
    )  # fmt: skip


@router.get("/run/{name}/funnel")
def funnel_page(site: Here, name: str) -> str:
    """Return the funnel of a run's documents, with examples for each rule."""
    run = Run.open(site.store, name)
    levels = funnel(run)
    if not levels:
        raise PunaError(f"run {run.log.name}: made no pages or documents")
    per_token = characters_per_token(run)
    return site.page(f"Funnel of {run.log.flow}", funnel_view(levels, per_token), lead=run_link(run.log.name))


def steps_view(steps: list[Step]) -> Html:
    longest = max((step.seconds for step in steps), default=0.0) or 1.0
    rows: list[list[Content]] = []
    for step in steps:
        artifact = step.artifact
        state = tag("span", "reused", class_="tag") if step.reused else duration(step.seconds)
        drawn = None if step.reused else bar(step.seconds / longest, duration(step.seconds))
        label: Content = [tag("b", step.label), tag("small", step.stage)]
        rows.append([label, artifact_link(artifact), counted_rows(artifact), counted_rows(artifact, "dropped"), state, drawn])
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
