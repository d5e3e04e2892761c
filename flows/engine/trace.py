"""Traces of flows: the steps, recipe fields and unmet needs of a flow, found without computing anything."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import puna.stages
from puna.flows.engine.declare import FLOWS, Flow, Given, Output, Walk, first_sentence
from puna.flows.engine.defaults import MODULES
from puna.flows.engine.recipe import BASE, General, Recipe, Setting, Step, read_values, with_file
from puna.models.settings import deeper, takes_text
from puna.stages import plugins
from puna.stages.contract import REGISTRY, Stage, StageConfig, did_you_mean, parse
from puna.storage import PunaError
from puna.storage.aliases import checked_project

SHIPPED = ("pipeline", "curate", "experiments", "pretrain", "align", "round", "safety", "capabilities")  # Puna's flows, as lists show them


@dataclass(frozen=True)
class TracedStep:
    """A step of a trace. `config`: None in a trace of every possible step. `inputs`: input → labels of the steps it comes from."""

    label: str
    step: Step
    config: StageConfig | None
    inputs: Mapping[str, tuple[str, ...]]

    @property
    def description(self) -> str:
        return first_sentence(self.step.stage.doc)


@dataclass
class Trace:
    """The steps of a flow in order, its settings, the aliases that it sets, and complaints about wrong values and inputs. `regular`: fields
    of the steps that run unless a recipe leaves them out."""

    steps: list[TracedStep] = field(default_factory=list)
    regular: set[str] = field(default_factory=set)
    settings: dict[str, Setting] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)


class Tracer(Walk):
    """A traversal that records the steps of a flow. `everything`: include steps that the recipe switches off."""

    def __init__(self, recipe: Recipe, *, everything: bool = False) -> None:
        super().__init__(recipe)
        self.trace = Trace()
        self._everything = everything

    def step(self, step: Step, inputs: Mapping[str, Given]) -> Output:
        """Record the step's field as regular unless the step is off by default, then trace the step."""
        if not step.off:
            self.trace.regular.add(step.field)
        return super().step(step, inputs)

    def make(self, step: Step, label: str, config: StageConfig | None, inputs: dict[str, list[Output]]) -> Output:
        labels = {name: tuple(label for output in outputs for label in output.labels) for name, outputs in inputs.items()}
        self.trace.steps.append(TracedStep(label, step, config, labels))
        return Output(step.stage.kind, (label,))

    def configs(self, step: Step) -> list[StageConfig | None]:
        """Return the recipe's configurations; [None] in a trace of all possible steps. For a wrong field, record a complaint; return []."""
        if self._everything:
            return [None]
        try:
            return super().configs(step)
        except PunaError as error:
            self.wrong(str(error))
            return []

    def setting(self, wanted: Setting) -> int:
        """Return the recipe's value; if it is wrong, record a complaint and return the default."""
        self.trace.settings[wanted.name] = wanted
        try:
            return super().setting(wanted)
        except PunaError as error:
            self.wrong(str(error))
            return wanted.default

    def publish(self, name: str, output: Output) -> None:
        self.trace.aliases[name] = output.labels

    def wrong(self, message: str) -> None:
        if message not in self.trace.complaints:
            self.trace.complaints.append(message)


def add_served_modules() -> None:
    """Import the modules that the server which started this process was given with `--module`."""
    for text in json.loads(os.environ.get(MODULES, "[]")):
        plugins.add(text)


def load_stages() -> dict[str, Stage]:
    """Return name → stage for all stages of Puna, of plugins and of modules added with --module."""
    for module in pkgutil.walk_packages(puna.stages.__path__, "puna.stages."):
        if not module.name.startswith(("puna.stages.contract", "puna.stages.identity", "puna.stages.executors", "puna.stages.plugins")):
            importlib.import_module(module.name)
    plugins.offers("puna.stages")
    return dict(sorted(REGISTRY.items()))


def load_flows() -> dict[str, Flow]:
    """Return every flow by name: Puna's own flows, then the flows of plugins and of added modules."""
    for name in SHIPPED:
        importlib.import_module(f"puna.flows.{name}")
    plugins.offers("puna.flows")
    return {name: FLOWS[name] for name in (*SHIPPED, *sorted(FLOWS.keys() - set(SHIPPED)))}


def flow_named(name: str) -> Flow:
    flows = load_flows()
    if name not in flows:
        raise PunaError(f"{name}: no such flow{did_you_mean(name, flows)}")
    return flows[name]


def trace(flow: Flow, recipe: Recipe, given: Mapping[str, Given] | None = None) -> Trace:
    tracer = Tracer(recipe)
    tracer.walk(flow, flow.placeholders() if given is None else given)
    labels = {step.label for step in tracer.trace.steps}
    for label, extra in recipe.extra.items():
        place = extra.after or extra.into or ""
        if label not in labels and place not in labels:
            tracer.wrong(f"add.{label}: {place} is not a step of {flow.name}{did_you_mean(place, labels)}")
    return tracer.trace


@cache
def everything(flow: Flow) -> Trace:
    """Return a trace of all steps that a flow can have, and of its settings."""
    tracer = Tracer(Recipe("everything"), everything=True)
    tracer.walk(flow, flow.placeholders(everything=True))
    return tracer.trace


