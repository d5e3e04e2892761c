"""Forms of flows and stages: their titles in the order of the pipeline, their initial values, and the artifacts to choose from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from puna.flows.engine.declare import FLOWS, Flow, input_kind
from puna.flows.engine.defaults import DEFAULT_RECIPE
from puna.flows.engine.launch import stage_config
from puna.flows.engine.recipe import read_values, shipped_recipes
from puna.flows.engine.trace import everything, fields, load_flows, load_stages
from puna.flows.html.markup import made_at
from puna.stages.contract import Stage
from puna.stages.contract.declaration import InputSpec
from puna.storage import Artifact, PunaError, Store

GROUPS = ("curate", "experiments", "pretrain", "align", "io")  # folders of stages in the order of the pipeline; others last
MOST_CHOICES = 40
JUDGED = ("heldout_accuracy", "accuracy", "loss", "tokens", "parameters", "bytes")  # shown for artifacts without rows


@dataclass(frozen=True)
class Offer:
    """A flow or stage with a form. `flow`: its name as a Prefect flow; `title`: the form's title; `group`: "flow" or the stage's folder."""

    flow: str
    title: str
    group: str
    what: Flow | Stage


def offers() -> list[Offer]:
    """Return all flows, then all stages by folder, in the order of the pipeline."""
    flows, stages = load_flows(), load_stages()
    all_offers = [Offer(name, f"0.{number:02d} {name}", "flow", flow) for number, (name, flow) in enumerate(flows.items(), 1)]
    steps = [step.step.stage.name for flow in [*flows.values()][1:] for step in everything(flow).steps]
    place = {name: number for number, name in reversed(list(enumerate(steps)))}
    for number, group in enumerate((*GROUPS, "more"), 1):
        own = [stage for stage in stages.values() if _group(stage) == group]
        for position, stage in enumerate(sorted(own, key=lambda s: (place.get(s.name, len(steps)), s.name)), 1):
            all_offers.append(Offer(flow_name(stage), f"{number}.{position:02d} {stage.name}", group, stage))
    return all_offers


def flow_name(stage: Stage) -> str:
    """Return a stage's flow name on the Prefect server: the stage's own name, or `stage_NAME` if a flow has that name."""
    return f"stage_{stage.name}" if stage.name in FLOWS else stage.name


def _group(stage: Stage) -> str:
    folder = stage.function.__module__.removeprefix("puna.stages.").partition(".")[0]
    return folder if stage.function.__module__.startswith("puna.stages.") and folder in GROUPS else "more"


def defaults(offer: Offer) -> dict[str, Any]:
    """Return a form's initial values: for a flow, the recipe `demo`; for a stage, its configuration in that recipe, {} if it is invalid."""
    if isinstance(offer.what, Flow):
        return {"recipe": DEFAULT_RECIPE}
    values = values_of(offer.what, DEFAULT_RECIPE, offer.what.name)
    return {} if values is None else {"config": values}


def values_of(stage: Stage, recipe: str, field: str) -> dict[str, Any] | None:
    """Return a stage's configuration with the recipe's values for the step `field`, else the defaults; None if the values are invalid."""
    own = _recipe(recipe).get(field)
    try:
        if isinstance(own, dict) and field == stage.name:
            return stage_config(stage, recipe, []).model_dump(mode="json")
        return stage.config.model_validate(own if isinstance(own, dict) else {}).model_dump(mode="json")
    except (PunaError, ValueError):
        return None


def description(offer: Offer, *, linked: bool) -> str:
    """Return the Markdown description of a flow or stage with its inputs and output. `linked`: add links to forms with recipes' values."""
    what = offer.what
    inputs = ", ".join(f"`{spec.name}` ({input_kind(spec)}{', optional' if spec.optional else ''})" for spec in what.inputs) or "nothing"
    lines = [what.doc, f"Takes {inputs}." if isinstance(what, Flow) else f"Takes {inputs}; gives {what.kind}."]
    if linked and isinstance(what, Stage):
        address = f"/puna/form/{offer.flow}?recipe="
        links = [f"[{title}]({address}{recipe}&step={step})" for title, recipe, step in settings_of(what)]
        if links:
            lines.append(f"The form with the values of a recipe: {', '.join(links)}.")
    return "\n\n".join(lines)


