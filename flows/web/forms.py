"""Web forms of flows and stages: the fields for inputs and settings, and the request that a filled-in form makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from puna.flows.engine.declare import Flow, first_sentence, input_kind
from puna.flows.engine.defaults import DEFAULT_RECIPE
from puna.flows.engine.inputs import reads_sample
from puna.flows.engine.launch import Request, changes_of
from puna.flows.engine.recipe import as_yaml, shipped_recipes
from puna.flows.html.markup import Content, Html, details, tag
from puna.flows.prefect.forms import Choices, Offer, defaults, offers, reference_in, set_by_recipes, settings_of, values_of
from puna.flows.web.frame import Site, button, field, hidden_input, note, once, option, problem, projects_nav, tab
from puna.stages.contract import Stage, did_you_mean
from puna.stages.contract.declaration import InputSpec
from puna.storage import PunaError
from puna.storage.aliases import DEFAULT
from puna.storage.explain import flat

Asked = Mapping[str, Sequence[str]]  # name of a form's field → its values, as a browser sends them
FEW = 2  # maximum number of fields in a group of settings that is unfolded at first
MANY = 8  # number of ungrouped fields above which rarely changed fields are folded


def form_page(site: Site, name: str, form: Asked, *, plan: Html | None = None, own: bool = False, refused: str = "") -> Html:
    """Return the page with the form of a flow or stage, and with `plan` if given. `refused`: why a run was not started.
    `own`: a page of this site linked here, so that the page's script may request the plan at once."""
    store = site.store
    offer, project = offer_of(name), project_of(form)
    what, choices = offer.what, Choices(store.within(project))
    settings: Content = _changes(form) if isinstance(what, Flow) else _settings(offer, form)
    go = [once(), tag("button", "Start", class_="main")] if site.prefect else None
    missing = None if plan or refused else _missing(offer, form)
    waiting = note(missing or "Press Plan to see what is reused and what the rest may cost.")
    other = button("Prefect's form, with schedules", f"/puna/form/{name}") if site.prefect else None
    projects = tag("datalist", [tag("option", value=one) for one in store.projects()], id="projects")
    box = tag("input", type="text", name="project", value=project, list="projects", placeholder=DEFAULT, spellcheck="false")
    return site.page(
        what.name,
        problem(refused) if refused else None,
        projects_nav(store, project or DEFAULT, f"/puna/start/{name}"),
        tag("form",
            tag("div", _recipe(offer, form),
                field("Project, whose aliases are read and set; a new name creates a project", box), projects,
                [_input(spec, choices, form, reads_sample(what)) for spec in what.inputs], settings),
            tag("div", plan or (None if refused else waiting), id="outcome", aria_live="polite"),
            hidden_input("token", site.token),
            tag("p", go, " ", tag("button", "Plan", formaction=f"/puna/start/{name}/plan"), " ", other, class_="buttons"),
            action=f"/puna/start/{name}", method="post", class_="replayed", data_from=f"/puna/plan/{name}",
            data_now="" if own and not (plan or refused or missing) else None),
        here="start", lead=first_words(what.doc),
    )  # fmt: skip


def _missing(offer: Offer, form: Asked) -> str | None:
    """Return a note on the required inputs that a newly opened form of a stage lacks; None for other forms, or if none is missing."""
    needed = (spec for spec in offer.what.inputs if not spec.optional and not (spec.kind == "external" and reads_sample(offer.what)))
    missing = [spec.name for spec in needed if not values_given(spec, form)]
    if isinstance(offer.what, Stage) and missing and set(form) <= {"recipe", "project"}:
        return f"Choose {' and '.join(missing)} to see the plan."
    return None


def project_of(form: Asked) -> str:
    return form.get("project", [""])[0].strip()


