"""The command `puna predict`: the loss, shape and tokens that a budget buys, and what became of earlier forecasts."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from puna.flows.cli.inspect import JsonOption, ProjectOption, StoreOption, print_rows
from puna.flows.engine.defaults import DEFAULT_STORE, prepare
from puna.flows.html.markup import short
from puna.storage import Artifact, PunaError, Store
from puna.storage.catalog import query

app = typer.Typer()


@app.command()
def predict(
    flops: Annotated[float | None, typer.Option(help="Budget in floating-point operations")] = None,
    hours: Annotated[float | None, typer.Option(help="Budget in hours of this CPU, or of --gpu")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU of --hours (H100, H200, A100, …), in bf16")] = None,
    law: Annotated[str, typer.Option(metavar="ID", help="Law of the loss, made by the stage `law` from a ladder")] = "law@latest",
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of a row (default: the ladder's)")] = None,
    outcomes: Annotated[bool, typer.Option("--outcomes", help="Show earlier forecasts beside what was measured later")] = False,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forecast the loss that a budget of training buys, with its 95 % interval, and the shape and tokens that reach it.

    The forecast is kept in the store, with a recipe that trains it; --outcomes shows each beside the loss of a pretraining of that size on
    the same tokens.
    """
    opened = Store.existing(store, project)
    if outcomes:
        if flops or hours or gpu:
            raise PunaError("--outcomes shows earlier forecasts: leave --flops, --hours and --gpu out")
        rows = query(opened, "select * from forecasts").to_pylist()
        if not rows and not as_json:
            return typer.echo(f"{opened.uri} holds no forecast; `puna predict --flops N` makes one")
        return print_rows(rows, as_json)
    prepare(opened.root)
    made = _forecast(opened, {"flops": flops, "hours": hours, "gpu": gpu, "sequence_length": sequence_length}, law)
    metrics: dict[str, Any] = made.manifest.metrics
    if as_json:
        return typer.echo(json.dumps({"id": made.id, "recipe": str(made.path("recipe.yaml")), **metrics}))
    low, high = metrics["predicted_loss_low"], metrics["predicted_loss_high"]
    typer.echo(f"loss      {metrics['predicted_loss']:.3f} nats per token ({low:.3f} to {high:.3f})")
    typer.echo(f"shape     {metrics['shape']}, {short(metrics['parameters'])} parameters that multiply every token")
    typer.echo(f"tokens    {short(metrics['tokens'])}")
    typer.echo(f"compute   {metrics['flops']:.3g} operations, {metrics['extrapolation']:.3g} times the ladder's largest run")
    typer.echo(f"recipe    {made.path('recipe.yaml')}")
    typer.echo(f"kept as   {made.id}")


def _forecast(store: Store, budget: dict[str, Any], law: str) -> Artifact:
    from pydantic import ValidationError

    from puna.stages.contract import execute
    from puna.stages.experiments.choose_size import ChooseSizeConfig, choose_size

    try:
        config = ChooseSizeConfig(**budget)
    except ValidationError as error:
        raise PunaError(f"predict: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    return execute(choose_size, config, {"law": store.resolve(law)}, store)
