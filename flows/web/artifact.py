"""The pages of artifacts: a list of them, and one with its rows, schema, numbers, lineage and uses."""

from __future__ import annotations

import itertools
import json
from typing import Annotated
from urllib.parse import quote

from fastapi import Query
from fastapi.responses import HTMLResponse

from puna.flows.engine.declare import Flow
from puna.flows.engine.trace import load_flows, load_stages
from puna.flows.html.markup import Content, Html, details, duration, number, part, section, size, table, tag
from puna.flows.html.plot import Plot
from puna.flows.html.svg import draw, grid
from puna.flows.prefect.forms import flow_name
from puna.flows.web.frame import Site, artifact_link, page, pages, plain, problem, projects_nav, run_link
from puna.stages.contract import Stage
from puna.storage import Artifact, PunaError, Store
from puna.storage.explain import changes, explain, flat
from puna.storage.schemas import KINDS, TABLES

SHOWN_ROWS = 20
MOST_LISTED = 200
MOST_USERS = 60
COSTS = {"took": duration, "stored": size, "peak memory": size}


def list_page(store: Store, kind: str | None, prefect: str | None, project: str | None = None) -> Html:
    """Return the page of artifacts, newest first, of one kind or of all, of one project or of all."""
    store = store.within(project).require_project()
    entries = [one for one in reversed(store.entries(project)) if kind in (None, one["kind"])]
    artifacts = [Artifact(one["kind"], one["key"], store.files) for one in entries]
    names, suspects, more = store.names(project), store.suspects(), f"&project={project}" if project else ""
    kinds = [tag("a", "all", href=f"/puna/artifacts?{more[1:]}".rstrip("?"), aria_current="page" if kind is None else None)]
    kinds += [tag("a", k, href=f"/puna/artifacts?kind={k}{more}", aria_current="page" if k == kind else None) for k in KINDS]
    projects = projects_nav(store, project, f"/puna/artifacts?kind={kind}" if kind else "/puna/artifacts", every=True)
    rows: list[list[Content]] = []
    for artifact in artifacts[:MOST_LISTED]:
        m = artifact.manifest
        count = number(artifact.rows()) if artifact.kind in artifact.tables else ""
        stored = size(sum(record.bytes for record in m.files.values()))
        marks = [*names.get(artifact.key, []), *(["suspect"] if artifact.key in suspects else [])]
        aliases = [tag("span", name, class_="tag") for name in marks]
        box = tag("input", type="checkbox", name="artifact", value=artifact.id, aria_label=f"compare {artifact.id}")
        rows.append([box, artifact_link(artifact), m.stage, count, stored, m.created_at[:16].replace("T", " "), aliases])
    listed = table([tag("small", "pick"), "artifact", "made by", "rows", "stored", "made, UTC", "aliases"], rows, numeric=(3, 4))
    form = tag("form", listed, tag("p", tag("button", "Compare two")), action="/puna/artifacts/compare", method="get")
    left = len(artifacts) - MOST_LISTED
    return page(
        "Artifacts", projects, tag("nav", kinds, aria_label="Kinds"), form if rows else tag("p", "None of this kind yet.", class_="note"),
        tag("p", f"{left:,} older ones; ask SQL: select * from artifacts", class_="note") if left > 0 else None,
        here="artifacts", prefect=prefect,
    )  # fmt: skip


def artifact_page(store: Store, artifact: Artifact, prefect: str | None, shown: str | None, start: int) -> Html:
    """Return one artifact. `shown`, `start`: the table whose rows are shown, and from which."""
    m = artifact.manifest
    aliases = [tag("span", name, class_="tag") for name in store.names().get(artifact.key, [])]
    damage, suspect = artifact.damage(quick=True), store.suspects().get(artifact.key)
    stored = size(sum(record.bytes for record in m.files.values()))
    facts = [
        ("Made by", [m.stage, " in run ", run_link(m.run) if m.run in store.runs() else m.run or "–"]),
        ("Made", f"{m.created_at[:16].replace('T', ' ')} UTC in {duration(float(m.timings.get('seconds', 0.0)))}"),
        ("Stored", f"{stored}; peak memory {size(m.peak_memory_bytes)}"),
        ("Folder", tag("code", str(artifact.folder))),
    ]  # fmt: skip
    measured: list[list[Content]] = [[n.replace("_", " "), v if isinstance(v, str) else number(v)] for n, v in m.metrics.items()]
    settings: list[list[Content]] = [[name, plain(json.dumps(value))] for name, value in flat(m.config).items() if name]
    before, differences = explain(store, artifact)
    why = None
    if before is not None and differences:
        both = "/puna/artifacts/compare"
        note = [artifact_link(before), " ", tag("a", "compare the two", href=f"{both}?artifact={before.id}&artifact={artifact.id}")]
        why = part("Differs from the one before", tag("ul", [tag("li", str(change)) for change in differences[:12]]), note=note)
    return page(
        artifact.id,
        [problem(f"It is damaged: {'; '.join(damage)}. Run the stage again, or `puna verify --quarantine`")] if damage else None,
        [problem(f"It is suspect: {suspect}. A run that needs it makes it anew")] if suspect else None,
        tag("p", aliases) if aliases else None,
        tag("dl", [[tag("dt", name), tag("dd", value)] for name, value in facts], class_="facts-list"),
        tag("div", _uses(artifact), class_="buttons"),
        section("rows", "Rows", None, _rows(artifact, shown, start)) if m.tables else None,
        section("measured", "Measured", None, table(["", ""], measured, numeric=(1,)) if measured else None,
                grid(draw(Plot.of(figure)) for _, figure in sorted(m.figures.items()))),
        section("lineage", "Lineage", None, _lineage(store, artifact)),
        section("settings", "Settings", None, why,
                _folded("fields", ["field", "value"], settings, open_=len(settings) < 15),
                _folded("files", ["file", "bytes"], [[name, record.bytes] for name, record in m.files.items()])),
        here="artifacts", prefect=prefect,
    )  # fmt: skip


