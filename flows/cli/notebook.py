"""The functions for notebooks and scripts: `puna.open`, `puna.run`, `puna.run_flow`, `puna.connect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from puna.flows.engine import launch
from puna.flows.engine.declare import FLOWS, Flow, Item
from puna.flows.engine.defaults import DEFAULT_RECIPE, DEFAULT_STORE
from puna.flows.engine.inputs import RunInputs, parse_inputs
from puna.flows.engine.perform import Performer
from puna.flows.engine.session import session
from puna.flows.engine.trace import load
from puna.flows.prefect import task  # noqa: F401 - in a Prefect flow, steps are Prefect tasks
from puna.stages.contract import External, Stage, parse, perform
from puna.storage import Artifact, PunaError, Store
from puna.storage.aliases import DEFAULT
from puna.storage.catalog import Catalog

Input = Item | str | Path


def open(path: str | Path = DEFAULT_STORE, project: str | None = None) -> Store:
    """Open the store in a folder; create it if it does not exist. `project`: the project whose aliases are used."""
    return Store.open(path, project)


def connect(store: Store | str | Path = DEFAULT_STORE) -> Catalog:
    """Return a read-only SQL connection to an existing store. `connect(store).sql("from newest.documents")` returns a lazy DuckDB relation.

    The relation's methods `.to_arrow_table()`, `.df()` (pandas) and `.pl()` (polars) return the rows. Without a store, raise PunaError."""
    return Catalog(store if isinstance(store, Store) else Store.existing(store))


def run(stage: Stage | str, *inputs: Input, store: Store | str | Path = DEFAULT_STORE, **settings: Any) -> Artifact:
    """Return a stage's artifact for the given inputs; if the store does not have it, run the stage.

    `stage`: a function declared with `@stage`, or its name. `inputs`: artifacts, ids, aliases or files, assigned by kind; `NAME=ID` assigns
    to the input NAME. `settings`: fields of the stage's configuration. Raise PunaError if a name, an input or a setting is wrong."""
    target = launch.target_named(f"stage:{stage.removeprefix('stage:')}") if isinstance(stage, str) else stage
    assert isinstance(target, Stage)
    opened = store if isinstance(store, Store) else Store.open(store)
    parsed = _parse_inputs(inputs, target, opened, target.name)
    values = launch.stage_inputs(target, parsed.items, parsed.named)
    return perform(target, parse(target.config, settings, target.name), values, opened).artifact


def run_flow(
    flow: Flow | str, *inputs: Input, recipe: str = DEFAULT_RECIPE, changes: Sequence[str] = (), store: Store | str | Path = DEFAULT_STORE
) -> dict[str, Artifact]:
    """Run a flow, without `inputs` on the sample or on `INPUT@latest`, and return step label → artifact. `changes`: texts as for `--set`.
    Raise PunaError if a name, an input or a change is wrong, or if a stage fails."""
    target = launch.target_named(f"flow:{flow.removeprefix('flow:')}") if isinstance(flow, str) else flow
    assert isinstance(target, Flow)
    if FLOWS.get(target.name) is not target:
        raise PunaError(f"flow {target.name}: another flow of that name was declared later; rename one")
    opened = store if isinstance(store, Store) else Store.open(store)
    loaded = load(recipe, list(changes), target.name)
    opened = opened.within(loaded.project) if opened.project == DEFAULT else opened
    values = launch.flow_inputs(target, loaded, _parse_inputs(inputs, target, opened, f"flow {target.name}"), opened, quiet=True)
    request = {"recipe": recipe, "changes": list(changes), "inputs": [getattr(item, "id", None) or str(item) for item in inputs]}
    with session(opened, flow=target.name, parameters=request) as now:
        Performer(loaded).walk(target, values)
    now.refresh()
    return {label: outcome.artifact for label, outcome in now.outcomes}


def _parse_inputs(inputs: Sequence[Input], target: Flow | Stage, store: Store, where: str) -> RunInputs:
    parsed = parse_inputs([str(item) for item in inputs if isinstance(item, str | Path)], target.inputs, store, where)
    return replace(parsed, items=[*(item for item in inputs if isinstance(item, Artifact | External)), *parsed.items])
