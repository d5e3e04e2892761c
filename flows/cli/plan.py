"""The command `puna plan`: the steps that would run and those that are reused, with cost estimates."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from puna.flows.cli.inspect import ProjectOption, StoreOption
from puna.flows.engine.declare import Flow
from puna.flows.engine.defaults import DEFAULT_RECIPE, DEFAULT_STORE
from puna.flows.html.markup import duration, size
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.flows.engine.estimates import Expected

app = typer.Typer()


@app.command()
def plan(
    what: Annotated[str, typer.Argument(metavar="FLOW|STAGE", help="What would run")] = "pipeline",
    recipe: Annotated[
        str | None, typer.Option(help="Name of a recipe, or a YAML file (default: demo for a flow; a stage alone keeps its defaults)")
    ] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the recipe")] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", metavar="[NAME=]URI|ARTIFACT", help="As `puna run` takes them")] = None,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    gpu: Annotated[str | None, typer.Option(help="Plan for this GPU (H100, H200, A100, …) in bf16, not for this CPU")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that train together; the fastest layouts that fit are listed")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output")] = False,
) -> None:
    """Show the steps that are reused or would run, with their cost; of pretraining also parameters, operations, memory and time.

    Time, disk and memory of a step are estimated from its earlier runs in the store. A step after one that runs is computed again only
    if that one's content is new. Pretraining is computed from the model's shape. Each row counts as one document, which costs the most
    attention. The time is that of this CPU's measured rates, or of a GPU's data sheet. For several GPUs the three fastest layouts
    that fit are listed, of those that a test proves equal to one process.
    """
    from puna.flows.engine.cost import Total, costs, steps_of
    from puna.flows.engine.launch import Request
    from puna.flows.engine.plan import STATES
    from puna.flows.engine.trace import load

    chosen, steps = steps_of(Request(what, recipe, tuple(changes or ()), tuple(inputs or ()), project=project or ""), store)
    trains = isinstance(chosen, Flow) and any(step.stage == "pretrain" for step in steps)
    if gpu is not None and not trains:
        raise PunaError(f"--gpu {gpu}: {what}{f' with recipe {recipe}' if recipe else ''} pretrains nothing")
    estimate = costs(load(recipe or DEFAULT_RECIPE, changes, chosen.name), gpu, gpus) if trains else {}
    if as_json:
        typer.echo(json.dumps({**estimate, "steps": [asdict(step) for step in steps], "expected": asdict(Total.of(steps))}))
        return
    for step in steps:
        typer.echo(f"{step.label:24s} {step.state:7s} {step.why}{_expected(step.expected)}")
    counts = Counter(step.state for step in steps)
    typer.echo(", ".join(f"{counts[state]} {words}" for state, words in STATES.items() if counts[state]))
    typer.echo(f"{Total.of(steps)}\n")
    if not estimate:
        return
    for name, value in estimate.items():
        if name != "phases":
            typer.echo(f"{name:28s} {_readable(name, value)}")
    for phase in estimate["phases"]:
        typer.echo(f"\nphase {phase.pop('name')}")
        for name, value in phase.items():
            typer.echo(f"  {name:26s} {_readable(name, value)}")


def _expected(expected: Expected | None) -> str:
    return "" if expected is None else f" · about {duration(expected.seconds)}, {size(expected.bytes)}, {size(expected.memory)} of memory"


def _readable(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"\n  {'':26s} ".join(value)
    if isinstance(value, str):
        return value
    if name.startswith("share"):
        return f"{value:.0%}"
    if name.endswith("seconds"):
        return f"{value:,.0f} s ({value / 3600:,.1f} h)" if value >= 10 else f"{value:.3g} s"
    for unit, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:,.4g} {letter}{'B' if 'bytes' in name else ''}"
    return f"{value:,.4g}"
