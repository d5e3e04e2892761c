"""The inputs of flows and stages, checked before a run, and the sample of pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from puna.flows.demo import SampleReport, build_sample
from puna.flows.engine import preflight
from puna.flows.engine.console import Console
from puna.flows.engine.declare import Flow, Given, Item
from puna.flows.engine.inputs import RunInputs, latest, parse_inputs, sample_folder
from puna.flows.engine.recipe import Recipe
from puna.flows.engine.trace import trace
from puna.stages.contract import External, Stage, Value
from puna.stages.executors import PROCESSES
from puna.storage import Artifact, PunaError, Store


def checked_inputs(
    flow: Flow, recipe: Recipe, texts: Sequence[str], store: Store, *, executor: str = PROCESSES, quiet: bool
) -> dict[str, Given]:
    """Return the inputs of a flow, fit for its recipe; PunaError with every need that is not met. Each file is read once."""
    unmet = trace(flow, recipe).complaints
    if unmet:  # before files are read, which may take a while
        raise PunaError("\n".join(unmet))
    return flow_inputs(flow, recipe, parse_inputs(texts, flow.inputs, store, f"flow {flow.name}"), store, executor=executor, quiet=quiet)


def flow_inputs(flow: Flow, recipe: Recipe, wanted: RunInputs, store: Store, *, executor: str = PROCESSES, quiet: bool) -> dict[str, Given]:
    """Return the inputs of a flow; without any, the sample or the `NAME@latest` aliases. Raise PunaError where needs are unmet."""
    items = wanted.items
    if not wanted and flow.takes_files:
        items = [*sample_pages(store, quiet)]
    elif not wanted:
        items = latest(flow.inputs, store, quiet)
    values = flow.by_kind(items, wanted.named, wanted.sources)
    preflight.check(flow, recipe, values, store, executor)
    return values


def stage_inputs(stage: Stage, items: Sequence[Item], named: Mapping[str, list[Artifact]] | None = None) -> dict[str, Value]:
    """Return the inputs of a stage: those in `named` by the input's name, the others by their kind."""
    values = stage.by_kind([item for item in items if isinstance(item, Artifact)], named)
    files = [item for item in items if isinstance(item, External)]
    spec = next((spec for spec in stage.inputs if spec.kind == "external"), None)
    if spec is not None and files:
        values[spec.name] = files if spec.many else (files[0] if len(files) == 1 else files)
    return values


def sample_pages(store: Store, quiet: bool) -> list[External]:
    sample = make_sample(sample_folder(store.root), quiet=quiet)
    return sorted((item for path in sample.paths for item in External.resolve(str(path))), key=lambda item: item.name)


def make_sample(folder: Path, *, quiet: bool = False) -> SampleReport:
    """Build the sample of real pages in `folder`, or find it whole."""
    with Console(json=quiet) as console:
        console.started("sample", None)
        report = build_sample(folder, lambda done, total, note: console.progress("sample", done, total, note), say=console.say)
        console.remove_bar("sample")
    return report