def request_of(offer: Offer, form: Asked) -> Request:
    """Return the request that a form makes; it equals the request of the equivalent command line."""
    texts = []
    for spec in offer.what.inputs:
        texts += [text if spec.kind == "external" else f"{spec.name}={text}" for text in values_given(spec, form)]
    recipe = form.get("recipe", [""])[0]
    if isinstance(offer.what, Flow):
        lines = [line.strip() for text in form.get("changes", ()) for line in text.splitlines()]
        changes = [line for line in lines if line]
        return Request(f"flow:{offer.what.name}", recipe or DEFAULT_RECIPE, tuple(changes), tuple(texts), project=project_of(form))
    values = {path: form.get(f"set.{path}", [as_yaml(value)])[0] for path, value in _values(offer, recipe).items()}
    return Request(f"stage:{offer.what.name}", None, changes_of(offer.what, values), tuple(texts), project=project_of(form))


def offer_of(name: str) -> Offer:
    """Return the flow or stage whose form is called `name`. Raise PunaError if there is none."""
    by_name = {offer.flow: offer for offer in offers()}
    if name not in by_name:
        raise PunaError(f"{name}: no such flow or stage{did_you_mean(name, list(by_name))}")
    return by_name[name]


def first_words(doc: str) -> list[Content]:
    """Return the first sentence of a docstring as HTML, with text in backticks as code."""
    sentence = first_sentence(doc)
    return [tag("code", words) if number % 2 else words for number, words in enumerate(sentence.split("`"))]


def values_given(spec: InputSpec, form: Asked) -> list[str]:
    lines = [line.strip() for text in form.get(spec.name, ()) for line in text.splitlines()]
    return [line if spec.kind == "external" else reference_in(line) for line in lines if line]


def _recipe(offer: Offer, form: Asked) -> Content:
    now = form.get("recipe", [DEFAULT_RECIPE if isinstance(offer.what, Flow) else ""])[0]
    if isinstance(offer.what, Flow):
        options = [option(name, name, chosen=name == now) for name in shipped_recipes()]
        return field("Recipe", tag("select", options, name="recipe"))
    links = []
    for title, recipe, step in settings_of(offer.what):
        links.append(tab(title, f"/puna/start/{offer.flow}?{urlencode({'recipe': f'{recipe}:{step}'})}", now == f"{recipe}:{step}"))
    return [tag("nav", "Values of ", links, aria_label="Recipes") if links else None, hidden_input("recipe", now) if now else None]


def _input(spec: InputSpec, choices: Choices, form: Asked, sample: bool) -> Html:
    """Return the form's field for an input: a text box with a line per file, or a list of artifacts."""
    now = values_given(spec, form)
    if spec.kind == "external":
        none = ", none: the sample of real pages" if sample else ", optional" if spec.optional else ""
        words = f"{spec.name}: files or folders, one per line{none}"
        return field(words, tag("textarea", "\n".join(now), name=spec.name, rows=2, spellcheck="false"))
    there = choices.of(spec.kind)
    more = [name for name in now if name not in map(reference_in, there)]
    options = [] if spec.many else [option("", "none" if spec.optional else "choose …", chosen=not now)]
    options += [option(reference_in(words), words, chosen=reference_in(words) in now) for words in [*more, *there]]
    kind = "" if spec.name == spec.kind else input_kind(spec)
    about = ", ".join(word for word in (kind, "optional" if spec.optional else "") if word)
    words = f"{spec.name} ({about})" if about else spec.name
    if not there and not more:
        return field(words, tag("select", option("", "the store holds none yet"), disabled=True))
    rows = min(4, max(2, len(options))) if spec.many else None
    return field(words, tag("select", options, name=spec.name, multiple=spec.many, size=rows))


def _changes(form: Asked) -> Html:
    box = tag("textarea", "\n".join(form.get("changes", ())), name="changes", rows=3, spellcheck="false",
              placeholder="select.gopher_quality.min_words=60")  # fmt: skip
    return field("Changes to the recipe, one per line; line_dedup=null leaves a step out", box)


