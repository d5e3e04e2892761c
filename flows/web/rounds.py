"""The page about alignment rounds: the round that waits for a person, all gates, a leaderboard, and the trigger of the next round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response

from puna.flows.engine.defaults import DEFAULT_RECIPE
from puna.flows.engine.recipe import shipped_recipes
from puna.flows.engine.rounds import POLICY, Round, Trigger, load_trigger, new_preferences, rounds_of, save_trigger, settle, unsettled_round
from puna.flows.html.markup import Content, Html, made_at, number, section, table, tag
from puna.flows.html.plot import Plot, grid
from puna.flows.report.alignment import gate_basis, models_by_step
from puna.flows.web.forms import project_of
from puna.flows.web.frame import Here, artifact_link, button, field, form_fields, hidden_input, option, pages, projects_nav
from puna.stages.align.gate import ApprovalConfig, approval
from puna.stages.contract import execute
from puna.storage import Artifact, PunaError, Store
from puna.storage.aliases import DEFAULT

VERDICTS = {"passed": "right", "refused": "wrong", "waits": "busy"}
MEASURED = ("accuracy", "score", "liked", "win_rate", "loss", "document_bits_per_byte")  # the first that any model has ranks them
MOST = 40
LONGEST = 9  # maximum number of digits in the form's number of preferences
JUDGE = "Judge pairs of answers; each person gives a name. The judgements become preferences."
router = pages("rounds", "Rounds", at=7)


@router.get("/rounds")
def rounds_page(site: Here, project: str | None = None) -> str:
    store = site.store.within(project).require_project()
    history = rounds_of(store, store.alias(POLICY)) if POLICY in store.aliases() else _open_rounds(store)
    waiting = history[-1] if history and history[-1].verdict == "waits" else None
    gains = [Plot.of(figure) for one in history[-4:] for _, figure in sorted(one.gate.manifest.figures.items())]
    answers = store.artifacts("answers")[::-1][:6]
    desk = "" if store.project == DEFAULT else f"{store.project}~"
    judge = [tag("li", tag("a", f"{one.id} · {one.rows():,} answers", href=f"/puna/judge/{desk}{one.key[:12]}/")) for one in answers]
    first = tag("a", "round", href=f"/puna/start/round?project={store.project}")
    none = tag("p", "No round has reached a gate yet: ", first, " trains the policy further and tests whether it is better.", class_="lead")
    return site.page(
        "Rounds",
        projects_nav(store, store.project, "/puna/rounds"),
        _waits(waiting, store.project) if waiting else None,
        section("rounds", "Gates", None, _gates(history), grid(gains)) if history else none,
        section("leaderboard", "Leaderboard", f"The evaluated models, the best first (at most {MOST}).", _leaderboard(store)),
        section("judge", "Which answer is better?", JUDGE, tag("ul", judge)) if judge else None,
        section("next", "The next round", None, _next(store, site.prefect)), here="rounds",
    )  # fmt: skip


@router.post("/rounds/next")
async def trigger(site: Here, request: Request) -> Response:
    await run_in_threadpool(set_trigger, site.store, form := await form_fields(request))
    return RedirectResponse(f"/puna/rounds?project={project_of(form)}#next", 303)


@router.post("/rounds/{gate}")
async def decide(site: Here, gate: str, request: Request) -> Response:
    await run_in_threadpool(decide_round, site.store, gate, form := await form_fields(request))
    return RedirectResponse(f"/puna/rounds?project={project_of(form)}", 303)


def decide_round(store: Store, gate: str, form: Mapping[str, Sequence[str]]) -> None:
    """Record a person's decision and, unless a round is running, carry it out. Raise PunaError for a wrong form or a decided gate."""
    store = store.within(project_of(form))
    artifact = store.resolve(f"evaluation/{gate}")
    by, verdict, reason = (form.get(name, [""])[0].strip() for name in ("by", "verdict", "reason"))
    if not by or verdict not in ("approve", "refuse"):
        raise PunaError("a name and the verdict, approve or refuse, are required")
    decided = next((one for one in rounds_at(store, artifact) if one.gate.key == artifact.key and one.verdict != "waits"), None)
    if decided is not None:
        raise PunaError(f"{artifact.id} does not wait for a decision: {decided}")
    config = ApprovalConfig(by=by, approved=verdict == "approve", reason=reason)
    execute(approval, config, {"gate": artifact}, store)
    with store.lock(store.own("round"), wait=False) as mine:
        if not mine:  # the running round carries the decision out
            return
        if last := unsettled_round(store, rounds_at(store, artifact)):
            settle(store, last)


def rounds_at(store: Store, gate: Artifact) -> list[Round]:
    """Return the rounds of `policy@latest` or, without that alias, of the policy that the gate compares; empty if it is not stored."""
    policy = next((store.find(i.kind, i.key) for i in gate.manifest.inputs if i.name == "policy"), None)
    policy = store.alias(POLICY) if POLICY in store.aliases() else policy
    return rounds_of(store, policy) if policy else []


def set_trigger(store: Store, form: Mapping[str, Sequence[str]]) -> None:
    """Save the number of new preferences that starts a round, and the round's recipe. Raise PunaError for an invalid value."""
    if "preferences" not in form:
        raise PunaError("preferences: missing; give a whole number, 0 for never")
    text = form["preferences"][0] or "0"
    if not text.isdecimal() or len(text) > LONGEST:
        raise PunaError(f"preferences: takes a whole number, 0 for never (got {text[:40]!r})")
    recipe = form.get("recipe", [DEFAULT_RECIPE])[0]
    if recipe not in shipped_recipes():
        raise PunaError(f"recipe {recipe}: not found; recipes are {', '.join(shipped_recipes())}")
    save_trigger(store.within(project_of(form)), Trigger(int(text), recipe))