def fields(flow: Flow) -> dict[str, Step]:
    """Return field → its first step, `off` unless a step of the field runs by default. Raise PunaError if two stages share a field."""
    steps: dict[str, Step] = {}
    for traced in everything(flow).steps:
        known_step = steps.setdefault(traced.step.field, traced.step)
        if known_step.stage != traced.step.stage:
            both = f"{known_step.stage.name} and {traced.step.stage.name}"
            raise PunaError(f"flow {flow.name}: {traced.step.field} is the field of two stages, {both}")
    regular = everything(flow).regular
    return {name: replace(step, off=name not in regular) for name, step in steps.items()}


def load(name: str, changes: list[str] | None = None, flow: str = "pipeline", base: str = BASE) -> Recipe:
    """Return a recipe of a flow by name or file, with `step.field=value` changes. Raise one PunaError for all wrong fields. Fields of other
    flows are checked too, if the recipe has them. `base`: the recipe that a file inherits from if it names none."""
    target = flow_named(flow)
    steps, settings = dict(fields(target)), dict(everything(target).settings)
    for other in load_flows().values():
        steps = {**steps, **fields(other), **steps}
        settings = {**everything(other).settings, **settings}
    every = {label: step.stage.config for label, step in steps.items()} | {key: one.annotation for key, one in General.model_fields.items()}
    values, layers = read_values(name, changes or [], base, lambda path: takes_text(every, path))
    changed = {change.partition("=")[0].partition(".")[0] for change in changes or []}
    for label, step in steps.items():
        # If a change omits a step, omit the recipe's step that trains its classifier, too.
        if step.serves in changed and values.get(step.serves, {}) is None and label not in changed:
            values.pop(label, None)
    complaints: list[str] = []
    additions = values.pop("add", None) or {}
    general, entries = General(), {field: values[field] for field in ("seed", "project") if field in values} | {"add": additions}
    try:
        general = parse(General, entries, "")
    except PunaError as error:
        complaints += str(error).splitlines()
    for label, addition in general.add.items():
        kind = addition.stage or label
        stage = load_stages().get(kind)
        if label in steps or label in settings or label in General.model_fields:
            complaints.append(f"add.{label}: a step or field with this name exists; choose another name and write `stage: {kind}`")
        elif stage is None:
            complaints.append(f"add.{label}: {kind}: no such stage{did_you_mean(kind, REGISTRY)}; load your own with --module FILE")
        else:
            steps[label] = Step(label, label, stage)
    names = ["name", "seed", "project", "add", *settings, *steps, *(additions if isinstance(additions, dict) else ())]
    running = {label: kind for label, kind in every.items() if label in values or (label in fields(target) and not steps[label].off)}
    unknown = [str(field) for field in values if field not in names]
    complaints += [f"{field}: no such field{did_you_mean(field, names, deeper(field, running))}" for field in unknown]
    if "project" in values:
        complaints += complaints_of(lambda: checked_project(values["project"]))
    own = {field: value for field, value in values.items() if field not in General.model_fields}
    recipe = Recipe(str(values["name"]), general.seed, own, general.add, general.project)
    for field_name, step in steps.items():
        if field_name in values or (field_name in fields(target) and not step.off):
            complaints += complaints_of(lambda step=step: recipe.configs(step))
    for one in settings.values():
        complaints += complaints_of(lambda one=one: recipe.number(one))
    if complaints:
        raise PunaError("\n".join(with_file(complaint, layers) for complaint in dict.fromkeys(complaints)))
    return recipe


def complaints_of(ask: Any) -> list[str]:
    try:
        ask()
    except PunaError as error:
        return str(error).splitlines()
    return []


def config_schema(stage: Stage, **options: Any) -> dict[str, Any]:
    """Return the JSON schema of a stage's configuration. A stage without fields is described by its own docstring."""
    own = stage.config.model_json_schema(**options)
    return own | {"title": stage.name, "description": first_sentence(stage.doc)} if stage.config is StageConfig else own


def schema_named(name: str) -> dict[str, Any] | None:
    """Return the schema of a step or setting that a recipe of any flow can hold; None if there is none of this name."""
    every = load_flows().values()
    if (step := next((own[name] for own in map(fields, every) if name in own), None)) is not None:
        return config_schema(step.stage)
    return next((own[name] for own in (_settings(flow)["properties"] for flow in every) if name in own), None)


def _settings(flow: Flow) -> dict[str, Any]:
    """Return the JSON schema of what a recipe of the flow holds beside steps."""
    general = General.model_json_schema(ref_template="#/$defs/{model}")
    for setting in everything(flow).settings.values():
        bounds = {"type": "integer", "minimum": setting.minimum, "maximum": setting.maximum}
        typed: dict[str, Any] = {"type": "boolean"} if isinstance(setting.default, bool) else bounds
        general["properties"][setting.name] = {**typed, "default": setting.default, "description": setting.description}
    return general


def schema(flow: Flow) -> dict[str, Any]:
    """Return the JSON schema of the flow's recipes, for forms and editors."""
    general = _settings(flow)
    definitions: dict[str, Any] = general["$defs"]
    properties: dict[str, Any] = general["properties"]
    for name, step in fields(flow).items():
        own = config_schema(step.stage, ref_template="#/$defs/{model}")
        definitions.update(own.pop("$defs", {}))
        kind = step.stage.config.__name__
        definitions[kind] = own
        one = {"$ref": f"#/$defs/{kind}"}
        several = {"type": "array", "items": one, "title": "repeated"}
        about = {"description": first_sentence(step.stage.doc), "title": name}
        properties[name] = {"anyOf": [one, several, {"type": "null", "title": "left out"}], **about}
    whole = {"type": "object", "title": f"recipe of {flow.name}", "properties": properties, "additionalProperties": False}
    return {**whole, "$defs": definitions}
