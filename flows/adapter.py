"""The one place where stages meet Prefect: a task, and a single-stage flow, out of any stage.

A task is given JSON (the configuration and references to artifacts) and returns a reference. Prefect's
cache is off: the store is the only cache, and a task that finds its artifact ends in the state `Cached`.
Outside a Prefect flow a step needs no server: the stage is performed where it is asked for.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field

from puna.flows.program import FLOWS, Output, Walk, values
from puna.flows.recipe import Step
from puna.flows.session import Session, current, session
from puna.flows.settings import DEFAULT_STORE
from puna.stages.contract import REGISTRY, Stage, StageConfig, Value, parse
from puna.stages.contract.declaration import InputSpec
from puna.stages.contract.executors import PROCESSES
from puna.storage import Artifact, PunaError, Store, runs

if TYPE_CHECKING:  # importing Prefect takes seconds that a run without a server does not spend
    from prefect import Flow, Task


class Performer(Walk):
    """Makes the steps of a flow in the session in progress; in a Prefect flow each is a task of it."""

    def make(self, step: Step, label: str, config: StageConfig | None, inputs: dict[str, list[Output]]) -> Output:
        """The artifact of a step."""
        assert config is not None  # only a trace of everything asks for steps without one
        made = perform(step.stage, config, label, values(step.stage, inputs))
        return Output(made.kind, (label,), (made,))

    def publish(self, name: str, output: Output) -> None:
        """Point the alias at the artifact; one that stands for several has no one alias."""
        if len(output.items) == 1 and isinstance(output.items[0], Artifact):
            _session().store.set_alias(name, output.items[0])

    def store(self) -> Store:
        """The session's store."""
        return _session().store

    def alone(self, name: str) -> contextlib.AbstractContextManager[bool]:
        """Hold a name of the store's against other processes; False where one of them holds it."""
        return _session().store.lock(name, wait=False)

    def tell(self, text: str) -> None:
        """On the terminal and in the run's log."""
        now = _session()
        now.console.say(text)
        now.store.record(now.run, runs.said(text))


def perform(stage: Stage, config: StageConfig, label: str, inputs: dict[str, Value]) -> Artifact:
    """Run `stage` as a step of the run in progress, shown as `label`; in a Prefect flow as its task. Returns its artifact."""
    now = _session()
    if not in_prefect():
        return now.perform(stage, config, inputs, label).artifact
    stage.check(inputs)
    references = {name: now.refer(value) for name, value in inputs.items()}
    run = task_of(stage.name).with_options(name=label, task_run_name=label)
    state = run(config.model_dump(mode="json"), references, label, return_state=True)
    return now.store.resolve(cast("str", state.result()))


def in_prefect() -> bool:
    """Whether a Prefect flow is running this code."""
    context = sys.modules.get("prefect.context")
    return context is not None and context.FlowRunContext.get() is not None


@cache
def task_of(name: str) -> Task[[dict[str, Any], dict[str, list[str]], str], Any]:
    """The Prefect task of the stage `name`."""
    from prefect import Task
    from prefect.cache_policies import NO_CACHE
    from prefect.states import Completed

    stage = REGISTRY[name]

    def work(config: dict[str, Any], inputs: dict[str, list[str]], label: str) -> Any:
        now = _session()
        given: dict[str, Value] = {}
        for spec in stage.inputs:
            items: list[Any] = [now.fetch(reference) for reference in inputs.get(spec.name, [])]
            given[spec.name] = items if spec.many else (items[0] if items else None)
        outcome = now.perform(stage, parse(stage.config, config, label), given, label)
        reference = f"{outcome.artifact.kind}/{outcome.artifact.key}"
        if outcome.reused:
            return Completed(name="Cached", message=f"reused {outcome.artifact.id}", data=reference)
        return reference

    return Task(work, name=name, description=stage.doc, cache_policy=NO_CACHE, persist_result=False, result_serializer="json")


@cache
def flow_of(name: str) -> Flow[Any, Any]:
    """A flow of the stage `name` alone: its form is the stage's configuration, its inputs are artifacts' ids."""
    stage = REGISTRY[name]

    def run(**parameters: Any) -> str:
        config = parameters.pop("config")
        with opened(parameters.pop("store"), name) as now:
            given: dict[str, Value] = {}
            for spec in stage.inputs:
                value = parameters.get(spec.name)
                texts = [value] if isinstance(value, str) else value or []
                items: list[Any] = [item for text in texts for item in now.named(text, spec.kind)]
                given[spec.name] = items if spec.many else (items[0] if items else None)
            return perform(stage, config, stage.name, given).id

    parameters = []
    for spec in stage.inputs:
        kind: Any = list[str] if spec.many else str
        empty = None if spec.optional else inspect.Parameter.empty
        taken: Any = kind | None if spec.optional else kind
        annotation = Annotated[taken, Field(description=_help(spec))]
        parameters.append(inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=empty))
    whole = not any(field.is_required() for field in stage.config.model_fields.values())
    default = stage.config() if whole else inspect.Parameter.empty
    parameters.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, annotation=stage.config, default=default))
    store = Annotated[str, Field(description="Folder of the artifacts")]
    parameters.append(inspect.Parameter("store", inspect.Parameter.KEYWORD_ONLY, annotation=store, default=DEFAULT_STORE))
    # Where a flow has the stage's name, the name is the flow's.
    return as_flow(f"stage_{name}" if name in FLOWS else name, run, stage.doc, inspect.Signature(parameters, return_annotation=str))


def _help(spec: InputSpec) -> str:
    if spec.kind == "external":
        return "Files or folders to read, [NAME=]URI each"
    what = f"Artifacts of kind {spec.kind}" if spec.many else f"An artifact of kind {spec.kind}"
    return f"{what}: {spec.kind}/ and the first digits of its key, or NAME@VERSION; `puna list {spec.kind}` shows them"


def as_flow(name: str, run: Callable[..., str], description: str | None, signature: inspect.Signature | None = None) -> Flow[Any, Any]:
    """`run` as the Prefect flow `name`; `signature`, where given, is what its form shows."""
    from prefect import Flow

    # A process that Prefect starts for a run imports the flow by this name.
    run.__module__, run.__name__ = "puna.flows.deployments", f"flow_{name}"
    run.__qualname__ = run.__name__
    shown = signature or inspect.signature(run, eval_str=True)
    # Prefect's forms take the parameters' descriptions from a docstring of this shape.
    lines = [f"    {p.name}: {_described(p.annotation)}" for p in shown.parameters.values()]
    run.__doc__ = "\n".join([description or name, "", "Args:", *lines])
    if signature is not None:
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {"return": str}
    return Flow(run, name=name, description=description, persist_result=False, result_serializer="json")


def _described(annotation: Any) -> str:
    """The description in an `Annotated[…, Field(description=…)]`, or the docstring of a class of settings."""
    found = next((item.description for item in getattr(annotation, "__metadata__", ()) if getattr(item, "description", None)), None)
    return found or (inspect.getdoc(annotation) or "").partition("\n")[0]


def _session() -> Session:
    found = current()
    if found is None:
        raise PunaError("no run is in progress: call this from a flow, inside `session(store, flow=…)`")
    return found


def opened(store: str, flow: str, executor: str = PROCESSES) -> contextlib.AbstractContextManager[Session]:
    """The session in progress, or a new one: a flow may be started by `puna run` or by a Prefect worker."""
    found = current()
    return contextlib.nullcontext(found) if found is not None else session(Store.open(store), flow=flow, executor=executor)