def _open_rounds(store: Store) -> list[Round]:
    """Return the rounds that led to the policy of the project's newest gate, and those that start from it; empty without this policy."""
    gates = [Artifact(one["kind"], one["key"], store.files) for one in store.entries(store.project) if one["stage"] == "gate"]
    return rounds_at(store, gates[-1]) if gates else []


def _waits(one: Round, project: str) -> Html:
    rows: dict[str, dict[str, str]] = {}
    for row in one.gate.read().to_pylist():
        gain = f"{row['value']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})" if row["metric"] == "gain" else ""
        rows.setdefault(row["task"], {})[row["metric"]] = gain or f"{row['value']:.3f}"
    lines: list[list[Content]] = [[task, *(found.get(name, "") for name in ("before", "after", "gain"))] for task, found in rows.items()]
    return tag("section",
        tag("h2", f"Round {one.number} waits for your decision"), tag("p", str(one.deciding.manifest.metrics["reason"])),
        table(["task", "policy", "candidate", "gain, 95 % interval"], lines, numeric=(1, 2, 3)),
        tag("p", "Policy ", artifact_link(one.policy), ", candidate ", artifact_link(one.candidate), " ",
            tag("a", "chat with it", href=f"/puna/chat?model={one.candidate.id}")),
        # Enter in a text field presses the form's first button: a disabled one, so that only a click decides.
        tag("form", tag("button", type="submit", disabled=True, hidden=True), hidden_input("project", project),
            field("Your name", tag("input", name="by", type="text", required=True)),
            field("Why", tag("input", name="reason", type="text")),
            tag("p", tag("button", "Approve", class_="main", name="verdict", value="approve"), " ",
                tag("button", "Refuse", name="verdict", value="refuse"), class_="buttons"),
            action=f"/puna/rounds/{one.gate.key[:16]}", method="post"),
        class_="working")  # fmt: skip


def _gates(history: Sequence[Round]) -> Html:
    rows: list[list[Content]] = []
    for one in reversed(history):
        m = one.gate.manifest.metrics
        gain = f"{m['gain']:+.3f} ({m['gain_low']:+.3f} to {m['gain_high']:+.3f})" if "gain" in m else ""
        badge = tag("span", one.verdict, class_=f"tag {VERDICTS.get(one.verdict, '')}")
        why = tag("small", str(one.deciding.manifest.metrics["reason"]))
        rows.append([one.number, badge, tag("small", gate_basis(one.gate)), gain, artifact_link(one.candidate), why, made_at(one.gate)])
    return table(["round", "verdict", "compared", "gain, 95 % interval", "candidate", "because", "UTC"], rows, numeric=(0,))


def _leaderboard(store: Store) -> Html:
    names, labels = store.names(), models_by_step(store)
    best: dict[str, tuple[Artifact, dict[str, float]]] = {}
    titles: dict[str, str] = {}
    for one in store.artifacts():
        if one.manifest.stage != "evaluate":
            continue
        model = next((store.find(i.kind, i.key) for i in one.manifest.inputs if i.kind == "model"), None)
        values = {name: float(v) for name, v in one.manifest.metrics.items() if name in MEASURED and isinstance(v, int | float)}
        if model is not None and values:
            best[model.key] = (model, {**best.get(model.key, (model, {}))[1], **values})
            if one.key in labels:
                titles.setdefault(model.key, labels[one.key])
    columns = [name for name in MEASURED if any(name in values for _, values in best.values())]
    if not columns:
        return Html("")
    lower = columns[0] in ("loss", "document_bits_per_byte")
    worst = float("inf") if lower else float("-inf")
    ranking = sorted(best.values(), key=lambda pair: pair[1].get(columns[0], worst), reverse=not lower)
    rows: list[list[Content]] = []
    for place, (model, values) in enumerate(ranking[:MOST], 1):
        aliases = [[tag("span", name, class_="tag"), " "] for name in names.get(model.key, [])]
        cells: list[Content] = [number(values[name]) if name in values else "–" for name in columns]
        rows.append([place, [aliases, artifact_link(model, titles.get(model.key))], model.manifest.stage, *cells, made_at(model)])
    head: list[Content] = ["", "model", "made by", *(name.replace("_", " ") for name in columns), "UTC"]
    return table(head, rows, numeric=(0, *range(3, 3 + len(columns))))


def _next(store: Store, prefect: str | None) -> Content:
    now, there = load_trigger(store), new_preferences(store)
    recipes = [option(name, name, chosen=name == now.recipe) for name in shipped_recipes()]
    state = f"{there:,} preferences are new{f'; a round starts at {now.preferences:,}' if now.preferences else ''}."
    form = tag("form", hidden_input("project", store.project),
        field("Number of new human preferences that starts a round; 0: never",
              tag("input", type="number", name="preferences", min=0, value=now.preferences)),
        field("With the recipe", tag("select", recipes, name="recipe")),
        tag("p", tag("button", "Save"), class_="buttons"), action="/puna/rounds/next", method="post")  # fmt: skip
    buttons: Content = [button("Start one now", f"/puna/start/round?project={store.project}")]
    if prefect:
        buttons = [buttons, " ", button("Set a schedule, in Prefect", "/puna/deployment/round")]
    return tag("div", tag("p", state), form, tag("p", buttons, class_="buttons"))