def _settings(offer: Offer, form: Asked) -> list[Content]:
    """Return the form fields of a stage's configuration, by group. Groups of more than `FEW` fields, and rarely set fields, are folded."""
    assert isinstance(offer.what, Stage)
    values = _values(offer, form.get("recipe", [""])[0])
    schema = offer.what.config.model_json_schema()
    groups: dict[str, list[str]] = {}
    for path in values:
        head, dot, _ = path.partition(".")
        groups.setdefault(head if dot else "", []).append(path)

    def fields_of(paths: Sequence[str]) -> list[Html]:
        return [_setting(path, values[path], form, *_about(schema, path)) for path in paths]

    parts: list[Content] = []
    if own := groups.pop("", []):
        rare = _rare(offer.what, own, values) if len(own) > MANY else []
        parts.append(tag("div", fields_of([path for path in own if path not in rare]), class_="sliders"))
        if rare:
            heading = [tag("b", "more"), f" {', '.join(rare)}"]
            changed = any(form.get(f"set.{path}", [as_yaml(values[path])])[0] != as_yaml(values[path]) for path in rare)
            parts.append(details(heading, tag("div", fields_of(rare), class_="sliders"), open_=changed, class_="more"))
    for group, paths in groups.items():
        about = schema["properties"].get(group, {}).get("description", "")
        inside = tag("div", fields_of(paths), class_="sliders")
        parts.append(details([tag("b", group), f" {about}"], inside, open_=len(paths) <= FEW, class_="more"))
    return parts


def _rare(stage: Stage, paths: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return the settings to fold: optional ones that no shipped recipe sets and that are not numbers (but `seed` is folded). If all
    settings are such, the first `MANY` stay open."""
    needed = {name for name, one in stage.config.model_fields.items() if one.is_required()} | set_by_recipes(stage)
    numbers = {path for path in paths if isinstance(values[path], int | float) and not isinstance(values[path], bool) and path != "seed"}
    often = [path for path in paths if path in needed | numbers]
    return [path for path in paths if path not in (often or paths[:MANY])]


def _setting(path: str, value: Any, form: Asked, about: str, choices: Sequence[str]) -> Html:
    now = form.get(f"set.{path}", [as_yaml(value)])[0]
    words = [tag("b", path), f" {about}"]
    if choices := ("true", "false") if isinstance(value, bool) else choices:
        control = tag("select", [option(word, word, chosen=word == now) for word in choices], name=f"set.{path}")
    elif isinstance(value, int | float):
        control = tag("input", type="number", step="any", name=f"set.{path}", value=now)
    else:
        control = tag("input", type="text", name=f"set.{path}", value=now, spellcheck="false")
    return field(words, control)


def _about(schema: Mapping[str, Any], path: str) -> tuple[str, Sequence[str]]:
    """Return the description of the field at a dotted path of a JSON schema, and the field's values if it is an enum."""
    now: Mapping[str, Any] = schema
    for name in path.split("."):
        now = now.get("properties", {}).get(name, {})
        several = [one for one in now.get("anyOf", now.get("allOf", ())) if "$ref" in one]
        place = now.get("$ref") or (several[0]["$ref"] if several else None)
        about = now.get("description", "")
        if place:
            now = schema["$defs"][place.rpartition("/")[2]]
    return str(about), [str(word) for word in now.get("enum", ())]


def _values(offer: Offer, recipe: str) -> dict[str, Any]:
    """Return path → initial value of the settings in a stage's form. `recipe`: RECIPE:STEP; empty: the recipe `demo`."""
    assert isinstance(offer.what, Stage)
    name, _, step = recipe.partition(":")
    values = values_of(offer.what, name, step or offer.what.name) if recipe else defaults(offer).get("config")
    if values is None:  # required fields are not given yet
        needed = dict.fromkeys(name for name, one in offer.what.config.model_fields.items() if one.is_required())
        values = needed | offer.what.config.model_construct().model_dump(mode="json", warnings=False)
    return flat(values) if values else {}
