"""The launch of a flow or a single stage by name, with a recipe and checked inputs."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from puna.flows.demo import SampleReport, build_sample
from puna.flows.engine import preflight
from puna.flows.engine.console import Console, closing_table
from puna.flows.engine.declare import Flow, Given, Item, assign
from puna.flows.engine.defaults import DEFAULT_RECIPE, DEFAULT_STORE
from puna.flows.engine.inputs import RunInputs, existing_sample, given_items, parse_inputs, reads_sample, sample_folder
from puna.flows.engine.perform import Performer
from puna.flows.engine.recipe import Recipe, as_yaml, overridden, project_change, read_values
from puna.flows.engine.session import Session, ended_in_order, session
from puna.flows.engine.trace import load, load_flows, load_stages, trace
from puna.flows.server.client import named_server
from puna.models.settings import takes_text
from puna.stages.contract import External, Stage, StageConfig, Value, did_you_mean, parse
from puna.stages.executors import PROCESSES
from puna.storage import Artifact, PunaError, Store
from puna.storage.explain import flat

PREFIXES = ("flow:", "stage:")
YOUNG = 20_000  # threshold of the garbage collector's youngest generation; large, since rows are containers without cycles


@dataclass(frozen=True)
class Request:
    """A request for a run: a flow or a stage by name, a recipe with changes, inputs as texts, an alias for a stage's artifact. `project`: a
    project of the store; empty: the recipe's project. `begin`: called when everything is checked, before the first step."""

    what: str
    recipe: str | None = None
    changes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    workers: int | None = None
    executor: str = PROCESSES
    json: bool = False
    alias: str | None = None
    project: str = ""
    begin: Callable[[], None] = lambda: None

    def recipe_of(self, flow: Flow) -> Recipe:
        return load(self.recipe or DEFAULT_RECIPE, [*self.changes, *project_change(self.project)], flow.name)

    def stage_project(self) -> str:
        """Return the project for a run of a single stage: `project`, else the recipe's."""
        return self.project or (str(read_values(self.recipe, [])[0].get("project") or "") if self.recipe else "")

    @property
    def title(self) -> str:
        """Return a title for lists of runs: the project, the name, the recipe, the inputs and the changes."""
        place = f"in {self.project}:" if self.project else ""
        words = [place, self.what.removeprefix("flow:").removeprefix("stage:"), self.recipe or "", *self.inputs[:2]]
        more = [f"and {len(self.inputs) - 2} more"] if len(self.inputs) > 2 else []
        changed = [f"· {', '.join(self.changes[:3])}{' …' if len(self.changes) > 3 else ''}"] if self.changes else []
        return " ".join(word for word in (*words, *more, *changed) if word)[:200]

    @property
    def parameters(self) -> dict[str, Any]:
        fields = {"recipe": self.recipe, "changes": list(self.changes), "inputs": list(self.inputs), "executor": self.executor}
        return {"command": self.command(), **fields, **({"project": self.project} if self.project else {})}

    def session(self, name: str, store: Store, *, report: bool = False) -> AbstractContextManager[Session]:
        self.begin()
        return session(
            store, flow=name, workers=self.workers, executor=self.executor, json=self.json, title=self.title, parameters=self.parameters,
            report=report,
        )  # fmt: skip

    def command(self, store: Store | None = None) -> str:
        """Return the equivalent command line, without --workers and --executor, and without --store if `store` is None or the default."""
        options = {"--recipe": [self.recipe] if self.recipe else [], "--input": self.inputs, "--set": self.changes}
        options["--project"] = [self.project] if self.project else []
        options["--as"] = [self.alias.partition("@")[0]] if self.alias else []
        options["--store"] = [] if store is None or store.uri == str(Path(DEFAULT_STORE).resolve()) else [store.uri]
        words = (word for name, values in options.items() for value in values for word in (name, value))
        return shlex.join(["puna", "run", self.what.removeprefix("flow:"), *words])


def target_named(what: str) -> Flow | Stage:
    """Return the flow, else the stage, named `what`; a prefix `flow:` or `stage:` selects one. Raise PunaError if there is neither."""
    flows, stages = load_flows(), load_stages()
    prefix = next((p for p in PREFIXES if what.startswith(p)), "")
    name = what.removeprefix(prefix)
    if name in flows and prefix != "stage:":
        return flows[name]
    if name in stages and prefix != "flow:":
        return stages[name]
    names = flows if prefix == "flow:" else stages if prefix == "stage:" else [*flows, *stages]
    raise PunaError(f"{what}: no such flow or stage{did_you_mean(name, names)}")


def run(request: Request, store: Store) -> None:
    """Run a flow or a stage; everything is checked before any work starts. Progress goes to the Prefect server at PREFECT_API_URL or of a
    running `puna up`. The run waits for the server only at its end, and briefly."""
    threshold = gc.get_threshold()
    gc.disable()  # imports leave no garbage
    try:
        with ended_in_order():
            target = target_named(request.what)
            gc.freeze()
            gc.set_threshold(YOUNG)
            gc.enable()
            if isinstance(target, Flow):
                run_flow(target, request, store)
            else:
                run_stage(target, request, store)
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
        gc.enable()


