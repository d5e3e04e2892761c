"""Starting a flow or a single stage: from a name, a recipe and inputs as texts to a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from puna.flows import preflight
from puna.flows.adapter import flow_of, perform
from puna.flows.inputs import meant
from puna.flows.program import Flow
from puna.flows.recipe import overridden, read_values
from puna.flows.running import checked_inputs, given_to, sample_pages, whole
from puna.flows.session import session
from puna.flows.trace import load, load_flows, load_stages
from puna.stages.contract import Stage, StageConfig, did_you_mean, parse
from puna.stages.contract.executors import PROCESSES
from puna.storage import Artifact, PunaError, Store

PREFIXES = ("flow:", "stage:")


@dataclass(frozen=True)
class Request:
    """What a person asks for: a flow or a stage by name, a recipe with changes, inputs as texts, an alias for what a stage makes."""

    what: str
    recipe: str | None = None
    changes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    workers: int | None = None
    executor: str = PROCESSES
    json: bool = False
    alias: str | None = None


def chosen(what: str) -> Flow | Stage:
    """The flow or stage of that name; `flow:` or `stage:` before it chooses where both have it, else it is the flow."""
    flows, stages = load_flows(), load_stages()
    prefix = next((p for p in PREFIXES if what.startswith(p)), "")
    name = what.removeprefix(prefix)
    if name in flows and prefix != "stage:":
        return flows[name]
    if name in stages and prefix != "flow:":
        return stages[name]
    known = flows if prefix == "flow:" else stages if prefix == "stage:" else [*flows, *stages]
    raise PunaError(f"{what}: no such flow or stage{did_you_mean(name, known)}")


def run(request: Request, store: Store) -> None:
    """Run a flow or a stage; everything is checked before any work starts.

    Where PREFECT_API_URL names a server, the run and its stages are runs on it. Otherwise there is none: the store
    holds what a run leaves, and nothing is left of one that is killed.
    """
    found = chosen(request.what)
    if isinstance(found, Flow):
        run_flow(found, request, store)
    else:
        run_stage(found, request, store)


def run_flow(flow: Flow, request: Request, store: Store) -> Path:
    """Run a flow and write its report; returns the report's file."""
    if request.alias is not None:
        raise PunaError(f"--as: {flow.name} is a flow, which sets aliases of its own; `--as` is for a stage")
    recipe = load(request.recipe or "demo", list(request.changes), flow.name)
    server = reached_server()
    given = checked_inputs(flow, recipe, request.inputs, store, executor=request.executor, quiet=request.json)
    with session(store, flow=flow.name, workers=request.workers, executor=request.executor, json=request.json) as now:
        now.given = given
        if server:
            from puna.flows.deployments import WHOLE

            WHOLE[flow.name](
                recipe=request.recipe or "demo", changes=list(request.changes), inputs=list(request.inputs), store=store.uri
            )
        else:
            whole(flow.name, request.recipe or "demo", list(request.changes), list(request.inputs), store.uri)
    from puna.flows.report import write

    page = write(store, now.run, None)
    now.console.say(f"report: {page}")
    return page


def run_stage(stage: Stage, request: Request, store: Store) -> Artifact:
    """Run a stage alone and tell its metrics; returns what it made."""
    config = stage_config(stage, request.recipe, list(request.changes))
    wanted = meant(request.inputs, stage.inputs, store, stage.name)
    items = wanted.items
    if any(spec.kind == "external" and not spec.optional for spec in stage.inputs) and not items:
        items += sample_pages(store, request.json)
    given = given_to(stage, items, wanted.named)
    preflight.check_stage(stage, config, given, store, request.executor)
    server = reached_server()
    with session(store, flow=stage.name, workers=request.workers, executor=request.executor, json=request.json) as now:
        if server:
            flow_of(stage.name)(**now.parameters(stage, given), config=config, store=store.uri)
        else:
            perform(stage, config, stage.name, given)
    _, outcome = now.outcomes[-1]
    for name, value in outcome.artifact.manifest.metrics.items():
        now.console.say(f"  {name:32s} {value}")
    if request.alias is not None:
        store.set_alias(request.alias, outcome.artifact)
        now.console.say(f"{outcome.artifact.id} is {request.alias}")
    return outcome.artifact


def stage_config(stage: Stage, recipe: str | None, changes: list[str]) -> StageConfig:
    """The configuration of a stage alone: a recipe's values for the step of its name, with changes."""
    values: dict[str, Any] = {}
    if recipe is not None:
        whole_recipe, _ = read_values(recipe, [])
        own = whole_recipe.get(stage.name)
        if not isinstance(own, dict):
            raise PunaError(f"recipe {recipe}: has no settings of {stage.name}; leave --recipe out and use --set")
        values = {**({"seed": whole_recipe.get("seed", 0)} if "seed" in stage.config.model_fields else {}), **own}
    for change in changes:
        overridden(values, change.removeprefix(f"{stage.name}."))
    return parse(stage.config, values, stage.name)


def reached_server() -> str | None:
    """The address of the Prefect server that PREFECT_API_URL names, if it names one; PunaError where that does not answer."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return None
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        trouble = client.api_healthcheck()
    if trouble is not None:
        raise PunaError(
            f"PREFECT_API_URL={url}: no Prefect server answers there ({trouble}). Start one with `prefect server start`, or unset it"
        )
    return url
