"""Starting a flow or a single stage from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any


from puna.flows.console import Console
from puna.flows.recipe import FLOWS, load, load_stages, overridden
from puna.flows.session import session
from puna.stages.contract import External, Value, parse
from puna.storage import PunaError, Store


def run(
    what: str, recipe: str, changes: list[str], inputs: list[str], store: Store, workers: int | None, as_json: bool
) -> None:
    """Run `what` (a flow or a stage); everything is checked before any work starts."""
    stages = load_stages()
    if what in FLOWS:
        config = load(recipe, changes)
        externals = pages(inputs, store, as_json)
        from puna.flows import pipeline
        from puna.flows.closing import closing_table
        from puna.flows.report import write

        with session(store, flow=what, workers=workers, json=as_json) as now:
            getattr(pipeline, what)(config, externals)
            closing_table(now)
        now.console.say(f"report: {write(store, now.run, None)}")
    elif what in stages:
        stage = stages[what]
        values: dict[str, Any] = {}
        for change in changes:
            overridden(values, change.removeprefix(f"{what}."))
        config_of_stage = parse(stage.config, values, what)
        given: dict[str, Value]
        if any(spec.kind == "external" for spec in stage.inputs):
            given = {spec.name: pages(inputs, store, as_json) for spec in stage.inputs}
        else:
            artifacts = [store.checked(store.resolve(text)) for text in inputs]
            given = stage.by_kind(artifacts)
        stage.check(given)
        from puna.flows.adapter import single

        with session(store, flow=what, workers=workers, json=as_json) as now:
            single(stage, config_of_stage, given)
        if not as_json:
            _, outcome = now.outcomes[-1]
            for name, value in outcome.artifact.manifest.metrics.items():
                now.console.say(f"  {name:32s} {value}")
    else:
        raise PunaError(f"{what}: no such flow or stage; flows are {', '.join(FLOWS)}; `puna stages` lists the stages")


def pages(inputs: list[str], store: Store, quiet: bool) -> list[External]:
    """The external inputs that a person named, or the sample."""
    if not inputs:
        folder = store.root / "sample"
        make_sample(folder, quiet=quiet)
        inputs = [str(folder)]
    found = [item for text in inputs for item in External.resolve(text)]
    names = [item.name for item in found]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise PunaError(f"two inputs have the name {twice[0]!r}; name them: --input NAME=URI")
    return sorted(found, key=lambda item: item.name)


def make_sample(folder: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Build the sample of real pages in `folder`, or find it whole."""
    from puna.stages.sample import build_sample

    with Console(json=quiet) as console:
        report = build_sample(folder, progress=console.say)
    found: dict[str, Any] = report.to_json()
    return found


