"""Pages about artifacts: the list, one artifact (rows, metrics, lineage, uses), two side by side, and a trained model's rollouts."""

from __future__ import annotations

import itertools
import json
from typing import Annotated
from urllib.parse import quote

from fastapi import Query
from fastapi.concurrency import run_in_threadpool

from puna.flows.engine.declare import Flow
from puna.flows.engine.trace import load_flows, load_stages
from puna.flows.html.markup import Content, Html, counted_rows, details, duration, made_at, number, part, section, size, stored, table, tag
from puna.flows.html.plot import Plot, grid
from puna.flows.prefect.forms import flow_name
from puna.flows.web.frame import Here, artifact_link, button, note, pages, plain, problem, projects_nav, run_link, tab
from puna.stages.contract import Stage
from puna.storage import Artifact, PunaError, Store
from puna.storage.explain import changes, explain, flat
from puna.storage.schemas import KINDS, TABLES

SHOWN_ROWS = 20
MOST_LISTED = 200
MOST_USERS = 60
ROWS = """with rows as (
  select r.*, coalesce(p.messages::json->>'$[#-1].content', r.prompt_id) as prompt
  from (select * from rollouts where artifact = key_of('{0}')) r left join prompts p on p.id = r.prompt_id
    and p.artifact in (select input from lineage where artifact = key_of('{0}') and name = 'prompts'))
"""
RANKED = """select step, prompt, text as answer, turns, score, verifier, reward_model, advantage, logprob, reference_logprob from rows
order by score {}, step, prompt_id, sample limit 20"""
CHANGED = """select prompt, min(step) as first, max(step) as last,
  avg(score) filter (step = low) as early, avg(score) filter (step = high) as late, late - early as change,
  arg_max(text, score) filter (step = low) as best_early, arg_max(text, score) filter (step = high) as best_late
from (select *, min(step) over same as low, max(step) over same as high from rows window same as (partition by prompt_id))
group by prompt_id, prompt having early != late order by abs(change) desc, prompt_id limit 20"""
PARTS = {"best": RANKED.format("desc"), "worst": RANKED.format("asc"), "changed": CHANGED}
"""Section of the rollouts page → SQL query, to be preceded by `ROWS`."""
router = pages("artifacts", "Artifacts", at=3)


@router.get("/artifacts")
def list_page(site: Here, kind: str | None = None, project: str | None = None) -> str:
    """Return the page that lists the newest `MOST_LISTED` artifacts. `kind`, `project`: only artifacts of this kind, of this project."""
    store = site.store.within(project).require_project()
    artifacts = store.artifacts(kind, project)[::-1]
    names, suspects, more = store.names(project), store.suspects(), f"&project={project}" if project else ""
    kinds = [tab("all", f"/puna/artifacts?{more[1:]}".rstrip("?"), kind is None)]
    kinds += [tab(k, f"/puna/artifacts?kind={k}{more}", k == kind) for k in KINDS]
    projects = projects_nav(store, project, f"/puna/artifacts?kind={kind}" if kind else "/puna/artifacts", every=True)
    rows: list[list[Content]] = []
    for artifact in artifacts[:MOST_LISTED]:
        m = artifact.manifest
        marks = [*names.get(artifact.key, []), *(["suspect"] if artifact.key in suspects else [])]
        aliases = [tag("span", name, class_="tag") for name in marks]
        box = tag("input", type="checkbox", name="artifact", value=artifact.id, aria_label=f"compare {artifact.id}")
        rows.append([box, artifact_link(artifact), m.stage, counted_rows(artifact), stored(artifact), made_at(artifact), aliases])
    listed = table([tag("small", "pick"), "artifact", "made by", "rows", "stored", "made, UTC", "aliases"], rows, numeric=(3, 4))
    form = tag("form", listed, tag("p", tag("button", "Compare two")), action="/puna/artifacts/compare", method="get")
    left = len(artifacts) - MOST_LISTED
    return site.page(
        "Artifacts", projects, tag("nav", kinds, aria_label="Kinds"), form if rows else note("None of this kind yet."),
        note(f"{left:,} older ones; list them with SQL: select * from artifacts") if left > 0 else None, here="artifacts",
    )  # fmt: skip


