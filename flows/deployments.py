"""Every flow as a Prefect flow with JSON parameters: `pipeline`, `curate`, `pretrain`, `align`, and one per stage.

`puna serve` offers them to a Prefect server, and `puna run` calls them where there is one, so both do the same.
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import Flow, serve
from prefect.types.entrypoint import EntrypointType
from pydantic import Field

from puna.flows import pipeline
from puna.flows.adapter import DEFAULT_STORE, as_flow, flow_of
from puna.flows.launch import whole
from puna.flows.recipe import FLOWS, load_stages


def _whole(name: str) -> Flow[Any, Any]:
    """The flow `name` of `puna.flows.pipeline` with parameters that a form can show."""

    def run(
        recipe: Annotated[str, Field(description="Name of a recipe, or a YAML file on the worker")] = "demo",
        changes: Annotated[list[str], Field(description="Changed fields, for example select.gopher_quality.min_words=60")] = [],  # noqa: B006
        inputs: Annotated[list[str], Field(description="Pages to read, [NAME=]URI each; none: the sample")] = [],  # noqa: B006
        store: Annotated[str, Field(description="Folder of the artifacts")] = DEFAULT_STORE,
    ) -> str:
        return whole(name, recipe, changes, inputs, store)

    return as_flow(name, run, getattr(pipeline, name).__doc__)


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