def run_flow(flow: Flow, request: Request, store: Store) -> str:
    """Run a flow and write its report; return the name of the run. Raise PunaError if the request is invalid or a step fails."""
    if request.alias is not None:
        raise PunaError(f"--as: {flow.name} is a flow, which sets its own aliases; use `--as` with a stage")
    recipe = request.recipe_of(flow)
    store = store.within(recipe.project)
    named_server()
    values = checked_inputs(flow, recipe, request.inputs, store, executor=request.executor, quiet=request.json)
    with request.session(flow.name, store, report=True) as now:
        Performer(recipe).walk(flow, values)
        closing_table(now.console, now.run, now.outcomes, store.log(now.run).made)
    now.refresh()
    return now.run


def run_stage(stage: Stage, request: Request, store: Store, config: StageConfig | None = None) -> Artifact:
    """Run a stage, print its metrics, set the requested alias, and return the artifact. `config`: used in place of recipe and changes."""
    config = config or stage_config(stage, request.recipe, list(request.changes))
    store = store.within(request.stage_project())
    parsed = parse_inputs(request.inputs, stage.inputs, store, stage.name)
    items: Sequence[Item] = parsed.items or (sample_pages(store, request.json) if reads_sample(stage) else [])
    values = stage_inputs(stage, items, parsed.named)
    named_server()
    preflight.check_stage(stage, config, values, store, request.executor)
    with request.session(stage.name, store) as now:
        outcome = now.perform(stage, config, values, stage.name)
    for name, value in outcome.artifact.manifest.metrics.items():
        now.console.say(f"  {name:32s} {value}")
    if request.alias is not None:
        store.set_alias(request.alias, outcome.artifact)
        now.console.say(f"{outcome.artifact.id} is {store.full_name(request.alias)}")
    now.refresh()
    return outcome.artifact


def stage_config(stage: Stage, recipe: str | None, changes: list[str]) -> StageConfig:
    """Build a stage's configuration: defaults, then the recipe's seed and its values for the stage's step, then `changes`. Raise PunaError
    if the recipe has no values for the step."""
    values: dict[str, Any] = {}
    if recipe is not None:
        whole_recipe, _ = read_values(recipe, [])
        own = whole_recipe.get(stage.name)
        if not isinstance(own, dict):
            raise PunaError(f"recipe {recipe}: has no settings of {stage.name}; leave --recipe out and use --set")
        values = {**({"seed": whole_recipe.get("seed", 0)} if "seed" in stage.config.model_fields else {}), **own}
    for change in changes:
        overridden(values, change.removeprefix(f"{stage.name}."), lambda path: takes_text({"": stage.config}, f".{path}"))
    return parse(stage.config, values, stage.name)


def changes_of(stage: Stage, values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the settings that differ from the stage's defaults, as texts for `--set`. `values`: path → value as `as_yaml` writes it."""
    own = flat(stage.config.model_construct().model_dump(mode="json", warnings=False))
    return tuple(f"{path}={value}" for path, value in values.items() if path and (path not in own or value != as_yaml(own[path])))


def checked_inputs(
    flow: Flow, recipe: Recipe, texts: Sequence[str], store: Store, *, executor: str = PROCESSES, quiet: bool, planned: bool = False
) -> dict[str, Given]:
    """Return a flow's inputs from `texts`, checked with the recipe; `planned`: see `flow_inputs`. Raise PunaError with all unmet needs."""
    unmet = trace(flow, recipe).complaints
    if unmet:  # before files are read, which may take a while
        raise PunaError("\n".join(unmet))
    wanted = parse_inputs(texts, flow.inputs, store, f"flow {flow.name}")
    return flow_inputs(flow, recipe, wanted, store, executor=executor, quiet=quiet, planned=planned)


def flow_inputs(
    flow: Flow, recipe: Recipe, wanted: RunInputs, store: Store, *, executor: str = PROCESSES, quiet: bool, planned: bool = False
) -> dict[str, Given]:
    """Return the inputs of a flow, by default the sample or the artifacts of `INPUT@latest`. Raise PunaError for unmet needs. `planned`:
    for a plan, where placeholders stand for required inputs that do not exist yet."""
    items = given_items(flow, wanted, store, lambda: existing_sample(store) if planned else sample_pages(store, quiet), quiet=quiet)
    missing = flow.placeholders() if planned else None
    values = missing if missing and not (items or wanted) else flow.by_kind(items, wanted.named, wanted.sources, missing)
    preflight.check(flow, recipe, values, store, executor, planned=planned)
    return values


def stage_inputs(stage: Stage, items: Sequence[Item], named: Mapping[str, list[Artifact]] | None = None) -> dict[str, Value]:
    """Return input name → value: from `named`, else the items of the input's kind, else None. Raise PunaError if an item fits no input."""
    inputs: dict[str, Any] = assign(f"stage {stage.name}", stage.inputs, items, named or {})
    return {spec.name: (inputs[spec.name] or None) if spec.many else next(iter(inputs[spec.name]), None) for spec in stage.inputs}


def sample_pages(store: Store, quiet: bool) -> list[External]:
    sample = make_sample(sample_folder(store.root), quiet=quiet)
    return sorted((item for path in sample.paths for item in External.resolve(str(path))), key=lambda item: item.name)


def make_sample(folder: Path, *, quiet: bool = False) -> SampleReport:
    """Build the sample of real pages in `folder`, unless it is there already."""
    with Console(json=quiet) as console:
        console.start_step("sample")
        report = build_sample(folder, lambda done, total, note: console.progress("sample", done, total, note), say=console.say)
        console.remove_bar("sample")
    return report
