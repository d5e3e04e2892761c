"""Prefect tasks for the steps of a run that Prefect started.

Prefect's cache is off: the store is the only cache, and a task that finds its artifact ends in the state `Cached`. A run from the command
line needs no Prefect; `reporter.py` reports the run's steps to a server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from puna.flows.engine.session import step_runners
from puna.flows.server.reporter import headline
from puna.stages.contract import Outcome, Stage, StageConfig
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:  # importing Prefect takes seconds that a run without it does not spend
    from prefect import State


def in_prefect() -> bool:
    context = sys.modules.get("prefect.context")
    return context is not None and context.FlowRunContext.get() is not None and context.TaskRunContext.get() is None


class Tasks:
    """The Prefect tasks of a run, and the artifacts that the tasks made or reused."""

    def __init__(self) -> None:
        self._made: dict[str, State[Any]] = {}

    def perform(
        self, stage: Stage, config: StageConfig, inputs: Mapping[str, list[Artifact]], label: str, work: Callable[[str], Outcome]
    ) -> Outcome:
        """Run `work` as a Prefect task named after the stage, once the inputs' tasks have ended. Return its outcome or raise its error."""
        from prefect import Task
        from prefect.cache_policies import NO_CACHE
        from prefect.context import TaskRunContext
        from prefect.states import Completed, Failed

        outcomes: list[Outcome] = []
        raised: list[PunaError] = []

        def run(config: dict[str, Any], inputs: dict[str, list[str]]) -> Any:
            context = TaskRunContext.get()
            assert context is not None
            try:
                outcome = work(str(context.task_run.id))
            except PunaError as error:  # the state carries its message, without a traceback
                raised.append(error)
                return Failed(message=str(error))
            outcomes.append(outcome)
            name = "Cached" if outcome.reused else None
            return Completed(name=name, message=f"{outcome.artifact.id}, {headline(outcome)}", data=outcome.artifact.id)

        task = Task(run, name=stage.name, description=stage.doc, task_run_name=label, cache_policy=NO_CACHE, persist_result=False)
        ids = {name: [item.id for item in items] for name, items in inputs.items()}
        after = [self._made[item.key] for items in inputs.values() for item in items if item.key in self._made]
        state = task(config.model_dump(mode="json"), ids, wait_for=after, return_state=True)
        if raised:
            raise raised[0]
        if not outcomes:
            state.result()
            raise PunaError(f"{label}: Prefect ended it in the state {state.name}: {state.message}")
        self._made[outcomes[0].artifact.key] = state
        return outcomes[0]


step_runners.append(lambda: Tasks().perform if in_prefect() else None)