def compare_page(store: Store, names: list[str], prefect: str | None) -> Html:
    """Return two artifacts side by side: what differs in how they were made, and in what they are."""
    if len(names) != 2:
        raise PunaError(f"compare: choose two artifacts, not {len(names)}")
    first, second = (store.resolve(name) for name in names)
    one, other = first.manifest, second.manifest
    rows: list[list[Content]] = [[c.what, tag("b", c.name), plain(c.before), plain(c.now)] for c in changes(one, other)]
    facts = [(m.timings.get("seconds", 0.0), sum(r.bytes for r in m.files.values()), m.peak_memory_bytes) for m in (one, other)]
    gave: list[list[Content]] = [["made by", one.stage, other.stage, ""]]
    gave += [[f"rows of {name}", *_pair(*(float(a.rows(name)) if name in a.tables else None for a in (first, second)))]
             for name in dict.fromkeys([*first.tables, *second.tables])]  # fmt: skip
    gave += [[name, show(facts[0][n]), show(facts[1][n]), ""] for n, (name, show) in enumerate(COSTS.items())]
    for name in dict.fromkeys([*one.metrics, *other.metrics]):
        gave.append([name.replace("_", " "), *_pair(one.metrics.get(name), other.metrics.get(name))])
    head: list[Content] = [artifact_link(first), artifact_link(second)]
    same = "Their contents are the same." if one.data_digest == other.data_digest else "Their contents differ."
    how = table(["", "field", *head], rows) if rows else tag("p", "In the same way.", class_="note")
    return page(
        "Two artifacts",
        section("given", "How they were made", None, how),
        section("gave", "What they are", None, table(["", *head, "difference"], gave, numeric=(1, 2, 3))),
        here="artifacts", prefect=prefect, lead=same,
    )  # fmt: skip


def _pair(one: float | str | None, other: float | str | None) -> list[Content]:
    """Return two values of the same name, and by how much the second is more."""
    cells: list[Content] = ["–" if value is None else value if isinstance(value, str) else number(value) for value in (one, other)]
    both = all(isinstance(value, int | float) for value in (one, other))
    gap = float(other) - float(one) if both and one is not None and other is not None else 0.0
    return [*cells, f"{'+' if gap > 0 else ''}{number(gap)}" if gap else ""]


def _folded(what: str, head: list[Content], rows: list[list[Content]], *, open_: bool = False) -> Html | None:
    """Return a table that opens at a click."""
    return details(f"{len(rows)} {what}", table(head, rows), open_=open_, class_="more") if rows else None


