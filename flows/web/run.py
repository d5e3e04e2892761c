"""The page of a run, and two runs side by side."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from fastapi.responses import HTMLResponse, Response

from puna.flows.html.markup import Content, Html, duration, number, section, table, tag
from puna.flows.html.svg import draw, grid
from puna.flows.report import training
from puna.flows.report.compare import compare_view
from puna.flows.report.curate import funnel_view
from puna.flows.report.funnel import characters_per_token, funnel
from puna.flows.report.lineage import lineage_view
from puna.flows.report.page import page as report_page
from puna.flows.report.run import Run, Step
from puna.flows.web.frame import Site, artifact_link, badge, bar, page, pages, problem, run_link, spent, when
from puna.flows.web.home import state_digest, working_view
from puna.flows.web.start import once
from puna.storage import PunaError, Store

MOST_PLOTS = 12


def run_page(store: Store, name: str, prefect: str | None) -> Html:
    """Return a run: its steps as they are now, what they measured, the funnel when asked for."""
    since, run = state_digest(store, name), Run.open(store, name)
    log = run.log
    reused = sum(step.reused for step in run.steps)
    again = [other for other in store.runs() if other < log.name and store.log(other).flow == log.flow][-1:]
    tiles = [
        _tile("State", badge(log)), _tile("Began", when(log.opened)), _tile("Took", spent(log)),
        _tile("Artifacts", f"{len(run.steps)}, {reused} reused"),
    ]  # fmt: skip
    plots = [draw(plot) for step in run.steps for plot in training.titled(step, training.figures(step))]
    links: list[Content] = [
        tag("a", "Full report", href=f"/puna/report/{log.name}", class_="button"),
        tag("a", "Funnel", href=f"/puna/run/{log.name}/funnel", class_="button") if run.kind("pages", "documents") else None,
        tag("a", "Compare with the run before", href=f"/puna/compare?run={again[0]}&run={log.name}", class_="button") if again else None,
    ]
    mine = next((event.get("flow_run") for event in store.events(log.name)[:1]), None) if prefect else None
    if mine:
        word, label = ("stop", "Stop") if log.state == "at work" else ("again", "Run again" if log.state == "finished" else "Go on")
        links.append(tag("form", once(), tag("button", label), action=f"/puna/run/{log.name}/{word}", method="post"))
        links.append(tag("a", "In Prefect", href=f"/v2/runs/flow-run/{mine}", class_="button"))
    return page(
        log.title,
        tag("dl", tiles, class_="tiles"),
        problem(log.error) if log.error else None,
        problem(f"No longer in the store: {', '.join(run.missing)}") if run.missing else None,
        working_view(store, log) if log.state == "at work" else None,
        tag("div", links, class_="buttons"),
        section("steps", "Steps", None, steps_view(run.steps)),
        section("plots", "Measured", None, grid(plots[:MOST_PLOTS])),
        section("lineage", "Lineage", "What was made of what.", lineage_view(run)),
        prefect=prefect, live=f"/puna/events/{log.name}?since={since}" if log.state == "at work" else None, lead=tag("code", log.name),
    )  # fmt: skip


def funnel_page(store: Store, name: str, prefect: str | None) -> Html:
    """Show the funnel of a run's documents, with examples for each rule."""
    run = Run.open(store, name)
    levels = funnel(run)
    if not levels:
        raise PunaError(f"run {run.log.name}: made no pages or documents")
    per_token = characters_per_token(run)
    return page(f"Funnel of {run.log.flow}", funnel_view(levels, per_token), prefect=prefect, lead=run_link(run.log.name))


def _tile(name: str, value: Content) -> Html:
    return tag("div", tag("dt", name), tag("dd", value), class_="tile")


def steps_view(steps: list[Step]) -> Html:
    """Return steps with what they made, in order."""
    longest = max((step.seconds for step in steps), default=0.0) or 1.0
    rows: list[list[Content]] = []
    for step in steps:
        artifact = step.artifact
        state = tag("span", "reused", class_="tag") if step.reused else duration(step.seconds)
        rows_kept = artifact.rows() if artifact.kind in artifact.tables else None
        dropped = artifact.rows("dropped") if "dropped" in artifact.tables else None
        drawn = None if step.reused else bar(step.seconds / longest, duration(step.seconds))
        cells: list[Content] = [
            number(rows_kept) if rows_kept is not None else "", number(dropped) if dropped is not None else "", state, drawn,
        ]  # fmt: skip
        rows.append([[tag("b", step.label), tag("small", step.stage)], artifact_link(artifact), *cells])
    if not rows:
        return tag("p", "No step has finished yet.", class_="note")
    return table(["step", "artifact", "rows", "dropped", "took", "share of the longest"], rows, numeric=(2, 3, 4))


def compare_page(store: Store, names: list[str], prefect: str | None) -> Html:
    if len(names) != 2:
        raise PunaError(f"compare: choose two runs, not {len(names)}")
    first, second = (Run.open(store, name) for name in sorted(names))
    titled = [[run_link(run.log.name), " ", badge(run.log), Html("<br>")] for run in (first, second)]
    return page("Two runs", compare_view(first, second, artifact_link), prefect=prefect, lead=titled)


@pages()
def routes(site: Site) -> None:
    """Add the pages of runs, their comparison, and their reports."""

    @site.app.get("/run/{name}", response_class=HTMLResponse)
    def one(name: str) -> str:
        return run_page(site.store, name, site.prefect)

    @site.app.get("/run/{name}/funnel", response_class=HTMLResponse)
    def funnel(name: str) -> str:
        return funnel_page(site.store, name, site.prefect)

    @site.app.get("/compare", response_class=HTMLResponse)
    def compared(run_names: Annotated[list[str], Query(alias="run")] = []) -> str:  # noqa: B006
        return compare_page(site.store, run_names, site.prefect)

    @site.app.get("/report/{name}")
    def report(name: str) -> Response:
        # The report holds its script and needs nothing else.
        alone = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
        return HTMLResponse(report_page(Run.open(site.store, name)), headers={"content-security-policy": alone})
