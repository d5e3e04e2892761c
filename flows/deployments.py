"""Every flow as a Prefect flow with JSON parameters: `pipeline`, `curate`, `base`, `align`, and one per stage.

`puna run` calls them, and `puna serve` offers them to a Prefect server, so both do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from prefect import Flow, serve
from prefect.types.entrypoint import EntrypointType
from pydantic import Field

from puna.flows import pipeline
from puna.flows.adapter import DEFAULT_STORE, flow_of, opened
from puna.flows.closing import closing_table
from puna.flows.launch import pages
from puna.flows.recipe import FLOWS, Recipe, load, load_stages
from puna.stages.contract import External


def _whole(name: str) -> Flow[Any, Any]:
    """The flow `name` of `puna.flows.pipeline` with parameters that a form can show."""
    dag: Callable[[Recipe, list[External]], Any] = getattr(pipeline, name)

    def run(
        recipe: Annotated[str, Field(description="Name of a recipe, or a YAML file on the worker")] = "demo",
        changes: Annotated[list[str], Field(description="Changed fields, for example select.gopher_quality.min_words=60")] = [],  # noqa: B006
        inputs: Annotated[list[str], Field(description="Pages to read, [NAME=]URI each; none: the sample")] = [],  # noqa: B006
        store: Annotated[str, Field(description="Folder of the artifacts")] = DEFAULT_STORE,
    ) -> str:
        config = load(recipe, changes)
        with opened(store, name) as now:
            dag(config, now.inputs if now.inputs is not None else pages(inputs, now.store, quiet=True))
            closing_table(now)
            return str(now.run)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = dag.__doc__
    return Flow(run, name=name, description=dag.__doc__, persist_result=False, result_serializer="json")


WHOLE = {name: _whole(name) for name in FLOWS}
STAGES = {name: flow_of(name) for name in load_stages()}
globals().update({f"stage_{name}": flow for name, flow in STAGES.items()} | {f"flow_{name}": flow for name, flow in WHOLE.items()})


def serve_all(store: str) -> None:
    """Offer every flow and stage to the Prefect server, and run what is asked for on `store` until stopped."""
    found = [*((f"flow_{n}", f) for n, f in WHOLE.items()), *((f"stage_{n}", f) for n, f in STAGES.items())]
    deployments: list[Any] = [
        flow.to_deployment(
            name=attribute.replace("_", "-", 1),
            tags=[attribute.split("_")[0]],
            parameters={"store": store},
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        for attribute, flow in found
    ]
    serve(*deployments)