def _rows(artifact: Artifact, shown: str | None, start: int) -> Html:
    name = shown or (artifact.kind if artifact.kind in artifact.tables else artifact.tables[0])
    record = artifact.record(name)
    here = f"/puna/artifact/{artifact.kind}/{artifact.key[:12]}"
    tabs = [
        tag("a", f"{other} ({artifact.rows(other):,})", href=f"{here}?table={other}#rows", aria_current="page" if other == name else None)
        for other in artifact.tables
    ]
    meanings = {field.name: (field.metadata or {}).get(b"meaning", b"").decode() for field in TABLES[name].schema}
    columns: list[list[Content]] = [[tag("b", column), kind, meanings.get(column, "")] for column, kind in record.columns.items()]
    rows: list[list[Content]] = [[plain(value, 240) for value in row.values()] for row in _some(artifact, name, start)]
    steps: list[Content] = []
    if start:
        steps.append(tag("a", "before", href=f"{here}?table={name}&start={max(0, start - SHOWN_ROWS)}#rows"))
    if start + SHOWN_ROWS < record.rows:
        steps.append(tag("a", "next", href=f"{here}?table={name}&start={start + SHOWN_ROWS}#rows", rel="next"))
    last = min(start + SHOWN_ROWS, record.rows)
    counted = f"{start + 1:,} to {last:,} of {record.rows:,}" if record.rows else "no rows"
    query = quote(f"select * from {name} where artifact = '{artifact.key}' limit 100")
    return tag(
        "div", tag("nav", tabs, aria_label="Tables"), _folded("columns and what they mean", ["column", "type", "meaning"], columns),
        table(list(record.columns), rows) if rows else None,
        tag("p", counted, " · ", [[step, " · "] for step in steps], tag("a", "ask SQL", href=f"/puna/sql?q={query}"), class_="note"),
        class_="rows",
    )  # fmt: skip


def _some(artifact: Artifact, name: str, start: int) -> list[dict[str, object]]:
    """Return the rows of one screen; what stands before them is read too."""
    rows: list[dict[str, object]] = []
    for batch in artifact.batches(name, rows=1024):
        if start < batch.num_rows:
            rows += batch.slice(start, SHOWN_ROWS - len(rows)).to_pylist()
        start = max(0, start - batch.num_rows)
        if len(rows) >= SHOWN_ROWS:
            break
    return rows


def _lineage(store: Store, artifact: Artifact) -> Html:
    made_of: list[list[Content]] = []
    for item in artifact.manifest.inputs:
        source = None if item.kind == "external" else store.find(item.kind, item.key)
        gone = item.key if item.kind == "external" else f"{item.kind}/{item.key[:12]} (gone)"
        link = artifact_link(source) if source else tag("code", gone)
        made_of.append([item.name, link, item.stage])
    users = (a for a in store.artifacts() if any(i.key == artifact.key for i in a.manifest.inputs))
    used = list(itertools.islice(users, MOST_USERS))
    by: list[list[Content]] = [[artifact_link(a), a.manifest.stage, a.manifest.created_at[:16].replace("T", " ")] for a in used]
    return tag(
        "div",
        part("Made of", table(["as", "artifact", "made by"], made_of) if made_of else tag("p", "Nothing of this store.", class_="note")),
        part("Used by", table(["artifact", "made by", "made, UTC"], by) if by else tag("p", "Nothing yet.", class_="note")),
    )


def _uses(artifact: Artifact) -> list[Content]:
    """Return the possible uses of an artifact: chat, thresholds, a stage or a flow on it."""
    found: list[Content] = []
    if artifact.kind == "model":
        found.append(tag("a", "Chat", href=f"/puna/chat?model={artifact.id}", class_="button"))
    if artifact.manifest.stage == "select":
        found.append(tag("a", "Move its thresholds", href=f"/puna/rules?artifact={artifact.key[:12]}", class_="button"))
    links = []
    everything: list[Flow | Stage] = [*load_flows().values(), *load_stages().values()]
    for what in everything:
        for spec in what.inputs:
            if spec.kind == artifact.kind:
                name = flow_name(what) if isinstance(what, Stage) else what.name
                links.append(tag("li", tag("a", what.name, href=f"/puna/start/{name}?{spec.name}={artifact.id}"), f" as {spec.name}"))
    if links:
        found.append(details(tag("span", "Use in …", class_="button"), tag("ul", links), class_="menu"))
    return found


def resolved(store: Store, kind: str, key: str) -> Artifact:
    if kind not in KINDS:
        raise PunaError(f"{kind}: is no kind of artifact; they are {', '.join(KINDS)}")
    return store.resolve(f"{kind}/{key}")


@pages("artifacts", "Artifacts", at=3)
def routes(site: Site) -> None:
    """Add the pages of artifacts."""

    @site.app.get("/artifacts", response_class=HTMLResponse)
    def listed(kind: str | None = None, project: str | None = None) -> str:
        return list_page(site.store, kind, site.prefect, project)

    @site.app.get("/artifact/{kind}/{key}", response_class=HTMLResponse)
    def one(kind: str, key: str, table: str | None = None, start: Annotated[int, Query(ge=0)] = 0) -> str:
        return artifact_page(site.store, resolved(site.store, kind, key), site.prefect, table, start)

    @site.app.get("/artifacts/compare", response_class=HTMLResponse)
    def compared_artifacts(chosen: Annotated[list[str], Query(alias="artifact")] = []) -> str:  # noqa: B006
        return compare_page(site.store, chosen, site.prefect)
