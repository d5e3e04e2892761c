"""Starting a flow or a single stage from the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from puna.flows.adapter import flow_of, opened, perform
from puna.flows.closing import closing_table
from puna.flows.console import Console
from puna.flows.recipe import FLOWS, Recipe, load, load_stages, overridden
from puna.flows.session import session
from puna.stages.contract import External, Stage, did_you_mean, parse
from puna.stages.sample import SampleReport, build_sample
from puna.storage import PunaError, Store
from puna.storage.schemas import KINDS


def run(what: str, recipe: str | None, changes: list[str], inputs: list[str], store: Store, workers: int | None, as_json: bool) -> None:
    """Run `what` (a flow or a stage); everything is checked before any work starts.

    Where PREFECT_API_URL names a server, the run and its stages are runs on it. Otherwise there is none: the store
    holds what a run leaves, and nothing is left of one that is killed.
    """
    stages = load_stages()
    if what in FLOWS:
        recipe = recipe or "demo"
        config = load(recipe, changes)
        server = reached_server()
        externals = _pages_for(config, inputs, store, quiet=as_json)
        with session(store, flow=what, workers=workers, json=as_json) as now:
            now.inputs = externals
            if server:
                from puna.flows.deployments import WHOLE

                WHOLE[what](recipe=recipe, changes=changes, inputs=inputs, store=str(store.root))
            else:
                whole(what, recipe, changes, inputs, str(store.root))
        from puna.flows.report import write

        now.console.say(f"report: {write(store, now.run, None)}")
    elif what in stages:
        _run_stage(stages[what], recipe, changes, inputs, store, workers, as_json)
    else:
        raise PunaError(f"{what}: no such flow or stage{did_you_mean(what, [*FLOWS, *stages])}")


def whole(flow: str, recipe: str, changes: list[str], inputs: list[str], store: str) -> str:
    """Run the flow named `flow` of `puna.flows.pipeline`; returns the name of the run."""
    from puna.flows import pipeline

    config = load(recipe, changes)
    with opened(store, flow) as now:
        getattr(pipeline, flow)(config, now.inputs if now.inputs is not None else _pages_for(config, inputs, now.store, quiet=True))
        closing_table(now)
        return now.run


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


def _pages_for(recipe: Recipe, inputs: list[str], store: Store, *, quiet: bool) -> list[External]:
    """The external inputs of a flow, fit for its recipe; each file is read once, to know its content."""
    found = pages(inputs, store, quiet)
    if inputs:
        check_sources(recipe, found)
    return found


def check_sources(recipe: Recipe, inputs: list[External]) -> None:
    """PunaError where the quality classifier is to learn from a source that no input has the name of."""
    named = {item.name for item in inputs}
    if recipe.quality is not None and not named & set(recipe.quality.positive_sources):
        raise PunaError(
            f"quality.positive_sources={list(recipe.quality.positive_sources)}: no input has such a name "
            f"(they are {', '.join(sorted(named))}). "
            "Name the good one, --input wikipedia=URI, or name its source with --set 'quality.positive_sources=[NAME]', "
            "or leave the classifier out with --set quality=null --set select_model.quality=null"
        )


def _run_stage(
    stage: Stage, recipe: str | None, changes: list[str], inputs: list[str], store: Store, workers: int | None, as_json: bool
) -> None:
    values: dict[str, Any] = {}
    if recipe is not None:
        chosen = getattr(load(recipe, []), stage.name, None)
        if chosen is None:
            raise PunaError(f"recipe {recipe}: has no settings of {stage.name}; leave --recipe out and use --set")
        values = chosen.model_dump(mode="json")
    for change in changes:
        overridden(values, change.removeprefix(f"{stage.name}."))
    config = parse(stage.config, values, stage.name)
    external = [spec.name for spec in stage.inputs if spec.kind == "external"]
    artifacts = [text for text in inputs if is_artifact(text)]
    given = stage.by_kind([store.checked(store.resolve(text)) for text in artifacts])
    files = [text for text in inputs if text not in artifacts]
    if files and not external:
        raise PunaError(f"{stage.name}: takes no files, so --input {files[0]} must be an artifact: kind/key, or an alias NAME@VERSION")
    if external and (files or not artifacts):
        given[external[0]] = pages(files, store, as_json)
    stage.check(given)
    server = reached_server()
    with session(store, flow=stage.name, workers=workers, json=as_json) as now:
        if server:
            flow_of(stage.name)(**now.parameters(stage, given), config=config, store=str(store.root))
        else:
            perform(stage, config, stage.name, given)
    _, outcome = now.outcomes[-1]
    for name, value in outcome.artifact.manifest.metrics.items():
        now.console.say(f"  {name:32s} {value}")


def is_artifact(text: str) -> bool:
    """Whether an input means an artifact (`kind/key`, a key, an alias) rather than files."""
    kind, slash, key = text.partition("/")
    digits = key if slash else kind
    return "@" in text or ((not slash or kind in KINDS) and len(digits) >= 4 and not set(digits) - set("0123456789abcdef"))


def pages(inputs: list[str], store: Store, quiet: bool) -> list[External]:
    """The external inputs that a person named, or the sample."""
    if not inputs:
        inputs = [str(path) for path in make_sample(sample_folder(store.root), quiet=quiet).paths]
    found = [item for text in inputs for item in External.resolve(text)]
    names = [item.name for item in found]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise PunaError(f"two inputs have the name {twice[0]!r}; name them: --input NAME=URI")
    return sorted(found, key=lambda item: item.name)


def sample_folder(root: Path) -> Path:
    """Where the sample lies that a run without inputs reads, in the store at `root`."""
    return root / "sample"


def make_sample(folder: Path, *, quiet: bool = False) -> SampleReport:
    """Build the sample of real pages in `folder`, or find it whole."""
    with Console(json=quiet) as console:
        console.step = "sample"
        console.started("sample", None)
        report = build_sample(folder, lambda done, total, note: console.progress("sample", done, total, note), say=console.say)
        console.done()
    return report
