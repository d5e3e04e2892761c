"""Starting a flow or a single stage from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from puna.flows.console import Console
from puna.flows.recipe import FLOWS, Recipe, load, load_stages, overridden
from puna.flows.session import session
from puna.stages.contract import External, Stage, parse
from puna.stages.sample import SampleReport, build_sample
from puna.storage import PunaError, Store
from puna.storage.schemas import KINDS


def run(what: str, recipe: str | None, changes: list[str], inputs: list[str], store: Store, workers: int | None, as_json: bool) -> None:
    """Run `what` (a flow or a stage); everything is checked before any work starts."""
    stages = load_stages()
    if what in FLOWS:
        recipe = recipe or "demo"
        check_sources(load(recipe, changes), inputs)
        externals = pages(inputs, store, as_json)
        from puna.flows.deployments import WHOLE

        with session(store, flow=what, workers=workers, json=as_json) as now:
            now.inputs = externals
            WHOLE[what](recipe=recipe, changes=changes, inputs=inputs, store=str(store.root))
        from puna.flows.report import write

        now.console.say(f"report: {write(store, now.run, None)}")
    elif what in stages:
        _run_stage(stages[what], recipe, changes, inputs, store, workers, as_json)
    else:
        raise PunaError(f"{what}: no such flow or stage; flows are {', '.join(FLOWS)}; `puna stages` lists the stages")


def check_sources(recipe: Recipe, inputs: list[str]) -> None:
    """PunaError where the quality classifier is to learn from a source that no input has the name of."""
    named = {item.name for text in inputs for item in External.resolve(text)}
    if inputs and recipe.quality is not None and not named & set(recipe.quality.positive_sources):
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
    from puna.flows.adapter import flow_of

    with session(store, flow=stage.name, workers=workers, json=as_json) as now:
        references = {name: now.refer(value) for name, value in given.items()}
        single = {spec.name for spec in stage.inputs if not spec.many}
        parameters: dict[str, Any] = {
            name: (found[0] if found else None) if name in single else found for name, found in references.items()
        }
        flow_of(stage.name)(**parameters, config=config, store=str(store.root))
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
        inputs = [str(path) for path in make_sample(store.root / "sample", quiet=quiet).paths]
    found = [item for text in inputs for item in External.resolve(text)]
    names = [item.name for item in found]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise PunaError(f"two inputs have the name {twice[0]!r}; name them: --input NAME=URI")
    return sorted(found, key=lambda item: item.name)


def make_sample(folder: Path, *, quiet: bool = False) -> SampleReport:
    """Build the sample of real pages in `folder`, or find it whole."""
    with Console(json=quiet) as console:
        console.step = "sample"
        console.started("sample", None)
        report = build_sample(folder, lambda done, total, note: console.progress("sample", done, total, note), say=console.say)
        console.done()
    return report