@router.get("/artifact/{kind}/{key}")
def artifact_page(
    site: Here, kind: str, key: str, shown: Annotated[str | None, Query(alias="table")] = None, start: Annotated[int, Query(ge=0)] = 0
) -> str:
    """Return one artifact's page. `shown`: table to show (None: the main table, else the first); `start`: index of the first row shown."""
    if kind not in KINDS:
        raise PunaError(f"{kind}: is not a kind of artifact; the kinds are {', '.join(KINDS)}")
    store = site.store
    artifact = store.resolve(f"{kind}/{key}")
    m = artifact.manifest
    aliases = [tag("span", name, class_="tag") for name in store.names().get(artifact.key, [])]
    damage, suspect = artifact.damage(quick=True), store.suspects().get(artifact.key)
    facts = [
        ("Made by", [m.stage, " in run ", run_link(m.run) if m.run in store.runs() else m.run or "–"]),
        ("Made", f"{made_at(artifact)} UTC in {duration(float(m.timings.get('seconds', 0.0)))}"),
        ("Stored", f"{stored(artifact)}; peak memory {size(m.peak_memory_bytes)}"),
        ("Folder", tag("code", str(artifact.folder))),
    ]  # fmt: skip
    metrics: list[list[Content]] = [[n.replace("_", " "), v if isinstance(v, str) else number(v)] for n, v in m.metrics.items()]
    settings: list[list[Content]] = [[name, plain(json.dumps(value))] for name, value in flat(m.config).items() if name]
    before, differences = explain(store, artifact)
    why = None
    if before is not None and differences:
        both = f"/puna/artifacts/compare?artifact={before.id}&artifact={artifact.id}"
        links = [artifact_link(before), " ", tag("a", "compare the two", href=both)]
        why = part("Differences from the previous artifact", tag("ul", [tag("li", str(change)) for change in differences[:12]]), note=links)
    return site.page(
        artifact.id,
        [problem(f"This artifact is damaged: {'; '.join(damage)}. Run the stage again, or `puna verify --quarantine`")] if damage else None,
        [problem(f"This artifact is suspect: {suspect}. A run that needs it recomputes it")] if suspect else None,
        tag("p", aliases) if aliases else None,
        tag("dl", [[tag("dt", name), tag("dd", value)] for name, value in facts], class_="facts-list"),
        tag("div", _uses(artifact), class_="buttons"),
        section("rows", "Rows", None, _rows(artifact, shown, start)) if m.tables else None,
        section("measured", "Measured", None, table(["", ""], metrics, numeric=(1,)) if metrics else None,
                grid(Plot.of(figure) for _, figure in sorted(m.figures.items()))),
        section("lineage", "Lineage", None, _lineage(store, artifact)),
        section("settings", "Settings", None, why,
                _folded_table("fields", ["field", "value"], settings, open_=len(settings) < 15),
                _folded_table("files", ["file", "bytes"], [[name, record.bytes] for name, record in m.files.items()])),
        here="artifacts",
    )  # fmt: skip


@router.get("/artifacts/compare")
def compare_page(site: Here, names: Annotated[list[str], Query(alias="artifact")] = []) -> str:  # noqa: B006
    if len(names) != 2:
        raise PunaError(f"compare: choose two artifacts, not {len(names)}")
    first, second = (site.store.resolve(name) for name in names)
    one, other = first.manifest, second.manifest
    rows: list[list[Content]] = [[c.what, tag("b", c.name), plain(c.before), plain(c.now)] for c in changes(one, other)]
    took, peak = ([m.timings.get("seconds", 0.0) for m in (one, other)], [m.peak_memory_bytes for m in (one, other)])
    gave: list[list[Content]] = [["made by", one.stage, other.stage, ""]]
    gave += [[f"rows of {name}", *_pair(*(float(a.rows(name)) if name in a.tables else None for a in (first, second)))]
             for name in dict.fromkeys([*first.tables, *second.tables])]  # fmt: skip
    costs = {"took": map(duration, took), "stored": map(stored, (first, second)), "peak memory": map(size, peak)}
    gave += [[name, *texts, ""] for name, texts in costs.items()]
    for name in dict.fromkeys([*one.metrics, *other.metrics]):
        gave.append([name.replace("_", " "), *_pair(one.metrics.get(name), other.metrics.get(name))])
    head: list[Content] = [artifact_link(first), artifact_link(second)]
    same = "Their contents are the same." if one.data_digest == other.data_digest else "Their contents differ."
    how = table(["", "field", *head], rows) if rows else note("Stage, configuration, code and inputs are the same.")
    return site.page(
        "Two artifacts",
        section("given", "How they were made", None, how),
        section("gave", "What they are", None, table(["", *head, "difference"], gave, numeric=(1, 2, 3))),
        here="artifacts", lead=same,
    )  # fmt: skip


def _pair(one: float | str | None, other: float | str | None) -> list[Content]:
    """Return table cells for two values and for their difference (second minus first), which is empty unless they are unequal numbers."""
    cells: list[Content] = ["–" if value is None else value if isinstance(value, str) else number(value) for value in (one, other)]
    both = all(isinstance(value, int | float) for value in (one, other))
    gap = float(other) - float(one) if both and one is not None and other is not None else 0.0
    return [*cells, f"{'+' if gap > 0 else ''}{number(gap)}" if gap else ""]


def _folded_table(what: str, head: list[Content], rows: list[list[Content]], *, open_: bool = False) -> Html | None:
    return details(f"{len(rows)} {what}", table(head, rows), open_=open_, class_="more") if rows else None