def settings_of(stage: Stage) -> list[tuple[str, str, str]]:
    """Return (title, recipe, step) for each group of values that a shipped recipe has for the stage."""
    steps = dict.fromkeys(field for flow in load_flows().values() for field, step in fields(flow).items() if step.stage == stage)
    pairs = [(recipe, step) for recipe in shipped_recipes() for step in steps if isinstance(_recipe(recipe).get(step), dict)]
    return [(recipe if step == stage.name else f"{recipe}: {step}", recipe, step) for recipe, step in pairs]


def set_by_recipes(stage: Stage) -> set[str]:
    return {field for _, recipe, step in settings_of(stage) for field in _recipe(recipe)[step]}


@cache
def _recipe(name: str) -> dict[str, Any]:
    """Return the values of a shipped recipe; callers must not change them."""
    return read_values(name, [])[0]


class Choices:
    """The artifacts that a form offers, by kind: the store's aliases, then its newest `MOST_CHOICES` artifacts, the newest first.
    `everywhere`: name aliases with their project if the store has several projects."""

    def __init__(self, store: Store, *, everywhere: bool = False) -> None:
        by_kind: dict[str, list[str]] = {}
        kinds: dict[str, str] = {}
        for artifact in reversed(store.artifacts()):
            kinds[artifact.key] = artifact.kind
            entries = by_kind.setdefault(artifact.kind, [])
            if len(entries) < MOST_CHOICES:
                entries.append(label(artifact))
        self._aliases: dict[str, list[str]] = {}
        several = everywhere and len(store.projects()) > 1
        for name, key in sorted(store.aliases().items()):
            if key in kinds:
                title = f"{store.project_of(name)}/{name.rpartition('/')[2]}" if several else name
                self._aliases.setdefault(kinds[key], []).append(title)
        self._by_kind = by_kind

    def of(self, kind: str) -> list[str]:
        return [*self._aliases.get(kind, []), *self._by_kind.get(kind, [])]


def label(artifact: Artifact) -> str:
    """Return the label of an artifact in a form: its id, stage, size and date, separated by dots."""
    m = artifact.manifest
    metric = next((f"{name} {m.metrics[name]:,.4g}" for name in JUDGED if isinstance(m.metrics.get(name), (int, float))), "")
    size = f"{artifact.rows():,} rows" if artifact.kind in artifact.tables else metric
    return " · ".join(word for word in (artifact.id, m.stage, size, made_at(artifact)) if word)


def reference_in(text: str) -> str:
    """Return the artifact reference in a form's value: the chosen label without its details, or the typed text."""
    return text.partition(" · ")[0].strip()


def schema(plain: Mapping[str, Any], specs: Sequence[InputSpec], choices: Choices) -> dict[str, Any]:
    """Return a form's JSON schema: `plain` with the store's artifacts as choices for inputs, and the recipes as choices for `recipe`."""
    copied: dict[str, Any] = json.loads(json.dumps(plain))
    properties = copied["properties"]
    for spec in specs:
        if spec.kind != "external":
            needed = spec.name in copied.get("required", ())
            properties[spec.name] = _choice(properties[spec.name], spec, choices.of(spec.kind), needed=needed)
    if "recipe" in properties:
        head = {name: properties["recipe"][name] for name in ("title", "description", "position", "default")}
        recipes = {"title": "Recipe", "type": "string", "enum": shipped_recipes()}
        properties["recipe"] = {**head, "anyOf": [recipes, {"title": "YAML file", "type": "string"}]}
    return copied


def _choice(plain: Mapping[str, Any], spec: InputSpec, names: list[str], *, needed: bool) -> dict[str, Any]:
    """Return the JSON schema of an input's form field: a list of artifacts to pick from, or an id."""
    head = {name: plain[name] for name in ("title", "position", "default") if name in plain}
    what = f"{'One or more artifacts' if spec.many else 'An artifact'} of kind {spec.kind}"
    typed: dict[str, Any] = {"type": "string"}
    listed: dict[str, Any] = {"type": "string", "enum": names}
    if spec.many:
        listed, typed = {"type": "array", "items": listed}, {"type": "array", "items": typed}
    forms = [{"title": "From the store", **listed}] if names else []
    forms += [{"title": "By id", **typed}, *([] if needed else [{"title": "None", "type": "null"}])]
    return {**head, "description": f"{what}, newest first" if names else f"{what}: the store holds none yet", "anyOf": forms}