def _rows(artifact: Artifact, shown: str | None, start: int) -> Html:
    name = shown or (artifact.kind if artifact.kind in artifact.tables else artifact.tables[0])
    record = artifact.record(name)
    here = f"/puna/artifact/{artifact.kind}/{artifact.key[:12]}"
    tabs = [tab(f"{other} ({artifact.rows(other):,})", f"{here}?table={other}#rows", other == name) for other in artifact.tables]
    meanings = {field.name: (field.metadata or {}).get(b"meaning", b"").decode() for field in TABLES[name].schema}
    columns: list[list[Content]] = [[tag("b", column), kind, meanings.get(column, "")] for column, kind in record.columns.items()]
    rows: list[list[Content]] = [[plain(value, 240) for value in row.values()] for row in _some(artifact, name, start)]
    steps: list[Content] = []
    if start:
        steps.append(tag("a", "before", href=f"{here}?table={name}&start={max(0, start - SHOWN_ROWS)}#rows"))
    if start + SHOWN_ROWS < record.rows:
        steps.append(tag("a", "next", href=f"{here}?table={name}&start={start + SHOWN_ROWS}#rows", rel="next"))
    last = min(start + SHOWN_ROWS, record.rows)
    range_text = f"{start + 1:,} to {last:,} of {record.rows:,}" if record.rows else "no rows"
    query = quote(f"select * from {name} where artifact = '{artifact.key}' limit 100")
    return tag(
        "div", tag("nav", tabs, aria_label="Tables"), _folded_table("columns and their meanings", ["column", "type", "meaning"], columns),
        table(list(record.columns), rows) if rows else None,
        note(range_text, " · ", [[step, " · "] for step in steps], tag("a", "query with SQL", href=f"/puna/sql?q={query}")),
        class_="rows",
    )  # fmt: skip


def _some(artifact: Artifact, name: str, start: int) -> list[dict[str, object]]:
    """Return up to `SHOWN_ROWS` rows of a table from row `start` on. All rows before `start` are read as well."""
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
        label = item.key if item.kind == "external" else f"{item.kind}/{item.key[:12]} (gone)"
        link = artifact_link(source) if source else tag("code", label)
        made_of.append([item.name, link, item.stage])
    users = (a for a in store.artifacts() if any(i.key == artifact.key for i in a.manifest.inputs))
    consumers = list(itertools.islice(users, MOST_USERS))
    by: list[list[Content]] = [[artifact_link(a), a.manifest.stage, made_at(a)] for a in consumers]
    return tag(
        "div",
        part("Made of", table(["as", "artifact", "made by"], made_of) if made_of else note("No artifact of this store.")),
        part("Used by", table(["artifact", "made by", "made, UTC"], by) if by else note("Nothing yet."),
             note=f"The first {MOST_USERS}." if len(by) == MOST_USERS else None),
    )


def _uses(artifact: Artifact) -> list[Content]:
    """Return links to the uses of an artifact: chat, rollouts, thresholds, and the stages and flows that take it as input."""
    results: list[Content] = []
    if artifact.kind == "model":
        results.append(button("Chat", f"/puna/chat?model={artifact.id}"))
    if "rollouts" in artifact.tables:
        results.append(button("Rollouts", f"/puna/rollouts/{artifact.key[:12]}"))
    if artifact.manifest.stage == "select":
        results.append(button("Try other thresholds", f"/puna/rules?artifact={artifact.key[:12]}"))
    links = []
    everything: list[Flow | Stage] = [*load_flows().values(), *load_stages().values()]
    for what in everything:
        for spec in what.inputs:
            if spec.kind == artifact.kind:
                name = flow_name(what) if isinstance(what, Stage) else what.name
                links.append(tag("li", tag("a", what.name, href=f"/puna/start/{name}?{spec.name}={artifact.id}"), f" as {spec.name}"))
    if links:
        results.append(details(tag("span", "Use in …", class_="button"), tag("ul", links), class_="menu"))
    return results


@router.get("/rollouts/{key}")
async def rollouts_page(site: Here, key: str) -> str:
    model = site.store.resolve(f"model/{key}")
    if "rollouts" not in model.tables:
        raise PunaError(f"{model.id} has no table rollouts: only ppo and grpo write one")
    before = ROWS.format(model.key)
    answers = [(name, await run_in_threadpool(site.asker.ask, "sql", q=before + query)) for name, query in PARTS.items()]
    about = "Best and worst are by reward. Changed: by the mean reward of a prompt's answers in its first and its last rollout."
    return site.page(
        "Rollouts", [section(name, name.capitalize(), None, answer) for name, answer in answers],
        here="artifacts", lead=[artifact_link(model), f": {model.rows('rollouts'):,} answers. ", about],
    )  # fmt: skip
